"""On one worker: bfloat16 copies of a policy's float32 weights, which it computes with.

They are what fully_shard makes for several workers, to the bit. Without its hooks the host is done sooner, and with small
packs or adapters it is the host that a GPU waits for.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from tandem.model.precision.rounding import rounded, salt_in_policy, start_of

# Numbers whose gradients a backward keeps in bfloat16 before they are added up: few launches, and little memory.
AT_ONCE = 2**28


@dataclass(frozen=True, slots=True)
class Copy:
    """A weight, the copy that is computed with, and the modules it stands in: tied weights stand in several."""

    weight: nn.Parameter
    copy: nn.Parameter
    start: int  # of the chances by which it is cast
    places: list[tuple[nn.Module, str]] = field(default_factory=list)


class WorkingCopy:
    """The copies of a policy's weights. Only while they are held do they stand in its modules."""

    def __init__(self, policy: nn.Module):
        self.copies: list[Copy] = []
        self.is_held = False
        self._ungathered: list[Copy] = []  # whose gradients this backward has computed
        self._num_ungathered = 0  # numbers of theirs
        self._hooks: list[RemovableHandle] = []
        found: dict[nn.Parameter, Copy] = {}
        names = {parameter: name for name, parameter in policy.named_parameters()}
        for module in policy.modules():
            for name, parameter in module._parameters.items():
                if parameter is None or parameter.dtype != torch.float32:
                    continue
                if parameter not in found:
                    found[parameter] = self._copied(parameter, names[parameter])
                found[parameter].places.append((module, name))
        self._cast_all, self._add_all = _cast_and_add(self.copies)

    def _copied(self, weight: nn.Parameter, name: str) -> Copy:
        copy = nn.Parameter(torch.empty_like(weight, dtype=torch.bfloat16), requires_grad=weight.requires_grad)
        made = Copy(weight, copy, start_of(0, salt_in_policy(name)))
        if weight.requires_grad:
            self._hooks.append(copy.register_post_accumulate_grad_hook(lambda _: self._have_gradient(made)))
        self.copies.append(made)
        return made

    def _have_gradient(self, one: Copy) -> None:
        if not self._ungathered:
            torch.autograd.Variable._execution_engine.queue_callback(self._gather)  # type: ignore[attr-defined]
        self._ungathered.append(one)
        self._num_ungathered += one.weight.numel()
        if self._num_ungathered >= AT_ONCE:
            self._gather()

    @torch.no_grad()
    def _gather(self) -> None:
        """What a backward gave the copies as gradients goes to the weights', sums in float32."""
        given: list[tuple[Tensor, Tensor, bool]] = []
        for one in self._ungathered:
            part, is_first = one.copy.grad, one.weight.grad is None
            assert part is not None
            if is_first:
                one.weight.grad = torch.empty_like(one.weight)
            assert one.weight.grad is not None
            given.append((one.weight.grad, part, is_first))
            one.copy.grad = None
        self._ungathered, self._num_ungathered = [], 0
        if given:
            self._add_all(given)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The policy computes with the copies, cast anew from its weights, which must stay as they are meanwhile."""
        if self.is_held:
            yield
            return
        self._put_in()
        try:
            yield
            assert not self._ungathered, "a backward did not end"
        finally:
            for one in self._ungathered:
                one.copy.grad = None
            self._ungathered, self._num_ungathered = [], 0
            self._stand(lambda one: one.weight)
            self.is_held = False

    def keep_copies(self) -> None:
        """The policy computes with the copies for good, and has no other weights. Nothing is trained any more."""
        self._put_in()
        for hook in self._hooks:  # each knows its weight, which would live on
            hook.remove()

    def _put_in(self) -> None:
        self._cast_all()
        self._stand(lambda one: one.copy)
        self.is_held = True

    def _stand(self, which: Callable[[Copy], nn.Parameter]) -> None:
        for one in self.copies:
            for module, name in one.places:
                module._parameters[name] = which(one)


def _cast_and_add(copies: list[Copy]) -> tuple[Callable[[], None], Callable[[list[tuple[Tensor, Tensor, bool]]], None]]:
    """How all weights are cast into their copies, and how gradients are added: sum, part, and whether the sum is yet to be.

    On a GPU each with one launch, since a model has hundreds of them.
    """
    if all(one.weight.is_cuda for one in copies):
        from tandem.model.kernels.copies import Casts, Sums

        return Casts([(one.weight, one.copy, one.start) for one in copies]), Sums()

    @torch.no_grad()
    def cast_all() -> None:
        for one in copies:
            one.copy.copy_(rounded(one.weight, one.start))

    def add_all(given: list[tuple[Tensor, Tensor, bool]]) -> None:
        for total, part, is_first in given:
            total.copy_(part) if is_first else total.add_(part)

    return cast_all, add_all


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
