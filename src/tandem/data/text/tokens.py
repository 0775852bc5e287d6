"""Tokenises Preferences: prompt ids, ids per completion, and the pairs (winner, loser)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations, groupby, islice, pairwise, product
from typing import Any

import numpy as np

from tandem.columns import COLUMNS
from tandem.data.formats.preference import Preference, empty_completion, is_empty
from tandem.data.read.sources import RowError
from tandem.data.text.chat import SHIELD, split_shielded
from tandem.data.text.sampled import sampled_ids
from tandem.data.text.sentencepiece_model import SentencePiece
from tandem.data.text.template import Part, Rendered, Template
from tandem.data.text.word_cache import IntArray

BATCH = 1024


@dataclass(frozen=True, slots=True)
class TokenizedPreference:
    """Token ids of a prompt and of each completion. Each pair is (winner, loser), given as indices of completions.

    All tokens of a completion are scored, except those at the positions in `unscored` (tool turns).
    """

    prompt: IntArray
    completions: tuple[IntArray, ...]
    pairs: tuple[tuple[int, int], ...]
    place: str
    unscored: tuple[IntArray, ...] = ()  # per completion; empty if all tokens are scored
    # The values of the columns of `tandem.columns` that the data has, by name.
    columns: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def values(self, column: str) -> tuple[float, ...]:
        """Return the values of a column: one per completion, or one for the preference.

        If the data does not have the column, every value is the default of the column.
        """
        declared, given = COLUMNS[column], self.columns.get(column)
        return (declared.default,) * declared.count(len(self.completions)) if given is None else given

    @property
    def scores(self) -> tuple[float, ...]:
        """The score of each completion; NaN for a completion without a score."""
        return self.values("score")

    def scored(self, completion: int) -> IntArray:
        """Return the positions of the scored tokens of a completion."""
        positions = np.arange(len(self.completions[completion]), dtype=np.int32)
        return np.delete(positions, self.unscored[completion]) if self.unscored else positions

    @property
    def longest(self) -> int:
        """The number of tokens of the prompt plus the longest completion."""
        return len(self.prompt) + max(map(len, self.completions))


def make_pairs(ranks: Sequence[int], pairing: str) -> tuple[tuple[int, int], ...]:
    """Return pairs of completions as (index of the better one, index of the worse one). Equal ranks form no pair.

    Examples, with the pairs for each value of `pairing`:

    ranks (0, 2, 1): best_worst (0,1); adjacent (0,2), (2,1); all (0,2), (0,1), (2,1)
    ranks (0, 0, 1): best_worst (0,2); adjacent (0,2), (1,2); all (0,2), (1,2)
    """
    order = sorted(range(len(ranks)), key=lambda i: ranks[i])
    if pairing == "best_worst":
        candidates = [(order[0], order[-1])]
    elif pairing == "adjacent":
        # Every completion of one rank with every completion of the next worse rank.
        levels = [list(level) for _, level in groupby(order, key=lambda i: ranks[i])]
        candidates = [pair for better, worse in pairwise(levels) for pair in product(better, worse)]
    else:
        candidates = list(combinations(order, 2))
    return tuple((better, worse) for better, worse in candidates if ranks[better] < ranks[worse])


_cached_pairs = lru_cache(make_pairs)  # nearly all rows of a dataset have the same ranks


def tokenize(
    preferences: Iterable[Preference | RowError],
    template: Template,
    *,
    pairing: str,
    max_length: int,
    overlong: str = "drop",
) -> Iterator[TokenizedPreference | RowError]:
    """Tokenise every preference, in order. For a row that cannot be used, yield a RowError."""
    stream = iter(preferences)
    while batch := list(islice(stream, BATCH)):
        for row in encode([render(item, template, pairing) for item in batch], template, pairing):
            yield row if isinstance(row, RowError) else fit_length(row, max_length, overlong)


def render(item: Preference | RowError, template: Template, pairing: str) -> tuple[Preference, Rendered] | RowError:
    """Return a preference and its rendered texts, or a RowError. Completions that are in no pair are removed."""
    if isinstance(item, RowError):
        return item
    try:
        item = _drop_unpaired(item, pairing)
        return item, template.render(item)
    except RowError as error:
        return error


def pairs_of(preference: Preference, pairing: str) -> tuple[tuple[int, int], ...]:
    return _cached_pairs(tuple(completion.rank for completion in preference.completions), pairing)


def _drop_unpaired(preference: Preference, pairing: str) -> Preference:
    """Remove the completions that are in no pair. With pairing=best_worst, these are all except the best and the worst."""
    if len(preference.completions) == 2:
        return preference
    needed = sorted({number for pair in pairs_of(preference, pairing) for number in pair})
    if any(is_empty(preference.completions[number].answer) for number in needed):
        raise empty_completion(preference.place)
    return replace(preference, completions=tuple(preference.completions[number] for number in needed))


def encode(
    batch: Sequence[tuple[Preference, Rendered] | RowError], template: Template, pairing: str
) -> Iterator[TokenizedPreference | RowError]:
    """Encode the texts of a batch together. Yield a TokenizedPreference or a RowError for each item."""
    encoded = iter(_encode([item[1] for item in batch if not isinstance(item, RowError)], template))
    for item in batch:
        if isinstance(item, RowError):
            yield item
            continue
        preference, rendered = item
        prompt, completions = next(encoded)
        try:
            parts = _use_sampled(preference, completions, rendered.completions, template.tokenizer)
        except RowError as error:
            yield error
            continue
        yield _checked(preference, prompt, completions, parts, pairing)


def _use_sampled(
    preference: Preference, encoded: list[list[IntArray]], parts: tuple[tuple[Part, ...], ...], tokenizer: Any
) -> tuple[tuple[Part, ...], ...]:
    """Replace the ids of each completion, in place, by those that a model sampled, if the data has them. Return the parts."""
    taken = list(parts)
    for number, completion in enumerate(preference.completions):
        ids = sampled_ids(completion, tokenizer, preference.place)
        if ids is not None:
            encoded[number], taken[number] = [ids], (Part(str(completion.answer)),)
    return tuple(taken)


def encode_prompt(rendered: Rendered, template: Template) -> IntArray:
    """The ids of a prompt that `Template.render_prompt` wrote: those of the same prompt in a preference."""
    [(prompt, _)] = _encode([rendered], template)
    return prompt


def _encode(rows: list[Rendered], template: Template) -> list[tuple[IntArray, list[list[IntArray]]]]:
    """Return the ids of each row's prompt, and of every part of its completions. No token spans two parts."""
    bos = _bos(template.tokenizer) if any(row.adds_bos for row in rows) else []
    return [
        (np.concatenate([_ids(bos), prompt]) if row.adds_bos and prompt[: len(bos)].tolist() != bos else prompt, parts)
        for row, (prompt, parts) in zip(rows, _encode_rendered(rows, template), strict=True)
    ]


def _encode_rendered(rows: list[Rendered], template: Template) -> list[tuple[IntArray, list[list[IntArray]]]]:
    """The same without BOS."""
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
    """Return the token ids of each text. Special tokens between SHIELD characters are encoded as plain text.

    `begins`: True if the texts begin a sequence, False if they continue one.
    """
    if not texts:
        return []
    encoded = template.encode(texts, begins=begins)
    for i in (i for i, text in enumerate(texts) if SHIELD in text):
        parts = [
            template.encode([part], begins=begins and number == 0, parse_special=special)[0]
            for number, (part, special) in enumerate(split_shielded(texts[i]))
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
    """Return the tokenised preference, or a RowError if the prompt is empty or the completions of every pair are equal."""
    place = preference.place
    completions = tuple(ids[0] if len(ids) == 1 else np.concatenate(ids) for ids in encoded)
    pairs = _differing_pairs(pairs_of(preference, pairing), completions)
    if not len(prompt):
        return RowError(
            place, "empty prompt", "the prompt has no tokens, so nothing predicts the first completion token."
        )
    if not pairs:
        which = "the completions" if len(completions) == 2 else "the completions of every pair"
        return RowError(place, "equal completions", f"{which} are identical as tokens.", kind="filtered")
    scores = tuple(float("nan") if c.score is None else c.score for c in preference.completions)
    return TokenizedPreference(
        prompt=prompt,
        completions=completions,
        pairs=pairs,
        place=place,
        unscored=_unscored(encoded, parts),
        columns={"score": scores, **{name: (value,) for name, value in preference.columns.items()}},
    )


def _differing_pairs(
    pairs: tuple[tuple[int, int], ...], completions: tuple[IntArray, ...]
) -> tuple[tuple[int, int], ...]:
    """Return the pairs whose two completions differ."""
    return tuple(
        (winner, loser)
        for winner, loser in pairs
        if len(completions[winner]) != len(completions[loser])
        or completions[winner].tobytes() != completions[loser].tobytes()
    )


def _unscored(encoded: list[list[IntArray]], parts: tuple[tuple[Part, ...], ...]) -> tuple[IntArray, ...]:
    """Return the positions of the tokens that are not scored, for each completion.

    A completion with parts of 2, 3 (not scored) and 1 tokens gives the positions 2, 3, 4. If all tokens are scored,
    return ().
    """
    if all(part.scored for several in parts for part in several):
        return ()
    flags = [
        np.repeat([part.scored for part in several], [len(ids) for ids in lists])
        for several, lists in zip(parts, encoded, strict=True)
    ]
    return tuple(np.flatnonzero(~scored).astype(np.int32) for scored in flags)


def fit_length(row: TokenizedPreference, max_length: int, overlong: str) -> TokenizedPreference | RowError:
    """Return a preference of at most `max_length` tokens. A preference that is short enough is returned unchanged.

    An over-long preference is truncated if `overlong` is truncate_prompt or truncate_completion. For other values of
    `overlong`, or if truncation is not possible, return a RowError.
    """
    if row.longest <= max_length:
        return row
    limit = f"policy.max_total_sequence_length={max_length}"
    longest_completion = max(len(completion) for completion in row.completions)
    if overlong == "truncate_prompt" and (keep := max_length - longest_completion) > 0:
        return replace(row, prompt=row.prompt[-keep:])
    if overlong == "truncate_completion" and (keep := max_length - len(row.prompt)) > 0:
        cut = tuple(completion[:keep] for completion in row.completions)
        pairs = _differing_pairs(row.pairs, cut)
        if not pairs:
            message = f"{row.longest} tokens, over {limit}, and the completions are equal after truncation."
            return RowError(row.place, "equal after truncation", message, kind="filtered")
        unscored = tuple(positions[positions < keep] for positions in row.unscored)
        return replace(row, completions=cut, pairs=pairs, unscored=unscored)
    why = {
        "truncate_prompt": f"a completion alone takes {longest_completion} tokens of {limit}.",
        "truncate_completion": f"its prompt alone takes {len(row.prompt)} tokens of {limit}.",
    }
    return RowError(row.place, "over-long", why.get(overlong, f"{row.longest} tokens, over {limit}."), kind="filtered")


def _bos(tokenizer: Any) -> list[int]:
    """Return a list with the BOS id if the tokenizer adds BOS before plain text, else an empty list."""
    ids = tokenizer("a")["input_ids"]
    return ids[:1] if ids[:1] == [tokenizer.bos_token_id] else []
