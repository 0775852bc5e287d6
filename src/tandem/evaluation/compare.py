"""Compares two models on the same pairs: paired differences with intervals, and the pairs that they order differently."""

import math
from typing import cast

import numpy as np

from tandem.errors import DataError
from tandem.evaluation.intervals import FloatArray, IntArray, difference_estimate, exact_sign_test, variance_of_mean
from tandem.evaluation.records import Comparison, Difference, DifferingPair
from tandem.evaluation.summary import PairResults
from tandem.terminal.arguments import option

LISTED_PAIRS = 20

PairKey = tuple[int, str, int, int]  # set, place, winner, loser


def compare(name: str, model: PairResults, other: PairResults) -> Comparison:
    """Compare every accuracy that both models have, over the pairs that both could read. name: of the other model."""
    places = {key: number for number, key in enumerate(_keys(other))}
    own_keys = _keys(model)
    own = np.array([number for number, key in enumerate(own_keys) if key in places], np.int64)
    theirs = np.array([places[own_keys[number]] for number in own], np.int64)
    if not len(own):
        raise DataError(
            f"{option('against', name)}: no pair could be read by both models. Raise policy.max_total_sequence_length."
        )
    metrics = [metric for metric in model.accuracies if metric in other.accuracies]
    if not metrics:
        raise DataError(
            f"{option('against', name)}: one model gives scores and the other log-probabilities only, so that they have no "
            f"accuracy in common. Add {option('reference', metavar='MODEL')} for the second."
        )
    prompts = model.prompt[own]
    differences = tuple(
        _difference(metric, model.accuracies[metric][own], other.accuracies[metric][theirs], prompts)
        for metric in metrics
    )
    first = metrics[0]
    margins = (model.margin, other.margin) if first == "accuracy" else (model.logps_margin, other.logps_margin)
    changes = model.accuracies[first][own] - other.accuracies[first][theirs]
    moved = margins[0][own] - margins[1][theirs]
    ordered = np.lexsort((-np.abs(moved), -np.abs(changes)))
    pairs = tuple(
        DifferingPair(*own_keys[own[at]][1:], float(margins[0][own[at]]), float(margins[1][theirs[at]]))
        for at in ordered[: min(LISTED_PAIRS, int((changes != 0).sum()))]
    )
    return Comparison(
        against=name,
        scored_by=other.measured.scored_by,
        num_pairs=len(own),
        num_left_out=len(own_keys) + len(places) - 2 * len(own),
        differences=differences,
        metric=first,
        pairs=pairs,
    )


def _difference(metric: str, own: FloatArray, other: FloatArray, prompts: IntArray) -> Difference:
    change = own - other
    better, worse = int((change > 0).sum()), int((change < 0).sum())
    return Difference(
        metric=cast("str", metric),  # type: ignore[arg-type]
        value=float(own.mean()),
        against=float(other.mean()),
        difference=difference_estimate(change, prompts),
        num_better=better,
        num_worse=worse,
        p_value=_p_value(change, prompts, better, worse),
    )


def _p_value(change: FloatArray, prompts: IntArray, better: int, worse: int) -> float:
    """The exact McNemar test if every prompt has one pair; else a normal test with the variance by prompt."""
    variance = variance_of_mean(change, prompts)
    if len(np.unique(prompts)) == len(prompts) or not variance:
        return exact_sign_test(better, worse)
    return math.erfc(abs(float(change.mean())) / math.sqrt(2 * variance))


def _keys(results: PairResults) -> list[PairKey]:
    return [
        (number, one.set.store.place(int(preference)), int(winner), int(loser))
        for number, one in enumerate(results.measured.sets)
        for preference, winner, loser in zip(one.table.preference, one.table.winner, one.table.loser, strict=True)
    ]
