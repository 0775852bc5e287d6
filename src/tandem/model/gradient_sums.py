"""Float32 sums, over the packs of a step, of the gradients of bfloat16 weights: in bfloat16 each addition would round."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class GradientSums:
    """The sums of a policy's bfloat16 parameters.

    While they are held, each backward's gradient is added to its sum and `.grad` stays empty: compiled layers refuse a
    parameter whose gradient has another dtype. Afterwards the sums are the parameters' gradients.
    """

    def __init__(self, parameters: list[nn.Parameter]):
        self.is_held = False
        self._parameters = parameters
        self._sums: dict[nn.Parameter, Tensor] = {}
        for parameter in parameters:
            parameter.grad_dtype = None  # any; by default it is the parameter's
            parameter.register_post_accumulate_grad_hook(self._add)

    @torch.no_grad()
    def _add(self, parameter: nn.Parameter) -> None:
        part, parameter.grad = parameter.grad, None
        assert part is not None and self.is_held
        if parameter in self._sums:
            _local(self._sums[parameter]).add_(_local(part))
        else:
            self._sums[parameter] = part.float()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Backwards belong in here. What was summed up before goes on to be."""
        if self.is_held:
            yield
            return
        self.is_held = True
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._sums[parameter], parameter.grad = parameter.grad, None
        try:
            yield
        finally:
            self.is_held = False
            for parameter, total in self._sums.items():
                parameter.grad = total
            self._sums.clear()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
