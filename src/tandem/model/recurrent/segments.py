"""Where the prompts and completions of a pack are, for layers that carry a state along a row."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.model.recurrent.kernels import Kernels, no_kernels
from tandem.model.transfer import to_device
from tandem.packing.layout import FILLER, IntArray, Pack

# Sequences up to this length are computed together without a kernel: they take one chunk each, however short they are.
SHORT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Consecutive sequences, padded to the longest of them, for functions without a variable-length form."""

    num_sequences: int
    longest: int
    num_tokens: int
    cells: Tensor  # [tokens] the cell of each token in the flattened rectangle

    def fill(self, tokens: Tensor) -> Tensor:
        """Return [sequences, longest, ...] from [tokens, ...]. Cells without a token are zero."""
        cells = tokens.new_zeros(self.num_sequences * self.longest, *tokens.shape[1:])
        return cells.index_copy(0, self.cells, tokens).unflatten(0, (self.num_sequences, self.longest))

    def take(self, rectangle: Tensor) -> Tensor:
        """Return the tokens of a filled rectangle: the inverse of `fill`."""
        return rectangle.flatten(0, 1).index_select(0, self.cells)


class Sequences:
    """Token sequences one after another, the longest first. Sequences of 3 and 2 tokens have bounds 0, 3, 5."""

    def __init__(self, lengths: IntArray, device: torch.device):
        self.lengths = lengths
        self.device = device
        bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        self.host_bounds = torch.from_numpy(bounds)
        self.bounds = to_device(bounds, device)  # [sequences + 1] int32

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def rectangles(self) -> list[Rectangle]:
        """Return all sequences as few rectangles, of which at most half is padding or which are at most SHORT_TOKENS long."""
        rectangles, first = [], 0
        while first < len(self.lengths):
            longest = int(self.lengths[first])
            alike = self.lengths[first:] * 2 > longest
            count = len(alike) if longest <= SHORT_TOKENS else int(alike.sum())
            lengths = self.lengths[first : first + count]
            # two sequences of 3 and 2 tokens: cells 0 1 2 | 3 4
            cells = np.concatenate([row * longest + np.arange(length) for row, length in enumerate(lengths)])
            rectangles.append(Rectangle(count, longest, int(lengths.sum()), to_device(cells, self.device)))
            first += count
        return rectangles


@dataclass(frozen=True, slots=True)
class Starts:
    """The first tokens of every segment, whose convolution reaches back beyond the segment."""

    positions: Tensor  # [starts] flat positions
    inputs: Tensor  # [starts, width] flat positions of the tokens that are convolved, the oldest first
    is_real: Tensor  # [starts, width] False where a token is missing, because the sequence begins later; `inputs` is then any


class PackSegments:
    """The segments of a pack: its prompts and completions. All positions are flat (row * length + column)."""

    def __init__(
        self, pack: Pack, device: torch.device, choose: Callable[[torch.device, torch.dtype], Kernels] = no_kernels
    ):
        """`choose`: returns the kernels for a device and a dtype."""
        self._choose = choose
        tree, branch = pack.tree.ravel(), pack.branch.ravel()
        row = np.arange(tree.size) // pack.tree.shape[1]
        changes = (np.diff(tree) != 0) | (np.diff(branch) != 0) | (np.diff(row) != 0)
        bounds = np.concatenate([[0], np.flatnonzero(changes) + 1, [tree.size]])
        start, end = bounds[:-1], bounds[1:]
        real = tree[start] != FILLER
        if not real.any():  # a row of filler: one token of it is computed, so that every weight gets a gradient of zero
            start, end, real = np.array([0]), np.array([1]), np.array([True])
        start, end = start[real], end[real]
        is_prompt = branch[start] == 0
        # A prompt is followed by its completions: for prompt, completion, completion, prompt, completion: 0 0 0 1 1.
        number_of_prompt = np.cumsum(is_prompt) - 1
        prompts, completions = (_longest_first(start, end, which) for which in (is_prompt, ~is_prompt))
        place = np.empty(len(prompts), np.int64)
        place[number_of_prompt[prompts]] = np.arange(len(prompts))
        self.device = device
        self.num_tokens = tree.size  # with filler
        self.prompts, self.completions = (Sequences((end - start)[which], device) for which in (prompts, completions))
        ordered = [np.arange(int(start[one]), int(end[one])) for one in (*prompts, *completions)]
        self.order = to_device(
            np.concatenate(ordered), device
        )  # positions of the prompts' tokens, then the completions'
        self.prompt_of = to_device(place[number_of_prompt[completions]], device)  # [completions] index into `prompts`
        self._start, self._end = start, end
        prompt_at = np.flatnonzero(is_prompt)[number_of_prompt]
        # Where the tokens before a segment begin and end: those of its prompt, or none.
        self._before = np.where(is_prompt, start, start[prompt_at]), np.where(is_prompt, start, end[prompt_at])
        self._starts: dict[int, Starts] = {}

    def kernels(self, values: Tensor) -> Kernels:
        """Return the kernels that compute with values like these."""
        return self._choose(values.device, values.dtype)

    def starts(self, width: int) -> Starts:
        """Return the tokens whose convolution over `width` tokens reaches back beyond their segment.

        Example, width 3: a prompt of 4 tokens at 0-3, completions of 2 and 1 tokens at 4-5 and 6. Token 5 is computed from the
        tokens 3 4 5, token 6 from 2 3 6, and token 1 from none, 0 and 1.
        """
        if width not in self._starts:
            segment, offset = _expand(np.minimum(self._end - self._start, width - 1))
            offsets = offset[:, None] + np.arange(1 - width, 1)  # relative to the start of the segment
            begin, end = (array[segment, None] for array in self._before)
            own = self._start[segment, None] + offsets
            inputs = np.where(offsets < 0, end + offsets, own)
            is_real = (offsets >= 0) | (inputs >= begin)
            positions = self._start[segment] + offset
            # A missing token is read at the position itself: one position for all would collect all their gradients.
            inputs = np.where(is_real, inputs, positions[:, None])
            self._starts[width] = Starts(*(to_device(array, self.device) for array in (positions, inputs, is_real)))
        return self._starts[width]

    def gather(self, values: Tensor) -> Tensor:
        """Return the tokens of the prompts, then those of the completions: [tokens, ...] from [rows, length, ...]."""
        return values.flatten(0, 1).index_select(0, self.order)

    def scatter(self, tokens: Tensor, shape: torch.Size) -> Tensor:
        """Return [rows, length, ...] from `gather`'s order. Filler is zero. `shape`: (rows, length)."""
        return (
            tokens.new_zeros(self.num_tokens, *tokens.shape[1:]).index_copy(0, self.order, tokens).unflatten(0, shape)
        )


def _longest_first(start: IntArray, end: IntArray, which: NDArray[np.bool_]) -> IntArray:
    """Return the indices of the selected segments, the longest first."""
    chosen = np.flatnonzero(which)
    return chosen[np.argsort(start[chosen] - end[chosen], kind="stable")]


def _expand(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Return, for every element of ranges of these sizes, the index of its range and its place in it.

    Example: counts 2 and 3 are returned as 0 0 1 1 1 and 0 1 0 1 2.
    """
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
