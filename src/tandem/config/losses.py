"""Reports what the chosen losses need and which settings they support, as declared in loss/losses.py."""

import difflib
import json
from collections.abc import Collection, Iterable, Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal

from tandem.config.sections.section import UserFunctionName
from tandem.loss.declare import BETA, INPUT_SETTINGS, Scope, loss_of
from tandem.loss.losses import LOSSES
from tandem.user_code import function_missing, is_user_function

if TYPE_CHECKING:
    LossName = str
else:
    LossName = Literal[tuple(LOSSES)] | UserFunctionName  # so that the schema and docs/keys.md list the names
ChosenLosses = LossName | dict[LossName, float]

# The keys of section dpo that only some losses read; beta is reported separately.
LOSS_ARGUMENTS = tuple(dict.fromkeys(key for loss in LOSSES.values() for key in loss.keys if key != BETA))

ORDER_OF_MAGNITUDE = 10

# The SFT term with and without dpo.sft_average_log_probs.
SFT_TERM = {
    True: "an average over the tokens of the chosen completion",
    False: "a sum over the tokens of the chosen completion (dpo.sft_average_log_probs=true: an average)",
}


def weights_of(chosen: ChosenLosses) -> dict[LossName, float]:
    """Return a dict from each chosen loss to its weight. A loss given as a name alone has weight 1."""
    return chosen if isinstance(chosen, dict) else {chosen: 1.0}


def spelled(chosen: ChosenLosses) -> str:
    """Return the losses as text: "dpo", or "dpo x 1 + bco_pair x 0.2"."""
    return chosen if isinstance(chosen, str) else " + ".join(f"{name} x {weight:g}" for name, weight in chosen.items())


def needs_reference(chosen: ChosenLosses) -> bool:
    return any(loss_of(name).needs_reference for name in weights_of(chosen))


def averages(chosen: ChosenLosses) -> bool:
    """Whether every chosen loss, by its definition, averages log-probabilities over the tokens of a completion."""
    return all(loss_of(name).averages for name in weights_of(chosen))


def without_reference() -> list[LossName]:
    return [name for name, loss in LOSSES.items() if not loss.needs_reference]


def is_dpo(chosen: ChosenLosses) -> bool:
    """Whether dpo, or its alias sigmoid, is the only chosen loss."""
    return {loss_of(name).name for name in weights_of(chosen)} == {"dpo"}


def reads(chosen: ChosenLosses, key: str) -> bool:
    return any(key in loss_of(name).keys for name in weights_of(chosen))


def supports(chosen: ChosenLosses, input_setting: str) -> bool:
    """Whether every chosen loss supports `input_setting`, such as ld_alpha: a setting that changes the inputs of all losses."""
    return all(input_setting in loss_of(name).input_settings for name in weights_of(chosen))


def lowers_chosen(chosen: ChosenLosses) -> bool:
    """Whether any chosen loss lowers the log-probability of chosen completions by design."""
    return any(loss_of(name).lowers_chosen for name in weights_of(chosen))


def needs_scores(chosen: ChosenLosses) -> bool:
    return any("score" in loss_of(name).columns for name in weights_of(chosen))


def scope_of(chosen: ChosenLosses) -> Scope:
    return "batch" if any(loss_of(name).scope == "batch" for name in weights_of(chosen)) else "pair"


def unsupported_column(chosen: ChosenLosses, column: str) -> tuple[str, str] | None:
    """Return two texts: why a chosen loss does not support `column` of the data, and which losses support the column.

    Return None if all chosen losses support the column.
    """
    unsupported_by = [name for name in weights_of(chosen) if not loss_of(name).supports_column(column)]
    if not unsupported_by:
        return None
    reason = f"is not supported by dpo.preference_loss {join_names(unsupported_by, 'and')}"
    if column == "weight":
        return (
            f"{reason}, which is computed over a batch, not per pair",
            "a loss that is computed per pair",
        )
    supporting = [name for name, loss in LOSSES.items() if loss.supports_column(column)]
    return reason, join_names(supporting, "or") if supporting else "a loss that reads this column, once there is one"


def far_from_published(chosen: ChosenLosses, values: Mapping[str, Any]) -> list[str]:
    """Return a warning for each setting at least ten times above or below the values published for a chosen loss.

    `values`: the settings of section dpo. A setting of 0 turns its term off, and is not compared.
    """
    reasons = []
    for name in weights_of(chosen):
        found, known = name, loss_of(name).published
        if values["preference_average_log_probs"]:
            # Published values are for summed log-probabilities. Averaging may turn a loss into another published one.
            averaged = loss_of(name).averaged_as
            found, known = f"{loss_of(name).name} per token", loss_of(averaged).published if averaged else ()
        for one in known:
            value = values[one.key]
            # with a tolerance, so that 0.1 / 0.01 counts as ten times
            if value and (off := one.times_off(value)) > ORDER_OF_MAGNITUDE * (1 - 1e-9):
                nearest = one.least if value < one.least else one.most
                reasons.append(
                    f"dpo.{one.key} = {value:g} is {off:.3g} times {'less' if value < one.least else 'more'} than the published "
                    f"value for {found} ({one.spelled()}, {one.source}). The objective may differ, or the model may barely "
                    f"change. Set dpo.{one.key}={nearest:g}, unless {value:g} is intended."
                )
    return reasons


def why_not_losses(chosen: Any) -> str | None:
    """Return why a value of dpo.preference_loss is invalid, or None if it is valid: a loss, or a map of losses to weights."""
    if not isinstance(chosen, str | dict):
        return (
            f"dpo.preference_loss = {json.dumps(chosen, default=str)} is neither a loss nor a map of losses to weights. "
            "Write dpo, or {dpo: 0.8, bco_pair: 0.2}, for example"
        )
    for name in [chosen] if isinstance(chosen, str) else chosen:
        if name not in LOSSES and not is_user_function(name):
            if missing := function_missing(name):
                return f"dpo.preference_loss = {name}: {missing}"
            return f"dpo.preference_loss: {unknown_loss(name)}"
    if chosen == {}:
        return "dpo.preference_loss is empty. Name a loss, such as dpo"
    weights = chosen.items() if isinstance(chosen, dict) else []
    for name, weight in weights:
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not isfinite(weight) or weight <= 0:
            return f"dpo.preference_loss.{name} = {json.dumps(weight, default=str)}: a weight must be a number above 0"
    return None


def unknown_loss(name: Any) -> str:
    """Return a message about a name that is not a loss, without its last full stop, with the nearest names and all of them."""
    low = str(name).lower()
    near = [known for known in LOSSES if known.startswith(f"{low}_")]
    near = near or difflib.get_close_matches(low, LOSSES, 1)
    hint = f" Did you mean {join_names(near, 'or')}?" if near else ""
    return f"unknown loss {name!r}.{hint} Use one of {join_names(LOSSES, 'or')}"


def unsupported_settings(chosen: ChosenLosses, values: Mapping[str, Any], changed: Collection[str]) -> list[str]:
    """Return a message for each setting that does not work with the chosen losses.

    `values`: the settings of section dpo. `changed`: the keys whose values are not their defaults.
    """
    names = list(weights_of(chosen))
    reasons = []
    for key in changed:
        readers = [name for name, loss in LOSSES.items() if key in loss.keys]
        if readers and not reads(chosen, key):
            reasons.append(_no_effect(key, values[key], names, readers))
    for key in changed:
        unsupported_by = [name for name in names if key in INPUT_SETTINGS and not supports(name, key)]
        if unsupported_by:
            supporting = [name for name in LOSSES if supports(name, key)]
            reasons.append(_no_effect(key, values[key], unsupported_by, supporting))
    return [*reasons, *_check_divergence(values), *_out_of_bounds(names, values)]


def _check_divergence(values: Mapping[str, Any]) -> list[str]:
    """Return a list with the reason why dpo.f_alpha does not work with dpo.f_divergence; empty if it works."""
    is_alpha, has_order = values["f_divergence"] == "alpha", values["f_alpha"] != 1
    if has_order and not is_alpha:
        return [
            f"dpo.f_alpha = {values['f_alpha']} has an effect only with dpo.f_divergence=alpha. Set both, or leave out "
            "dpo.f_alpha"
        ]
    if is_alpha and not has_order:
        return [
            "dpo.f_divergence = alpha with dpo.f_alpha = 1 is the same as reverse_kl. Set dpo.f_alpha to another value, such "
            "as 0.5, or leave out dpo.f_divergence"
        ]
    return []


def _out_of_bounds(names: list[LossName], values: Mapping[str, Any]) -> list[str]:
    return [
        f"dpo.{bounds.key} = {values[bounds.key]}: dpo.preference_loss {name} needs {bounds.spelled()}"
        for name in names
        for bounds in loss_of(name).bounds
        if not bounds.allow(values[bounds.key])
    ]


def _no_effect(key: str, value: Any, unsupported_by: Iterable[str], readers: Iterable[str]) -> str:
    return (
        f"dpo.{key} = {json.dumps(value)} has no effect on dpo.preference_loss {join_names(unsupported_by, 'and')}. "
        f"Leave it out, or use {join_names(readers, 'or')}"
    )


def join_names(names: Iterable[str], last: Literal["and", "or"]) -> str:
    """Join names with commas, and the last two with `last`: "a, b and c"."""
    *most, final = names
    return f"{', '.join(most)} {last} {final}" if most else final
