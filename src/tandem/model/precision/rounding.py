"""Stochastic rounding to bfloat16: a number is rounded up or down at random, so that the result equals the number on average.

Rounding to nearest loses every change smaller than half a step of bfloat16, and the updates of preference training are smaller
than that. Stochastic rounding keeps such updates on average. The random bits are a hash of the tensor's salt and of the index in
the tensor, so they are the same after a resume and on any number of ranks.
"""

import re
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tandem.model.distributed.shards import own_rows

EXPONENT = 0x7F800000  # all exponent bits set: infinite or NaN


def to_bfloat16(value: Tensor, bits16: Tensor) -> Tensor:
    """Round each float32 number to one of the two neighbouring bfloat16 numbers, chosen by 16 random bits (`bits16`).

    bfloat16 drops the lowest 16 bits of float32. If their sum with the random bits exceeds 0xFFFF, the number is rounded away
    from 0, otherwise towards 0. Infinity and NaN are only truncated: a GPU's NaN has all bits set, and rounding it up would
    give 0.
    """
    bits = value.view(torch.int32)
    below = bits & -0x10000
    # The random bits are never viewed as floats: where inductor computes them in 64 bits, Triton would reject that.
    up = ((bits & 0xFFFF) > 0xFFFF - (bits16 & 0xFFFF)) & ((bits & EXPONENT) != EXPONENT)
    return torch.where(up, below + 0x10000, below).view(torch.float32).to(torch.bfloat16)


def hash_int32(number: Tensor) -> Tensor:
    """Hash int32 numbers by multiplications and xor-shifts. The multiplications overflow on purpose."""
    for shift, factor in ((16, 0x7FEB352D), (15, -0x7B935975)):
        number = (number ^ ((number >> shift) & (0x7FFFFFFF >> (shift - 1)))) * factor
    return number ^ ((number >> 16) & 0xFFFF)


def random_bits(count: int, start: int) -> Tensor:
    """Return the hashes of the int32 numbers start, start + 1, …, start + count - 1, on the CPU."""
    return hash_int32(torch.arange(count, dtype=torch.int32) + start)


def hash_start(first: int, salt: int) -> int:
    """Return the hash input of the element at index `first` of a tensor with this salt.

    The hash input of each following element is 1 larger.
    """
    return _int32(first + int(hash_int32(torch.tensor(_int32(salt), dtype=torch.int32))))


def _int32(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31


def salt_of(name: str) -> int:
    """Return the salt of a tensor: a number computed from its name, so that tensors have different random bits.

    The salt is the same in every run, so that runs can share a cached reference.
    """
    return zlib.crc32(name.encode())


def salt_in_policy(name: str) -> int:
    """Return the salt of a policy's parameter. It is computed from the parameter's name in the transformers model.

    The policy's parameter model.lm_head.weight is named lm_head.weight in the model, so it has the salt of lm_head.weight.
    """
    return salt_of(re.sub(r"(\.base_layer)+\.", ".", name.removeprefix("model.")))


def first_index(parameter: nn.Parameter) -> int:
    """Return the index, in the full flattened tensor, at which this rank's shard begins."""
    if not isinstance(parameter, DTensor):
        return 0
    return own_rows(parameter).start * (parameter.numel() // parameter.shape[0])


class ShardCasts:
    """The casts of a policy's shards. Inside the context `held`, each shard is cast once, however often it is gathered."""

    def __init__(self) -> None:
        self.is_held = False
        self.casts: list[_ShardCast] = []

    def add(self, parameter: nn.Parameter, salt: int, source: Tensor | None = None) -> None:
        """Make fully_shard cast this float32 parameter to bfloat16 with stochastic rounding instead of rounding to nearest.

        `source`: a tensor like this rank's shard, which is cast in its place.
        """
        shard: Any = parameter._local_tensor  # type: ignore[attr-defined]
        cast = _ShardCast(self, weakref.ref(shard), hash_start(first_index(parameter), salt), source)
        self.casts.append(cast)
        shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = cast.before, cast.after

    @contextmanager
    def held(self) -> Iterator[None]:
        """The weights must not change inside this context."""
        if self.is_held:
            yield
            return
        self.is_held = True
        try:
            yield
        finally:
            self.is_held = False
            for cast in self.casts:
                cast.kept = None


@dataclass(slots=True)
class _ShardCast:
    """The hooks that fully_shard calls before and after it gathers the shards of a parameter. The first hook casts the shard."""

    casts: ShardCasts
    shard: Any  # a weak reference, because the shard refers to this object
    start: int  # hash input of its first number
    source: Tensor | None = None  # what is cast instead of the shard
    kept: Tensor | None = None

    def before(self, mesh: Any, size: torch.Size, stride: Any, module: Any, precision: Any) -> tuple[Any, None]:
        if self.kept is not None:
            return (self.kept,), None
        shard = self.shard() if self.source is None else self.source
        cast = round_to_bfloat16(shard, self.start)
        if missing := -(-size[0] // mesh.size()) - len(shard):  # all shards are padded to the length of the longest
            cast = torch.cat([cast, cast.new_zeros(missing, *size[1:])])
        if self.casts.is_held:
            self.kept = cast
        return (cast,), None

    def after(self, parts: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        # The gathered tensor is the parameter; `out`, if given, is already a view of it.
        return None if out is not None else (parts[0], ())


def round_to_bfloat16(values: Tensor, start: int) -> Tensor:
    """Round float32 to bfloat16 stochastically. The random bits of the element at index i are the hash of start + i."""
    if values.is_cuda:
        # Not torch.compile: this is called for every tensor of a model, and checking guards would take longer than the work.
        from tandem.model.kernels.copies import cast

        return cast(values, start)
    return to_bfloat16(values, random_bits(values.numel(), start).reshape(values.shape))
