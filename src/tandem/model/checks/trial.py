"""A few tokens through a model that was just loaded: whatever it cannot do is refused here, in one sentence."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from transformers import __version__ as transformers_version

from tandem.data.text.tokens import TokenizedPreference
from tandem.errors import ConfigError, TandemError
from tandem.model.attention.pack_attention import counted_calls
from tandem.model.files.source import ModelSource, described
from tandem.model.policy import PackInputs, Policy
from tandem.packing.layout import Pack, lay_out
from tandem.packing.packer import BLOCK

# Nats a token that another last token may change those before it by: rounding, where experts get other tokens.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
TOLERANCE_16_BIT = 0.1


def check_forward(policy: Policy, source: ModelSource, device: torch.device, *, longest: int) -> None:
    """Refuse a model that fails in a forward, that sees later tokens, or whose layers lose their sliding windows.

    longest: tokens that a sequence may have.
    """
    with _refused(policy, source):
        with counted_calls() if policy.packed else nullcontext() as windows:
            _forward_and_backward(policy, policy.inputs(_tiny_pack(policy), device))
        if windows is not None:
            _check_windows(policy, source, windows, longest)
        _check_causal(policy, source, device)


def _forward_and_backward(policy: Policy, inputs: PackInputs) -> None:
    """As in training, but gradients end at the embeddings' output: those of weights would take as much memory as they do."""
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    embeddings = policy.model.get_input_embeddings()
    # A copy, as what follows may add to it in place.
    hook = embeddings.register_forward_hook(lambda module, given, output: output.requires_grad_().clone())
    policy.requires_grad_(False)
    try:
        logps = policy(inputs)
        if logps.requires_grad:
            logps.sum().backward()
    finally:
        hook.remove()
        for parameter in trained:
            parameter.requires_grad_(True)


def is_out_of_memory(error: Exception) -> bool:
    """Of the device, or of the host: train/memory.py says what to do about it."""
    # The CPU's says "can't allocate", or "not enough memory"
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator: " in str(error)


@contextmanager
def _refused(policy: Policy, source: ModelSource) -> Iterator[None]:
    """What a model raises that has not been met before, as a refusal."""
    try:
        yield
    except ConfigError:
        raise
    except TandemError as error:  # of attention inside a pack, which does not know whose it is
        raise ConfigError(f"{source.key} = {source.name}: {error}") from None
    except Exception as error:
        if is_out_of_memory(error):
            raise
        way_out = "Try policy.packing.mode=none." if policy.packed else "Choose another model."
        raise ConfigError(
            f"{source.key} = {source.name}: a few tokens through {type(policy.model).__name__} of transformers "
            f"{transformers_version} end in {described(error)}. {way_out}"
        ) from error


def _check_windows(policy: Policy, source: ModelSource, windows: list[int | None], longest: int) -> None:
    """A window that only transformers' own mask has would be lost in a pack, and no short sequence shows it."""
    config = policy.model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if not isinstance(window, int) or window >= longest:
        return
    kinds = getattr(config, "layer_types", None)
    expected = sum("sliding" in kind for kind in kinds) if kinds else len(windows)
    found = sum(window is not None for window in windows)
    if found < expected:
        raise ConfigError(
            f"{source.key} = {source.name}: {found} of {expected} layers pass their window of {window} tokens on to attention, "
            f"so in a pack the others would see further back. Set policy.max_total_sequence_length={window} or less, or "
            "policy.packing.mode=none."
        )


def _check_causal(policy: Policy, source: ModelSource, device: torch.device) -> None:
    """Another last token must change nothing before it."""
    prompt, completion = (torch.arange(start, start + 4, device=device) for start in (3, 7))
    other = completion.clone()
    other[-1] += 1
    before = [policy.plain_logps(prompt, one)[:-1] for one in (completion, other)]
    difference = float((before[0] - before[1]).abs().mean())
    if difference > TOLERANCE.get(policy.model.dtype, TOLERANCE_16_BIT):
        hint = " Its configuration says is_decoder=false." if _is_encoder(policy) else ""
        raise ConfigError(
            f"{source.key} = {source.name}: not a causal language model: a later token changes the log-probabilities of those "
            f"before it by {difference:.2g} nats.{hint} Choose a model that continues text."
        )


def _is_encoder(policy: Policy) -> bool:
    return getattr(policy.model.config.get_text_config(), "is_decoder", None) is False


def _tiny_pack(policy: Policy) -> Pack:
    """Two preferences: in a row, or each sequence in a row of its own."""

    def preference(start: int) -> TokenizedPreference:
        # prompt of 3, completions of 2 and 3
        prompt, chosen, rejected = np.split(np.arange(start, start + 8, dtype=np.int32), [3, 5])
        return TokenizedPreference(prompt, (chosen, rejected), ((0, 1),), "trial")

    # Runs of tokens share no prompts.
    arrangement = ("repeated" if policy.attention == "varlen" else "shared") if policy.packed else "separate"
    length = BLOCK if policy.packed and policy.attention == "flex" else 32
    return lay_out([0, 1], [preference(3), preference(11)], length=length, arrangement=arrangement)
