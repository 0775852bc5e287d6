"""The command `tandem`: parse, call, exit. Nothing heavy is imported before a command needs it."""

import os
import sys

# Importing a command registers it with the application.
from tandem.cli import config, fail_points, inspect, prepare, train  # noqa: F401
from tandem.cli.app import Interrupted, among_several, app
from tandem.errors import AlreadyReportedError, DiskError, StoppedError, TandemError, Terminated, full_disk
from tandem.isolation import isolated
from tandem.terminal.streams import print_error, print_traceback, watched_streams


def main() -> None:
    """Run the command; a user's mistake ends in one message and its exit code, never in a traceback."""
    sys.excepthook = print_traceback
    with isolated(), watched_streams():
        _run_command()


def _run_command() -> None:
    from tandem.failpoints import read_fail_point
    from tandem.train.run.stopping import terminated_cleanly

    try:
        read_fail_point()
        with terminated_cleanly():
            app(standalone_mode=True)
    except StoppedError as error:
        print(f"tandem: {error}", file=sys.stderr)
        _leave(error.exit_code)
    except AlreadyReportedError as error:
        _leave(error.exit_code)
    except TandemError as error:
        _fail(error)
    except Terminated:
        print("tandem: stopped by SIGTERM", file=sys.stderr)
        _leave(143)
    except (Interrupted, KeyboardInterrupt) as error:
        print(f"tandem: interrupted{error}", file=sys.stderr)
        _leave(130)
    except Exception as error:
        if full := full_disk(error):
            _fail(DiskError(f"the disk is full: {full}. Checkpoints already there are whole."))
        if _is_lost_worker(error):
            _fail(
                TandemError(
                    "another worker ended, so this one cannot go on. Checkpoints already there are whole; the same command "
                    "goes on from the newest."
                )
            )
        raise


def _is_lost_worker(error: Exception) -> bool:
    """Whether talking to another worker failed. Gloo raises a plain RuntimeError."""
    return (
        among_several()
        and isinstance(error, RuntimeError)
        and (type(error).__name__.startswith("Dist") or "gloo" in str(error))
    )


def _fail(error: TandemError) -> None:
    print_error(f"tandem: error: {error}")
    _leave(error.exit_code)


def _leave(exit_code: int) -> None:
    """End. One of several workers does without tearing down: threads that wait for workers already gone would abort."""
    if among_several():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)
