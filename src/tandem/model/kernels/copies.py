"""GPU kernels that read all weights in one launch: one casts them to bfloat16 with stochastic rounding (precision/rounding.py),
one adds bfloat16 gradients to float32 sums."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-not-found] - comes with torch where there is a GPU
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from tandem.model.transfer import to_device

BLOCK = 4096


@triton.jit
def _mixed(number):
    number = (number ^ ((number >> 16) & 0xFFFF)) * 0x7FEB352D
    number = (number ^ ((number >> 15) & 0x1FFFF)) * -0x7B935975
    return number ^ ((number >> 16) & 0xFFFF)


@triton.jit
def _by_chance(bits, at, start):
    up = (bits & 0xFFFF) > 0xFFFF - (_mixed(at.to(tl.int32) + start) & 0xFFFF)
    up = up & ((bits & 0x7F800000) != 0x7F800000)
    return ((bits >> 16) + up.to(tl.int32)).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit(do_not_specialize=["count", "start"])
def _cast(source, target, count, start, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    bits = tl.load(source + at, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    tl.store(target + at, _by_chance(bits, at, start), mask=inside)


@triton.jit
def _cast_all(tables, owners, firsts, BLOCK: tl.constexpr):
    """tables: of each tensor where it is, where its copy is, how many numbers it has, and the start of its chances. owners
    and firsts: of each block which tensor it is of, and where in it."""
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
    if count >= BLOCK:  # without a mask, memory is read and written in the widest pieces
        bits = tl.load(sources).to(tl.int32, bitcast=True)
        tl.store(targets, _by_chance(bits, first + at, start))
    else:
        bits = tl.load(sources, mask=at < count, other=0.0).to(tl.int32, bitcast=True)
        tl.store(targets, _by_chance(bits, first + at, start), mask=at < count)


@triton.jit
def _add_all(tables, owners, firsts, BLOCK: tl.constexpr):
    """tables: of each tensor where its sum is, where what it is to have is, how many numbers it has, and whether it is the
    first that the sum gets. owners and firsts as above."""
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
    """A contiguous tensor. start: what the place of its first number is to the hash, as an int32."""
    target = torch.empty_like(source, dtype=torch.bfloat16)
    count = source.numel()
    if count:
        launch: Any = _cast[(triton.cdiv(count, BLOCK),)]  # type: ignore[index]
        launch(source, target, count, start, BLOCK=BLOCK, num_warps=8)
    return target


@dataclass(frozen=True, slots=True)
class Blocks:
    """Tensors of some sizes cut into blocks: of each block which tensor it is of, and where in it."""

    owners: Tensor
    firsts: Tensor

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device) -> "Blocks":
        blocks = [triton.cdiv(count, BLOCK) for count in counts]
        owners = torch.arange(len(blocks), dtype=torch.int32).repeat_interleave(torch.tensor(blocks))
        before = torch.tensor([0, *blocks[:-1]]).cumsum(0)
        firsts = (torch.arange(len(owners)) - before[owners]) * BLOCK
        return cls(owners.to(device), firsts.to(device))

    def launch(self, kernel: Any, tables: Tensor) -> None:
        if len(self.owners):
            kernel[(len(self.owners),)](tables, self.owners, self.firsts, BLOCK=BLOCK, num_warps=8)


class Casts:
    """Casts some tensors into others, as often as it is called, by one launch: source, target and start of each."""

    def __init__(self, given: Sequence[tuple[Tensor, Tensor, int]]):
        self.given = given
        self.blocks = Blocks.of([source.numel() for source, _, _ in given], given[0][0].device)
        self.addresses: list[int] = []

    def __call__(self) -> None:
        addresses = [source.data_ptr() for source, _, _ in self.given]
        if addresses != self.addresses:  # at first, or where a weight was given other memory
            rows = [
                [source.data_ptr(), target.data_ptr(), source.numel(), start] for source, target, start in self.given
            ]
            self.tables = torch.tensor(rows, dtype=torch.int64).to(self.blocks.owners.device)
            self.addresses = addresses
        self.blocks.launch(_cast_all, self.tables)


class Sums:
    """Adds bfloat16 tensors to float32 ones by one launch. Of the same sizes again, it knows the blocks."""

    KNOWN = 64  # more than a backward has launches, unless it is another one every time

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, ...], Blocks] = {}

    def __call__(self, given: Sequence[tuple[Tensor, Tensor, bool]]) -> None:
        """The sum, what is added (of the same strides), and whether it is the first: then the sum has no value yet."""
        counts = tuple(total.numel() for total, _, _ in given)
        if counts not in self.blocks:
            if len(self.blocks) == self.KNOWN:
                self.blocks.clear()
            self.blocks[counts] = Blocks.of(counts, given[0][0].device)
        # A block begins on a multiple of 16 numbers, if its tensor does.
        parts = [part if part.data_ptr() % 32 == 0 else part.clone() for _, part, _ in given]
        rows = [
            [total.data_ptr(), part.data_ptr(), count, is_first]
            for (total, _, is_first), part, count in zip(given, parts, counts, strict=True)
        ]
        tables = torch.tensor(rows, dtype=torch.int64)
        self.blocks[counts].launch(_add_all, to_device(tables, given[0][0].device))
