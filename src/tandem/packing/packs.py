"""A set packed once, as a whole: which preferences share a row, found on disk by a fingerprint, or made and kept."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tandem.data.store.check import open_batches
from tandem.data.store.token_store import TokenStore
from tandem.errors import DataError
from tandem.packing.binning import Bins
from tandem.packing.packer import Packer
from tandem.storage.cache import cache_dir, fingerprint, published, read_manifest, write_manifest

# Raised whenever the same sizes would be packed otherwise.
PACKS_VERSION = 1
SCHEMA = pa.schema({"preferences": pa.large_list(pa.int64())})


def facts_of(packer: Packer) -> dict[str, Any]:
    """All that decides how a set is packed."""
    return {
        "version": PACKS_VERSION,
        "tokens": packer.store.fingerprint,
        "pack_length": packer.length,
        "arrangement": packer.arrangement,
        "algorithm": packer.algorithm,
        "seed": packer.seed,
    }


def open_packs(packer: Packer) -> Bins:
    """The packs of a whole set: as prepared earlier, or made now and kept for the next run."""
    facts = facts_of(packer)
    if isinstance(packer.store, TokenStore) and facts in packer.store.packs:
        folder = packer.store.folder
        try:
            if file_name(packer.length) not in packer.store.verified:
                raise ValueError(f"{folder}/manifest.json does not name {file_name(packer.length)}")
            return _checked(folder / file_name(packer.length), packer)  # its SHA-256 was verified with the tokens'
        except ValueError as error:
            raise DataError(f"{error}. The prepared data is damaged. Prepare it again, with tandem prepare.") from None
    folder = cache_dir() / "packs" / fingerprint(facts)
    if not folder.is_dir():
        with published(folder, "packs") as aside:
            write_packs(packer.bins(np.arange(len(packer.store))), aside / file_name(packer.length))
            write_manifest(aside, **facts)
    try:
        read_manifest(folder)
        return _checked(folder / file_name(packer.length), packer)
    except (ValueError, OSError) as error:
        raise DataError(f"{error}. The packs are damaged: remove {folder} and start again.") from None


def _checked(file: Path, packer: Packer) -> Bins:
    """Packs from disk, if each preference of the set is in one of them and none holds more than fits in a row."""
    bins = read_packs(file)
    num = len(packer.store)
    if not np.array_equal(np.sort(bins.order), np.arange(num)):
        raise ValueError(f"{file} does not hold each of {num} preferences once")
    sizes = np.diff(bins.bounds)
    if not (sizes > 0).all():
        raise ValueError(f"{file} has a pack without preferences")
    tokens = np.add.reduceat(packer.sizes[bins.order], bins.bounds[:-1]) if num else sizes
    if ((tokens > packer.length) & (sizes > 1)).any():  # one that is longer than a row has several to itself
        raise ValueError(f"{file} has a pack of over {packer.length} tokens")
    return bins


def file_name(length: int) -> str:
    return f"packs-{length}.arrow"


def write_packs(bins: Bins, file: Path) -> None:
    lists = pa.LargeListArray.from_arrays(pa.array(bins.bounds), pa.array(bins.order))
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_batch(pa.record_batch([lists], schema=SCHEMA))


def read_packs(file: Path) -> Bins:
    """Packs as written, copied into memory; ValueError says what is wrong with them."""
    batches = open_batches(file, SCHEMA)
    if len(batches) != 1:
        raise ValueError(f"{file} has {len(batches)} batches where tandem writes one")
    lists = batches[0].column("preferences")
    return Bins(lists.values.to_numpy().copy(), lists.offsets.to_numpy().copy())
