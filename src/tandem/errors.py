"""Errors that are reported to the user, each kind with its exit code (docs/commands.md, Exit codes)."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.terminal.printable import scrubbed

# Of a rank that tandem started and that lost another one: the process that started it reports which. Not seen by users.
LOST_RANK_EXIT_CODE = 75
MAX_QUOTED_CHARACTERS = 500  # of another library's message; some quote a whole file


class TandemError(Exception):
    """An error that is shown to the user as one message, without a traceback."""

    exit_code = 1

    def __str__(self) -> str:
        """Return the message, without passwords in URLs and without values from the environment."""
        return scrubbed(super().__str__())


class ConfigError(TandemError):
    exit_code = 2


class MachineError(ConfigError):
    """This machine cannot do what the configuration asks for. Another machine may be able to."""


class DataError(TandemError):
    exit_code = 3


class CheckpointError(TandemError):
    exit_code = 4


class NonFiniteError(TandemError):
    exit_code = 5


class OutOfMemoryError(TandemError):
    exit_code = 6


class DiskError(TandemError):
    exit_code = 7


def one_line(error: BaseException) -> str:
    """Return the message of an error from another library, on one line, shortened and without its final period.

    If the message is empty, return the name of the error's type.
    """
    return " ".join(str(error).split())[:MAX_QUOTED_CHARACTERS].rstrip(".") or type(error).__name__


def full_disk(error: BaseException | None) -> OSError | None:
    """Return the "disk full" error of the operating system that caused `error`, or None if `error` has another cause.

    Of several, the one that names a path is returned: after a file could not be written, closing it fails again without one.
    torch raises a different error while it handles the system's error. safetensors raises an error that quotes the system's text.
    """
    found: OSError | None = None
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            if error.filename is not None:
                return error
            found = found or error
        elif f"os error {errno.ENOSPC}" in str(error):
            found = found or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        error = error.__cause__ or error.__context__
    return found


def is_lost_rank(error: BaseException) -> bool:
    """Whether `error` means that another rank ended or did not answer.

    Gloo then raises a plain RuntimeError, so the text of the error is checked.
    """
    is_distributed = os.environ.get("WORLD_SIZE", "1") != "1"
    of_group = type(error).__name__.startswith("Dist") or "gloo" in str(error)
    return is_distributed and isinstance(error, RuntimeError) and of_group


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that ends with this error."""
    if isinstance(error, TandemError):
        return error.exit_code
    return DiskError.exit_code if full_disk(error) else 1


@contextmanager
def writing(place: object) -> Iterator[None]:
    """Add the path `place` to a "disk full" error that is raised inside this context, if the error has no path."""
    try:
        yield
    except Exception as error:
        full = full_disk(error)
        if full is None or full.filename is not None:
            raise
        raise OSError(full.errno, full.strerror, str(place)) from error


class StoppedError(TandemError):
    """The run stopped because of a signal or its time limit, and can be resumed. The exit code is 143, or 130 after Ctrl-C."""

    exit_code = 143

    def __init__(self, reason: str, exit_code: int = 143):
        super().__init__(f"stopped by {reason}")
        self.exit_code = exit_code
        self.reason = reason


class CallbackError(TandemError):
    """A callback of the user's failed. Its exception is the cause (`__cause__`). The run can be resumed."""


class Terminated(BaseException):
    """Raised when a signal must end the process at once. Not an Exception, so that error handlers do not catch it."""


class AuditError(TandemError):
    """The model computes different log-probabilities in packs than in its plain forward pass. Nothing was trained."""

    exit_code = 1


class RanksDifferError(TandemError):
    """The ranks of a run disagree on what to train. Nothing was trained."""

    exit_code = 1


class DefectError(TandemError):
    """A bug in tandem was detected. The run ends, and the current step is not saved."""

    exit_code = 1


class AlreadyReportedError(TandemError):
    """Another rank failed and reports why, so this rank exits silently."""

    def __init__(self, exit_code: int):
        super().__init__("another rank failed")
        self.exit_code = exit_code
