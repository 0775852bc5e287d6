"""`state.json` of a checkpoint in; how far its run had come out, every value checked: a stranger may have written the file."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tandem.errors import CheckpointError
from tandem.storage.cache import read_json
from tandem.storage.ownership import step_in

MAX_COUNT = 1 << 53  # of steps, batches, bytes


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands: steps done, the place in the schedule, how far metrics.jsonl reached."""

    step: int = 0
    epoch: int = 0
    batch: int = 0  # batches of this epoch already done
    metrics_bytes: int = 0
    owes_validation: bool = False  # stopped before the validation that was due after this step
    spared: int = 0  # checkpoints up to this step are never removed: the lines that tell how good they are were lost


@dataclass(frozen=True, slots=True)
class SavedState:
    """What a checkpoint holds beside its tensors."""

    progress: Progress
    fingerprints: dict[str, str]


def read_state(place: Path) -> SavedState:
    """The state of a checkpoint, of the step in its name."""
    try:
        found = read_json(place / "state.json")
        return SavedState(_progress(_mapping(found, "progress"), place), _fingerprints(found))
    except ValueError as error:
        raise CheckpointError(
            f"{place}/state.json: {error}, so no run can resume from this checkpoint. Move {place} elsewhere to resume from an "
            "earlier one, or start anew with --fresh."
        ) from None


def _progress(found: dict[str, Any], place: Path) -> Progress:
    known = {field.name: field.default for field in fields(Progress)}
    if other := sorted(found.keys() - known.keys()):
        raise ValueError(f"progress has a key that tandem does not write ({other[0][:40]!r})")
    for name, usual in known.items():
        value = found.get(name, usual)
        if type(value) is not type(usual) or not 0 <= value <= MAX_COUNT:
            what = "true or false" if isinstance(usual, bool) else "a count"
            raise ValueError(f"progress.{name} is not {what}")
    progress = Progress(**found)
    if progress.step != step_in(place.name):
        raise ValueError(f"progress.step is {progress.step}, which is not the step in the name of the folder")
    if max(progress.epoch, progress.batch, progress.spared) > progress.step:
        raise ValueError(f"progress says that {progress.step} steps passed more epochs or batches than that")
    return progress


def _fingerprints(found: Any) -> dict[str, str]:
    fingerprints = _mapping(found, "fingerprints")
    if not all(isinstance(value, str) for value in fingerprints.values()):
        raise ValueError("fingerprints are not texts")
    return fingerprints


def _mapping(found: Any, name: str) -> dict[str, Any]:
    inside = found.get(name) if isinstance(found, dict) else None
    if not isinstance(inside, dict):
        raise ValueError(f"{name} is missing or not a mapping")
    return inside
