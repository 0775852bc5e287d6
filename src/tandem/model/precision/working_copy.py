"""bfloat16 copies of a policy's float32 weights, for forward and backward passes on a single rank.

The copies are bit for bit equal to the weights that fully_shard casts with several ranks. Without fully_shard's hooks, the host
needs less time. This matters with small packs or adapters, when the GPU waits for the host.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from tandem.model.precision.rounding import hash_start, round_to_bfloat16, salt_in_policy

# How many bfloat16 gradients a backward keeps before they are added to the float32 sums. More take more memory, fewer take
# more kernel launches.
MAX_PENDING_GRADIENTS = 2**28


@dataclass(frozen=True, slots=True)
class Copy:
    """A weight, its bfloat16 copy, and the modules that use the weight. A tied weight is used by several modules."""

    weight: nn.Parameter
    source: Tensor  # what is cast: the weight, or a tensor computed from it
    copy: nn.Parameter
    start: int  # hash input for stochastic rounding
    places: list[tuple[nn.Module, str]] = field(default_factory=list)  # modules and the parameter's name in them


class WorkingCopy:
    """The bfloat16 copies of a policy's weights. The policy's modules use the copies only inside the context `held`.

    `sources`: tensors that are cast instead of a weight.
    """

    def __init__(self, policy: nn.Module, sources: dict[nn.Parameter, Tensor] | None = None):
        self.copies: list[Copy] = []
        self._sources = sources or {}
        self.is_held = False
        self._pending: list[Copy] = []  # copies with a gradient that is not yet added to the weight's
        self._num_pending = 0  # numbers in them
        self._hooks: list[RemovableHandle] = []
        found: dict[nn.Parameter, Copy] = {}
        names = {parameter: name for name, parameter in policy.named_parameters()}
        for module in policy.modules():
            for name, parameter in module._parameters.items():
                if parameter is None or parameter.dtype != torch.float32:
                    continue
                if parameter not in found:
                    found[parameter] = self._add_copy(parameter, names[parameter])
                found[parameter].places.append((module, name))
        self._cast_all, self._add_all = _cast_and_add(self.copies)

    def _add_copy(self, weight: nn.Parameter, name: str) -> Copy:
        parameter = nn.Parameter(torch.empty_like(weight, dtype=torch.bfloat16), requires_grad=weight.requires_grad)
        source = self._sources.get(weight, weight)
        copy = Copy(weight=weight, source=source, copy=parameter, start=hash_start(0, salt_in_policy(name)))
        if weight.requires_grad:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(lambda _: self._on_gradient(copy)))
        self.copies.append(copy)
        return copy

    def _on_gradient(self, one: Copy) -> None:
        if not self._pending:
            torch.autograd.Variable._execution_engine.queue_callback(self._add_pending)  # type: ignore[attr-defined]
        self._pending.append(one)
        self._num_pending += one.weight.numel()
        if self._num_pending >= MAX_PENDING_GRADIENTS:
            self._add_pending()

    @torch.no_grad()
    def _add_pending(self) -> None:
        """Add the copies' bfloat16 gradients to the float32 gradients of the weights."""
        given: list[tuple[Tensor, Tensor, bool]] = []
        for one in self._pending:
            part, is_first = one.copy.grad, one.weight.grad is None
            assert part is not None
            if is_first:
                one.weight.grad = torch.empty_like(one.weight)
            assert one.weight.grad is not None
            given.append((one.weight.grad, part, is_first))
            one.copy.grad = None
        self._pending, self._num_pending = [], 0
        if given:
            self._add_all(given)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Cast the weights to the copies, and make the policy use the copies inside this context.

        The weights must not change inside the context.
        """
        if self.is_held:
            yield
            return
        self._use_copies()
        try:
            yield
            assert not self._pending, "a backward did not finish"
        finally:
            for one in self._pending:
                one.copy.grad = None
            self._pending, self._num_pending = [], 0
            self._set_parameters(lambda one: one.weight)
            self.is_held = False

    def keep_copies(self) -> None:
        """Replace the policy's weights with the copies permanently. The policy cannot be trained after this."""
        self._use_copies()
        for hook in self._hooks:  # each refers to its weight and would keep it in memory
            hook.remove()

    def _use_copies(self) -> None:
        self._cast_all()
        self._set_parameters(lambda one: one.copy)
        self.is_held = True

    def _set_parameters(self, which: Callable[[Copy], nn.Parameter]) -> None:
        for one in self.copies:
            for module, name in one.places:
                module._parameters[name] = which(one)


def _cast_and_add(copies: list[Copy]) -> tuple[Callable[[], None], Callable[[list[tuple[Tensor, Tensor, bool]]], None]]:
    """Return two functions: one casts all weights to their copies, the other adds gradients to their float32 sums.

    The second function takes (sum, gradient, is_first) for each weight. If is_first, the sum has no value yet and is overwritten.
    On a GPU each function is one kernel launch, because a model has hundreds of weights.
    """
    if all(one.weight.is_cuda for one in copies):
        from tandem.model.kernels.copies import Casts, Sums

        return Casts([(one.source, one.copy, one.start) for one in copies]), Sums()

    @torch.no_grad()
    def cast_all() -> None:
        for one in copies:
            one.copy.copy_(round_to_bfloat16(one.source, one.start))

    def add_all(given: list[tuple[Tensor, Tensor, bool]]) -> None:
        for total, part, is_first in given:
            total.copy_(part) if is_first else total.add_(part)

    return cast_all, add_all


class GradientSums:
    """Float32 sums of the gradients of a policy's bfloat16 parameters.

    Inside the context `held`, the gradients of each backward pass are added to the sums. `.grad` stays empty meanwhile, because
    compiled layers reject a parameter whose gradient has a different dtype. When `held` ends, the sums become the parameters'
    gradients.
    """

    def __init__(self, parameters: list[nn.Parameter]):
        self.is_held = False
        self._parameters = parameters
        self._sums: dict[nn.Parameter, Tensor] = {}
        for parameter in parameters:
            parameter.grad_dtype = None  # allow any dtype; by default it must be the parameter's
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
        """Backward passes must run inside this context. Gradients that exist on entry are included in the sums."""
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
