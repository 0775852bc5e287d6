"""Parses checkpointing.metric_name, in every spelling that NeMo RL has used, and checks settings that depend on the metric."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.config.sections.dpo import Dpo
from tandem.errors import ConfigError
from tandem.terminal.printable import listed

# Metrics that may rank checkpoints: recorded at every training step and every validation, and comparable between them.
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
    """A metric in metrics.jsonl: its split (train or validation-NAME) and its name."""

    split: str
    metric: str

    def __str__(self) -> str:
        return f"{self.split}_{self.metric}" if self.split != "train" else f"train:{self.metric}"


def check_direction(tracked: TrackedMetric | None, *, higher_is_better: bool) -> None:
    """Raise ConfigError if higher_is_better is wrong for the metric, so that the worst checkpoints would be kept.

    Only accuracies, reward margins and losses are checked.
    """
    if tracked is None:
        return
    higher = tracked.metric.endswith("accuracy") or tracked.metric.startswith("rewards_margin")
    lower = tracked.metric.endswith("loss")
    if higher != higher_is_better and (higher or lower):
        raise ConfigError(
            f"checkpointing.higher_is_better = {str(higher_is_better).lower()}, but {'higher' if higher else 'lower'} values of "
            f"{tracked} are better: the worst checkpoints would be kept. Set "
            f"checkpointing.higher_is_better={str(higher).lower()}."
        )


def check_early_stopping(dpo: Dpo, tracked: TrackedMetric | None, *, saves: bool) -> None:
    """Raise ConfigError if early stopping cannot work: validation does not measure the metric, or no checkpoints are saved."""
    patience, val_period = dpo.early_stopping_patience, dpo.val_period
    if patience is None:
        return
    if tracked is None:
        problem = "no validation set is given. Set data.validation"
    elif tracked.split == "train":
        problem = f"checkpointing.metric_name = {tracked} is not measured by validation. Use val_loss"
    elif val_period <= 0:
        problem = f"no validation runs during training (dpo.val_period = {val_period}). Set dpo.val_period"
    elif not saves:
        problem = "no checkpoints are saved, so the best one could not be exported. Set checkpointing.enabled=true"
    else:
        return
    raise ConfigError(f"dpo.early_stopping_patience = {patience}: {problem}, or leave out dpo.early_stopping_patience.")


def check_exported_best(checkpoint: str, dpo: Dpo, tracked: TrackedMetric | None, *, saves: bool) -> None:
    """Raise ConfigError for export.checkpoint=best if the run saves no checkpoints, or if no metric ranks them."""
    if checkpoint != "best":
        return
    if tracked is None:
        problem = "no validation set is given, so no checkpoint is known to be the best. Set data.validation"
    elif tracked.split != "train" and not dpo.validates:
        problem = f"{tracked} is never measured. Set dpo.val_period"
    elif not saves:
        problem = "no checkpoints are saved. Set checkpointing.enabled=true"
    else:
        return
    raise ConfigError(f"export.checkpoint = best: {problem}, or export the last step with export.checkpoint=latest.")


def tracked_metric(name: str | None, validation: Sequence[str]) -> TrackedMetric | None:
    """Parse checkpointing.metric_name, such as val_loss, validation-default_loss, val:validation-default_loss or train:accuracy.

    `validation`: names of the validation sets. If `name` is None, return the loss on the first validation set, or None if there
    is no validation set. With None, checkpoints are ranked by age.
    """
    if name is None:
        return TrackedMetric(f"validation-{validation[0]}", "loss") if validation else None
    if name.startswith("train:"):
        return _known(name, "train", name.removeprefix("train:"))
    if not validation:
        raise ConfigError(
            f"checkpointing.metric_name = {name}: no validation set is given. Set data.validation, or use train:loss."
        )
    rest = name.removeprefix("val:")
    if rest.startswith("val_"):
        return _known(name, f"validation-{validation[0]}", rest.removeprefix("val_"))
    # Longest name first, because the name of one set may be a prefix of another.
    for one in sorted(validation, key=len, reverse=True):
        if rest.startswith((f"validation-{one}_", f"validation-{one}/")):  # trackers show the form with a slash
            return _known(name, f"validation-{one}", rest[len(f"validation-{one}_") :])
    sets = listed(f"validation-{one}" for one in validation)
    raise ConfigError(
        f"checkpointing.metric_name = {name}: not a split and a metric. Write validation-{validation[0]}_loss, val_loss or "
        f"train:loss, for example. The validation sets are {sets}."
    )


def _known(name: str, split: str, metric: str) -> TrackedMetric:
    if metric not in METRICS:
        raise ConfigError(
            f"checkpointing.metric_name = {name}: unknown metric {metric!r}. Use one of {', '.join(METRICS)}."
        )
    return TrackedMetric(split, metric)
