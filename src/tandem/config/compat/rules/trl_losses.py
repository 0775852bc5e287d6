"""Rules for TRL's configurations: losses and their settings."""

from typing import Any

from tandem.config.compat.records import Given, Outcome, no_effect, refused, translated
from tandem.config.losses import join_names

# TRL's losses that tandem has under the same name. aot_pair is the name of aot_unpaired before 0.28.
SAME_NAME = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard"),
    *("aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sigmoid_norm"),
)
OLD_NAMES = {"aot_pair": "aot_unpaired"}
READ_SMOOTHING = ("exo_pair", "robust", "aot", "aot_unpaired")
# Losses that read the divergence in the same way in both libraries.
READ_DIVERGENCE = ("sigmoid", "hinge", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "discopop")
DIVERGENCES = {
    "reverse_kl": "reverse_kl",
    "forward_kl": "forward_kl",
    "js_divergence": "js",
    "alpha_divergence": "alpha",
}
SFT_NOTE = "the mean over pairs of each pair's mean; TRL takes the mean over the tokens of a micro-batch"
DEFAULT_ORDER = 0.5


def loss(key: str, value: Any, given: Given) -> Outcome:
    """loss_type and loss_weights: one loss, or several with weights, of which `sft` is the SFT term."""
    names = losses_of(given)
    weights = given.get("loss_weights") or [1.0] * len(names)
    if unknown := [name for name in names if name not in (*SAME_NAME, "sft")]:
        return refused(f"tandem does not have {join_names(unknown, 'and')}. It has {join_names(SAME_NAME, 'and')}.")
    if not isinstance(weights, list) or len(weights) != len(names) or len(set(names)) != len(names):
        return refused("Give each loss once, and one weight for each.")
    weight_of = dict(zip(names, weights, strict=True))
    sft = weight_of.pop("sft", None)
    if not weight_of:
        return refused("tandem trains on preferences: sft alone is supervised training. Add sigmoid, for example.")
    if "ipo" in weight_of and len(weight_of) > 1:
        return refused("ipo averages over tokens, and tandem averages for all losses or for none. Give ipo alone.")
    if sft is not None and given.get("use_weighting"):
        return refused("With use_weighting, TRL weights sft too, and tandem does not. Leave out one of them.")
    is_plain = len(weight_of) == 1 and list(weight_of.values()) == [1]
    settings: dict[str, Any] = {"dpo.preference_loss": next(iter(weight_of)) if is_plain else weight_of}
    if "ipo" in weight_of:
        settings["dpo.preference_average_log_probs"] = True
    if sft is not None:
        settings |= {"dpo.sft_loss_weight": sft, "dpo.sft_average_log_probs": True}
    return translated(settings, f"sft: {SFT_NOTE}" if sft is not None else None)


def losses_of(given: Given) -> list[str]:
    """The names of the losses, as current releases of TRL spell them."""
    names = given.get("loss_type") or ["sigmoid"]
    return [OLD_NAMES.get(name, name) for name in ([names] if isinstance(names, str) else names)]


def smoothing(key: str, value: Any, given: Given) -> Outcome:
    names = [name for name in losses_of(given) if name != "sft"]
    if not value:
        return no_effect("It is 0.")
    if all(name in READ_SMOOTHING for name in names):
        return translated({"dpo.label_smoothing": value})
    if not any(name in (*READ_SMOOTHING, "sigmoid") for name in names):
        return no_effect(f"{join_names(names, 'and')} does not read it.")
    return refused(
        "With sigmoid, TRL ignores it since 0.29, and read it as conservative DPO before. Remove it; for conservative DPO, add "
        f"dpo.label_smoothing={value}; loss_type=robust reads it too."
    )


def sft_term(key: str, value: Any, given: Given) -> Outcome:
    """rpo_alpha of releases before 0.29: the weight of an SFT term."""
    if "sft" in losses_of(given):
        return refused("loss_type lists sft, which is the same term. Leave out one of them.")
    if not value:
        return no_effect("It is 0.")
    return translated({"dpo.sft_loss_weight": value, "dpo.sft_average_log_probs": True}, SFT_NOTE)


def divergence(key: str, value: Any, given: Given) -> Outcome:
    kind = str(given.get("f_divergence_type") or "reverse_kl").lower()
    order = given.get("f_alpha_divergence_coef")
    order = DEFAULT_ORDER if order is None else order
    if kind not in DIVERGENCES:
        return refused(f"tandem knows {join_names(DIVERGENCES, 'and')}.")
    if key == "f_alpha_divergence_coef" and kind != "alpha_divergence":
        return no_effect(f"f_divergence_type is {kind}.")
    if kind == "reverse_kl" or (kind == "alpha_divergence" and order == 1):
        return translated({"dpo.f_divergence": "reverse_kl"})
    if differing := [name for name in losses_of(given) if name not in (*READ_DIVERGENCE, "sft")]:
        return refused(f"tandem and TRL apply it to {join_names(differing, 'and')} differently. Set reverse_kl.")
    more = {"dpo.f_alpha": order} if kind == "alpha_divergence" else {}
    return translated({"dpo.f_divergence": DIVERGENCES[kind], **more})


def temperature(key: str, value: Any, given: Given) -> Outcome:
    if "discopop" not in losses_of(given):
        return no_effect("loss_type is not discopop.")
    return translated({"dpo.discopop_tau": value})


RULES = (loss, smoothing, sft_term, divergence, temperature)
