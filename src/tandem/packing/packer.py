"""The preferences of a batch in; the packs that go through the model, a few at a time, out."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from tandem.config.sections.policy import Packing
from tandem.data.store.selection import Preferences
from tandem.data.store.token_store import TokenStore
from tandem.errors import ConfigError
from tandem.packing.binning import Bins, pack_into_bins
from tandem.packing.distribution import FloatArray, Round, row_cost, share_out
from tandem.packing.layout import Arrangement, Pack, join, lay_out

# FlexAttention works in blocks of this many positions; a row is a whole number of them.
BLOCK = 128
# Rows may be shorter than the longest, in sixteenths of it. Each length is compiled, so there are few; but three rows of
# these come to every number of sixteenths for which two would not do.
SIXTEENTHS = (4, 9, 13, 15, 16)
# Tokens of an `auto` pack of a set packed once. It changes which pairs share a batch, so it may not follow from the machine.
DATASET_PACK = 8192
# An `auto` length gives a batch at least this many rows, or most of the last one would be filler; unless they were shorter
# than is fast on a GPU.
ROWS_PER_BATCH = 4

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of every batch a rank computes, and the number of parts: the data-parallel degree."""

    worker: int = 0
    num_ranks: int = 1


SINGLE_RANK = Share()


@dataclass(frozen=True, slots=True)
class Packer:
    """How preferences become packs, and packs the micro-batches of one rank."""

    store: Preferences
    sizes: IntArray  # tokens each preference takes in a row
    lengths: tuple[int, ...]  # of rows, rising; most have the last
    arrangement: Arrangement
    packs_per_micro_batch: int
    algorithm: str
    seed: int = 0
    share: Share = SINGLE_RANK
    costs: FloatArray | None = None  # what each preference adds to its row's cost; without it, its tokens

    @property
    def length(self) -> int:
        return self.lengths[-1]

    def micro_batches(self, preferences: IntArray, bounds: IntArray | None = None) -> Iterator[Pack]:
        """The packs of this rank in a batch, a few at a time, as they go through the model: as many for every rank.

        `bounds`: where packs begin and end, if that is decided already.
        """
        together = self.packs_per_micro_batch
        for length, same in groupby(self.rounds(preferences, bounds), key=lambda round: round.length):
            waiting = [round.packs[self.share.worker].tolist() for round in same]
            while waiting:
                # What is left is taken in powers of two: each number of rows is compiled.
                size = together if len(waiting) >= together else 2 ** (len(waiting).bit_length() - 1)
                yield join([self.row(chosen, length) for chosen in waiting[:size]])
                waiting = waiting[size:]

    def rounds(self, preferences: IntArray, bounds: IntArray | None = None) -> list[Round]:
        """The packs of all ranks, one for each in every round."""
        costs = self.sizes.astype(np.float64) if self.costs is None else self.costs
        bins, num_ranks = self.bins(preferences, bounds), self.share.num_ranks
        # Rows that go through the model together have one length: what shorter ones save, smaller groups would cost.
        free = self.arrangement != "separate" and bounds is None and self.packs_per_micro_batch == 1
        return share_out(bins, self.sizes, costs, lengths=self.lengths, num_ranks=num_ranks, tightly=free)

    def alone(self) -> "Packer":
        """This packer for a single rank, which computes everything."""
        return replace(self, share=SINGLE_RANK)

    def bins(self, preferences: IntArray, bounds: IntArray | None = None) -> Bins:
        """Which preferences share a row. One that is longer than a row has several to itself."""
        if bounds is not None:
            return Bins(preferences, bounds)
        alone = self.arrangement == "separate" or self.sizes[preferences] > self.length
        alone = np.broadcast_to(alone, preferences.shape)
        together, single = preferences[~alone], preferences[alone]
        bins = pack_into_bins(self.algorithm, self.sizes[together], self.length, self.seed)
        order = np.concatenate([together[bins.order], single])
        return Bins(order, np.concatenate([bins.bounds, bins.bounds[-1] + 1 + np.arange(len(single))]))

    def row_length(self, bin: IntArray) -> int:
        """The shortest row that holds a bin: of 256, 512, 768, 896 and 1024, a bin of 600 tokens takes 768."""
        size = int(self.sizes[bin].sum())
        return next((length for length in self.lengths if length >= size), self.length)

    def longest_row(self, bins: Bins) -> int:
        """Of a batch, before the last of its rows are packed again."""
        return max(self.row_length(bin) for bin in bins)

    def num_rows(self, bin: IntArray) -> int:
        """One, but for a preference that is longer than a row, and where sequences have rows to themselves."""
        if self.arrangement != "separate" and int(self.sizes[bin].sum()) <= self.length:
            return 1
        return self.row(bin.tolist(), self.length).token_ids.shape[0]

    def row(self, chosen: list[int], length: int) -> Pack:
        """Preferences as a pack with rows of that length."""
        return lay_out(chosen, [self.store[i] for i in chosen], length=length, arrangement=self.arrangement)


def row_sizes(store: Preferences, arrangement: Arrangement) -> IntArray:
    """Tokens each preference takes in a row (its longest row when separate).

    A prompt of 4, completions of 2 and 3: shared 9, repeated 13, separate 7
    """
    if arrangement == "shared":
        return store.num_prompt_tokens + store.num_completion_tokens
    if arrangement == "repeated":
        return store.num_prompt_tokens * store.num_completions + store.num_completion_tokens
    return store.longest


def tokens_of_pairs(num: float, sizes: IntArray, store: Preferences) -> float:
    """Tokens that this many pairs of a set take in rows, on average."""
    return num * float(sizes.mean()) / float(store.num_pairs.mean())


def arrangement_of(packing: Packing) -> Arrangement:
    if packing.mode == "none":
        return "separate"
    return "shared" if packing.share_prompts else "repeated"


def make_packer(
    store: Preferences,
    packing: Packing,
    *,
    usual_auto: int,
    shortest_auto: int = 0,
    pairs_per_batch: int | None,
    seed: int = 0,
    share: Share = SINGLE_RANK,
    hidden_size: int | None = None,
) -> Packer:
    """A packer for a set. An `auto` length holds every preference; it is `usual_auto`, or less for a small batch.

    A batch takes one row rather than several that are shorter than `shortest_auto`.
    In mode dataset it is the longest that the set was prepared for, if it was. `hidden_size` of the model tells what
    attention costs where work is shared out; without it a row costs its tokens.
    """
    arrangement = arrangement_of(packing)
    sizes = row_sizes(store, arrangement)
    longest = int(np.argmax(store.longest))
    if packing.pack_length != "auto":
        length = packing.pack_length
        if store.longest[longest] > in_blocks(length):
            raise ConfigError(
                f"policy.packing.pack_length = {length}, but a sequence at {store.place(longest)} takes "
                f"{store.longest[longest]} tokens. Raise the pack length, or lower policy.max_total_sequence_length."
            )
    elif packing.mode == "dataset" and (prepared := prepared_lengths(store)):
        length = max(prepared)
    elif arrangement == "separate":
        length = int(sizes.max())
    else:
        wanted = usual_auto
        if pairs_per_batch is not None:
            per_batch = tokens_of_pairs(pairs_per_batch, sizes, store)
            # Packed as a whole, a set is cut into batches by its packs: their length may not depend on the number of ranks.
            rows = ROWS_PER_BATCH * (1 if packing.mode == "dataset" else share.num_ranks)
            whole = per_batch * ROWS_PER_BATCH / rows  # the share of a rank
            wanted = min(usual_auto, int(max(per_batch / rows, min(whole, shortest_auto))))
        length = max(int(sizes.max()), wanted)
    return Packer(
        store,
        sizes,
        row_lengths(length),
        arrangement,
        packing.packs_per_micro_batch,
        packing.algorithm,
        seed,
        share,
        None if hidden_size is None or share == SINGLE_RANK else _costs(store, arrangement, hidden_size),
    )


def _costs(store: Preferences, arrangement: Arrangement, hidden_size: int) -> FloatArray:
    lengths = store.num_prompt_tokens, store.completion_lengths.astype(np.int64), store.num_completions
    return row_cost(*lengths, hidden_size=hidden_size, arrangement=arrangement)


def prepared_lengths(store: Preferences) -> set[int]:
    """Of packs that `tandem prepare` wrote next to the tokens."""
    return {facts["pack_length"] for facts in store.packs} if isinstance(store, TokenStore) else set()


def row_lengths(length: int) -> tuple[int, ...]:
    """A length and the shorter ones used with it, in whole blocks: 2048 -> 512, 1152, 1664, 1920, 2048; 200 -> 128, 256."""
    blocks = in_blocks(length) // BLOCK
    return tuple(sorted({max(1, blocks * part // SIXTEENTHS[-1]) * BLOCK for part in SIXTEENTHS}))


def in_blocks(length: int) -> int:
    """The least number of whole blocks that hold this many tokens, in tokens: 200 -> 256."""
    return -(-length // BLOCK) * BLOCK
