"""Context parallelism: several ranks compute the same rows, each a part of their columns.

Only attention looks along a row, so only attention communicates. Before it, the ranks exchange columns for heads: each then has
all columns of some heads, and computes attention under the mask of the whole row. After it, they exchange back.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from tandem.errors import ConfigError

# torch has no public function that finds a group by its name; compiled layers can hold a name, but not a group.
_find_group: Any = dist.distributed_c10d._resolve_process_group


@dataclass(frozen=True, slots=True)
class Context:
    """The ranks that compute the same rows, and the number of this rank among them.

    Column c of a row belongs to rank c % size, so that every rank gets about the same number of scored tokens.
    """

    group: str  # the name of their process group
    number: int
    size: int

    def own_columns(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return this rank's columns of an array [rows, length]."""
        return np.ascontiguousarray(rows[:, self.number :: self.size])

    def own_positions(self, positions: NDArray[Any], length: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Find this rank's positions among `positions` in the flattened rows.

        Return their indices in `positions`, and where they are in this rank's own flattened columns.
        """
        row, column = np.divmod(positions, length)
        here = np.flatnonzero(column % self.size == self.number)
        return here, (row * (length // self.size) + column // self.size)[here]

    def own_heads(self, per_head: Tensor) -> Tensor:
        """Return this rank's part of a tensor with one number for each query head."""
        size = len(per_head) // self.size
        return per_head[self.number * size : (self.number + 1) * size]


def check_heads(num_heads: int, num_key_heads: int, size: int, model: str) -> None:
    """Raise ConfigError if the attention heads of a model cannot be divided among `size` ranks."""
    if num_heads % size or num_heads % _repeated_heads(num_key_heads, size):
        raise ConfigError(
            f"policy.parallel.context = {size}: {model} has {num_heads} attention heads with {num_key_heads} key heads, which "
            f"cannot be divided among {size} ranks. Use a size that divides {num_heads}."
        )


def _repeated_heads(num_key_heads: int, size: int) -> int:
    """Return how many key heads there are after repeating them so that `size` divides them."""
    return math.lcm(num_key_heads, size)


def to_heads(query: Tensor, key: Tensor, value: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange columns for heads: [rows, heads, length / size, dim] each become [rows, heads / size, length, dim].

    Key and value heads that `size` does not divide are repeated first. The gradients of the repeated heads are added up.
    """
    times = _repeated_heads(key.shape[1], context.size) // key.shape[1]
    if times > 1:
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    if query.shape[-1] == value.shape[-1]:
        query, key, value = _columns_for_heads([query, key, value], context)
    else:  # multi-head latent attention
        query, key = _columns_for_heads([query, key], context)
        (value,) = _columns_for_heads([value], context)
    return query, key, value


def _columns_for_heads(parts: list[Tensor], context: Context) -> list[Tensor]:
    sizes = [part.shape[1] // context.size for part in parts]
    together = torch.cat([part.unflatten(1, (context.size, -1)) for part in parts], dim=2)
    received = exchange(together.transpose(0, 1), context.group)  # [size, rows, heads, length / size, dim]
    whole = received.permute(1, 2, 3, 0, 4).flatten(2, 3)
    return [part.contiguous() for part in whole.split(sizes, 1)]


def to_columns(out: Tensor, context: Context) -> Tensor:
    """Exchange heads for columns: [rows, heads / size, length, dim] becomes [rows, heads, length / size, dim]."""
    by_column = out.unflatten(2, (-1, context.size)).permute(3, 0, 1, 2, 4)
    return exchange(by_column, context.group).transpose(0, 1).flatten(1, 2)


# One opaque operation, so that compiled layers stay one graph and the compiler cannot move it past other communication.
@torch.library.custom_op("tandem::exchange", mutates_args=())
def exchange(parts: Tensor, group: str) -> Tensor:
    """Send parts[i] to rank i of a group, and return what each rank sent: [ranks, ...]."""
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, parts.contiguous(), group=_find_group(group))
    return received


@exchange.register_fake
def _(parts: Tensor, group: str) -> Tensor:
    return torch.empty_like(parts, memory_format=torch.contiguous_format)


def _keep_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group = inputs[1]


def _exchange_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return exchange(grad, ctx.group), None


exchange.register_autograd(_exchange_back, setup_context=_keep_group)


def gather_values(own: Tensor, places: Tensor, count: int, context: Context) -> Tensor:
    """Return the numbers of all ranks of a context group, [..., count]. Every rank of the group must call this.

    `own`: this rank's numbers, [..., own count], with padding at the end. `places`: their indices in the result.
    """
    return _Gathered.apply(own, places, count, context.group)  # type: ignore[no-any-return]


class _Gathered(torch.autograd.Function):
    """Puts each rank's numbers among zeros and adds them up over the ranks, which is exact."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, places: Tensor, count: int, group: str) -> Tensor:
        ctx.save_for_backward(places)
        ctx.num_own = own.shape[-1]
        whole = own.new_zeros(*own.shape[:-1], count).index_copy_(-1, places, own[..., : len(places)])
        dist.all_reduce(whole, group=_find_group(group))
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        # Not added up over the ranks: each computes the same loss, and the gradients of the weights are added up later.
        (places,) = ctx.saved_tensors
        return torch.nn.functional.pad(grad[..., places], (0, ctx.num_own - len(places))), None, None, None
