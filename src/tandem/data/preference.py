"""What a preference is, and how its parts are read out of a row: texts, messages, scores, each with its place."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


def checked(preference: Preference) -> Preference:
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


def field_of(holder: Mapping[str, Any], key: str, row: SourceRow, above: str = "") -> Any:
    if key not in holder:
        near = difflib.get_close_matches(key, list(holder), n=1, cutoff=0.7)
        hint = f" Is {above}{near[0]} meant?" if near else ""
        found = ", ".join(holder) or "none"
        way_out = "" if above else f" Keys found: {found}. {_way_out(key)}"
        raise RowError(row.place, "missing key", f"no key {above}{key}.{hint}{way_out}")
    if holder[key] is None:
        raise RowError(row.place, "null", f"{above}{key} is null; it must hold a value.")
    return holder[key]


def _way_out(key: str) -> str:
    if key in ("prompt", "chosen", "rejected"):
        return f"data.train.{key}_key names another."
    return "data.train.dataset_name names the format, prompt_key, chosen_key and rejected_key its keys."


def prompt_of(row: SourceRow, key: str) -> str | tuple[Message, ...]:
    value = field_of(row.value, key, row)
    if isinstance(value, str):
        if not value.strip():
            raise RowError(row.place, "empty prompt", f"{key} is empty.")
        return _clean(value, row, key)
    return ended_before_answer(messages_of(value, row, key), row, key)


def ended_before_answer(messages: tuple[Message, ...], row: SourceRow, key: str) -> tuple[Message, ...]:
    if messages[-1].role == "assistant":
        raise RowError(
            row.place,
            "context ends in an assistant turn",
            f"{key}[{len(messages) - 1}]: the prompt ends in an assistant turn; it must end before the answer.",
        )
    return messages


def completion_of(row: SourceRow, value: Any, key: str) -> str:
    if isinstance(value, str):
        return _clean(value, row, key)
    messages = messages_of(value if isinstance(value, list) else [value], row, key, first="assistant")
    if len(messages) != 1 or messages[0].role != "assistant":
        roles = ", ".join(message.role for message in messages)
        raise RowError(row.place, "wrong roles", f"{key}: roles {roles}; a completion is one assistant message.")
    return messages[0].content


def messages_of(value: Any, row: SourceRow, key: str, first: str = "user") -> tuple[Message, ...]:
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
    role, content = field_of(item, "role", row, f"{where}."), field_of(item, "content", row, f"{where}.")
    if role not in ROLES:
        raise RowError(row.place, "unknown role", f"{where}.role: {role!r} is none of {', '.join(ROLES)}.")
    return Message(role, _clean(_text(content, row, f"{where}.content"), row, f"{where}.content"))


def _text(content: Any, row: SourceRow, where: str) -> str:
    """A text, or the texts of typed parts ({"type": "text", "text" or "value": ...}) put together."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError(row.place, "wrong type", f"{where}: {kind_of(content)}, not a text.")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text", part.get("value")) if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise RowError(row.place, "not a text part", f"{where}[{i}]: only parts of type text can be trained on.")
        texts.append(text)
    return "".join(texts)


def _clean(text: str, row: SourceRow, key: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(
            row.place, "lone surrogate", f"{key}: half a character (a lone surrogate) at position {error.start}."
        ) from None
    return text


def score_of(value: Any, row: SourceRow, where: str) -> float | None:
    if value is None:
        return None
    try:
        if not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an integer beyond every float
        pass
    raise RowError(row.place, "bad score", f"{where}: {value!r} is not a finite number.")
