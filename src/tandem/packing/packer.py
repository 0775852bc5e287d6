"""Packs the preferences of a batch, and groups the packs into micro-batches."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from tandem.config.sections.policy import Packing
from tandem.data.store.selection import Preferences
from tandem.data.store.token_store import TokenStore
from tandem.errors import ConfigError
from tandem.packing.binning import Bins, pack_into_bins
from tandem.packing.distribution import FloatArray, Round, assign_to_ranks, row_cost
from tandem.packing.layout import Arrangement, IntArray, Pack, join, lay_out

# FlexAttention computes in blocks of this many positions. Row lengths are multiples of it.
BLOCK = 128
# Row lengths, in sixteenths of the longest. Each length is compiled, so there are few of them. But every total of 33 to 48
# sixteenths is the sum of three.
SIXTEENTHS = (4, 9, 13, 15, 16)
# The `auto` length, in tokens, for a set that is packed once. It decides which pairs share a batch, so it must not depend on the
# machine.
DATASET_PACK = 8192
# With an `auto` length, a batch has at least this many rows: with fewer, the filler of the last row would be a large part of it.
# It has fewer if the rows would be too short to be fast on a GPU.
ROWS_PER_BATCH = 4
# Batches differ in tokens. A row that is meant for a whole batch holds one that is larger than average by this factor.
LARGER_BATCH = 1.25


@dataclass(frozen=True, slots=True)
class RankShare:
    """The part of every batch that a rank computes. `num_ranks` is the number of parts: the data-parallel degree."""

    rank: int = 0
    num_ranks: int = 1


SINGLE_RANK = RankShare()


@dataclass(frozen=True, slots=True)
class Packer:
    """Packs preferences, and groups the packs of one rank into micro-batches."""

    store: Preferences
    sizes: IntArray  # tokens that each preference takes in a row
    lengths: tuple[int, ...]  # row lengths, ascending; most rows have the last
    arrangement: Arrangement
    packs_per_micro_batch: int
    algorithm: str
    seed: int = 0
    share: RankShare = SINGLE_RANK
    costs: FloatArray | None = None  # what each preference adds to its row's cost; None: its number of tokens

    @property
    def length(self) -> int:
        return self.lengths[-1]

    def micro_batches(self, preferences: IntArray, bounds: IntArray | None = None) -> Iterator[Pack]:
        """Yield the micro-batches that this rank computes for a batch of preferences.

        Every rank has the same number of micro-batches.
        `bounds`: where packs begin and end in `preferences`; None: the preferences are not packed yet.
        """
        for rounds in self.together(self.rounds(preferences, bounds)):
            packs = [round.packs[self.share.rank].tolist() for round in rounds]
            yield join([self.row(chosen, rounds[0].length) for chosen in packs])

    def shapes(self, preferences: IntArray, bounds: IntArray | None = None) -> set[tuple[int, int]]:
        """Return the shapes, (rows, tokens per row), of the micro-batches of a batch of preferences, for all ranks."""
        return {
            (sum(self.num_rows(round.packs[rank]) for round in rounds), rounds[0].length)
            for rounds in self.together(self.rounds(preferences, bounds))
            for rank in range(self.share.num_ranks)
        }

    def together(self, rounds: list[Round]) -> Iterator[list[Round]]:
        """Yield the rounds that form a micro-batch: consecutive ones with the same row length."""
        most = self.packs_per_micro_batch
        for _, same in groupby(rounds, key=lambda round: round.length):
            waiting = list(same)
            while waiting:
                # The remaining packs are taken in powers of two, because each number of rows is compiled.
                size = most if len(waiting) >= most else 2 ** (len(waiting).bit_length() - 1)
                yield waiting[:size]
                waiting = waiting[size:]

    def rounds(self, preferences: IntArray, bounds: IntArray | None = None) -> list[Round]:
        """Return the packs of all ranks, in rounds with one pack per rank."""
        costs = self.sizes.astype(np.float64) if self.costs is None else self.costs
        bins, num_ranks = self.bins(preferences, bounds), self.share.num_ranks
        # The rows of a micro-batch have the same length. With several packs per micro-batch, repacking would save filler, but
        # different row lengths would make micro-batches smaller, which costs as much.
        repack = self.arrangement != "separate" and bounds is None and self.packs_per_micro_batch == 1
        return assign_to_ranks(bins, self.sizes, costs, lengths=self.lengths, num_ranks=num_ranks, repack=repack)

    def for_single_rank(self) -> "Packer":
        """Return a copy of this packer for a run with a single rank, which computes every pack."""
        return replace(self, share=SINGLE_RANK)

    def bins(self, preferences: IntArray, bounds: IntArray | None = None) -> Bins:
        """Return which preferences share a row.

        A preference that is longer than a row is in a bin alone, and takes several rows.
        """
        if bounds is not None:
            return Bins(preferences, bounds)
        is_single = self.arrangement == "separate" or self.sizes[preferences] > self.length
        is_single = np.broadcast_to(is_single, preferences.shape)
        together, single = preferences[~is_single], preferences[is_single]
        bins = pack_into_bins(self.algorithm, self.sizes[together], self.length, self.seed)
        order = np.concatenate([together[bins.order], single])
        return Bins(order, np.concatenate([bins.bounds, bins.bounds[-1] + 1 + np.arange(len(single))]))

    def row_length(self, bin: IntArray) -> int:
        """Return the shortest row length that holds a bin.

        With row lengths 256, 512, 768, 896 and 1024, a bin of 600 tokens takes 768.
        """
        size = int(self.sizes[bin].sum())
        return next((length for length in self.lengths if length >= size), self.length)

    def longest_row(self, bins: Bins) -> int:
        """Return the longest row length that any of the bins takes. Repacking of the last rounds is not taken into account."""
        return max(self.row_length(bin) for bin in bins)

    def num_rows(self, bin: IntArray) -> int:
        """Return how many rows a bin takes.

        A bin takes several rows if its only preference is longer than a row. With arrangement separate, a bin takes one row per
        completion. Every other bin takes one row.
        """
        if self.arrangement != "separate" and int(self.sizes[bin].sum()) <= self.length:
            return 1
        return self.row(bin.tolist(), self.length).token_ids.shape[0]

    def row(self, chosen: list[int], length: int) -> Pack:
        """Lay out some preferences of the set in rows of `length` tokens. `chosen`: their indices in the set."""
        return lay_out(chosen, [self.store[i] for i in chosen], length=length, arrangement=self.arrangement)


def row_sizes(store: Preferences, arrangement: Arrangement) -> IntArray:
    """Return how many tokens each preference takes in a row.

    With arrangement separate, every completion has its own row, and the number of tokens in the longest row is returned.
    Example: a prompt of 4 tokens, completions of 2 and 3 tokens take 9 (shared), 13 (repeated) or 7 (separate).
    """
    if arrangement == "shared":
        return store.num_prompt_tokens + store.num_completion_tokens
    if arrangement == "repeated":
        return store.num_prompt_tokens * store.num_completions + store.num_completion_tokens
    return store.longest


def tokens_of_pairs(num: float, sizes: IntArray, store: Preferences) -> float:
    """Return how many tokens `num` pairs of a set take in rows, on average."""
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
    share: RankShare = SINGLE_RANK,
    hidden_size: int | None = None,
) -> Packer:
    """Make a packer for a set.

    `usual_auto`, `shortest_auto`, `pairs_per_batch`: used to choose the row length if pack_length is `auto`; see `_auto_length`.
    `hidden_size`: of the model, to estimate the cost of attention. None: the cost of a preference is its number of tokens.
    """
    arrangement = arrangement_of(packing)
    sizes = row_sizes(store, arrangement)
    if packing.pack_length != "auto":
        length = packing.pack_length
        _refuse_too_long(store, length)
    elif packing.mode == "dataset" and (prepared := prepared_lengths(store)):
        length = max(prepared)
    elif arrangement == "separate":
        length = int(sizes.max())
    else:
        # Mode dataset forms batches of complete packs, so the length of packs must not depend on the number of ranks.
        num_ranks = 1 if packing.mode == "dataset" else share.num_ranks
        per_rank = None if pairs_per_batch is None else tokens_of_pairs(pairs_per_batch, sizes, store) / num_ranks
        length = _auto_length(sizes, tokens_per_batch=per_rank, usual=usual_auto, shortest=shortest_auto)
    return Packer(
        store=store,
        sizes=sizes,
        lengths=row_lengths(length),
        arrangement=arrangement,
        packs_per_micro_batch=packing.packs_per_micro_batch,
        algorithm=packing.algorithm,
        seed=seed,
        share=share,
        costs=None if hidden_size is None or share == SINGLE_RANK else _costs(store, arrangement, hidden_size),
    )


def _refuse_too_long(store: Preferences, pack_length: int) -> None:
    longest = int(np.argmax(store.longest))
    if store.longest[longest] > in_blocks(pack_length):
        raise ConfigError(
            f"policy.packing.pack_length = {pack_length}, but a sequence at {store.place(longest)} takes "
            f"{store.longest[longest]} tokens. Raise the pack length, or lower policy.max_total_sequence_length."
        )


def _auto_length(sizes: IntArray, *, tokens_per_batch: float | None, usual: int, shortest: int) -> int:
    """Return a row length that holds every preference: `usual`, or a shorter length if batches are small.

    `tokens_per_batch`: tokens of a batch that one rank computes. They are divided into ROWS_PER_BATCH rows, or into fewer rows if
    rows would be shorter than `shortest`.
    """
    wanted = usual
    if tokens_per_batch is not None:
        one_row = tokens_per_batch * LARGER_BATCH
        wanted = min(usual, int(max(tokens_per_batch / ROWS_PER_BATCH, min(one_row, shortest))))
    return max(int(sizes.max()), wanted)


def _costs(store: Preferences, arrangement: Arrangement, hidden_size: int) -> FloatArray:
    lengths = store.num_prompt_tokens, store.completion_lengths.astype(np.int64), store.num_completions
    return row_cost(*lengths, hidden_size=hidden_size, arrangement=arrangement)


def prepared_lengths(store: Preferences) -> set[int]:
    """Return the pack lengths for which `tandem prepare` stored packs together with the tokens."""
    return {facts["pack_length"] for facts in store.packs} if isinstance(store, TokenStore) else set()


def row_lengths(length: int) -> tuple[int, ...]:
    """Return the row lengths of a packer: `length` and several shorter ones, all multiples of the block size.

    Example: length 2048 gives 512, 1152, 1664, 1920, 2048; length 200 gives 128, 256.
    """
    blocks = in_blocks(length) // BLOCK
    return tuple(sorted({max(1, blocks * part // SIXTEENTHS[-1]) * BLOCK for part in SIXTEENTHS}))


def in_blocks(length: int) -> int:
    """Round a number of tokens up to a multiple of the block size: 200 -> 256."""
    return -(-length // BLOCK) * BLOCK
