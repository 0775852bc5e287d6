"""Reads rows with two completions and a label that says which one is better.

Known spellings of the label are read as they are. A number is ambiguous (in SHP, 1 means the first completion, in other
sets the second), so it needs label_values.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from decimal import Decimal
from functools import lru_cache
from itertools import product
from typing import Any

from tandem.config.sections.datasets import DatasetFields, Side, spelled_label
from tandem.data.formats.conversations import prompts_differ, split_conversations
from tandem.data.formats.preference import (
    Completion,
    Preference,
    TextOrMessages,
    checked,
    completion_of,
    describe,
    ended_before_answer,
    field_of,
    messages_of,
    prompt_of,
    text_of,
)
from tandem.data.formats.rated import float_to_int
from tandem.data.read.json_array import DuplicateKey, decode
from tandem.data.read.sources import RowError, SourceRow
from tandem.terminal.printable import listed

# The keys of the two completions: response_a and response_b, answer1 and answer2, human_ref_A and human_ref_B, ...
STEMS = (
    "response",
    "answer",
    "completion",
    "output",
    "generation",
    "candidate",
    "conversation",
    "summary",
    "human_ref",
)
SUFFIXES = (("a", "b"), ("A", "B"), ("0", "1"), ("1", "2"))
SIDES = {f"{stem}{sep}{one}": f"{stem}{sep}{two}" for stem, sep, (one, two) in product(STEMS, ("_", ""), SUFFIXES)}
PROMPT_KEYS = ("prompt", "question", "instruction", "query", "input", "context", "history")
LABEL_KEYS = (
    "winner",
    "preference",
    "preferred",
    "preferred_response",
    "label",
    "labels",
    "overall_preference",
    "human_preference",
    "choice",
    "verdict",
    "better",
    "better_response",
    "better_response_id",
    "safer_response_id",
)
TIES = ("tie", "tied", "draw", "equal", "both", "neither", "both bad", "both_bad", "bothbad", "tie (bothbad)", "[[c]]")
NUMBER = re.compile(r"[-+]?\d*\.?\d+")
NAMES_A_RESPONSE = "_response_id"  # the end of keys whose value is the number in the key of the better completion
ARENA_SIDES = ("response_a", "response_b")
ARENA_VOTES = ("winner_model_a", "winner_model_b", "winner_tie")
# A prompt of HelpSteer2 with several turns: "Q\n<extra_id_1>Assistant\nA\n<extra_id_1>User\nQ"
HELPSTEER2_TURN = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")


def helpsteer3(row: SourceRow, keys: DatasetFields) -> Preference:
    """Read a HelpSteer3 row: `context`, `response1`, `response2` and `overall_preference`.

    If `overall_preference` is negative, `response1` is preferred; if positive, `response2`. Zero is a tie.
    """
    side = _sign(row, "overall_preference")
    return _labelled(row, prompt_of(row, "context"), ("response1", "response2"), side)


def helpsteer2(row: SourceRow, keys: DatasetFields) -> Preference:
    """Read a row of the preferences of HelpSteer2: `prompt`, `response_1`, `response_2` and `preference_strength`.

    If `preference_strength` is negative, `response_1` is preferred; if positive, `response_2`. Zero is a tie.
    """
    side = _sign(row, "preference_strength")
    prompt = prompt_of(row, keys.prompt_key)
    if isinstance(prompt, str) and HELPSTEER2_TURN.search(prompt):
        first, *parts = HELPSTEER2_TURN.split(prompt)
        turns = [("user", first), *((who.lower(), said) for who, said in zip(parts[::2], parts[1::2], strict=True))]
        messages = [{"role": role, "content": said} for role, said in turns]
        prompt = ended_before_answer(messages_of(messages, row, keys.prompt_key), row, keys.prompt_key)
    return _labelled(row, prompt, ("response_1", "response_2"), side)


def _sign(row: SourceRow, key: str) -> Side:
    strength = float_to_int(field_of(row.value, key, row))
    if not isinstance(strength, int) or isinstance(strength, bool):
        raise RowError(row.place, "wrong type", f"{key}: {strength!r}, not an integer.")
    return "a" if strength < 0 else "b" if strength > 0 else "tie"


def arena_votes(row: SourceRow, keys: DatasetFields) -> Preference:
    """Read a row of arena-human-preference-55k: `prompt`, `response_a` and `response_b` with a text per turn, and three labels.

    One of `winner_model_a`, `winner_model_b` and `winner_tie` is 1. The lists of texts are often written as JSON.
    """
    asked = _texts(row, keys.prompt_key)
    answered = [_texts(row, key) for key in ARENA_SIDES]
    votes = [spelled_label(float_to_int(field_of(row.value, key, row))) for key in ARENA_VOTES]
    if sorted(votes) != ["0", "0", "1"]:
        message = f"{', '.join(ARENA_VOTES)}: {', '.join(votes)}. One of them must be 1 and the others 0."
        raise RowError(row.place, "bad label", message)
    side: Side = ("a", "b", "tie")[votes.index("1")]
    if answered[0][:-1] != answered[1][:-1]:
        raise prompts_differ(row, " and ".join(ARENA_SIDES))
    for key, texts in zip(ARENA_SIDES, answered, strict=True):
        if len(texts) != len(asked):
            message = (
                f"{key}: {len(texts)} texts for the {len(asked)} of {keys.prompt_key}. Each turn needs one answer."
            )
            raise RowError(row.place, "wrong type", message)
        if texts[-1] is None:
            raise RowError(row.place, "null", f"{key}[{len(texts) - 1}] is null. Give it a value.")
    turns = [
        turn for pair in zip(asked, answered[0], strict=True) for turn in zip(("user", "assistant"), pair, strict=True)
    ]
    messages = [{"role": role, "content": text} for role, text in turns[:-1]]
    prompt = ended_before_answer(messages_of(messages, row, keys.prompt_key), row, keys.prompt_key)
    answers = [completion_of(row, texts[-1], key) for key, texts in zip(ARENA_SIDES, answered, strict=True)]
    return _ranked(row, prompt, answers, side)


def _texts(row: SourceRow, key: str) -> list[Any]:
    """Return a list with a text for each turn, also if it is written as JSON."""
    value = field_of(row.value, key, row)
    if isinstance(value, str):
        with suppress(ValueError, RecursionError, DuplicateKey):
            value = decode(value.strip())
    if not isinstance(value, list) or not value:
        raise RowError(row.place, "wrong type", f"{key}: {describe(value)}, not a list with a text for each turn.")
    return value


def labelled_pair(row: SourceRow, keys: DatasetFields) -> Preference:
    """Read a row of two completions and a label, such as `prompt`, `response_a`, `response_b` and `winner`.

    label_key names the label, and label_values says what its values mean. Rows of two complete conversations, such as
    those of Chatbot Arena, need no prompt: it is their common beginning.
    """
    sides = completion_keys(tuple(row.value))
    if sides is None:
        message = f"no two completions such as response_a and response_b. Keys found: {listed(row.value) or 'none'}."
        raise RowError(row.place, "missing key", f"{message} Name their paths with data.train.columns.")
    side = _side(row, keys, sides)
    if sides[0].startswith("conversation"):
        values = [field_of(row.value, key, row) for key in sides]
        prompt, answers = split_conversations(row, sides, values, " and ".join(sides))
        return _ranked(row, prompt, answers, side)
    return _labelled(row, _prompt(row, keys), sides, side)


def has_label(row: Mapping[str, Any], keys: DatasetFields) -> tuple[str, ...] | None:
    """Return the keys of the prompt, the two completions and the label of a row, or None if it does not have all of them."""
    sides = completion_keys(tuple(row))
    labels = _label_keys(row, keys)
    if sides is None or not labels:
        return None
    if sides[0].startswith("conversation"):
        return (*sides, *labels)
    prompt = _prompt_key(row, keys)
    return None if prompt is None else (prompt, *sides, *labels)


@lru_cache(maxsize=256)
def completion_keys(names: tuple[str, ...]) -> tuple[str, str] | None:
    """Return the keys of the two completions among the keys of a row. None if there are none, or more than two completions."""
    given = set(names)
    found = [(first, second) for first, second in SIDES.items() if first in given and second in given]
    return found[0] if len(found) == 1 else None


def _labelled(row: SourceRow, prompt: TextOrMessages, sides: tuple[str, str], side: Side) -> Preference:
    answers = [completion_of(row, field_of(row.value, key, row), key) for key in sides]
    return _ranked(row, prompt, answers, side)


def _ranked(row: SourceRow, prompt: TextOrMessages, answers: list[TextOrMessages], side: Side) -> Preference:
    ranks = {"a": (0, 1), "b": (1, 0), "tie": (0, 0)}[side]
    completions = tuple(Completion(answer, rank) for answer, rank in zip(answers, ranks, strict=True))
    return checked(Preference(prompt, completions, row.place))


def _prompt_key(row: Mapping[str, Any], keys: DatasetFields) -> str | None:
    """Return the key of the prompt: the configured one, or the first known one that the row has."""
    if keys.prompt_key != DatasetFields.model_fields["prompt_key"].default:
        return keys.prompt_key if keys.prompt_key in row else None
    return next((key for key in PROMPT_KEYS if row.get(key) is not None), None)


def _prompt(row: SourceRow, keys: DatasetFields) -> TextOrMessages:
    key = _prompt_key(row.value, keys) or keys.prompt_key
    prompt = prompt_of(row, key)
    extra = row.value.get("input")
    if key == "instruction" and isinstance(prompt, str) and extra:  # as in AlpacaFarm
        return f"{prompt}\n\n{text_of(row, extra, 'input')}"
    return prompt


def _label_keys(row: Mapping[str, Any], keys: DatasetFields) -> list[str]:
    if keys.label_key is not None:
        return [keys.label_key] if keys.label_key in row else []
    # A table has every column in every row, with null for missing values.
    present = [key for key in LABEL_KEYS if key in row]
    return [key for key in present if row[key] is not None] or present[:1]


def _side(row: SourceRow, keys: DatasetFields, sides: tuple[str, str]) -> Side:
    """Return which completion is better according to the row's label."""
    found = _label_keys(row.value, keys)
    if len(found) > 1:
        message = f"{len(found)} labels: {', '.join(found)}. Set data.train.label_key to the one to train on."
        raise RowError(row.place, "several labels", message)
    if not found:
        wanted = keys.label_key or "winner"
        message = f"no key {wanted}, the label of {' and '.join(sides)}. Keys found: {listed(row.value)}."
        raise RowError(row.place, "missing key", f"{message} Set data.train.label_key to the key that has it.")
    (key,) = found
    value = row.value[key]
    if value is not None and not isinstance(value, str | int | float | Decimal):
        raise RowError(row.place, "bad label", f"{key}: {describe(value)}, not a label.")
    if keys.label_values:
        side = keys.sides_by_label.get(spelled_label(value))
        if side is None:
            given = listed(keys.label_values)
            message = f"{key}: the label {_shown(value)} is not in data.train.label_values, which has {given}. Add it."
            raise RowError(row.place, "bad label", message)
        return side
    if value is None:
        message = f"{key} is null. If that is a tie, set data.train.label_values for each label, with {{null: tie}}. Otherwise"
        raise RowError(
            row.place, "null", f"{message} give it a value, or leave such rows out with data.on_bad_row=skip."
        )
    side = _known_spelling(row, key, value, sides)
    if side is None:
        raise RowError(row.place, "bad label", _unknown(key, value, sides))
    return side


def _known_spelling(row: SourceRow, key: str, value: Any, sides: tuple[str, str]) -> Side | None:
    """Return the side that a label names without settings, or None if it is unknown or a number."""
    text = spelled_label(value)
    if key.endswith(NAMES_A_RESPONSE):  # better_response_id = 1 names response_1
        named = [side for side, name in zip(("a", "b"), sides, strict=True) if name.endswith(text) and text.isdigit()]
        return named[0] if len(named) == 1 else None  # pyright: ignore[reportReturnType]
    if _is_number(value):
        return None
    models = [row.value.get(f"model_{side}") for side in ("a", "b")]
    named = models[0] != models[1]  # the label may be the name of the better model
    for side, name, model in zip(("a", "b"), sides, models, strict=True):
        spellings = {
            side,
            f"[[{side}]]",
            name.casefold(),
            *(f"{stem}_{side}" for stem in ("model", "response", "answer")),
        }
        if text in spellings or (named and isinstance(model, str) and text == spelled_label(model)):
            return side
    return "tie" if text in TIES else None


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return NUMBER.fullmatch(value.strip()) is not None
    return isinstance(value, int | float | Decimal)


def _shown(value: Any) -> str:
    """Return a label for a message: as it is written in label_values, and not too long."""
    text = value.strip() if isinstance(value, str) else spelled_label(value)
    return repr(f"{text[:40]}...") if len(text) > 40 else text if _is_number(value) else repr(text)


def _unknown(key: str, value: Any, sides: tuple[str, str]) -> str:
    shown = _shown(value)
    is_number = _is_number(value) and not isinstance(value, bool)
    what = f"{key} is {shown}, a number, which" if is_number else f"{key}: the label {shown}"
    first, second = sides
    return (
        f"{what} does not say which completion is better. Set data.train.label_values, with {{{shown}: a}} if {first} is, or "
        f"{{{shown}: b}} if {second} is."
    )
