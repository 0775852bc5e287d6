"""The trackers' own process: an Opening and records in, a JSON object a line; an answer to each out, the same way.

A tracker may hang, print, take over signals and hold up the end of its process. Here it does so to nobody but itself: the
run can always leave, or kill this process (feed.py).
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
# How long the end of a run waits for its trackers, at most; and this process, if the run has died.
CLOSE_SECONDS = 10.0


def main() -> None:
    # The pipes to the run are for messages alone. Trackers print where errors go, to a file (feed.py), and processes that
    # they start inherit neither pipe.
    messages, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(messages, lines), daemon=True).start()
    group = Group()
    while (line := lines.get()) is not None:
        answers.write(json.dumps(group.answer(json.loads(line))) + "\n")
        answers.flush()


def _read(messages: IO[str], lines: "queue.SimpleQueue[str | None]") -> None:
    for line in messages:
        lines.put(line)
    lines.put(None)
    # The run has gone. Whatever still hangs then, a tracker or what it does when its process ends, is cut off.
    time.sleep(CLOSE_SECONDS)
    os._exit(1)


class Group:
    """All trackers of a run; one that fails again and again is dropped, and the others go on."""

    def __init__(self) -> None:
        self._open: dict[str, Tracker] = {}
        self._failed: dict[str, str] = {}

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Do what a message asks; say which trackers failed over it, and where one that was opened is."""
        self._failed = {}
        if "opening" in message:
            return {"place": self._opened(message["tracker"], Opening(**message["opening"])), "failed": self._failed}
        for name, tracker in list(self._open.items()):
            if "metrics" in message:
                self._tried(name, lambda tracker=tracker: tracker.log(message["step"], message["metrics"]))
            else:
                self._tried(name, tracker.close)
        return {"place": None, "failed": self._failed}

    def _opened(self, name: str, opening: Opening) -> str | None:
        tracker = self._tried(name, lambda: TRACKERS[name](opening))
        if tracker is None:
            return None
        self._open[name] = tracker
        return tracker.place

    def _tried(self, name: str, call: Callable[[], T]) -> T | None:
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
