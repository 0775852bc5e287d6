"""Rows with two or more completions in, each with a rank or a score of its own; Preferences out."""

from collections.abc import Mapping
from typing import Any

from tandem.config.sections.datasets import DatasetFields
from tandem.data.formats.preference import (
    Completion,
    Preference,
    checked,
    completion_of,
    field_of,
    prompt_of,
    score_of,
    shown,
)
from tandem.data.read.sources import RowError, SourceRow

SCORED_BY = ("score", "reward", "overall_score")
TEXT_KEYS = ("completion", "response", "text", "content")
LISTS = ("completions", "responses")


def ranked(row: SourceRow, keys: DatasetFields) -> Preference:
    """NeMo RL's PreferenceDataset: `context` (messages), `completions` of {rank, completion}; lower rank is better."""
    given = _several(row, "completions", '{"rank": 0, "completion": "Yes."}')
    completions = []
    for i, item in enumerate(given):
        where = f"completions[{i}]"
        rank = whole(field_of(item, "rank", row, f"{where}."))
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            raise RowError(row.place, "bad rank", f"{where}.rank: {rank!r} is no rank; ranks are integers from 0.")
        text = completion_of(row, field_of(item, "completion", row, f"{where}."), f"{where}.completion")
        completions.append(Completion(text, rank, _score(item, row, where)))
    return checked(Preference(prompt_of(row, "context"), tuple(completions), row.place))


def whole(number: Any) -> Any:
    """2.0 is 2: tables write whole numbers so where a row has none."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def scored(row: SourceRow, keys: DatasetFields) -> Preference:
    """A prompt and completions with a score each, which also gives the ranks: higher is better.

    A score is in the object of its completion, or in the list `scores` beside the completions, as UltraFeedback has it.
    """
    there = [name for name in LISTS if name in row.value] or LISTS
    key = next((name for name in there if has_scores(row.value, name)), there[0])
    like = '{"completion": "Yes.", "score": 1}'
    given = _several(row, key, like, texts=row.value.get("scores") is not None)
    beside = _scores_beside(row, key, len(given))
    answers = []
    for i, item in enumerate(given):
        where = f"{key}[{i}]"
        own = _score(item, row, where, SCORED_BY) if isinstance(item, Mapping) else None
        if own is None and beside is None:
            raise RowError(row.place, "missing key", f"{where} has no score (or reward).")
        if own is not None and beside is not None and own != beside[i]:
            message = f"{where}: its own score {own:g} and scores[{i}] {beside[i]:g} differ, and only one can count."
            raise RowError(row.place, "bad score", message)
        score = own if beside is None else beside[i]
        text, name = item, where
        if isinstance(item, Mapping):
            found = next((name for name in TEXT_KEYS if name in item), TEXT_KEYS[0])
            text, name = field_of(item, found, row, f"{where}."), f"{where}.{found}"
        answers.append((completion_of(row, text, name), score))
    order = sorted({score for _, score in answers}, reverse=True)
    completions = tuple(Completion(text, order.index(score), score) for text, score in answers)
    return checked(Preference(prompt_of(row, _prompt_key(row, keys)), completions, row.place))


def has_scores(row: Mapping[str, Any], key: str) -> bool:
    """Whether a list of completions has a score for each, of its own or in `scores` beside them."""
    items = row.get(key)
    if not isinstance(items, list) or not items:
        return False
    if isinstance(row.get("scores"), list):
        return all(isinstance(item, str | list | Mapping) for item in items)
    return all(isinstance(item, Mapping) and any(name in item for name in SCORED_BY) for item in items)


def _prompt_key(row: SourceRow, keys: DatasetFields) -> str:
    """UltraFeedback calls the prompt `instruction`; a key that a setting names is never passed over."""
    is_default = keys.prompt_key == DatasetFields.model_fields["prompt_key"].default
    return "instruction" if is_default and "prompt" not in row.value and "instruction" in row.value else keys.prompt_key


def _scores_beside(row: SourceRow, key: str, count: int) -> list[float] | None:
    """The list `scores`: one for each completion."""
    given = row.value.get("scores")
    if given is None:
        return None
    if not isinstance(given, list):
        raise RowError(row.place, "wrong type", f"scores: {shown(given)}, not a list with a score for each of {key}.")
    if len(given) != count:
        raise RowError(row.place, "bad score", f"scores: a list of {len(given)} for {count} {key}; each needs one.")
    scores = [score_of(value, row, f"scores[{i}]") for i, value in enumerate(given)]
    missing = next((i for i, score in enumerate(scores) if score is None), None)
    if missing is not None:
        raise RowError(row.place, "null", f"scores[{missing}] is null; it must hold a value.")
    return [score for score in scores if score is not None]


def _several(row: SourceRow, key: str, like: str, *, texts: bool = False) -> list[Any]:
    """Two or more completions, each an object like the one shown; with `texts` also texts or messages."""
    given = field_of(row.value, key, row)
    if not isinstance(given, list):
        raise RowError(row.place, "wrong type", f"{key}: {shown(given)}, not a list of completions such as {like}.")
    if len(given) < 2:
        message = f"{key}: a list of {len(given)}; a preference needs two or more completions."
        raise RowError(row.place, "one completion", message)
    for i, item in enumerate(given):
        if not isinstance(item, Mapping) and not (texts and isinstance(item, str | list)):
            raise RowError(row.place, "wrong type", f"{key}[{i}]: {shown(item)}, not an object such as {like}.")
    return given


def _score(
    item: Mapping[str, Any], row: SourceRow, where: str, names: tuple[str, ...] = ("score", "reward")
) -> float | None:
    # A table has every column in every row: null where the row has none.
    given = {name: score_of(item.get(name), row, f"{where}.{name}") for name in names}
    (first, score), *others = [(name, score) for name, score in given.items() if score is not None] or [("", None)]
    for other, value in others:
        if value != score:
            message = f"{where}: {first} {score:g} and {other} {value:g} differ, and only one can count."
            raise RowError(row.place, "bad score", message)
    return score
