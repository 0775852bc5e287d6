"""A TokenStore: the tokenised preferences of one set on disk, in Arrow columns, memory-mapped, named by their content."""

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


@dataclass(frozen=True, slots=True)
class Counts:
    """The outcome of every row: accepted + bad + filtered = rows."""

    rows: int
    accepted: int
    bad: dict[str, int]
    filtered: dict[str, int]


class TokenStore:
    """The tokenised preferences of one set, read from disk as they are needed.

    Everything is validated when it is opened, regardless of its origin; ValueError says what is wrong.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        check_manifest(manifest, folder)
        self.folder = folder
        self.fingerprint: str = manifest["fingerprint"]
        # The same for sets that differ in columns that a key names, such as weights, and in nothing else.
        self.tokens_fingerprint: str = manifest.get("tokens_fingerprint", self.fingerprint)
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
        self._file = TokensFile(folder / "tokens.arrow")
        if len(self._file) != len(self):
            raise ValueError(f"{folder}/tokens.arrow has {len(self._file)} rows where the manifest says {len(self)}")

    def __len__(self) -> int:
        return self.counts.accepted

    def __getitem__(self, index: int) -> TokenizedPreference:
        return self._file.preference(index)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it has because a key named them, such as weight."""
        return self._file.columns

    def __iter__(self) -> Iterator[TokenizedPreference]:
        return (self[i] for i in range(len(self)))

    def place(self, index: int) -> str:
        """The file and line a preference was read from."""
        return self._file.text("place", index)

    @cached_property
    def digests(self) -> NDArray[np.uint64]:
        """Of the tokens of each preference (`writer.digest_of`)."""
        return self._file.numbers("digest")

    @cached_property
    def num_pairs(self) -> NDArray[np.int64]:
        """Pairs of each preference."""
        return self._file.sizes("winners")

    @cached_property
    def num_prompt_tokens(self) -> NDArray[np.int64]:
        return self._file.sizes("prompt")

    @cached_property
    def num_completion_tokens(self) -> NDArray[np.int64]:
        """Of each preference, over all its completions."""
        return self._file.sizes("completions")

    @cached_property
    def num_scored_tokens(self) -> NDArray[np.int64]:
        """Those of them that are scored: all but tool turns."""
        return self.num_completion_tokens - self._file.sizes("unscored")

    @cached_property
    def completion_lengths(self) -> NDArray[np.int32]:
        """Tokens of every completion, one after another."""
        return self._file.values("lengths")

    @cached_property
    def num_completions(self) -> NDArray[np.int64]:
        return self._file.sizes("lengths")

    @cached_property
    def lacks_scores(self) -> NDArray[np.bool_]:
        """Whether some completion of each preference has no score."""
        missing = self._file.reduce("scores", np.add)  # NaN adds up to NaN
        return np.isnan(missing)

    @cached_property
    def score_spread(self) -> NDArray[np.float64]:
        """How far apart the highest and the lowest score of each preference are; NaN where one is missing."""
        highest, lowest = (self._file.reduce("scores", ufunc) for ufunc in (np.maximum, np.minimum))
        return highest.astype(np.float64) - lowest.astype(np.float64)

    @cached_property
    def highest_token_id(self) -> int:
        return max(self._file.highest("prompt"), self._file.highest("completions"))

    @cached_property
    def longest(self) -> NDArray[np.int64]:
        """The number of tokens in each preference's prompt plus its longest completion."""
        longest = self._file.reduce("lengths", np.maximum).astype(np.int64)
        return self.num_prompt_tokens + longest
