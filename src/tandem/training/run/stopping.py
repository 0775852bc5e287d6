"""Turns signals and a time limit into a request to stop. The training loop checks for requests where it can save a checkpoint."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tandem.errors import StoppedError, Terminated
from tandem.isolation import LAUNCHER
from tandem.terminal.arguments import in_command

# SIGHUP is sent when a terminal closes; SIGUSR1 by job schedulers shortly before the time limit.
SIGNALS = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129, signal.SIGUSR1: 138}
OUT_OF_TIME = ("checkpointing.checkpoint_must_save_by", 143)
CALLBACK = ("a callback", 0)
CALLBACK_FAILED = ("an error in a callback", 1)
# The reasons to stop before the end, with exit codes; ranks exchange the index, starting at 1.
REASONS = (*((one.name, code) for one, code in SIGNALS.items()), OUT_OF_TIME, CALLBACK, CALLBACK_FAILED)


class Stopping:
    """Records whether the run should stop, why, and with which exit code."""

    def __init__(self, must_save_by: float | None = None, highest: Callable[[int], int] = lambda number: number):
        """`must_save_by`: seconds until the time limit.

        `highest`: a function that returns the maximum of a number over all ranks. It makes all ranks stop together.
        """
        self._deadline = None if must_save_by is None else time.monotonic() + must_save_by
        self._longest = {"step": 0.0, "save": 0.0}
        self._reason: tuple[str, int] | None = None
        self._highest = highest
        self.stops_at_once = False  # whether a signal stops the run immediately

    @property
    def reason(self) -> str | None:
        """Why the run should stop; None if it should not."""
        return None if self._reason is None else self._reason[0]

    def request(self, reason: str, exit_code: int) -> None:
        self._reason = self._reason or (reason, exit_code)

    def took(self, what: str, seconds: float) -> None:
        """Record how long a step or a save took, to estimate whether another step and another save end before the time limit."""
        self._longest[what] = max(self._longest[what], seconds)

    def is_wanted(self) -> bool:
        if self._deadline is not None and time.monotonic() + 2 * sum(self._longest.values()) > self._deadline:
            self.request(*OUT_OF_TIME)
        agreed = self._highest(0 if self._reason is None else REASONS.index(self._reason) + 1)
        if agreed:
            self._reason = REASONS[agreed - 1]
        return agreed > 0

    def check(self) -> None:
        """Raise StoppedError if the run should stop. Every rank must call this, at points where the state can be saved."""
        if self.is_wanted():
            assert self._reason is not None
            raise StoppedError(*self._reason)

    @contextmanager
    def stopping_at_once(self) -> Iterator[None]:
        """A context in which a signal stops the run immediately. For work that is repeated at the next start anyway.

        An error after a signal is reported as a stop. The reason: a signal to all processes of a run also ends torch's compile
        processes, and the compilation then fails.
        """
        self.stops_at_once = True
        try:
            yield
        except (Exception, Terminated) as error:
            if self._reason is None or isinstance(error, StoppedError):
                raise
            raise StoppedError(*self._reason) from error
        finally:
            self.stops_at_once = False


@contextmanager
def stopped_by_signals(
    stopping: Stopping, *, alone: bool = True, prints: bool = True, saves: bool = True
) -> Iterator[None]:
    """A context in which Ctrl-C, SIGTERM and similar signals request a stop. A second signal stops at once.

    It ends the process of a command. In a call from Python, it does what it did before the call: Ctrl-C raises KeyboardInterrupt.

    `alone`: whether there is only one rank. With several ranks, a second signal is ignored, because torchrun forwards signals
    that the ranks have already received; tandem, if it started the ranks, kills them instead. `prints`: whether this rank prints
    the message. `saves`: whether the run saves checkpoints.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
        yield
        return

    def handle(number: int, _: Any) -> None:
        stopping.request(signal.Signals(number).name, SIGNALS[signal.Signals(number)])
        for one, earlier in before.items():
            # A call from Python must not end its process.
            at_once = signal.SIG_DFL if in_command() or earlier is None else earlier
            signal.signal(one, at_once if alone else signal.SIG_IGN)
        if alone and stopping.stops_at_once:
            raise Terminated
        if prints:
            first = "finished and saved" if saves else "finished"
            stops = alone or os.environ.get(LAUNCHER) in ("local", "ray")
            again = " A second signal stops at once." if stops else ""
            with suppress(OSError):  # the terminal may be gone
                start = "\n" if os.isatty(2) else ""  # the cursor may be at the end of a progress bar, or of ^C
                os.write(2, f"{start}tandem: stopping after the current step is {first}.{again}\n".encode())

    # Under nohup, SIGHUP is ignored, and stays so.
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    handled = [one for one in SIGNALS if one not in ignored]
    before = {one: signal.signal(one, handle) for one in handled}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@contextmanager
def terminated_cleanly() -> Iterator[None]:
    """A context in which SIGTERM raises an exception, as Ctrl-C does, so that temporary folders and processes are removed."""

    def unwind(number: int, _: Any) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
