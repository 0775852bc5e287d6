"""Numbers in a record of metrics.jsonl, which may be damaged: accuracy with its interval, loss, any finite number."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.training.checkpoint.ranking import Record

MAX_NUMBER = 1e300  # a larger number, or one that is not finite, is damaged
NORMAL_95 = 1.959964  # standard errors of a 95 % interval


@dataclass(frozen=True, slots=True)
class Interval:
    """A share of pairs and its 95 % confidence interval (Wilson)."""

    share: float
    low: float
    high: float


def accuracy_of(record: Record) -> Interval | None:
    """The accuracy of a record with its interval; None if the record has none."""
    share, num_pairs = number_in(record, "accuracy"), number_in(record, "num_pairs")
    return None if share is None or not num_pairs else wilson(share, num_pairs)


def wilson(share: float, num: float) -> Interval:
    """The 95 % interval of a share of `num` pairs: 0.9 of 10 -> 0.596 to 0.982. Ties count one half."""
    share = min(max(share, 0.0), 1.0)
    square = NORMAL_95**2
    middle = (share + square / (2 * num)) / (1 + square / num)
    half = NORMAL_95 / (1 + square / num) * math.sqrt(share * (1 - share) / num + square / (4 * num * num))
    # At 0 and 1 the interval ends there, but for rounding.
    low, high = 0.0 if share == 0 else middle - half, 1.0 if share == 1 else middle + half
    return Interval(share, max(0.0, low), min(1.0, high))


def num_missing(steps: Sequence[int], last: int) -> int:
    """How many steps up to `last` are not in `steps`: 3, 4, 6 up to 7 -> 2. Those before the first may be in another run."""
    return max(last, max(steps, default=0)) - min(steps, default=1) + 1 - len(set(steps))


def numbers_shown(record: Mapping[str, Any]) -> str:
    """The loss and the accuracy of a record: loss 0.6170, accuracy 0.750. Without those that it does not have."""
    found = {"loss": 4, "accuracy": 3}
    shown = {name: (number_in(record, name), digits) for name, digits in found.items()}
    return ", ".join(f"{name} {value:.{digits}f}" for name, (value, digits) in shown.items() if value is not None)


def number_in(record: Mapping[str, Any], name: str) -> float | None:
    """A finite number of a record, or None."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MAX_NUMBER:
        return None
    return float(value)
