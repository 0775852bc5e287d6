"""Which checkpoint is the best, by the lines of metrics.jsonl."""

import math

import pytest

from tandem.config.tracked import TrackedMetric
from tandem.training.checkpoint.ranking import Ranking

LOSS = TrackedMetric("validation-default", "loss")


def lines(**losses):
    return [{"step": int(step[1:]), "split": LOSS.split, "loss": loss} for step, loss in losses.items()]


def order(ranking, *steps):
    return sorted(steps, key=ranking.rank)


@pytest.mark.parametrize(("higher_is_better", "expected"), [(False, [3, 4, 5, 6, 2]), (True, [6, 3, 4, 5, 2])])
def test_of_those_that_one_validation_ranks_the_one_that_was_validated_is_best(higher_is_better, expected):
    ranking = Ranking(LOSS, higher_is_better=higher_is_better, records=lines(_3=0.5, _6=0.7))
    assert order(ranking, 2, 3, 4, 5, 6) == expected


def test_a_step_is_ranked_once_its_validation_is_noted():
    ranking = Ranking(LOSS, higher_is_better=False, records=lines(_2=0.5))
    assert order(ranking, 2, 4) == [2, 4]
    for line in lines(_4=0.4):
        ranking.note(line)
    assert order(ranking, 2, 4) == [4, 2]


def test_lines_of_other_splits_and_other_metrics_do_not_count():
    others = [{"step": 2, "split": "train", "loss": 0.1}, {"step": 4, "split": "validation-other", "loss": 0.1}]
    ranking = Ranking(
        LOSS, higher_is_better=False, records=[*others, *({**one, "accuracy": 1.0} for one in lines(_6=9.0))]
    )
    assert order(ranking, 2, 4, 6) == [6, 4, 2]


def test_once_the_pairs_are_others_only_what_is_measured_on_them_counts():
    then = [{**line, "data": "a", "num_pairs": 9} for line in lines(_2=0.1, _4=0.2)]
    now = [{**line, "data": "b", "num_pairs": 9} for line in lines(_6=0.7, _8=0.6)]
    ranking = Ranking(LOSS, higher_is_better=False, records=then)
    assert order(ranking, 2, 4) == [2, 4]
    for line in now:
        ranking.note(line)
    assert order(ranking, 2, 4, 6, 8) == [8, 6, 4, 2]
    ranking.note({**now[0], "step": 10, "num_pairs": 3})  # fewer of them
    assert order(ranking, 6, 8, 10) == [10, 8, 6]


def test_the_start_ranks_nothing():
    ranking = Ranking(LOSS, higher_is_better=False, records=lines(_0=0.1, _3=0.5))
    assert order(ranking, 1, 2, 3) == [3, 2, 1]


def test_what_is_not_finite_is_never_the_best():
    for worst in (math.nan, -math.inf):
        ranking = Ranking(LOSS, higher_is_better=False, records=lines(_2=0.5, _4=worst))
        assert order(ranking, 2, 4) == [2, 4]


def test_without_a_metric_the_newest_is_best():
    assert order(Ranking(None, higher_is_better=False, records=lines(_2=0.1)), 2, 4) == [4, 2]
