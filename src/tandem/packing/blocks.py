"""Computes which queries of a pack attend to each key, and which blocks block-sparse attention has to compute."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.packing.layout import FILLER, IntArray

IntLists = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BlockLists:
    """The blocks that block-sparse attention computes.

    kv_* lists the key blocks of each query block, and q_* lists the query blocks of each key block.
    In a `full` block, every query attends to every key. In a `partial` block, the attention rule is applied to each (query, key)
    pair. Lists are padded to a fixed width.
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
    """The segments of a row: its prompts and completions. Each array has one element per segment."""

    start: IntArray
    end: IntArray
    first_position: IntArray
    prompt: IntArray  # index of the segment's prompt; for a prompt, its own index

    def overlap(self, which: IntArray, blocks: IntArray, block: int) -> tuple[IntArray, IntArray, IntArray]:
        """Return how many tokens of each segment are in a given block, and the lowest and highest position id of these tokens.

        `which`: index of each segment. `blocks`: the block to look at for each segment. `block`: tokens per block.
        Example: if blocks have 128 tokens, a segment from 100 to 300 has 28 tokens in block 0, 128 in block 1 and 44 in block 2.
        """
        start, end = self.start[which], self.end[which]
        first, last = np.maximum(start, blocks * block), np.minimum(end, (blocks + 1) * block)
        offset = self.first_position[which] - start
        return last - first, first + offset, last - 1 + offset


def seen_until(tree: IntArray, branch: IntArray) -> NDArray[np.int32]:
    """Return, for each key, the column after the last query that attends to the key: [rows, length].

    For a key in a prompt, this is the end of the prompt's last completion. For a key in a completion, it is the end of that
    completion. For filler, it is the next column.
    Example: a prompt of 2 tokens, completions of 2 and 1 tokens, then two columns of filler give 5 5 4 4 5 6 7.
    """
    columns = np.arange(tree.shape[1])
    ends = np.where(branch == 0, _run_ends(tree), _run_ends(tree, branch))
    return np.where(tree == FILLER, columns + 1, ends).astype(np.int32)


def _run_ends(*arrays: IntArray) -> IntArray:
    """Return, for each column, the end of the run that contains the column: [rows, length].

    A run is a range of columns in which every array is constant.
    """
    rows, length = arrays[0].shape
    changes = np.zeros((rows, length - 1), bool)
    for array in arrays:
        changes |= np.diff(array, axis=1) != 0
    ends = np.where(np.pad(changes, ((0, 0), (0, 1)), constant_values=True), np.arange(1, length + 1), length)
    return np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]


def block_lists(
    tree: IntArray, branch: IntArray, position_ids: IntArray, *, block: int, window: int | None
) -> BlockLists:
    """Return the blocks that contain allowed (query, key) pairs.

    Allowed pairs are counted segment by segment: a segment attends to its prompt and, causally, to itself.
    `block`: positions per block. `window`: the sliding window of the attention in positions; None: no window.
    """
    rows = [_cells(*row, block=block, window=window) for row in zip(tree, branch, position_ids, strict=True)]
    num = tree.shape[1] // block
    partial, full = ([row[kind] for row in rows] for kind in (0, 1))
    kv_partial_counts, kv_partial = _lists(partial, num)
    kv_full_counts, kv_full = _lists(full, num)
    q_partial_counts, q_partial = _lists(_transpose(partial, num), num)
    q_full_counts, q_full = _lists(_transpose(full, num), num)
    return BlockLists(
        kv_partial_counts=kv_partial_counts,
        kv_partial=kv_partial,
        kv_full_counts=kv_full_counts,
        kv_full=kv_full,
        q_partial_counts=q_partial_counts,
        q_partial=q_partial,
        q_full_counts=q_full_counts,
        q_full=q_full,
    )


def _transpose(rows: list[IntArray], num: int) -> list[IntArray]:
    """Swap the query block and the key block in every cell number. `_cells` defines the cell numbers."""
    return [np.sort(cells % num * num + cells // num) for cells in rows]


def _cells(
    tree: IntArray, branch: IntArray, position_ids: IntArray, *, block: int, window: int | None
) -> tuple[IntArray, IntArray]:
    """Return the partial and the full blocks of one row, sorted by cell number.

    The cell number of a block is (query block) * (blocks per row) + (key block).
    """
    num = len(tree) // block
    segments = _segments(tree, branch, position_ids)
    # Pairs of a query segment and a key segment: every segment with itself, and every completion with its prompt.
    every = np.arange(len(segments.start))
    has_prompt = np.flatnonzero(segments.prompt != every)
    queries, keys = np.concatenate([every, has_prompt]), np.concatenate([every, segments.prompt[has_prompt]])
    # For each pair, every block of the queries; then every block of the keys, but within one segment none after the query's.
    first_q, end_q = segments.start[queries] // block, -(-segments.end[queries] // block)
    pair, q = _expand_ranges(first_q, end_q - first_q)
    queries, keys = queries[pair], keys[pair]
    first_k, end_k = segments.start[keys] // block, -(-segments.end[keys] // block)
    pair, k = _expand_ranges(first_k, np.where(queries == keys, q + 1, end_k) - first_k)
    queries, keys, q = queries[pair], keys[pair], q[pair]
    num_q, lowest_q, highest_q = segments.overlap(queries, q, block)
    num_k, lowest_k, highest_k = segments.overlap(keys, k, block)
    area = np.where((queries == keys) & (q == k), num_q * (num_q + 1) // 2, num_q * num_k)
    cell = q * num + k
    if window is not None:
        near = lowest_q - highest_k < window  # true for at least one (query, key) pair
        area = np.where(highest_q - lowest_k < window, area, 0)  # if not true for all pairs, the block is not full
        cell, area = cell[near], area[near]
    filler = np.unique(np.flatnonzero(tree == FILLER) // block) * (num + 1)
    found, place = np.unique(np.concatenate([cell, filler]), return_inverse=True)
    is_full = np.bincount(place[: len(cell)], area, len(found)) == block * block
    return found[~is_full], found[is_full]


def _segments(tree: IntArray, branch: IntArray, position_ids: IntArray) -> _Segments:
    """Return the segments of a row: runs of columns with the same `tree` and `branch` (see Pack). Filler is not a segment."""
    borders = np.concatenate([[0], np.flatnonzero(np.diff(tree) | np.diff(branch)) + 1, [len(tree)]])
    start, end = borders[:-1], borders[1:]
    real = tree[start] != FILLER
    start, end = start[real], end[real]
    prompt = np.maximum.accumulate(np.where(branch[start] == 0, np.arange(len(start)), 0))
    return _Segments(start, end, position_ids[start].astype(np.int64), prompt)


def _expand_ranges(first: IntArray, num: IntArray) -> tuple[IntArray, IntArray]:
    """Concatenate ranges of numbers. Range i has `num[i]` consecutive numbers, starting at `first[i]`.

    Return the range index of each number, and the numbers.
    Example: first [5, 0] and num [2, 3] are returned as [0, 0, 1, 1, 1], [5, 6, 0, 1, 2].
    """
    owner = np.repeat(np.arange(len(num)), num)
    return owner, np.arange(len(owner)) + np.repeat(first - (np.cumsum(num) - num), num)


def _lists(rows: list[IntArray], num: int) -> tuple[IntLists, IntLists]:
    """Return the number of key blocks of each query block, and a padded list of these key blocks.

    `rows`: the sorted cell numbers of each row.
    Example: in a row of two blocks, the cells 0, 2 and 3 are returned as counts 1 2, lists [[0, 0], [0, 1]].
    """
    counts, lists = np.zeros((len(rows), num), np.int32), np.zeros((len(rows), num, num), np.int32)
    for cells, row_counts, row_lists in zip(rows, counts, lists, strict=True):
        in_row = np.bincount(cells // num, minlength=num)
        _, place = _expand_ranges(np.zeros(num, np.int64), in_row)
        row_counts[:], row_lists[cells // num, place] = in_row, cells % num
    return counts, lists
