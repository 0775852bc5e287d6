"""The matrix products of a model's layers in float8, forward and backward; all else stays as it is.

A tensor is cast by one factor, a power of two that brings its largest number into float8's range. What a number is rounded to
then does not depend on the factor, unless it is ten thousand times smaller than the largest: a pack changes next to nothing.
"""

from typing import Any

import torch
from torch import Tensor, nn

# Inputs and weights need digits, gradients range.
FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
# The kernels take sides that are multiples of it.
MULTIPLE = 16
# A product so many times narrower on one side is a router's, say: little to compute, and much that hangs on it.
NARROW = 10
# The first cards that compute in float8.
CAPABILITY = (8, 9)


def compute_in_float8(layers: list[nn.Module]) -> None:
    """Every plain linear layer in them that fits."""
    for layer in layers:
        for module in layer.modules():
            if fits(module):
                module.__class__ = Float8Linear


def fits(module: nn.Module) -> bool:
    if type(module) is not nn.Linear:
        return False
    sides = module.in_features, module.out_features
    return max(sides) < NARROW * min(sides) and not any(side % MULTIPLE for side in sides)


class Float8Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        out: Any = _Product.apply(input.flatten(0, -2), self.weight, self.bias)
        return out.unflatten(0, input.shape[:-1])  # type: ignore[no-any-return]


class _Product(torch.autograd.Function):
    """x @ weight.T + bias"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight = _factor(x, FORWARD), _factor(weight, FORWARD)
        small = _cast(x, of_x, FORWARD)
        ctx.save_for_backward(small, of_x, weight, of_weight)
        ctx.has_bias = bias is not None
        out = _product(small, _cast(weight, of_weight, FORWARD).t(), of_x * of_weight, x.dtype, fast=True)
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        x, of_x, weight, of_weight = ctx.saved_tensors
        of_grad = _factor(grad, BACKWARD)
        small = _cast(grad, of_grad, BACKWARD)
        by_x = _product(small, _by_columns(_cast(weight, of_weight, FORWARD)), of_grad * of_weight, grad.dtype)
        by_weight = _product(small.t().contiguous(), _by_columns(x), of_grad * of_x, grad.dtype)
        return by_x, by_weight, grad.sum(0) if ctx.has_bias else None


def _factor(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The power of two by which a tensor goes into float8: its largest number comes to the upper half of the range.

    Not finite where a number is not; then nothing that follows is.
    """
    largest = values.abs().amax().float().clamp(min=1e-12)
    return torch.exp2(torch.floor(torch.log2(torch.finfo(dtype).max / largest)))


def _cast(values: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return (values.float() * factor).to(dtype)


def _by_columns(values: Tensor) -> Tensor:
    """The same matrix with its columns one after another in memory, as the kernels want the right side of a product."""
    return values.t().contiguous().t()


def _product(left: Tensor, right: Tensor, factor: Tensor, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """left @ right / factor. Fast: sums in fewer bits, as is usual in the forward."""
    if left.is_cuda:
        one = torch.ones_like(factor)
        return torch._scaled_mm(left, right, scale_a=1 / factor, scale_b=one, out_dtype=dtype, use_fast_accum=fast)
    return (left.float() @ right.float() / factor).to(dtype)
