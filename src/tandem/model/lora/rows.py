"""Trained rows of the embeddings: a parameter with one row for each trained token (lora/tokens.py).

The rows are written into the frozen weight of the embeddings before each step, so everything that reads this weight computes with
them: the embeddings, a head that is the same weight, and transformers' own forward pass. No pass copies the weight, as peft does.
Gradients reach the rows on two ways: from the embeddings (below) and from a tied head (model/head.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from tandem.model.distributed.shards import local_shard, own_rows
from tandem.model.precision.rounding import hash_int32, hash_start, salt_of, to_bfloat16

ROWS, IDS = "trained_rows", "trained_ids"  # names of the parameter and of the ids, in the module of the embeddings


def add_rows(model: Any, ids: tuple[int, ...]) -> None:
    """Add the parameter to the embeddings of a model. It has no values yet. `ids`: of the trained tokens, ascending."""
    embeddings = model.get_input_embeddings()
    device = "cpu" if embeddings.weight.is_meta else embeddings.weight.device
    rows = torch.zeros(len(ids), embeddings.embedding_dim, device=device)
    embeddings.register_parameter(ROWS, nn.Parameter(rows))
    embeddings.register_buffer(IDS, torch.tensor(ids, device=device), persistent=False)
    embeddings.register_forward_hook(_pass_gradient)


def is_of_rows(name: str) -> bool:
    """Whether a parameter, given by name, is that of trained rows."""
    return name.endswith(f".{ROWS}")


def _pass_gradient(embeddings: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """A forward hook that leaves the output as it is, and adds its gradient to that of the rows."""
    rows = getattr(embeddings, ROWS)
    if not (torch.is_grad_enabled() and rows.requires_grad):
        return output
    scale = getattr(embeddings, "embed_scale", None)  # of Gemma 3
    factor = scale.to(output.dtype).float() if isinstance(scale, Tensor) else scale
    result: Any = _ToRows.apply(output, rows, _row_of(getattr(embeddings, IDS), inputs[0]), factor)
    return result  # type: ignore[no-any-return]


def _row_of(ids: Tensor, tokens: Tensor) -> Tensor:
    """Return the row of every token. For tokens that are not trained, it is the number of rows.

    ids 5 and 7, tokens 7 6 5 -> 1 2 0
    """
    row = torch.searchsorted(ids, tokens).clamp_(max=len(ids) - 1)
    return torch.where(ids[row] == tokens, row, len(ids))


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, rows: Tensor, row: Tensor, factor: Tensor | float | None) -> Tensor:
        ctx.save_for_backward(row)
        ctx.shape, ctx.dtype, ctx.factor = rows.shape, rows.dtype, factor
        ctx.mark_dirty(output)  # not a copy, because the next layer may add to it in place
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (row,) = ctx.saved_tensors
        num = ctx.shape[0]
        grad = grads[0].float() if ctx.factor is None else grads[0].float() * ctx.factor
        # One row more, whose gradient is dropped. The sum is float32: a token may occur many times.
        total = torch.ops.aten.embedding_dense_backward(grad, row, num + 1, num, False)[:num]
        return None, total.to(ctx.dtype), None, None


class TrainedRows:
    """Writes trained rows into the weight of the embeddings when the context `held` begins. They must not change inside it."""

    def __init__(self, model: Any):
        embeddings = model.get_input_embeddings()
        self.is_held = False
        self.rows: nn.Parameter = getattr(embeddings, ROWS)
        self.weight: nn.Parameter = embeddings.weight
        # The first name of a tied weight, as in exports.
        self.name = next(name for name, parameter in model.named_parameters() if parameter is self.weight)
        self.ids: Tensor = getattr(embeddings, IDS)
        own = own_rows(self.weight) if isinstance(self.weight, DTensor) else range(self.weight.shape[0])
        ids = self.ids.tolist()
        self._mine = slice(sum(one < own.start for one in ids), sum(one < own.stop for one in ids))
        self._places = self.ids[self._mine] - own.start  # in this rank's shard of the weight
        self._bits = self._random_bits() if self.weight.dtype == torch.bfloat16 else None

    def _random_bits(self) -> Tensor:
        """Return the random bits with which an export rounds the same rows of the weight, so that both are equal."""
        width = self.weight.shape[1]
        index = self.ids[self._mine, None] * width + torch.arange(width, device=self.ids.device)
        start = index + hash_start(0, salt_of(self.name))
        return hash_int32(((start + 2**31) % 2**32 - 2**31).to(torch.int32))

    @torch.no_grad()
    def read(self) -> None:
        """Set the rows to those of the weight, so that they change nothing."""
        values: Any = torch.zeros(self.rows.shape, device=self.ids.device)
        values[self._mine] = local_shard(self.weight)[self._places].float()
        if isinstance(self.weight, DTensor):  # each row is zero on all ranks but one
            summed = [Partial() if one.is_shard() else one for one in self.weight.placements]
            values = DTensor.from_local(values, self.weight.device_mesh, summed, run_check=False).full_tensor()
        if isinstance(self.rows, DTensor):
            own = own_rows(self.rows)
            values = values[own.start : own.stop]
        local_shard(self.rows).copy_(values)

    @torch.no_grad()
    def write(self) -> None:
        rows: Any = self.rows.full_tensor() if isinstance(self.rows, DTensor) else self.rows
        values = rows[self._mine]
        rounded = values.to(self.weight.dtype) if self._bits is None else to_bfloat16(values, self._bits)
        local_shard(self.weight).index_copy_(0, self._places, rounded)

    @contextmanager
    def held(self) -> Iterator[None]:
        if self.is_held:
            yield
            return
        self.write()
        self.is_held = True
        try:
            yield
        finally:
            self.is_held = False


def trained_rows(model: Any) -> TrainedRows | None:
    """Return the trained rows of a model, or None if it has none."""
    return TrainedRows(model) if hasattr(model.get_input_embeddings(), ROWS) else None
