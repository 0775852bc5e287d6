"""Writes pairs.json, the pairs of the newest validation as a run's page shows them: margins, lost, won and changed pairs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tandem.data.store.selection import Preferences
from tandem.page.stored import FORMAT, clipped, write_json

if TYPE_CHECKING:
    from tandem.training.metrics import PairTable

FloatArray = NDArray[np.float64]

BINS = 40  # of the histogram of margins
LENGTH_GROUPS = 8
LISTED_PAIRS = 12  # of each kind
TEXT_CHARACTERS = 1200
TEXT_TOKENS = 600
# Of a larger set the margins before training are kept in memory only, so a resumed run does not know them.
MAX_KEPT = 20_000


@dataclass(frozen=True, slots=True)
class Measured:
    """The pairs of one validation set, as measured at a step."""

    step: int
    data: str  # a short fingerprint of the pairs
    table: "PairTable"
    store: Preferences
    rounding: FloatArray  # [pairs] how much rounding can change each margin


class PairsFile:
    """The file pairs.json. It remembers the margins of the first validation, to tell which pairs changed."""

    def __init__(self, path: Path, tokenizer: Any, stored: Mapping[str, Any]):
        """stored: the content of the file that an earlier process wrote, if the run is resumed."""
        self._path, self._tokenizer = path, tokenizer
        self._start = _stored_starts(stored)
        self._newest: dict[str, Measured] = {}

    def note(self, split: str, measured: Measured) -> None:
        """Take the pairs of a validation. Of the first one on these pairs, remember the margins."""
        known = self._start.get(split)
        is_same = known is not None and known.data == measured.data and len(known.margins) == len(measured.table)
        if not is_same or (known is not None and measured.step <= known.step):
            self._start[split] = _Start(measured.step, measured.data, _in_order(measured.table))
        self._newest[split] = measured

    def write(self) -> None:
        """Write the newest validation of every set; nothing if there was none."""
        if self._newest:
            sets = {split: self._described(split, one) for split, one in self._newest.items()}
            write_json(self._path, {"format": FORMAT, "sets": sets})

    def _described(self, split: str, measured: Measured) -> dict[str, Any]:
        table, start = measured.table, self._start[split]
        margin, order = table.margin, _order(table)
        before = np.empty_like(margin)
        before[order] = start.margins
        is_later = measured.step > start.step
        keeps_start = len(margin) <= MAX_KEPT
        return {
            "step": measured.step,
            "data": measured.data,
            "num_pairs": len(table),
            "won": int((margin > measured.rounding).sum()),
            "lost": int((margin < -measured.rounding).sum()),
            "start_step": start.step if is_later else None,
            "start": [_short(value) for value in start.margins] if keeps_start else None,
            "start_at": start.step,
            "histogram": histogram(margin, before if is_later else None),
            "lengths": by_length(table.length_difference, margin, measured.rounding),
            **{
                name: [self._pair(int(i), measured, before if is_later else None) for i in chosen]
                for name, chosen in listed_pairs(margin, before if is_later else None, measured.rounding).items()
            },
        }

    def _pair(self, i: int, measured: Measured, before: FloatArray | None) -> dict[str, Any]:
        table, preference = measured.table, measured.store[int(measured.table.preference[i])]
        winner, loser = int(table.winner[i]), int(table.loser[i])
        return {
            "place": measured.store.place(int(table.preference[i])),
            "margin": _short(table.margin[i]),
            "before": None if before is None else _short(before[i]),
            "reward_chosen": _short(table["reward_chosen"][i]),
            "reward_rejected": _short(table["reward_rejected"][i]),
            "tokens_chosen": int(table["tokens_chosen"][i]),
            "tokens_rejected": int(table["tokens_rejected"][i]),
            "doubtful": bool(is_doubtful(table.margin)[i]),
            "prompt": self._text(preference.prompt, keep_end=True),
            "chosen": self._text(preference.completions[winner]),
            "rejected": self._text(preference.completions[loser]),
        }

    def _text(self, ids: NDArray[np.int32], *, keep_end: bool = False) -> str:
        """The text of some tokens, cut if it is long. keep_end: of a prompt, the end says what is asked."""
        taken = ids[-TEXT_TOKENS:] if keep_end else ids[:TEXT_TOKENS]
        text = self._tokenizer.decode(taken.tolist())
        is_cut = len(taken) < len(ids)
        if keep_end:
            return f"…{text[-TEXT_CHARACTERS:]}" if is_cut or len(text) > TEXT_CHARACTERS else text
        return clipped(text, TEXT_CHARACTERS, more=is_cut)


def is_doubtful(margin: FloatArray) -> NDArray[np.bool_]:
    """Pairs that the policy orders against their label at least as clearly as it usually agrees with one.

    Margins 1, 2, 3, -0.5, -2: the median of those above 0 is 2, so only -2 is doubtful.
    """
    agreed = margin[margin > 0]
    return margin <= -np.median(agreed) if len(agreed) else np.zeros(len(margin), bool)


def listed_pairs(margin: FloatArray, before: FloatArray | None, rounding: FloatArray) -> dict[str, NDArray[np.intp]]:
    """Which pairs to show: lost (lowest margin first), won (highest first), and those whose margin changed most."""
    rising = np.argsort(margin, kind="stable")
    lost = rising[margin[rising] < -rounding[rising]]
    won = rising[::-1][margin[rising[::-1]] > rounding[rising[::-1]]]
    found = {"pairs_lost": lost[:LISTED_PAIRS], "pairs_won": won[:LISTED_PAIRS]}
    if before is not None:
        change = np.argsort(-np.abs(margin - before), kind="stable")
        found["pairs_changed"] = change[:LISTED_PAIRS]
    return found


def histogram(margin: FloatArray, before: FloatArray | None) -> dict[str, Any]:
    """Counts of margins in equal bins, before training and now. A bin starts at 0, so that signs are not mixed."""
    every = margin if before is None else np.concatenate([margin, before])
    every = every[np.isfinite(every)]
    low, high = (float(every.min()), float(every.max())) if len(every) else (0.0, 0.0)
    width = _round_width(max(high, 0.0) - min(low, 0.0))
    first, last = math.floor(low / width), math.floor(high / width) + 1
    first, last = min(first, 0), max(last, 1)
    edges = np.arange(first, last + 1) * width
    return {
        "first": _short(edges[0]),
        "width": width,
        "now": np.histogram(margin, bins=edges)[0].tolist(),
        "start": None if before is None else np.histogram(before, bins=edges)[0].tolist(),
    }


def _round_width(span: float) -> float:
    """A bin width of 1, 2 or 5 times a power of ten that divides the span into at most BINS bins."""
    if not math.isfinite(span) or span <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(span / BINS))
    return next(power * times for times in (1, 2, 5, 10) if span / (power * times) <= BINS)


def by_length(difference: FloatArray, margin: FloatArray, rounding: FloatArray) -> list[dict[str, float]]:
    """Accuracy and mean margin of groups of pairs, by how much longer the chosen completion is."""
    edges = np.unique(np.quantile(difference, np.linspace(0, 1, LENGTH_GROUPS + 1)))
    groups = np.clip(np.searchsorted(edges, difference, side="right") - 1, 0, max(len(edges) - 2, 0))
    right = np.where(np.abs(margin) <= rounding, 0.5, (margin > 0).astype(float))
    return [
        {
            "low": float(difference[members].min()),
            "high": float(difference[members].max()),
            "num_pairs": int(members.sum()),
            "accuracy": _short(right[members].mean()),
            "margin": _short(margin[members].mean()),
        }
        for number in range(max(len(edges) - 1, 1))
        if (members := groups == number).any()
    ]


@dataclass(frozen=True, slots=True)
class _Start:
    """The margins of the first validation of a set, in the order of preference and pair."""

    step: int
    data: str
    margins: FloatArray


def _order(table: "PairTable") -> NDArray[np.intp]:
    """The pairs in an order that does not depend on how they were packed."""
    return np.lexsort((table.loser, table.winner, table.preference))


def _in_order(table: "PairTable") -> FloatArray:
    return table.margin[_order(table)]


def _stored_starts(stored: Mapping[str, Any]) -> dict[str, _Start]:
    """The margins that an earlier process of the run stored; damaged entries are left out."""
    found: dict[str, _Start] = {}
    sets = stored.get("sets")
    for split, one in sets.items() if isinstance(sets, dict) else ():
        try:
            margins = np.array(one["start"], np.float64)
            if margins.ndim == 1 and type(one["start_at"]) is int and isinstance(one["data"], str):
                found[split] = _Start(one["start_at"], one["data"], margins)
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
    return found


def _short(value: float) -> float:
    """Five digits are enough for a page."""
    return float(f"{value:.5g}")
