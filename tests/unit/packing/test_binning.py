"""Bins against the textbook."""

from collections.abc import Iterable, Sequence
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.config.sections.policy import Packing
from tandem.packing.binning import (
    ALGORITHMS,
    Bins,
    exact_fit_decreasing,
    first_fit_decreasing,
    first_fit_shuffle,
    pack_into_bins,
)

EVERY_ALGORITHM = [*ALGORITHMS.values(), lambda sizes, capacity: first_fit_shuffle(sizes, capacity, seed=5)]
every_algorithm = pytest.mark.parametrize("algorithm", EVERY_ALGORITHM, ids=[*ALGORITHMS, "first_fit_shuffle"])


@st.composite
def problems(draw) -> tuple[list[int], int]:
    """Sizes and a capacity: from many items to a bin, to one item to a bin."""
    capacity = draw(st.integers(1, 60))
    largest = draw(st.integers(1, capacity))
    smallest = draw(st.integers(1, largest))
    return draw(st.lists(st.integers(smallest, largest), max_size=120)), capacity


def textbook(sizes: Sequence[int], order: Iterable[int], capacity: int) -> list[list[int]]:
    """Put each into the first bin with room, or into a new one."""
    bins: list[list[int]] = []
    for index in order:
        for bin in bins:
            if sum(sizes[i] for i in bin) + sizes[index] <= capacity:
                bin.append(index)
                break
        else:
            bins.append([index])
    return bins


def falling(sizes: Sequence[int]) -> list[int]:
    """Indices by falling size, ties in order."""
    return sorted(range(len(sizes)), key=lambda i: -sizes[i])


def lists(bins: Bins) -> list[list[int]]:
    return [bin.tolist() for bin in bins]


def realistic(num: int, seed: int) -> np.ndarray:
    """Log-normal lengths with a median of 150 and 95 % below 444."""
    return np.random.default_rng(seed).lognormal(np.log(150), 0.66, num).clip(4, 965).astype(int)


# First fit


def test_falling_sizes_by_hand():
    # 7 and 3 fill the first bin, 5 and 4 share the second.
    assert lists(first_fit_decreasing([3, 7, 5, 4], 10)) == [[1, 0], [2, 3]]


def test_a_shuffle_by_hand():
    # Seed 0 draws the order 2 0 1 3, sizes 5 3 7 4: 5 and 3 leave room for neither 7 nor 4, and 7 none for 4.
    assert np.random.default_rng(0).permutation(4).tolist() == [2, 0, 1, 3]
    assert lists(first_fit_shuffle([3, 7, 5, 4], 10, seed=0)) == [[2, 0], [1], [3]]


def test_an_older_bin_with_room_goes_before_the_newest():
    # 6 leaves 4, 5 in a second bin leaves 5: 3 fits both and goes to the first, where 2 then finds no room.
    assert lists(first_fit_decreasing([6, 5, 3, 2], 10)) == [[0, 2], [1, 3]]


def test_equal_sizes_keep_their_order():
    assert lists(first_fit_decreasing([5, 5, 5], 10)) == [[0, 1], [2]]


@settings(deadline=None)
@given(problems())
def test_falling_bins_are_those_of_the_textbook(problem):
    sizes, capacity = problem
    assert lists(first_fit_decreasing(sizes, capacity)) == textbook(sizes, falling(sizes), capacity)


@settings(deadline=None)
@given(problems(), st.integers(0, 2**32))
def test_shuffled_bins_are_those_of_the_textbook(problem, seed):
    sizes, capacity = problem
    drawn = np.random.default_rng(seed).permutation(len(sizes)).tolist()
    assert lists(first_fit_shuffle(sizes, capacity, seed)) == textbook(sizes, drawn, capacity)


@pytest.mark.parametrize("capacity", [965, 2000, 8192])
def test_many_bins_are_those_of_the_textbook(capacity):
    sizes = realistic(2000, seed=1).tolist()
    drawn = np.random.default_rng(3).permutation(len(sizes)).tolist()
    assert lists(first_fit_decreasing(sizes, capacity)) == textbook(sizes, falling(sizes), capacity)
    assert lists(first_fit_shuffle(sizes, capacity, seed=3)) == textbook(sizes, drawn, capacity)


def test_a_seed_tells_the_shuffle():
    sizes = realistic(200, seed=0)
    first, again, other = (lists(first_fit_shuffle(sizes, 2048, seed)) for seed in (7, 7, 8))
    assert first == again
    assert first != other


# Exact fit


def test_an_exact_fit_saves_the_bin_that_first_fit_wastes():
    # 4 + 3 + 3 twice; largest first, the two 4s share a bin that no 3 can fill.
    sizes = [4, 4, 3, 3, 3, 3]
    assert lists(exact_fit_decreasing(sizes, 10)) == [[0, 2, 3], [1, 4, 5]]
    assert len(first_fit_decreasing(sizes, 10)) == 3


def test_an_exact_fit_prefers_few_large_items_to_many_small():
    # 5 leaves 5: one 5 fills it as well as 3 + 2 or 2 + 2 + 1, and the small ones stay for later.
    assert lists(exact_fit_decreasing([1, 2, 2, 3, 5, 5], 10)) == [[4, 5], [3, 1, 2, 0]]


def test_where_nothing_fits_exactly_the_closest_sum_is_taken():
    # 7 leaves 13: 6 + 6 = 12 comes closer than 6 + 4 = 10; then 4 + 4.
    assert lists(exact_fit_decreasing([4, 6, 7, 6, 4], 20)) == [[2, 1, 3], [0, 4]]


def test_where_filling_each_bin_best_wastes_a_bin_first_fit_is_taken():
    # 5 + 3 + 2, 4 + 4, 4 + 4, 3 are four bins; 5 + 4, 4 + 4 + 2, 4 + 3 + 3 are three.
    sizes = [5, 4, 4, 4, 4, 3, 3, 2]
    assert lists(exact_fit_decreasing(sizes, 10)) == lists(first_fit_decreasing(sizes, 10))
    assert lists(first_fit_decreasing(sizes, 10)) == [[0, 1], [2, 3, 7], [4, 5, 6]]


@settings(deadline=None)
@given(problems())
def test_an_exact_fit_never_takes_more_bins_than_first_fit(problem):
    assert len(exact_fit_decreasing(*problem)) <= len(first_fit_decreasing(*problem))


@pytest.mark.parametrize("capacity", [1024, 2048, 8192])
def test_realistic_lengths_take_the_fewest_bins_there_can_be(capacity):
    sizes = realistic(10_000, seed=2)
    assert len(exact_fit_decreasing(sizes, capacity)) == -(-sizes.sum() // capacity)


# All


@every_algorithm
@settings(deadline=None)
@given(problems())
def test_everything_is_in_one_bin_and_no_bin_overflows(algorithm, problem):
    sizes, capacity = problem
    bins = lists(algorithm(sizes, capacity))
    assert sorted(i for bin in bins for i in bin) == list(range(len(sizes)))
    assert all(0 < sum(sizes[i] for i in bin) <= capacity for bin in bins)


@every_algorithm
def test_many_realistic_lengths_are_in_one_bin_each_and_no_bin_overflows(algorithm):
    sizes = realistic(5000, seed=4)
    bins = algorithm(sizes, 2048)
    assert sorted(bins.order.tolist()) == list(range(len(sizes)))
    assert max(sizes[bin].sum() for bin in bins) <= 2048


@every_algorithm
def test_the_same_again_gives_the_same_bins(algorithm):
    sizes = realistic(500, seed=6)
    assert lists(algorithm(sizes, 2048)) == lists(algorithm(sizes.tolist(), 2048))


@every_algorithm
def test_nothing_needs_no_bins(algorithm):
    bins = algorithm([], 10)
    assert len(bins) == 0
    assert lists(bins) == []


@every_algorithm
def test_a_size_of_the_whole_capacity_fits(algorithm):
    assert sorted(lists(algorithm(np.array([10, 10]), 10))) == [[0], [1]]


@every_algorithm
def test_where_no_two_fit_together_each_has_a_bin_of_its_own(algorithm):
    assert sorted(lists(algorithm([6] * 40, 10))) == [[i] for i in range(40)]


@every_algorithm
def test_a_size_beyond_the_capacity_is_refused(algorithm):
    with pytest.raises(ValueError) as caught:
        algorithm([3, 11], 10)
    assert str(caught.value) == "an item of size 11 does not fit in a bin of capacity 10"


@every_algorithm
def test_a_size_of_nothing_is_refused(algorithm):
    with pytest.raises(ValueError) as caught:
        algorithm([3, 0], 10)
    assert str(caught.value) == "an item has size 0, but sizes must be at least 1"


def test_bins_are_read_by_number():
    bins = Bins(np.array([1, 0, 2, 3, 4]), np.array([0, 2, 5]))
    assert (len(bins), bins[0].tolist(), bins[1].tolist(), bins[-1].tolist()) == (2, [1, 0], [2, 3, 4], [2, 3, 4])
    with pytest.raises(IndexError):
        bins[2]


def test_every_name_the_configuration_allows_is_an_algorithm():
    allowed = get_args(Packing.model_fields["algorithm"].annotation)
    assert allowed
    assert all(len(pack_into_bins(name, [3, 7, 5, 4], 10, seed=1)) in (2, 3) for name in allowed)
    assert set(allowed) == {*ALGORITHMS, "first_fit_shuffle"}
    assert all(function.__name__ == name for name, function in ALGORITHMS.items())
