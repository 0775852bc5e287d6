"""Packs worked out by hand.

A: prompt 10 11 12, completions 20 21 and 30 31 32, the second better. B: prompt 40, completions 50, 60 61 and 70.
"""

import numpy as np
import pytest

from tandem.data.text.tokens import TokenizedPreference
from tandem.packing.layout import Pack, join, lay_out


def preference(prompt, *completions, pairs=((0, 1),)) -> TokenizedPreference:
    return TokenizedPreference(
        np.array(prompt, np.int32),
        tuple(np.array(completion, np.int32) for completion in completions),
        pairs,
        "pairs.jsonl:1",
    )


A = preference([10, 11, 12], [20, 21], [30, 31, 32], pairs=((1, 0),))
B = preference([40], [50], [60, 61], [70], pairs=((0, 1), (0, 2), (1, 2)))


def lists(pack: Pack, *fields: str) -> list:
    return [getattr(pack, field).tolist() for field in fields]


def test_shared_lays_each_prompt_once_before_all_its_completions():
    pack = lay_out([7, 4], [A, B], length=16)
    assert lists(pack, "token_ids", "position_ids", "tree", "branch") == [
        #  A's prompt   | 20  21 | 30  31  32 |B  | 50| 60  61| 70| filler
        [[10, 11, 12, 20, 21, 30, 31, 32, 40, 50, 60, 61, 70, 0, 0, 0]],
        [[0, 1, 2, 3, 4, 3, 4, 5, 0, 1, 1, 2, 1, 0, 0, 0]],
        [[0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, -1, -1, -1]],
        [[0, 0, 0, 1, 1, 2, 2, 2, 0, 1, 2, 2, 3, 0, 0, 0]],
    ]
    # The last position of a prompt predicts the first token of each of its completions.
    assert lists(pack, "predicting", "target_ids") == [
        [2, 3, 2, 5, 6, 8, 8, 10, 8],
        [20, 21, 30, 31, 32, 50, 60, 61, 70],
    ]
    assert lists(pack, "completion_lengths", "owner", "preferences") == [[2, 3, 1, 2, 1], [0, 0, 1, 1, 1], [7, 4]]
    assert lists(pack, "winners", "losers", "best") == [[1, 2, 2, 3], [0, 3, 4, 4], [1, 2]]
    assert (pack.num_pairs, pack.num_tokens) == (4, 13)


def test_repeated_lays_the_prompt_before_each_completion_as_trees_of_their_own():
    pack = lay_out([7], [A], length=12, arrangement="repeated")
    assert lists(pack, "token_ids", "position_ids", "tree", "branch") == [
        [[10, 11, 12, 20, 21, 10, 11, 12, 30, 31, 32, 0]],
        [[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 0]],
        [[0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, -1]],
        [[0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0]],
    ]
    assert lists(pack, "predicting", "target_ids") == [[2, 3, 7, 8, 9], [20, 21, 30, 31, 32]]
    assert lists(pack, "winners", "losers", "best", "owner") == [[1], [0], [1], [0, 0]]


def test_separate_lays_each_completion_after_its_prompt_in_a_row_of_its_own():
    pack = lay_out([7, 4], [A, B], length=6, arrangement="separate")
    assert lists(pack, "token_ids", "position_ids", "tree", "branch") == [
        [
            [10, 11, 12, 20, 21, 0],
            [10, 11, 12, 30, 31, 32],
            [40, 50, 0, 0, 0, 0],
            [40, 60, 61, 0, 0, 0],
            [40, 70, 0, 0, 0, 0],
        ],
        [[0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 4, 5], [0, 1, 0, 0, 0, 0], [0, 1, 2, 0, 0, 0], [0, 1, 0, 0, 0, 0]],
        [
            [0, 0, 0, 0, 0, -1],
            [1, 1, 1, 1, 1, 1],
            [2, 2, -1, -1, -1, -1],
            [3, 3, 3, -1, -1, -1],
            [4, 4, -1, -1, -1, -1],
        ],
        [[0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1], [0, 1, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0]],
    ]
    # Flat positions: row * 6 + column.
    assert lists(pack, "predicting", "target_ids") == [
        [2, 3, 8, 9, 10, 12, 18, 19, 24],
        [20, 21, 30, 31, 32, 50, 60, 61, 70],
    ]


@pytest.mark.parametrize("arrangement", ["shared", "repeated", "separate"])
def test_pairs_and_scored_tokens_do_not_depend_on_the_arrangement(arrangement):
    pack = lay_out([7, 4], [A, B], length=20, arrangement=arrangement)
    fields = ("target_ids", "completion_lengths", "winners", "losers", "best", "owner", "preferences")
    assert lists(pack, *fields) == lists(lay_out([7, 4], [A, B], length=20), *fields)


@pytest.mark.parametrize("arrangement", ["shared", "repeated", "separate"])
def test_a_predicting_position_holds_the_token_before_its_target(arrangement):
    pack = lay_out([0, 1], [A, B], length=20, arrangement=arrangement)
    before = pack.token_ids.reshape(-1)[pack.predicting]
    assert before.tolist() == [12, 20, 12, 30, 31, 40, 40, 60, 40]
    steps = pack.position_ids.reshape(-1)[pack.predicting] + 1
    assert steps.tolist() == [3, 4, 3, 4, 5, 1, 1, 2, 1]  # the targets' own positions


def test_join_stacks_rows_and_shifts_what_counts_from_the_start():
    joined = join([lay_out([7], [A], length=8), lay_out([4], [B], length=8)])
    assert lists(joined, "token_ids", "tree") == [
        [[10, 11, 12, 20, 21, 30, 31, 32], [40, 50, 60, 61, 70, 0, 0, 0]],
        [[0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, -1, -1, -1]],
    ]
    assert lists(joined, "predicting") == [[2, 3, 2, 5, 6, 8, 8, 10, 8]]
    assert lists(joined, "winners", "losers", "best") == [[1, 2, 2, 3], [0, 3, 4, 4], [1, 2]]
    assert lists(joined, "owner", "preferences", "completion_lengths") == [[0, 0, 1, 1, 1], [7, 4], [2, 3, 1, 2, 1]]


def test_join_of_one_pack_is_that_pack():
    pack = lay_out([7], [A], length=8)
    assert join([pack]) is pack


def test_a_row_too_short_is_our_own_mistake():
    # A prompt of 3 and a completion of 3 need a row of 6.
    with pytest.raises(AssertionError, match="tokens do not fit in a row of 4"):
        lay_out([0], [A], length=4)
