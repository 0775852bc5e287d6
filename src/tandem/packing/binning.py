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
    """The items of every bin, as item indices: the bins [[1, 0], [2, 3, 4]] are stored as order 1 0 2 3 4, bounds 0 2 5."""

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
    """Place items from largest to smallest, each in the first bin with enough room. Items of equal size keep their order.

    Example: sizes [3, 7, 5, 4] and capacity 10 give the bins [[1, 0], [2, 3]].
    """
    sizes = _check_sizes(sizes, capacity)
    return _first_fit(sizes, _largest_first(sizes), capacity)


def first_fit_shuffle(sizes: Sizes, capacity: int, seed: int) -> Bins:
    """Place items in a random order, each in the first bin with enough room. `seed` determines the order.

    Bins are slightly less full than with first_fit_decreasing, but each bin holds a mix of sizes.
    Example: sizes [3, 7, 5, 4], capacity 10 and random order 2 0 1 3 give the bins [[2, 0], [1], [3]].
    """
    sizes = _check_sizes(sizes, capacity)
    return _first_fit(sizes, np.random.default_rng(seed).permutation(len(sizes)), capacity)


def exact_fit_decreasing(sizes: Sizes, capacity: int) -> Bins:
    """Fill one bin after another with the largest remaining item and the remaining items that fill the rest of the bin best.

    This never takes more bins than first_fit_decreasing. Example: sizes [4, 4, 3, 3, 3, 3] and capacity 10 give two bins,
    [[0, 2, 3], [1, 4, 5]]; first_fit_decreasing takes three bins.
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
    """Pack items with the named algorithm. Only first_fit_shuffle uses the seed."""
    if algorithm == "first_fit_shuffle":
        return first_fit_shuffle(sizes, capacity, seed)
    return ALGORITHMS[algorithm](sizes, capacity)


def _check_sizes(sizes: Sizes, capacity: int) -> IntArray:
    sizes = np.asarray(sizes, np.int64)
    if len(sizes) and sizes.max() > capacity:
        raise ValueError(f"an item of size {sizes.max()} does not fit in a bin of capacity {capacity}")
    if len(sizes) and sizes.min() < 1:
        raise ValueError(f"an item has size {sizes.min()}, but sizes must be at least 1")
    return sizes


def _largest_first(sizes: IntArray) -> IntArray:
    return np.argsort(-sizes, kind="stable")


def _to_bins(order: IntArray, bin_of: Sequence[int] | IntArray) -> Bins:
    """Return the Bins in which items were placed. `order`: the items as placed. `bin_of`: the bin of each item in `order`.

    Example: order 1 2 0 3 and bin_of 0 1 0 1 are returned as order 1 0 2 3, bounds 0 2 4.
    """
    bins = np.asarray(bin_of, np.int64)
    bounds = np.concatenate([[0], np.cumsum(np.bincount(bins))])
    return Bins(order[np.argsort(bins, kind="stable")], bounds)


# First fit


def _first_fit(sizes: IntArray, order: IntArray, capacity: int) -> Bins:
    """Place items in the given order, each in the first bin with enough room, or in a new bin.

    Most items go to the newest bin, so the room in the newest bin is kept in a variable. Older bins are searched only if at least
    one of them has enough room.
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
    """The room left in each older bin, as a binary tree.

    The leaves are bins; node k holds the larger value of nodes 2k and 2k + 1.
    Example: bins 0, 1 and 2 with room for 3, 0 and 5. A leaf without a bin holds -1.

        node 1              5
        nodes 2 3       3       5
        nodes 4-7     3   0   5  -1
    """

    def __init__(self, max_bins: int):
        self.num_leaves = 1 << (max_bins - 1).bit_length()
        self.rooms = [-1] * (2 * self.num_leaves)
        self.most_room = -1

    def place(self, size: int) -> int:
        """Put an item in the first bin with enough room, and return the index of that bin.

        At least one bin must have enough room.
        """
        rooms, num_leaves, node = self.rooms, self.num_leaves, 1
        while node < num_leaves:
            node *= 2
            if rooms[node] < size:
                node += 1
        self.set_room(node - num_leaves, rooms[node] - size)
        return node - num_leaves

    def set_room(self, bin: int, room: int) -> None:
        """Set the room left in a bin. The bin may be new."""
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

    Items of equal size are interchangeable, so only the number of items of each size matters. The best filling of one bin is also
    the best filling of the next bin, so the filling is repeated until one of its sizes runs out.
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
    """Return the bin of each item, for items from largest to smallest.

    `rows`: (size, copies in each bin, first bin, number of bins). Example: (4, 1, 0, 2) and (3, 2, 0, 2) describe bins 0 and 1,
    each with one item of size 4 and two items of size 3. Result: 0 1 (items of size 4), then 0 0 1 1 (items of size 3).
    """
    size, copies, first_bin, num_bins = np.array(rows, np.int64).reshape(-1, 4).T
    by_size = np.argsort(-size, kind="stable")
    num_items = (copies * num_bins)[by_size]
    row_start = np.cumsum(num_items) - num_items
    within_row = np.arange(num_items.sum()) - np.repeat(row_start, num_items)
    return np.repeat(first_bin[by_size], num_items) + within_row // np.repeat(copies[by_size], num_items)


def _filling(distinct: list[int], left: dict[int, int], capacity: int) -> dict[int, int]:
    """Return how many items of each size go into the next bin: one of the largest size, and the items that fill the rest best."""
    largest = distinct[-1]
    room = capacity - largest
    left[largest] -= 1
    available = [(size, min(left[size], room // size)) for size in _candidates(distinct, room)]
    left[largest] += 1
    filling = _fullest([(size, copies) for size, copies in available if copies], room)
    filling[largest] = filling.get(largest, 0) + 1
    return filling


def _candidates(distinct: list[int], room: int) -> list[int]:
    """Return the sizes that fit in the room, largest first.

    If there are more than NUM_CANDIDATES, return an evenly spread selection.
    """
    num = bisect_right(distinct, room)
    if num <= NUM_CANDIDATES:
        return distinct[:num][::-1]
    # 7 sizes, 4 candidates: positions 6 4 2 0
    return [distinct[i * (num - 1) // (NUM_CANDIDATES - 1)] for i in reversed(range(NUM_CANDIDATES))]


def _fullest(available: list[tuple[int, int]], room: int) -> dict[int, int]:
    """Return how many copies of each size come closest to filling the room (subset sum).

    Earlier sizes in `available` are preferred.
    `available`: (size, number of copies). The sums that can be reached are stored as the bits of an integer, which starts as 1:
    only the sum 0. An item of size 3 makes the integer binary 1001 (sums 0 and 3), a second item makes it 1001001 (0, 3 and 6).
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
    """Split the copies of each size into lots, so that any number of copies is a sum of lots.

    Example: 6 copies are split into lots of 1, 2 and 3.
    """
    for size, copies in available:
        lot = 1
        while copies:
            lot = min(lot, copies)
            yield size, lot
            copies -= lot
            lot *= 2
