"""Keeps the page of a run up to date while it trains. A page that cannot be written is reported and never ends the run."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.page.pairs import Measured, PairsFile
from tandem.page.write import write_page
from tandem.runs import open_run, stored_pairs

# Writing takes at most this share of a run's time, so that a page of many steps does not slow it down.
MAX_SHARE = 0.01


class RunPage:
    """Writes pairs.json and report.html of a run: at validations and checkpoints, and at its end."""

    def __init__(self, run: Path, tokenizer: Any, warn: Callable[[str], None], *, enabled: bool):
        """enabled: False for ranks other than the first, and with logger.report=false."""
        self._run, self._tokenizer, self._warn, self._enabled = run, tokenizer, warn, enabled
        self._pairs: PairsFile | None = None
        self._next = 0.0  # the time from which the page may be written again
        self._is_finished = False

    def note(self, split: str, measured: Measured) -> None:
        """Take the pairs of a validation, for the next time the page is written."""
        if self._enabled:
            with self._reporting_errors():
                self._pairs_file().note(split, measured)

    def refresh(self) -> None:
        """Write the page, unless it was written a moment ago."""
        if time.monotonic() >= self._next:
            self._write(ended=False)

    def finish(self) -> None:
        """Write the page of the finished run."""
        self._is_finished = True
        self._write(ended=True)

    def close(self) -> None:
        """Write the page of a run that ends before its last step; after `finish`, do nothing."""
        if not self._is_finished:
            self._write(ended=True)

    def _write(self, *, ended: bool) -> None:
        if not self._enabled:
            return
        started = time.monotonic()
        with self._reporting_errors():
            self._pairs_file().write()
            run = open_run(self._run)
            if ended and run.status == "running":  # this process still holds the lock
                run = replace(run, status="stopped")
            write_page([run], self._run / "report.html")
        self._next = time.monotonic() + (time.monotonic() - started) / MAX_SHARE

    def _pairs_file(self) -> PairsFile:
        if self._pairs is None:
            self._pairs = PairsFile(self._run / "pairs.json", self._tokenizer, stored_pairs(self._run))
        return self._pairs

    @contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        """A context in which an error disables the page instead of ending the run."""
        try:
            yield
        except Exception as error:
            self._disable(error)

    def _disable(self, error: Exception) -> None:
        """Report why the page cannot be written, once, and stop writing it."""
        if self._enabled:
            self._enabled = False
            what = f"{type(error).__name__}: {error}" if not isinstance(error, OSError) else str(error)
            with suppress(Exception):
                self._warn(
                    f"{self._run}/report.html cannot be written ({what}). Training continues without it; `tandem report "
                    f"{self._run}` writes it later."
                )
