"""Places where a process can be made to die or a disk to be full, so that each crash is a test (`tandem fail-points`).

`TANDEM_FAIL_AT=checkpoint.rename` kills the process where a checkpoint would be renamed; `checkpoint.rename:2` the second
time; `checkpoint.rename:2=disk_full` lets that write fail instead. Without it a point does nothing.
"""

import errno
import os
import signal
from dataclasses import dataclass
from typing import Literal

from tandem.errors import ConfigError

VARIABLE = "TANDEM_FAIL_AT"

# Folders that are written aside and get their name last. Each has four points.
PUBLISHED = {
    "tokens": "a tokenised set",
    "packs": "a set's packs",
    "reference": "the reference's log-probabilities",
    "checkpoint": "a checkpoint",
    "model": "the exported model",
}
STAGES = {
    "begin": "its folder beside the place it gets was made",
    "sync": "all its files are written, and not yet flushed to the disk",
    "rename": "they are flushed, and the folder has not got its name",
    "done": "it has its name",
}
POINTS = {
    **{f"{what}.{stage}": f"{name}: {when}" for what, name in PUBLISHED.items() for stage, when in STAGES.items()},
    "checkpoint.tensors": "a checkpoint: its tensors are written, its manifest is not",
    "checkpoint.latest": "before `latest` is pointed at the new checkpoint",
    "checkpoint.best": "before `best` is pointed at the best checkpoint",
    "checkpoint.prune": "before a checkpoint that is no longer kept is removed",
    "config.rename": "the run's config.yaml is written under another name",
    "references.rename": "the run's references.json is written under another name",
    "verdicts.rename": "the run's verdicts.json is written under another name",
    "per_pair.rename": "the file of every pair is written under another name",
    "metrics.write": "before each half of a line of metrics.jsonl",
    "reference.chunk": "some of the reference's log-probabilities are computed",
    "step.update": "a step's gradients are there, its update is not made",
    "step.done": "a step's update is made and nothing is written of it",
    "validation.pack": "a validation is under way",
}
ACTIONS = ("kill", "disk_full")


@dataclass(slots=True)
class _Wanted:
    point: str
    count: int
    action: Literal["kill", "disk_full"]


def _parsed(text: str) -> _Wanted | None:
    if not text:
        return None
    place, _, action = text.partition("=")
    point, _, count = place.partition(":")
    if point not in POINTS or (action or "kill") not in ACTIONS or not (count or "1").isdigit():
        raise ConfigError(
            f"{VARIABLE}={text}: write POINT, POINT:COUNT or POINT:COUNT=disk_full; `tandem fail-points` lists the points."
        )
    return _Wanted(point, int(count or 1), "disk_full" if action == "disk_full" else "kill")


_wanted: _Wanted | None = None


def read_fail_point() -> None:
    """Take what the environment asks for; ConfigError if it is no point."""
    global _wanted
    _wanted = _parsed(os.environ.get(VARIABLE, ""))


def fail_point(point: str) -> None:
    """Die here, or fail as a full disk does, if that was asked for."""
    assert point in POINTS, point
    if _wanted is None or _wanted.point != point:
        return
    _wanted.count -= 1
    if _wanted.count == 0 and _wanted.action == "disk_full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"({VARIABLE}={point})")
    if _wanted.count == 0:
        os.kill(os.getpid(), signal.SIGKILL)
