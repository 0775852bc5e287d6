"""Rounding by chance: up or down with the odds that keep the mean.

Rounded to the nearest, a change smaller than half a step of bfloat16 is lost whole, and the updates of preference training
are smaller than that. By chance nothing is lost on average. Chances are drawn from a salt of the tensor and the place in it:
they are the same after a resume and on any number of workers.
"""

import weakref
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

EXPONENT = 0x7F800000  # all of its bits: infinite, or NaN


def to_bfloat16(value: Tensor, chance: Tensor) -> Tensor:
    """float32 to one of its neighbours: the upper where the bits that go and 16 bits of chance make a whole.

    NaN stays as it is: what a GPU computes for it, all ones, has 0 for its upper neighbour.
    """
    bits = value.view(torch.int32)
    below = bits & -0x10000
    # Chance itself is never taken for a float: where inductor computes it in 64 bits, Triton refuses that.
    up = ((bits & 0xFFFF) > 0xFFFF - (chance & 0xFFFF)) & ((bits & EXPONENT) != EXPONENT)
    return torch.where(up, below + 0x10000, below).view(torch.float32).to(torch.bfloat16)


def mixed(number: Tensor) -> Tensor:
    """An int32 to one that looks random: a multiply and xor-shift hash, which is meant to overflow."""
    for shift, factor in ((16, 0x7FEB352D), (15, -0x7B935975)):
        number = (number ^ ((number >> shift) & (0x7FFFFFFF >> (shift - 1)))) * factor
    return number ^ ((number >> 16) & 0xFFFF)


def chances(count: int, start: int) -> Tensor:
    """An int32 for each of so many numbers from a start, on the CPU."""
    return mixed(torch.arange(count, dtype=torch.int32) + start)


def start_of(first: int, salt: int) -> int:
    """What is hashed for the number at `first` of a tensor with this salt; those behind it count on from there."""
    return _int32(first + int(mixed(torch.tensor(_int32(salt), dtype=torch.int32))))


def _int32(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31


def salt_of(name: str) -> int:
    """Of the chances of a tensor of a model. They are the same in every run: one's cached reference serves another."""
    return zlib.crc32(name.encode())


def salt_in_policy(name: str) -> int:
    """The same of a policy's parameter: model.lm_head.weight is its model's lm_head.weight, also under an adapter."""
    return salt_of(name.removeprefix("model.").replace(".base_layer.", "."))


def first_place(parameter: nn.Parameter) -> int:
    """Where this worker's part begins in the whole tensor, of which fully_shard gives each an even share of the rows."""
    if not isinstance(parameter, DTensor):
        return 0
    rows = -(-parameter.shape[0] // parameter.device_mesh.size()) * parameter.device_mesh.get_rank()
    return rows * (parameter.numel() // parameter.shape[0])


def cast_stochastically(parameter: nn.Parameter, salt: int) -> None:
    """Let fully_shard, which computes in bfloat16 over a float32 parameter, round it so instead of to the nearest."""
    part: Any = parameter._local_tensor  # type: ignore[attr-defined]
    cast = _Cast(weakref.ref(part), start_of(first_place(parameter), salt))
    part.fsdp_pre_all_gather, part.fsdp_post_all_gather = cast.before, cast.after


@dataclass(frozen=True, slots=True)
class _Cast:
    """What fully_shard does before and after it gathers the parts of a parameter."""

    part: Any  # a weak reference to the tensor that refers to this
    start: int  # of its chances

    def before(self, mesh: Any, size: torch.Size, stride: Any, module: Any, precision: Any) -> tuple[Any, None]:
        part = self.part()
        made = rounded(part, self.start)
        if missing := -(-size[0] // mesh.size()) - len(part):  # parts are all as long as the longest
            made = torch.cat([made, made.new_zeros(missing, *size[1:])])
        return (made,), None

    def after(self, parts: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        # What was gathered is the parameter: `out`, where there is one, is a view of it.
        return None if out is not None else (parts[0], ())


def rounded(values: Tensor, start: int) -> Tensor:
    """float32 to bfloat16, by the chances from a start on."""
    if values.is_cuda:
        # Not by torch.compile: called for every tensor of a model, its guards would take longer than the work.
        from tandem.model.kernels.copies import cast

        return cast(values, start)
    return to_bfloat16(values, chances(values.numel(), start).reshape(values.shape))
