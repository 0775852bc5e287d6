"""Declares losses: the decorator `@loss(...)` registers a function as a `Loss` in `LOSSES`.

A loss of the user's, from a file or from Python, is declared by `declare_user_loss` and found by `loss_of`.

The configuration imports this module to check settings, so this module does not import torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tandem.errors import ConfigError
from tandem.terminal.commands import advice_to_allow_code
from tandem.user_code import UserFunction, is_user_function

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


USER_LOSSES: dict[str, Loss] = {}  # losses of the user's, by the name in the configuration
# What a user may declare about a loss (tandem.losses.declare). The rest is taken from the function.
USER_DECLARES = ("needs_reference", "columns", "scope", "averages", "lowers_chosen", "start", "input_settings")
DECLARED = "__tandem_loss__"  # the attribute of a function that holds what the user declared


def loss_of(name: str) -> Loss:
    """Return the loss that a configuration names.

    For a function of the user's that was not loaded, as when another run's configuration is shown, return a declaration that
    accepts every setting and cannot be computed.
    """
    if name in LOSSES:
        return LOSSES[name]
    assert is_user_function(name), name
    return USER_LOSSES.get(name) or _not_loaded(name)


def _not_loaded(name: str) -> Loss:
    def refuse(*_: Any, **__: Any) -> Tensor:
        raise ConfigError(f"dpo.preference_loss = {name}: this code was not loaded. {advice_to_allow_code()}")

    keys = tuple(dict.fromkeys(key for one in LOSSES.values() for key in one.keys))
    columns = tuple(dict.fromkeys(column for one in LOSSES.values() for column in one.columns if column != "score"))
    return Loss(function=refuse, name=name, formula="", keys=keys, columns=columns)


def declare_user_loss(given: UserFunction, settings: tuple[str, ...]) -> None:
    """Make a function of the user's known as a loss. Raise ConfigError if it cannot be called as one.

    `settings`: the arguments that a loss may have: beta, and keys of section dpo. Other arguments must have a default.
    """
    where = f"dpo.preference_loss = {given.name}"
    first, *arguments = _parameters(where, given.function, settings)
    assert first is not None
    USER_LOSSES[given.name] = Loss(
        function=_checked(where, given.function),
        name=given.name,
        formula=(given.function.__doc__ or "").strip().partition("\n")[0],
        keys=tuple(BETA if name == "beta" else name for name in arguments if name in settings),
        **getattr(given.function, DECLARED, {}),
    )


def _parameters(where: str, function: Callable[..., Any], settings: tuple[str, ...]) -> list[str]:
    signature = inspect.signature(function)
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = list(signature.parameters.values())
    usable = [one for one in parameters if one.kind not in several]
    is_wrong = (
        len(usable) < len(parameters)
        or not usable
        or usable[0].kind is inspect.Parameter.KEYWORD_ONLY
        or any(one.kind is inspect.Parameter.POSITIONAL_ONLY for one in usable[1:])
    )
    unknown = [one.name for one in usable[1:] if one.default is inspect.Parameter.empty and one.name not in settings]
    if is_wrong or unknown:
        what = f"{unknown[0]} is not a setting of losses" if unknown and not is_wrong else "it cannot be called so"
        raise ConfigError(
            f"{where}: its arguments are {signature}, but a loss is called as loss(pairs, beta=...): {what}. After the pairs, "
            f"name only settings ({', '.join(settings)}) and arguments with a default."
        )
    return [one.name for one in usable]


def _checked(where: str, function: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return the function with a check of what it returns. The check does not wait for the device."""

    @wraps(function)
    def checked(pairs: Any, **arguments: float) -> Tensor:
        from torch import Tensor

        found, expected = function(pairs, **arguments), pairs.policy.chosen.shape
        if not isinstance(found, Tensor):
            raise ConfigError(f"{where}: it returns {type(found).__name__}, not a tensor with one loss for each pair.")
        if found.shape != expected or not found.is_floating_point():
            raise ConfigError(
                f"{where}: for {expected[0]} pairs it returns a tensor of shape {list(found.shape)} and type {found.dtype}, not "
                f"one number for each pair, [{expected[0]}]. Do not average over pairs: tandem does."
            )
        return found

    return checked


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
