"""Signals and a time limit in; a request to stop out, which the loop meets at its next safe place."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tandem.errors import StoppedError, Terminated

# A closed terminal, and what job schedulers send before the time is up, are asked to stop by too.
SIGNALS = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129, signal.SIGUSR1: 138}
OUT_OF_TIME = ("checkpointing.checkpoint_must_save_by", 143)
# Why a run stops before its end, and the exit code; workers tell each other the number, from 1.
REASONS = (*((one.name, code) for one, code in SIGNALS.items()), OUT_OF_TIME)


class Stopping:
    """Whether the run should stop, why, and with which exit code."""

    def __init__(self, must_save_by: float | None = None, highest: Callable[[int], int] = lambda number: number):
        """`highest` of what all workers give: they stop together, so all ask equally often."""
        self._deadline = None if must_save_by is None else time.monotonic() + must_save_by
        self._longest = {"step": 0.0, "save": 0.0}
        self._reason: tuple[str, int] | None = None
        self._highest = highest
        self.is_at_once = False  # whether a signal stops the run wherever it stands

    def request(self, reason: str, exit_code: int) -> None:
        self._reason = self._reason or (reason, exit_code)

    def took(self, what: str, seconds: float) -> None:
        """How long a step or a save took: there must be time for one more of each."""
        self._longest[what] = max(self._longest[what], seconds)

    def is_wanted(self) -> bool:
        if self._deadline is not None and time.monotonic() + 2 * sum(self._longest.values()) > self._deadline:
            self.request(*OUT_OF_TIME)
        agreed = self._highest(0 if self._reason is None else REASONS.index(self._reason) + 1)
        if agreed:
            self._reason = REASONS[agreed - 1]
        return agreed > 0

    def check(self) -> None:
        """StoppedError if the run should stop; called where everything can be saved."""
        if self.is_wanted():
            assert self._reason is not None
            raise StoppedError(*self._reason)

    @contextmanager
    def losing_nothing(self) -> Iterator[None]:
        """What is done inside is done again at the next start: a signal need not wait for a safe place.

        An error behind it is taken for the stop: a signal to all processes of a run ends those that compile for it, too.
        """
        self.is_at_once = True
        try:
            yield
        except (Exception, Terminated) as error:
            if self._reason is None or isinstance(error, StoppedError):
                raise
            raise StoppedError(*self._reason) from error
        finally:
            self.is_at_once = False


@contextmanager
def stopped_by_signals(
    stopping: Stopping, *, alone: bool = True, says: bool = True, saves: bool = True
) -> Iterator[None]:
    """Ctrl-C, SIGTERM and their like ask the run to stop, or stop it where it loses nothing; a second one of any ends the
    process at once.

    Not among several workers (`alone` is false; one of them `says` it): torchrun passes on what they have heard
    already, so the second may be the first.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread hears signals
        yield
        return

    def asked(number: int, _: Any) -> None:
        stopping.request(signal.Signals(number).name, SIGNALS[signal.Signals(number)])
        for one in before:
            signal.signal(one, signal.SIG_DFL if alone else signal.SIG_IGN)
        if alone and stopping.is_at_once:
            raise Terminated
        if says:
            first = "finished and saved" if saves else "finished"
            again = " Once more stops at once." if alone else ""
            with suppress(OSError):  # the terminal may be gone
                start = "\n" if os.isatty(2) else ""  # the cursor may be at the end of a progress bar, or of ^C
                os.write(2, f"{start}tandem: stopping: the step is {first} first.{again}\n".encode())

    # Under nohup a closed terminal is to be ignored.
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    heard = [one for one in SIGNALS if one not in ignored]
    before = {one: signal.signal(one, asked) for one in heard}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@contextmanager
def terminated_cleanly() -> Iterator[None]:
    """SIGTERM unwinds the process, as Ctrl-C does, so that half-written folders are removed and workers end."""

    def unwind(number: int, _: Any) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
