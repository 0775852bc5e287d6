"""Casts float32 tensors to bfloat16 by chance, in one pass over the GPU's memory. model/rounding.py says what is computed."""

from collections.abc import Sequence
from typing import Any

import torch
import triton  # type: ignore[import-not-found] - comes with torch where there is a GPU
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

BLOCK = 4096


@triton.jit
def _mixed(number):
    number = (number ^ ((number >> 16) & 0xFFFF)) * 0x7FEB352D
    number = (number ^ ((number >> 15) & 0x1FFFF)) * -0x7B935975
    return number ^ ((number >> 16) & 0xFFFF)


@triton.jit
def _by_chance(bits, at, start):
    up = (bits & 0xFFFF) > 0xFFFF - (_mixed(at.to(tl.int32) + start) & 0xFFFF)
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


def cast(source: Tensor, start: int) -> Tensor:
    """A contiguous tensor. start: what the place of its first number is to the hash, as an int32."""
    target = torch.empty_like(source, dtype=torch.bfloat16)
    count = source.numel()
    if count:
        launch: Any = _cast[(triton.cdiv(count, BLOCK),)]  # type: ignore[index]
        launch(source, target, count, start, BLOCK=BLOCK, num_warps=8)
    return target


class Casts:
    """Casts some tensors into others, as often as it is called, by one launch: source, target and start of each."""

    def __init__(self, given: Sequence[tuple[Tensor, Tensor, int]]):
        self.given = given
        device = given[0][0].device
        blocks = [triton.cdiv(source.numel(), BLOCK) for source, _, _ in given]
        self.num_blocks = sum(blocks)
        owners = torch.arange(len(given), dtype=torch.int32).repeat_interleave(torch.tensor(blocks))
        before = torch.tensor([0, *blocks[:-1]]).cumsum(0)
        firsts = (torch.arange(self.num_blocks) - before[owners]) * BLOCK
        self.owners, self.firsts = owners.to(device), firsts.to(device)
        self.addresses: list[int] = []

    def __call__(self) -> None:
        addresses = [source.data_ptr() for source, _, _ in self.given]
        if addresses != self.addresses:  # at first, or where a weight was given other memory
            rows = [
                [source.data_ptr(), target.data_ptr(), source.numel(), start] for source, target, start in self.given
            ]
            self.tables = torch.tensor(rows, dtype=torch.int64).to(self.owners.device)
            self.addresses = addresses
        if self.num_blocks:
            launch: Any = _cast_all[(self.num_blocks,)]  # type: ignore[index]
            launch(self.tables, self.owners, self.firsts, BLOCK=BLOCK, num_warps=8)
