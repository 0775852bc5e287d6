"""Where the time until the first step went, phase by phase, for `tandem train --verbose`."""

import time
from collections.abc import Sequence
from itertools import pairwise


class StartTimes:
    """The phases of a run's start. A phase lasts until the next one begins, or until `end`.

    `began`: when the process started, in seconds of `time.perf_counter`; None: now.
    """

    def __init__(self, began: float | None = None):
        self._marks = [("imports and settings", time.perf_counter() if began is None else began)]
        self._is_over = False

    def begin(self, phase: str) -> None:
        """Begin a phase. One that was begun before is continued: its times are added."""
        if not self._is_over:
            self._marks.append((phase, time.perf_counter()))

    def end(self, phase: str) -> str | None:
        """End the start with its last phase, such as step 1. Return the times in a sentence; None if it ended before."""
        if self._is_over:
            return None
        self._is_over = True
        return describe([*self._marks, ("", time.perf_counter())], phase)


def describe(marks: Sequence[tuple[str, float]], until: str) -> str:
    """Describe phases, each given by its name and when it began; the last one ends them."""
    seconds: dict[str, float] = {}
    for (phase, began), (_, ended) in pairwise(marks):
        seconds[phase] = seconds.get(phase, 0.0) + ended - began
    parts = [f"{phase} {spent:.1f}" for phase, spent in seconds.items() if spent >= 0.05]
    return f"Until the end of {until}: {marks[-1][1] - marks[0][1]:.1f} s ({', '.join(parts)})"
