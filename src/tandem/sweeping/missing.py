"""Reports what happened to the runs of a sweep that have no directory yet, because they failed early or were not started."""

import re
from pathlib import Path

from tandem.runs import read_start_of
from tandem.storage.ownership import lock_holder
from tandem.sweeping.children import message_in
from tandem.sweeping.plan import read_plan
from tandem.training.run.other_folders import SWEEP_LOGS

NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")  # of a run, as a sweep names it
MAX_LOG_BYTES = 1024 * 1024  # of a run that wrote nothing else


def missing_runs(sweep: Path) -> list[str]:
    """Return a sentence or two on every planned run of a sweep without a directory. For other folders, return nothing."""
    planned = [] if (plan := read_plan(sweep)) is None else plan["runs"]
    names = [one["name"] for one in planned if isinstance(one, dict) and isinstance(one.get("name"), str)]
    is_running = lock_holder(sweep) is not None
    return [
        f"{name}: {_what_happened(sweep, name, is_running=is_running)}"
        for name in names
        if NAME.fullmatch(name) and not (sweep / name / "config.yaml").is_file()
    ]


def _what_happened(sweep: Path, name: str, *, is_running: bool) -> str:
    log = f"{SWEEP_LOGS}/{name}.log"
    content = read_start_of(sweep, log, MAX_LOG_BYTES)
    if content is None:
        return "not started."
    where = f"Its log is {sweep / log}."
    error = message_in(content.decode("utf-8", "replace").splitlines())
    if error is None:
        return f"{'no results yet' if is_running else 'ended without results'}. {where}"
    first = error.splitlines()[0]
    return f"failed: {first}{'' if first.endswith(('.', ':', '?')) else '.'} {where}"
