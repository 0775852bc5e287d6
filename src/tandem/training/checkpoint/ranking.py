"""Ranks checkpoints by the tracked metric, which is read from metrics.jsonl."""

import json
import math
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

from tandem.config.tracked import TrackedMetric


class Ranking:
    """Ranks each step by the latest value of the tracked metric that was measured at or before that step.

    Values come from the lines of metrics.jsonl, not from checkpoints. So a checkpoint may be saved before the validation that
    ranks it, and a resumed run may rank by another metric. If the pairs of a validation set change, only values on the new pairs
    count. The model before the first step is not ranked, because there is no checkpoint of it.
    """

    def __init__(
        self, tracked: TrackedMetric | None, *, higher_is_better: bool, records: Iterable[dict[str, Any]] = ()
    ):
        """`records`: the lines already in metrics.jsonl, each as a dict."""
        self._tracked, self._sign = tracked, -1.0 if higher_is_better else 1.0
        self._measured: list[tuple[int, float]] = []  # (step, value), in order
        self._pairs: tuple[Any, ...] = ()  # the pairs that these values were measured on
        self._start: tuple[tuple[Any, ...], float] = (), math.nan  # pairs and value before the first step
        for record in records:
            self.note(record)

    def note(self, record: dict[str, Any]) -> None:
        """Add the values of a new line of metrics.jsonl. The line is ignored if its split is not that of the tracked metric."""
        if self._tracked is None or record["split"] != self._tracked.split:
            return
        if record["step"] == 0:
            self._start = measured_on(record), record.get(self._tracked.metric, math.nan)
            return
        if (pairs := measured_on(record)) != self._pairs:
            self._measured, self._pairs = [], pairs  # a new list, because another thread may be reading the old one
        self._measured.append((record["step"], record.get(self._tracked.metric, math.nan)))

    def best_step(self) -> int | None:
        """Return the step at which the metric was best. Of equal values, return the first step.

        Return None if no value is finite.
        """
        best = self._best()
        return None if best is None else self._measured[best][0]

    def best_value(self) -> float:
        best = self._best()
        return math.nan if best is None else self._measured[best][1]

    def better_start(self) -> float | None:
        """Return the metric of the model before the first step, if it was better than after every step; otherwise None.

        Also return None if the metric before the first step was measured on other pairs.
        """
        pairs, value = self._start
        is_better = pairs == self._pairs and self._sign * value < self._sign * self.best_value()
        return value if is_better else None

    def num_since_best(self) -> int:
        """Return how many times the metric was measured after the best step."""
        best = self._best()
        return len(self._measured) - (0 if best is None else best + 1)

    def _best(self) -> int | None:
        values = [
            (self._sign * value, place) for place, (_, value) in enumerate(self._measured) if math.isfinite(value)
        ]
        return min(values)[1] if values else None

    def rank(self, step: int) -> tuple[bool, float, int]:
        """Return the sort key of a step: lower is better. Steps before the first measurement come last, the newest of them first.

        Of several steps ranked by the same validation, the first is best, because its weights are closest to the validated
        weights.
        """
        value = self.value_at(step)
        if not math.isfinite(value):
            return True, 0.0, -step
        return False, self._sign * value, step

    def value_at(self, step: int) -> float:
        """Return the latest value of the metric up to and including a step; NaN if the metric was not measured by then."""
        measured = self._measured
        until = bisect_right(measured, step, key=lambda one: one[0])
        return measured[until - 1][1] if until else math.nan

    def is_better(self, step: int, other: int) -> bool:
        """Return whether the metric is known at both steps, and is better at `step` than at `other`."""
        value, than = self._sign * self.value_at(step), self._sign * self.value_at(other)
        return math.isfinite(than) and value < than


def measured_on(record: dict[str, Any]) -> tuple[Any, ...]:
    """Return a key that identifies the pairs of a validation. Validations on different pairs are not compared."""
    return (record["data"], record.get("num_pairs")) if "data" in record else ()


Record = dict[str, Any]
MAX_NUMBER = 1 << 63  # larger integers do not fit in a float or a tracker


def records_in(content: bytes) -> list[Record | None]:
    """Return each line of metrics.jsonl as a dict; None for a line that is damaged or was not written by tandem."""
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
