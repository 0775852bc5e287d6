"""Which files and folders are tandem's: what it may write to, and which temporary ones of dead processes it may remove.

Whatever tandem writes under a temporary name is called `.NAME.PID`, after what it becomes and the process that writes it. A
temporary folder also holds a marker, which the process keeps locked for as long as it writes there. Nothing else is removed.
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
# The largest that Linux gives out. A greater number is something else: .config.yaml.20261117 has a date.
GREATEST_PID = 1 << 22
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<pid>[1-9][0-9]{0,6})", re.ASCII | re.DOTALL)
_STEP = re.compile(r"step_(0|[1-9][0-9]*)", re.ASCII)


def step_in(name: str) -> int | None:
    """N of a bare `step_N`; None of any other name (step_007, step_², ../step_1)."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


# Files that are written to


def refuse_other_than_file(path: Path) -> None:
    """Refuse to write where a link, a directory or a device is. What does not exist may be written."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return
    if stat.S_ISLNK(mode):
        raise CheckpointError(_is_link(path))
    if not stat.S_ISREG(mode):
        what = "a directory" if stat.S_ISDIR(mode) else "a special file"
        raise CheckpointError(f"{path}: {what}, where tandem writes a plain file. Move it elsewhere.")


def refuse_other_than_folder(path: Path) -> None:
    """Refuse a file where a folder is written to. A link to a folder is one."""
    if os.path.lexists(path) and not path.is_dir():
        what = "a link to nothing" if path.is_symlink() and not path.exists() else "a file"
        raise CheckpointError(f"{path}: {what}, where tandem writes a directory. Move it elsewhere.")


def open_own(path: Path, mode: Literal["a", "a+", "ab"]) -> IO[Any]:
    """Open a file to append to it, never through a link."""
    refuse_other_than_file(path)

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)

    try:
        return open(path, mode, encoding=None if "b" in mode else "utf-8", opener=opener)
    except OSError as error:
        if error.errno == errno.ELOOP:  # made since it was looked at
            raise CheckpointError(_is_link(path)) from None
        raise


def _is_link(path: Path) -> str:
    return (
        f"{path}: a symbolic link, and writing to it would change a file elsewhere. Put the file itself in its place, or remove "
        "the link."
    )


def free_path(folder: Path, name: str, ending: str = "") -> Path:
    """The first of NAME, NAME.2, NAME.3, ... that is not there: nothing is ever overwritten."""
    paths = (folder / f"{name}{'' if number == 1 else f'.{number}'}{ending}" for number in count(1))
    return next(path for path in paths if not os.path.lexists(path))


# Temporary files and folders


def temporary_path(path: Path) -> Path:
    """Where a file or link is written before it gets its name, free to be created there.

    Under this process's own number there is only what an earlier process of the same number left.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    if aside.is_symlink() or aside.is_file():
        aside.unlink(missing_ok=True)
    return aside


def create_temporary(path: Path) -> tuple[Path, int]:
    """A new empty file beside `path`, never one that is there already; its name, and it open for writing."""
    aside = temporary_path(path)
    return aside, os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)


@contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """An empty folder beside `folder` with a marker in it; removed in the end, unless it was renamed."""
    aside = _free_temporary_folder(folder)
    aside.mkdir()
    lock = -1
    try:
        lock = _mark(aside, folder.name)
        yield aside
    finally:
        if aside.is_dir():
            with suppress(OSError):  # what went wrong before is what is reported
                _remove_tree(aside)
        if lock >= 0:
            os.close(lock)


def remove_folder(folder: Path, *, renamed: Callable[[], None]) -> None:
    """Remove a folder of tandem's: under its own name it is complete or absent, whenever the process is killed.

    `renamed` is called once it has a temporary name.
    """
    lock = _mark(folder, folder.name)
    try:
        aside = folder.rename(_free_temporary_folder(folder))
        renamed()
        _remove_tree(aside)
    finally:
        os.close(lock)


def remove_abandoned(folder: Path, *names: str, is_held: bool) -> None:
    """Remove the temporary files, links and folders of dead processes that were to become one of `names`, regular expressions.

    is_held: no other process writes into `folder` now. Where others may, on other machines too, only folders of this machine
    are removed: of a file nothing says where its process runs.
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
    # This process's own number may be that of a dead one too: in a container every first process is number 1.
    if _is_alive(pid) and pid != os.getpid():
        return
    try:
        lock = os.open(path / MARKER, os.O_RDWR | os.O_NOFOLLOW)  # network file systems lock only what can be written
    except OSError:
        return  # not tandem's
    try:
        marked = _read_marker(lock)
        becomes = marked.get("becomes")
        is_own = isinstance(becomes, str) and re.fullmatch(rf"{re.escape(becomes)}(\.[0-9]+)?", name) is not None
        if is_own and _matches(str(becomes), names) and (is_held or marked.get("host") == _host()):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_tree(path)
    except OSError:
        pass  # in use, or not removable: it is never read
    finally:
        os.close(lock)


def _is_temporary_file(path: Path) -> bool:
    """A plain file, or a link as `best` and `latest` are."""
    return step_in(str(path.readlink())) is not None if path.is_symlink() else path.is_file()


def _matches(name: str, names: tuple[str, ...]) -> bool:
    return any(re.fullmatch(one, name, re.ASCII | re.DOTALL) for one in names)


def _free_temporary_folder(folder: Path) -> Path:
    """`.NAME.PID`; where this process has one already, or a user's folder is called so, `.NAME.2.PID`."""
    numbers = ("" if number == 1 else f".{number}" for number in count(1))
    paths = (folder.with_name(f".{folder.name}{number}.{os.getpid()}") for number in numbers)
    return next(path for path in paths if not os.path.lexists(path))


def _mark(folder: Path, becomes: str) -> int:
    """Write the marker and lock it; the lock is let go when it is closed, or its process dies."""
    lock = os.open(folder / MARKER, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
    try:
        os.write(lock, json.dumps({"becomes": becomes, "host": _host()}).encode() + b"\n")
        with suppress(OSError):  # a file system without locks: then the folder is never taken for abandoned either
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
    """The marker last: what is left of a removal that was killed is still known to be tandem's."""
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
    except OSError:  # another user's
        pass
    return True


def _host() -> str:
    return os.uname().nodename
