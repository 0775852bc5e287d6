"""A process that runs `tandem` and stops when the process that started it ends: a run of a sweep, or a rank.

Standard input is a pipe whose other end the parent holds. The pipe closes when the parent ends, even if it is killed.
"""

import os
import runpy
import signal
import threading

from tandem.isolation import LAUNCHER
from tandem.training.run.stopping import SIGNALS


def stop_with_parent(number: int = signal.SIGTERM) -> None:
    """From now on, send this process a signal when standard input is closed. After SIGTERM, a run saves a checkpoint."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), number)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def receive_signals() -> None:
    """Unblock the signals that stop a run. Ray blocks SIGINT in its workers, and child processes inherit that."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


if __name__ == "__main__":
    receive_signals()
    # Ray restarts all ranks at once when it has lost one of them: an old rank must not hold the run directory any longer.
    stop_with_parent(signal.SIGKILL if os.environ.get(LAUNCHER) == "ray" else signal.SIGTERM)
    runpy.run_module("tandem", run_name="__main__", alter_sys=True)
