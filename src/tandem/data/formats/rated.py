"""Reads rows with two or more completions, each with a rank or a score, as Preferences."""

from collections.abc import Mapping
from typing import Any

from tandem.config.sections.datasets import DatasetFields
from tandem.data.formats.preference import (
    Completion,
    Preference,
    checked,
    completion_of,
    describe,
    field_of,
    prompt_of,
    score_of,
)
from tandem.data.read.sources import RowError, SourceRow

SCORE_KEYS = ("score", "reward", "overall_score")
TEXT_KEYS = ("completion", "response", "text", "content")
LIST_KEYS = ("completions", "responses")


def ranked(row: SourceRow, keys: DatasetFields) -> Preference:
    """Read a row of NeMo RL's PreferenceDataset: `context` with messages, `completions` with objects {rank, completion}.

    Lower ranks are better.
    """
    given = _completion_list(row, "completions", '{"rank": 0, "completion": "Yes."}')
    completions = []
    for i, item in enumerate(given):
        where = f"completions[{i}]"
        rank = float_to_int(field_of(item, "rank", row, f"{where}."))
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            raise RowError(row.place, "bad rank", f"{where}.rank: {rank!r} is not a rank. Ranks are integers from 0.")
        text = completion_of(row, field_of(item, "completion", row, f"{where}."), f"{where}.completion")
        completions.append(Completion(text, rank, _score(item, row, where)))
    return checked(Preference(prompt_of(row, "context"), tuple(completions), row.place))


def float_to_int(number: Any) -> Any:
    """Return 2.0 as 2; return other values unchanged.

    Tables store an integer column as floats if a value is missing in any row.
    """
    return int(number) if isinstance(number, float) and number.is_integer() else number


def scored(row: SourceRow, keys: DatasetFields) -> Preference:
    """Read a row with a prompt and scored completions. The completion with the highest score gets rank 0.

    The scores are fields of the completion objects, or a separate list `scores`, as in UltraFeedback.
    """
    there = [name for name in LIST_KEYS if name in row.value] or LIST_KEYS
    key = next((name for name in there if has_scores(row.value, name)), there[0])
    like = '{"completion": "Yes.", "score": 1}'
    given = _completion_list(row, key, like, texts=row.value.get("scores") is not None)
    separate = _separate_scores(row, key, len(given))
    answers = []
    for i, item in enumerate(given):
        where = f"{key}[{i}]"
        own = _score(item, row, where, SCORE_KEYS) if isinstance(item, Mapping) else None
        if own is None and separate is None:
            raise RowError(
                row.place, "missing key", f"{where} has no score (or reward). Add one, or remove the completion."
            )
        if own is not None and separate is not None and own != separate[i]:
            message = f"{where}: its score is {own:g}, but scores[{i}] is {separate[i]:g}. Remove one of them."
            raise RowError(row.place, "bad score", message)
        score = own if separate is None else separate[i]
        text, name = item, where
        if isinstance(item, Mapping):
            found = next((name for name in TEXT_KEYS if name in item), TEXT_KEYS[0])
            text, name = field_of(item, found, row, f"{where}."), f"{where}.{found}"
        answers.append((completion_of(row, text, name), score))
    order = sorted({score for _, score in answers}, reverse=True)
    completions = tuple(Completion(text, order.index(score), score) for text, score in answers)
    return checked(Preference(prompt_of(row, _prompt_key(row, keys)), completions, row.place))


def has_scores(row: Mapping[str, Any], key: str) -> bool:
    """Whether each completion in the list `row[key]` has a score, as a field of the completion or in the list `scores`."""
    items = row.get(key)
    if not isinstance(items, list) or not items:
        return False
    if isinstance(row.get("scores"), list):
        return all(isinstance(item, str | list | Mapping) for item in items)
    return all(isinstance(item, Mapping) and any(name in item for name in SCORE_KEYS) for item in items)


def _prompt_key(row: SourceRow, keys: DatasetFields) -> str:
    """Return the key that holds the prompt.

    If prompt_key is not configured, and the row has `instruction` but no `prompt`, return `instruction`.
    """
    is_default = keys.prompt_key == DatasetFields.model_fields["prompt_key"].default
    return "instruction" if is_default and "prompt" not in row.value and "instruction" in row.value else keys.prompt_key


def _separate_scores(row: SourceRow, key: str, count: int) -> list[float] | None:
    """Return the list `scores`, or None if the row has no such list. Raise a RowError unless it has one score per completion."""
    given = row.value.get("scores")
    if given is None:
        return None
    if not isinstance(given, list):
        raise RowError(
            row.place, "wrong type", f"scores: {describe(given)}, not a list with a score for each of {key}."
        )
    if len(given) != count:
        raise RowError(
            row.place, "bad score", f"scores: {len(given)} scores for {count} {key}. Give one score for each."
        )
    scores = [score_of(value, row, f"scores[{i}]") for i, value in enumerate(given)]
    missing = next((i for i, score in enumerate(scores) if score is None), None)
    if missing is not None:
        raise RowError(row.place, "null", f"scores[{missing}] is null. Give it a value.")
    return [score for score in scores if score is not None]


def _completion_list(row: SourceRow, key: str, like: str, *, texts: bool = False) -> list[Any]:
    """Return the list of two or more completions under `key`.

    `like`: an example of a valid completion object, for error messages. `texts`: whether a completion may also be a text
    or a list of messages.
    """
    given = field_of(row.value, key, row)
    if not isinstance(given, list):
        raise RowError(row.place, "wrong type", f"{key}: {describe(given)}, not a list of completions such as {like}.")
    if len(given) < 2:
        message = f"{key}: a list of {len(given)}, but a preference needs two or more completions."
        raise RowError(row.place, "one completion", message)
    for i, item in enumerate(given):
        if not isinstance(item, Mapping) and not (texts and isinstance(item, str | list)):
            raise RowError(row.place, "wrong type", f"{key}[{i}]: {describe(item)}, not an object such as {like}.")
    return given


def _score(
    item: Mapping[str, Any], row: SourceRow, where: str, names: tuple[str, ...] = ("score", "reward")
) -> float | None:
    # A table has every column in every row, with null for missing values.
    given = {name: score_of(item.get(name), row, f"{where}.{name}") for name in names}
    (first, score), *others = [(name, score) for name, score in given.items() if score is not None] or [("", None)]
    for other, value in others:
        if value != score:
            message = f"{where}: {first} is {score:g}, but {other} is {value:g}. Remove one of them."
            raise RowError(row.place, "bad score", message)
    return score
