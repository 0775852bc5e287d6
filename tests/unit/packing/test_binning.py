"""Bins against the textbook."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.packing.binning import ALGORITHMS, first_fit_decreasing


def textbook(sizes: list[int], capacity: int) -> list[list[int]]:
    """Sort by falling size (ties in order); put each into the first bin with room, or into a new one."""
    bins: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        for bin in bins:
            if sum(sizes[i] for i in bin) + sizes[index] <= capacity:
                bin.append(index)
                break
        else:
            bins.append([index])
    return bins


def test_a_worked_example():
    # 7 and 3 fill the first bin, 5 and 4 share the second.
    assert first_fit_decreasing([3, 7, 5, 4], 10) == [[1, 0], [2, 3]]


def test_equal_sizes_keep_their_order():
    assert first_fit_decreasing([5, 5, 5], 10) == [[0, 1], [2]]


def test_nothing_needs_no_bins():
    assert first_fit_decreasing([], 10) == []


def test_a_size_of_the_whole_capacity_fits():
    assert first_fit_decreasing(np.array([10, 10]), 10) == [[0], [1]]


@given(st.lists(st.integers(1, 20), max_size=40), st.integers(20, 50))
def test_bins_are_those_of_the_textbook(sizes, capacity):
    assert first_fit_decreasing(sizes, capacity) == textbook(sizes, capacity)


@given(st.lists(st.integers(1, 20), max_size=40), st.integers(20, 50))
def test_everything_is_in_one_bin_and_no_bin_overflows(sizes, capacity):
    bins = first_fit_decreasing(sizes, capacity)
    assert sorted(i for bin in bins for i in bin) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in bin) <= capacity for bin in bins)


def test_a_size_beyond_the_capacity_is_refused():
    with pytest.raises(ValueError) as caught:
        first_fit_decreasing([3, 11], 10)
    assert str(caught.value) == "a size of 11 does not fit a bin of 10"


def test_the_algorithm_has_the_name_the_configuration_gives_it():
    assert {"first_fit_decreasing": first_fit_decreasing} == ALGORITHMS
