"""Lines of metrics.jsonl in; out, which of two checkpoints is the better one."""

import math
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

from tandem.config.tracked import TrackedMetric


class Ranking:
    """Ranks the weights of every step by the tracked metric, as it was last measured until then.

    The lines decide, not the checkpoints: one that was saved before its validation is ranked all the same once that is
    done, and by another metric when another is asked for.
    """

    def __init__(
        self, tracked: TrackedMetric | None, *, higher_is_better: bool, records: Iterable[dict[str, Any]] = ()
    ):
        """records: what stands in metrics.jsonl already."""
        self._tracked, self._sign = tracked, -1.0 if higher_is_better else 1.0
        self._steps: list[int] = []  # that it was measured after, in order
        self._values: list[float] = []
        for record in records:
            self.note(record)

    def note(self, record: dict[str, Any]) -> None:
        """A line of metrics.jsonl, of this split or another."""
        if self._tracked is not None and record["split"] == self._tracked.split:
            # The value first: another thread finds by its step what is there already.
            self._values.append(record.get(self._tracked.metric, math.nan))
            self._steps.append(record["step"])

    def rank(self, step: int) -> tuple[bool, float, int]:
        """Lower is better; weights from before the metric was measured come last, the newer first.

        Of several that the same validation ranks the first is better: it is the one that was validated.
        """
        measured = bisect_right(self._steps, step)
        value = self._values[measured - 1] if measured else math.nan
        if not math.isfinite(value):
            return True, 0.0, -step
        return False, self._sign * value, step
