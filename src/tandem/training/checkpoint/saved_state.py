"""Reads state.json, the file of a checkpoint that holds the progress of the run and the fingerprints of its data and models.

Every value is checked, because the file may come from someone else.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tandem.errors import CheckpointError
from tandem.storage.cache import read_json
from tandem.storage.ownership import step_in
from tandem.terminal.arguments import option

MAX_COUNT = 1 << 53  # the largest accepted number of steps, batches or bytes


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run: steps done, position in the epoch, and size of metrics.jsonl."""

    step: int = 0
    epoch: int = 0
    batch: int = 0  # batches of this epoch that are done
    metrics_bytes: int = 0
    owes_validation: bool = False  # the validation due after this step is not done yet
    spared: int = 0  # checkpoints up to this step are never removed, because the lines that rank them were lost


@dataclass(frozen=True, slots=True)
class SavedState:
    """The contents of state.json in a checkpoint."""

    progress: Progress
    fingerprints: dict[str, str]


def read_state(place: Path) -> SavedState:
    """Read state.json of a checkpoint.

    Raise CheckpointError if a value is invalid, or if the step differs from the folder's name.
    """
    try:
        found = read_json(place / "state.json")
        return SavedState(_progress(_mapping(found, "progress"), place), _fingerprints(found))
    except ValueError as error:
        raise CheckpointError(
            f"{place}/state.json: {error}, so no run can resume from this checkpoint. Move {place} elsewhere to resume "
            f"from an earlier one, or start again with {option('fresh', True)}."
        ) from None


def _progress(found: dict[str, Any], place: Path) -> Progress:
    known = {field.name: field.default for field in fields(Progress)}
    if other := sorted(found.keys() - known.keys()):
        raise ValueError(f"progress has a key that tandem does not write ({other[0][:40]!r})")
    for name, default in known.items():
        value = found.get(name, default)
        if type(value) is not type(default) or not 0 <= value <= MAX_COUNT:
            what = "true or false" if isinstance(default, bool) else "an integer from 0 to 2^53"
            raise ValueError(f"progress.{name} is not {what}")
    progress = Progress(**found)
    if progress.step != step_in(place.name):
        raise ValueError(f"progress.step is {progress.step}, but the folder is named {place.name}")
    if max(progress.epoch, progress.batch, progress.spared) > progress.step:
        raise ValueError(f"progress counts more epochs or batches than steps ({progress.step})")
    return progress


def _fingerprints(found: Any) -> dict[str, str]:
    fingerprints = _mapping(found, "fingerprints")
    if not all(isinstance(value, str) for value in fingerprints.values()):
        raise ValueError("a value of fingerprints is not a string")
    return fingerprints


def _mapping(found: Any, name: str) -> dict[str, Any]:
    inside = found.get(name) if isinstance(found, dict) else None
    if not isinstance(inside, dict):
        raise ValueError(f"the key {name} is missing, or its value is not a mapping")
    return inside
