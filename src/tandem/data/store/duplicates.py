"""Implements `data.duplicates`: keeps, drops or refuses preferences that occur more than once.

Two preferences are duplicates if their prompts and their pairs of completions have the same tokens. Scores are ignored.
"""

import json
import shutil
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tandem.config.sections.datasets import Data
from tandem.data.store.token_store import TokenStore, open_cached_store
from tandem.data.store.tokens_file import FORMAT_VERSION
from tandem.data.store.writer import REPEATED, SHOWN_PER_REASON, SWAPPED, count_repeats, pair_bytes
from tandem.data.text.tokens import TokenizedPreference
from tandem.errors import DataError
from tandem.storage.cache import cache_dir, fingerprint, published, read_manifest, write_manifest

DUPLICATE = "duplicate"


def without_duplicates(stores: Mapping[str, TokenStore], data: Data) -> dict[str, TokenStore]:
    """Apply `data.duplicates`: keep the stores unchanged, drop duplicates from them, or raise an error.

    A preference is a duplicate if an equal preference comes earlier in the same store, or is in an earlier store.
    """
    if data.duplicates == "keep":
        return dict(stores)
    found = _find_duplicates(list(stores.values()))
    if data.duplicates == "error":
        _refuse(list(stores.values()), found)
    return {
        name: _without_rows(name, store, rows) if rows else store
        for (name, store), rows in zip(stores.items(), found, strict=True)
    }


def _find_duplicates(stores: list[TokenStore]) -> list[dict[int, str]]:
    """Return a dict for each store: row number of a duplicate -> file and line of its first occurrence.

    First the digests of all rows are compared. Tokens are read and compared only for rows with equal digests.
    """
    digests = np.concatenate([np.zeros(0, np.uint64), *(store.digests for store in stores)])
    starts = np.cumsum([0, *(len(store) for store in stores)])
    order = np.argsort(digests, kind="stable")
    same = np.concatenate([[False], digests[order][1:] == digests[order][:-1]])
    # The start of each run of equal digests. Is it equal to the previous one? no yes yes no yes -> 0 0 0 3 3
    first = np.maximum.accumulate(np.where(same, 0, np.arange(len(order))))
    found: list[dict[int, str]] = [{} for _ in stores]
    for row, original in sorted(zip(order[same].tolist(), order[first[same]].tolist(), strict=True)):
        number, other = (int(np.searchsorted(starts, index, side="right")) - 1 for index in (row, original))
        own, earlier = int(row - starts[number]), int(original - starts[other])
        if _is_same(stores[number][own], stores[other][earlier]):
            found[number][own] = stores[other].place(earlier)
    return found


def _is_same(one: TokenizedPreference, other: TokenizedPreference) -> bool:
    return np.array_equal(one.prompt, other.prompt) and pair_bytes(one) == pair_bytes(other)


def _refuse(stores: list[TokenStore], found: list[dict[int, str]]) -> None:
    count = sum(map(len, found))
    for store, rows in zip(stores, found, strict=True):
        if rows:
            row, place = next(iter(rows.items()))
            which = "the duplicate" if count == 1 else f"all {count} duplicates"
            raise DataError(
                f"{store.place(row)}: the row has the same prompt and completions as {place}, which data.duplicates=error "
                f"does not allow. Remove {which}, or set data.duplicates=drop."
            )


def _without_rows(name: str, store: TokenStore, rows: dict[int, str]) -> TokenStore:
    """Write a copy of the store without the duplicates in `rows` to the cache. Return the copy.

    The rejects.jsonl of the copy lists the removed rows.
    """
    if len(rows) == len(store):
        raise DataError(
            f"{name}: all {len(store)} preferences are also in earlier training sets ({store.place(0)} is the same as "
            f"{rows[0]}), so data.duplicates=drop leaves none. Leave out this set, or set data.duplicates=keep."
        )
    rejects = [
        {
            "place": store.place(row),
            "kind": "filtered",
            "reason": DUPLICATE,
            "message": f"the same prompt and completions as {place}.",
        }
        for row, place in rows.items()
    ]
    digest = blake2b(json.dumps([list(rows.items()), rejects]).encode()).hexdigest()
    new_fingerprint = fingerprint(FORMAT_VERSION, store.fingerprint, digest)
    folder = cache_dir() / "tokens" / new_fingerprint
    if not folder.is_dir():
        kept = np.ones(len(store), bool)
        kept[list(rows)] = False
        with published(folder, "tokens") as aside:
            _copy_rows(store.folder / "tokens.arrow", aside / "tokens.arrow", kept)
            _copy_rejects(store.folder / "rejects.jsonl", aside / "rejects.jsonl", rejects)
            facts: dict[str, Any] = {**_facts(store, kept, rejects, aside), "fingerprint": new_fingerprint}
            if store.tokens_fingerprint != store.fingerprint:
                facts["tokens_fingerprint"] = fingerprint(FORMAT_VERSION, store.tokens_fingerprint, digest)
            write_manifest(aside, **facts)
    return open_cached_store(folder)


def _copy_rows(source: Path, target: Path, kept: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
    """Copy those rows of a tokens.arrow file that are marked in `kept`, one record batch at a time."""
    with (
        pa.memory_map(str(source)) as file,
        pa.ipc.open_file(file) as reader,
        pa.OSFile(str(target), "wb") as sink,
        pa.ipc.new_file(sink, reader.schema) as writer,
    ):
        start = 0
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            filtered = batch.filter(pa.array(kept[start : start + batch.num_rows]))
            start += batch.num_rows
            if filtered.num_rows:
                writer.write_batch(filtered)


def _copy_rejects(source: Path, target: Path, rejects: list[dict[str, str]]) -> None:
    shutil.copyfile(source, target)
    with target.open("a", encoding="utf-8") as out:
        out.writelines(json.dumps(reject) + "\n" for reject in rejects)


def _facts(
    store: TokenStore, kept: np.ndarray[Any, np.dtype[np.bool_]], rejects: list[dict[str, str]], folder: Path
) -> dict[str, Any]:
    """Return the manifest of the store, changed to describe the copy without duplicates."""
    facts = {key: value for key, value in read_manifest(store.folder).items() if key not in ("files", "packs")}
    counts, limits = facts["counts"], facts["made_of"]["limits"]
    notes, noted_at = count_repeats(store.digests[kept], folder / "tokens.arrow")
    return facts | {
        "counts": counts | {"accepted": int(kept.sum()), "filtered": counts["filtered"] | {DUPLICATE: len(rejects)}},
        "examples": facts["examples"] + rejects[:SHOWN_PER_REASON],
        "notes": {key: value for key, value in facts["notes"].items() if key not in (REPEATED, SWAPPED)} | notes,
        "noted_at": {key: value for key, value in facts["noted_at"].items() if key not in (REPEATED, SWAPPED)}
        | noted_at,
        "made_of": facts["made_of"] | {"limits": limits | {"data.duplicates": "drop"}},
    }
