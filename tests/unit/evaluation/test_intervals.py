"""Confidence intervals of `tandem eval`, against values worked out by hand or published."""

import numpy as np
import pytest

from tandem.evaluation.intervals import (
    Estimate,
    difference_estimate,
    exact_sign_test,
    mean_estimate,
    share_estimate,
    variance_of_mean,
)

ONE_EACH = np.arange(100)


def test_independent_pairs_have_wilsons_interval():
    found = share_estimate(np.repeat([1.0, 0.0], [80, 20]), ONE_EACH)
    # Wilson's interval of 80 of 100: 0.7112 to 0.8666. The variance is that of a sample, so 99 of 100 pairs count.
    assert found.value == 0.8
    assert (found.low, found.high) == pytest.approx((0.7112, 0.8666), abs=1e-3)


def test_pairs_that_repeat_a_prompt_do_not_narrow_the_interval():
    once = share_estimate(np.repeat([1.0, 0.0], [8, 2]), np.arange(10))
    five_times = share_estimate(np.repeat([1.0, 0.0], [40, 10]), np.repeat(np.arange(10), 5))
    assert (five_times.low, five_times.high) == pytest.approx((once.low, once.high))


def test_equal_values_count_once_for_each_prompt():
    found = share_estimate(np.ones(50), np.repeat(np.arange(10), 5))
    # Wilson's interval of 10 of 10: 1 / (1 + 1.96^2 / 10)
    assert (found.value, found.high) == (1.0, pytest.approx(1.0))
    assert found.low == pytest.approx(0.7225, abs=1e-4)


def test_the_variance_is_by_prompt():
    assert variance_of_mean(np.array([1.0, 1.0, 0.0]), np.array([0, 0, 1])) == pytest.approx(2 * (8 / 9) / 9)
    assert variance_of_mean(np.array([1.0, 0.0]), np.array([7, 7])) is None


def test_a_mean_has_a_normal_interval_and_none_with_one_prompt():
    found = mean_estimate(np.array([1.0, 2.0, 3.0, 4.0]), np.arange(4))
    # The standard error is sqrt((5/3) / 4).
    assert found == Estimate(2.5, pytest.approx(2.5 - 1.959964 * 0.645497), pytest.approx(2.5 + 1.959964 * 0.645497))
    assert mean_estimate(np.array([1.0, 2.0]), np.zeros(2, np.int64)) == Estimate(1.5, None, None)


def test_differences_have_bonett_and_prices_interval():
    change = np.concatenate([np.ones(12), -np.ones(4), np.zeros(84)])
    found = difference_estimate(change, ONE_EACH)
    # (12 + 1) / 102 and (4 + 1) / 102: 0.0784 +- 1.96 sqrt((0.1765 - 0.0784^2) / 102)
    assert found.value == pytest.approx(0.08)
    assert (found.low, found.high) == pytest.approx((-0.0017, 0.1586), abs=1e-3)


def test_no_difference_still_has_an_interval():
    found = difference_estimate(np.zeros(48), np.arange(48))
    assert found.value == 0
    assert found.low == pytest.approx(-0.0560, abs=1e-3)  # 1.96 * sqrt(2 / 50 / 50) * sqrt(50 / 49)


@pytest.mark.parametrize(
    ("wins", "losses", "p"), [(0, 0, 1.0), (3, 3, 1.0), (5, 0, 0.0625), (1, 9, 22 / 1024), (600, 400, 2.7e-10)]
)
def test_the_exact_sign_test(wins, losses, p):
    assert exact_sign_test(wins, losses) == pytest.approx(p, rel=0.02)
