"""Reports what happened to the runs of a sweep that have no directory yet, because they failed early or were not started."""

import re
from pathlib import Path

from tandem.storage.ownership import lock_holder
from tandem.sweeping.plan import read_plan
from tandem.training.run.failure import described_failure, failure_of, log_of

NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")  # of a run, as a sweep names it


def missing_runs(sweep: Path) -> list[str]:
    """Return a sentence or two on every planned run of a sweep without a directory. For other folders, return nothing."""
    planned = [] if (plan := read_plan(sweep)) is None else plan["runs"]
    names = [one["name"] for one in planned if isinstance(one, dict) and isinstance(one.get("name"), str)]
    is_running = lock_holder(sweep) is not None
    return [
        f"{name}: {_what_happened(sweep / name, is_running=is_running)}"
        for name in names
        if NAME.fullmatch(name) and not (sweep / name / "config.yaml").is_file()
    ]


def _what_happened(run: Path, *, is_running: bool) -> str:
    log = log_of(run)
    if log.is_symlink() or not log.is_file():
        return "not started."
    if (error := failure_of(run)) is not None:
        return described_failure(run, error)
    return f"{'no results yet' if is_running else 'ended without results'}. Its log is {log}."
