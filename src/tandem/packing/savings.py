"""Computes how well a set packs: how full its rows are, and how many times as many positions padding takes."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tandem.packing.binning import Bins
from tandem.packing.layout import IntArray
from tandem.packing.packer import Packer, row_sizes

# Packing is compared with batches of this many sequences, each padded to the longest of its batch.
PADDED_BATCH_SIZE = 16


@dataclass(frozen=True, slots=True)
class PackingStats:
    """Statistics of a set that is packed into rows."""

    pack_length: int
    algorithm: str
    num_packs: int
    fill: float
    preferences_per_pack: float
    pairs_per_pack: float
    batch_in_packs: int  # approximate number of packs in a global batch
    padding_factor: float  # positions that padding would compute, divided by those of the packs


def packing_stats(packer: Packer, bins: Bins, pairs_per_batch: int) -> PackingStats:
    """Return the statistics of a set whose preferences are packed in `bins`."""
    store, packed = packer.store, bins.order
    positions = num_positions(packer, bins)
    tokens = num_tokens(packer)[packed]
    pairs_per_pack = float(store.num_pairs[packed].sum()) / len(bins)
    return PackingStats(
        pack_length=packer.length,
        algorithm=packer.algorithm,
        num_packs=len(bins),
        fill=int(tokens.sum()) / positions,
        preferences_per_pack=len(packed) / len(bins),
        pairs_per_pack=pairs_per_pack,
        batch_in_packs=min(len(bins), max(1, round(pairs_per_batch / pairs_per_pack))),
        padding_factor=_padded_positions(packer, packed) / positions,
    )


def num_positions(packer: Packer, bins: Bins) -> int:
    """Return how many positions the rows of all bins have, including filler."""
    return sum(packer.row_length(bin) * packer.num_rows(bin) for bin in bins)


def num_tokens(packer: Packer) -> IntArray:
    """Return how many tokens of each preference of the set are computed: [preferences]. Filler is not counted."""
    return row_sizes(packer.store, "shared" if packer.arrangement == "shared" else "repeated")


def packed_by_batch(packer: Packer, batches: Iterable[IntArray]) -> Bins:
    """Pack each batch separately, and return the bins of all batches.

    Example: bins [0 1] and [2] of one batch and [3 4] of the next are returned as order 0 1 2 3 4, bounds 0 2 3 5.
    """
    packed = [packer.bins(batch) for batch in batches]
    sizes = [size for bins in packed for size in np.diff(bins.bounds)]
    return Bins(np.concatenate([bins.order for bins in packed]), np.cumsum([0, *sizes]))


def _padded_positions(packer: Packer, packed: IntArray) -> int:
    """Return how many positions the shuffled sequences take in batches that are padded to their longest sequence.

    Example: in batches of 2, sequences of lengths 3 5 | 2 2 take 10 + 4 positions.
    """
    store = packer.store
    order = np.random.default_rng(0).permutation(np.sort(packed))
    lengths = np.concatenate(
        [len(row.prompt) + np.array([len(c) for c in row.completions]) for row in (store[int(i)] for i in order)]
    )
    padding = -len(lengths) % PADDED_BATCH_SIZE
    groups = np.pad(lengths, (0, padding)).reshape(-1, PADDED_BATCH_SIZE)
    return int((groups.max(1) * (groups > 0).sum(1)).sum())
