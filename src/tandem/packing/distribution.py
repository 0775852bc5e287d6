"""Distributes the packs of a global batch over the ranks, in rounds. In each round, every rank computes one pack."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import combinations_with_replacement

import numpy as np
from numpy.typing import NDArray

from tandem.packing.binning import Bins
from tandem.packing.layout import Arrangement, IntArray

FloatArray = NDArray[np.float64]

# How many rounds at the end may be packed again, and how many combinations of row lengths are tried for them.
LAST_ROUNDS = 3
NUM_TRIES = 8
# How many exchanges per rank even out a round, and with how many of the cheapest packs one is tried.
EXCHANGES_PER_RANK = 4
NUM_PARTNERS = 8
SMALLEST_GAIN = 1e-6  # of an exchange, as a share of the cost of the most expensive pack; less may be rounding


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """One pack for each rank. All packs of a round have the same row length."""

    length: int
    packs: tuple[IntArray, ...]  # [ranks], the preferences of each pack; a pack without preferences is all filler


def row_cost(
    prompts: IntArray,
    completion_lengths: IntArray,
    num_completions: IntArray,
    *,
    hidden_size: int,
    arrangement: Arrangement = "shared",
) -> FloatArray:
    """Estimate the compute that each preference adds to its row: [preferences]. The unit is one token through the linear layers.

    `completion_lengths`: the completion lengths of all preferences, in order. `num_completions`: completions of each preference.
    A layer's matrices have about 12 * hidden_size^2 weights, each with 2 operations per token. A (query, key) pair takes
    4 * hidden_size operations, half for the score and half for the value, so a pair costs 1 / (6 * hidden_size) of the unit.

    Example: a prompt of 4 tokens with completions of 2 and 3 has 9 tokens and 10 + (8 + 3) + (12 + 6) = 39 (query, key) pairs.
    If every completion has its own copy of the prompt (arrangement repeated), there are 13 tokens and 21 + 28 = 49 pairs.
    """
    owner = np.repeat(np.arange(len(prompts)), num_completions)
    own_pairs = completion_lengths * (prompts[owner] + (completion_lengths + 1) / 2)
    num_prompts = 1 if arrangement == "shared" else num_completions
    tokens = num_prompts * prompts + np.bincount(owner, completion_lengths, len(prompts))
    pairs = num_prompts * prompts * (prompts + 1) / 2 + np.bincount(owner, own_pairs, len(prompts))
    return tokens + pairs / (6 * hidden_size)


def assign_to_ranks(
    bins: Bins,
    sizes: IntArray,
    costs: FloatArray,
    *,
    lengths: Sequence[int],
    num_ranks: int,
    repack: bool = False,
) -> list[Round]:
    """Assign every preference to one rank. Return rounds with one pack per rank.

    The packs of a round have similar costs, because ranks wait for each other in every round. The most expensive pack of a round
    goes to the rank with the lowest total cost so far. If a round has fewer packs than ranks, the preferences of the round are
    spread over all ranks. The row length of a round is the shortest of the `lengths` that holds the largest pack of the round.
    Rounds with longer rows come first. With `repack`, the last rounds are packed again if that makes their total row length
    shorter. Then the packs of each round exchange preferences, so that their costs differ less.

    Example: preferences of size (and cost) 8 8 5 3 in bins [0] [1] [2 3], lengths 2 4 6 8, two ranks.
    Result: one round with packs [0] | [1] in rows of 8, then one round with packs [2] | [3] in rows of 6.
    """
    packs = list(bins)
    by_cost = sorted(range(len(packs)), key=lambda number: -costs[packs[number]].sum())
    groups = [by_cost[start : start + num_ranks] for start in range(0, len(packs), num_ranks)]
    rounds = [
        _make_round([packs[number] for number in group], sizes, lengths, num_ranks) for group in sorted(groups, key=min)
    ]
    rounds.sort(key=lambda round: -round.length)
    if repack:
        rounds = _repack_last_rounds(rounds, sizes, lengths, num_ranks)
    if num_ranks > 1:
        rounds = [_even_out(round, sizes, costs - sizes) for round in rounds]
    return _balance_costs(rounds, costs, num_ranks)


def _make_round(packs: list[IntArray], sizes: IntArray, lengths: Sequence[int], num_ranks: int) -> Round:
    """Make a round from packs.

    If there are fewer packs than ranks, or if it makes rows shorter, spread the preferences of the packs over all ranks.
    Examples for two ranks: one pack with preferences of 4 and 3 tokens becomes 4 | 3. Two packs, of 5 + 3 and of 2 tokens, become
    5 | 3 + 2 if 5 is one of the `lengths`.
    """
    nothing = np.zeros(0, np.int64)
    as_packed = packs + [nothing] * (num_ranks - len(packs))
    length = _shortest_length(as_packed, sizes, lengths)
    assert length is not None, "a pack of several preferences is longer than a row"
    spread = _spread(np.concatenate(packs), sizes, num_ranks)
    spread_length = _shortest_length(spread, sizes, lengths)
    if spread_length is not None and (len(packs) < num_ranks or spread_length < length):
        return Round(spread_length, tuple(spread))
    return Round(length, tuple(as_packed))


def _shortest_length(packs: list[IntArray], sizes: IntArray, lengths: Sequence[int]) -> int | None:
    """Return the shortest of the `lengths` that holds the largest pack.

    Return None if a pack of several preferences exceeds all `lengths`. A pack of one preference may exceed all `lengths`, because
    such a preference takes several rows.
    """
    longest = lengths[-1]
    totals = [int(sizes[pack].sum()) for pack in packs]
    if any(total > longest and len(pack) > 1 for total, pack in zip(totals, packs, strict=True)):
        return None
    return next(length for length in lengths if length >= min(max(totals), longest))


def _spread(preferences: IntArray, sizes: IntArray, num_ranks: int) -> list[IntArray]:
    """Give each preference, largest first, to the rank with the fewest tokens so far.

    Example: sizes 5 4 3 3 and two ranks give 5 3 | 4 3.
    """
    given: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for preference in preferences[np.argsort(-sizes[preferences], kind="stable")].tolist():
        load, rank = loads[0]
        given[rank].append(preference)
        heapreplace(loads, (load + int(sizes[preference]), rank))
    return [np.array(chosen, np.int64) for chosen in given]


def _repack_last_rounds(rounds: list[Round], sizes: IntArray, lengths: Sequence[int], num_ranks: int) -> list[Round]:
    """Pack the last rounds again, with the smallest total row length that works.

    Of equal totals, prefer row lengths that differ less.
    Example: one rank, row lengths 4 9 13 15 16. Two rounds of 15 + 1 and 3 tokens take rows of 16 and 4. They are repacked as
    rounds of 15 and 3 + 1 tokens, which take rows of 15 and 4.
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
            again = [_make_round(round, sizes, lengths, num_ranks) for round in made if any(map(len, round))]
            return sorted(kept + again, key=lambda round: -round.length)
    return rounds


def _best_fit(preferences: IntArray, sizes: IntArray, rooms: list[int]) -> list[IntArray] | None:
    """Put each preference, largest first, in the pack where it leaves the least room. Return None if a preference does not fit.

    `rooms`: the capacity of each pack. Example: sizes 5 4 3 2 and rooms 9 and 6 give the packs 4 3 2 | 5.
    """
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


@dataclass(frozen=True, slots=True, eq=False)
class _Exchanges:
    """The packs of a round while they exchange preferences, and what each preference and each pack costs."""

    length: int
    packs: list[list[int]]
    sizes: IntArray
    attention: FloatArray  # of each preference: its cost without its tokens
    tokens: IntArray  # of each pack
    totals: FloatArray  # attention of each pack

    def improve(self, heavy: int, light: int) -> bool:
        """Make the exchange between two packs that lowers the attention of the more expensive one most.

        Return whether there is one: a preference of the heavy pack for one of the light pack, or for nothing.
        """
        mine, theirs = self.packs[heavy], self.packs[light]
        cost = self.attention[mine][:, None] - np.append(self.attention[theirs], 0.0)
        size = self.sizes[mine][:, None] - np.append(self.sizes[theirs], 0)
        higher = np.maximum(self.totals[heavy] - cost, self.totals[light] + cost)
        fits = (self.tokens[light] + size <= self.length) & (self.tokens[heavy] - size <= self.length)
        higher[~fits] = np.inf
        if not mine or higher.min() >= self.totals[heavy] * (1 - SMALLEST_GAIN):
            return False
        given, taken = divmod(int(higher.argmin()), higher.shape[1])
        one = mine.pop(given)
        if taken < len(theirs):
            mine.append(theirs.pop(taken))
        theirs.append(one)
        for pack in (heavy, light):
            self.tokens[pack] = self.sizes[self.packs[pack]].sum()
            self.totals[pack] = self.attention[self.packs[pack]].sum()
        return True


def _even_out(round: Round, sizes: IntArray, attention: FloatArray) -> Round:
    """Exchange preferences between the most expensive pack and one of the cheapest, until that pack cannot get cheaper.

    All packs have the row length of the round, so that their costs differ in attention only.
    Example: packs with sizes 4 4 and 2 2 and attention 3 3 and 1 1, in rows of 8, become 4 2 and 2 4, with attention 4 and 4.
    """
    packs = [pack.tolist() for pack in round.packs]
    tokens, totals = (np.array([of[pack].sum() for pack in round.packs]) for of in (sizes, attention))
    several_rows = tokens > round.length  # one preference, which cannot be exchanged
    exchanges = _Exchanges(round.length, packs, sizes, attention, tokens, totals)
    for _ in range(EXCHANGES_PER_RANK * len(packs)):
        heavy = int(np.where(several_rows, -np.inf, totals).argmax())
        cheapest = np.where(several_rows, np.inf, totals).argsort(kind="stable")[:NUM_PARTNERS].tolist()
        partners = [pack for pack in cheapest if pack != heavy and not several_rows[pack]]
        if several_rows[heavy] or not any(exchanges.improve(heavy, light) for light in partners):
            break
    return Round(round.length, tuple(np.array(pack, np.int64) for pack in packs))


def _balance_costs(rounds: list[Round], costs: FloatArray, num_ranks: int) -> list[Round]:
    """Reorder the packs of each round: the most expensive pack goes to the rank with the lowest total cost so far.

    Example: two rounds with packs of cost 5 3 and 4 1, for two ranks, become 5 | 3 and 1 | 4.
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
