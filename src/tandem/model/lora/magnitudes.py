"""DoRA (arXiv:2402.09353): the rows of an adapted weight are scaled to trained lengths, called magnitudes.

With a weight W and an adapter B A of scale s, row o of the layer's weight is m[o] * (W + s B A)[o] / n[o], where m are the
magnitudes and n[o] is the length of the row (W + s B A)[o]. n is a constant in the backward pass, as in the paper and in peft.

n depends on weights alone, so it is computed once per step and not in every forward pass. With several ranks, each rank computes
the lengths of its own rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tandem.model.distributed.shards import local_shard

# Lengths are computed for this many numbers at a time, to limit memory.
NUMBERS_AT_ONCE = 1 << 26


class ScaledRows:
    """A layer with magnitudes. `row_lengths` [outputs], in float32; None: computed in every forward pass."""

    row_lengths: Tensor | None = None


def factors_of(magnitudes: Tensor, lengths: Tensor) -> Tensor:
    """Return the factor of each row, in float32.

    In bfloat16, `magnitudes` are differences from the lengths (`Magnitudes.differences`): bfloat16 has too few digits for the
    magnitudes themselves, and new adapters would change the model.
    """
    if magnitudes.dtype == torch.bfloat16:
        return 1 + magnitudes.float() / lengths
    return magnitudes / lengths


@torch.no_grad()
def row_lengths(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return the lengths of the rows of weight + scale * up @ down, in float32."""
    rows, down = max(1, NUMBERS_AT_ONCE // weight.shape[1]), down.float()
    parts = [
        torch.linalg.vector_norm(torch.addmm(part.float(), of_part.float(), down, alpha=scale), dim=1)
        for part, of_part in zip(weight.split(rows), up.split(rows), strict=True)
    ]
    # A row of zeros stays zero whatever its factor is, as long as that is finite.
    return torch.cat(parts).clamp(min=torch.finfo(torch.float32).tiny)


def merged_weight(weight: Tensor, down: Tensor, up: Tensor, scale: float, magnitudes: Tensor) -> Tensor:
    """Return the weight of a layer with its adapter and magnitudes, in float32."""
    factors = magnitudes.float() / row_lengths(weight, down, up, scale)
    return factors[:, None] * (weight.float() + scale * (up @ down))


def begin(model: nn.Module) -> None:
    """Set the magnitudes of new adapters to the lengths of rows, so that the adapters change nothing."""
    for one in _layers_of(model):
        one.begin()


@dataclass(frozen=True, slots=True)
class _Layer:
    """The parameters of one layer. With several ranks, each has some of their rows."""

    module: Any
    weight: nn.Parameter
    down: nn.Parameter
    up: nn.Parameter
    magnitudes: nn.Parameter
    scale: float
    difference: Tensor | None = None  # between the magnitudes and the lengths of own rows, in float32

    def own_lengths(self) -> Tensor:
        down = self.down.full_tensor() if isinstance(self.down, DTensor) else self.down
        return row_lengths(local_shard(self.weight), down, local_shard(self.up), self.scale)

    @torch.no_grad()
    def begin(self) -> None:
        local_shard(self.magnitudes).copy_(self.own_lengths())

    @torch.no_grad()
    def refresh(self) -> None:
        own, given = self.own_lengths(), self.magnitudes
        lengths = own
        if isinstance(given, DTensor):
            shape: Any = {"shape": given.shape, "stride": given.stride(), "run_check": False}
            lengths = DTensor.from_local(own, given.device_mesh, given.placements, **shape).full_tensor()
        if self.module.row_lengths is None:
            self.module.row_lengths = torch.empty_like(lengths)
        self.module.row_lengths.copy_(lengths)  # in place: compiled layers read this tensor
        if self.difference is not None:
            torch.sub(local_shard(given), own, out=self.difference)


def _layers_of(model: nn.Module) -> list[_Layer]:
    layers: list[_Layer] = []
    for module in model.modules():
        if isinstance(module, ScaledRows):
            layer: Any = module
            (name,) = layer.active_adapters
            layers.append(
                _Layer(
                    module=module,
                    weight=layer.get_base_layer().weight,
                    down=layer.lora_A[name].weight,
                    up=layer.lora_B[name].weight,
                    magnitudes=layer.lora_magnitude_vector[name].weight,
                    scale=layer.scaling[name],
                )
            )
    return layers


class Magnitudes:
    """Computes the row lengths of all layers when the context `held` begins. The weights must not change inside it.

    `bfloat16`: whether parameters are cast to bfloat16 for computation.
    """

    def __init__(self, model: nn.Module, *, bfloat16: bool):
        self.is_held = False
        self.layers = _layers_of(model)
        if bfloat16:
            self.layers = [replace(one, difference=local_shard(one.magnitudes).detach().clone()) for one in self.layers]

    @property
    def differences(self) -> dict[nn.Parameter, Tensor]:
        """For each parameter with magnitudes, the tensor that is cast to bfloat16 in its place."""
        return {one.magnitudes: one.difference for one in self.layers if one.difference is not None}

    @contextmanager
    def held(self) -> Iterator[None]:
        if self.is_held:
            yield
            return
        self.refresh()
        self.is_held = True
        try:
            yield
        finally:
            self.is_held = False

    def refresh(self) -> None:
        for one in self.layers:
            one.refresh()
