"""The trained module: trunk and head of a model. It maps a pack to the numbers that its head computes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tandem.model.architecture import architecture_of, trunk_of, windows_of
from tandem.model.attention.pack_attention import AttentionKind, PackMask, make_mask
from tandem.model.head import Head
from tandem.model.precision.working_copy import GradientSums, WorkingCopy
from tandem.model.transfer import to_device
from tandem.packing.layout import FILLER, Pack
from tandem.packing.packer import BLOCK

SCORED_MULTIPLE = 128


@dataclass(frozen=True, slots=True)
class PackInputs:
    """A micro-batch on its device. Scored tokens are padded, so that few shapes occur and memory is reused."""

    token_ids: Tensor  # [rows, length]
    position_ids: Tensor  # [rows, length]
    mask: PackMask | Tensor  # the rule of attention; unpacked, [rows, length] of which positions are real
    predicting: Tensor  # [scored, padded]
    target_ids: Tensor  # [scored, padded]
    completion: Tensor  # [scored, padded]; padding belongs to one completion past the last
    completion_lengths: Tensor  # [completions]
    columns: dict[str, Tensor]  # values given in the data, by name: [completions] or [preferences]
    winners: Tensor  # [pairs]
    losers: Tensor  # [pairs]
    best: Tensor  # [preferences]
    preference: Tensor  # [completions]
    num_scored: int  # without padding


class Policy(nn.Module):
    """A transformers model with a head, which today computes the log-probability of every scored token of a pack."""

    def __init__(self, model: Any, *, packed: bool, attention: AttentionKind, head: Head):
        super().__init__()
        self.model = model
        self.architecture = architecture_of(model.config, type(model))
        self.packed = packed
        self.attention: AttentionKind = attention  # how attention inside packs is computed
        self.head = head
        self.windows = windows_of(model)
        self.block = BLOCK  # block size of FlexAttention
        self.working_copy: WorkingCopy | None = None  # bfloat16 copies that are used instead of the weights
        self.gradient_sums: GradientSums | None = None  # float32 gradients of bfloat16 weights

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Forward and backward passes go inside this context; weights must not change in it.

        If the policy has working copies, they are cast once for the whole context. Gradients are complete when it ends.
        """
        with ExitStack() as stack:
            for one in (self.working_copy, self.gradient_sums):
                if one is not None:
                    stack.enter_context(one.held())
            yield

    def inputs(self, pack: Pack, device: torch.device) -> PackInputs:
        """Bring a pack to the device."""
        num_scored = len(pack.target_ids)
        padding = -num_scored % SCORED_MULTIPLE if num_scored else SCORED_MULTIPLE
        num_completions = len(pack.completion_lengths)
        completion = np.repeat(np.arange(num_completions), pack.completion_lengths)

        def put(array: Any, pad: int | None = None) -> Tensor:
            return to_device(array if pad is None else np.pad(array, (0, padding), constant_values=pad), device)

        mask = make_mask(pack, self.windows, device, self.attention, self.block) if self.packed else put(_real(pack))
        return PackInputs(
            token_ids=put(pack.token_ids),
            position_ids=put(pack.position_ids),
            mask=mask,
            predicting=put(pack.predicting, pad=0),
            target_ids=put(pack.target_ids, pad=0),
            completion=put(completion, pad=num_completions),
            completion_lengths=put(pack.completion_lengths),
            columns={name: put(values) for name, values in pack.columns.items()},
            winners=put(pack.winners),
            losers=put(pack.losers),
            best=put(pack.best),
            preference=put(pack.owner),
            num_scored=num_scored,
        )

    def forward(self, inputs: PackInputs, *, squares: bool = False) -> Tensor:
        """Return the head's float32 numbers: log-probabilities, [scored, padded]. Those of padding must get no gradient.

        squares: see `LanguageModelHead.compute`.
        """
        if any(one is not None and not one.is_held for one in (self.working_copy, self.gradient_sums)):
            if torch.is_grad_enabled():
                raise RuntimeError("forward and backward must both run inside the same `computing` context.")
            with self.computing():
                return self.forward(inputs, squares=squares)
        hidden = self._trunk(inputs).flatten(0, 1)[self.head.positions(inputs)]
        return self.head.compute(self.model, hidden, inputs, squares=squares)

    def _trunk(self, inputs: PackInputs) -> Tensor:
        # The pack's mask replaces the one that transformers would build.
        arguments = {"attention_mask": None, "pack": inputs.mask} if self.packed else {"attention_mask": inputs.mask}
        out = trunk_of(self.model)(
            input_ids=inputs.token_ids, position_ids=inputs.position_ids, use_cache=False, **arguments
        )
        return out.last_hidden_state

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The names and parameters that training updates: all of them, or only the adapters."""
        return ((name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad)

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")
    def generate(self, prompt: Tensor, *, max_new_tokens: int, end: int) -> Tensor:
        """Generate a completion greedily with the model's own forward pass. `end` is the id of the end token."""
        from transformers import GenerationConfig

        own = self.model.config._attn_implementation
        self.model.set_attn_implementation("eager")
        settings = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=end, pad_token_id=end)
        try:
            with self.computing():
                ids = self.model.generate(
                    prompt[None], attention_mask=torch.ones_like(prompt[None]), generation_config=settings
                )
        finally:
            self.model.set_attn_implementation(own)
        return ids[0, len(prompt) :]

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")  # every sequence has a different length: compiling would take minutes
    def plain_logps(self, prompt: Tensor, completion: Tensor, *, filler: int = 0, perturbed: bool = False) -> Tensor:
        """Compute a completion's token log-probabilities with the model's own eager forward, one sequence at a time.

        The audit compares packs with these. `filler` tokens after the sequence change only the rounding, since no position sees
        a later one. `perturbed` shifts every number of the embeddings by one rounding step.
        """
        own = self.model.config._attn_implementation
        self.model.set_attn_implementation("eager")
        hooks = []
        if perturbed:
            embeddings = self.model.get_input_embeddings()
            hooks.append(embeddings.register_forward_hook(lambda module, inputs, output: _perturb(output)))
        try:
            with self.computing():
                return self.head.plain_values(self.model, prompt, completion, filler=filler)
        finally:
            self.model.set_attn_implementation(own)
            for hook in hooks:
                hook.remove()


def _perturb(values: Tensor) -> Tensor:
    """Shift each number up or down by one rounding step of its dtype; the directions are the same in every call."""
    signs = torch.randint(2, values.shape, generator=torch.Generator().manual_seed(0)).mul_(2).sub_(1).to(values.device)
    return (values.double() * (1 + signs * (torch.finfo(values.dtype).eps / 2))).to(values.dtype)


def _real(pack: Pack) -> NDArray[np.bool_]:
    """Mark the real positions of unpacked rows. A row of filler only counts as real: attention to nothing would give NaN."""
    real = pack.tree != FILLER
    return real | ~real.any(axis=1, keepdims=True)
