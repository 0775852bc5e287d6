"""What each preference loss reads and needs, by name. Its formula, which needs torch, stands in loss/preference.py."""

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

LossName = Literal[
    "dpo",
    "sigmoid",
    "ipo",
    "rpo_sq",
    "rpo_bwd_kl",
    "rpo_fwd_kl",
    "hinge",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sigmoid_norm",
    "simpo",
    "orpo",
    "cpo",
]
PreferenceLoss = LossName | dict[LossName, float]
Scope = Literal["pair", "batch"]

BETA = "reference_policy_kl_penalty"
SHARED = ("preference_average_log_probs", "ld_alpha", "f_divergence", "wpo")


ORDER_OF_MAGNITUDE = 10

# What dpo.sft_average_log_probs makes of the SFT term.
SFT_TERM = {
    True: "an average over the tokens of the chosen completion",
    False: "a sum over the tokens of the chosen completion (dpo.sft_average_log_probs=true: an average)",
}


@dataclass(frozen=True, slots=True)
class Published:
    """The settings that a paper, or its authors, used for one key."""

    key: str
    least: float
    most: float
    source: str

    def times_off(self, value: float) -> float:
        """How many times less than the least, or more than the most; 1 in between."""
        return max(self.least / value, value / self.most, 1.0)

    def spelled(self) -> str:
        return f"{self.least:g}" if self.least == self.most else f"{self.least:g} to {self.most:g}"


def _beta(least: float, source: str, most: float | None = None) -> Published:
    return Published(BETA, least, least if most is None else most, source)


@dataclass(frozen=True, slots=True)
class LossFacts:
    """Which keys of section dpo a loss reads, and what it needs besides the policy."""

    arguments: tuple[str, ...]  # keys that are the loss's own
    shared: tuple[str, ...] = SHARED  # of the keys that change what all chosen losses see, those it has a meaning with
    needs_reference: bool = True
    needs_scores: bool = False
    averages: bool = False  # divides by completion length itself
    lowers_chosen: bool = False  # on purpose
    scope: Scope = "pair"  # batch: one pair's loss depends on all others of the global batch
    published: tuple[
        Published, ...
    ] = ()  # of log-probabilities as the loss itself takes them; none where nothing is known


LOSS_FACTS: dict[LossName, LossFacts] = {
    # The paper has 0.1 and 0.5; 0.01 is usual since Zephyr.
    "dpo": LossFacts((BETA, "label_smoothing"), published=(_beta(0.01, "arXiv:2305.18290", 0.5),)),
    "sigmoid": LossFacts((BETA, "label_smoothing"), published=(_beta(0.01, "arXiv:2305.18290", 0.5),)),
    "ipo": LossFacts((BETA,)),
    "rpo_sq": LossFacts((BETA, "gt_reward_scale"), needs_scores=True),
    "rpo_bwd_kl": LossFacts((BETA, "gt_reward_scale"), needs_scores=True),
    "rpo_fwd_kl": LossFacts((BETA, "gt_reward_scale"), needs_scores=True),
    "hinge": LossFacts((BETA,)),
    "robust": LossFacts((BETA, "label_smoothing"), published=(_beta(0.01, "arXiv:2403.00409"),)),
    "exo_pair": LossFacts(
        (BETA, "label_smoothing"),
        published=(_beta(0.1, "arXiv:2402.00856"), Published("label_smoothing", 0.001, 0.001, "arXiv:2402.00856")),
    ),
    "nca_pair": LossFacts((BETA,), published=(_beta(0.01, "arXiv:2402.05369"),)),
    "bco_pair": LossFacts((BETA,), published=(_beta(0.01, "arXiv:2404.04656"),)),
    "sppo_hard": LossFacts((BETA,), published=(_beta(0.001, "arXiv:2405.00675, whose eta is 1 / beta"),)),
    # Sorted over the batch, a loss belongs to no pair: there is nothing for a pair's WPO weight to multiply.
    # aot compares log-probabilities before any ratio is made of them, so no divergence has a say in it.
    "aot": LossFacts((BETA, "label_smoothing"), ("preference_average_log_probs", "ld_alpha"), scope="batch"),
    "aot_unpaired": LossFacts(
        (BETA, "label_smoothing"), ("preference_average_log_probs", "ld_alpha", "f_divergence"), scope="batch"
    ),
    "apo_zero": LossFacts((BETA,), published=(_beta(0.1, "arXiv:2408.06266"),)),
    "apo_down": LossFacts((BETA,), lowers_chosen=True, published=(_beta(0.1, "arXiv:2408.06266"),)),
    "discopop": LossFacts(
        (BETA, "discopop_tau"),
        published=(_beta(0.05, "arXiv:2406.08414"), Published("discopop_tau", 0.05, 0.05, "arXiv:2406.08414")),
    ),
    "sigmoid_norm": LossFacts((BETA,), ("ld_alpha", "wpo"), averages=True, published=(_beta(5.0, "arXiv:2411.15124"),)),
    "simpo": LossFacts(
        (BETA, "simpo_gamma"),
        ("wpo",),
        needs_reference=False,
        averages=True,
        published=(_beta(2.0, "arXiv:2405.14734", 10.0),),
    ),
    "orpo": LossFacts(
        ("orpo_lambda",),
        ("wpo",),
        needs_reference=False,
        averages=True,
    ),
    "cpo": LossFacts(
        (BETA, "cpo_alpha"),
        ("wpo",),
        needs_reference=False,
        published=(Published("cpo_alpha", 1.0, 1.0, "arXiv:2401.08417"),),
    ),
}


LOSS_ARGUMENTS = tuple(dict.fromkeys(key for facts in LOSS_FACTS.values() for key in facts.arguments if key != BETA))


def weights_of(chosen: PreferenceLoss) -> dict[LossName, float]:
    """The chosen losses with their weights; a name alone has weight 1."""
    return chosen if isinstance(chosen, dict) else {chosen: 1.0}


def spelled(chosen: PreferenceLoss) -> str:
    """dpo; or dpo x 1 + bco_pair x 0.2"""
    return chosen if isinstance(chosen, str) else " + ".join(f"{name} x {weight:g}" for name, weight in chosen.items())


def needs_reference(chosen: PreferenceLoss) -> bool:
    return any(LOSS_FACTS[name].needs_reference for name in weights_of(chosen))


def averages(chosen: PreferenceLoss) -> bool:
    """Whether every chosen loss divides by completion length itself."""
    return all(LOSS_FACTS[name].averages for name in weights_of(chosen))


def reads(chosen: PreferenceLoss, key: str) -> bool:
    return any(key in LOSS_FACTS[name].arguments for name in weights_of(chosen))


def reads_shared(chosen: PreferenceLoss, key: str) -> bool:
    """Whether a key that changes what all chosen losses see has a meaning with every one of them."""
    return all(key in LOSS_FACTS[name].shared for name in weights_of(chosen))


def needs_scores(chosen: PreferenceLoss) -> bool:
    return any(LOSS_FACTS[name].needs_scores for name in weights_of(chosen))


def scope_of(chosen: PreferenceLoss) -> Scope:
    return "batch" if any(LOSS_FACTS[name].scope == "batch" for name in weights_of(chosen)) else "pair"


def far_from_published(chosen: PreferenceLoss, values: Mapping[str, Any]) -> list[str]:
    """Settings an order of magnitude away from those the chosen losses were published with: a sentence each.

    `values` are those of section dpo. A setting of 0 is switched off.
    """
    reasons = []
    for name in weights_of(chosen):
        found, known = name, LOSS_FACTS[name].published
        if values["preference_average_log_probs"]:
            # Log-probabilities are summed in the papers; averaged, dpo is sigmoid_norm, and of the others nothing is known.
            found, known = "dpo per token", LOSS_FACTS["sigmoid_norm"].published if name in ("dpo", "sigmoid") else ()
        for one in known:
            value = values[one.key]
            # a hair less, so that 0.1 / 0.01 is ten times
            if value and (off := one.times_off(value)) > ORDER_OF_MAGNITUDE * (1 - 1e-9):
                nearest = one.least if value < one.least else one.most
                reasons.append(
                    f"dpo.{one.key} = {value:g} is {off:.3g} times {'less' if value < one.least else 'more'} than {found} was "
                    f"published with ({one.spelled()}, {one.source}): it then learns something else, or hardly anything. "
                    f"Set dpo.{one.key}={nearest:g}, unless {value:g} is meant."
                )
    return reasons


def misnamed(chosen: Any) -> str | None:
    """Why a value of dpo.preference_loss is no loss and no map of losses to weights; None if it is one."""
    if not isinstance(chosen, str | dict):
        return (
            f"dpo.preference_loss = {json.dumps(chosen, default=str)} is neither a loss nor a map of losses to weights"
        )
    for name in [chosen] if isinstance(chosen, str) else chosen:
        if name not in LOSS_FACTS:
            low = str(name).lower()
            near = [known for known in LOSS_FACTS if known.startswith(f"{low}_")]
            near = near or difflib.get_close_matches(low, LOSS_FACTS, 1)
            hint = f" Did you mean {_listed(near, 'or')}?" if near else ""
            return f"dpo.preference_loss: there is no loss {name!r}.{hint} Known are {_listed(LOSS_FACTS, 'and')}"
    if chosen == {}:
        return "dpo.preference_loss names no loss"
    weights = chosen.items() if isinstance(chosen, dict) else []
    for name, weight in weights:
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not isfinite(weight) or weight <= 0:
            return f"dpo.preference_loss.{name} = {json.dumps(weight, default=str)}: a weight is a number above 0"
    return None


def misread(chosen: PreferenceLoss, changed: dict[str, Any]) -> list[str]:
    """Why the keys of section dpo that differ from their defaults do not suit the chosen losses: a sentence each."""
    names = list(weights_of(chosen))
    own = {key for facts in LOSS_FACTS.values() for key in facts.arguments}
    reasons = [
        _refusal(key, value, names, [name for name, facts in LOSS_FACTS.items() if key in facts.arguments])
        for key, value in changed.items()
        if key in own and not any(key in LOSS_FACTS[name].arguments for name in names)
    ]
    for key, value in changed.items():
        deaf = [name for name in names if key in SHARED and key not in LOSS_FACTS[name].shared]
        if deaf:
            reasons.append(
                _refusal(key, value, deaf, [name for name, facts in LOSS_FACTS.items() if key in facts.shared])
            )
    return reasons + _misfits(names, changed)


def _misfits(names: list[LossName], changed: dict[str, Any]) -> list[str]:
    reasons = []
    if "f_alpha" in changed and changed.get("f_divergence") != "alpha":
        reasons.append(f"dpo.f_alpha = {changed['f_alpha']} is read with dpo.f_divergence = alpha only")
    if changed.get("f_divergence") == "alpha" and "f_alpha" not in changed:
        reasons.append(
            "dpo.f_divergence = alpha with dpo.f_alpha = 1 is reverse_kl, as without it. Give dpo.f_alpha, for instance 0.5"
        )
    smoothing = changed.get("label_smoothing", 0.0)
    if "robust" in names and smoothing >= 0.5:
        reasons.append(f"dpo.label_smoothing = {smoothing}: dpo.preference_loss robust needs less than 0.5")
    if "exo_pair" in names and smoothing == 0:
        reasons.append(
            "dpo.label_smoothing = 0.0: dpo.preference_loss exo_pair needs more than 0, for instance 0.001, "
            "since the logarithm of it is taken"
        )
    return reasons


def _refusal(key: str, value: Any, deaf: Iterable[str], readers: list[LossName]) -> str:
    return (
        f"dpo.{key} = {json.dumps(value)} is not read by dpo.preference_loss {_listed(deaf, 'and')}: "
        f"leave it out, or choose {_listed(readers, 'or')}"
    )


def _listed(names: Iterable[str], last: Literal["and", "or"]) -> str:
    *most, final = names
    return f"{', '.join(most)} {last} {final}" if most else final
