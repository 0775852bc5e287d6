"""How a run of a sweep failed: the sweep appends it to the run's log as the last line, where readers of the run find it."""

import os
import stat
from contextlib import suppress
from pathlib import Path

from tandem.storage.ownership import open_own
from tandem.training.run.other_folders import SWEEP_FILE, SWEEP_LOGS

MARK = "tandem sweep: this run failed: "
MAX_CHARACTERS = 1000  # of an error
MAX_LINE_BYTES = 8192


def log_of(run: Path) -> Path:
    """Return the path of the log that a sweep keeps of a run in its directory."""
    place = run if run.name not in ("", "..") else run.resolve()
    return place.parent / SWEEP_LOGS / f"{place.name}.log"


def append_failure(log: Path, error: str) -> None:
    """Append the first line of an error to the log of a run that failed, if the disk has room for it."""
    first = error.splitlines()[0][:MAX_CHARACTERS] if error else ""
    with suppress(OSError), open_own(log, "a") as file:
        file.write(f"\n{MARK}{first}\n")


def failure_of(run: Path) -> str | None:
    """Return the first line of the error with which a run of a sweep ended; None if the newest attempt did not fail."""
    log = log_of(run)
    if not (log.parent.parent / SWEEP_FILE).is_file() or (content := _end_of(log)) is None:
        return None
    last = content.decode("utf-8", "replace").rstrip("\n").rpartition("\n")[2]
    return last.removeprefix(MARK) if last.startswith(MARK) else None


def described_failure(run: Path, error: str) -> str:
    """Return a sentence or two with the error of a run of a sweep, and where its log is."""
    return f"failed: {error}{'' if error.endswith(('.', ':', '?')) else '.'} Its log is {log_of(run)}."


def _end_of(file: Path) -> bytes | None:
    """Return the end of a file; None if it is missing or not a plain file."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as opened:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return None
        opened.seek(max(0, found.st_size - MAX_LINE_BYTES))
        return opened.read()
