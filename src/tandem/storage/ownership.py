"""Decides which files tandem may write to, and which temporary files of dead processes it may remove.

Temporary files and folders are named `.NAME.PID`: NAME is the final name, PID the process that writes. A temporary folder
also contains a marker file, which that process keeps locked while it writes. No other files and folders are removed.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO, Any, Literal

from tandem.errors import CheckpointError

MARKER = "written-by-tandem"
# The largest process ID on Linux. A greater number is not a process ID, such as the date in .config.yaml.20261117.
GREATEST_PID = 1 << 22
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<pid>[1-9][0-9]{0,6})", re.ASCII | re.DOTALL)
_STEP = re.compile(r"step_(0|[1-9][0-9]*)", re.ASCII)


def step_in(name: str) -> int | None:
    """Return N if the name is exactly `step_N`, else None. Names such as step_007, step_² and ../step_1 give None."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


# Files that are written to


def refuse_other_than_file(path: Path) -> None:
    """Raise a CheckpointError if a path is a link, a directory or a device. A path that does not exist is accepted."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return
    if stat.S_ISLNK(mode):
        raise CheckpointError(_is_link(path))
    if not stat.S_ISREG(mode):
        what = "a directory" if stat.S_ISDIR(mode) else "a special file"
        raise CheckpointError(f"{path}: {what}, but tandem writes a plain file with this name. Move it elsewhere.")


def refuse_other_than_folder(path: Path) -> None:
    """Raise a CheckpointError if a path exists and is not a folder. A link to a folder is accepted."""
    if os.path.lexists(path) and not path.is_dir():
        what = "a link to nothing" if path.is_symlink() and not path.exists() else "a file"
        raise CheckpointError(f"{path}: {what}, but tandem writes a directory with this name. Move it elsewhere.")


def open_own(path: Path, mode: Literal["a", "a+", "ab"]) -> IO[Any]:
    """Open a file for appending. Raise a CheckpointError if it is a symbolic link."""
    refuse_other_than_file(path)

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)

    try:
        return open(path, mode, encoding=None if "b" in mode else "utf-8", opener=opener)
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link was created after the check
            raise CheckpointError(_is_link(path)) from None
        raise


def lock_holder(folder: Path) -> str | None:
    """Return the id of the process that holds the lock of a run's directory, and None if no process does. Writes nothing."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            return None
        found = os.pread(descriptor, 64, 0).decode("ascii", "replace").strip()
        return found if found.isdecimal() else "unknown"
    finally:
        os.close(descriptor)
    return None


def _is_link(path: Path) -> str:
    return (
        f"{path}: a symbolic link, and writing to it would change a file elsewhere. Remove the link, or replace it by a copy of "
        "the file."
    )


def free_path(folder: Path, name: str, ending: str = "") -> Path:
    """Return the first of NAME, NAME.2, NAME.3, ... that does not exist, so that nothing is overwritten."""
    paths = (folder / f"{name}{'' if number == 1 else f'.{number}'}{ending}" for number in count(1))
    return next(path for path in paths if not os.path.lexists(path))


# Temporary files and folders


def temporary_path(path: Path) -> Path:
    """Return the temporary path for a file or link. Remove an existing file at the temporary path.

    Such a file was left by an earlier process with the same process ID.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    if aside.is_symlink() or aside.is_file():
        aside.unlink(missing_ok=True)
    return aside


def create_temporary(path: Path) -> tuple[Path, int]:
    """Create an empty temporary file next to `path`. Return its path and descriptor. An existing file is never opened."""
    aside = temporary_path(path)
    return aside, os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)


@contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `folder`. At first, the temporary folder contains only the marker file.

    After the block, remove the temporary folder unless it was renamed.
    """
    aside = _make_temporary_folder(folder)
    lock = -1
    try:
        lock = _mark(aside, folder.name)
        yield aside
    finally:
        if aside.is_dir():
            with suppress(OSError):  # do not hide an earlier error
                _remove_tree(aside)
        if lock >= 0:
            os.close(lock)


def remove_folder(folder: Path, *, renamed: Callable[[], None]) -> None:
    """Remove a folder atomically: if the process is killed, the folder is either complete or gone.

    `renamed`: called after the folder was renamed to a temporary name and before its files are removed.
    """
    lock = _mark(folder, folder.name)
    try:
        aside = folder.rename(_free_temporary_folder(folder))
        renamed()
        _remove_tree(aside)
    finally:
        os.close(lock)


def remove_abandoned(folder: Path, *names: str, is_held: bool) -> None:
    """Remove temporary files, links and folders that dead processes left in `folder`.

    `names`: patterns. Only files and folders whose final name matches one of them are removed. `is_held`: True if no
    other process on any machine can be writing to `folder`. If False, only folders that were written on this machine are
    removed. Files and links are kept, because they do not record the machine that wrote them.
    """
    for path in sorted(folder.glob(".*")):
        found = _TEMPORARY.fullmatch(path.name)
        if found is None or int(found["pid"]) > GREATEST_PID:
            continue
        name, pid = found["name"], int(found["pid"])
        if path.is_dir() and not path.is_symlink():
            _remove_abandoned_folder(path, name, pid, names, is_held=is_held)
        elif is_held and _matches(name, names) and not _is_alive(pid) and _is_temporary_file(path):
            path.unlink(missing_ok=True)


def _remove_abandoned_folder(path: Path, name: str, pid: int, names: tuple[str, ...], *, is_held: bool) -> None:
    # A dead process may have had the same ID as this one: in a container the first process always has ID 1.
    if _is_alive(pid) and pid != os.getpid():
        return
    try:
        lock = os.open(path / MARKER, os.O_RDWR | os.O_NOFOLLOW)  # network file systems lock only writable files
    except OSError:
        return  # not created by tandem
    try:
        marked = _read_marker(lock)
        becomes = marked.get("becomes")
        is_own = isinstance(becomes, str) and re.fullmatch(rf"{re.escape(becomes)}(\.[0-9]+)?", name) is not None
        if is_own and _matches(str(becomes), names) and (is_held or marked.get("host") == _host()):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_tree(path)
    except OSError:
        pass  # in use, or not removable; leaving it is harmless, because temporary folders are never read
    finally:
        os.close(lock)


def _is_temporary_file(path: Path) -> bool:
    """Whether a path is a plain file, or a link to `step_N`. The links `best` and `latest` of a run point to `step_N`."""
    return step_in(str(path.readlink())) is not None if path.is_symlink() else path.is_file()


def _matches(name: str, names: tuple[str, ...]) -> bool:
    return any(re.fullmatch(one, name, re.ASCII | re.DOTALL) for one in names)


def _free_temporary_folder(folder: Path) -> Path:
    """Return the first of `.NAME.PID`, `.NAME.2.PID`, `.NAME.3.PID`, ... that does not exist."""
    numbers = ("" if number == 1 else f".{number}" for number in count(1))
    paths = (folder.with_name(f".{folder.name}{number}.{os.getpid()}") for number in numbers)
    return next(path for path in paths if not os.path.lexists(path))


def _make_temporary_folder(folder: Path) -> Path:
    """Create a temporary folder with a free name. On a shared disk, a process of another machine may have the same ID."""
    while True:
        aside = _free_temporary_folder(folder)
        try:
            aside.mkdir()
        except FileExistsError:
            continue
        return aside


def _mark(folder: Path, becomes: str) -> int:
    """Write the marker file of a folder, lock it, and return its descriptor.

    The lock ends when the descriptor is closed or the process exits.
    """
    lock = os.open(folder / MARKER, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
    try:
        os.write(lock, json.dumps({"becomes": becomes, "host": _host()}).encode() + b"\n")
        with suppress(OSError):  # the file system has no locks; there, the folder is never removed as abandoned
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _read_marker(descriptor: int) -> dict[str, Any]:
    try:
        marked = json.loads(os.read(descriptor, 4096))
    except ValueError:
        return {}
    return marked if isinstance(marked, dict) else {}


def _remove_tree(folder: Path) -> None:
    """Remove a folder, and its marker file last. If the removal is interrupted, the marker shows that tandem made the folder."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARKER:
            path.unlink(missing_ok=True)
    shutil.rmtree(folder)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to another user
        pass
    return True


def _host() -> str:
    return os.uname().nodename
