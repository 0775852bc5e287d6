"""Computes a linear layer and its adapter in one matrix product.

peft computes the adapter's output in a second product, as wide as the layer's output, writes it to memory, reads it again and
adds it. Here, the adapter's low-rank activations are concatenated to the input, and the adapter's second matrix (lora_B) to the
weight. This is done unless the input is wider than the output. The gradient of the input is computed in the same way, unless the
output is wider than the input.
"""

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear
from torch import Tensor, nn


def join_adapters(model: nn.Module) -> None:
    """Make every plain linear layer with an adapter compute its output in one product.

    Requires a single adapter without dropout.
    """
    for module in model.modules():
        if type(module) is Linear and type(module.get_base_layer()) is nn.Linear:
            module.__class__ = JoinedLinear


class JoinedLinear(Linear):
    """peft's linear layer with frozen weight and bias, computed by `joined_linear`."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        (name,) = self.active_adapters
        layer: Any = self.get_base_layer()
        down, up = (getattr(self, side)[name].weight for side in ("lora_A", "lora_B"))
        return joined_linear(x, layer.weight, layer.bias, down=down, up=up, scale=self.scaling[name])


def joined_linear(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return x @ (weight + scale * up @ down).T + bias, with gradients for x, down and up."""
    out: Any = _Joined.apply(x.flatten(0, -2), weight, bias, down, up, scale)
    return out.unflatten(0, x.shape[:-1])  # type: ignore[no-any-return]


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
    ) -> Tensor:
        low = F.linear(x, down) * scale
        ctx.save_for_backward(x, weight, down, up, low)
        ctx.scale = scale
        if x.shape[-1] > weight.shape[0]:
            return F.linear(x, weight, bias) + F.linear(low, up)
        return F.linear(torch.cat([x, low], -1), torch.cat([weight, up], 1), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        x, weight, down, up, low = ctx.saved_tensors
        grad_low = grad @ up * ctx.scale
        if grad.shape[-1] > weight.shape[1]:
            grad_x = grad @ weight + grad_low @ down
        else:
            grad_x = torch.cat([grad, grad_low], -1) @ torch.cat([weight, down], 0)
        return grad_x, None, None, grad_low.T @ x, grad.T @ low, None
