"""Preferences in; TokenizedPreferences out: prompt ids, ids per completion, and the pairs (winner, loser)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations, groupby, islice, pairwise, product
from typing import Any

import numpy as np

from tandem.columns import COLUMNS
from tandem.data.formats.preference import Preference, empty_completion, says_nothing
from tandem.data.read.sources import RowError
from tandem.data.text.chat import SHIELD, pieces
from tandem.data.text.sentencepiece_model import SentencePiece
from tandem.data.text.template import Part, Rendered, Template
from tandem.data.text.word_cache import IntArray

BATCH = 1024


@dataclass(frozen=True, slots=True)
class TokenizedPreference:
    """Token ids of a prompt and of each completion; pairs are (winner, loser), indices into the completions.

    All tokens of a completion are scored but those at the positions named in `unscored`: tool turns inside it.
    """

    prompt: IntArray
    completions: tuple[IntArray, ...]
    pairs: tuple[tuple[int, int], ...]
    place: str
    unscored: tuple[IntArray, ...] = ()  # per completion; empty when all is scored
    columns: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # those of `tandem.columns` that are given

    def values(self, column: str) -> tuple[float, ...]:
        """Of a column: one per completion or one in all, given or by default."""
        declared, given = COLUMNS[column], self.columns.get(column)
        return (declared.default,) * declared.count(len(self.completions)) if given is None else given

    @property
    def scores(self) -> tuple[float, ...]:
        """Per completion; NaN where the data gives none."""
        return self.values("score")

    def scored(self, completion: int) -> IntArray:
        """Positions within a completion of its scored tokens."""
        positions = np.arange(len(self.completions[completion]), dtype=np.int32)
        return np.delete(positions, self.unscored[completion]) if self.unscored else positions

    @property
    def longest(self) -> int:
        """Tokens of the prompt and the longest completion."""
        return len(self.prompt) + max(map(len, self.completions))


def make_pairs(ranks: Sequence[int], pairing: str) -> tuple[tuple[int, int], ...]:
    """Pairs (better, worse); equal ranks make none.

    ranks (0, 2, 1): best_worst -> (0,1); adjacent -> (0,2), (2,1); all -> (0,2), (0,1), (2,1)
    ranks (0, 0, 1): best_worst -> (0,2); adjacent -> (0,2), (1,2); all -> (0,2), (1,2)
    """
    order = sorted(range(len(ranks)), key=lambda i: ranks[i])
    if pairing == "best_worst":
        candidates = [(order[0], order[-1])]
    elif pairing == "adjacent":
        # Every completion of a rank with every one of the next rank that occurs.
        levels = [list(level) for _, level in groupby(order, key=lambda i: ranks[i])]
        candidates = [pair for better, worse in pairwise(levels) for pair in product(better, worse)]
    else:
        candidates = list(combinations(order, 2))
    return tuple((better, worse) for better, worse in candidates if ranks[better] < ranks[worse])


_known_pairs = lru_cache(make_pairs)  # nearly all rows of a set have the same ranks


def tokenize(
    preferences: Iterable[Preference | RowError],
    template: Template,
    *,
    pairing: str,
    max_length: int,
    overlong: str = "drop",
) -> Iterator[TokenizedPreference | RowError]:
    """Every preference as token ids, in order; rows that cannot be used pass through as errors."""
    stream = iter(preferences)
    while batch := list(islice(stream, BATCH)):
        for row in encode([render(item, template, pairing) for item in batch], template, pairing):
            yield row if isinstance(row, RowError) else fitted(row, max_length, overlong)


def render(item: Preference | RowError, template: Template, pairing: str) -> tuple[Preference, Rendered] | RowError:
    """A preference and its texts; an error passes through."""
    if isinstance(item, RowError):
        return item
    try:
        item = _compared(item, pairing)
        return item, template.render(item)
    except RowError as error:
        return error


def pairs_of(preference: Preference, pairing: str) -> tuple[tuple[int, int], ...]:
    return _known_pairs(tuple(completion.rank for completion in preference.completions), pairing)


def _compared(preference: Preference, pairing: str) -> Preference:
    """The same without completions that no pair needs: those between the best and the worst of four, say."""
    if len(preference.completions) == 2:
        return preference
    needed = sorted({number for pair in pairs_of(preference, pairing) for number in pair})
    if any(says_nothing(preference.completions[number].answer) for number in needed):
        raise empty_completion(preference.place)
    return replace(preference, completions=tuple(preference.completions[number] for number in needed))


def encode(
    batch: Sequence[tuple[Preference, Rendered] | RowError], template: Template, pairing: str
) -> Iterator[TokenizedPreference | RowError]:
    """The texts of a batch, encoded together."""
    bos = _bos(template.tokenizer) if template.source is None else []
    encoded = iter(_encode([item[1] for item in batch if not isinstance(item, RowError)], template))
    for item in batch:
        if isinstance(item, RowError):
            yield item
            continue
        preference, rendered = item
        prompt, completions = next(encoded)
        if rendered.adds_bos and prompt[: len(bos)].tolist() != bos:
            prompt = np.concatenate([_ids(bos), prompt])
        yield _checked(preference, prompt, completions, rendered.completions, pairing)


def _encode(rows: list[Rendered], template: Template) -> list[tuple[IntArray, list[list[IntArray]]]]:
    """Ids of each row's prompt, and of every part of its completions; no token straddles a border between them."""
    if isinstance(template.tokenizer, SentencePiece):
        turns = [[[part.text for part in parts] for parts in row.completions] for row in rows]
        encoded = [template.tokenizer.encode_turns(row.prompt, texts) for row, texts in zip(rows, turns, strict=True)]
        return [(_ids(prompt), [[_ids(part) for part in parts] for parts in answers]) for prompt, answers in encoded]
    prompts = _encode_texts([row.prompt for row in rows], template, begins=True)
    followed = [part.text for row in rows for parts in row.completions for part in parts]
    ids = iter(_encode_texts(followed, template, begins=False))
    completions = [[[next(ids) for _ in parts] for parts in row.completions] for row in rows]
    return list(zip(prompts, completions, strict=True))


def _encode_texts(texts: list[str], template: Template, *, begins: bool) -> list[IntArray]:
    """Token ids of texts that begin something, or go on; special tokens that a message only spells become plain ones."""
    if not texts:
        return []
    encoded = template.encode(texts, begins=begins)
    for i in (i for i, text in enumerate(texts) if SHIELD in text):
        parts = [
            template.encode([part], begins=begins and number == 0, parse_special=special)[0]
            for number, (part, special) in enumerate(pieces(texts[i]))
        ]
        encoded[i] = np.concatenate(parts)
    return encoded


def _ids(tokens: list[int]) -> IntArray:
    return np.asarray(tokens, np.int32)


def _checked(
    preference: Preference,
    prompt: IntArray,
    encoded: list[list[IntArray]],
    parts: tuple[tuple[Part, ...], ...],
    pairing: str,
) -> TokenizedPreference | RowError:
    place = preference.place
    completions = tuple(ids[0] if len(ids) == 1 else np.concatenate(ids) for ids in encoded)
    pairs = _telling(pairs_of(preference, pairing), completions)
    if not len(prompt):
        return RowError(place, "empty prompt", "the prompt has no tokens, so nothing predicts the first answer token.")
    if not pairs:
        which = "the completions" if len(completions) == 2 else "the completions of every pair"
        return RowError(place, "equal completions", f"{which} are identical as tokens.", kind="filtered")
    scores = tuple(float("nan") if c.score is None else c.score for c in preference.completions)
    return TokenizedPreference(
        prompt,
        completions,
        pairs,
        place,
        _unscored(encoded, parts),
        {"score": scores, **{name: (value,) for name, value in preference.columns.items()}},
    )


def _telling(pairs: tuple[tuple[int, int], ...], completions: tuple[IntArray, ...]) -> tuple[tuple[int, int], ...]:
    """The pairs of two different completions: of several, two may be the same."""
    return tuple(
        (winner, loser)
        for winner, loser in pairs
        if len(completions[winner]) != len(completions[loser])
        or completions[winner].tobytes() != completions[loser].tobytes()
    )


def _unscored(encoded: list[list[IntArray]], parts: tuple[tuple[Part, ...], ...]) -> tuple[IntArray, ...]:
    """Positions of tokens that are not scored. Parts of 2, 3 (not scored) and 1 tokens -> 2, 3, 4."""
    if all(part.scored for several in parts for part in several):
        return ()
    flags = [
        np.repeat([part.scored for part in several], [len(ids) for ids in lists])
        for several, lists in zip(parts, encoded, strict=True)
    ]
    return tuple(np.flatnonzero(~scored).astype(np.int32) for scored in flags)


def fitted(row: TokenizedPreference, max_length: int, overlong: str) -> TokenizedPreference | RowError:
    """A preference within the limit: as it is, or cut as `data.overlong` says; never to nothing, never to equal rests."""
    if row.longest <= max_length:
        return row
    limit = f"policy.max_total_sequence_length={max_length}"
    longest_completion = max(len(completion) for completion in row.completions)
    if overlong == "truncate_prompt" and (keep := max_length - longest_completion) > 0:
        return replace(row, prompt=row.prompt[-keep:])
    if overlong == "truncate_completion" and (keep := max_length - len(row.prompt)) > 0:
        cut = tuple(completion[:keep] for completion in row.completions)
        pairs = _telling(row.pairs, cut)
        if not pairs:
            message = f"{row.longest} tokens, over {limit}, and its completions are equal once cut."
            return RowError(row.place, "equal once cut", message, kind="filtered")
        unscored = tuple(positions[positions < keep] for positions in row.unscored)
        return replace(row, completions=cut, pairs=pairs, unscored=unscored)
    why = {
        "truncate_prompt": f"a completion alone takes {longest_completion} tokens of {limit}.",
        "truncate_completion": f"its prompt alone takes {len(row.prompt)} tokens of {limit}.",
    }
    return RowError(row.place, "over-long", why.get(overlong, f"{row.longest} tokens, over {limit}."), kind="filtered")


def _bos(tokenizer: Any) -> list[int]:
    """The BOS that this tokenizer puts before a plain text, if it does."""
    ids = tokenizer("a")["input_ids"]
    return ids[:1] if ids[:1] == [tokenizer.bos_token_id] else []
