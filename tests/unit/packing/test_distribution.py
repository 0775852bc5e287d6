"""Packs of a batch are assigned to ranks in rounds."""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.packing.binning import Bins
from tandem.packing.distribution import Round, assign_to_ranks, row_cost
from tandem.packing.layout import lay_out
from tandem.packing.packer import Packer, row_lengths

ALGORITHMS = ["first_fit_decreasing", "first_fit_shuffle", "exact_fit_decreasing"]


def bins(*members: list[int]) -> Bins:
    return Bins(np.concatenate([np.array(bin) for bin in members]), np.cumsum([0, *map(len, members)]))


def assigned(
    of: Bins, sizes: Sequence[int], ranks: int, *, lengths=(2, 4, 6, 8), costs=None, repack=False
) -> list[Round]:
    cost = np.array(sizes if costs is None else costs, np.float64)
    return assign_to_ranks(of, np.array(sizes, np.int64), cost, lengths=lengths, num_ranks=ranks, repack=repack)


def plain(rounds: list[Round]) -> list[tuple[int, list[list[int]]]]:
    return [(round.length, [pack.tolist() for pack in round.packs]) for round in rounds]


@st.composite
def batches(draw) -> tuple[Packer, np.ndarray, int]:
    """A packer, the preferences of a batch (a few longer than a row), and ranks: from one to more than preferences."""
    sizes = draw(st.lists(st.one_of(st.integers(1, 512), st.integers(1, 60), st.just(700)), min_size=1, max_size=60))
    algorithm = draw(st.sampled_from(ALGORITHMS))
    lengths = draw(st.sampled_from([row_lengths(512), (128, 288, 416, 480, 512)]))
    packer = Packer(None, np.array(sizes), lengths, "shared", 1, algorithm)  # type: ignore[arg-type]
    chosen = np.arange(len(sizes))[:: draw(st.integers(1, 2))]
    return packer, chosen, draw(st.integers(1, 40))


def rounds_of(packer: Packer, chosen: np.ndarray, ranks: int, *, repack: bool = False) -> list[Round]:
    costs, rows = packer.sizes + packer.sizes**2 / 1000, {"lengths": packer.lengths, "num_ranks": ranks}
    return assign_to_ranks(packer.bins(chosen), packer.sizes, costs, **rows, repack=repack)


# By hand


def test_packs_of_a_round_exchange_preferences_until_their_costs_are_close():
    """Rows of 8: a preference of 4 tokens and attention 3 for one of 2 tokens and attention 1. Attention is cost minus size."""
    found = assigned(bins([0, 1], [2, 3]), [4, 4, 2, 2], 2, costs=[7, 7, 3, 3], lengths=(8,))
    assert plain(found) == [(8, [[1, 2], [3, 0]])]
    # With a pack of one preference of 8 tokens, no exchange leaves both packs within their rows.
    found = assigned(bins([0, 1], [2]), [4, 4, 8], 2, costs=[7, 7, 8], lengths=(8,))
    assert plain(found) == [(8, [[0, 1], [2]])]


def test_remaining_packs_are_spread_over_all_ranks():
    found = assigned(bins([0], [1], [2, 3]), [8, 8, 5, 3], 2)
    assert plain(found) == [(8, [[0], [1]]), (6, [[2], [3]])]


def test_largest_goes_first_to_the_least_loaded():
    # 5 4 3 2 1 1 for three ranks: 5 | 4 | 3, then 2 after 3 (5 in all), 1 after 4 (5), and the last after the first
    found = assigned(bins([0, 2], [1, 3, 4, 5]), [5, 4, 3, 2, 1, 1], 3)
    assert plain(found) == [(6, [[0, 5], [1, 4], [2, 3]])]


def test_ranks_without_anything_get_an_empty_pack():
    assert plain(assigned(bins([0, 1]), [5, 3], 4)) == [(6, [[0], [1], [], []])]
    empty = lay_out([], [], length=256)
    assert (empty.token_ids.shape, empty.num_tokens, empty.num_pairs) == ((1, 256), 0, 0)


def test_a_round_has_packs_of_similar_cost_and_the_rank_with_the_lowest_total_gets_the_most_expensive():
    # 12 and 10 make one round, 9 and 8 the other, which comes first as it was packed first. After 9 | 8 the 12 goes to the
    # second rank.
    found = assigned(bins([0], [1], [2], [3]), [8] * 4, 2, costs=[9, 8, 10, 12])
    assert plain(found) == [(8, [[0], [1]]), (8, [[2], [3]])]
    found = assigned(bins([0], [1], [2], [3]), [8] * 4, 2, costs=[8, 12, 9, 10])
    assert plain(found) == [(8, [[2], [0]]), (8, [[3], [1]])]


def test_the_total_cost_of_a_rank_counts_all_rounds():
    # 12 | 11, then 4 | 10 (16 and 21 in all), then 3 | 1
    found = assigned(bins([0], [1], [2], [3], [4], [5]), [8] * 6, 2, costs=[12, 11, 10, 4, 3, 1])
    assert plain(found) == [(8, [[0], [1]]), (8, [[3], [2]]), (8, [[4], [5]])]


def test_the_cheapest_packs_are_those_left_over():
    # 2, 8 and 8 tokens: the two of 8 make a full round, so that rows of 2 do for the rest
    assert plain(assigned(bins([0], [1], [2, 3]), [2, 8, 5, 3], 2)) == [(8, [[1], [2, 3]]), (2, [[0], []])]


def test_a_full_round_is_spread_again_if_its_rows_get_shorter():
    # 8 and 2 tokens take rows of 8; as 5 and 3 + 2 rows of 6
    assert plain(assigned(bins([0, 1], [2]), [5, 3, 2], 2)) == [(6, [[0], [1, 2]])]
    # 8 and 5 tokens do not get shorter: 5 + 3 either way, so they stay as packed
    assert plain(assigned(bins([1, 0], [2]), [3, 5, 5], 2)) == [(8, [[1, 0], [2]])]


def test_packs_that_cannot_be_spread_within_a_row_stay_as_they_are():
    # Six of 5, six of 4 and nine of 3 tokens fill nine rows of 9. Spread over ten ranks, 5 4 4 3 3 ... comes to 5 + 3
    # (six times), 4 + 4 (twice) and 4 + 3 (twice) with one 3 left, which makes 10.
    sizes = [5, 4] * 6 + [3] * 9
    packed = [[2 * i, 2 * i + 1] for i in range(6)] + [[12 + 3 * i, 13 + 3 * i, 14 + 3 * i] for i in range(3)]
    assert plain(assigned(bins(*packed), sizes, 10, lengths=(3, 6, 9))) == [(9, [*packed, []])]
    # One 3 fewer, and they can.
    packed[-1].pop()
    [(length, packs)] = plain(assigned(bins(*packed), sizes[:-1], 10, lengths=(3, 6, 9)))
    assert (length, sorted(sum(sizes[i] for i in pack) for pack in packs)) == (9, [7, 7, 8, 8, 8, 8, 8, 8, 8, 8])


def test_a_preference_longer_than_a_row_is_alone_on_its_rank():
    # 11 tokens take several rows of 8; the others, 3 + 2 + 2, go to the second rank
    assert plain(assigned(bins([1, 2, 3], [0]), [11, 3, 2, 2], 2)) == [(8, [[0], [1, 2, 3]])]
    assert plain(assigned(bins([1, 2, 3], [0]), [11, 3, 2, 2], 4)) == [(8, [[0], [1], [2], [3]])]


@pytest.mark.parametrize("repack", [False, True])
def test_no_packs_make_no_rounds(repack):
    assert assigned(Bins(np.zeros(0, np.int64), np.zeros(1, np.int64)), [], 3, repack=repack) == []


SIXTEENTHS = (4, 9, 13, 15, 16)


def test_the_last_rounds_are_repacked_in_shorter_rows():
    # 12 + 4 and 1 take rows of 16 and 4, 12 + 1 and 4 only of 13 and 4
    packed = bins([0, 1], [2])
    assert plain(assigned(packed, [12, 4, 1], 1, lengths=SIXTEENTHS)) == [(16, [[0, 1]]), (4, [[2]])]
    assert plain(assigned(packed, [12, 4, 1], 1, lengths=SIXTEENTHS, repack=True)) == [(13, [[0, 2]]), (4, [[1]])]
    # 10 + 6 and 3 stay: neither 10 + 3 and 6 (13 and 9) nor 6 + 3 and 10 (9 and 13) is shorter
    assert plain(assigned(packed, [10, 6, 3], 1, lengths=SIXTEENTHS, repack=True)) == [(16, [[0, 1]]), (4, [[2]])]


def test_a_round_that_is_no_longer_needed_is_removed():
    # 6 and 6 in two rows of 9: of 13 and 4 the first holds both
    assert plain(assigned(bins([0], [1]), [6, 6], 1, lengths=SIXTEENTHS, repack=True)) == [(13, [[0, 1]])]


def test_every_rank_has_rows_of_the_shorter_length():
    # two ranks: 12 + 4 | 11 + 5, then 1 | 2
    packed = bins([0, 1], [2, 3], [4], [5])
    found = assigned(packed, [12, 4, 11, 5, 1, 2], 2, lengths=(4, 5, 13, 16), repack=True)
    assert plain(found) == [(13, [[0, 4], [2, 5]]), (5, [[3], [1]])]


def test_of_row_lengths_with_the_same_total_the_more_equal_are_chosen():
    # 9 + 6, 9 + 6 and 3, in rows of 15 15 4 as packed, are 33 tokens; 16 13 4 come to 33 as well, and 15 9 9
    found = assigned(bins([0, 1], [2, 3], [4]), [9, 6, 9, 6, 3], 1, lengths=SIXTEENTHS, repack=True)
    assert [length for length, _ in plain(found)] == [15, 9, 9]


def test_only_the_last_three_rounds_are_repacked():
    packed = [[0, 1], [2, 3], [4, 5], [6, 7], [8]]
    found = assigned(bins(*packed), [8, 8] * 3 + [12, 4, 1], 1, lengths=SIXTEENTHS, repack=True)
    assert plain(found) == [(16, [[0, 1]]), (16, [[2, 3]]), (16, [[4, 5]]), (13, [[6, 8]]), (4, [[7]])]


def test_a_preference_longer_than_a_row_is_never_packed_with_others():
    found = assigned(bins([0, 1], [2], [3]), [12, 4, 1, 30], 1, lengths=SIXTEENTHS, repack=True)
    assert plain(found) == [(16, [[3]]), (13, [[0, 2]]), (4, [[1]])]


# Properties


@settings(deadline=None)
@given(batches(), st.booleans())
def test_every_preference_goes_to_exactly_one_rank(batch, repack):
    packer, chosen, ranks = batch
    packs = [pack for round in rounds_of(packer, chosen, ranks, repack=repack) for pack in round.packs]
    assert sorted(np.concatenate(packs).tolist()) == chosen.tolist()


@settings(deadline=None)
@given(batches())
def test_repacked_rounds_hold_their_preferences_and_are_not_more_or_longer_in_total(batch):
    packer, chosen, ranks = batch
    as_packed, repacked = (rounds_of(packer, chosen, ranks, repack=how) for how in (False, True))
    assert len(repacked) <= len(as_packed)
    assert sum(round.length for round in repacked) <= sum(round.length for round in as_packed)
    for round in repacked:
        assert len(round.packs) == ranks and any(map(len, round.packs))
        assert round.length == max(packer.row_length(pack) for pack in round.packs)
        longest = round.length == packer.length
        assert all(packer.sizes[pack].sum() <= round.length or (len(pack) == 1 and longest) for pack in round.packs)
    assert [round.length for round in repacked] == sorted((round.length for round in repacked), reverse=True)


@settings(deadline=None)
@given(batches())
def test_every_round_has_a_pack_for_each_rank_in_the_shortest_rows_that_hold_all(batch):
    packer, chosen, ranks = batch
    found = rounds_of(packer, chosen, ranks)
    assert len(found) == -(-len(packer.bins(chosen)) // ranks)
    for round in found:
        assert len(round.packs) == ranks
        assert round.length == max(packer.row_length(pack) for pack in round.packs)
        assert all(packer.sizes[pack].sum() <= round.length or len(pack) == 1 for pack in round.packs)
    assert [round.length for round in found] == sorted((round.length for round in found), reverse=True)


@settings(deadline=None)
@given(batches())
def test_ranks_differ_by_no_more_than_packs_of_one_round_do(batch):
    packer, chosen, ranks = batch
    costs = packer.sizes + packer.sizes**2 / 1000
    table = np.array([[costs[p].sum() for p in round.packs] for round in rounds_of(packer, chosen, ranks)])
    assert np.ptp(table.sum(0)) <= np.ptp(table, axis=1).max() + 1e-6


@settings(deadline=None)
@given(batches())
def test_a_pack_is_empty_only_where_there_are_fewer_preferences_than_ranks_or_they_fill_the_longest_rows(batch):
    packer, chosen, ranks = batch
    for round in rounds_of(packer, chosen, ranks):
        if any(len(pack) == 0 for pack in round.packs):
            assert sum(map(len, round.packs)) < ranks or round.length == packer.length


@settings(deadline=None)
@given(batches())
def test_one_rank_gets_the_packs_of_the_packer_in_its_order(batch):
    packer, chosen, _ = batch
    in_order = sorted(packer.bins(chosen), key=packer.row_length, reverse=True)
    assert plain(rounds_of(packer, chosen, 1)) == [(packer.row_length(bin), [bin.tolist()]) for bin in in_order]


# Costs


def test_a_row_costs_its_tokens_and_the_pairs_attention_computes():
    # 9 tokens; 1+2+3+4 = 10 pairs in the prompt, 5+6 = 11 and 5+6+7 = 18 in the completions: 39, a sixth of one each
    cost = row_cost(np.array([4]), np.array([2, 3]), np.array([2]), hidden_size=1)
    assert cost.tolist() == [9 + 39 / 6]
    assert row_cost(np.array([4]), np.array([2, 3]), np.array([2]), hidden_size=10).tolist() == [9 + 39 / 60]


def test_a_repeated_prompt_costs_as_its_sequences_do():
    # sequences of 6 and 7: 13 tokens, 21 + 28 pairs
    cost = row_cost(np.array([4]), np.array([2, 3]), np.array([2]), hidden_size=1, arrangement="repeated")
    assert cost.tolist() == [13 + 49 / 6]


def test_each_preference_has_its_own_completions():
    prompts, lengths, counts = np.array([4, 1, 2]), np.array([2, 3, 1, 1, 5, 2]), np.array([2, 3, 1])
    together = row_cost(prompts, lengths, counts, hidden_size=7)
    alone = [row_cost(np.array([4]), np.array([2, 3]), np.array([2]), hidden_size=7)]
    alone += [row_cost(np.array([1]), np.array([1, 1, 5]), np.array([3]), hidden_size=7)]
    alone += [row_cost(np.array([2]), np.array([2]), np.array([1]), hidden_size=7)]
    assert together.tolist() == pytest.approx(np.concatenate(alone).tolist())


@settings(deadline=None)
@given(st.integers(1, 30), st.lists(st.integers(1, 30), min_size=1, max_size=4))
def test_pairs_are_those_the_rule_of_attention_allows(prompt, completions):
    branch = np.repeat(np.arange(len(completions) + 1), [prompt, *completions])
    causal = np.tri(len(branch), dtype=bool)
    allowed = causal & ((branch == 0)[None, :] | (branch[:, None] == branch[None, :]))
    cost = row_cost(np.array([prompt]), np.array(completions), np.array([len(completions)]), hidden_size=1)
    assert cost[0] == pytest.approx(len(branch) + allowed.sum() / 6)


@pytest.fixture(scope="module")
def simulation():
    """benchmarks/scale.py, with the modules next to it."""
    folder = str(Path(__file__).parents[3] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        import scale

        return scale
    finally:
        sys.path.remove(folder)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("method", ["batch", "batch, auto"])
def test_64_ranks_wait_for_each_other_for_less_than_three_percent(simulation, method, seed):
    """Batches of 1,024 pairs with log-normal lengths. Ranks wait in every round, also those that have only filler in it."""
    pairs = simulation.log_normal(4096, seed)
    run = simulation.Simulation(pairs, ranks=64, pairs_per_batch=1024, pack_length=8192, hidden_size=1536)
    found = simulation.measures(run.steps(method, 4))
    assert found["by round"] < 0.03
    assert found["useful"] > 0.93
