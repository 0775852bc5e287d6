"""Preferences in; an epoch's global batches out, counted in pairs."""

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.data.store.sets import Span
from tandem.packing.binning import Bins
from tandem.packing.layout import Pack
from tandem.packing.packer import Packer


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The preferences of one optimizer step, in epoch order, and how many pairs they hold."""

    epoch: int
    preferences: NDArray[np.int64]
    num_pairs: int
    bounds: NDArray[np.int64] | None = None  # where packs begin and end among them, if they are given


@dataclass(frozen=True, slots=True)
class Batches:
    """Which preferences form each step's batch: independent of their packing, unless the whole set was packed once."""

    num_pairs: NDArray[np.int64]  # of each preference
    batch_size: int  # pairs
    seed: int = 0
    shuffle: bool = False
    drop_last: bool = False
    spans: tuple[Span, ...] = ()  # of sets that an epoch passes over more or less than once
    packs: Bins | None = None  # of the whole set: batches are then made of whole packs

    def members(self, epoch: int) -> NDArray[np.int64]:
        """The preferences of an epoch, set by set.

        Weight 2 takes a set twice. Weight 0.4 takes two of five, and continues where the last epoch stopped:
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

    def num_pairs_of(self, epoch: int) -> int:
        """Pairs of an epoch, those of a last short batch included."""
        return int(self.num_pairs[self.members(epoch)].sum())

    def epoch(self, epoch: int) -> list[GlobalBatch]:
        """Preferences (or packs) in epoch order, taken until their pairs reach the batch size and never beyond.

        A preference that would exceed the batch size starts the next batch, unless the batch is empty: pairs [2, 2, 1, 6], size 4
        -> [2, 2], [1], [6].
        """
        order = self.members(epoch) if self.packs is None else np.arange(len(self.packs))
        if self.shuffle:
            order = np.random.default_rng((self.seed, epoch)).permutation(order)
        counts = self.num_pairs[order] if self.packs is None else self.pairs_per_pack()[order]
        batches: list[GlobalBatch] = []
        start = total = 0
        for i, count in enumerate(counts.tolist()):
            if total and total + count > self.batch_size:
                batches.append(self._batch(epoch, order[start:i], total))
                start, total = i, 0
            total += count
        if total and not (self.drop_last and total < self._least(batches)):
            batches.append(self._batch(epoch, order[start:], total))
        return batches

    def pairs_per_pack(self) -> NDArray[np.int64]:
        assert self.packs is not None
        return np.add.reduceat(self.num_pairs[self.packs.order], self.packs.bounds[:-1])

    def _least(self, others: list[GlobalBatch]) -> int:
        """Pairs below which a last batch is short: fewer than any other batch of the epoch has; of packs, than it may have.

        Preferences of 3 pairs each, size 4: every batch has 3, and the last one is kept.
        """
        if self.packs is None:
            return min([self.batch_size, *(batch.num_pairs for batch in others)])
        return self.batch_size - int(self.pairs_per_pack().max()) + 1

    def _batch(self, epoch: int, chosen: NDArray[np.int64], num_pairs: int) -> GlobalBatch:
        if self.packs is None:
            return GlobalBatch(epoch, chosen, num_pairs)
        packs = [self.packs[i] for i in chosen.tolist()]
        bounds = np.cumsum([0, *(len(pack) for pack in packs)])
        return GlobalBatch(epoch, np.concatenate(packs), num_pairs, bounds)


@dataclass(frozen=True, slots=True)
class LoadedBatch:
    """A batch, its packs, and how long the loop had to wait for them."""

    batch: GlobalBatch
    packs: list[Pack]
    wait_seconds: float


def load_ahead(batches: Iterable[GlobalBatch], packer: Packer) -> Iterator[LoadedBatch]:
    """Every batch in order; while one is in use, a thread lays out the next."""

    def lay_out(batch: GlobalBatch) -> tuple[GlobalBatch, list[Pack]]:
        return batch, list(packer.micro_batches(batch.preferences, batch.bounds))

    stream = iter(batches)
    with ThreadPoolExecutor(1, thread_name_prefix="loader") as thread:
        first = next(stream, None)
        ahead = thread.submit(lay_out, first) if first else None
        while ahead is not None:
            start = time.perf_counter()
            batch, packs = ahead.result()
            waited = time.perf_counter() - start
            following = next(stream, None)
            ahead = thread.submit(lay_out, following) if following else None
            yield LoadedBatch(batch, packs, waited)
