"""TokenStore: the tokenised preferences of one set, memory-mapped from a folder with tokens.arrow and a manifest."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.data.store.check import check_manifest
from tandem.data.store.tokens_file import TokensFile
from tandem.data.text.tokens import TokenizedPreference
from tandem.errors import DataError
from tandem.storage.cache import read_manifest


@dataclass(frozen=True, slots=True)
class Counts:
    """The number of rows of a set: in total, accepted, bad (by reason) and filtered (by reason)."""

    rows: int
    accepted: int
    bad: dict[str, int]
    filtered: dict[str, int]


class TokenStore:
    """The tokenised preferences of one set, read from disk on access.

    The constructor validates the manifest and all columns, and raises ValueError if they are not valid.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        check_manifest(manifest, folder)
        self.folder = folder
        self.fingerprint: str = manifest["fingerprint"]
        # Identifies the tokens only: equal for sets that differ only in optional columns, such as weights.
        self.tokens_fingerprint: str = manifest.get("tokens_fingerprint", self.fingerprint)
        self.format: str = manifest["format"]
        self.format_reason: str = manifest["format_reason"]
        self.files: list[str] = [name for name, _, _ in manifest["made_of"]["sources"]]
        self.counts = Counts(**manifest["counts"])
        self.examples: list[dict[str, str]] = manifest["examples"]
        self.packs: list[dict[str, Any]] = manifest.get("packs", [])  # the packs that `tandem prepare` wrote for it
        self.verified: frozenset[str] = frozenset(manifest.get("files", ()))  # files whose SHA-256 is in the manifest
        self.notes: dict[str, int] = manifest["notes"]
        self.noted_at: dict[str, str] = manifest["noted_at"]  # the place of the first row with each note
        self.longer_than: dict[int, int] = dict(
            sorted((int(limit), count) for limit, count in manifest["longer_than"].items())
        )
        self._file = TokensFile(folder / "tokens.arrow")
        if len(self._file) != len(self):
            raise ValueError(f"{folder}/tokens.arrow has {len(self._file)} rows, but its manifest says {len(self)}")

    def __len__(self) -> int:
        return self.counts.accepted

    def __getitem__(self, index: int) -> TokenizedPreference:
        return self._file.preference(index)

    @property
    def columns(self) -> tuple[str, ...]:
        """The optional columns that the set has, such as weight."""
        return self._file.columns

    def __iter__(self) -> Iterator[TokenizedPreference]:
        return (self[i] for i in range(len(self)))

    def place(self, index: int) -> str:
        """Return the file and line that a preference was read from, such as pairs.jsonl:3."""
        return self._file.text("place", index)

    @cached_property
    def digests(self) -> NDArray[np.uint64]:
        """A digest of the tokens of each preference, as computed by `writer.digest_of`."""
        return self._file.numbers("digest")

    @cached_property
    def num_pairs(self) -> NDArray[np.int64]:
        """The number of pairs of each preference."""
        return self._file.sizes("winners")

    @cached_property
    def num_prompt_tokens(self) -> NDArray[np.int64]:
        return self._file.sizes("prompt")

    @cached_property
    def num_completion_tokens(self) -> NDArray[np.int64]:
        """The total number of completion tokens of each preference."""
        return self._file.sizes("completions")

    @cached_property
    def num_scored_tokens(self) -> NDArray[np.int64]:
        """The number of scored completion tokens of each preference; tool turns are not scored."""
        return self.num_completion_tokens - self._file.sizes("unscored")

    @cached_property
    def completion_lengths(self) -> NDArray[np.int32]:
        """The number of tokens of each completion: all completions of preference 0, then those of preference 1, and so on."""
        return self._file.values("lengths")

    @cached_property
    def num_completions(self) -> NDArray[np.int64]:
        return self._file.sizes("lengths")

    @cached_property
    def has_missing_scores(self) -> NDArray[np.bool_]:
        """For each preference, whether any of its completions has no score."""
        sums = self._file.reduce("scores", np.add)  # a missing score is NaN, and so is a sum with it
        return np.isnan(sums)

    @cached_property
    def score_spread(self) -> NDArray[np.float64]:
        """The difference between the highest and lowest score of each preference; NaN if a score is missing."""
        highest, lowest = (self._file.reduce("scores", ufunc) for ufunc in (np.maximum, np.minimum))
        return highest.astype(np.float64) - lowest.astype(np.float64)

    @cached_property
    def highest_token_id(self) -> int:
        return max(self._file.highest("prompt"), self._file.highest("completions"))

    @cached_property
    def longest(self) -> NDArray[np.int64]:
        """The number of tokens of each preference's prompt plus its longest completion."""
        longest = self._file.reduce("lengths", np.maximum).astype(np.int64)
        return self.num_prompt_tokens + longest


def open_cached_store(folder: Path) -> TokenStore:
    """Open a store in the cache, or raise a DataError if its files are damaged."""
    try:
        return TokenStore(folder, read_manifest(folder))
    except (ValueError, OSError) as error:  # pyarrow raises a ValueError for a damaged file
        raise DataError(f"{error}. The tokenised data is damaged: remove {folder} and start again.") from None
