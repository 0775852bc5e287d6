"""A set packed once, as a whole: which preferences share a row, found on disk by a fingerprint, or made and kept."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tandem.cache import cache_dir, fingerprint, published, read_manifest, write_manifest
from tandem.data.store import TokenStore
from tandem.errors import DataError
from tandem.packing.binning import Bins
from tandem.packing.packer import Packer

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
        return read_packs(packer.store.folder / file_name(packer.length))  # verified with the rest of its folder
    folder = cache_dir() / "packs" / fingerprint(facts)
    if not folder.is_dir():
        with published(folder, "packs") as aside:
            write_packs(packer.bins(np.arange(len(packer.store))), aside / file_name(packer.length))
            write_manifest(aside, **facts)
    try:
        read_manifest(folder)
        return read_packs(folder / file_name(packer.length))
    except (ValueError, OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{error}. The packs are damaged: remove {folder} and start again.") from None


def file_name(length: int) -> str:
    return f"packs-{length}.arrow"


def write_packs(bins: Bins, file: Path) -> None:
    lists = pa.LargeListArray.from_arrays(pa.array(bins.bounds), pa.array(bins.order))
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_batch(pa.record_batch([lists], schema=SCHEMA))


def read_packs(file: Path) -> Bins:
    with pa.memory_map(str(file)) as source:
        table = pa.ipc.open_file(source).read_all().combine_chunks()
    lists = table["preferences"].chunk(0)
    return Bins(lists.values.to_numpy(), lists.offsets.to_numpy())
