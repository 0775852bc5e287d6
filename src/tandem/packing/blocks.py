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
class _Segment:
    start: int
    end: int
    first_position: int
    prompt: "_Segment | None"


def seen_until(tree: IntArray, branch: IntArray) -> NDArray[np.int32]:
    """[rows, length]: the first column from which each key is not seen any more.

    A prompt is seen to the end of its tree, a completion to its own end, filler by itself. Prompt 2, completions 2 and 1,
    then two of filler: 5 5 4 4 5 6 7
    """
    columns = np.arange(tree.shape[1])
    ends = np.where(branch == 0, _run_ends(tree), _run_ends(tree, branch))
    return np.where(tree == FILLER, columns + 1, ends).astype(np.int32)


def _run_ends(*arrays: IntArray) -> IntArray:
    """[rows, length]: behind the last column of each column's run, in which no array changes."""
    rows, length = arrays[0].shape
    changes = np.zeros((rows, length - 1), bool)
    for array in arrays:
        changes |= np.diff(array, axis=1) != 0
    ends = np.where(np.pad(changes, ((0, 0), (0, 1)), constant_values=True), np.arange(1, length + 1), length)
    return np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]


def block_lists(tree: IntArray, branch: IntArray, position_ids: IntArray, block: int, window: int | None) -> BlockLists:
    """Which blocks hold allowed (query, key) pairs, by counting: a segment sees its prompt and, causally, itself."""
    states = [_allowed(*row, block, window) for row in zip(tree, branch, position_ids, strict=True)]
    partial, full = np.stack([s[0] for s in states]), np.stack([s[1] for s in states])
    return BlockLists(
        *_lists(partial),
        *_lists(full),
        *_lists(partial.transpose(0, 2, 1)),
        *_lists(full.transpose(0, 2, 1)),
    )


def _allowed(
    tree: IntArray, branch: IntArray, position_ids: IntArray, block: int, window: int | None
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """[blocks, blocks] partial and full, of one row."""
    num = len(tree) // block
    counts = np.zeros((num, num), np.int64)
    near = np.zeros((num, num), bool)
    for segment in _segments(tree, branch, position_ids):
        own = _overlap(segment, block)
        seen = [(segment, _triangle(own))]
        if segment.prompt is not None:
            seen.append((segment.prompt, np.multiply.outer(own, _overlap(segment.prompt, block))))
        for keys, area in seen:
            place = _blocks(segment, block), _blocks(keys, block)
            if window is None:
                counts[place] += area
            else:
                (lowest_q, highest_q), (lowest_k, highest_k) = _positions(segment, block), _positions(keys, block)
                inside = highest_q[:, None] - lowest_k < window  # every pair is
                counts[place] += np.where(inside, area, 0)
                near[place] |= (area > 0) & (lowest_q[:, None] - highest_k < window)  # some pair is
    touched = counts > 0 if window is None else near
    filler = (tree == FILLER).reshape(num, block).sum(1)
    touched |= np.diag(filler > 0)
    full = counts == block * block
    return touched & ~full, full


def _segments(tree: IntArray, branch: IntArray, position_ids: IntArray) -> list[_Segment]:
    """Runs of one tree and branch, filler left out; a completion knows its prompt."""
    borders = np.flatnonzero(np.diff(tree) | np.diff(branch)) + 1
    segments: list[_Segment] = []
    prompt: _Segment | None = None
    for start, end in zip([0, *borders.tolist()], [*borders.tolist(), len(tree)], strict=True):
        if tree[start] == FILLER:
            continue
        is_prompt = branch[start] == 0
        segment = _Segment(start, end, int(position_ids[start]), None if is_prompt else prompt)
        prompt = segment if is_prompt else prompt
        segments.append(segment)
    return segments


def _blocks(segment: _Segment, block: int) -> slice:
    """Those that a segment has a part in."""
    return slice(segment.start // block, -(-segment.end // block))


def _overlap(segment: _Segment, block: int) -> IntArray:
    """Positions of a segment in each of its blocks: start 100, end 300, block 128 -> [28, 128, 44]."""
    blocks = _blocks(segment, block)
    own = np.full(blocks.stop - blocks.start, block, np.int64)
    own[0] -= segment.start - blocks.start * block
    own[-1] -= blocks.stop * block - segment.end
    return own


def _triangle(own: IntArray) -> IntArray:
    """How many pairs of a segment, of which the key is not later, are in each block: [2, 3] -> [[3, 0], [6, 6]]."""
    area = np.tri(len(own), k=-1, dtype=np.int64) * np.multiply.outer(own, own)
    area.flat[:: len(own) + 1] = own * (own + 1) // 2
    return area


def _positions(segment: _Segment, block: int) -> tuple[IntArray, IntArray]:
    """Lowest and highest position id of a segment inside each of its blocks."""
    blocks = _blocks(segment, block)
    edges = np.arange(blocks.start, blocks.stop) * block
    lowest = np.maximum(segment.start, edges) - segment.start + segment.first_position
    highest = np.minimum(segment.end, edges + block) - 1 - segment.start + segment.first_position
    return lowest, highest


def _lists(blocks: NDArray[np.bool_]) -> tuple[IntLists, IntLists]:
    """[[1, 0, 1]] -> counts [2], indices [[0, 2, 1]]: wanted blocks first, in order."""
    order = np.argsort(~blocks, axis=-1, kind="stable")
    return blocks.sum(-1).astype(np.int32), order.astype(np.int32)
