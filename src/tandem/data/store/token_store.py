"""A TokenStore: the tokenised preferences of one set on disk, in Arrow columns, memory-mapped, named by their content."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.data.store.check import Columns, check_manifest, check_preferences, open_batches
from tandem.data.store.writer import SCHEMA
from tandem.data.text.tokens import TokenizedPreference

# Raised whenever the same input would give other tokens or another layout.
FORMAT_VERSION = 11


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of every row read: accepted + bad + filtered = rows."""

    rows: int
    accepted: int
    bad: dict[str, int]
    filtered: dict[str, int]


class TokenStore:
    """The tokenised preferences of one set, read from disk as they are needed.

    Everything is validated when it is opened, whoever wrote it; ValueError says what is wrong.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        check_manifest(manifest, folder)
        self.folder = folder
        self.fingerprint: str = manifest["fingerprint"]
        self.format: str = manifest["format"]
        self.format_reason: str = manifest["format_reason"]
        self.files: list[str] = [name for name, _, _ in manifest["made_of"]["sources"]]
        self.counts = Counts(**manifest["counts"])
        self.examples: list[dict[str, str]] = manifest["examples"]
        self.packs: list[dict[str, Any]] = manifest.get("packs", [])  # how it was packed, by `tandem prepare`
        self.verified: frozenset[str] = frozenset(manifest.get("files", ()))  # files whose SHA-256 is in the manifest
        self.notes: dict[str, int] = manifest["notes"]
        self.noted_at: dict[str, str] = manifest["noted_at"]  # the first place of each note that has one
        self.longer_than: dict[int, int] = dict(
            sorted((int(limit), count) for limit, count in manifest["longer_than"].items())
        )
        self._columns = _Columns(folder / "tokens.arrow")
        if len(self._columns) != len(self):
            raise ValueError(f"{folder}/tokens.arrow has {len(self._columns)} rows where the manifest says {len(self)}")

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
    def digests(self) -> NDArray[np.uint64]:
        """Of the tokens of each preference (`store_writer.digest_of`)."""
        return self._columns.numbers("digest")

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
    def lacks_scores(self) -> NDArray[np.bool_]:
        """Whether some completion of each preference has no score."""
        missing = self._columns.reduce("scores", np.add)  # NaN adds up to NaN
        return np.isnan(missing)

    @cached_property
    def score_spread(self) -> NDArray[np.float64]:
        """How far apart the highest and the lowest score of each preference are; NaN where one is missing."""
        highest, lowest = (self._columns.reduce("scores", ufunc) for ufunc in (np.maximum, np.minimum))
        return highest.astype(np.float64) - lowest.astype(np.float64)

    @cached_property
    def highest_token_id(self) -> int:
        return max(self._columns.highest("prompt"), self._columns.highest("completions"))

    @cached_property
    def longest(self) -> NDArray[np.int64]:
        """Tokens of each preference's prompt and longest completion."""
        longest = self._columns.reduce("lengths", np.maximum).astype(np.int64)
        return self.num_prompt_tokens + longest


class _Columns:
    """Arrow record batches as numpy: one offset lookup and one slice a row, no Python objects."""

    def __init__(self, path: Path):
        self._batches = open_batches(path, SCHEMA)
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])
        self._arrays: list[Columns] = [
            {
                name: (batch.column(name).offsets.to_numpy(), batch.column(name).values.to_numpy())
                for name in SCHEMA.names
                if name not in ("digest", "place")
            }
            for batch in self._batches
        ]
        for number, columns in enumerate(self._arrays):
            check_preferences(columns, f"{path}: batch {number}")

    def __len__(self) -> int:
        return int(self._starts[-1])

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

    def numbers(self, name: str) -> NDArray[Any]:
        """A column of one number a row."""
        return np.concatenate([np.zeros(0, np.uint64), *(batch.column(name).to_numpy() for batch in self._batches)])

    def sizes(self, name: str) -> NDArray[np.int64]:
        return np.concatenate([np.zeros(0, np.int64), *(np.diff(arrays[name][0]) for arrays in self._arrays)])

    def values(self, name: str) -> NDArray[Any]:
        return np.concatenate([np.zeros(0, np.int32), *(arrays[name][1] for arrays in self._arrays)])

    def highest(self, name: str) -> int:
        return max(int(arrays[name][1].max()) for arrays in self._arrays)

    def reduce(self, name: str, ufunc: np.ufunc) -> NDArray[np.int64]:
        parts = [ufunc.reduceat(values, offsets[:-1]) for offsets, values in (a[name] for a in self._arrays)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)
