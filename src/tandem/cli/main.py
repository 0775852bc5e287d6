"""The entry point of `tandem`: parses arguments, runs the command and exits. Imports heavy modules only when needed."""

import os
import socket
import sys
import time

# Importing a module registers its command with the application.
from tandem.cli import (  # noqa: F401
    chat,
    config,
    doctor,
    eval,
    export,
    fail_points,
    generate,
    inspect,
    launch,
    plan,
    prepare,
    report,
    runs,
    sweep,
    train,
    watch,
)
from tandem.cli.app import Interrupted, app
from tandem.errors import (
    LOST_RANK_EXIT_CODE,
    AlreadyReportedError,
    DiskError,
    StoppedError,
    TandemError,
    Terminated,
    full_disk,
    is_lost_rank,
)
from tandem.isolation import LAUNCHER, isolated
from tandem.launch.srun import is_in_step
from tandem.rank_variables import is_distributed
from tandem.storage.compile_cache import kept_compile_caches
from tandem.terminal.streams import print_error, print_traceback, watched_streams

REPORT_SECONDS = 10  # longer than a rank needs to report an error that all of them find


def main() -> None:
    """Run the command that the arguments name. User errors end in one message and an exit code, without a traceback."""
    sys.excepthook = print_traceback
    if is_distributed() or is_in_step():
        # If a rank ends, torch prints C++ stack traces before tandem says what happened.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with isolated(), kept_compile_caches(), watched_streams():
        _run_command()


def _run_command() -> None:
    from tandem.failpoints import read_fail_point
    from tandem.training.run.stopping import terminated_cleanly

    try:
        read_fail_point()
        with terminated_cleanly():
            app(standalone_mode=True)
    except StoppedError as error:
        print(f"tandem: {error}", file=sys.stderr)
        _exit(error.exit_code)
    except AlreadyReportedError as error:
        _let_another_rank_report()
        _exit(error.exit_code)
    except TandemError as error:
        _fail(error, of_rank="" if os.environ.get("RANK", "0") == "0" else f"{_own_rank()}: ")
    except Terminated:
        if not _is_other_rank():
            print("tandem: stopped by SIGTERM", file=sys.stderr)
        _exit(143)
    except (Interrupted, KeyboardInterrupt) as error:
        if not _is_other_rank():
            print(f"tandem: interrupted{error}", file=sys.stderr)
        _exit(130)
    except Exception as error:
        if full := full_disk(error):
            of_rank = f" ({_own_rank()})" if is_distributed() else ""
            kept = "Checkpoints saved before are intact. " if sys.argv[1:2] in (["train"], ["sweep"]) else ""
            _fail(DiskError(f"the disk is full{of_rank}: {full}. {kept}Free some space and run the command again."))
        if is_lost_rank(error):
            if os.environ.get(LAUNCHER) in ("local", "ray"):
                _exit(LOST_RANK_EXIT_CODE)  # the process that started this one says which rank ended, and why
            _fail(
                TandemError(
                    f"{_lost_rank()}, so this one cannot continue. Checkpoints saved before are intact; run the same "
                    "command to resume from the newest."
                )
            )
        raise


def _let_another_rank_report() -> None:
    """Under torchrun, wait until it ends this process: the first rank that ends makes torchrun stop the others.

    It would stop the rank that reports the error before that rank has printed it.
    """
    if is_distributed() and "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(REPORT_SECONDS)


def _is_other_rank() -> bool:
    """Whether this is a rank after the first. tandem and torchrun send signals to all of them, and the first one reports."""
    return os.environ.get("RANK", "0") != "0"


def _lost_rank() -> str:
    from tandem.model.distributed.presence import describe_missing

    return describe_missing() or "another rank ended"


def _own_rank() -> str:
    """Name this rank and its machine: on another machine, the same command may find another disk or other files."""
    return f"rank {os.environ.get('RANK', '?')} on {socket.gethostname()}"


def _fail(error: TandemError, of_rank: str = "") -> None:
    print_error(f"tandem: error: {of_rank}{error}")
    _exit(error.exit_code)


def _exit(exit_code: int) -> None:
    """Exit the process. With several ranks, skip Python's shutdown: threads that wait for a lost rank would abort the process."""
    if is_distributed():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)
