"""Selection: a subset of the preferences of one or several TokenStores, with the interface of a single TokenStore."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from tandem.data.store.token_store import TokenStore
from tandem.data.text.tokens import TokenizedPreference
from tandem.errors import DataError
from tandem.storage.cache import fingerprint
from tandem.terminal.printable import counted


class Selection:
    """A subset of the preferences of one or several stores. `rows`: indices into the concatenation of the stores.

    Example: with stores of 3 and 2 preferences, rows [0, 2, 4] are the first and third preference of the first store, and
    the second preference of the second store.
    """

    def __init__(self, stores: Mapping[str, TokenStore], rows: NDArray[np.int64]):
        self.names, self.stores, self.rows = list(stores), list(stores.values()), rows
        self._starts = np.cumsum([0, *(len(store) for store in self.stores)])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> TokenizedPreference:
        store, row = self._find(index)
        return store[row]

    def place(self, index: int) -> str:
        store, row = self._find(index)
        return store.place(row)

    def sources(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return an integer for each of the given preferences: the position of its store in `names`."""
        return np.searchsorted(self._starts, self.rows[indices], side="right") - 1

    def _find(self, index: int) -> tuple[TokenStore, int]:
        number = int(self.sources(np.array([index]))[0])
        return self.stores[number], int(self.rows[index] - self._starts[number])

    def _joined(self, name: str) -> NDArray[np.int64]:
        return np.concatenate([getattr(store, name) for store in self.stores])[self.rows]

    @cached_property
    def fingerprint(self) -> str:
        return self._fingerprint([store.fingerprint for store in self.stores])

    @cached_property
    def tokens_fingerprint(self) -> str:
        return self._fingerprint([store.tokens_fingerprint for store in self.stores])

    def _fingerprint(self, stores: list[str]) -> str:
        return fingerprint(stores, blake2b(self.rows.astype(np.int64).tobytes()).hexdigest())

    @property
    def columns(self) -> tuple[str, ...]:
        """The optional columns, such as weight, that at least one store has."""
        return tuple(dict.fromkeys(name for store in self.stores for name in store.columns))

    @cached_property
    def num_pairs(self) -> NDArray[np.int64]:
        return self._joined("num_pairs")

    @cached_property
    def num_prompt_tokens(self) -> NDArray[np.int64]:
        return self._joined("num_prompt_tokens")

    @cached_property
    def num_completion_tokens(self) -> NDArray[np.int64]:
        return self._joined("num_completion_tokens")

    @cached_property
    def num_scored_tokens(self) -> NDArray[np.int64]:
        return self._joined("num_scored_tokens")

    @cached_property
    def num_completions(self) -> NDArray[np.int64]:
        return self._joined("num_completions")

    @cached_property
    def completion_lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each completion: all completions of preference 0, then those of preference 1, and so on."""
        lengths = np.concatenate([store.completion_lengths for store in self.stores])
        ends = np.cumsum(np.concatenate([store.num_completions for store in self.stores]))[self.rows]
        counts = self.num_completions
        # Rows that end at 2 and 7 with 2 and 3 completions: 0 1 | 4 5 6
        return lengths[np.repeat(ends - np.cumsum(counts), counts) + np.arange(counts.sum())].astype(np.int64)

    @cached_property
    def has_missing_scores(self) -> NDArray[np.bool_]:
        return self._joined("has_missing_scores")  # type: ignore[return-value]

    @cached_property
    def score_spread(self) -> NDArray[np.float64]:
        return self._joined("score_spread")  # type: ignore[return-value]

    @cached_property
    def longest(self) -> NDArray[np.int64]:
        return self._joined("longest")

    @cached_property
    def highest_token_id(self) -> int:
        return max(store.highest_token_id for store in self.stores)


# Tokenised preferences, which can be read by index, and their sizes.
Preferences = TokenStore | Selection


def by_source(preferences: Preferences, indices: NDArray[np.int64]) -> dict[str, NDArray[np.bool_]]:
    """Return a dict from set name to a boolean mask: True where a given preference comes from that set.

    If there is only one set, the dict is empty.
    """
    if not isinstance(preferences, Selection) or len(preferences.names) < 2:
        return {}
    sources = preferences.sources(indices)
    return {name: sources == number for number, name in enumerate(preferences.names)}


def hold_out(stores: Sequence[TokenStore], share: float, seed: int) -> NDArray[np.bool_]:
    """Return a boolean mask: True for preferences to hold out for validation. `share`: the approximate fraction to hold out.

    Preferences with the same prompt are either all held out or all kept. The mask depends only on the prompts and the
    seed, not on the order of the rows.
    """
    key = seed.to_bytes(8, "little")
    digests = np.array(
        [
            int.from_bytes(blake2b(row.prompt.tobytes(), digest_size=8, key=key).digest(), "little")
            for store in stores
            for row in store
        ],
        np.uint64,
    )
    in_order = np.sort(digests)
    num_held_out = max(1, round(share * len(digests)))
    last = in_order[num_held_out - 1]
    if last == in_order[-1]:
        num_prompts = len(np.unique(digests))
        raise DataError(
            f"data.validation_share = {share}: all {counted(len(digests), 'preference')} "
            f"({counted(num_prompts, 'different prompt')}) would be held out, and none left for training. Lower it, or set "
            "data.validation to a separate set."
        )
    return digests <= last
