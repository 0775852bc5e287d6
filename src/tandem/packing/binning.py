"""Bin packing: groups items of given sizes so that no bin exceeds the capacity."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.packing.layout import IntArray

Sizes = Sequence[int] | NDArray[np.integer]

# An exact fit considers at most this many distinct sizes, spread over all that fit. With 128 instead of 64, packing a million
# realistic lengths saved at most two of 179,414 bins.
NUM_CANDIDATES = 64


@dataclass(frozen=True, slots=True, eq=False)
class Bins:
    """Indices of items, bin by bin: [[1, 0], [2, 3, 4]] is stored as order 1 0 2 3 4, bounds 0 2 5."""

    order: IntArray  # [items]
    bounds: IntArray  # [bins + 1]; bin i is order[bounds[i] : bounds[i + 1]]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> IntArray:
        index = range(len(self))[index]
        return self.order[self.bounds[index] : self.bounds[index + 1]]

    def __iter__(self) -> Iterator[IntArray]:
        return (self[i] for i in range(len(self)))


def first_fit_decreasing(sizes: Sizes, capacity: int) -> Bins:
    """Place items from largest to smallest, each in the first bin with room. Items of equal size keep their order.

    sizes [3, 7, 5, 4], capacity 10 -> [[1, 0], [2, 3]]
    """
    sizes = _check_sizes(sizes, capacity)
    return _first_fit(sizes, _largest_first(sizes), capacity)


def first_fit_shuffle(sizes: Sizes, capacity: int, seed: int) -> Bins:
    """Place items in a random order, given by the seed, each in the first bin with room.

    Bins are slightly less full than with first fit decreasing, but each holds a mix of sizes.
    sizes [3, 7, 5, 4], capacity 10, random order 2 0 1 3 -> [[2, 0], [1], [3]]
    """
    sizes = _check_sizes(sizes, capacity)
    return _first_fit(sizes, np.random.default_rng(seed).permutation(len(sizes)), capacity)


def exact_fit_decreasing(sizes: Sizes, capacity: int) -> Bins:
    """Fill one bin after another with the largest remaining item and those others that fill the bin best.

    Never takes more bins than first fit decreasing.
    sizes [4, 4, 3, 3, 3, 3], capacity 10 -> [[0, 2, 3], [1, 4, 5]], where first fit decreasing takes three bins
    """
    sizes = _check_sizes(sizes, capacity)
    order = _largest_first(sizes)
    bins = _to_bins(order, _exact_fit(sizes, capacity))
    fewest_possible = -(-int(sizes.sum()) // capacity)
    if len(bins) > fewest_possible:
        bins = min(bins, _first_fit(sizes, order, capacity), key=len)
    return bins


ALGORITHMS = {"first_fit_decreasing": first_fit_decreasing, "exact_fit_decreasing": exact_fit_decreasing}


def pack_into_bins(algorithm: str, sizes: Sizes, capacity: int, seed: int) -> Bins:
    """Pack with the algorithm of this name. Only first_fit_shuffle uses the seed."""
    if algorithm == "first_fit_shuffle":
        return first_fit_shuffle(sizes, capacity, seed)
    return ALGORITHMS[algorithm](sizes, capacity)


def _check_sizes(sizes: Sizes, capacity: int) -> IntArray:
    sizes = np.asarray(sizes, np.int64)
    if len(sizes) and sizes.max() > capacity:
        raise ValueError(f"a size of {sizes.max()} does not fit a bin of {capacity}")
    if len(sizes) and sizes.min() < 1:
        raise ValueError(f"a size of {sizes.min()} is below 1")
    return sizes


def _largest_first(sizes: IntArray) -> IntArray:
    return np.argsort(-sizes, kind="stable")


def _to_bins(order: IntArray, bin_of: Sequence[int] | IntArray) -> Bins:
    """Make Bins from the items in the order in which they were placed, and the bin of each.

    order 1 2 0 3 placed in bins 0 1 0 1 -> order 1 0 2 3, bounds 0 2 4
    """
    bins = np.asarray(bin_of, np.int64)
    bounds = np.concatenate([[0], np.cumsum(np.bincount(bins))])
    return Bins(order[np.argsort(bins, kind="stable")], bounds)


# First fit


def _first_fit(sizes: IntArray, order: IntArray, capacity: int) -> Bins:
    """Place items in the given order, each in the first bin with room, or in a new bin.

    Most items go to the newest bin, so its room is kept in a variable. Older bins are searched only if one has enough room.
    """
    # Two neighbouring bins together hold more than one capacity, or else the second bin's first item would be in the first
    # bin. This limits the number of bins.
    older = _OlderBins(max_bins=2 * int(sizes.sum()) // capacity + 1)
    newest, room = 0, capacity
    bin_of: list[int] = []
    for size in sizes[order].tolist():
        if size <= older.most_room:
            bin_of.append(older.place(size))
            continue
        if size > room:
            older.set_room(newest, room)
            newest, room = newest + 1, capacity
        room -= size
        bin_of.append(newest)
    return _to_bins(order, bin_of)


class _OlderBins:
    """The room left in each bin, in a binary tree: node k holds the larger value of its children 2k and 2k + 1.

    Bins 0, 1 and 2 with room for 3, 0 and 5 (-1: no bin yet):

        node 1              5
        nodes 2 3       3       5
        nodes 4-7     3   0   5  -1
    """

    def __init__(self, max_bins: int):
        self.num_leaves = 1 << (max_bins - 1).bit_length()
        self.rooms = [-1] * (2 * self.num_leaves)
        self.most_room = -1

    def place(self, size: int) -> int:
        """Put an item in the first bin with enough room, and return the bin. Some bin must have enough room."""
        rooms, num_leaves, node = self.rooms, self.num_leaves, 1
        while node < num_leaves:
            node *= 2
            if rooms[node] < size:
                node += 1
        self.set_room(node - num_leaves, rooms[node] - size)
        return node - num_leaves

    def set_room(self, bin: int, room: int) -> None:
        """Set the room left in a bin, which may be new."""
        rooms, node = self.rooms, bin + self.num_leaves
        rooms[node] = room
        while node > 1:
            sibling = rooms[node ^ 1]
            if sibling > room:
                room = sibling
            node //= 2
            if rooms[node] == room:
                break  # nothing changes further up
            rooms[node] = room
        self.most_room = rooms[1]


# Exact fit


def _exact_fit(sizes: IntArray, capacity: int) -> IntArray:
    """Return the bin of each item, for items from largest to smallest.

    Items of equal size are interchangeable, so only their number matters. The best way to fill one bin is also the best for the
    next bin, so it is repeated until one of its sizes runs out.
    """
    left = dict(enumerate(np.bincount(sizes).tolist()))
    distinct = [size for size, count in left.items() if count]
    rows: list[tuple[int, int, int, int]] = []
    num_bins = 0
    while distinct:
        filling = _filling(distinct, left, capacity)
        repeats = min(left[size] // copies for size, copies in filling.items())
        for size, copies in filling.items():
            rows.append((size, copies, num_bins, repeats))
            left[size] -= copies * repeats
            if not left[size]:
                del distinct[bisect_left(distinct, size)]
        num_bins += repeats
    return _expand(rows)


def _expand(rows: list[tuple[int, int, int, int]]) -> IntArray:
    """Expand rows of (size, copies in a bin, first bin, number of bins) to the bin of each item, from largest to smallest.

    (4, 1, 0, 2), (3, 2, 0, 2) -> 0 1 for the items of size 4, 0 0 1 1 for the items of size 3
    """
    size, copies, first_bin, num_bins = np.array(rows, np.int64).reshape(-1, 4).T
    by_size = np.argsort(-size, kind="stable")
    num_items = (copies * num_bins)[by_size]
    row_start = np.cumsum(num_items) - num_items
    within_row = np.arange(num_items.sum()) - np.repeat(row_start, num_items)
    return np.repeat(first_bin[by_size], num_items) + within_row // np.repeat(copies[by_size], num_items)


def _filling(distinct: list[int], left: dict[int, int], capacity: int) -> dict[int, int]:
    """Choose how many items of each size go into the next bin: one of the largest, and the others that fill the bin best."""
    largest = distinct[-1]
    room = capacity - largest
    left[largest] -= 1
    available = [(size, min(left[size], room // size)) for size in _candidates(distinct, room)]
    left[largest] += 1
    filling = _fullest([(size, copies) for size, copies in available if copies], room)
    filling[largest] = filling.get(largest, 0) + 1
    return filling


def _candidates(distinct: list[int], room: int) -> list[int]:
    """Return the sizes that fit in the room, largest first. Of many, return NUM_CANDIDATES, evenly spread."""
    num = bisect_right(distinct, room)
    if num <= NUM_CANDIDATES:
        return distinct[:num][::-1]
    # 7 sizes, 4 candidates: positions 6 4 2 0
    return [distinct[i * (num - 1) // (NUM_CANDIDATES - 1)] for i in reversed(range(NUM_CANDIDATES))]


def _fullest(available: list[tuple[int, int]], room: int) -> dict[int, int]:
    """Choose copies of each size whose sum comes closest to the room (subset sum). Prefers the first of the available sizes.

    The sums that can be reached are the bits of an integer. It starts as 1: bit 0, the empty sum. An item of size 3 makes it
    binary 1001, another one 1001001.
    """
    within_room = (1 << (room + 1)) - 1
    reached = [1]
    pieces: list[tuple[int, int]] = []
    for size, copies in _pieces(available):
        reached.append((reached[-1] | reached[-1] << size * copies) & within_room)
        pieces.append((size, copies))
        if reached[-1].bit_length() > room:
            break  # the bin can be filled completely
    total = reached[-1].bit_length() - 1
    filling: dict[int, int] = {}
    for (size, copies), before in zip(reversed(pieces), reversed(reached[:-1]), strict=True):
        if not before >> total & 1:
            total -= size * copies
            filling[size] = filling.get(size, 0) + copies
    return filling


def _pieces(available: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Split the copies of a size into lots that can make up any smaller number of copies: 6 copies into lots of 1, 2 and 3."""
    for size, copies in available:
        lot = 1
        while copies:
            lot = min(lot, copies)
            yield size, lot
            copies -= lot
            lot *= 2
