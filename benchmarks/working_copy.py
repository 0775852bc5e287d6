"""An experiment: on one worker, bfloat16 weights beside float32 ones without fully_shard, whose hooks cost the host time.

    python benchmarks/train.py --working-copy ...

A policy is computed with copies of its weights, cast by chance as tandem.model.parallel casts them; what a backward adds to a
copy's gradient goes to the float32 weight's at once.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from tandem.model.policy import Policy
from tandem.model.rounding import rounded, salt_of, start_of

T = TypeVar("T")


class WorkingCopy:
    def __init__(self, policy: Policy):
        self.policy = policy
        found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in policy.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.dtype == torch.float32:
                    found.setdefault(parameter, []).append((module, name))
        names = {parameter: name for name, parameter in policy.named_parameters()}
        self.copies = [_Copy(parameter, names[parameter], places) for parameter, places in found.items()]

    @contextmanager
    def computed_with(self) -> Iterator[None]:
        """The copies stand in the policy's modules."""
        for copy in self.copies:
            copy.put_in()
        try:
            yield
        finally:
            for copy in self.copies:
                copy.take_out()

    def in_turn(self, policy: Policy, packs: Iterable[T], workers: object) -> Iterator[T]:
        with self.computed_with():
            yield from packs

    @contextmanager
    def unchanged(self, policy: Policy, workers: object) -> Iterator[None]:
        with self.computed_with():
            yield


class _Copy:
    def __init__(self, weight: nn.Parameter, name: str, places: list[tuple[nn.Module, str]]):
        self.weight, self.places = weight, places
        self.start = start_of(0, salt_of(name.removeprefix("model.").replace(".base_layer.", ".")))
        self.empty = torch.empty(0, dtype=torch.bfloat16, device=weight.device)
        self.copy = nn.Parameter(self.empty, requires_grad=weight.requires_grad)
        if weight.requires_grad:
            self.copy.register_post_accumulate_grad_hook(self._gather)

    def put_in(self) -> None:
        self.copy.data = rounded(self.weight.detach(), self.start)
        for module, name in self.places:
            module._parameters[name] = self.copy

    def take_out(self) -> None:
        for module, name in self.places:
            module._parameters[name] = self.weight
        self.copy.data = self.empty

    def _gather(self, copy: Tensor) -> None:
        grad, copy.grad = copy.grad, None
        if grad is None:
            return
        if self.weight.grad is None:
            self.weight.grad = grad.float()
        else:
            self.weight.grad.add_(grad)
