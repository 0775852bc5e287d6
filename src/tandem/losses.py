"""The preference losses, for Python: their names, formulas and arguments, one computed on given log-probabilities, and your own.

    tandem.losses.names()
    tandem.losses.describe("ipo")
    tandem.losses.compute("dpo", chosen=[-20.0], rejected=[-24.0], reference_chosen=[-20.5], reference_rejected=[-23.5])

A loss of your own is a function of `Pairs` that returns one number for each pair (docs/python.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tandem.config.losses import LOSS_ARGUMENTS, unknown_loss
from tandem.config.sections.dpo import Dpo
from tandem.config.validation import validate
from tandem.errors import ConfigError
from tandem.loss.declare import BETA, DECLARED, USER_DECLARES, declare_user_loss, loss_of
from tandem.loss.losses import LOSSES
from tandem.user_code import UserFunction

if TYPE_CHECKING:
    from torch import Tensor

    from tandem.loss.pairs import Pairs as Pairs

Function = TypeVar("Function", bound=Callable[..., Any])

__all__ = ["LossDescription", "compute", "declare", "describe", "names"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossDescription:
    """What is known about a loss."""

    name: str
    aliases: tuple[str, ...]
    formula: str  # and where it was published
    arguments: dict[str, float]  # keyword arguments and their defaults; each is a key of section dpo, and beta is
    # dpo.reference_policy_kl_penalty
    needs_reference: bool
    columns: tuple[str, ...]  # of the data, such as score
    scope: str  # pair, or batch if the loss of a pair depends on the others


def names() -> list[str]:
    """Return the name of every loss. Aliases, such as sigmoid for dpo, are left out."""
    return [name for name, loss in LOSSES.items() if loss.name == name]


def describe(name: str) -> LossDescription:
    """Return what is known about a loss."""
    _refuse_unknown(name)
    loss, fields = loss_of(name), Dpo.model_fields
    return LossDescription(
        name=loss.name,
        aliases=loss.aliases,
        formula=loss.formula,
        arguments={"beta" if key == BETA else key: fields[key].default for key in loss.keys},
        needs_reference=loss.needs_reference,
        columns=loss.columns,
        scope=loss.scope,
    )


def compute(
    loss: str | Callable[..., "Tensor"],
    *,
    chosen: "Tensor | Sequence[float]",
    rejected: "Tensor | Sequence[float]",
    reference_chosen: "Tensor | Sequence[float] | None" = None,
    reference_rejected: "Tensor | Sequence[float] | None" = None,
    num_tokens_chosen: "Tensor | Sequence[int] | None" = None,
    num_tokens_rejected: "Tensor | Sequence[int] | None" = None,
    scores_chosen: "Tensor | Sequence[float] | None" = None,
    scores_rejected: "Tensor | Sequence[float] | None" = None,
    beta: float = 0.1,
    **settings: Any,
) -> "Tensor":
    """Return the loss of each pair: [pairs]. A gradient flows to `chosen` and `rejected` if they are tensors that need one.

    loss: a name, or a function of your own. chosen, rejected: log-probabilities of the completions, summed over tokens;
    reference_*: those of the reference, which a loss without a reference does not need. num_tokens_*: lengths, for losses that
    divide by them; 1 by default. scores_*: scores in the data. settings: keys of section dpo, such as label_smoothing=0.1.
    """
    import torch

    from tandem.completions import ChosenRejected
    from tandem.loss.objective import combined_losses, pairs_from_sums
    from tandem.loss.pairs import PairSums

    def both(one: Any, other: Any, default: float) -> ChosenRejected:
        given = [None if values is None else _tensor(values).to(policy.dtype) for values in (one, other)]
        if any(values is not None and values.shape != policy.shape for values in given):
            raise ConfigError(f"every argument needs one number for each of the {len(policy)} pairs.")
        made = [torch.full_like(policy, default) if values is None else values for values in given]
        return ChosenRejected(made[0], made[1])

    policy = _tensor(chosen).detach()
    name = _named(loss)
    if loss_of(name).needs_reference and (reference_chosen is None or reference_rejected is None):
        raise ConfigError(f"{name} needs a reference. Give reference_chosen and reference_rejected.")
    sums = PairSums(
        policy=ChosenRejected(_tensor(chosen), both(rejected, None, 0.0).chosen),
        reference=both(reference_chosen, reference_rejected, 0.0),
        num_tokens=both(num_tokens_chosen, num_tokens_rejected, 1.0),
        columns={"score": both(scores_chosen, scores_rejected, float("nan"))} if scores_chosen is not None else {},
    )
    dpo = _settings_of({"preference_loss": name, BETA: beta, **settings})
    return combined_losses(pairs_from_sums(sums, dpo), dpo)


def declare(**declared: Any) -> Callable[[Function], Function]:
    """Return a decorator that declares what your loss needs, where it differs from DPO.

    needs_reference=False: computed without a reference. columns=("score",): reads scores of the data. scope="batch": the loss of
    a pair depends on the other pairs. averages=True: divides by lengths, so rewards are per token. start: its value while
    policy and reference are equal. lowers_chosen=True: chosen completions become less likely by design.
    """
    if unknown := [name for name in declared if name not in USER_DECLARES]:
        raise ConfigError(f"{unknown[0]}: not a property of losses. Use {', '.join(USER_DECLARES)}.")

    def mark(function: Function) -> Function:
        setattr(function, DECLARED, declared)
        return function

    return mark


def _named(loss: str | Callable[..., Any]) -> str:
    if isinstance(loss, str) or not callable(loss):
        _refuse_unknown(loss)
        return loss
    name = f"python:{getattr(loss, '__name__', 'loss').strip('<>')}"
    declare_user_loss(UserFunction(name, loss, ""), ("beta", *LOSS_ARGUMENTS))
    return name


def _settings_of(keys: dict[str, Any]) -> Dpo:
    """Return section dpo with these keys. Raise ConfigError, in the words of `compute`, for those that are not valid."""
    try:
        return validate({"dpo": keys}, {"dpo": "losses.compute"}, {}).dpo
    except ConfigError as error:
        raise ConfigError(str(error).replace(f"dpo.{BETA}", "beta").replace("dpo.", "")) from None


def _refuse_unknown(name: str) -> None:
    if name not in LOSSES:
        raise ConfigError(f"{unknown_loss(name)}.")


def _tensor(values: Any) -> "Tensor":
    import torch

    try:
        found = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        found = None
    if found is None or found.dim() != 1:
        raise ConfigError("every argument needs one number for each pair: a list, or a tensor of one dimension.")
    return found


def __getattr__(name: str) -> Any:
    if name == "Pairs":  # imports torch
        from tandem.loss.pairs import Pairs

        return Pairs
    raise AttributeError(f"module 'tandem.losses' has no attribute {name!r}")
