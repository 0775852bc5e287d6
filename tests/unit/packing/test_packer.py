"""Preferences into packs: lengths, rows, and what goes together."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.config.sections.policy import Packing
from tandem.data.text.tokens import TokenizedPreference
from tandem.errors import ConfigError
from tandem.packing.packer import RankShare, make_packer, row_lengths, row_sizes


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
    def num_pairs(self):
        return np.array([len(row.pairs) for row in self])

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
            f"pairs.jsonl:{number}",
        )
        for number, (prompt, first, second) in enumerate(sizes, start=1)
    )


def packer(of: Store, *, usual_auto=1, shortest_auto=0, pairs_per_batch=None, num_ranks=1, **packing):
    return make_packer(
        of,  # type: ignore[arg-type]
        Packing(**packing),
        usual_auto=usual_auto,
        shortest_auto=shortest_auto,
        pairs_per_batch=pairs_per_batch,
        share=RankShare(0, num_ranks),
    )


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


def test_an_auto_length_is_the_usual_one_unless_nothing_is_packed():
    of = store((10, 5, 5))
    assert packer(of, usual_auto=512).length == 512
    assert packer(of, usual_auto=512, mode="none").length == 128


def test_a_given_length_is_rounded_up_to_whole_blocks():
    assert packer(store((10, 5, 5)), pack_length=200, usual_auto=512).length == 256
    assert packer(store((10, 5, 5)), pack_length=256).length == 256


def test_an_auto_length_is_shorter_where_a_batch_would_not_fill_four_rows():
    # 64 pairs of 20 tokens are 1,280: a quarter is 320, in whole blocks 384
    assert packer(store(*[(10, 5, 5)] * 8), usual_auto=8192, pairs_per_batch=64).length == 384
    assert packer(store(*[(10, 5, 5)] * 8), usual_auto=8192, pairs_per_batch=10_000).length == 8192


def test_a_small_batch_stands_in_one_row_rather_than_in_several_that_are_too_short_for_a_gpu():
    of, gpu = store(*[(10, 5, 5)] * 8), {"usual_auto": 8192, "shortest_auto": 4096}
    # with room for a batch that is a quarter larger: 1,600 and 800, in whole blocks
    assert packer(of, pairs_per_batch=64, **gpu).length == 1664
    assert packer(of, pairs_per_batch=64, num_ranks=2, **gpu).length == 896
    # 10,000 tokens in three rows, 20,000 in four
    assert packer(of, pairs_per_batch=500, **gpu).length == 4096
    assert packer(of, pairs_per_batch=1000, **gpu).length == 5120


def test_lengths_are_sixteenths_in_whole_blocks():
    assert row_lengths(1000) == (256, 512, 768, 896, 1024)
    assert row_lengths(512) == (128, 256, 384, 512)
    assert row_lengths(8192) == (2048, 4608, 6656, 7680, 8192)
    assert row_lengths(200) == (128, 256)
    assert row_lengths(100) == (128,)


def test_a_given_length_too_short_for_a_sequence_is_refused_with_its_place():
    of = store((10, 5, 5), (100, 60, 70), (20, 5, 5))
    with pytest.raises(ConfigError) as caught:
        packer(of, pack_length=128)
    assert str(caught.value) == (
        "policy.packing.pack_length = 128, but a sequence at pairs.jsonl:2 takes 170 tokens. "
        "Raise the pack length, or lower policy.max_total_sequence_length."
    )
    # what counts is the row, in whole blocks
    assert packer(of, pack_length=160).length == 256


def test_a_preference_longer_than_a_row_has_several_to_itself():
    # 100 + 60 + 70 = 230 tokens do not fit a row of 192 (256 in blocks, so 300 is taken): prompt + 60, prompt + 70
    of = store((10, 5, 5), (100, 90, 100), (20, 5, 5))
    found = list(packer(of, pack_length=256).micro_batches(np.arange(3)))
    assert [(pack.preferences.tolist(), pack.token_ids.shape) for pack in found] == [
        ([1], (2, 256)),
        ([2, 0], (1, 128)),
    ]
    split = found[0]
    assert (split.tree[:, :190] == [[0], [1]]).all()
    assert (split.num_pairs, split.completion_lengths.tolist()) == (1, [90, 100])


def test_the_last_row_is_as_short_as_it_can_be():
    # rows of 512, 384, 256 or 128: 5 preferences of 120 are four and one
    of = store(*[(100, 10, 10)] * 5)
    found = list(packer(of, pack_length=512).micro_batches(np.arange(5)))
    assert [pack.token_ids.shape[1] for pack in found] == [512, 128]


def test_rows_are_packed_anew_where_all_together_are_shorter_for_it():
    # rows of 2048, 1920, 1664, 1152 or 512: first fit makes 900 + 700 + 350 and 300; 900 + 700 + 300 takes a shorter row
    of = store(*((size - 20, 10, 10) for size in (900, 700, 350, 300)))
    found = list(packer(of, pack_length=2048).micro_batches(np.arange(4)))
    assert [pack.token_ids.shape[1] for pack in found] == [1920, 512]
    settled = list(packer(of, pack_length=2048).micro_batches(np.arange(4), np.array([0, 3, 4])))
    assert [pack.token_ids.shape[1] for pack in settled] == [2048, 512]
    together = list(packer(of, pack_length=2048, packs_per_micro_batch=2).micro_batches(np.arange(4)))
    assert [pack.token_ids.shape[1] for pack in together] == [2048, 512]


def test_packs_settled_before_are_kept():
    of = store(*[(20, 10, 10)] * 4)
    found = list(packer(of, pack_length=512).micro_batches(np.array([3, 1, 0, 2]), np.array([0, 3, 4])))
    assert [pack.preferences.tolist() for pack in found] == [[3, 1, 0], [2]]


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


def test_fewer_than_go_together_go_in_powers_of_two_so_that_few_shapes_are_compiled():
    of = store(*[(80, 10, 10)] * 12)
    rows = {
        num: [pack.token_ids.shape[0] for pack in packer(of, packs_per_micro_batch=6).micro_batches(np.arange(num))]
        for num in (5, 6, 9, 12)
    }
    assert rows == {5: [4, 1], 6: [6], 9: [6, 2, 1], 12: [6, 6]}


def test_unpacked_each_preference_is_a_pack_with_a_row_for_each_completion():
    of = store((40, 10, 10), (80, 10, 10))
    found = list(packer(of, mode="none").micro_batches(np.array([1, 0])))
    assert [pack.preferences.tolist() for pack in found] == [[1], [0]]
    assert [pack.token_ids.shape for pack in found] == [(2, 128), (2, 128)]


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 3), st.sampled_from(["batch", "none"]))
def test_every_preference_of_a_batch_is_in_one_micro_batch(prompts, together, mode):
    of = store(*((prompt, 3, 4) for prompt in prompts))
    chosen = np.arange(len(prompts))[::2]
    found = list(packer(of, mode=mode, packs_per_micro_batch=together).micro_batches(chosen))
    assert sorted(np.concatenate([pack.preferences for pack in found]).tolist()) == chosen.tolist()
    assert sum(pack.num_pairs for pack in found) == len(chosen)
