"""TokenizedPreferences in; a TokenStore on disk out: Arrow columns, memory-mapped, named by a fingerprint of its content."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tandem.cache import cache_dir, content_of, fingerprint, published, read_manifest, write_manifest
from tandem.config.schema import Data, DatasetFields
from tandem.data.files import SourceFile, find_files
from tandem.data.store_writer import SCHEMA, Recipe, format_of, probe, write_store
from tandem.data.template import Template
from tandem.data.tokenizer import state_of
from tandem.data.tokens import TokenizedPreference
from tandem.data.wording import wording_of
from tandem.data.workers import default_workers
from tandem.errors import DataError

# Raised whenever the same input would give other tokens or another layout.
FORMAT_VERSION = 2
# A second process pays for its start from here on.
BYTES_PER_WORKER = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of every row read: accepted + bad + filtered = rows."""

    rows: int
    accepted: int
    bad: dict[str, int]
    filtered: dict[str, int]


class TokenStore:
    """The tokenised preferences of one set, read from disk as they are needed."""

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        self.folder = folder
        self.fingerprint: str = manifest["fingerprint"]
        self.format: str = manifest["format"]
        self.format_reason: str = manifest["format_reason"]
        self.counts = Counts(**manifest["counts"])
        self.examples: list[dict[str, str]] = manifest["examples"]
        self.notes: dict[str, int] = manifest["notes"]
        self.num_duplicates: int = manifest["duplicates"]
        self.longer_than: dict[int, int] = dict(
            sorted((int(limit), count) for limit, count in manifest["longer_than"].items())
        )
        self._columns = _Columns(folder / "tokens.arrow")

    def __len__(self) -> int:
        return self.counts.accepted

    def __getitem__(self, index: int) -> TokenizedPreference:
        column = self._columns
        lengths = column.row("lengths", index)
        flat = column.row("completions", index)
        ends = np.cumsum(lengths)
        return TokenizedPreference(
            prompt=column.row("prompt", index),
            completions=tuple(flat[end - n : end] for n, end in zip(lengths, ends, strict=True)),
            pairs=tuple(zip(column.row("winners", index).tolist(), column.row("losers", index).tolist(), strict=True)),
            scores=tuple(column.row("scores", index).tolist()),
            place=self.place(index),
            unscored=self._unscored(index, lengths),
        )

    def _unscored(self, index: int, lengths: NDArray[np.int32]) -> tuple[NDArray[np.int32], ...]:
        """Positions that are not scored, per completion, from positions over all. Lengths [4, 5], 1 and 6 -> [1], [2]."""
        flat = self._columns.row("unscored", index)
        if not len(flat):
            return ()
        ends = np.cumsum(lengths)
        parts = np.split(flat, np.searchsorted(flat, ends[:-1]))
        return tuple((part - (end - n)).astype(np.int32) for part, n, end in zip(parts, lengths, ends, strict=True))

    def __iter__(self) -> Iterator[TokenizedPreference]:
        return (self[i] for i in range(len(self)))

    def place(self, index: int) -> str:
        """The file and line a preference was read from."""
        return self._columns.text("place", index)

    @cached_property
    def num_pairs(self) -> NDArray[np.int64]:
        """Pairs of each preference."""
        return self._columns.sizes("winners")

    @cached_property
    def num_prompt_tokens(self) -> NDArray[np.int64]:
        return self._columns.sizes("prompt")

    @cached_property
    def num_completion_tokens(self) -> NDArray[np.int64]:
        """Of each preference, over all its completions."""
        return self._columns.sizes("completions")

    @cached_property
    def num_scored_tokens(self) -> NDArray[np.int64]:
        """Those of them that are scored: all but tool turns."""
        return self.num_completion_tokens - self._columns.sizes("unscored")

    @cached_property
    def completion_lengths(self) -> NDArray[np.int32]:
        """Tokens of every completion, one after another."""
        return self._columns.values("lengths")

    @cached_property
    def num_completions(self) -> NDArray[np.int64]:
        return self._columns.sizes("lengths")

    @cached_property
    def highest_token_id(self) -> int:
        return max(self._columns.highest("prompt"), self._columns.highest("completions"))

    @cached_property
    def longest(self) -> NDArray[np.int64]:
        """Tokens of each preference's prompt and longest completion."""
        longest = self._columns.reduce("lengths", np.maximum)
        return self.num_prompt_tokens + longest


class _Columns:
    """Arrow record batches as numpy: one offset lookup and one slice a row, no Python objects."""

    def __init__(self, path: Path):
        self._file = pa.memory_map(str(path))
        reader = pa.ipc.open_file(self._file)
        self._batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])
        self._arrays = [
            {
                name: (
                    batch.column(name).offsets.to_numpy(),
                    batch.column(name).values.to_numpy(zero_copy_only=False),
                )
                for name in SCHEMA.names
                if name != "place"
            }
            for batch in self._batches
        ]

    def _find(self, index: int) -> tuple[int, int]:
        batch = int(np.searchsorted(self._starts, index, side="right")) - 1
        return batch, index - int(self._starts[batch])

    def row(self, name: str, index: int) -> NDArray[Any]:
        batch, i = self._find(index)
        offsets, values = self._arrays[batch][name]
        return values[offsets[i] : offsets[i + 1]]

    def text(self, name: str, index: int) -> str:
        batch, i = self._find(index)
        return self._batches[batch].column(name)[i].as_py()

    def sizes(self, name: str) -> NDArray[np.int64]:
        return np.concatenate([np.zeros(0, np.int64), *(np.diff(arrays[name][0]) for arrays in self._arrays)])

    def values(self, name: str) -> NDArray[Any]:
        return np.concatenate([np.zeros(0, np.int32), *(arrays[name][1] for arrays in self._arrays)])

    def highest(self, name: str) -> int:
        return max(int(arrays[name][1].max()) for arrays in self._arrays)

    def reduce(self, name: str, ufunc: np.ufunc) -> NDArray[np.int64]:
        parts = [ufunc.reduceat(values, offsets[:-1]) for offsets, values in (a[name] for a in self._arrays)]
        return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)


def open_store(
    source: str,
    keys: DatasetFields,
    template: Template,
    data: Data,
    max_length: int,
    progress: Callable[[float], None] = lambda share: None,
) -> TokenStore:
    """The tokenised form of a set: found in the cache by a fingerprint of all that decides it, or made now."""
    files = find_files(source, keys)
    wording = wording_of(keys)
    content = [[file.name, content_of(file.path)] for file in files]
    cut = data.overlong if data.overlong.startswith("truncate") else None
    settings = [keys.dataset_name, keys.prompt_key, keys.chosen_key, keys.rejected_key, data.pairing, max_length, cut]
    name = fingerprint(FORMAT_VERSION, content, settings, [wording.prompt, wording.system], _content_of(template))
    folder = cache_dir() / "tokens" / name
    if not folder.is_dir():
        format_name, reason = format_of(files, keys)
        recipe = Recipe(template, keys, format_name, wording, data.pairing, max_length, data.overlong)
        with published(folder) as aside:
            facts = write_store(files, recipe, aside, num_workers=_num_workers(data, files), progress=progress)
            write_manifest(
                aside,
                format_version=FORMAT_VERSION,
                fingerprint=name,
                format=format_name,
                format_reason=reason,
                **facts,
            )
    try:
        store = TokenStore(folder, read_manifest(folder))
    except (ValueError, OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{error}. The tokenised data is damaged: remove {folder} and start again.") from None
    judge(store, source, data)
    return store


def _num_workers(data: Data, files: list[SourceFile]) -> int:
    if data.num_workers != "auto":
        return data.num_workers
    size = sum(file.path.stat().st_size for file in files)
    return min(default_workers(), 1 + size // BYTES_PER_WORKER)


def judge(store: TokenStore, source: str, data: Data) -> None:
    """Stop where too much of the file could not be used; the message counts every reason and shows a few of each."""
    counts = store.counts
    bad, filtered = sum(counts.bad.values()), sum(counts.filtered.values())
    shown, all_bad = _examples(store, counts.bad | counts.filtered), _examples(store, counts.bad)
    if counts.rows == 0:
        raise DataError(f"{source}: the file holds no rows.")
    if bad and data.on_bad_row == "error":
        raise DataError(
            f"{source}: {bad} of {counts.rows} rows are malformed:\n{all_bad}\n"
            f"Mend them, or leave them out: data.on_bad_row=skip data.max_bad_share={_share_for(bad, counts.rows)}."
        )
    if bad > data.max_bad_share * counts.rows:
        raise DataError(
            f"{source}: {bad} of {counts.rows} rows are malformed, over data.max_bad_share={data.max_bad_share}:\n{all_bad}\n"
            f"Mend them, or set data.max_bad_share={_share_for(bad, counts.rows)}."
        )
    if data.overlong == "error" and counts.filtered.get("over-long"):
        raise DataError(
            f"{source}: {counts.filtered['over-long']} of {counts.rows} preferences are over-long:\n{shown}\n"
            "Raise policy.max_total_sequence_length, or set data.overlong=drop."
        )
    if filtered > data.max_filtered_share * counts.rows:
        raise DataError(
            f"{source}: {filtered} of {counts.rows} rows were filtered, over "
            f"data.max_filtered_share={data.max_filtered_share}:\n{shown}\n"
            f"{_remedy(counts)} or set data.max_filtered_share={_share_for(filtered, counts.rows)}."
        )
    if counts.accepted == 0:
        raise DataError(f"{source}: no usable preference among {counts.rows} rows:\n{shown}")


def _share_for(count: int, rows: int) -> float:
    """The smallest share, in whole percent, that lets so many rows pass: 8 of 113 -> 0.08."""
    return math.ceil(100 * count / rows) / 100


def _remedy(counts: Counts) -> str:
    return (
        "Raise policy.max_total_sequence_length, mend the file," if "over-long" in counts.filtered else "Mend the file,"
    )


def _examples(store: TokenStore, counts: dict[str, int]) -> str:
    lines = []
    for reason, count in counts.items():
        lines.append(f"  {reason}: {count}")
        lines += [f"    {e['place']}: {e['message']}" for e in store.examples if e["reason"] == reason]
    return "\n".join(lines)


def _content_of(template: Template) -> list[Any]:
    """What decides the tokens: the tokenizer's own state, the template, and how it renders today."""
    tokenizer = template.tokenizer
    today = probe(template)
    return [state_of(tokenizer), tokenizer.eos_token, tokenizer.bos_token, template.source, template.kwargs, today]
