"""On one worker: bfloat16 copies of a policy's float32 weights, which it computes with.

They are what fully_shard makes for several workers, to the bit. Without its hooks the host is done sooner, and with small
packs or adapters it is the host that a GPU waits for.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tandem.model.rounding import rounded, salt_in_policy, start_of


@dataclass(frozen=True, slots=True)
class Copy:
    """A weight, the copy that is computed with, and the modules it stands in: tied weights stand in several."""

    weight: nn.Parameter
    copy: nn.Parameter
    start: int  # of the chances by which it is cast
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    def gather(self, copy: Tensor) -> None:
        """What a backward gave the copy as gradient goes to the weight's, a sum in float32."""
        assert copy.grad is not None
        if self.weight.grad is None:
            self.weight.grad = copy.grad.float()
        else:
            self.weight.grad.add_(copy.grad)
        copy.grad = None


class WorkingCopy:
    """The copies of a policy's weights. Only while they are held do they stand in its modules."""

    def __init__(self, policy: nn.Module):
        self.copies: list[Copy] = []
        self.is_held = False
        found: dict[nn.Parameter, Copy] = {}
        names = {parameter: name for name, parameter in policy.named_parameters()}
        for module in policy.modules():
            for name, parameter in module._parameters.items():
                if parameter is None or parameter.dtype != torch.float32:
                    continue
                if parameter not in found:
                    found[parameter] = self._copied(parameter, names[parameter])
                found[parameter].places.append((module, name))
        self._refresh = _refreshing(self.copies)

    def _copied(self, weight: nn.Parameter, name: str) -> Copy:
        copy = nn.Parameter(torch.empty_like(weight, dtype=torch.bfloat16), requires_grad=weight.requires_grad)
        made = Copy(weight, copy, start_of(0, salt_in_policy(name)))
        if weight.requires_grad:
            copy.register_post_accumulate_grad_hook(made.gather)
        self.copies.append(made)
        return made

    @contextmanager
    def held(self) -> Iterator[None]:
        """The policy computes with the copies, cast anew from its weights, which must stay as they are meanwhile."""
        if self.is_held:
            yield
            return
        self.put_in()
        try:
            yield
        finally:
            self._stand(lambda one: one.weight)
            self.is_held = False

    def put_in(self) -> None:
        """For good, if nobody takes them out."""
        self._refresh()
        self._stand(lambda one: one.copy)
        self.is_held = True

    def _stand(self, which: Callable[[Copy], nn.Parameter]) -> None:
        for one in self.copies:
            for module, name in one.places:
                module._parameters[name] = which(one)


def _refreshing(copies: list[Copy]) -> Callable[[], None]:
    """Casts all weights into their copies: on a GPU with one launch, since a model has hundreds of them."""
    if all(one.weight.is_cuda for one in copies):
        from tandem.model.cast_kernel import Casts

        return Casts([(one.weight, one.copy, one.start) for one in copies])

    @torch.no_grad()
    def refresh() -> None:
        for one in copies:
            one.copy.copy_(rounded(one.weight, one.start))

    return refresh
