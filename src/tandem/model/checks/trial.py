"""Runs a few tokens through a newly loaded model. Refuses a model that fails, or whose results would be wrong in training."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from transformers import __version__ as transformers_version

from tandem.data.text.tokens import TokenizedPreference
from tandem.errors import ConfigError, TandemError, is_lost_rank
from tandem.model.attention.pack_attention import record_calls
from tandem.model.files.source import ModelSource, describe
from tandem.model.policy import PackInputs, Policy
from tandem.packing.layout import Pack, lay_out
from tandem.packing.packer import BLOCK

# How far, in nats per token, a different last token may change the log-probabilities before it. They change by rounding
# where the tokens are routed to experts differently.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
TOLERANCE_16_BIT = 0.1


def check_forward(
    policy: Policy, source: ModelSource, device: torch.device, *, longest: int, is_sharded: bool = False
) -> None:
    """Raise ConfigError if the model fails, if a token sees later tokens, or if layers would lose their sliding windows in packs.

    `longest`: maximum length of a sequence, in tokens. `is_sharded`: whether the weights are sharded over ranks. Then only the
    forward pass is tried: FSDP would not notice that parameters need gradients afterwards.
    """
    with _as_config_error(policy, source):
        with record_calls() if policy.packed else nullcontext() as windows:
            inputs = policy.inputs(_tiny_pack(policy), device)
            if is_sharded:
                with torch.no_grad():
                    policy(inputs)
            else:
                _forward_and_backward(policy, inputs)
        if windows is not None:
            _check_windows(policy, source, windows, longest)
        _check_causal(policy, source, device)


def _forward_and_backward(policy: Policy, inputs: PackInputs) -> None:
    """Run a forward and a backward pass as in training, but compute gradients only down to the output of the embeddings.

    Gradients of the weights would need as much memory as the weights.
    """
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    embeddings = policy.model.get_input_embeddings()
    # A clone, because the next layer may add to it in place.
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
    """Whether `error` means that the device or the host ran out of memory. training/memory.py turns such an error into advice."""
    # The message of the CPU allocator contains "can't allocate" or "not enough memory".
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator: " in str(error)


@contextmanager
def _as_config_error(policy: Policy, source: ModelSource) -> Iterator[None]:
    """Turn any error that the model raises inside this context into a ConfigError. Other causes are raised unchanged:

    no memory left, or another rank that ended.
    """
    try:
        yield
    except ConfigError:
        raise
    except TandemError as error:  # raised by attention in a pack, which does not know the name of the model
        raise ConfigError(f"{source.place}: {error}") from None
    except Exception as error:
        if is_out_of_memory(error) or is_lost_rank(error):
            raise
        way_out = "Try policy.packing.mode=none." if policy.packed else "Choose another model."
        raise ConfigError(
            f"{source.place}: running a few tokens through {type(policy.model).__name__} of transformers "
            f"{transformers_version} failed ({describe(error)}). {way_out}"
        ) from error


def _check_windows(policy: Policy, source: ModelSource, windows: list[int | None], longest: int) -> None:
    """Raise ConfigError if a model applies its sliding window only through transformers' mask, which packs replace.

    In a pack such a window would have no effect. `longest`: maximum length of a sequence. If it does not
    exceed the window, nothing is checked.
    """
    window, layers = policy.architecture.window, policy.architecture.layers
    if window is None or window >= longest:
        return
    expected = len(windows) if layers is None else layers.count("window")
    found = sum(window is not None for window in windows)
    if found < expected:
        raise ConfigError(
            f"{source.place}: only {found} of {expected} layers pass their window of {window} tokens to attention, so in a "
            f"pack the others would see further back. Set policy.max_total_sequence_length={window} or less, or "
            "policy.packing.mode=none."
        )


def _check_causal(policy: Policy, source: ModelSource, device: torch.device) -> None:
    """Raise ConfigError if changing the last token changes the log-probabilities of earlier tokens."""
    prompt, completion = (torch.arange(start, start + 4, device=device) for start in (3, 7))
    other = completion.clone()
    other[-1] += 1
    before = [policy.plain_logps(prompt, one)[:-1] for one in (completion, other)]
    difference = float((before[0] - before[1]).abs().mean())
    if difference > TOLERANCE.get(policy.model.dtype, TOLERANCE_16_BIT):
        raise ConfigError(
            f"{source.place}: not a causal language model: a later token changes the log-probabilities of earlier ones by "
            f"{difference:.2g} nats. Choose a model that generates text."
        )


def _tiny_pack(policy: Policy) -> Pack:
    """Return a pack of two preferences. If the policy is trained unpacked, every sequence has its own row."""

    def preference(start: int) -> TokenizedPreference:
        # prompt of 3, completions of 2 and 3
        prompt, chosen, rejected = np.split(np.arange(start, start + 8, dtype=np.int32), [3, 5])
        return TokenizedPreference(prompt, (chosen, rejected), ((0, 1),), "trial")

    # With varlen attention, prompts are not shared.
    arrangement = ("repeated" if policy.attention == "varlen" else "shared") if policy.packed else "separate"
    length = BLOCK if policy.packed and policy.attention == "flex" else 32
    return lay_out([0, 1], [preference(3), preference(11)], length=length, arrangement=arrangement)
