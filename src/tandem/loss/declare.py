"""Declares losses: the decorator `@loss(...)` registers a function as a `Loss` in `LOSSES`.

The configuration imports this module to check settings, so this module does not import torch.
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

# The keys of section dpo that change the input of every loss that supports them, or weight its output.
INPUT_SETTINGS = ("preference_average_log_probs", "ld_alpha", "f_divergence", "wpo")


@dataclass(frozen=True, slots=True)
class Published:
    """The range of values that a paper or its authors used for one argument of a loss.

    The values apply to log-probabilities that are summed over tokens, not averaged.
    """

    key: str
    least: float
    most: float
    source: str

    def times_off(self, value: float) -> float:
        """Return by which factor `value` is above or below the range: 1 inside the range, 2 for twice its upper end."""
        return max(self.least / value, value / self.most, 1.0)

    def spelled(self) -> str:
        return f"{self.least:g}" if self.least == self.most else f"{self.least:g} to {self.most:g}"


def published_beta(least: float, source: str, *, most: float | None = None) -> Published:
    return Published(BETA, least, least if most is None else most, source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds on an argument of a loss, narrower than those of the configuration key. The bounds themselves are not allowed."""

    key: str
    above: float = float("-inf")
    below: float = float("inf")
    example: float | None = None  # a value within the bounds, if the key's default is not
    reason: str | None = None

    def allow(self, value: float) -> bool:
        return self.above < value < self.below

    def spelled(self) -> str:
        """Return the bounds in words, such as "more than 0, for instance 0.001, since the logarithm of it is taken"."""
        bounds = [("more", self.above, float("-inf")), ("less", self.below, float("inf"))]
        wanted = " and ".join(f"{word} than {bound:g}" for word, bound, unset in bounds if bound != unset)
        example = None if self.example is None else f"for instance {self.example:g}"
        return ", ".join(part for part in (wanted, example, self.reason) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A declared loss: its function, the settings that it reads, and its requirements."""

    # Taken from the function
    function: Callable[..., Tensor]  # takes Pairs, returns [pairs]
    name: str
    formula: str  # the first line of the docstring: the formula and where it was published
    keys: tuple[str, ...]  # its arguments, as keys of section dpo
    # Declared
    aliases: tuple[str, ...] = ()
    input_settings: tuple[str, ...] = INPUT_SETTINGS  # the INPUT_SETTINGS that it supports
    needs_reference: bool = True
    columns: tuple[str, ...] = ()  # data columns (columns.py) that the formula reads
    scope: Scope = "pair"  # batch: the loss of a pair depends on all pairs of the global batch
    averages: bool = False  # the formula divides by completion length
    averaged_as: str | None = None  # the loss that this one equals with preference_average_log_probs
    lowers_chosen: bool = False  # by design, lowers the log-probability of chosen completions
    start: float | Callable[..., float] | None = None  # see start_value; a function is called with the loss's arguments
    bounds: tuple[Bounds, ...] = ()
    published: tuple[Published, ...] = ()  # empty if no source is known

    def supports_column(self, name: str) -> bool:
        """Return whether the data column `name` affects this loss. `weight` affects every loss that is computed pair by pair."""
        return self.scope == "pair" if name == "weight" else name in self.columns

    def arguments(self, settings: object) -> dict[str, float]:
        """Return the keyword arguments of the loss function. `settings`: section dpo of the configuration."""
        return {"beta" if key == BETA else key: getattr(settings, key) for key in self.keys}

    def start_value(self, settings: object) -> float | None:
        """Return the value of the loss if policy and reference are equal; None if the value depends on the model or on scores."""
        return self.start(**self.arguments(settings)) if callable(self.start) else self.start


LOSSES: dict[str, Loss] = {}  # by name and alias, in the order of declaration


def loss(**declared: Any) -> Callable[[Function], Function]:
    """Return a decorator that registers a function as a loss. `declared`: fields of `Loss`, such as `needs_reference`."""

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
