"""GPU kernels that process all weights of a model in one launch.

One kernel casts weights to bfloat16 with stochastic rounding (precision/rounding.py). Another adds bfloat16 gradients to float32
sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-not-found] - comes with torch where there is a GPU
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from tandem.model.transfer import to_device

NUMBERS_PER_BLOCK = 4096


@triton.jit
def _hash_int32(number):
    number = (number ^ ((number >> 16) & 0xFFFF)) * 0x7FEB352D
    number = (number ^ ((number >> 15) & 0x1FFFF)) * -0x7B935975
    return number ^ ((number >> 16) & 0xFFFF)


@triton.jit
def _round_stochastically(bits, at, start):
    up = (bits & 0xFFFF) > 0xFFFF - (_hash_int32(at.to(tl.int32) + start) & 0xFFFF)
    up = up & ((bits & 0x7F800000) != 0x7F800000)
    return ((bits >> 16) + up.to(tl.int32)).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit(do_not_specialize=["count", "start"])
def _cast(source, target, count, start, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    bits = tl.load(source + at, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    tl.store(target + at, _round_stochastically(bits, at, start), mask=inside)


@triton.jit
def _cast_all(tables, owners, firsts, BLOCK: tl.constexpr):
    """Cast every tensor to its bfloat16 copy. Each program casts one block of a tensor.

    tables: for each tensor, its address, the address of its copy, its number of elements, and the hash input of its first
    element. owners: for each block, the index of its tensor. firsts: for each block, the index of its first element within the
    tensor.
    """
    block = tl.program_id(0)
    table = tables + 4 * tl.load(owners + block)
    first = tl.load(firsts + block)
    source = tl.load(table).to(tl.pointer_type(tl.float32)) + first
    target = tl.load(table + 1).to(tl.pointer_type(tl.bfloat16)) + first
    count = tl.load(table + 2) - first
    start = tl.load(table + 3).to(tl.int32)
    at = tl.arange(0, BLOCK)
    sources = tl.max_contiguous(tl.multiple_of(source + at, 16), BLOCK)
    targets = tl.max_contiguous(tl.multiple_of(target + at, 16), BLOCK)
    if count >= BLOCK:  # without a mask, loads and stores have the maximum width
        bits = tl.load(sources).to(tl.int32, bitcast=True)
        tl.store(targets, _round_stochastically(bits, first + at, start))
    else:
        bits = tl.load(sources, mask=at < count, other=0.0).to(tl.int32, bitcast=True)
        tl.store(targets, _round_stochastically(bits, first + at, start), mask=at < count)


@triton.jit
def _add_all(tables, owners, firsts, BLOCK: tl.constexpr):
    """Add every gradient to its sum. Each program adds one block of a gradient.

    tables: for each gradient, the address of its sum, the address of the gradient, its number of elements, and whether the sum
    has no value yet and is overwritten. owners, firsts: see _cast_all.
    """
    block = tl.program_id(0)
    table = tables + 4 * tl.load(owners + block)
    first = tl.load(firsts + block)
    total = tl.load(table).to(tl.pointer_type(tl.float32)) + first
    part = tl.load(table + 1).to(tl.pointer_type(tl.bfloat16)) + first
    count = tl.load(table + 2) - first
    at = tl.arange(0, BLOCK)
    totals = tl.max_contiguous(tl.multiple_of(total + at, 16), BLOCK)
    parts = tl.max_contiguous(tl.multiple_of(part + at, 16), BLOCK)
    is_first = tl.load(table + 3) != 0
    if count >= BLOCK:
        added = tl.load(parts).to(tl.float32)
        if not is_first:
            added += tl.load(totals)
        tl.store(totals, added)
    else:
        added = tl.load(parts, mask=at < count, other=0.0).to(tl.float32)
        if not is_first:
            added += tl.load(totals, mask=at < count, other=0.0)
        tl.store(totals, added, mask=at < count)


def cast(source: Tensor, start: int) -> Tensor:
    """Return a bfloat16 copy of one contiguous tensor, rounded stochastically.

    `start`: hash input of the first element, an int32.
    """
    target = torch.empty_like(source, dtype=torch.bfloat16)
    count = source.numel()
    if count:
        launch: Any = _cast[(triton.cdiv(count, NUMBERS_PER_BLOCK),)]  # type: ignore[index]
        launch(source, target, count, start, BLOCK=NUMBERS_PER_BLOCK, num_warps=8)
    return target


@dataclass(frozen=True, slots=True)
class Blocks:
    """Tensors divided into blocks of NUMBERS_PER_BLOCK elements.

    `owners`: for each block, the index of its tensor. `firsts`: for each block, the index of its first element within the tensor.
    """

    owners: Tensor
    firsts: Tensor

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device) -> "Blocks":
        blocks = [triton.cdiv(count, NUMBERS_PER_BLOCK) for count in counts]
        owners = torch.arange(len(blocks), dtype=torch.int32).repeat_interleave(torch.tensor(blocks))
        before = torch.tensor([0, *blocks[:-1]]).cumsum(0)
        firsts = (torch.arange(len(owners)) - before[owners]) * NUMBERS_PER_BLOCK
        return cls(owners.to(device), firsts.to(device))

    def launch(self, kernel: Any, tables: Tensor) -> None:
        if len(self.owners):
            kernel[(len(self.owners),)](tables, self.owners, self.firsts, BLOCK=NUMBERS_PER_BLOCK, num_warps=8)


class Casts:
    """Casts source tensors to target tensors, with one kernel launch per call.

    `given`: (source, target, start) for each tensor, where `start` is the hash input of its first element.
    """

    def __init__(self, given: Sequence[tuple[Tensor, Tensor, int]]):
        self.given = given
        self.blocks = Blocks.of([source.numel() for source, _, _ in given], given[0][0].device)
        self.addresses: list[int] = []

    def __call__(self) -> None:
        addresses = [source.data_ptr() for source, _, _ in self.given]
        if addresses != self.addresses:  # the first call, or a weight has moved
            rows = [
                [source.data_ptr(), target.data_ptr(), source.numel(), start] for source, target, start in self.given
            ]
            self.tables = torch.tensor(rows, dtype=torch.int64).to(self.blocks.owners.device)
            self.addresses = addresses
        self.blocks.launch(_cast_all, self.tables)


class Sums:
    """Adds bfloat16 gradients to float32 sums, with one kernel launch per call.

    The division into blocks is kept and reused for tensors of the same sizes.
    """

    MAX_KEPT = 64  # more than a backward has launches

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, ...], Blocks] = {}

    def __call__(self, given: Sequence[tuple[Tensor, Tensor, bool]]) -> None:
        """Add each gradient to its sum. If `is_first`, the sum has no value yet and is overwritten.

        `given`: (sum, gradient, is_first) for each tensor. A sum and its gradient must have equal strides.
        """
        counts = tuple(total.numel() for total, _, _ in given)
        if counts not in self.blocks:
            if len(self.blocks) == self.MAX_KEPT:
                self.blocks.clear()
            self.blocks[counts] = Blocks.of(counts, given[0][0].device)
        # The kernels assume that blocks are aligned to 16 numbers, so a tensor that is not must be copied.
        parts = [part if part.data_ptr() % 32 == 0 else part.clone() for _, part, _ in given]
        rows = [
            [total.data_ptr(), part.data_ptr(), count, is_first]
            for (total, _, is_first), part, count in zip(given, parts, counts, strict=True)
        ]
        tables = torch.tensor(rows, dtype=torch.int64)
        self.blocks[counts].launch(_add_all, to_device(tables, given[0][0].device))
