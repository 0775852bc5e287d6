"""A packer and its packs in; what they give out: fill, packs, and tokens spared against padding."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tandem.packing.binning import Bins
from tandem.packing.packer import IntArray, Packer, row_sizes

# What padding is compared with: this many sequences go together, each padded to the longest of them.
PADDED_TOGETHER = 16


@dataclass(frozen=True, slots=True)
class Outlook:
    """How a set packs into rows of one length."""

    pack_length: int
    algorithm: str
    num_packs: int
    fill: float
    preferences_per_pack: float
    pairs_per_pack: float
    batch_in_packs: int  # packs that hold the pairs of a global batch, about
    padding_factor: float  # positions that padding would compute, over those of the packs


def outlook(packer: Packer, bins: Bins, pairs_per_batch: int) -> Outlook:
    """Of the preferences that are in the bins."""
    store, packed = packer.store, bins.order
    rows = [packer.row_length(bin) * packer.num_rows(bin) for bin in bins]
    tokens = row_sizes(store, "shared" if packer.arrangement == "shared" else "repeated")[packed]
    pairs_per_pack = float(store.num_pairs[packed].sum()) / len(bins)
    return Outlook(
        pack_length=packer.length,
        algorithm=packer.algorithm,
        num_packs=len(bins),
        fill=int(tokens.sum()) / sum(rows),
        preferences_per_pack=len(packed) / len(bins),
        pairs_per_pack=pairs_per_pack,
        batch_in_packs=min(len(bins), max(1, round(pairs_per_batch / pairs_per_pack))),
        padding_factor=_padded_positions(packer, packed) / sum(rows),
    )


def packed_by_batch(packer: Packer, batches: Iterable[IntArray]) -> Bins:
    """The rows of batches that are packed one by one: [0 1], [2] and [3 4] -> order 0 1 2 3 4, bounds 0 2 3 5."""
    packed = [packer.bins(batch) for batch in batches]
    sizes = [size for bins in packed for size in np.diff(bins.bounds)]
    return Bins(np.concatenate([bins.order for bins in packed]), np.cumsum([0, *sizes]))


def _padded_positions(packer: Packer, packed: IntArray) -> int:
    """Sequences in a shuffled order, some at a time, each padded to the longest: lengths 3 5 | 2 2 -> 10 + 4."""
    store = packer.store
    order = np.random.default_rng(0).permutation(np.sort(packed))
    lengths = np.concatenate(
        [len(row.prompt) + np.array([len(c) for c in row.completions]) for row in (store[int(i)] for i in order)]
    )
    padding = -len(lengths) % PADDED_TOGETHER
    groups = np.pad(lengths, (0, padding)).reshape(-1, PADDED_TOGETHER)
    return int((groups.max(1) * (groups > 0).sum(1)).sum())
