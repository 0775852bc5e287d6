"""Summarises the datasets before training: row counts, lengths, duplicates, and overlap of validation and training sets."""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tandem.data.formats.preference import CONTRADICTED
from tandem.data.store.notes import AS_TEXT, MISSING, TAGGED, TEMPLATED
from tandem.data.store.selection import Preferences, Selection
from tandem.data.store.sets import Sets
from tandem.data.store.token_store import Counts, TokenStore

NGRAM = 8  # tokens
# Overlap is measured on the first preferences of a set: hashes of all n-grams of a large set would not fit in memory.
MAX_PREFERENCES = 100_000
PERCENTILES = (50, 90, 95, 99)
BINS = 12  # of a histogram of lengths
HELD_OUT = "held out"


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens. The histogram has bins of equal width, from 0 to the longest length."""

    mean: float
    percentiles: dict[int, int]
    longest: int
    histogram: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Preflight:
    """The summary of one set. The summary of a validation set includes its overlap with the training data."""

    name: str
    format: str
    format_reason: str
    files: tuple[str, ...]  # the files that the set was read from
    counts: Counts  # of all rows of the set
    num_held_out: (
        int  # accepted preferences of a training set that are held out for validation; all that follows is without them
    )
    num_pairs: int
    prompt_tokens: int
    completion_tokens: int
    longest: int  # tokens of the longest prompt with its longest completion
    shared_saving: float  # fraction of tokens saved by computing each prompt once
    prompt_lengths: Lengths
    completion_lengths: Lengths
    whole_lengths: Lengths  # of each prompt with its longest completion
    longer_than: dict[int, int]  # limit in tokens -> preferences over it, including those dropped as over-long
    notes: dict[str, int]  # note -> number of rows
    noted_at: dict[str, str]  # the place of the first row with each note
    prompt_overlap: int | None  # prompts of this set that are also in the training set
    ngram_overlap: float | None  # fraction of this set's completion n-grams that are also in the training set


def preflights(sets: Sets) -> list[Preflight]:
    """Summarise every set of the configuration, and the part of the training data that is held out for validation, if any."""
    read = [
        preflight(name, store, trained=_trained_part(name, sets))
        if name.startswith("train")
        else preflight(name, store, sets.train)
        for name, store in sets.read.items()
    ]
    repeats = _repeat_notes(sets)
    read = [replace(one, notes={**one.notes, **repeats.get(one.name, {})}) for one in read]
    held = [
        preflight(f"validation-{name}", chosen, sets.train)
        for name, chosen in sets.validation.items()
        if isinstance(chosen, Selection)
    ]
    return read + held


def _trained_part(name: str, sets: Sets) -> Selection | None:
    """Return the preferences of a training set that are not held out for validation. None: all of them, or not known."""
    train, store = sets.train, sets.read[name]
    if not isinstance(train, Selection) or name not in train.names:
        return None
    number = train.names.index(name)
    of_set = train.rows[train.sources(np.arange(len(train))) == number]
    start = sum(len(earlier) for earlier in train.stores[:number])
    return None if len(of_set) in (0, len(store)) else Selection({name: store}, of_set - start)


def preflight(
    name: str, store: TokenStore | Selection, train: Preferences | None = None, *, trained: Selection | None = None
) -> Preflight:
    """Summarise one set. If `train` is given, also measure how much of the set is contained in `train`.

    `trained`: the part of a training set that is not held out for validation; None: all of it.
    """
    part = store if trained is None else trained
    prompt_tokens = int(part.num_prompt_tokens.sum())
    completion_tokens = int(part.num_completion_tokens.sum())
    repeated = int((part.num_prompt_tokens * part.num_completions).sum())
    is_read = isinstance(store, TokenStore)
    return Preflight(
        name=name,
        format=store.format if is_read else HELD_OUT,
        format_reason=store.format_reason if is_read else _held_out_reason(train),
        files=tuple(store.files) if is_read else (),
        counts=store.counts if is_read else Counts(len(store), len(store), {}, {}),
        num_held_out=len(store) - len(part),
        num_pairs=int(part.num_pairs.sum()),
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        longest=int(part.longest.max()),
        shared_saving=1 - (prompt_tokens + completion_tokens) / (repeated + completion_tokens),
        prompt_lengths=_lengths(part.num_prompt_tokens),
        completion_lengths=_lengths(part.completion_lengths),
        whole_lengths=_lengths(part.longest),
        longer_than=store.longer_than if is_read else {},
        notes=store.notes if is_read else {},
        noted_at=store.noted_at if is_read else {},
        prompt_overlap=None if train is None else num_shared_prompts(store, train),
        ngram_overlap=None if train is None else _ngram_overlap(store, train),
    )


def warnings_of(found: Preflight) -> dict[str, str]:
    return warnings_about(found.name, found.notes, found.noted_at)


def warnings_about(name: str, notes: dict[str, int], noted_at: dict[str, str]) -> dict[str, str]:
    """Return warnings about problems that usually are mistakes in the data, as a dict: problem -> warning.

    `notes`: problem -> number of rows. `noted_at`: problem -> file and line of the first such row.
    """
    texts = {
        TEMPLATED: (
            "tokens of a chat template",
            "prompt",
            "which become plain text inside a user turn. Remove them; or, if prompts and completions are complete "
            "texts, set policy.tokenizer.chat_template=null.",
        ),
        TAGGED: (
            "Human: or Assistant: tags",
            "prompt",
            "which become part of a single user turn. Give messages, or complete dialogues as chosen and rejected "
            "(dataset_name=dialogue_text); for complete texts set policy.tokenizer.chat_template=null.",
        ),
        AS_TEXT: (
            "messages written as text",
            "preference",
            "which become part of a single turn, brackets and quotes included. Give lists of messages (in csv "
            "files, as JSON).",
        ),
        MISSING: (
            "a prompt or completion that is only nan, None or null",
            "preference",
            "which is trained on as text. If values are missing, remove these rows or leave the values empty.",
        ),
        CONTRADICTED: (
            "a label of 0, -1, false or rejected",
            "preference",
            "which is ignored: chosen is preferred in every row. If it means that rejected is better, swap the two.",
        ),
    }
    warnings = {}
    for note, (what, of, advice) in texts.items():
        if count := notes.get(note):
            where = f"1 {of}" if count == 1 else f"{count:,} {of}s"
            warnings[note] = f"{name}: {what} in {where}, the first at {noted_at[note]}, {advice}"
    return warnings


def _repeat_notes(sets: Sets) -> dict[str, dict[str, int]]:
    """Count the preferences of each training set that are also in an earlier training set.

    Return a dict for each set: text for the user -> number of preferences. A text is, for example, "preferences that are
    already in train-0". Preferences with chosen and rejected swapped are counted separately.
    """
    training = {name: store for name, store in sets.read.items() if name.startswith("train")}
    seen: dict[int, str] = {}
    notes: dict[str, dict[str, int]] = {}
    for name, store in training.items() if len(training) > 1 else ():
        own = store.digests[:MAX_PREFERENCES].tolist()
        twice = Counter(seen[digest] for digest in own if digest in seen)
        opposed = Counter(seen[digest ^ 1] for digest in own if digest ^ 1 in seen)
        notes[name] = {f"preferences that are already in {other}": count for other, count in twice.items()}
        notes[name] |= {
            f"preferences that are in {other} with chosen and rejected swapped": n for other, n in opposed.items()
        }
        for digest in own:
            seen.setdefault(digest, name)
    return notes


def _held_out_reason(train: Preferences | None) -> str:
    left = "" if train is None else f"; {len(train):,} training preferences are left"
    return f"by data.validation_share{left}"


def _lengths(values: NDArray[np.integer]) -> Lengths:
    longest = int(values.max())
    histogram, _ = np.histogram(values, bins=BINS, range=(0, max(BINS, longest)))
    percentiles = np.percentile(values, PERCENTILES, method="higher").astype(int).tolist()
    return Lengths(
        mean=float(values.mean()),
        percentiles=dict(zip(PERCENTILES, percentiles, strict=True)),
        longest=longest,
        histogram=tuple(histogram.tolist()),
    )


def num_shared_prompts(store: Preferences, train: Preferences) -> int:
    """Return how many of the first MAX_PREFERENCES preferences of `store` have a prompt that is also in `train`."""
    seen = {train[i].prompt.tobytes() for i in range(min(len(train), MAX_PREFERENCES))}
    return sum(store[i].prompt.tobytes() in seen for i in range(min(len(store), MAX_PREFERENCES)))


def prompt_overlaps(sets: Sets) -> dict[str, float]:
    """Return the share of the prompts of each validation set that are also in the training set, as a dict by split."""
    return {
        f"validation-{name}": num_shared_prompts(store, sets.train) / min(len(store), MAX_PREFERENCES)
        for name, store in sets.validation.items()
    }


def _ngram_overlap(store: Preferences, train: Preferences) -> float | None:
    """Return the fraction of the n-grams of `store` that are also in `train`, or None if `store` has no n-grams.

    Only n-grams of completions are counted, and each distinct n-gram counts once.
    """
    own, other = _ngrams(store), _ngrams(train)
    return float(np.isin(own, other).mean()) if len(own) else None


def _ngrams(store: Preferences) -> NDArray[np.uint64]:
    """Return the hashes of the n-grams of all completions, without repeats."""
    weights = np.random.default_rng(0).integers(1, 2**63, NGRAM, dtype=np.uint64) | np.uint64(1)
    hashes = []
    for i in range(min(len(store), MAX_PREFERENCES)):
        for completion in store[i].completions:
            if len(completion) >= NGRAM:
                windows = np.lib.stride_tricks.sliding_window_view(completion.astype(np.uint64), NGRAM)
                hashes.append((windows * weights).sum(1, dtype=np.uint64))
    return np.unique(np.concatenate(hashes)) if hashes else np.zeros(0, np.uint64)
