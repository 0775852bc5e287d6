"""Rounding by chance: up or down with the odds that keep the mean.

Rounded to the nearest, a change smaller than half a step of bfloat16 is lost whole, and the updates of preference training
are smaller than that. By chance nothing is lost on average. Chances are drawn from a seed, the tensor and the place in it:
they are the same after a resume and on any number of workers.
"""

import weakref
import zlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def to_bfloat16(value: Tensor, chance: Tensor) -> Tensor:
    """float32 to one of its neighbours: the upper where the bits that go and 16 bits of chance make a whole."""
    bits = value.view(torch.int32)
    below = bits & -0x10000
    # Chance itself is never taken for a float: where inductor computes it in 64 bits, Triton refuses that.
    up = (bits & 0xFFFF) > 0xFFFF - (chance & 0xFFFF)
    return torch.where(up, below + 0x10000, below).view(torch.float32).to(torch.bfloat16)


def mixed(number: Tensor) -> Tensor:
    """An int32 to one that looks random: a multiply and xor-shift hash, which is meant to overflow."""
    for shift, factor in ((16, 0x7FEB352D), (15, -0x7B935975)):
        number = (number ^ ((number >> shift) & (0x7FFFFFFF >> (shift - 1)))) * factor
    return number ^ ((number >> 16) & 0xFFFF)


def chances(shape: torch.Size, place: Tensor) -> Tensor:
    """An int32 for every number of a part of a tensor. place: where the part begins, and a salt."""
    first, salt = place.unbind()
    along = torch.arange(shape.numel(), dtype=torch.int32, device=place.device).reshape(shape)
    return mixed(along + first + mixed(salt))


def place_of(first: int, salt: int, device: torch.device | None = None) -> Tensor:
    """What chances are drawn from, as the 32 bits of either number that the hash can use."""
    return torch.tensor([first, salt]).to(torch.int32).to(device)


def salt_of(name: str, seed: int) -> int:
    """Of the chances of a tensor of a model, which are the same while it is computed with and when it is exported."""
    return zlib.crc32(f"{seed} {name}".encode())


def first_place(parameter: nn.Parameter) -> int:
    """Where this worker's part begins in the whole tensor, of which fully_shard gives each an even share of the rows."""
    if not isinstance(parameter, DTensor):
        return 0
    rows = -(-parameter.shape[0] // parameter.device_mesh.size()) * parameter.device_mesh.get_rank()
    return rows * (parameter.numel() // parameter.shape[0])


def cast_by_chance(parameter: nn.Parameter, salt: int) -> None:
    """Let fully_shard, which computes in bfloat16 over a float32 parameter, round it so instead of to the nearest."""
    part: Any = parameter._local_tensor  # type: ignore[attr-defined]
    cast = _Cast(weakref.ref(part), place_of(first_place(parameter), salt, part.device))
    part.fsdp_pre_all_gather, part.fsdp_post_all_gather = cast.before, cast.after


@dataclass(frozen=True, slots=True)
class _Cast:
    """What fully_shard does before and after it gathers the parts of a parameter."""

    part: Any  # a weak reference to the tensor that refers to this
    place: Tensor

    def before(self, mesh: Any, size: torch.Size, stride: Any, module: Any, precision: Any) -> tuple[Any, None]:
        part = self.part()
        make: Any = _compiled() if part.is_cuda else _cast
        made = make(part, self.place)
        if missing := -(-size[0] // mesh.size()) - len(part):  # parts are all as long as the longest
            made = torch.cat([made, made.new_zeros(missing, *size[1:])])
        return (made,), None

    def after(self, parts: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        # What was gathered is the parameter: `out`, where there is one, is a view of it.
        return None if out is not None else (parts[0], ())


@cache
def _compiled() -> Any:
    return torch.compile(_cast, dynamic=True, fullgraph=True)


def _cast(part: Tensor, place: Tensor) -> Tensor:
    return to_bfloat16(part, chances(part.shape, place))
