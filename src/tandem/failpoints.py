"""Points at which tests can kill or stop the process or simulate a full disk, to test recovery. `tandem fail-points` lists them.

`TANDEM_FAIL_AT=checkpoint.rename` kills the process just before a checkpoint is renamed. `checkpoint.rename:2` kills it before
the second rename. `checkpoint.rename:2=disk_full` raises a "disk full" error instead, and `checkpoint.rename:2=hang` stops the
process until SIGCONT. If the variable is not set, nothing happens.
"""

import errno
import os
import signal
from dataclasses import dataclass

from tandem.errors import ConfigError

VARIABLE = "TANDEM_FAIL_AT"

# Folders that are written under a temporary name and renamed when complete. Each has four points.
PUBLISHED = {
    "tokens": "a tokenised set",
    "packs": "a set's packs",
    "reference": "the reference's log-probabilities",
    "checkpoint": "a checkpoint",
    "model": "the exported model",
}
STAGES = {
    "begin": "its temporary folder was created",
    "sync": "its files are written, but not flushed to disk",
    "rename": "its files are flushed, but the folder is not renamed yet",
    "done": "the folder is renamed",
}
POINTS = {
    **{f"{what}.{stage}": f"{name}: {when}" for what, name in PUBLISHED.items() for stage, when in STAGES.items()},
    "tokens.chunk": "a tokenised set: some of its rows are written",
    "weights.load": "a model's weights are read, and not used yet",
    "checkpoint.part": "a checkpoint: the tensors of one rank are written",
    "model.gather": "the exported model: its temporary folder was created, and the ranks have not sent their weights",
    "checkpoint.tensors": "a checkpoint: its tensors are written, its manifest is not",
    "checkpoint.latest": "before `latest` is pointed at the new checkpoint",
    "checkpoint.best": "before `best` is pointed at the best checkpoint",
    "checkpoint.prune": "before a checkpoint that is no longer kept is removed",
    "config.rename": "the run's config.yaml is written, but not renamed yet",
    "references.rename": "the run's references.json is written, but not renamed yet",
    "verdicts.rename": "the run's verdicts.json is written, but not renamed yet",
    "per_pair.rename": "the file of every pair is written, but not renamed yet",
    "metrics.write": "before each half of a line of metrics.jsonl is written",
    "reference.chunk": "some of the reference's log-probabilities are computed",
    "step.update": "a step's gradients are computed, but not applied",
    "step.done": "a step's update is applied, but not written to metrics.jsonl",
    "validation.pack": "during a validation",
}
ACTIONS = ("kill", "disk_full", "hang")


@dataclass(slots=True)
class _RequestedFailure:
    """The failure that TANDEM_FAIL_AT requests."""

    point: str
    count: int
    action: str  # one of ACTIONS


def _parse(text: str) -> _RequestedFailure | None:
    if not text:
        return None
    place, _, action = text.partition("=")
    point, _, count = place.partition(":")
    action = action or "kill"
    if point not in POINTS or action not in ACTIONS or not (count or "1").isdigit():
        raise ConfigError(
            f"{VARIABLE}={text}: not a fail point. Write POINT, POINT:COUNT, POINT:COUNT=disk_full or POINT:COUNT=hang; "
            "`tandem fail-points` lists the points."
        )
    return _RequestedFailure(point, int(count or 1), action)


_requested: _RequestedFailure | None = None


def read_fail_point() -> None:
    """Read TANDEM_FAIL_AT from the environment. Raise ConfigError if it does not name a fail point."""
    global _requested
    _requested = _parse(os.environ.get(VARIABLE, ""))


def fail_point(point: str) -> None:
    """Kill or stop the process or raise a "disk full" error if TANDEM_FAIL_AT names this point.

    With TANDEM_FAIL_AT=POINT:COUNT, this happens in the COUNT-th call for the point.
    """
    assert point in POINTS, point
    if _requested is None or _requested.point != point:
        return
    _requested.count -= 1
    if _requested.count == 0 and _requested.action == "disk_full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"({VARIABLE}={point})")
    if _requested.count == 0:
        os.kill(os.getpid(), signal.SIGSTOP if _requested.action == "hang" else signal.SIGKILL)
