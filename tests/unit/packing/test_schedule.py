"""Which preferences form a batch, and which rows a batch becomes."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.config.schema import Packing
from tandem.data.tokens import TokenizedPreference
from tandem.errors import ConfigError
from tandem.packing.schedule import Batches, make_packer, row_sizes


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


@given(st.lists(st.integers(1, 6), max_size=30), st.integers(1, 12), st.booleans(), st.integers(0, 3))
def test_every_preference_is_in_one_batch_of_an_epoch_and_none_is_overfull(num_pairs, size, shuffle, epoch):
    found = batches(num_pairs, size, shuffle=shuffle).epoch(epoch)
    assert sorted(i for batch in members(found) for i in batch) == list(range(len(num_pairs)))
    for batch in found:
        assert batch.num_pairs == sum(num_pairs[i] for i in batch.preferences)
        assert batch.num_pairs <= size or len(batch.preferences) == 1


@given(st.lists(st.integers(1, 6), max_size=30), st.integers(1, 12))
def test_the_first_preference_of_a_batch_did_not_fit_the_one_before(num_pairs, size):
    found = batches(num_pairs, size).epoch(0)
    for before, after in pairwise(found):
        assert before.num_pairs + num_pairs[after.preferences[0]] > size


# Packs


class Store(list[TokenizedPreference]):
    """What a packer needs of a TokenStore."""

    def place(self, index: int) -> str:
        return self[index].place

    @property
    def num_prompt_tokens(self):
        return np.array([len(row.prompt) for row in self])

    @property
    def num_completion_tokens(self):
        return np.array([sum(map(len, row.completions)) for row in self])

    @property
    def num_completions(self):
        return np.array([len(row.completions) for row in self])

    @property
    def longest(self):
        return np.array([row.longest for row in self])


def store(*sizes: tuple[int, int, int]) -> Store:
    """Preferences of (prompt, completion, completion) tokens."""
    return Store(
        TokenizedPreference(
            np.full(prompt, 1, np.int32),
            (np.full(first, 2, np.int32), np.full(second, 3, np.int32)),
            ((0, 1),),
            (float("nan"),) * 2,
            f"pairs.jsonl:{number}",
        )
        for number, (prompt, first, second) in enumerate(sizes, start=1)
    )


def packer(of: Store, *, shortest_auto=1, **packing):
    return make_packer(of, Packing(**packing), shortest_auto=shortest_auto)  # type: ignore[arg-type]


def test_sizes_of_the_three_arrangements():
    of = store((4, 2, 3), (1, 1, 2))
    assert row_sizes(of, "shared").tolist() == [9, 4]
    assert row_sizes(of, "repeated").tolist() == [13, 5]
    assert row_sizes(of, "separate").tolist() == [7, 3]


def test_the_arrangement_follows_mode_and_sharing():
    of = store((10, 5, 5))
    assert packer(of).arrangement == "shared"
    assert packer(of, share_prompts=False).arrangement == "repeated"
    assert packer(of, mode="none").arrangement == "separate"


def test_an_auto_length_holds_the_longest_preference_in_whole_blocks_of_128():
    # shared 100 + 60 + 70 = 230; repeated 330; separate 100 + 70 = 170
    of = store((10, 5, 5), (100, 60, 70))
    assert packer(of).length == 256
    assert packer(of, share_prompts=False).length == 384
    assert packer(of, mode="none").length == 256
    assert packer(store((100, 8, 20))).length == 128


def test_an_auto_length_is_at_least_the_shortest_worth_its_while_unless_nothing_is_packed():
    of = store((10, 5, 5))
    assert packer(of, shortest_auto=512).length == 512
    assert packer(of, shortest_auto=512, mode="none").length == 128


def test_a_given_length_is_rounded_up_to_whole_blocks():
    assert packer(store((10, 5, 5)), pack_length=200, shortest_auto=512).length == 256
    assert packer(store((10, 5, 5)), pack_length=256).length == 256


def test_a_given_length_too_short_for_a_preference_is_refused_with_its_place():
    of = store((10, 5, 5), (100, 60, 70), (20, 5, 5))
    with pytest.raises(ConfigError) as caught:
        packer(of, pack_length=200)
    assert str(caught.value) == (
        "policy.packing.pack_length = 200, but the preference at pairs.jsonl:2 takes 230 tokens. "
        "Raise the pack length, or lower policy.max_total_sequence_length."
    )
    assert packer(of, pack_length=230).length == 256
    with pytest.raises(ConfigError, match="takes 330 tokens"):
        packer(of, pack_length=230, share_prompts=False)


def test_a_batch_is_packed_first_fit_decreasing_among_its_own():
    # sizes 60, 100, 28, 68 in rows of 128: 100 + 28, then 68 + 60
    of = store((40, 10, 10), (80, 10, 10), (8, 10, 10), (48, 10, 10), (1, 1, 1))
    found = list(packer(of).micro_batches(np.array([0, 1, 2, 3])))
    assert [pack.preferences.tolist() for pack in found] == [[1, 2], [3, 0]]
    assert [pack.token_ids.shape for pack in found] == [(1, 128), (1, 128)]


def test_several_packs_go_together_and_the_last_may_be_fewer():
    of = store(*[(80, 10, 10)] * 5)
    found = list(packer(of, packs_per_micro_batch=2).micro_batches(np.arange(5)))
    assert [pack.token_ids.shape for pack in found] == [(2, 128), (2, 128), (1, 128)]
    assert np.concatenate([pack.preferences for pack in found]).tolist() == [0, 1, 2, 3, 4]


def test_unpacked_each_preference_is_a_pack_with_a_row_for_each_completion():
    of = store((40, 10, 10), (80, 10, 10))
    found = list(packer(of, mode="none").micro_batches(np.array([1, 0])))
    assert [pack.preferences.tolist() for pack in found] == [[1], [0]]
    assert [pack.token_ids.shape for pack in found] == [(2, 128), (2, 128)]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 3), st.sampled_from(["batch", "none"]))
def test_every_preference_of_a_batch_is_in_one_micro_batch(prompts, together, mode):
    of = store(*((prompt, 3, 4) for prompt in prompts))
    chosen = np.arange(len(prompts))[::2]
    found = list(packer(of, mode=mode, packs_per_micro_batch=together).micro_batches(chosen))
    assert sorted(np.concatenate([pack.preferences for pack in found]).tolist()) == chosen.tolist()
    assert sum(pack.num_pairs for pack in found) == len(chosen)
