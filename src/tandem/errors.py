"""What can go wrong by a user's hand, and the exit code each kind ends with (docs/commands.md, Exit codes)."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.terminal.printable import scrubbed


class TandemError(Exception):
    """Shown to the user as one message, without a traceback."""

    exit_code = 1

    def __str__(self) -> str:
        """Without values of the environment and passwords, whatever the message was made of."""
        return scrubbed(super().__str__())


class ConfigError(TandemError):
    exit_code = 2


class MachineError(ConfigError):
    """This machine cannot do what the configuration asks. Another may."""


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


def full_disk(error: BaseException | None) -> OSError | None:
    """The full disk behind an error, if there is one: torch raises its own while it deals with the system's, and
    safetensors only quotes it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return error
        if f"os error {errno.ENOSPC}" in str(error):
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def writing(place: object) -> Iterator[None]:
    """A full disk met inside is told with the place that was written to."""
    try:
        yield
    except Exception as error:
        full = full_disk(error)
        if full is None or full.filename is not None:
            raise
        raise OSError(full.errno, full.strerror, str(place)) from error


class StoppedError(TandemError):
    """The run was asked to stop, and did at a place from which it can go on. By Ctrl-C the code is 130."""

    exit_code = 143

    def __init__(self, reason: str, exit_code: int = 143):
        super().__init__(f"stopped by {reason}")
        self.exit_code = exit_code


class Terminated(BaseException):
    """A signal to stop, wherever the process stands. No Exception, as Ctrl-C: nothing that deals with errors takes it for one."""


class AuditError(TandemError):
    """The model, as packed, does not compute what the plain model computes: nothing was trained."""

    exit_code = 1


class RanksDifferError(TandemError):
    """The ranks of a run would not train the same: nothing was trained."""

    exit_code = 1


class DefectError(TandemError):
    """tandem did something that it never should: the run ends, and nothing of the step is saved."""

    exit_code = 1


class AlreadyReportedError(TandemError):
    """Another worker could not go on and says why: this one ends with it, in silence."""

    def __init__(self, exit_code: int):
        super().__init__("another worker could not go on")
        self.exit_code = exit_code
