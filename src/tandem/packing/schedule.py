"""Preferences in; an epoch's global batches out, counted in pairs, and each batch as micro-batches of packs."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.config.schema import Packing
from tandem.data.selection import Preferences
from tandem.data.sets import Span
from tandem.errors import ConfigError
from tandem.packing.binning import ALGORITHMS
from tandem.packing.layout import Arrangement, Pack, join, lay_out

# FlexAttention works in blocks of this many positions; a row is a whole number of them.
BLOCK = 128


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The preferences of one optimizer step, in epoch order, and how many pairs they hold."""

    epoch: int
    preferences: NDArray[np.int64]
    num_pairs: int


@dataclass(frozen=True, slots=True)
class Batches:
    """Which preferences form each step's batch: the same for every packing mode."""

    num_pairs: NDArray[np.int64]  # of each preference
    batch_size: int  # pairs
    seed: int = 0
    shuffle: bool = False
    drop_last: bool = False
    spans: tuple[Span, ...] = ()  # of sets that an epoch passes over more or less than once

    def members(self, epoch: int) -> NDArray[np.int64]:
        """The preferences of an epoch, set by set.

        Weight 2 takes a set twice. Weight 0.4 takes two of five, and goes on where the last epoch stopped:
        0 1, 2 3, 4 0, ... of a fixed order.
        """
        if not self.spans:
            return np.arange(len(self.num_pairs))
        parts = []
        for number, span in enumerate(self.spans):
            everyone = np.arange(span.start, span.end)
            whole, share = divmod(span.weight, 1)
            parts += [everyone] * int(whole)
            if count := round(share * len(everyone)):
                if self.shuffle:
                    everyone = np.random.default_rng((self.seed, number)).permutation(everyone)
                parts.append(everyone[(epoch * count + np.arange(count)) % len(everyone)])
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def epoch(self, epoch: int) -> list[GlobalBatch]:
        """Preferences in epoch order, taken until their pairs reach the batch size and never beyond.

        The one that would pass it opens the next batch, unless the batch is empty: pairs [2, 2, 1, 6], size 4
        -> [2, 2], [1], [6].
        """
        order = self.members(epoch)
        if self.shuffle:
            order = np.random.default_rng((self.seed, epoch)).permutation(order)
        batches: list[GlobalBatch] = []
        start = total = 0
        for i, count in enumerate(self.num_pairs[order].tolist()):
            if total and total + count > self.batch_size:
                batches.append(GlobalBatch(epoch, order[start:i], total))
                start, total = i, 0
            total += count
        if total and not (self.drop_last and total < self.batch_size):
            batches.append(GlobalBatch(epoch, order[start:], total))
        return batches


@dataclass(frozen=True, slots=True)
class Packer:
    """How the preferences of a batch become packs, and packs micro-batches."""

    store: Preferences
    sizes: NDArray[np.int64]  # tokens each preference takes in a row
    length: int
    arrangement: Arrangement
    packs_per_micro_batch: int
    algorithm: str

    def micro_batches(self, preferences: NDArray[np.int64]) -> Iterator[Pack]:
        """The packs of a batch, a few at a time, as they go through the model."""
        bins = self._bins(preferences)
        for start in range(0, len(bins), self.packs_per_micro_batch):
            yield join([self._pack(bin) for bin in bins[start : start + self.packs_per_micro_batch]])

    def _bins(self, preferences: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        if self.arrangement == "separate":
            return [preferences[i : i + 1] for i in range(len(preferences))]
        return [preferences[bin] for bin in ALGORITHMS[self.algorithm](self.sizes[preferences], self.length)]

    def _pack(self, indices: NDArray[np.int64]) -> Pack:
        chosen = indices.tolist()
        return lay_out(chosen, [self.store[i] for i in chosen], length=self.length, arrangement=self.arrangement)


def row_sizes(store: Preferences, arrangement: Arrangement) -> NDArray[np.int64]:
    """Tokens each preference takes in a row (its longest row when separate).

    A prompt of 4, completions of 2 and 3: shared 9, repeated 13, separate 7
    """
    if arrangement == "shared":
        return store.num_prompt_tokens + store.num_completion_tokens
    if arrangement == "repeated":
        return store.num_prompt_tokens * store.num_completions + store.num_completion_tokens
    return store.longest


def make_packer(store: Preferences, packing: Packing, *, shortest_auto: int) -> Packer:
    """A packer for a set. An `auto` length holds the longest preference and is at least `shortest_auto`."""
    arrangement: Arrangement = "shared"
    if packing.mode == "none":
        arrangement = "separate"
    elif not packing.share_prompts:
        arrangement = "repeated"
    sizes = row_sizes(store, arrangement)
    largest = int(np.argmax(sizes))
    if packing.pack_length == "auto":
        length = int(sizes[largest]) if arrangement == "separate" else max(int(sizes[largest]), shortest_auto)
    else:
        length = packing.pack_length
        if sizes[largest] > length:
            raise ConfigError(
                f"policy.packing.pack_length = {length}, but the preference at {store.place(largest)} takes "
                f"{sizes[largest]} tokens. Raise the pack length, or lower policy.max_total_sequence_length."
            )
    length = -(-length // BLOCK) * BLOCK
    return Packer(store, sizes, length, arrangement, packing.packs_per_micro_batch, packing.algorithm)
