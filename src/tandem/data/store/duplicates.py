"""TokenStores in; the same stores without repeated preferences out, or an error that names them: `data.duplicates`.

Two preferences are duplicates when their prompts and their pairs of completions are the same tokens; scores do not count.
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
from tandem.data.store.token_store import TokenStore
from tandem.data.store.tokens_file import FORMAT_VERSION
from tandem.data.store.writer import OPPOSED, SHOWN_PER_REASON, TWICE, repeated
from tandem.data.text.tokens import TokenizedPreference
from tandem.errors import DataError
from tandem.storage.cache import cache_dir, fingerprint, published, read_manifest, write_manifest

DUPLICATE = "duplicate"


def without_duplicates(stores: Mapping[str, TokenStore], data: Data) -> dict[str, TokenStore]:
    """The stores as `data.duplicates` says: as they are, without preferences that occur earlier, or refused.

    A preference is compared with those before it in its store and with all stores before that.
    """
    if data.duplicates == "keep":
        return dict(stores)
    found = _find(list(stores.values()))
    if data.duplicates == "error":
        _refuse(list(stores.values()), found)
    return {
        name: _dropped(name, store, rows) if rows else store
        for (name, store), rows in zip(stores.items(), found, strict=True)
    }


def _find(stores: list[TokenStore]) -> list[dict[int, str]]:
    """Of each store, the rows that repeat an earlier one, with the place of that.

    Only the digests of all rows are in memory. They select the rows to compare; the tokens decide.
    """
    digests = np.concatenate([np.zeros(0, np.uint64), *(store.digests for store in stores)])
    starts = np.cumsum([0, *(len(store) for store in stores)])
    order = np.argsort(digests, kind="stable")
    same = np.concatenate([[False], digests[order][1:] == digests[order][:-1]])
    # Where each run of equal digests begins. Equal to the one before: no yes yes no yes -> 0 0 0 3 3
    first = np.maximum.accumulate(np.where(same, 0, np.arange(len(order))))
    found: list[dict[int, str]] = [{} for _ in stores]
    for row, original in sorted(zip(order[same].tolist(), order[first[same]].tolist(), strict=True)):
        number, other = (int(np.searchsorted(starts, index, side="right")) - 1 for index in (row, original))
        own, earlier = int(row - starts[number]), int(original - starts[other])
        if _is_same(stores[number][own], stores[other][earlier]):
            found[number][own] = stores[other].place(earlier)
    return found


def _is_same(one: TokenizedPreference, other: TokenizedPreference) -> bool:
    return np.array_equal(one.prompt, other.prompt) and _pairs(one) == _pairs(other)


def _pairs(preference: TokenizedPreference) -> list[tuple[bytes, bytes]]:
    texts = [completion.tobytes() for completion in preference.completions]
    return sorted((texts[winner], texts[loser]) for winner, loser in preference.pairs)


def _refuse(stores: list[TokenStore], found: list[dict[int, str]]) -> None:
    count = sum(map(len, found))
    for store, rows in zip(stores, found, strict=True):
        if rows:
            row, place = next(iter(rows.items()))
            others = "it" if count == 1 else f"the {count} duplicates"
            raise DataError(
                f"{store.place(row)}: the same prompt and completions as {place}, which data.duplicates=error refuses. Remove "
                f"{others}, or set data.duplicates=drop."
            )


def _dropped(name: str, store: TokenStore, rows: dict[int, str]) -> TokenStore:
    """The store without these rows: one more in the cache, that lists them among its rejects."""
    if len(rows) == len(store):
        raise DataError(
            f"{name}: all {len(store)} preferences occur in earlier training sets, the first, {store.place(0)}, at {rows[0]}, so "
            "data.duplicates=drop leaves none. Leave out this set, or set data.duplicates=keep."
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
    of_rows = blake2b(json.dumps([list(rows.items()), rejects]).encode()).hexdigest()
    own = fingerprint(FORMAT_VERSION, store.fingerprint, of_rows)
    folder = cache_dir() / "tokens" / own
    if not folder.is_dir():
        kept = np.ones(len(store), bool)
        kept[list(rows)] = False
        with published(folder, "tokens") as aside:
            _copy_rows(store.folder / "tokens.arrow", aside / "tokens.arrow", kept)
            _copy_rejects(store.folder / "rejects.jsonl", aside / "rejects.jsonl", rejects)
            facts: dict[str, Any] = {**_facts(store, kept, rejects, aside), "fingerprint": own}
            if store.tokens_fingerprint != store.fingerprint:
                facts["tokens_fingerprint"] = fingerprint(FORMAT_VERSION, store.tokens_fingerprint, of_rows)
            write_manifest(aside, **facts)
    try:
        return TokenStore(folder, read_manifest(folder))
    except (ValueError, OSError) as error:  # pyarrow's of a damaged file is a ValueError
        raise DataError(f"{error}. The tokenised data is damaged: remove {folder} and start again.") from None


def _copy_rows(source: Path, target: Path, kept: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
    """The record batches of a store, less some rows, one batch at a time."""
    with (
        pa.memory_map(str(source)) as file,
        pa.ipc.open_file(file) as reader,
        pa.OSFile(str(target), "wb") as sink,
        pa.ipc.new_file(sink, reader.schema) as writer,
    ):
        start = 0
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            some = batch.filter(pa.array(kept[start : start + batch.num_rows]))
            start += batch.num_rows
            if some.num_rows:
                writer.write_batch(some)


def _copy_rejects(source: Path, target: Path, rejects: list[dict[str, str]]) -> None:
    shutil.copyfile(source, target)
    with target.open("a", encoding="utf-8") as out:
        out.writelines(json.dumps(reject) + "\n" for reject in rejects)


def _facts(
    store: TokenStore, kept: np.ndarray[Any, np.dtype[np.bool_]], rejects: list[dict[str, str]], folder: Path
) -> dict[str, Any]:
    """The manifest of the store, without the rows that were dropped."""
    facts = {key: value for key, value in read_manifest(store.folder).items() if key not in ("files", "packs")}
    counts, limits = facts["counts"], facts["made_of"]["limits"]
    notes, noted_at = repeated(store.digests[kept], folder / "tokens.arrow")
    return facts | {
        "counts": counts | {"accepted": int(kept.sum()), "filtered": counts["filtered"] | {DUPLICATE: len(rejects)}},
        "examples": facts["examples"] + rejects[:SHOWN_PER_REASON],
        "notes": {key: value for key, value in facts["notes"].items() if key not in (TWICE, OPPOSED)} | notes,
        "noted_at": {key: value for key, value in facts["noted_at"].items() if key not in (TWICE, OPPOSED)} | noted_at,
        "made_of": facts["made_of"] | {"limits": limits | {"data.duplicates": "drop"}},
    }
