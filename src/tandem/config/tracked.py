"""The metric that ranks checkpoints: which split and which number a name means, in every spelling NeMo RL has used."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.errors import ConfigError

# Metrics that every step and every validation has.
METRICS = (
    "loss",
    "preference_loss",
    "sft_loss",
    "accuracy",
    "logps_accuracy",
    "rewards_chosen_mean",
    "rewards_rejected_mean",
    "rewards_margin_mean",
    "rewards_margin_p10",
    "rewards_margin_p50",
    "rewards_margin_p90",
    "logps_chosen_mean",
    "logps_rejected_mean",
    "tokens_chosen_mean",
    "tokens_rejected_mean",
)


@dataclass(frozen=True, slots=True)
class TrackedMetric:
    """A number of metrics.jsonl: the split it stands under, and its name."""

    split: str
    metric: str


def tracked_metric(name: str | None, validation: Sequence[str]) -> TrackedMetric | None:
    """What checkpointing.metric_name means where these validation sets are; None ranks checkpoints by their age.

    `val_loss`, `validation-default_loss`, `val:validation-default_loss`, `train:accuracy`
    """
    if name is None:
        return TrackedMetric(f"validation-{validation[0]}", "loss") if validation else None
    if name.startswith("train:"):
        return _known(name, "train", name.removeprefix("train:"))
    if not validation:
        raise ConfigError(
            f"checkpointing.metric_name = {name}: there is no validation set. Give data.validation, or track train:loss."
        )
    rest = name.removeprefix("val:")
    if rest.startswith("val_"):
        return _known(name, f"validation-{validation[0]}", rest.removeprefix("val_"))
    # The longest first: one set's name may begin another's.
    for one in sorted(validation, key=len, reverse=True):
        if rest.startswith(f"validation-{one}_"):
            return _known(name, f"validation-{one}", rest.removeprefix(f"validation-{one}_"))
    sets = ", ".join(f"validation-{one}" for one in validation)
    raise ConfigError(
        f"checkpointing.metric_name = {name}: names no split and metric, such as validation-{validation[0]}_loss, val_loss "
        f"or train:loss. The validation sets are {sets}."
    )


def _known(name: str, split: str, metric: str) -> TrackedMetric:
    if metric not in METRICS:
        raise ConfigError(
            f"checkpointing.metric_name = {name}: there is no metric {metric!r}. Known are {', '.join(METRICS)}."
        )
    return TrackedMetric(split, metric)
