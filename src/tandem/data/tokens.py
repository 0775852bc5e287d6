"""Preferences in; TokenizedPreferences out: prompt ids, ids per completion, and the pairs (winner, loser)."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.data.preference import Preference
from tandem.data.sources import RowError
from tandem.data.template import SHIELD, Template, pieces
from tandem.errors import ConfigError

IntArray = NDArray[np.int32]
BATCH = 1024


@dataclass(frozen=True, slots=True)
class TokenizedPreference:
    """Token ids of a prompt and of each completion; pairs are (winner, loser), indices into the completions."""

    prompt: IntArray
    completions: tuple[IntArray, ...]
    pairs: tuple[tuple[int, int], ...]
    scores: tuple[float, ...]  # NaN where the data gives none
    place: str

    @property
    def longest(self) -> int:
        """Tokens of the prompt and the longest completion."""
        return len(self.prompt) + max(len(completion) for completion in self.completions)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder; one without EOS is refused."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:
        raise ConfigError(f"{folder}: no tokenizer could be loaded: {' '.join(str(error).split())}") from None
    if tokenizer.eos_token is None:
        raise ConfigError(f"{folder}: the tokenizer has no EOS token, so no completion could end. Set eos_token in it.")
    return tokenizer


def make_pairs(ranks: Sequence[int], pairing: str) -> tuple[tuple[int, int], ...]:
    """Pairs (better, worse); equal ranks make none.

    ranks (0, 2, 1): best_worst -> (0,1); adjacent -> (0,2), (2,1); all -> (0,2), (0,1), (2,1)
    """
    order = sorted(range(len(ranks)), key=lambda i: ranks[i])
    if pairing == "best_worst":
        candidates = [(order[0], order[-1])]
    elif pairing == "adjacent":
        candidates = list(pairwise(order))
    else:
        candidates = list(combinations(order, 2))
    return tuple((better, worse) for better, worse in candidates if ranks[better] < ranks[worse])


def tokenize(
    preferences: Iterable[Preference | RowError],
    template: Template,
    *,
    pairing: str,
    max_length: int,
    overlong: str = "drop",
) -> Iterator[TokenizedPreference | RowError]:
    """Every preference as token ids, in order, encoded in batches; rows that cannot be used pass through as errors."""
    stream = iter(preferences)
    bos = _bos(template.tokenizer)
    while batch := list(islice(stream, BATCH)):
        for item in _tokenize_batch(batch, template, bos, pairing):
            yield item if isinstance(item, RowError) else _fitted(item, max_length, overlong)


def _tokenize_batch(
    batch: list[Preference | RowError], template: Template, bos: list[int], pairing: str
) -> Iterator[TokenizedPreference | RowError]:
    rendered = [item if isinstance(item, RowError) else _render(item, template) for item in batch]
    texts = [text for item in rendered if not isinstance(item, RowError) for text in (item.prompt, *item.completions)]
    # Prompt and completion are encoded apart: no token can straddle the border between them.
    encoded = iter(_encode(texts, template.tokenizer))
    for preference, item in zip(batch, rendered, strict=True):
        if isinstance(item, RowError):
            yield item
            continue
        assert isinstance(preference, Preference)
        prompt = next(encoded)
        completions = tuple(np.asarray(next(encoded), np.int32) for _ in item.completions)
        if item.adds_bos and prompt[: len(bos)] != bos:
            prompt = bos + prompt
        yield _checked(preference, np.asarray(prompt, np.int32), completions, pairing)


def _encode(texts: list[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of each text; special tokens that a message only spells become plain tokens."""
    if not texts:
        return []
    shielded = [i for i, text in enumerate(texts) if SHIELD in text]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    for i in shielded:
        parts = [
            tokenizer(part, add_special_tokens=False, split_special_tokens=not special)["input_ids"]
            for part, special in pieces(texts[i])
        ]
        encoded[i] = [token for part in parts for token in part]
    return encoded


def _checked(
    preference: Preference, prompt: IntArray, completions: tuple[IntArray, ...], pairing: str
) -> TokenizedPreference | RowError:
    place = preference.place
    tokenized = TokenizedPreference(
        prompt,
        completions,
        make_pairs([completion.rank for completion in preference.completions], pairing),
        tuple(float("nan") if c.score is None else c.score for c in preference.completions),
        place,
    )
    if not len(prompt):
        return RowError(place, "empty prompt", "the prompt has no tokens, so nothing predicts the first answer token.")
    if all(np.array_equal(completions[0], other) for other in completions[1:]):
        return RowError(place, "equal completions", "the completions are identical as tokens.", kind="filtered")
    return tokenized


def _fitted(row: TokenizedPreference, max_length: int, overlong: str) -> TokenizedPreference | RowError:
    """A preference within the limit: as it is, or cut as `data.overlong` says; never to nothing, never to equal rests."""
    if row.longest <= max_length:
        return row
    too_long = f"{row.longest} tokens, over policy.max_total_sequence_length={max_length}"
    longest_completion = max(len(completion) for completion in row.completions)
    if overlong == "truncate_prompt" and (keep := max_length - longest_completion) > 0:
        return replace(row, prompt=row.prompt[-keep:])
    if overlong == "truncate_completion" and (keep := max_length - len(row.prompt)) > 0:
        cut = tuple(completion[:keep] for completion in row.completions)
        if all(np.array_equal(cut[0], other) for other in cut[1:]):
            message = f"{too_long}, and its completions are equal once cut."
            return RowError(row.place, "equal once cut", message, kind="filtered")
        return replace(row, completions=cut)
    why = {"truncate_prompt": " even without its prompt", "truncate_completion": " in its prompt alone"}
    return RowError(row.place, "over-long", f"{too_long}{why.get(overlong, '')}.", kind="filtered")


def _render(preference: Preference, template: Template) -> Any:
    try:
        return template.render(preference)
    except RowError as error:
        return error


def _bos(tokenizer: Any) -> list[int]:
    """The BOS that this tokenizer puts before a plain text, if it does."""
    ids = tokenizer("a")["input_ids"]
    return ids[:1] if ids[:1] == [tokenizer.bos_token_id] else []
