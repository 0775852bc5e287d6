"""Locks the directory of a run, so that only one process at a time uses it."""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from tandem.errors import CheckpointError, ConfigError, full_disk, writing
from tandem.storage.ownership import open_own
from tandem.terminal.arguments import option, setting


@contextmanager
def locked(run: Path, key: str = "run.dir") -> Iterator[None]:
    """A context in which the directory is locked for this process. Raise CheckpointError if another process has locked it.

    A process that dies releases its lock. `key`: the setting that names the directory. If an error ends the context before
    anything is written, a new directory is removed.
    """
    name = option(key) if key.isidentifier() else key
    new = [folder for folder in (run, *run.parents) if not folder.exists()]
    try:
        run.mkdir(parents=True, exist_ok=True)
        file = open_own(run / "lock", "a+")
    except OSError as error:
        if full_disk(error):
            raise
        raise ConfigError(
            f"{setting(key, run)}: cannot be written ({error.strerror}). Choose another {name}."
        ) from None
    with file as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = _read_lock(lock) or "unknown"
            raise CheckpointError(
                f"{run} is in use by process {holder}. Wait for it, or choose another {name}."
            ) from None
        if not re.fullmatch("[0-9]*", _read_lock(lock)):
            raise CheckpointError(
                f"{run}/lock: not written by tandem, which stores its process id in a file of that name. Move the file elsewhere."
            )
        with writing(run / "lock"):
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
        try:
            yield
        except BaseException:
            _remove_unused(run, new)
            raise


def _remove_unused(run: Path, new: list[Path]) -> None:
    """Remove new folders, the innermost first, if `run` is one of them and holds nothing but its lock."""
    with suppress(OSError):
        if run in new and [path.name for path in run.iterdir()] == ["lock"]:
            (run / "lock").unlink()
            for folder in new:
                folder.rmdir()


def _read_lock(lock: IO[str]) -> str:
    return os.pread(lock.fileno(), 64, 0).decode("ascii", "replace").strip()
