"""SourceRows in; Preferences out. One small function per format, a table of their names, detection by keys."""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.config.schema import DatasetFields
from tandem.data.sources import RowError, SourceRow, kind_of

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer: its text, its rank (lower is better) and its score where the data gives one."""

    text: str
    rank: int
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Preference:
    """A prompt (a plain text, or messages) and two or more ranked completions."""

    prompt: str | tuple[Message, ...]
    completions: tuple[Completion, ...]
    place: str


def binary(row: SourceRow, keys: DatasetFields) -> Preference:
    """`prompt`, `chosen`, `rejected` under configurable keys: texts, or messages."""
    prompt = _prompt(row, keys.prompt_key)
    completions = tuple(
        Completion(_completion(row, _field(row.value, key, row), key), rank)
        for rank, key in enumerate((keys.chosen_key, keys.rejected_key))
    )
    return _checked(Preference(prompt, completions, row.place))


def ranked(row: SourceRow, keys: DatasetFields) -> Preference:
    """NeMo RL's PreferenceDataset: `context` (messages), `completions` of {rank, completion}; lower rank is better."""
    given = _field(row.value, "completions", row)
    if not isinstance(given, list) or len(given) < 2:
        raise RowError(
            row.place, "one completion", "completions: a preference needs a list of two or more completions."
        )
    completions = []
    for i, item in enumerate(given):
        if not isinstance(item, Mapping):
            raise RowError(row.place, "wrong type", f"completions[{i}]: {kind_of(item)}, not an object.")
        rank = _field(item, "rank", row, f"completions[{i}].")
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            raise RowError(
                row.place, "bad rank", f"completions[{i}].rank: {rank!r} is no rank; ranks are integers from 0."
            )
        answer = _field(item, "completion", row, f"completions[{i}].")
        score = _score(item.get("score", item.get("reward")), row, f"completions[{i}].score")
        completions.append(Completion(_completion(row, answer, f"completions[{i}].completion"), rank, score))
    return _checked(Preference(_prompt(row, "context"), tuple(completions), row.place))


FORMATS: dict[str, Callable[[SourceRow, DatasetFields], Preference]] = {
    "BinaryPreferenceDataset": binary,
    "PreferenceDataset": ranked,
}


def detect_format(row: SourceRow, keys: DatasetFields) -> str:
    """The name of the format, told by the keys of a row."""
    if "completions" in row.value and keys.chosen_key not in row.value:
        return "PreferenceDataset"
    return "BinaryPreferenceDataset"


def _checked(preference: Preference) -> Preference:
    texts = [completion.text for completion in preference.completions]
    if not all(text.strip() for text in texts):
        raise RowError(preference.place, "empty completion", "a completion is empty.", kind="filtered")
    if len(set(texts)) == 1:
        raise RowError(
            preference.place,
            "equal completions",
            "chosen and rejected are identical, so the pair teaches nothing.",
            kind="filtered",
        )
    if len({completion.rank for completion in preference.completions}) == 1:
        raise RowError(preference.place, "equal ranks", "all completions have the same rank: a tie.", kind="filtered")
    return preference


def _field(holder: Mapping[str, Any], key: str, row: SourceRow, above: str = "") -> Any:
    if key not in holder:
        near = difflib.get_close_matches(key, list(holder), n=1, cutoff=0.7)
        hint = f" Is {above}{near[0]} meant?" if near else ""
        found = ", ".join(holder) or "none"
        way_out = "" if above else f" Keys found: {found}. data.train.{_config_key(key)} names another."
        raise RowError(row.place, "missing key", f"no key {above}{key}.{hint}{way_out}")
    if holder[key] is None:
        raise RowError(row.place, "null", f"{above}{key} is null; it must hold a text or messages.")
    return holder[key]


def _config_key(key: str) -> str:
    return f"{key}_key" if key in ("prompt", "chosen", "rejected") else "prompt_key (chosen_key, rejected_key)"


def _prompt(row: SourceRow, key: str) -> str | tuple[Message, ...]:
    value = _field(row.value, key, row)
    if isinstance(value, str):
        if not value.strip():
            raise RowError(row.place, "empty prompt", f"{key} is empty.")
        return _clean(value, row, key)
    messages = _messages(value, row, key)
    if messages[-1].role == "assistant":
        raise RowError(
            row.place,
            "context ends in an assistant turn",
            f"{key}[{len(messages) - 1}]: the prompt ends in an assistant turn; it must end before the answer.",
        )
    return messages


def _completion(row: SourceRow, value: Any, key: str) -> str:
    if isinstance(value, str):
        return _clean(value, row, key)
    messages = _messages(value if isinstance(value, list) else [value], row, key, first="assistant")
    if len(messages) != 1 or messages[0].role != "assistant":
        roles = ", ".join(message.role for message in messages)
        raise RowError(row.place, "wrong roles", f"{key}: roles {roles}; a completion is one assistant message.")
    return messages[0].content


def _messages(value: Any, row: SourceRow, key: str, first: str = "user") -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise RowError(row.place, "wrong type", f"{key}: {kind_of(value)}, not a text or a list of messages.")
    if not value:
        raise RowError(row.place, "empty prompt", f"{key} is an empty list of messages.")
    messages = tuple(_message(item, row, f"{key}[{i}]") for i, item in enumerate(value))
    turns = [i for i, message in enumerate(messages) if message.role != "system"]
    if any(message.role == "system" for message in messages[1:]):
        late = next(i for i, message in enumerate(messages) if i and message.role == "system")
        raise RowError(row.place, "late system turn", f"{key}[{late}]: a system turn may only come first.")
    for before, i in zip([None, *turns], turns, strict=False):
        role = messages[i].role
        wanted = {first} if before is None else _may_follow(messages[before].role)
        if role not in wanted:
            after = "first" if before is None else f"after {messages[before].role}"
            raise RowError(row.place, "roles out of order", f"{key}[{i}]: role {role} cannot come {after}.")
    return messages


def _may_follow(role: str) -> set[str]:
    return {"user": {"assistant"}, "assistant": {"user", "tool"}, "tool": {"tool", "assistant"}}[role]


def _message(item: Any, row: SourceRow, where: str) -> Message:
    if not isinstance(item, Mapping):
        raise RowError(row.place, "wrong type", f"{where}: {kind_of(item)}, not a message with role and content.")
    role, content = _field(item, "role", row, f"{where}."), _field(item, "content", row, f"{where}.")
    if role not in ROLES:
        raise RowError(row.place, "unknown role", f"{where}.role: {role!r} is none of {', '.join(ROLES)}.")
    if not isinstance(content, str):
        raise RowError(row.place, "wrong type", f"{where}.content: {kind_of(content)}, not a text.")
    return Message(role, _clean(content, row, f"{where}.content"))


def _clean(text: str, row: SourceRow, key: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(
            row.place, "lone surrogate", f"{key}: half a character (a lone surrogate) at position {error.start}."
        ) from None
    return text


def _score(value: Any, row: SourceRow, where: str) -> float | None:
    if value is None:
        return None
    try:
        if not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an integer beyond every float
        pass
    raise RowError(row.place, "bad score", f"{where}: {value!r} is not a finite number.")
