"""Converts NeMo Aligner's packed files to prepared data, and preferences to NeMo Aligner's packed files."""

from pathlib import Path

import numpy as np

from tandem.columns import COLUMNS
from tandem.config.sections.datasets import Data
from tandem.data.formats.nemo_packs import nemo_pack_tokens, read_nemo, single_pairs, write_nemo
from tandem.data.read.sources import CHUNK_RECORDS, RowError
from tandem.data.store.selection import Preferences
from tandem.data.store.token_store import TokenStore
from tandem.data.store.tokens_file import FORMAT_VERSION
from tandem.data.store.writer import ChunkResult, accept_rows, write_store
from tandem.data.text.tokens import TokenizedPreference
from tandem.errors import ConfigError
from tandem.packing.binning import pack_into_bins
from tandem.storage.cache import content_of, fingerprint, published, read_manifest, write_manifest


def import_nemo(file: Path, folder: Path, data: Data, max_length: int) -> TokenStore:
    """Convert NeMo Aligner's file `packed_*.npy` to a prepared folder.

    The file holds tokens but no text, so the prepared folder can be used with any tokenizer.
    """
    rows = [_usable(row) for pack in read_nemo(file) for row in pack]
    made_of = {
        "sources": [[str(file), str(file.resolve()), content_of(file)]],
        "limits": {"policy.max_total_sequence_length": max_length},
        "text": {},
    }
    scores = (data.default_chosen_reward, data.default_rejected_reward)
    with published(folder, "packs") as aside:
        parts = [rows[start : start + CHUNK_RECORDS] for start in range(0, len(rows), CHUNK_RECORDS)]
        results = (
            accept_rows(part, ChunkResult(), max_length=max_length, overlong=data.overlong, default_scores=scores)
            for part in parts
        )
        facts = write_store(results, aside)
        write_manifest(
            aside,
            format_version=FORMAT_VERSION,
            fingerprint=fingerprint(FORMAT_VERSION, made_of, data.overlong, scores),
            format="NeMo Aligner's packs",
            format_reason="set by --from-nemo",
            made_of=made_of,
            **facts,
        )
    return TokenStore(folder, read_manifest(folder))


def _usable(row: TokenizedPreference) -> TokenizedPreference | RowError:
    chosen, rejected = row.completions
    if np.array_equal(chosen, rejected):
        return RowError(row.place, "equal completions", "the completions are identical as tokens.", kind="filtered")
    return row


def check_for_nemo(store: Preferences, size: int) -> None:
    """Refuse preferences that NeMo Aligner's packs cannot store: pairs of more than `size` tokens, weights and margins."""
    if store.columns:
        raise ConfigError(
            f"--to-nemo: the preferences have a {' and a '.join(store.columns)}, which NeMo Aligner's packs cannot store. "
            f"Leave out --to-nemo, or the data set's {' and '.join(COLUMNS[name].key or name for name in store.columns)}."
        )
    for index in range(len(store)):
        largest = max(nemo_pack_tokens(pair) for pair in single_pairs(store[index]))
        if largest > size:
            raise ConfigError(
                f"--to-nemo: a pack of {size} tokens cannot hold the pair at {store.place(index)}, which takes {largest} "
                "tokens with its prompt repeated for both completions. Raise --pack-sizes, or leave out --to-nemo."
            )


def export_nemo(store: Preferences, folder: Path, *, size: int, algorithm: str, seed: int) -> Path:
    """Write the file `packed_{size}_seed{seed}.npy` in NeMo Aligner's layout.

    The layout repeats the prompt for both completions of a pair.
    """
    pairs = [pair for i in range(len(store)) for pair in single_pairs(store[i])]
    sizes = np.array([nemo_pack_tokens(pair) for pair in pairs])
    file = folder / f"packed_{size}_seed{seed}.npy"
    write_nemo(file, ([pairs[i] for i in bin.tolist()] for bin in pack_into_bins(algorithm, sizes, size, seed)))
    return file
