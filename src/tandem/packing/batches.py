"""Divides an epoch's preferences into global batches, and lays out packs ahead of the training loop."""

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
    """The preferences of one optimizer step, in epoch order, and their total number of pairs."""

    epoch: int
    preferences: NDArray[np.int64]
    num_pairs: int
    bounds: NDArray[np.int64] | None = None  # where packs begin and end in `preferences`; None: not packed yet


@dataclass(frozen=True, slots=True)
class Batches:
    """Decides which preferences form the batch of each step.

    If the whole set was packed before training, `packs` holds its packs, and each batch consists of complete packs. Otherwise the
    batches do not depend on how preferences are packed.
    """

    num_pairs: NDArray[np.int64]  # pairs of each preference
    batch_size: int  # in pairs
    seed: int = 0
    shuffle: bool = False
    drop_last: bool = False
    spans: tuple[Span, ...] = ()  # training sets that an epoch takes more or less than once
    packs: Bins | None = None  # packs of the whole set; batches then consist of complete packs

    def members(self, epoch: int) -> NDArray[np.int64]:
        """Return the preferences of an epoch, one training set after another.

        A set with weight 2 is in every epoch twice. A set of five preferences with weight 0.4 has two preferences in each epoch:
        0 1 in the first, 2 3 in the second, 4 0 in the third. With `shuffle`, the two preferences are taken from
        a random order of the set, which is the same for all epochs.
        """
        if not self.spans:
            return np.arange(len(self.num_pairs))
        parts = []
        for number, span in enumerate(self.spans):
            indices = np.arange(span.start, span.end)
            num_passes, fraction = divmod(span.weight, 1)
            parts += [indices] * int(num_passes)
            if count := round(fraction * len(indices)):
                if self.shuffle:
                    indices = np.random.default_rng((self.seed, number)).permutation(indices)
                parts.append(indices[(epoch * count + np.arange(count)) % len(indices)])
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def num_pairs_of(self, epoch: int) -> int:
        """Return the number of pairs in an epoch, including the pairs of an incomplete last batch."""
        return int(self.num_pairs[self.members(epoch)].sum())

    def epoch(self, epoch: int) -> list[GlobalBatch]:
        """Return the batches of an epoch. Each batch takes preferences (or packs) in order, up to the batch size in pairs.

        A preference that would exceed the batch size starts the next batch. A preference with more pairs than the batch size is a
        batch alone. Example: preferences with 2, 2, 1 and 6 pairs and batch size 4 give batches with [2, 2], [1] and [6] pairs.
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
        if total and not (self.drop_last and total < self._min_last_batch(batches)):
            batches.append(self._batch(epoch, order[start:], total))
        return batches

    def pairs_per_pack(self) -> NDArray[np.int64]:
        """Return the number of pairs in each pack of the whole set."""
        assert self.packs is not None
        return np.add.reduceat(self.num_pairs[self.packs.order], self.packs.bounds[:-1])

    def _min_last_batch(self, others: list[GlobalBatch]) -> int:
        """Return the smallest number of pairs with which `drop_last` keeps the last batch.

        `others`: the batches before the last. The last batch is kept if it has `batch_size` pairs, or at least as many pairs as
        the smallest of the `others`.
        Example: with 3 pairs in every preference and batch size 4, every batch has 3 pairs, and a last batch of 3 pairs is kept.
        If batches consist of packs, the result is the smallest number of pairs that a batch before the last can have.
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
    """A batch, its packs, and how long the training loop waited for the packs."""

    batch: GlobalBatch
    packs: list[Pack]
    wait_seconds: float


def load_ahead(batches: Iterable[GlobalBatch], packer: Packer) -> Iterator[LoadedBatch]:
    """Yield every batch with its packs, in order.

    While the caller uses one batch, a thread lays out the packs of the next batch.
    """

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
