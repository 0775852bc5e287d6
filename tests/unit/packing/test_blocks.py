"""Block lists against brute force over the dense rule of attention."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.data.text.tokens import TokenizedPreference
from tandem.model.attention.pack_attention import may_attend
from tandem.packing.blocks import block_lists, seen_until
from tandem.packing.layout import FILLER, Pack, lay_out

BLOCK = 4


def dense(pack: Pack, row: int, window: int | None) -> np.ndarray:
    """[query, key] allowed, word for word as Pack's docstring has it; a window counts position ids."""
    tree, branch, position = pack.tree[row], pack.branch[row], pack.position_ids[row]
    allowed = np.zeros((len(tree), len(tree)), bool)
    for q in range(len(tree)):
        for k in range(q + 1):
            if tree[q] == FILLER:
                allowed[q, k] = q == k
            elif tree[q] == tree[k] and branch[k] in (0, branch[q]):
                allowed[q, k] = window is None or position[q] - position[k] < window
    return allowed


def brute_force(pack: Pack, row: int, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """[blocks, blocks]: some element is allowed; every element is."""
    allowed = dense(pack, row, window)
    num = len(allowed) // BLOCK
    cells = allowed.reshape(num, BLOCK, num, BLOCK)
    return cells.any((1, 3)), cells.all((1, 3))


def as_matrix(counts: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """[blocks, blocks] bool from counts and padded lists; a list names a block at most once and in rising order."""
    matrix = np.zeros((len(counts), len(counts)), bool)
    for i, count in enumerate(counts):
        wanted = indices[i, :count].tolist()
        assert wanted == sorted(set(wanted))
        matrix[i, wanted] = True
    return matrix


def lists_of(pack: Pack, window: int | None = None):
    return block_lists(pack.tree, pack.branch, pack.position_ids, block=BLOCK, window=window)


def preference(prompt: int, *completions: int) -> TokenizedPreference:
    parts = tuple(np.ones(n, np.int32) for n in completions)
    return TokenizedPreference(np.ones(prompt, np.int32), parts, ((0, 1),), "x")


@st.composite
def packs(draw) -> Pack:
    lengths = st.integers(1, 11)
    trees = draw(st.lists(st.tuples(lengths, st.lists(lengths, min_size=2, max_size=4)), min_size=1, max_size=4))
    preferences = [preference(prompt, *completions) for prompt, completions in trees]
    arrangement = draw(st.sampled_from(["shared", "repeated", "separate"]))
    taken = {"shared": 0, "repeated": 0, "separate": 22}[arrangement] or sum(
        len(p.prompt) * (len(p.completions) if arrangement == "repeated" else 1) + sum(map(len, p.completions))
        for p in preferences
    )
    blocks = -(-taken // BLOCK) + draw(st.integers(0, 2))
    return lay_out(range(len(preferences)), preferences, length=blocks * BLOCK, arrangement=arrangement)


def test_a_worked_example():
    # prompt 6, completions 4 and 4, filler 2, blocks of 4:
    #   block 0  prompt 0-3         sees, causally, itself
    #   block 1  prompt 4-5 and the first two of completion 1: all of block 0, part of itself
    #   block 2  the rest of completion 1, the start of completion 2: all of block 0; of block 1 the prompt
    #            (completion 2 may not see completion 1)
    #   block 3  the rest of completion 2, and filler
    found = lists_of(lay_out([0], [preference(6, 4, 4)], length=16))
    assert as_matrix(found.kv_full_counts[0], found.kv_full[0]).astype(int).tolist() == [
        [0, 0, 0, 0],
        [1, 0, 0, 0],
        [1, 0, 0, 0],
        [0, 0, 0, 0],
    ]
    assert as_matrix(found.kv_partial_counts[0], found.kv_partial[0]).astype(int).tolist() == [
        [1, 0, 0, 0],
        [0, 1, 0, 0],
        [0, 1, 1, 0],
        [1, 1, 1, 1],
    ]


def test_how_far_each_key_is_seen():
    pack = lay_out([0], [preference(2, 2, 1)], length=7)
    assert seen_until(pack.tree, pack.branch).tolist() == [[5, 5, 4, 4, 5, 6, 7]]


@settings(max_examples=150, deadline=None)
@given(packs(), st.one_of(st.none(), st.integers(1, 24)))
def test_the_rule_by_key_is_the_one_by_tree_and_branch(pack, window):
    until = seen_until(pack.tree, pack.branch)
    columns = np.arange(until.shape[1])
    for row in range(len(until)):
        found = may_attend(until[row], pack.position_ids[row], columns[:, None], columns[None], window=window)
        np.testing.assert_array_equal(found, dense(pack, row, window))


@settings(max_examples=150, deadline=None)
@given(packs())
def test_partial_is_any_but_not_all_and_full_is_all(pack):
    found = lists_of(pack)
    for row in range(len(pack.tree)):
        some, every = brute_force(pack, row, None)
        np.testing.assert_array_equal(as_matrix(found.kv_full_counts[row], found.kv_full[row]), every)
        np.testing.assert_array_equal(as_matrix(found.kv_partial_counts[row], found.kv_partial[row]), some & ~every)


@settings(max_examples=150, deadline=None)
@given(packs(), st.integers(1, 24))
def test_with_a_window_no_block_is_missed_and_none_is_wrongly_full(pack, window):
    found = lists_of(pack, window)
    for row in range(len(pack.tree)):
        some, every = brute_force(pack, row, window)
        partial = as_matrix(found.kv_partial_counts[row], found.kv_partial[row])
        full = as_matrix(found.kv_full_counts[row], found.kv_full[row])
        assert not (some & ~(partial | full)).any()  # nothing allowed is left out
        assert not (full & ~every).any()
        assert not (partial & full).any()


@settings(max_examples=30, deadline=None)
@given(packs())
def test_a_window_beyond_every_sequence_changes_nothing(pack):
    with_window, without = lists_of(pack, 1000), lists_of(pack)
    for field in ("kv_partial_counts", "kv_partial", "kv_full_counts", "kv_full"):
        np.testing.assert_array_equal(getattr(with_window, field), getattr(without, field))


def test_a_window_leaves_out_blocks_beyond_it():
    # A prompt of 16 with a window of 4: a query in block 3 (12-15) sees back to 9 at most, so nothing of blocks 0 and 1.
    found = lists_of(lay_out([0], [preference(16, 2, 2)], length=20), 4)
    partial = as_matrix(found.kv_partial_counts[0], found.kv_partial[0])
    full = as_matrix(found.kv_full_counts[0], found.kv_full[0])
    assert (partial | full)[3].tolist() == [False, False, True, True, False]


@settings(max_examples=30, deadline=None)
@given(packs(), st.sampled_from([None, 5]))
def test_the_lists_by_keys_are_those_by_queries_turned_round(pack, window):
    found = lists_of(pack, window)
    for row in range(len(pack.tree)):
        for kind in ("partial", "full"):
            by_query = as_matrix(getattr(found, f"kv_{kind}_counts")[row], getattr(found, f"kv_{kind}")[row])
            by_key = as_matrix(getattr(found, f"q_{kind}_counts")[row], getattr(found, f"q_{kind}")[row])
            np.testing.assert_array_equal(by_query.T, by_key)


@pytest.mark.parametrize("field", ["kv_partial", "kv_full", "q_partial", "q_full"])
def test_lists_have_a_fixed_width_of_int32(field):
    found = lists_of(lay_out([0, 1], [preference(6, 4, 4), preference(2, 1, 1)], length=20))
    assert getattr(found, field).shape == (1, 5, 5)
    assert getattr(found, f"{field}_counts").shape == (1, 5)
    assert getattr(found, field).dtype == getattr(found, f"{field}_counts").dtype == np.int32
