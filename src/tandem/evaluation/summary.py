"""Summarises measured pairs: accuracies and margins with intervals, by set, length and rank, calibration, best of N."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tandem.evaluation.intervals import Estimate, FloatArray, IntArray, mean_estimate, share_estimate
from tandem.evaluation.measure import Measured, MeasuredSet
from tandem.evaluation.records import Benchmark, BestOfN, Calibration, Group, ReliabilityBin
from tandem.evaluation.rewardbench import ScoredPrompt, rewardbench_1, rewardbench_2
from tandem.training.metrics import PairTable, above

NUM_BINS = 10
# Length of the chosen completion over that of the rejected one: bucket -> from, up to
LENGTH_BUCKETS = {
    "chosen under half as long": (0.0, 0.5),
    "chosen shorter": (0.5, 0.9),
    "about as long (10 %)": (0.9, 1.1),
    "chosen longer": (1.1, 2.0),
    "chosen over twice as long": (2.0, np.inf),
}
MOST_FIELD_GROUPS = 40


@dataclass(frozen=True)
class PairResults:
    """The results of every pair of every set, as arrays of the same length."""

    measured: Measured

    def _joined(self, values: Callable[[PairTable], FloatArray]) -> FloatArray:
        return np.concatenate([values(one.table) for one in self.measured.sets])

    @cached_property
    def set_number(self) -> IntArray:
        return np.repeat(np.arange(len(self.measured.sets)), [len(one.table) for one in self.measured.sets])

    @cached_property
    def prompt(self) -> IntArray:
        """The number of each pair's prompt. Equal prompts of different preferences and sets have the same number."""
        numbers: dict[bytes, int] = {}
        return np.array(
            [
                numbers.setdefault(one.set.prompts[index], len(numbers))
                for one in self.measured.sets
                for index in one.table.preference
            ],
            np.int64,
        )

    @cached_property
    def margin(self) -> FloatArray:
        return self._joined(lambda table: table.margin)

    @cached_property
    def logps_margin(self) -> FloatArray:
        return self._joined(lambda table: table["logp_chosen"] - table["logp_rejected"])

    @cached_property
    def accuracies(self) -> dict[str, FloatArray]:
        """By metric: 1 for a pair in the right order, 0 for one in the wrong order, one half within rounding."""
        found: dict[str, FloatArray] = {}
        band = self.measured.band
        if self.measured.has_rewards:
            found["accuracy"] = self._joined(lambda table: above(table.margin, table.rounding(band)))
        if self.measured.has_logps:
            found["logps_accuracy"] = above(self.logps_margin, band)
            found["logps_per_token_accuracy"] = self._joined(lambda table: _per_token_accuracy(table, band))
        return found

    @cached_property
    def loss(self) -> FloatArray | None:
        loss = self._joined(lambda table: table["loss"])
        return loss if self.measured.has_rewards and np.isfinite(loss).all() else None

    @cached_property
    def length_ratio(self) -> FloatArray:
        return self._joined(lambda table: table["tokens_chosen"] / np.maximum(table["tokens_rejected"], 1))

    @cached_property
    def rank_distance(self) -> IntArray:
        return np.concatenate([rank_distances(one.table) for one in self.measured.sets])

    def group(self, name: str, members: NDArray[np.bool_]) -> Group:
        """The results of some of the pairs."""
        prompt = self.prompt[members]

        def share(metric: str) -> Estimate | None:
            values = self.accuracies.get(metric)
            return None if values is None else share_estimate(values[members], prompt)

        def mean(values: FloatArray | None, given: bool) -> Estimate | None:
            return mean_estimate(values[members], prompt) if given and values is not None else None

        return Group(
            name=name,
            num_pairs=int(members.sum()),
            num_prompts=len(np.unique(prompt)),
            accuracy=share("accuracy"),
            logps_accuracy=share("logps_accuracy"),
            logps_per_token_accuracy=share("logps_per_token_accuracy"),
            rewards_margin=mean(self.margin, self.measured.has_rewards),
            logps_margin=mean(self.logps_margin, self.measured.has_logps),
            loss=mean(self.loss, True),
        )

    def groups(self, by: Mapping[str, NDArray[np.bool_]]) -> tuple[Group, ...]:
        """The groups that have pairs."""
        return tuple(self.group(name, members) for name, members in by.items() if members.any())

    def total(self) -> Group:
        return self.group("all pairs", np.ones(len(self.set_number), bool))

    def by_set(self) -> tuple[Group, ...]:
        names = [one.set.name for one in self.measured.sets]
        return self.groups({name: self.set_number == number for number, name in enumerate(names)})

    def by_length(self) -> tuple[Group, ...]:
        ratio = self.length_ratio
        return self.groups({name: (low <= ratio) & (ratio < high) for name, (low, high) in LENGTH_BUCKETS.items()})

    def by_rank_distance(self) -> tuple[Group, ...]:
        """Return no groups if the ranks of every pair differ by one."""
        distance = self.rank_distance
        if distance.max() == 1:
            return ()
        return self.groups({f"{number} apart": distance == number for number in range(1, int(distance.max()) + 1)})

    def by_field(self, by: str | None) -> tuple[Group, ...]:
        """By the field that `by` names, or by the subset of RewardBench; the largest groups first."""
        labels = [
            label.subset if by is None else label.field
            for one in self.measured.sets
            for label in (one.set.labels_of(one.table.preference) if one.set.labels else [None] * len(one.table))
            if label is not None
        ]
        if len(labels) != len(self.set_number):
            return ()
        names, counts = np.unique(labels, return_counts=True)
        largest = names[np.argsort(-counts, kind="stable")][:MOST_FIELD_GROUPS]
        values = np.array(labels)
        return self.groups({str(name) or "(none)": values == name for name in largest})

    def calibration(self) -> Calibration | None:
        """Whether sigmoid(|margin|) is the share of pairs in the right order, in bins of equal width from 0.5 to 1."""
        if self.measured.scored_by != "implicit reward":
            return None
        confidence = 1 / (1 + np.exp(-np.abs(self.margin)))
        right = self.accuracies["accuracy"]
        number = np.minimum(((confidence - 0.5) * 2 * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        bins = []
        for k in range(NUM_BINS):
            members = number == k
            if members.any():
                low, high = (round(0.5 + edge / (2 * NUM_BINS), 6) for edge in (k, k + 1))  # 0.6, not 0.60000000001
                shares = float(confidence[members].mean()), float(right[members].mean())
                bins.append(ReliabilityBin(low, high, int(members.sum()), *shares))
        error = sum(one.num_pairs * abs(one.accuracy - one.confidence) for one in bins) / len(right)
        return Calibration(error, tuple(bins))


def _per_token_accuracy(table: PairTable, band: float) -> FloatArray:
    chosen, rejected = table["tokens_chosen"], table["tokens_rejected"]
    difference = table["logp_chosen"] / chosen - table["logp_rejected"] / rejected
    return above(difference, band * (1 / chosen + 1 / rejected) / 2)


def rank_distances(table: PairTable) -> IntArray:
    """How many ranks apart the completions of each pair are.

    The rank of a completion is the length of the longest chain of pairs above it. Pairs (0, 1), (1, 2), (0, 2) of one
    preference: ranks 0 1 2, distances 1 1 2
    """
    ranks: dict[tuple[int, int], int] = {}
    places = list(zip(table.preference.tolist(), table.winner.tolist(), table.loser.tolist(), strict=True))
    changed = True
    while changed:  # as often as there are ranks
        changed = False
        for preference, winner, loser in places:
            rank = ranks.get((preference, winner), 0) + 1
            if ranks.get((preference, loser), 0) < rank:
                ranks[preference, loser] = rank
                changed = True
    return np.array([ranks[p, loser] - ranks.get((p, winner), 0) for p, winner, loser in places], np.int64)


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The scores of the completions of one preference, and which of them are best in the data."""

    preference: int
    scores: FloatArray
    rounding: FloatArray
    is_best: NDArray[np.bool_]

    @property
    def is_right(self) -> float:
        """Of the highest-scored completions, the share that is best in the data. Scores within rounding are equal."""
        top = int(np.argmax(self.scores))
        highest = self.scores >= self.scores[top] - (self.rounding + self.rounding[top])
        return float(self.is_best[highest].mean())


def prompt_scores(one: MeasuredSet, measured: Measured) -> list[PromptScores]:
    """The scores of all completions, preference by preference: rewards, or log-probabilities without a reference."""
    table, store = one.table, one.set.store
    name = "reward" if measured.has_rewards else "logp"
    counts = store.num_completions
    ends = np.cumsum(counts)
    scores, rounding = np.zeros(ends[-1]), np.zeros(ends[-1])
    is_best = np.ones(ends[-1], bool)
    for side, which in (("chosen", table.winner), ("rejected", table.loser)):
        at = ends[table.preference] - counts[table.preference] + which
        scores[at] = table[f"{name}_{side}"]
        slope = table[f"slope_{side}"] if measured.has_rewards else np.ones(len(table))
        rounding[at] = measured.band * slope / 2
    is_best[ends[table.preference] - counts[table.preference] + table.loser] = False
    return [
        PromptScores(index, scores[end - count : end], rounding[end - count : end], is_best[end - count : end])
        for index, (end, count) in enumerate(zip(ends, counts, strict=True))
    ]


def best_of_n(measured: Measured) -> BestOfN | None:
    """The share of prompts with more than two completions whose highest-scored completion is a best one."""
    right, prompts, counts = [], [], []
    numbers: dict[bytes, int] = {}
    for one in measured.sets:
        for prompt in prompt_scores(one, measured):
            if len(prompt.scores) > 2:
                right.append(prompt.is_right)
                prompts.append(numbers.setdefault(one.set.prompts[prompt.preference], len(numbers)))
                counts.append(len(prompt.scores))
    if not right:
        return None
    accuracy = share_estimate(np.array(right), np.array(prompts))
    mean, is_mixed = float(np.mean(counts)), len(set(counts)) > 1
    return BestOfN(num_prompts=len(right), completions_per_prompt=mean, is_mixed=is_mixed, accuracy=accuracy)


def benchmarks(measured: Measured) -> tuple[Benchmark, ...]:
    """The results of RewardBench's files among the sets. Files of one benchmark count together."""
    found = []
    pairs: dict[str, list[float]] = {}
    prompts: list[ScoredPrompt] = []
    for one in measured.sets:
        if one.set.kind == "pairs":
            continue
        scored = prompt_scores(one, measured)
        labels = one.set.labels_of(np.arange(len(one.set.store)))
        for prompt, label in zip(scored, labels, strict=True):
            if one.set.kind == "RewardBench":
                pairs.setdefault(label.subset, []).append(prompt.is_right)
                continue
            prompts.append(
                ScoredPrompt(
                    subset=label.subset,
                    id=label.id,
                    scores=tuple(prompt.scores.tolist()),
                    num_correct=int(prompt.is_best.sum()),
                    is_right=prompt.is_right,
                )
            )
    if pairs:
        accuracy = {name: float(np.mean(values)) for name, values in pairs.items()}
        found.append(rewardbench_1(accuracy, {name: len(values) for name, values in pairs.items()}))
    if prompts:
        found.append(rewardbench_2(prompts))
    return tuple(found)
