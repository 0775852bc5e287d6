"""Accuracies, ranks, best of N and calibration of measured pairs, by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from tandem.config.sections.dpo import Dpo
from tandem.evaluation.compare import compare
from tandem.evaluation.measure import Measured, MeasuredSet
from tandem.evaluation.sets import RowLabels
from tandem.evaluation.summary import PairResults, benchmarks, best_of_n, rank_distances
from tandem.training.metrics import PairTable


def table(pairs, rewards, tokens=None):
    """A table of pairs (preference, winner, loser); rewards and tokens by preference and completion."""
    preference, winner, loser = (np.array(column, np.int64) for column in zip(*pairs, strict=True))
    columns = {"loss": np.zeros(len(pairs))}
    for side, which in (("chosen", winner), ("rejected", loser)):
        at = list(zip(preference, which, strict=True))
        columns[f"reward_{side}"] = np.array([rewards[p][c] for p, c in at], float)
        columns[f"logp_{side}"] = 10 * columns[f"reward_{side}"]
        columns[f"tokens_{side}"] = np.array([tokens[p][c] if tokens else 10 for p, c in at], float)
        columns[f"slope_{side}"] = np.full(len(pairs), 0.1)
    return PairTable(sft=np.zeros(1), preference=preference, winner=winner, loser=loser, columns=columns)


def measured(given, num_completions, *, kind="pairs", labels=None, scored_by="implicit reward", prompts=None):
    count = len(num_completions)
    one = SimpleNamespace(
        name="pairs.jsonl",
        kind=kind,
        prompts=prompts or [bytes([i]) for i in range(count)],
        store=SimpleNamespace(
            num_completions=np.array(num_completions), place=lambda i: f"pairs.jsonl:{i + 1}", __len__=lambda: count
        ),
        labels=labels or {},
        labels_of=lambda indices: [labels[i] for i in indices],
    )
    store = type("Store", (), {"__len__": lambda self: count})()
    store.num_completions, store.place = one.store.num_completions, one.store.place
    one.store = store
    return Measured(
        sets=(MeasuredSet(one, given),),
        folder=None,
        reference="base",
        scored_by=scored_by,
        dpo=Dpo(),
        precision="float32",
        seconds=1.0,
    )


THREE = table([(0, 0, 1), (0, 0, 2), (0, 1, 2), (1, 0, 1)], {0: [1, 3, 0], 1: [2, 1]})


def test_rank_distances_are_counted_along_chains_of_pairs():
    assert rank_distances(THREE).tolist() == [1, 2, 1, 1]
    tied = table([(0, 0, 2), (0, 1, 2)], {0: [1, 1, 0]})
    assert rank_distances(tied).tolist() == [1, 1]
    adjacent = table([(0, 0, 1), (0, 1, 2), (0, 2, 3)], {0: [4, 3, 2, 1]})
    assert rank_distances(adjacent).tolist() == [1, 1, 1]


def test_accuracies_and_margins_of_all_pairs_and_by_rank():
    results = PairResults(measured(THREE, [3, 2]))
    total = results.total()
    assert (total.num_pairs, total.num_prompts) == (4, 2)
    assert total.accuracy.value == total.logps_accuracy.value == 0.75  # 1 > 3 is wrong
    assert total.rewards_margin.value == pytest.approx((-2 + 1 + 3 + 1) / 4)
    by_rank = {group.name: group.accuracy.value for group in results.by_rank_distance()}
    assert by_rank == {"1 apart": pytest.approx(2 / 3), "2 apart": 1.0}


def test_margins_within_rounding_count_one_half():
    # float32: 1e-3 nats, times the slope 0.1
    results = PairResults(measured(table([(0, 0, 1), (1, 0, 1)], {0: [1, 1 - 5e-5], 1: [1, 1 - 2e-4]}), [2, 2]))
    assert results.accuracies["accuracy"].tolist() == [0.5, 1.0]


def test_lengths_are_grouped_by_their_ratio():
    lengths = {0: [10, 30], 1: [8, 10], 2: [10, 10], 3: [15, 10], 4: [30, 10]}
    results = PairResults(
        measured(table([(i, 0, 1) for i in range(5)], {i: [1, 0] for i in range(5)}, lengths), [2] * 5)
    )
    assert [group.num_pairs for group in results.by_length()] == [1] * 5
    assert results.by_length()[0].name == "chosen under half as long"
    # the same sums: the shorter completion has the lower log-probability per token if sums are equal and negative
    assert results.total().logps_per_token_accuracy.value == 1.0


def test_per_token_accuracy_divides_by_the_length():
    found = table([(0, 0, 1)], {0: [-4, -3]}, {0: [10, 5]})  # -40 / 10 against -30 / 5
    accuracies = PairResults(measured(found, [2])).accuracies
    assert (accuracies["logps_accuracy"][0], accuracies["logps_per_token_accuracy"][0]) == (0.0, 1.0)


def test_best_of_n_counts_prompts_whose_highest_completion_is_a_best_one():
    # preference 0: completion 1 scores highest, but 0 is best; preference 2 has two best ones, one of which scores highest
    given = table(
        [(0, 0, 1), (0, 0, 2), (0, 1, 2), (1, 0, 1), (2, 0, 2), (2, 1, 2)], {0: [1, 3, 0], 1: [2, 1], 2: [0, 5, 4]}
    )
    found = best_of_n(measured(given, [3, 2, 3]))
    assert (found.num_prompts, found.completions_per_prompt, found.accuracy.value) == (2, 3.0, 0.5)
    assert best_of_n(measured(table([(0, 0, 1)], {0: [1, 0]}), [2])) is None


def test_equal_best_scores_share_the_point():
    found = best_of_n(measured(table([(0, 0, 1), (0, 0, 2)], {0: [1, 1, 1]}), [3]))
    assert found.accuracy.value == pytest.approx(1 / 3)


def test_calibration_compares_confidence_with_accuracy():
    # sigmoid(ln 3) = 0.75: three of four right would be calibrated; two of four are
    margins = np.log(3) * np.array([1, 1, -1, -1])
    found = PairResults(
        measured(table([(i, 0, 1) for i in range(4)], {i: [m, 0] for i, m in enumerate(margins)}), [2] * 4)
    ).calibration()
    (only,) = found.bins
    assert (only.num_pairs, only.accuracy) == (4, 0.5)
    assert only.confidence == pytest.approx(0.75)
    assert found.expected_error == pytest.approx(0.25)


def test_bins_of_calibration_have_round_limits():
    margins = -np.log(1 / (np.arange(0.525, 1, 0.05)) - 1)  # sigmoid: 0.525, 0.575, ... 0.975
    found = PairResults(
        measured(table([(i, 0, 1) for i in range(10)], {i: [m, 0] for i, m in enumerate(margins)}), [2] * 10)
    ).calibration()
    assert [one.low for one in found.bins] == [0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95]
    assert [one.high for one in found.bins] == [0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0]


def test_pairs_of_one_prompt_in_different_rows_are_one_prompt():
    given = table([(i, 0, 1) for i in range(4)], {i: [i % 2, 0.5] for i in range(4)})
    assert PairResults(measured(given, [2] * 4, prompts=[b"a", b"a", b"b", b"b"])).total().num_prompts == 2


def test_rewardbench_1_is_scored_by_subset():
    labels = [RowLabels("alpacaeval-easy"), RowLabels("alpacaeval-easy"), RowLabels("donotanswer")]
    given = table([(i, 0, 1) for i in range(3)], {0: [1, 0], 1: [0, 1], 2: [1, 0]})
    (found,) = benchmarks(measured(given, [2] * 3, kind="RewardBench", labels=labels))
    assert (found.name, found.subsets) == ("RewardBench", {"alpacaeval-easy": 0.5, "donotanswer": 1.0})
    assert (found.sections, found.score) == ({"Chat": 0.5, "Safety": 1.0}, 0.75)


def test_models_are_compared_on_the_pairs_that_both_could_read():
    pairs = [(i, 0, 1) for i in range(4)]
    one = PairResults(measured(table(pairs, {i: [2, 1] for i in range(4)}), [2] * 4))
    two = PairResults(measured(table(pairs[:3], {0: [1, 2], 1: [1, 5], 2: [2, 1]}), [2] * 3))
    found = compare("other", one, two)
    assert (found.num_pairs, found.num_left_out) == (3, 1)
    first = found.differences[0]
    assert (first.metric, first.value, first.against) == ("accuracy", 1.0, pytest.approx(1 / 3))
    assert (first.num_better, first.num_worse, first.p_value) == (2, 0, 0.5)
    # those with the largest change first
    assert [(pair.place, pair.margin, pair.against_margin) for pair in found.pairs] == [
        ("pairs.jsonl:2", 1.0, -4.0),
        ("pairs.jsonl:1", 1.0, -1.0),
    ]
