"""The process that runs the trackers. It reads messages as lines of JSON, and answers each message with one line.

A tracker may hang, print, replace signal handlers or delay the exit of its process. In this separate process, none of that
affects the training run, which can always kill this process (tracking.py).
"""

import json
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import IO, Any, TypeVar

from tandem.report.trackers.adapters import TRACKERS, Opening, Tracker
from tandem.terminal.printable import without_password

T = TypeVar("T")

ATTEMPTS = 3
PAUSE_SECONDS = 1.0
# How long a run waits for its trackers when it ends. If the run has died, this process waits as long for them.
CLOSE_SECONDS = 10.0


def main() -> None:
    # The pipes to the run carry messages only. What trackers print goes to standard error, which is a file (tracking.py).
    # Processes that trackers start do not inherit the pipes.
    messages, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(messages, lines), daemon=True).start()
    group = TrackerGroup()
    while (line := lines.get()) is not None:
        answers.write(json.dumps(group.answer(json.loads(line))) + "\n")
        answers.flush()


def _read(messages: IO[str], lines: "queue.SimpleQueue[str | None]") -> None:
    for line in messages:
        lines.put(line)
    lines.put(None)
    # The run has ended. Exit even if a tracker hangs.
    time.sleep(CLOSE_SECONDS)
    os._exit(1)


class TrackerGroup:
    """All trackers of a run. A tracker that fails several times in a row is dropped; the remaining trackers continue."""

    def __init__(self) -> None:
        self._open: dict[str, Tracker] = {}
        self._failed: dict[str, str] = {}

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Handle a message. Return the errors of trackers that failed, and the address of a tracker if the message opened one."""
        self._failed = {}
        if "opening" in message:
            return {
                "place": self._open_tracker(message["tracker"], Opening(**message["opening"])),
                "failed": self._failed,
            }
        for name, tracker in list(self._open.items()):
            if "metrics" in message:
                metrics = message["metrics"] | message["by_tracker"].get(name, {})
                self._try(name, lambda tracker=tracker, metrics=metrics: tracker.log(message["step"], metrics))
            else:
                self._try(name, tracker.close)
        return {"place": None, "failed": self._failed}

    def _open_tracker(self, name: str, opening: Opening) -> str | None:
        tracker = self._try(name, lambda: TRACKERS[name](opening))
        if tracker is None:
            return None
        self._open[name] = tracker
        return tracker.place

    def _try(self, name: str, call: Callable[[], T]) -> T | None:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return call()
            except (Exception, SystemExit) as error:
                if attempt == ATTEMPTS:
                    self._failed[name] = f"{type(error).__name__}: {without_password(' '.join(str(error).split()))}"
                    self._open.pop(name, None)
                else:
                    time.sleep(PAUSE_SECONDS)
        return None


if __name__ == "__main__":
    main()
