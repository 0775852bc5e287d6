"""How often an epoch passes over each training set."""

from collections import Counter

import numpy as np
import pytest

from tandem.data.store.sets import Span
from tandem.packing.batches import Batches


def weighted(*spans: tuple[int, int, float], **options) -> Batches:
    count = max(end for _, end, _ in spans)
    return Batches(np.ones(count, np.int64), 2, spans=tuple(Span(*span) for span in spans), **options)


def members(batches: Batches, *epochs: int) -> list[list[int]]:
    return [batches.members(epoch).tolist() for epoch in epochs]


def test_weight_two_takes_a_set_twice():
    assert members(weighted((0, 3, 2.0)), 0, 1) == [[0, 1, 2, 0, 1, 2]] * 2


def test_a_weight_below_one_takes_a_part_and_goes_on_where_the_last_epoch_stopped():
    # Two of five
    assert members(weighted((0, 5, 0.4)), 0, 1, 2, 3) == [[0, 1], [2, 3], [4, 0], [1, 2]]


def test_a_weight_between_takes_all_and_then_a_part():
    assert members(weighted((0, 4, 1.5)), 0, 1, 2) == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 2, 3], [0, 1, 2, 3, 0, 1]]


def test_every_set_goes_by_its_own_weight():
    # Twice 0 and 1, half of 2 to 5, all of 6
    assert members(weighted((0, 2, 2.0), (2, 6, 0.5), (6, 7, 1.0)), 0, 1) == [
        [0, 1, 0, 1, 2, 3, 6],
        [0, 1, 0, 1, 4, 5, 6],
    ]


def test_weight_one_is_a_set_as_it_is():
    plain = Batches(np.ones(5, np.int64), 2)
    for shuffle in (False, True):
        one = weighted((0, 2, 1.0), (2, 5, 1.0), shuffle=shuffle)
        assert members(one, 0, 3) == members(plain, 0, 3) == [[0, 1, 2, 3, 4]] * 2


def test_a_set_of_which_nothing_is_left_gives_nothing():
    assert members(weighted((0, 0, 1.5), (0, 2, 1.0)), 0) == [[0, 1]]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("weight", "epochs"), [(0.4, 5), (0.25, 20), (1.5, 2), (2.25, 4)])
def test_over_enough_epochs_every_preference_is_passed_over_equally_often(weight, epochs, shuffle):
    batches = weighted((0, 20, weight), shuffle=shuffle)
    counted = Counter(i for epoch in range(epochs) for i in batches.members(epoch).tolist())
    assert counted == dict.fromkeys(range(20), weight * epochs)


def test_shuffled_parts_follow_another_order_that_the_seed_decides():
    def parts(seed: int) -> list[list[int]]:
        return members(weighted((0, 20, 0.5), shuffle=True, seed=seed), 0, 1)

    assert parts(1) == parts(1)
    assert parts(1) != parts(2)
    first, second = parts(1)
    assert first != list(range(10))
    assert sorted(first + second) == list(range(20))


def test_two_sets_of_one_size_are_not_taken_in_the_same_order():
    found = weighted((0, 20, 0.5), (20, 40, 0.5), shuffle=True).members(0)
    assert (found[:10] + 20).tolist() != found[10:].tolist()


def test_an_epochs_members_do_not_depend_on_epochs_before():
    batches = weighted((0, 20, 0.3), shuffle=True)
    later = batches.members(4).tolist()
    batches.members(0)
    assert batches.members(4).tolist() == later


@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_hold_the_members_of_their_epoch(shuffle):
    batches = weighted((0, 3, 2.0), (3, 8, 0.4), shuffle=shuffle)
    found = batches.epoch(1)
    assert [batch.num_pairs for batch in found] == [2, 2, 2, 2]
    order = [i for batch in found for i in batch.preferences.tolist()]
    assert sorted(order) == sorted(batches.members(1).tolist())
    assert (order == batches.members(1).tolist()) is not shuffle
