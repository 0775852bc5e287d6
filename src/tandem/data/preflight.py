"""TokenStores in; what a user should know before training out: counts, lengths, overlap of train and validation."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.data.store import Counts, TokenStore

NGRAM = 8
# Overlap is told on a sample of large sets: hashes of all n-grams of a billion tokens would not fit in memory.
MAX_PREFERENCES = 100_000


@dataclass(frozen=True, slots=True)
class Preflight:
    """What is in one set, and how much of a validation set stands in the training set too."""

    name: str
    format: str
    format_reason: str
    counts: Counts
    num_pairs: int
    prompt_tokens: int
    completion_tokens: int
    longest: int
    shared_saving: float  # share of tokens saved by computing each prompt once
    prompt_overlap: int | None  # prompts of this set that also stand in the training set
    ngram_overlap: float | None  # share of this set's completion n-grams that also stand in the training set


def preflight(name: str, store: TokenStore, train: TokenStore | None = None) -> Preflight:
    prompt_tokens = int(store.num_prompt_tokens.sum())
    completion_tokens = int(store.num_scored_tokens.sum())
    repeated = int((store.num_prompt_tokens * store.num_completions).sum())
    return Preflight(
        name=name,
        format=store.format,
        format_reason=store.format_reason,
        counts=store.counts,
        num_pairs=int(store.num_pairs.sum()),
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        longest=int(store.longest.max()),
        shared_saving=1 - (prompt_tokens + completion_tokens) / (repeated + completion_tokens),
        prompt_overlap=None if train is None else _prompt_overlap(store, train),
        ngram_overlap=None if train is None else _ngram_overlap(store, train),
    )


def _prompt_overlap(store: TokenStore, train: TokenStore) -> int:
    seen = {train[i].prompt.tobytes() for i in range(min(len(train), MAX_PREFERENCES))}
    return sum(store[i].prompt.tobytes() in seen for i in range(min(len(store), MAX_PREFERENCES)))


def _ngram_overlap(store: TokenStore, train: TokenStore) -> float:
    own, other = _ngrams(store), _ngrams(train)
    return float(np.isin(own, other).mean()) if len(own) else 0.0


def _ngrams(store: TokenStore) -> NDArray[np.uint64]:
    """Hashes of all runs of NGRAM tokens inside completions."""
    weights = np.random.default_rng(0).integers(1, 2**63, NGRAM, dtype=np.uint64) | np.uint64(1)
    hashes = []
    for i in range(min(len(store), MAX_PREFERENCES)):
        for completion in store[i].completions:
            if len(completion) >= NGRAM:
                windows = np.lib.stride_tricks.sliding_window_view(completion.astype(np.uint64), NGRAM)
                hashes.append((windows * weights).sum(1, dtype=np.uint64))
    return np.unique(np.concatenate(hashes)) if hashes else np.zeros(0, np.uint64)
