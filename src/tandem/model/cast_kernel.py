"""Casts a float32 tensor to bfloat16 by chance, in one pass over the GPU's memory. model/rounding.py says what is computed."""

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


@triton.jit(do_not_specialize=["count", "start"])
def _cast(source, target, count, start, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    bits = tl.load(source + at, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    chance = _mixed(at.to(tl.int32) + start)
    up = (bits & 0xFFFF) > 0xFFFF - (chance & 0xFFFF)
    kept = (bits >> 16) + up.to(tl.int32)
    tl.store(target + at, kept.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)


def cast(source: Tensor, start: int) -> Tensor:
    """A contiguous tensor. start: what the place of its first number is to the hash, as an int32."""
    target = torch.empty_like(source, dtype=torch.bfloat16)
    count = source.numel()
    if count:
        launch: Any = _cast[(triton.cdiv(count, BLOCK),)]  # type: ignore[index]
        launch(source, target, count, start, BLOCK=BLOCK, num_warps=8)
    return target
