"""How a loss is declared: `@loss(...)` above its function registers a `Loss` in `LOSSES`.

Configuration reads these declarations, so this module imports no torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])

Scope = Literal["pair", "batch"]

# The key of section dpo that a loss takes as its argument `beta`. Every other argument has the name of its key.
BETA = "reference_policy_kl_penalty"

# The keys of section dpo that change the input of every chosen loss, or weight its output.
INPUT_SETTINGS = ("preference_average_log_probs", "ld_alpha", "f_divergence", "wpo")


@dataclass(frozen=True, slots=True)
class Published:
    """The values of one argument that a paper, or its authors, used; for summed log-probabilities."""

    key: str
    least: float
    most: float
    source: str

    def times_off(self, value: float) -> float:
        """How many times less than the least, or more than the most; 1 in between."""
        return max(self.least / value, value / self.most, 1.0)

    def spelled(self) -> str:
        return f"{self.least:g}" if self.least == self.most else f"{self.least:g} to {self.most:g}"


def published_beta(least: float, source: str, *, most: float | None = None) -> Published:
    return Published(BETA, least, least if most is None else most, source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """An argument that one loss restricts more than its key does. Both bounds are excluded."""

    key: str
    above: float = float("-inf")
    below: float = float("inf")
    example: float | None = None  # where the default of the key is out of bounds: a value that is not
    reason: str | None = None

    def allow(self, value: float) -> bool:
        return self.above < value < self.below

    def spelled(self) -> str:
        """more than 0, for instance 0.001, since the logarithm of it is taken"""
        bounds = [("more", self.above, float("-inf")), ("less", self.below, float("inf"))]
        wanted = " and ".join(f"{word} than {bound:g}" for word, bound, unset in bounds if bound != unset)
        example = None if self.example is None else f"for instance {self.example:g}"
        return ", ".join(part for part in (wanted, example, self.reason) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A loss as it is declared: its function, the settings it reads, and what it needs."""

    # Taken from the function
    function: Callable[..., Tensor]  # Pairs in, [pairs] out
    name: str
    formula: str  # the first line of the docstring: the formula and where it was published
    keys: tuple[str, ...]  # of section dpo: its arguments
    # Declared
    aliases: tuple[str, ...] = ()
    input_settings: tuple[str, ...] = INPUT_SETTINGS  # those it supports
    needs_reference: bool = True
    columns: tuple[str, ...] = ()  # of columns.py: those that the formula reads
    scope: Scope = "pair"  # batch: the loss of one pair depends on all others of the global batch
    averages: bool = False  # divides by completion length itself
    averaged_as: str | None = None  # the loss that it becomes with preference_average_log_probs
    lowers_chosen: bool = False  # by design
    start: float | Callable[..., float] | None = None  # see start_value; a function takes the arguments of the loss
    bounds: tuple[Bounds, ...] = ()
    published: tuple[Published, ...] = ()  # empty where no source is known

    def supports_column(self, name: str) -> bool:
        """Whether a data column has an effect on this loss. A weight has one on every loss that is computed per pair."""
        return self.scope == "pair" if name == "weight" else name in self.columns

    def arguments(self, settings: object) -> dict[str, float]:
        """The keyword arguments of its function, from section dpo."""
        return {"beta" if key == BETA else key: getattr(settings, key) for key in self.keys}

    def start_value(self, settings: object) -> float | None:
        """The loss while policy and reference are equal; None where it depends on the model or on scores."""
        return self.start(**self.arguments(settings)) if callable(self.start) else self.start


LOSSES: dict[str, Loss] = {}  # by name and alias, in the order of declaration


def loss(**declared: Any) -> Callable[[Function], Function]:
    """Declares the function below it as the loss of that name. Keywords are the declared fields of `Loss`."""

    def register(function: Function) -> Function:
        _, *arguments = inspect.signature(function).parameters
        declaration = Loss(
            function=function,
            name=function.__name__,
            formula=(function.__doc__ or "").partition("\n")[0],
            keys=tuple(BETA if name == "beta" else name for name in arguments),
            **declared,
        )
        for name in (declaration.name, *declaration.aliases):
            assert name not in LOSSES, f"two losses are called {name}"
            LOSSES[name] = declaration
        return function

    return register
