"""Sizes in; Bins out: which items go together, so that the sizes in no bin pass its capacity."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
Sizes = Sequence[int] | NDArray[np.integer]

# Distinct sizes an exact fit chooses from, spread over all that fit. Of a million realistic lengths, 128 in place of 64
# saved two bins in 179,414 at best.
NUM_CANDIDATES = 64


@dataclass(frozen=True, slots=True, eq=False)
class Bins:
    """Indices of items, bin by bin.

    [[1, 0], [2, 3, 4]] is order 1 0 2 3 4, bounds 0 2 5
    """

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
    """Largest first, each into the first bin with room. Ties keep their order, so the result is reproducible.

    sizes [3, 7, 5, 4], capacity 10 -> [[1, 0], [2, 3]]
    """
    sizes = _checked(sizes, capacity)
    return _first_fit(sizes, _largest_first(sizes), capacity)


def first_fit_shuffle(sizes: Sizes, capacity: int, seed: int) -> Bins:
    """In an order drawn from the seed, each into the first bin with room: a little less full, but sizes mix in a bin.

    sizes [3, 7, 5, 4], capacity 10, drawn order 2 0 1 3 -> [[2, 0], [1], [3]]
    """
    sizes = _checked(sizes, capacity)
    return _first_fit(sizes, np.random.default_rng(seed).permutation(len(sizes)), capacity)


def exact_fit_decreasing(sizes: Sizes, capacity: int) -> Bins:
    """Each bin takes the largest item left and whichever others fill it best. Never more bins than first fit decreasing.

    sizes [4, 4, 3, 3, 3, 3], capacity 10 -> [[0, 2, 3], [1, 4, 5]], where first fit decreasing takes three bins
    """
    sizes = _checked(sizes, capacity)
    order = _largest_first(sizes)
    bins = _grouped(order, _exact_fit(sizes, capacity))
    fewest_possible = -(-int(sizes.sum()) // capacity)
    if len(bins) > fewest_possible:
        bins = min(bins, _first_fit(sizes, order, capacity), key=len)
    return bins


ALGORITHMS = {"first_fit_decreasing": first_fit_decreasing, "exact_fit_decreasing": exact_fit_decreasing}


def pack_into_bins(algorithm: str, sizes: Sizes, capacity: int, seed: int) -> Bins:
    """Bins by the algorithm of that name. Only the shuffle reads the seed."""
    if algorithm == "first_fit_shuffle":
        return first_fit_shuffle(sizes, capacity, seed)
    return ALGORITHMS[algorithm](sizes, capacity)


def _checked(sizes: Sizes, capacity: int) -> IntArray:
    sizes = np.asarray(sizes, np.int64)
    if len(sizes) and sizes.max() > capacity:
        raise ValueError(f"a size of {sizes.max()} does not fit a bin of {capacity}")
    if len(sizes) and sizes.min() < 1:
        raise ValueError(f"a size of {sizes.min()} is below 1")
    return sizes


def _largest_first(sizes: IntArray) -> IntArray:
    return np.argsort(-sizes, kind="stable")


def _grouped(order: IntArray, bin_of: Sequence[int] | IntArray) -> Bins:
    """Items in the order they were placed, and the bin each went to, as Bins.

    order 1 2 0 3 into bins 0 1 0 1 -> order 1 0 2 3, bounds 0 2 4
    """
    bins = np.asarray(bin_of, np.int64)
    bounds = np.concatenate([[0], np.cumsum(np.bincount(bins))])
    return Bins(order[np.argsort(bins, kind="stable")], bounds)


# First fit


def _first_fit(sizes: IntArray, order: IntArray, capacity: int) -> Bins:
    """Each item, in the order given, into the first bin with room, or into a new one.

    Most go to the newest bin, whose room is a plain variable; the older ones are searched only when one has room.
    """
    # What two neighbouring bins hold passes one capacity, or the second's first item would be in the first.
    older = _OlderBins(max_bins=2 * int(sizes.sum()) // capacity + 1)
    newest, room = 0, capacity
    bin_of: list[int] = []
    for size in sizes[order].tolist():
        if size <= older.most_room:
            bin_of.append(older.place(size))
            continue
        if size > room:
            older.add(newest, room)
            newest, room = newest + 1, capacity
        room -= size
        bin_of.append(newest)
    return _grouped(order, bin_of)


class _OlderBins:
    """The room of each bin, in a tree whose node k holds the larger of its children 2k and 2k + 1.

    Bins 0, 1, 2 with rooms 3, 0, 5 (-1: no bin yet):

        node 1              5
        nodes 2 3       3       5
        nodes 4-7     3   0   5  -1
    """

    def __init__(self, max_bins: int):
        self.num_leaves = 1 << (max_bins - 1).bit_length()
        self.rooms = [-1] * (2 * self.num_leaves)
        self.most_room = -1

    def place(self, size: int) -> int:
        """The first bin with room for an item, which is now in it. Some bin must have that room."""
        rooms, num_leaves, node = self.rooms, self.num_leaves, 1
        while node < num_leaves:
            node *= 2
            if rooms[node] < size:
                node += 1
        self.add(node - num_leaves, rooms[node] - size)
        return node - num_leaves

    def add(self, bin: int, room: int) -> None:
        """Set the room left in a bin, new or known."""
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
    """The bin of each item, items largest first. Equal sizes are interchangeable, so only their counts are handled.

    What fills one bin best fills the next best too while the items last, so a filling is repeated until a size runs out.
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
    return _spelled_out(rows)


def _spelled_out(rows: list[tuple[int, int, int, int]]) -> IntArray:
    """Rows of (size, copies in a bin, first bin, number of bins) as the bin of each item, items largest first.

    (4, 1, 0, 2), (3, 2, 0, 2) -> 0 1 for the items of size 4, 0 0 1 1 for those of size 3
    """
    size, copies, first_bin, num_bins = np.array(rows, np.int64).reshape(-1, 4).T
    by_size = np.argsort(-size, kind="stable")
    num_items = (copies * num_bins)[by_size]
    row_start = np.cumsum(num_items) - num_items
    within_row = np.arange(num_items.sum()) - np.repeat(row_start, num_items)
    return np.repeat(first_bin[by_size], num_items) + within_row // np.repeat(copies[by_size], num_items)


def _filling(distinct: list[int], left: dict[int, int], capacity: int) -> dict[int, int]:
    """How many items of each size go into the next bin: one of the largest, and those that fill the rest of it best."""
    largest = distinct[-1]
    room = capacity - largest
    left[largest] -= 1
    available = [(size, min(left[size], room // size)) for size in _candidates(distinct, room)]
    left[largest] += 1
    filling = _fullest([(size, copies) for size, copies in available if copies], room)
    filling[largest] = filling.get(largest, 0) + 1
    return filling


def _candidates(distinct: list[int], room: int) -> list[int]:
    """Sizes up to the room, largest first; when there are many, some from the largest to the smallest."""
    num = bisect_right(distinct, room)
    if num <= NUM_CANDIDATES:
        return distinct[:num][::-1]
    # 7 sizes, 4 candidates: positions 6 4 2 0
    return [distinct[i * (num - 1) // (NUM_CANDIDATES - 1)] for i in reversed(range(NUM_CANDIDATES))]


def _fullest(available: list[tuple[int, int]], room: int) -> dict[int, int]:
    """Copies of each size whose sum comes closest to the room: a subset sum, in favour of the sizes named first.

    Sums that can be reached are the bits of a number: from 1 (bit 0, the empty sum), a 3 makes 1001, another 1001001.
    """
    within_room = (1 << (room + 1)) - 1
    reached = [1]
    pieces: list[tuple[int, int]] = []
    for size, copies in _pieces(available):
        reached.append((reached[-1] | reached[-1] << size * copies) & within_room)
        pieces.append((size, copies))
        if reached[-1].bit_length() > room:
            break  # the room itself can be reached
    total = reached[-1].bit_length() - 1
    filling: dict[int, int] = {}
    for (size, copies), before in zip(reversed(pieces), reversed(reached[:-1]), strict=True):
        if not before >> total & 1:
            total -= size * copies
            filling[size] = filling.get(size, 0) + copies
    return filling


def _pieces(available: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Copies in lots that make up every number of them: 6 copies of a size as lots of 1, 2 and 3."""
    for size, copies in available:
        lot = 1
        while copies:
            lot = min(lot, copies)
            yield size, lot
            copies -= lot
            lot *= 2
