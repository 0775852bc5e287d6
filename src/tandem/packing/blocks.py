"""A Pack in; who may see whom out, from segment boundaries: by key, and by blocks for block-sparse attention."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.packing.layout import FILLER, IntArray

IntLists = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BlockLists:
    """For each block of queries the blocks of keys it needs, and the reverse. Lists are padded to a fixed width.

    `full` blocks are allowed in every element; `partial` ones need the rule of attention inside.
    """

    kv_partial_counts: IntLists  # [rows, blocks]
    kv_partial: IntLists  # [rows, blocks, blocks]
    kv_full_counts: IntLists
    kv_full: IntLists
    q_partial_counts: IntLists
    q_partial: IntLists
    q_full_counts: IntLists
    q_full: IntLists


@dataclass(frozen=True, slots=True)
class _Segments:
    """The prompts and completions of a row, an element each."""

    start: IntArray
    end: IntArray
    first_position: IntArray
    prompt: IntArray  # which of them is the segment's prompt; a prompt's own is itself

    def overlap(self, which: IntArray, blocks: IntArray, block: int) -> tuple[IntArray, IntArray, IntArray]:
        """Of segments with blocks that hold a part of them: its positions, and its lowest and highest position id.

        Start 100, end 300, blocks of 128: 28 in block 0, 128 in block 1, 44 in block 2
        """
        start, end = self.start[which], self.end[which]
        first, last = np.maximum(start, blocks * block), np.minimum(end, (blocks + 1) * block)
        offset = self.first_position[which] - start
        return last - first, first + offset, last - 1 + offset


def seen_until(tree: IntArray, branch: IntArray) -> NDArray[np.int32]:
    """[rows, length]: the first column from which each key is not seen any more.

    A prompt is seen to the end of its tree, a completion to its own end, filler only by itself. Prompt 2, completions 2 and 1,
    then two of filler: 5 5 4 4 5 6 7
    """
    columns = np.arange(tree.shape[1])
    ends = np.where(branch == 0, _run_ends(tree), _run_ends(tree, branch))
    return np.where(tree == FILLER, columns + 1, ends).astype(np.int32)


def _run_ends(*arrays: IntArray) -> IntArray:
    """[rows, length]: the column after the last one of each column's run, in which no array changes."""
    rows, length = arrays[0].shape
    changes = np.zeros((rows, length - 1), bool)
    for array in arrays:
        changes |= np.diff(array, axis=1) != 0
    ends = np.where(np.pad(changes, ((0, 0), (0, 1)), constant_values=True), np.arange(1, length + 1), length)
    return np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]


def block_lists(tree: IntArray, branch: IntArray, position_ids: IntArray, block: int, window: int | None) -> BlockLists:
    """Which blocks hold allowed (query, key) pairs, by counting: a segment sees its prompt and, causally, itself."""
    rows = [_cells(*row, block, window) for row in zip(tree, branch, position_ids, strict=True)]
    num = tree.shape[1] // block
    partial, full = ([row[kind] for row in rows] for kind in (0, 1))
    turned = [[np.sort(cells % num * num + cells // num) for cells in kind] for kind in (partial, full)]
    return BlockLists(*(array for kind in (partial, full, *turned) for array in _lists(kind, num)))


def _cells(
    tree: IntArray, branch: IntArray, position_ids: IntArray, block: int, window: int | None
) -> tuple[IntArray, IntArray]:
    """Partial and full blocks of one row, in rising order, each as (query's block) * (blocks of a row) + (key's block)."""
    num = len(tree) // block
    segments = _segments(tree, branch, position_ids)
    # Whose queries and whose keys meet: every segment with itself, completions with their prompts too.
    alone = np.arange(len(segments.start))
    has_prompt = np.flatnonzero(segments.prompt != alone)
    asking, asked = np.concatenate([alone, has_prompt]), np.concatenate([alone, segments.prompt[has_prompt]])
    # Each block of the queries, then each block of keys that it looks at: a segment in itself, not beyond its own.
    first_q, end_q = segments.start[asking] // block, -(-segments.end[asking] // block)
    meeting, q = _expand_ranges(first_q, end_q - first_q)
    asking, asked = asking[meeting], asked[meeting]
    first_k, end_k = segments.start[asked] // block, -(-segments.end[asked] // block)
    meeting, k = _expand_ranges(first_k, np.where(asking == asked, q + 1, end_k) - first_k)
    asking, asked, q = asking[meeting], asked[meeting], q[meeting]
    num_q, lowest_q, highest_q = segments.overlap(asking, q, block)
    num_k, lowest_k, highest_k = segments.overlap(asked, k, block)
    area = np.where((asking == asked) & (q == k), num_q * (num_q + 1) // 2, num_q * num_k)
    cell = q * num + k
    if window is not None:
        near = lowest_q - highest_k < window  # some pair is
        area = np.where(highest_q - lowest_k < window, area, 0)  # every pair is, or none counts
        cell, area = cell[near], area[near]
    filler = np.unique(np.flatnonzero(tree == FILLER) // block) * (num + 1)
    found, place = np.unique(np.concatenate([cell, filler]), return_inverse=True)
    is_full = np.bincount(place[: len(cell)], area, len(found)) == block * block
    return found[~is_full], found[is_full]


def _segments(tree: IntArray, branch: IntArray, position_ids: IntArray) -> _Segments:
    """Runs of one tree and branch, filler left out."""
    borders = np.concatenate([[0], np.flatnonzero(np.diff(tree) | np.diff(branch)) + 1, [len(tree)]])
    start, end = borders[:-1], borders[1:]
    real = tree[start] != FILLER
    start, end = start[real], end[real]
    prompt = np.maximum.accumulate(np.where(branch[start] == 0, np.arange(len(start)), 0))
    return _Segments(start, end, position_ids[start].astype(np.int64), prompt)


def _expand_ranges(first: IntArray, num: IntArray) -> tuple[IntArray, IntArray]:
    """Expand ranges: the range of each number, and the numbers. 2 from 5 and 3 from 0 -> [0, 0, 1, 1, 1], [5, 6, 0, 1, 2]."""
    owner = np.repeat(np.arange(len(num)), num)
    return owner, np.arange(len(owner)) + np.repeat(first - (np.cumsum(num) - num), num)


def _lists(rows: list[IntArray], num: int) -> tuple[IntLists, IntLists]:
    """Cells of every row, in rising order -> counts and lists. Of two blocks, cells 0, 2 and 3: 1 2, [[0, 0], [0, 1]]."""
    counts, lists = np.zeros((len(rows), num), np.int32), np.zeros((len(rows), num, num), np.int32)
    for cells, row_counts, row_lists in zip(rows, counts, lists, strict=True):
        in_row = np.bincount(cells // num, minlength=num)
        _, place = _expand_ranges(np.zeros(num, np.int64), in_row)
        row_counts[:], row_lists[cells // num, place] = in_row, cells % num
    return counts, lists
