"""Decides whether a run stops before its last step, and whether it exports its last step or its best one.

Decisions depend only on the lines of metrics.jsonl, so a resumed run decides like an uninterrupted one. Only the first rank
reads these lines, so the first rank decides for all ranks.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from tandem.errors import CheckpointError
from tandem.report.verdicts import Verdict
from tandem.storage.cache import read_manifest
from tandem.terminal.arguments import option
from tandem.training.checkpoint.checkpoints import checkpoints, load_weights, step_of
from tandem.training.run.extension import exported_step
from tandem.training.start.build import Training


@dataclass(frozen=True, slots=True)
class RestoredStep:
    """The step that a run exports instead of its last step, and the reason."""

    exported_step: int
    verdict: Verdict
    helped: bool  # False if the model before training was measured to be better


def is_exhausted(t: Training) -> bool:
    """Return whether the last `dpo.early_stopping_patience` validations did not improve the tracked metric."""
    patience = t.setup.config.dpo.early_stopping_patience
    return patience is not None and t.ranks.from_first(lambda: t.ranking.num_since_best() >= patience)


def must_be_kept(t: Training) -> bool:
    """Return whether the current step is the best so far. Such a step must be saved, because its weights may be exported."""
    may_be_exported = t.setup.config.dpo.early_stopping_patience is not None or _exports_best(t)
    return may_be_exported and t.ranks.from_first(lambda: t.ranking.best_step() == t.progress.step)


def restore_best(t: Training) -> RestoredStep | None:
    """Load the best checkpoint if the run exports it. Return its step and the reason, or None if the last step is exported.

    A run exports its best checkpoint if it stopped early, or if export.checkpoint=best.
    """
    stopped_early = is_exhausted(t)
    if not stopped_early and not _exports_best(t):
        return None
    place, text = t.ranks.from_first(lambda: _best(t, stopped_early=stopped_early))
    if not stopped_early and step_of(place) == t.progress.step:
        return None
    load_weights(place, t.policy)
    assert t.setup.tracked is not None
    t.progress = replace(t.progress, step=step_of(place))
    helped = t.ranks.from_first(lambda: t.ranking.better_start() is None)
    split = t.setup.tracked.split
    verdict = Verdict("stopped_early", split, text) if stopped_early else Verdict("exported_best", split, text)
    return RestoredStep(step_of(place), verdict, helped)


def _exports_best(t: Training) -> bool:
    return t.setup.config.export.checkpoint == "best"


def restore_exported(t: Training, per_pair: Path) -> None:
    """Load the weights that a finished run exported, even if another step is the best step now.

    `per_pair`: the file for the metrics of every pair, which error messages name.
    """
    place = t.ranks.from_first(lambda: _exported(t, per_pair))
    if step_of(place) != t.progress.step:
        load_weights(place, t.policy)
        t.progress = replace(t.progress, step=step_of(place))


def _exported(t: Training, per_pair: Path) -> Path:
    """Return the checkpoint of the exported step. The checkpoint is verified, unless its weights are already loaded."""
    place = t.saver.folder / f"step_{exported_step(t.run, t.setup.plan.num_steps)}"
    try:
        if step_of(place) != t.progress.step:
            read_manifest(place)
    except ValueError:
        is_last = step_of(place) == t.setup.plan.num_steps
        which = (
            "its last step is missing"
            if is_last
            else f"step {step_of(place)}, which it exported, is missing or damaged"
        )
        raise CheckpointError(
            f"{option('per_pair', per_pair)}: {t.run} is finished, but the checkpoint of {which}, so there is nothing to "
            f"measure. Train again with {option('fresh', True)}."
        ) from None
    return place


def _best(t: Training, *, stopped_early: bool) -> tuple[Path, str]:
    """Verify the best checkpoint. Return the checkpoint, and a text that explains why it is exported."""
    place = min(checkpoints(t.saver.folder), key=lambda place: t.ranking.rank(step_of(place)), default=None)
    try:
        if place is None:
            raise ValueError(f"{t.saver.folder} has no checkpoint")
        read_manifest(place)
    except ValueError as error:
        why, instead = (
            ("stopped early and exports", "dpo.early_stopping_patience=null")
            if stopped_early
            else ("exports", "export.checkpoint=latest")
        )
        raise CheckpointError(
            f"{error}. The run {why} its best checkpoint. Restore it, or export the last step with {instead}."
        ) from None
    text = _why_stopped(t, place) if stopped_early else _why_best(t, place)
    if (start := t.ranking.better_start()) is not None:
        text += f" No step was as good as the model before training ({start:.4f})."
    return place, text


def _why_best(t: Training, place: Path) -> str:
    assert t.setup.tracked is not None
    step, last = step_of(place), t.progress.step
    return (
        f"step {step} of {last} is exported, the best by {t.setup.tracked.metric} ({t.ranking.value_at(step):.4f}; step {last}: "
        f"{t.ranking.value_at(last):.4f})."
    )


def _why_stopped(t: Training, place: Path) -> str:
    assert t.setup.tracked is not None
    since = t.ranking.num_since_best()
    validations = "validation was" if since == 1 else f"{since} validations were"
    return (
        f"stopped early at step {t.progress.step} of {t.setup.plan.num_steps}: the last {validations} no better than that of "
        f"step {t.ranking.best_step()} by {t.setup.tracked.metric} ({t.ranking.best_value():.4f}). Step "
        f"{step_of(place)} is exported."
    )
