"""A linear layer and its adapter in one matrix product.

As peft computes it, the adapter's output is a second product as wide as the layer's own: written, read again and added. Here
the adapter's few numbers a token stand beside the input, and its second matrix beside the weight, where the input is the
narrower side; the gradient of the input likewise, where the output is.
"""

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear
from torch import Tensor, nn


def join_adapters(model: nn.Module) -> None:
    """Compute every plain linear layer that has one adapter, without dropout, so."""
    for module in model.modules():
        if type(module) is Linear and type(module.get_base_layer()) is nn.Linear:
            module.__class__ = JoinedLinear


class JoinedLinear(Linear):
    """peft's layer, whose weight and bias are frozen."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        (name,) = self.active_adapters
        layer: Any = self.get_base_layer()
        down, up = (getattr(self, side)[name].weight for side in ("lora_A", "lora_B"))
        return joined_linear(x, layer.weight, layer.bias, down, up, self.scaling[name])


def joined_linear(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """x @ (weight + scale * up @ down).T + bias, with gradients of x, down and up."""
    out: Any = _Joined.apply(x.flatten(0, -2), weight, bias, down, up, scale)
    return out.unflatten(0, x.shape[:-1])  # type: ignore[no-any-return]


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float
    ) -> Tensor:
        few = F.linear(x, down) * scale
        ctx.save_for_backward(x, weight, down, up, few)
        ctx.scale = scale
        if x.shape[-1] > weight.shape[0]:
            return F.linear(x, weight, bias) + F.linear(few, up)
        return F.linear(torch.cat([x, few], -1), torch.cat([weight, up], 1), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        x, weight, down, up, few = ctx.saved_tensors
        of_few = grad @ up * ctx.scale
        if grad.shape[-1] > weight.shape[1]:
            of_x = grad @ weight + of_few @ down
        else:
            of_x = torch.cat([grad, of_few], -1) @ torch.cat([weight, down], 0)
        return of_x, None, None, of_few.T @ x, grad.T @ few, None
