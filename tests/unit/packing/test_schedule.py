"""Which preferences form a batch, and which rows a batch becomes."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.packing.batches import Batches
from tandem.packing.binning import Bins


def batches(num_pairs, size: int, **options) -> Batches:
    return Batches(np.array(num_pairs, np.int64), size, **options)


def members(found: list) -> list[list[int]]:
    return [batch.preferences.tolist() for batch in found]


# Batches


def test_a_preference_that_would_pass_the_batch_opens_the_next():
    found = batches([2, 2, 1, 6], 4).epoch(0)
    assert members(found) == [[0, 1], [2], [3]]
    assert [batch.num_pairs for batch in found] == [4, 1, 6]


def test_a_batch_is_as_full_as_whole_preferences_make_it():
    assert members(batches([1] * 7, 3).epoch(0)) == [[0, 1, 2], [3, 4, 5], [6]]


def test_a_preference_larger_than_a_batch_is_a_batch_alone():
    assert members(batches([6, 1, 6], 4).epoch(0)) == [[0], [1], [2]]


def test_drop_last_leaves_out_a_short_last_batch_and_only_that():
    assert members(batches([1] * 7, 3, drop_last=True).epoch(0)) == [[0, 1, 2], [3, 4, 5]]
    assert members(batches([1] * 6, 3, drop_last=True).epoch(0)) == [[0, 1, 2], [3, 4, 5]]
    # The first batch is short too, for want of a preference that fits; it is kept.
    assert members(batches([2, 2, 1, 3, 1], 4, drop_last=True).epoch(0)) == [[0, 1], [2, 3]]
    assert members(batches([3, 2, 2], 4, drop_last=True).epoch(0)) == [[0], [1, 2]]


def test_drop_last_keeps_a_last_batch_that_is_as_full_as_another():
    # Three pairs each: no batch can have four, so the last one is not short.
    assert members(batches([3, 3, 3], 4, drop_last=True).epoch(0)) == [[0], [1], [2]]
    assert members(batches([3] * 5, 8, drop_last=True).epoch(0)) == [[0, 1], [2, 3]]
    assert members(batches([3] * 6, 8, drop_last=True).epoch(0)) == [[0, 1], [2, 3], [4, 5]]
    assert batches([3, 3], 8, drop_last=True).epoch(0) == []


def test_fewer_pairs_than_a_batch_make_none_with_drop_last():
    assert batches([1, 1], 3, drop_last=True).epoch(0) == []


def test_without_shuffling_every_epoch_has_the_order_of_the_file():
    plain = batches([1] * 6, 2)
    assert members(plain.epoch(0)) == members(plain.epoch(5)) == [[0, 1], [2, 3], [4, 5]]


def test_an_order_is_told_by_seed_and_epoch_alone():
    first, again = batches([1] * 50, 8, seed=3, shuffle=True), batches([1] * 50, 8, seed=3, shuffle=True)
    again.epoch(0)
    assert members(first.epoch(1)) == members(again.epoch(1))


def test_epochs_and_seeds_differ_in_order():
    orders = [
        tuple(np.concatenate(members(batches([1] * 50, 50, seed=seed, shuffle=True).epoch(epoch))).tolist())
        for seed in (3, 4)
        for epoch in (0, 1)
    ]
    assert len({*orders, tuple(range(50))}) == 5


def test_a_batch_knows_its_epoch():
    assert [batch.epoch for batch in batches([1, 1], 1).epoch(4)] == [4, 4]


@settings(deadline=None)
@given(st.lists(st.integers(1, 6), max_size=30), st.integers(1, 12), st.booleans(), st.integers(0, 3))
def test_every_preference_is_in_one_batch_of_an_epoch_and_none_is_overfull(num_pairs, size, shuffle, epoch):
    found = batches(num_pairs, size, shuffle=shuffle).epoch(epoch)
    assert sorted(i for batch in members(found) for i in batch) == list(range(len(num_pairs)))
    for batch in found:
        assert batch.num_pairs == sum(num_pairs[i] for i in batch.preferences)
        assert batch.num_pairs <= size or len(batch.preferences) == 1


@settings(deadline=None)
@given(st.lists(st.integers(1, 6), max_size=30), st.integers(1, 12))
def test_the_first_preference_of_a_batch_did_not_fit_the_one_before(num_pairs, size):
    found = batches(num_pairs, size).epoch(0)
    for before, after in pairwise(found):
        assert before.num_pairs + num_pairs[after.preferences[0]] > size


# Batches of whole packs


def test_batches_of_packs_are_filled_by_whole_packs_and_never_beyond():
    # packs of 2, 1, 3 and 1 preferences, a pair each; 4 pairs a batch: 2 + 1, then 3 + 1
    packs = Bins(np.array([5, 0, 1, 2, 3, 4, 6]), np.array([0, 2, 3, 6, 7]))
    found = Batches(np.ones(7, np.int64), 4, packs=packs).epoch(0)
    assert [batch.preferences.tolist() for batch in found] == [[5, 0, 1], [2, 3, 4, 6]]
    assert [batch.bounds.tolist() for batch in found] == [[0, 2, 3], [0, 3, 4]]
    assert [batch.num_pairs for batch in found] == [3, 4]


def test_packs_are_shuffled_whole():
    packs = Bins(np.arange(40), np.arange(0, 41, 4))
    first, second = (Batches(np.ones(40, np.int64), 8, seed=1, shuffle=True, packs=packs).epoch(e) for e in (0, 1))
    assert members(first) != members(second)
    assert all(
        (np.diff(batch.preferences.reshape(-1, 4), axis=1) == 1).all() and len(batch.preferences) == 8
        for batch in (*first, *second)
    )


def test_a_last_batch_of_packs_is_dropped_only_when_it_is_shorter_than_any_other_may_be():
    # Batches of at most 5 pairs, of packs of 2: each has 4, and so may the last; one pack left over is short.
    even, odd = (Bins(np.arange(n), np.arange(0, n + 1, 2)) for n in (8, 10))
    assert [b.num_pairs for b in Batches(np.ones(8, np.int64), 5, drop_last=True, packs=even).epoch(0)] == [4, 4]
    assert [b.num_pairs for b in Batches(np.ones(10, np.int64), 5, drop_last=True, packs=odd).epoch(0)] == [4, 4]
