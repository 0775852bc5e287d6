"""Extends a finished run by more steps, starting from its last checkpoint.

A run with a folder `model` is finished. An extension first loads the last checkpoint, then renames the folder `model`, then
writes the new configuration. If the process is killed in between, the run is either still finished, or can be resumed like an
unfinished run.
"""

import shutil
from pathlib import Path
from typing import Any

from tandem.config.load import LoadedConfig
from tandem.errors import CheckpointError
from tandem.storage.cache import read_json, replacing, sync_file, write_atomically
from tandem.storage.ownership import free_path
from tandem.terminal.printable import counted
from tandem.training.checkpoint.checkpoints import checkpoints, step_of
from tandem.training.checkpoint.parts import names_in
from tandem.training.checkpoint.ranking import Ranking, records_in
from tandem.training.run.directory import other_run_hint
from tandem.training.start.setup import Setup


def last_step(run: Path, hint: str = "") -> int:
    """Return how many steps a finished run has trained. `hint`: what to do if this is unknown."""
    steps = [record["step"] for record in _records(run / "metrics.jsonl") if record["split"] == "train"]
    if not steps:
        raise CheckpointError(
            f"{run} is finished, but the steps in its metrics.jsonl are missing, so it cannot be extended. {hint}".rstrip()
        )
    return max(steps)


def check_extension(run: Path, setup: Setup, loaded: LoadedConfig) -> int | None:
    """Return the last step of a finished run, from which the run is extended.

    Return None if the run already has the requested number of steps. Raise CheckpointError if the run cannot be extended.
    """
    hint = other_run_hint(run, loaded)
    trained, asked = last_step(run, hint), setup.plan.num_steps
    place = setup.checkpoint_dir(run) / f"step_{trained}"
    if asked < trained:
        raise CheckpointError(
            f"{run} is finished, with {trained} steps; it can be extended, but not shortened to {asked}. {hint}"
        )
    if asked == trained:
        return None
    if not place.is_dir():
        raise CheckpointError(
            f"{run} is finished, but the checkpoint of its last step, {place}, is missing, so it cannot be extended from "
            f"{trained} to {asked} steps. {hint}"
        )
    if not any(name.startswith("optimizer.") for name in _tensors_in(place, run, trained, hint)):
        raise CheckpointError(
            f"{place}: saved without optimizer states (checkpointing.save_optimizer=false), so the run cannot be extended "
            f"from {trained} to {asked} steps. {hint}"
        )
    _refuse_to_stop_again(run, setup, place)
    return trained


def refuse_shortening(run: Path, setup: Setup, loaded: LoadedConfig) -> None:
    """Raise CheckpointError if an unfinished run has already trained more steps than requested."""
    trained, asked = max(map(step_of, checkpoints(setup.checkpoint_dir(run))), default=0), setup.plan.num_steps
    if trained > asked:
        raise CheckpointError(
            f"{run} has already trained {trained} steps, so it cannot be shortened to {asked}. Set dpo.max_num_steps and "
            f"dpo.max_num_epochs to {trained} steps or more. {other_run_hint(run, loaded)}"
        )


def _tensors_in(place: Path, run: Path, trained: int, hint: str) -> set[str]:
    """Return the names of the tensors in the last checkpoint. Raise CheckpointError if the checkpoint cannot be read."""
    try:
        found = names_in(place / "tensors")
    except (OSError, CheckpointError):
        found = set()
    if not found:
        raise CheckpointError(_damaged(run, trained, hint))
    return found


def _damaged(run: Path, trained: int, hint: str) -> str:
    return (
        f"{run} is finished, but the checkpoint of its last step, {trained}, is damaged, so it cannot be extended. "
        f"{hint}"
    )


def _refuse_to_stop_again(run: Path, setup: Setup, place: Path) -> None:
    """Raise CheckpointError if the run stopped early, and its extension would stop again before the first new step."""
    patience = setup.config.dpo.early_stopping_patience
    if patience is None:
        return
    ranking = Ranking(
        setup.tracked,
        higher_is_better=setup.config.checkpointing.higher_is_better,
        records=_records(run / "metrics.jsonl", _saved_bytes(place)),
    )
    if (since := ranking.num_since_best()) >= patience:
        raise CheckpointError(
            f"{run} stopped early, {counted(since, 'validation')} after its best at step {ranking.best_step()}, and under "
            f"dpo.early_stopping_patience = {patience} it would stop again at once. To extend it, set "
            f"dpo.early_stopping_patience to null or to more than {since}."
        )


def _saved_bytes(place: Path) -> int | None:
    """Return how many bytes metrics.jsonl had when a checkpoint was saved.

    Return None if the checkpoint is damaged; the damage is reported when the checkpoint is loaded.
    """
    try:
        saved = read_json(place / "state.json")["progress"]["metrics_bytes"]
    except (ValueError, KeyError, TypeError, IndexError):
        return None
    return saved if type(saved) is int and saved >= 0 else None


def begin_extension(run: Path, trained: int, resumed: int, loaded: LoadedConfig) -> Path:
    """Rename the old export to `model.step_N`, write the configuration, and return the new path of the export.

    `trained`: how many steps the finished run has trained. `resumed`: the step of the checkpoint that was loaded.
    """
    if resumed != trained:
        raise CheckpointError(_damaged(run, trained, other_run_hint(run, loaded)))
    _copy(run / "metrics.jsonl", free_path(run, f"metrics.step_{trained}", ".jsonl"))
    kept = (run / "model").rename(free_path(run, f"model.step_{exported_step(run, trained)}"))
    sync_file(run)
    write_atomically(run / "config.yaml", loaded.as_yaml(), "config")
    return kept


def exported_step(run: Path, num_steps: int) -> int:
    """Return the step whose weights a finished run exported.

    This is the step at which metrics.jsonl has a validation of the export. Without validation sets, it is the last step trained.
    If metrics.jsonl is lost, it is `num_steps`.
    """
    records = _records(run / "metrics.jsonl")
    exported = [one["step"] for one in records if one["split"].startswith("exported-")]
    trained = [one["step"] for one in records if one["split"] == "train"]
    return (exported or trained or [num_steps])[-1]


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as old, replacing(target, binary=True) as new:
        shutil.copyfileobj(old, new)


def _records(metrics: Path, num_bytes: int | None = None) -> list[dict[str, Any]]:
    """Return the undamaged records in the first `num_bytes` bytes of metrics.jsonl. `num_bytes` None: in the whole file."""
    content = metrics.read_bytes()[:num_bytes] if metrics.is_file() else b""
    return [record for record in records_in(content) if record is not None]
