"""The packs of a global batch in; the rounds in which the ranks compute them out, one pack per rank in each round."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import combinations_with_replacement

import numpy as np
from numpy.typing import NDArray

from tandem.packing.binning import Bins
from tandem.packing.layout import Arrangement

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

# Rounds that may be packed again, and ways of doing it that are tried.
LAST_ROUNDS = 3
NUM_TRIES = 8


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """One pack for every rank, all in rows of one length."""

    length: int
    packs: tuple[IntArray, ...]  # [ranks], the preferences of each; none of them: an empty pack, all filler


def row_cost(
    prompts: IntArray,
    completion_lengths: IntArray,
    num_completions: IntArray,
    *,
    hidden_size: int,
    arrangement: Arrangement = "shared",
) -> FloatArray:
    """What each preference adds to the cost of its row, counted in tokens through the linear layers: [preferences].

    A token costs 1, and a pair of a query and a key it may see 1 / (6 * hidden_size): a layer's matrices hold about
    12 * hidden_size^2 weights, 2 operations each a token, and a pair takes 4 * hidden_size operations, half of them for
    the score and half for the value. `completion_lengths` are stored one after another, `num_completions` to a preference.

    A prompt of 4 with completions of 2 and 3 is 9 tokens and 10 + (8 + 3) + (12 + 6) = 39 pairs. With the prompt
    repeated it is 13 tokens and 21 + 28 = 49 pairs.
    """
    owner = np.repeat(np.arange(len(prompts)), num_completions)
    own_pairs = completion_lengths * (prompts[owner] + (completion_lengths + 1) / 2)
    times = 1 if arrangement == "shared" else num_completions
    tokens = times * prompts + np.bincount(owner, completion_lengths, len(prompts))
    pairs = times * prompts * (prompts + 1) / 2 + np.bincount(owner, own_pairs, len(prompts))
    return tokens + pairs / (6 * hidden_size)


def share_out(
    bins: Bins,
    sizes: IntArray,
    costs: FloatArray,
    *,
    lengths: Sequence[int],
    num_ranks: int,
    tightly: bool = False,
) -> list[Round]:
    """Every preference to one rank, in as many rounds as it takes when each has one pack for every rank.

    Packs of similar cost are in one round, since ranks wait for one another there; the costliest of a round goes to the
    rank with the least so far. What is left over, fewer packs than ranks, is distributed again over all of them. A round's
    rows have the shortest of the `lengths` that holds its largest pack. Rounds of long rows come first, then as packed.
    `tightly` packs the last rounds again, in rows that are shorter in sum, where there are such.

    Sizes (and costs) 8 8 5 3 in bins [0] [1] [2 3], lengths 2 4 6 8, two ranks:
    [0] | [1] in rows of 8, then [2] | [3] in rows of 6
    """
    packs = list(bins)
    falling = sorted(range(len(packs)), key=lambda number: -costs[packs[number]].sum())
    groups = [falling[start : start + num_ranks] for start in range(0, len(packs), num_ranks)]
    rounds = [
        _round([packs[number] for number in group], sizes, lengths, num_ranks) for group in sorted(groups, key=min)
    ]
    rounds.sort(key=lambda round: -round.length)
    if tightly:
        rounds = _tightened(rounds, sizes, lengths, num_ranks)
    return _balanced(rounds, costs, num_ranks)


def _round(packs: list[IntArray], sizes: IntArray, lengths: Sequence[int], num_ranks: int) -> Round:
    """The packs as they are, or distributed again where some rank would have none or rows can be shorter for it.

    One of 7 tokens, as 4 + 3, for two ranks: 4 | 3. Two of 8 (5 + 3) and 2 tokens: 5 | 3 + 2, if rows of 5 exist.
    """
    nothing = np.zeros(0, np.int64)
    as_packed = packs + [nothing] * (num_ranks - len(packs))
    length = _shortest(as_packed, sizes, lengths)
    assert length is not None, "a pack of several preferences is longer than a row"
    spread = _spread(np.concatenate(packs), sizes, num_ranks)
    spread_length = _shortest(spread, sizes, lengths)
    if spread_length is not None and (len(packs) < num_ranks or spread_length < length):
        return Round(spread_length, tuple(spread))
    return Round(length, tuple(as_packed))


def _shortest(packs: list[IntArray], sizes: IntArray, lengths: Sequence[int]) -> int | None:
    """The shortest row that holds each pack, if one does. A preference alone may be longer: it has several rows."""
    longest = lengths[-1]
    totals = [int(sizes[pack].sum()) for pack in packs]
    if any(total > longest and len(pack) > 1 for total, pack in zip(totals, packs, strict=True)):
        return None
    return next(length for length in lengths if length >= min(max(totals), longest))


def _spread(preferences: IntArray, sizes: IntArray, num_ranks: int) -> list[IntArray]:
    """Largest first, each to the rank with the fewest tokens: sizes 5 4 3 3 for two ranks -> 5 3 | 4 3."""
    given: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for preference in preferences[np.argsort(-sizes[preferences], kind="stable")].tolist():
        load, rank = loads[0]
        given[rank].append(preference)
        heapreplace(loads, (load + int(sizes[preference]), rank))
    return [np.array(chosen, np.int64) for chosen in given]


def _tightened(rounds: list[Round], sizes: IntArray, lengths: Sequence[int], num_ranks: int) -> list[Round]:
    """The last rounds in rows of the least sum that is found to hold them; of like sums, that of more equal rows.

    Rows may be 4 9 13 15 16. One rank's rounds of 15 + 1 and 3 tokens take 16 + 4; of 15 and 3 + 1 they take 15 + 4.
    """
    longer = [round for round in rounds if any(sizes[pack].sum() > lengths[-1] for pack in round.packs)]
    others = [round for round in rounds if round not in longer]
    kept, last = longer + others[:-LAST_ROUNDS], others[-LAST_ROUNDS:]
    preferences = np.concatenate([pack for round in last for pack in round.packs] or [np.zeros(0, np.int64)])
    tokens, so_far = int(sizes[preferences].sum()), sum(round.length for round in last)
    choices = [
        choice
        for choice in combinations_with_replacement(reversed(lengths), len(last))
        if tokens <= num_ranks * sum(choice) < num_ranks * so_far
    ]
    for choice in sorted(choices, key=lambda choice: (sum(choice), -min(choice)))[:NUM_TRIES]:
        rooms = np.repeat(choice, num_ranks)
        if packs := _best_fit(preferences, sizes, rooms.tolist()):
            made = [packs[start : start + num_ranks] for start in range(0, len(packs), num_ranks)]
            again = [_round(round, sizes, lengths, num_ranks) for round in made if any(map(len, round))]
            return sorted(kept + again, key=lambda round: -round.length)
    return rounds


def _best_fit(preferences: IntArray, sizes: IntArray, rooms: list[int]) -> list[IntArray] | None:
    """Largest first, each to where it leaves the least room, if there is room: sizes 5 4 3 2 in 9 and 6 -> 4 3 2 | 5"""
    given: list[list[int]] = [[] for _ in rooms]
    free = sorted((room, pack) for pack, room in enumerate(rooms))
    for preference in preferences[np.argsort(-sizes[preferences], kind="stable")].tolist():
        size = int(sizes[preference])
        place = bisect_left(free, (size, -1))
        if place == len(free):
            return None
        room, pack = free.pop(place)
        given[pack].append(preference)
        insort(free, (room - size, pack))
    return [np.array(chosen, np.int64) for chosen in given]


def _balanced(rounds: list[Round], costs: FloatArray, num_ranks: int) -> list[Round]:
    """Reorder the packs of each round: the costliest pack goes to the rank with the lowest total cost so far.

    Costs 5 3 and 4 1 for two ranks: 5 | 3, then 1 | 4
    """
    totals = np.zeros(num_ranks)
    balanced: list[Round] = []
    for round in rounds:
        cost = np.array([costs[pack].sum() for pack in round.packs])
        order = np.zeros(num_ranks, np.int64)
        order[np.argsort(totals, kind="stable")] = np.argsort(-cost, kind="stable")
        totals += cost[order]
        balanced.append(Round(round.length, tuple(round.packs[number] for number in order)))
    return balanced
