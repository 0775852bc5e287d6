"""Packs a whole set before training (policy.packing.mode=dataset), and stores the packs on disk for later runs."""

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

# Increased whenever the same sizes would be packed differently.
PACKS_VERSION = 1
SCHEMA = pa.schema({"preferences": pa.large_list(pa.int64())})


def pack_settings(packer: Packer) -> dict[str, Any]:
    """Return all settings and fingerprints that determine how a set is packed."""
    return {
        "version": PACKS_VERSION,
        "tokens": packer.store.fingerprint,
        "pack_length": packer.length,
        "arrangement": packer.arrangement,
        "algorithm": packer.algorithm,
        "seed": packer.seed,
    }


def open_packs(packer: Packer) -> Bins:
    """Return the packs of a whole set. If no packs with these settings are stored yet, pack the set and store the packs."""
    settings = pack_settings(packer)
    if isinstance(packer.store, TokenStore) and settings in packer.store.packs:
        folder = packer.store.folder
        try:
            if file_name(packer.length) not in packer.store.verified:
                raise ValueError(f"{folder}/manifest.json does not list {file_name(packer.length)}")
            return _read_checked(folder / file_name(packer.length), packer)  # its SHA-256 was verified with the tokens
        except ValueError as error:
            raise DataError(f"{error}. The prepared data is damaged. Prepare it again, with tandem prepare.") from None
    folder = cache_dir() / "packs" / fingerprint(settings)
    if not folder.is_dir():
        with published(folder, "packs") as aside:
            write_packs(packer.bins(np.arange(len(packer.store))), aside / file_name(packer.length))
            write_manifest(aside, **settings)
    try:
        read_manifest(folder)
        return _read_checked(folder / file_name(packer.length), packer)
    except (ValueError, OSError) as error:
        raise DataError(f"{error}. The packs are damaged: remove {folder} and start again.") from None


def _read_checked(file: Path, packer: Packer) -> Bins:
    """Read packs and check them against the set.

    Raise ValueError unless every preference is in exactly one pack, no pack is empty, and every pack of several preferences fits
    in a row.
    """
    bins = read_packs(file)
    num = len(packer.store)
    if not np.array_equal(np.sort(bins.order), np.arange(num)):
        raise ValueError(f"{file} does not hold each of the {num} preferences exactly once")
    sizes = np.diff(bins.bounds)
    if not (sizes > 0).all():
        raise ValueError(f"{file} has a pack without preferences")
    tokens = np.add.reduceat(packer.sizes[bins.order], bins.bounds[:-1]) if num else sizes
    if ((tokens > packer.length) & (sizes > 1)).any():  # a single preference may take several rows
        raise ValueError(f"{file} has a pack with more than {packer.length} tokens")
    return bins


def file_name(length: int) -> str:
    return f"packs-{length}.arrow"


def write_packs(bins: Bins, file: Path) -> None:
    lists = pa.LargeListArray.from_arrays(pa.array(bins.bounds), pa.array(bins.order))
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_batch(pa.record_batch([lists], schema=SCHEMA))


def read_packs(file: Path) -> Bins:
    """Read packs from a file into memory. Raise ValueError if the file is damaged."""
    batches = open_batches(file, SCHEMA)
    if len(batches) != 1:
        raise ValueError(f"{file} has {len(batches)} Arrow record batches instead of one")
    lists = batches[0].column("preferences")
    return Bins(lists.values.to_numpy().copy(), lists.offsets.to_numpy().copy())
