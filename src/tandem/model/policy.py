"""The module that is trained: the trunk and the head of a model. Its forward pass computes log-probabilities for a pack."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tandem.model.architecture import architecture_of, trunk_of, windows_of
from tandem.model.attention.pack_attention import AttentionKind, PackMask, make_mask
from tandem.model.distributed.context import Context, gather_values
from tandem.model.head import Head
from tandem.model.lora.magnitudes import Magnitudes
from tandem.model.lora.rows import TrainedRows
from tandem.model.precision.rounding import ShardCasts
from tandem.model.precision.working_copy import GradientSums, WorkingCopy
from tandem.model.recurrent.layers import RecurrentLayers, replace_functions
from tandem.model.router_balance import BalanceMode, RouterBalance, token_weights
from tandem.model.transfer import to_device
from tandem.packing.layout import FILLER, Pack
from tandem.packing.packer import BLOCK

SCORED_MULTIPLE = 128


@dataclass(frozen=True, slots=True)
class PackInputs:
    """A micro-batch on its device.

    Scored tokens are padded to a multiple of 128, so that few shapes occur and memory is reused.
    """

    token_ids: Tensor  # [rows, length]; with context parallelism, this rank's columns
    position_ids: Tensor  # like token_ids
    mask: PackMask | Tensor  # attention masks; if unpacked, [rows, length] bool, True for tokens and False for filler
    predicting: Tensor  # [scored], padded; with context parallelism, those in this rank's columns
    target_ids: Tensor  # like predicting
    completion: Tensor  # [scored], padded; index of the completion, or the number of completions for padding
    completion_lengths: Tensor  # [completions]
    columns: dict[str, Tensor]  # values given in the data, by name: [completions] or [preferences]
    winners: Tensor  # [pairs]
    losers: Tensor  # [pairs]
    best: Tensor  # [preferences]
    preference: Tensor  # [completions]
    num_scored: int  # without padding
    token_weights: Tensor | None = None  # [rows * length], for the load-balancing loss of routers
    places: Tensor | None = None  # with context parallelism, the indices of this rank's scored tokens among all of them

    @property
    def num_values(self) -> int:
        """The number of scored tokens of all ranks, with padding."""
        return len(self.completion)


class Policy(nn.Module):
    """A transformers model with a head. The head computes the log-probability of every scored token of a pack."""

    def __init__(self, model: Any, *, packed: bool, attention: AttentionKind, head: Head):
        super().__init__()
        self.model = model
        self.architecture = architecture_of(model.config, type(model))
        self.packed = packed
        self.attention: AttentionKind = attention  # how attention inside packs is computed
        self.head = head
        self.windows = windows_of(model)
        # Layers that carry a state along a row and need the segments of a pack; None if there are none, or without packs.
        self.recurrent = RecurrentLayers(model) if packed and self.architecture.scan else None
        if self.architecture.scan and not packed:
            replace_functions(model)  # so that kernels are checked before they are used
        self.block = BLOCK  # block size of FlexAttention
        self.magnitudes: Magnitudes | None = None  # row lengths of DoRA layers
        self.rows: TrainedRows | None = None  # rows of the embeddings that are trained alongside adapters
        self.working_copy: WorkingCopy | None = None  # bfloat16 copies that are used instead of the weights
        self.gradient_sums: GradientSums | None = None  # float32 gradients of bfloat16 weights
        self.shard_casts: ShardCasts | None = None  # bfloat16 copies of this rank's shards of the weights
        # Whether layers keep the weights they gathered from other ranks as long as the weights do not change.
        self.keeps_gathered = False
        # Whether gradients are summed over ranks only in the last backward pass of a step.
        self.reduces_once = False
        self.context: Context | None = None  # the ranks that compute the same rows; None: only this one
        self.balance: RouterBalance | None = None  # the load-balancing loss of routers; None: it is off
        # Whether passes without gradients use the compiled layers of training passes, so that layers are compiled only once.
        self.shares_graphs = False

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Forward and backward passes must run inside this context. The weights must not change inside it.

        If the policy has bfloat16 copies of its weights, they are cast once, when the context is entered. Gradients are complete
        when the context ends.
        """
        with ExitStack() as stack:
            # Magnitudes and rows first: they are computed from the weights, and written to them, not to copies.
            for one in (self.magnitudes, self.rows, self.working_copy, self.gradient_sums, self.shard_casts):
                if one is not None:
                    stack.enter_context(one.held())
            yield
        self._free_gathered()

    def _free_gathered(self) -> None:
        """Free weights that were gathered from other ranks. After an update they would be outdated."""
        for module in self.modules() if self.keeps_gathered else ():
            if isinstance(module, FSDPModule):
                module.reshard()

    def reduce_gradients(self, *, is_last: bool) -> None:
        """Announce a backward pass. `is_last`: whether it is the last one before an update.

        With `reduces_once`, other passes add gradients to float32 sums of this rank alone.
        """
        if self.reduces_once and isinstance(self, FSDPModule):
            self.set_requires_gradient_sync(is_last)

    def inputs(self, pack: Pack, device: torch.device) -> PackInputs:
        """Copy a pack to the device, and make its attention masks."""
        num_completions = len(pack.completion_lengths)
        completion = np.repeat(np.arange(num_completions), pack.completion_lengths)

        def put(array: Any, pad: int | None = None) -> Tensor:
            padding = max(SCORED_MULTIPLE, -(-len(array) // SCORED_MULTIPLE) * SCORED_MULTIPLE) - len(array)
            return to_device(array if pad is None else np.pad(array, (0, padding), constant_values=pad), device)

        if self.packed:
            mask = make_mask(pack, self.windows, device, self.attention, self.block, self.context)
            mask.segments = None if self.recurrent is None else self.recurrent.segments(pack, device)
        else:
            mask = put(_real(pack))
        token_ids, position_ids = pack.token_ids, pack.position_ids
        predicting, target_ids, places = pack.predicting, pack.target_ids, None
        if self.context is not None:
            token_ids, position_ids = self.context.own_columns(token_ids), self.context.own_columns(position_ids)
            places, predicting = self.context.own_positions(predicting, pack.token_ids.shape[1])
            target_ids = target_ids[places]
        return PackInputs(
            token_ids=put(token_ids),
            position_ids=put(position_ids),
            mask=mask,
            predicting=put(predicting, pad=0),
            target_ids=put(target_ids, pad=0),
            completion=put(completion, pad=num_completions),
            completion_lengths=put(pack.completion_lengths),
            columns={name: put(values) for name, values in pack.columns.items()},
            winners=put(pack.winners),
            losers=put(pack.losers),
            best=put(pack.best),
            preference=put(pack.owner),
            num_scored=len(pack.target_ids),
            token_weights=None if self.balance is None else token_weights(pack, device),
            places=None if places is None else put(places),
        )

    def forward(self, inputs: PackInputs, *, squares: bool = False) -> Tensor:
        """Return the head's numbers in float32: the log-probabilities of the scored tokens, [scored], with padding at the end.

        The padding must not receive a gradient. `squares`: see `LanguageModelHead.compute`.
        """
        needed = (self.magnitudes, self.rows, self.working_copy, self.gradient_sums)
        if any(one is not None and not one.is_held for one in needed):
            if torch.is_grad_enabled():
                raise RuntimeError("forward and backward must both run inside the same `computing` context.")
            with self.computing():
                return self.forward(inputs, squares=squares)
        hidden = self._hidden(inputs).flatten(0, 1)[self.head.positions(inputs)]
        values = self.head.compute(self.model, hidden, inputs, squares=squares)
        if self.context is None:
            return values
        assert inputs.places is not None
        return gather_values(values, inputs.places, inputs.num_values, self.context)

    def _hidden(self, inputs: PackInputs) -> Tensor:
        """Return the trunk's hidden states."""
        mode = "off" if self.balance is None else self.balance.mode
        if not self.shares_graphs or torch.is_grad_enabled() or mode == "count":
            return self._trunk(inputs, mode)
        # With gradients enabled, so that layers are the same as in training, but without saving anything for a backward pass.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_forget, _refuse_backward):
            return self._trunk(inputs, "train").detach()

    def _trunk(self, inputs: PackInputs, mode: BalanceMode) -> Tensor:
        if self.balance is not None:
            self.balance.prepare(mode, inputs.token_weights)
        # The pack's mask replaces the one that transformers would build.
        arguments = {"attention_mask": None, "pack": inputs.mask} if self.packed else {"attention_mask": inputs.mask}
        out = trunk_of(self.model)(
            input_ids=inputs.token_ids, position_ids=inputs.position_ids, use_cache=False, **arguments
        )
        return out.last_hidden_state

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the names and parameters that training updates: all parameters, or only those of the adapters."""
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
        """Return the token log-probabilities of one completion, computed with the model's own eager forward pass.

        The audit compares packs with the result. `filler`: how many tokens to add after the sequence; they change only the
        rounding, because no token sees later tokens. `perturbed`: shift every number of the embeddings by one rounding step.
        """
        own = self.model.config._attn_implementation
        self.model.set_attn_implementation("eager")
        hooks = []
        if perturbed:
            embeddings = self.model.get_input_embeddings()
            hooks.append(embeddings.register_forward_hook(lambda module, inputs, output: perturb(output)))
        try:
            with self.computing():
                return self.head.plain_values(self.model, prompt, completion, filler=filler)
        finally:
            self.model.set_attn_implementation(own)
            for hook in hooks:
                hook.remove()


def _forget(saved: Tensor) -> None:
    return None


def _refuse_backward(saved: None) -> Tensor:
    raise RuntimeError("a pass without gradients has no backward pass")


def perturb(values: Tensor) -> Tensor:
    """Shift each number up or down by one rounding step of its dtype. The directions are random, but the same in every call."""
    signs = torch.randint(2, values.shape, generator=torch.Generator().manual_seed(0)).mul_(2).sub_(1).to(values.device)
    return (values.double() * (1 + signs * (torch.finfo(values.dtype).eps / 2))).to(values.dtype)


def _real(pack: Pack) -> NDArray[np.bool_]:
    """Return which positions of unpacked rows hold tokens, not filler: [rows, length] bool.

    In a row that holds only filler, all positions are True, because attention to nothing would give NaN.
    """
    real = pack.tree != FILLER
    return real | ~real.any(axis=1, keepdims=True)
