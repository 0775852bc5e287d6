"""Lines of metrics.jsonl in; out, which of two checkpoints is the better one."""

import json
import math
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

from tandem.config.tracked import TrackedMetric


class Ranking:
    """Ranks the weights of every step by the tracked metric, as it was last measured until then.

    The lines decide, not the checkpoints: one that was saved before its validation is ranked all the same once that is
    done, and by another metric when another is asked for. Values of other pairs are no measure of the same thing: once a
    validation set is another, only what is measured from then on counts. Nor does the start, which no checkpoint holds.
    """

    def __init__(
        self, tracked: TrackedMetric | None, *, higher_is_better: bool, records: Iterable[dict[str, Any]] = ()
    ):
        """records: what stands in metrics.jsonl already."""
        self._tracked, self._sign = tracked, -1.0 if higher_is_better else 1.0
        self._measured: list[tuple[int, float]] = []  # after which step, and what, in order
        self._pairs: tuple[Any, ...] = ()  # that it was measured on
        self._start: tuple[tuple[Any, ...], float] = (), math.nan  # the same before the first step
        for record in records:
            self.note(record)

    def note(self, record: dict[str, Any]) -> None:
        """A line of metrics.jsonl, of this split or another."""
        if self._tracked is None or record["split"] != self._tracked.split:
            return
        if record["step"] == 0:
            self._start = measured_on(record), record.get(self._tracked.metric, math.nan)
            return
        if (pairs := measured_on(record)) != self._pairs:
            self._measured, self._pairs = [], pairs  # a new list: another thread may be looking at the old one
        self._measured.append((record["step"], record.get(self._tracked.metric, math.nan)))

    def best_step(self) -> int | None:
        """After which step the metric was best, of equal values the first; None if it was never a number."""
        best = self._best()
        return None if best is None else self._measured[best][0]

    def best_value(self) -> float:
        best = self._best()
        return math.nan if best is None else self._measured[best][1]

    def better_start(self) -> float | None:
        """The metric before the first step, where it was measured on the same pairs and no step has reached it."""
        pairs, value = self._start
        is_better = pairs == self._pairs and self._sign * value < self._sign * self.best_value()
        return value if is_better else None

    def num_since_best(self) -> int:
        """How many times the metric was measured since then, in vain."""
        best = self._best()
        return len(self._measured) - (0 if best is None else best + 1)

    def _best(self) -> int | None:
        values = [
            (self._sign * value, place) for place, (_, value) in enumerate(self._measured) if math.isfinite(value)
        ]
        return min(values)[1] if values else None

    def rank(self, step: int) -> tuple[bool, float, int]:
        """Lower is better; weights from before the metric was measured come last, the newer first.

        Of several that the same validation ranks the first is better: it is the nearest to what was validated.
        """
        measured = self._measured
        until = bisect_right(measured, step, key=lambda one: one[0])
        value = measured[until - 1][1] if until else math.nan
        if not math.isfinite(value):
            return True, 0.0, -step
        return False, self._sign * value, step


def measured_on(record: dict[str, Any]) -> tuple[Any, ...]:
    """Which pairs a validation's line is about: those of other pairs are not compared with it."""
    return (record["data"], record.get("num_pairs")) if "data" in record else ()


Record = dict[str, Any]
MAX_NUMBER = 1 << 63  # larger integers do not fit into a float or a tracker


def records_in(content: bytes) -> list[Record | None]:
    """The record of each line; None of one that is damaged, or that tandem did not write."""
    return [_record(line) for line in content.splitlines()]


def _record(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("split"), str):
        return None
    step = record.get("step")
    is_step = type(step) is int and 0 <= step < MAX_NUMBER
    is_set = isinstance(record.get("data", ""), str)
    numbers = (value for name, value in record.items() if name not in ("step", "split", "data"))
    return record if is_step and is_set and all(map(_is_number, numbers)) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < MAX_NUMBER)
