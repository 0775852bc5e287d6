"""Adapters of experts that a model stores in one tensor (peft's target_parameters).

peft wraps the module of the experts once for each adapted tensor, one wrapper around the other. Here, the outermost wrapper adds
all adapters to their tensors and calls the module with the sums. peft computes the same, but registers and removes
parametrizations in every forward pass, which cannot be compiled.
"""

from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.func import functional_call


class AdaptedExperts(ParamWrapper):
    """A module of experts with adapters of its tensors, or the next wrapper of such a module."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        module: Any = self
        sums: dict[str, Tensor] = {}
        while isinstance(module, ParamWrapper):
            (name,) = module.active_adapters
            weight = module.get_param()
            down, up = (getattr(module, side)[name].weight.to(weight.dtype) for side in ("lora_A", "lora_B"))
            first, second = factors(module, down, up)
            sums[module.parameter_name] = torch.baddbmm(weight, first, second, alpha=module.scaling[name])
            module = module.base_layer
        return functional_call(module, sums, (x, *args), kwargs, tie_weights=False)


def factors(layer: Any, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors, one matrix per expert, whose products are the adapters without their scale.

    down: [rank * experts, inputs], the rows of an expert in a block. up: [outputs, rank * experts], the columns of an expert
    at every num_experts-th place.
    """
    down = down.reshape(layer.num_experts, -1, down.shape[-1])  # [experts, rank, inputs]
    up = up.reshape(up.shape[0], -1, layer.num_experts).permute(2, 0, 1)  # [experts, outputs, rank]
    is_transposed = getattr(layer.get_base_layer(), "is_transposed", False)  # stored as [experts, inputs, outputs]
    return (down.transpose(1, 2), up.transpose(1, 2)) if is_transposed else (up, down)


def merged_experts(layer: Any, weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return the tensor of all experts with their adapters, in float32."""
    first, second = factors(layer, down, up)
    return torch.baddbmm(weight.float(), first, second, alpha=scale)


def adapt_experts(model: nn.Module) -> None:
    """Make peft's wrappers of tensors compute as described above."""
    for module in model.modules():
        if isinstance(module, ParamWrapper):
            module.__class__ = AdaptedExperts
