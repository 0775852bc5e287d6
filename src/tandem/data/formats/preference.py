"""Defines the Preference record, and reads its parts from a row: texts, messages, tools and scores."""

import difflib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from tandem.config.sections.section import MAX_SCORE
from tandem.data.read.sources import RowError, SourceRow, kind_of
from tandem.data.text.chat import SHIELD
from tandem.terminal.printable import listed

ROLES = ("system", "user", "assistant", "tool")
# Keys of a message that chat templates read, in addition to role and content.
REASONING = ("reasoning_content", "thinking")
OPTIONAL_KEYS = ("tool_calls", "tool_call_id", "name", *REASONING)
# Columns of multimodal datasets.
OTHER_MEDIA = frozenset(["images", "image", "videos", "video", "audios", "audio"])
# The note for rows with a label that may say that the rejected completion is better.
CONTRADICTED = "labels that are ignored and may prefer the rejected completion"
# What datasets call the three keys of a pair, the most usual names first.
OTHER_NAMES = {
    "prompt": ("question", "instruction", "query", "input", "context", "problem", "text"),
    "chosen": ("preferred", "accepted", "better", "good", "winner", "positive", "response", "answer"),
    "rejected": ("dispreferred", "worse", "bad", "loser", "negative", "response", "answer"),
}
DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. `more` holds other fields that a chat template may read, such as tool calls."""

    role: str
    content: str
    more: Mapping[str, Any] = field(default_factory=dict)


TextOrMessages = str | tuple[Message, ...]  # a prompt, or the answer of a completion


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion: its answer, its rank (lower is better), and its score if the data has one.

    The answer is plain text, or messages of the assistant and its tools. Only the assistant's turns are scored.
    """

    answer: TextOrMessages
    rank: int
    score: float | None = None
    sampled: tuple[int, ...] | None = None  # the token ids, if a model sampled the answer


@dataclass(frozen=True, slots=True)
class Preference:
    """A prompt (plain text or messages), two or more ranked completions, and the tools offered to the model."""

    prompt: TextOrMessages
    completions: tuple[Completion, ...]
    place: str
    tools: tuple[Any, ...] = ()
    notes: tuple[str, ...] = ()  # observations that are counted and reported; the row is used
    columns: Mapping[str, float] = field(
        default_factory=dict
    )  # column name -> value, for columns set by keys such as weight_key


def checked(preference: Preference) -> Preference:
    """Return `preference`, or raise a RowError if there is nothing to learn from it.

    There is nothing to learn if all completions are equal, if all ranks are equal, or if one of exactly two completions is
    empty.
    """
    answers = [completion.answer for completion in preference.completions]
    if len(answers) == 2 and any(map(is_empty, answers)):  # among more than two, the empty one may not be in any pair
        raise empty_completion(preference.place)
    if all(answer == answers[0] for answer in answers):
        raise RowError(
            preference.place,
            "equal completions",
            "chosen and rejected are identical, so there is no preference to learn.",
            kind="filtered",
        )
    if len({completion.rank for completion in preference.completions}) == 1:
        raise RowError(preference.place, "equal ranks", "all completions have the same rank.", kind="filtered")
    return preference


def empty_completion(place: str) -> RowError:
    return RowError(place, "empty completion", "a completion is empty.", kind="filtered")


def is_empty(answer: TextOrMessages) -> bool:
    """Whether an answer is empty: a blank text, or messages with an assistant turn that has neither content nor tool calls."""
    if isinstance(answer, str):
        return not answer.strip()
    return any(m.role == "assistant" and not m.content.strip() and not m.more.get("tool_calls") for m in answer)


def field_of(holder: Mapping[str, Any], key: str, row: SourceRow, above: str = "") -> Any:
    """Return the value of `key` in `holder`. Raise a RowError if it is missing or null.

    `above`: the path from the row to `holder`, for error messages, such as "completions[0].".
    """
    if key not in holder:
        refuse_spaces(holder, (key,), row)
        lowered = {name.lower(): name for name in holder}
        near = difflib.get_close_matches(key.lower(), list(lowered), n=1, cutoff=0.7)
        hint = f" Did you mean {above}{lowered[near[0]]}?" if near else ""
        others = _plausible_first(key, holder, lowered[near[0]] if near else None)
        found = listed([*others, *(name for name in holder if name not in others)]) or "none"
        way_out = (
            ("" if near else f" Keys found: {found}.") if above else f" Keys found: {found}. {_remedy(key, others)}"
        )
        raise RowError(row.place, "missing key", f"no key {above}{key}.{hint}{way_out}")
    if holder[key] is None:
        raise RowError(row.place, "null", f"{above}{key} is null. Give it a value.")
    return holder[key]


def refuse_spaces(holder: Mapping[str, Any], keys: tuple[str, ...], row: SourceRow) -> None:
    """Raise a RowError if one of `keys` has spaces around its name in `holder`, as in the headers of some tables."""
    if spaced := [name for name in holder if name not in keys and name.strip() in keys]:
        message = f"spaces around the key {', '.join(map(repr, spaced))}. Remove them, in a table from its header."
        raise RowError(row.place, "missing key", message)


def _plausible_first(key: str, holder: Mapping[str, Any], near: str | None) -> list[str]:
    """Return the keys of a row that may hold a prompt or completion in place of `key`, the most plausible first."""
    if key not in OTHER_NAMES:
        return []
    usual = [near, *OTHER_NAMES[key]]
    others = [name for name in holder if name not in OTHER_NAMES]
    return sorted(others, key=lambda name: usual.index(name) if name in usual else len(usual))


def _remedy(key: str, others: list[str]) -> str:
    if key in OTHER_NAMES and others:
        return f"Set data.train.{key}_key to the key that has it, such as {listed(others[:1])}."
    if key in OTHER_NAMES:
        return f"Add {key} to the row."
    return "Set data.train.dataset_name to another format."


def prompt_of(row: SourceRow, key: str) -> TextOrMessages:
    value = field_of(row.value, key, row)
    if isinstance(value, str):
        if not value.strip():
            raise RowError(row.place, "empty prompt", f"{key} is empty.")
        return _clean(value, row, key)
    return ended_before_answer(messages_of(value, row, key), row, key)


def with_system(row: SourceRow, prompt: TextOrMessages) -> TextOrMessages:
    """Return the prompt. If the row has a text under the key `system`, add this text as a system turn at the beginning."""
    given = row.value.get("system")
    if not given:
        return prompt
    system = Message("system", text_of(row, given, "system"))
    turns = (Message("user", prompt),) if isinstance(prompt, str) else prompt
    if turns[0].role == "system":
        raise RowError(
            row.place, "late system turn", "the prompt has a system turn, and the key system gives another. Remove one."
        )
    return (system, *turns)


def ended_before_answer(messages: tuple[Message, ...], row: SourceRow, key: str) -> tuple[Message, ...]:
    """Return `messages`. Raise a RowError if they end with a system turn, an assistant turn, or a user turn without text."""
    if messages[-1].role == "user" and not messages[-1].content.strip():
        raise RowError(row.place, "empty prompt", f"{key}[{len(messages) - 1}]: the user turn is empty.")
    if messages[-1].role == "system":
        raise RowError(row.place, "no user turn", f"{key}: the prompt has only a system turn. Add a user turn.")
    if messages[-1].role == "assistant":
        raise RowError(
            row.place,
            "context ends in an assistant turn",
            f"{key}[{len(messages) - 1}]: the prompt ends in an assistant turn. End it before the completion.",
        )
    return messages


def refuse_other_media(row: SourceRow) -> None:
    """Raise a RowError if the row has images, video or audio."""
    for key in () if OTHER_MEDIA.isdisjoint(row.value) else row.value:
        if key in OTHER_MEDIA and row.value[key]:
            raise RowError(
                row.place,
                "not text",
                f"{key}: only text can be trained on. Remove this column, or the rows that use it.",
            )


def text_of(row: SourceRow, value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise RowError(row.place, "wrong type", f"{key}: {describe(value)}, not a text.")
    return _clean(value, row, key)


def completion_of(row: SourceRow, value: Any, key: str) -> TextOrMessages:
    if isinstance(value, str):
        return _clean(value, row, key)
    if isinstance(value, Mapping):
        return as_answer((_message(value, row, key),), row, key)
    return as_answer(messages_of(value, row, key, first="assistant"), row, key)


def as_answer(messages: tuple[Message, ...], row: SourceRow, key: str) -> TextOrMessages:
    """Check the roles of a completion's messages, and return the messages. A single plain message is returned as a text."""
    if len(messages) == 1 and messages[0].role == "assistant":
        return messages if messages[0].more else messages[0].content
    roles = [message.role for message in messages]
    if roles[-1] != "assistant" or not set(roles) <= {"assistant", "tool"}:
        raise RowError(
            row.place,
            "wrong roles",
            f"{key}: roles {listed(roles)}, but a completion is one assistant message, or assistant and tool messages "
            "that end in an assistant message.",
        )
    return messages


def tools_of(row: SourceRow) -> tuple[Any, ...]:
    """Return the tools of a row as JSON schemas. The row gives a list, or the JSON text of a list."""
    value = row.value.get("tools")
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise RowError(row.place, "bad tools", "tools: the text is not JSON.") from None
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        each = value if isinstance(value, list) else []
        odd = next((f"tools[{i}]: {describe(one)}" for i, one in enumerate(each) if not isinstance(one, Mapping)), None)
        message = (
            f"{odd}, not an object that describes a tool."
            if odd
            else f"tools: {describe(value)}, not a list of objects that describe tools."
        )
        raise RowError(row.place, "bad tools", message)
    return tuple(_clean_within(value, row, "tools"))


def messages_of(
    value: Any, row: SourceRow, key: str, first: str = "user", allowed: str = "a text or a list of messages"
) -> tuple[Message, ...]:
    """Read a list of messages and check the order of roles.

    `first`: the required role of the first turn after an optional system turn. `allowed`: the allowed types of `value` in
    words, for error messages.
    """
    if not isinstance(value, list):
        raise RowError(row.place, "wrong type", f"{key}: {describe(value)}, not {allowed}.")
    if not value:
        raise RowError(row.place, "no messages", f"{key} is an empty list of messages.")
    messages = tuple(_message(item, row, f"{key}[{i}]") for i, item in enumerate(value))
    if len(messages) == 1 and messages[0].role == first:
        return messages
    turns = [i for i, message in enumerate(messages) if message.role != "system"]
    if any(message.role == "system" for message in messages[1:]):
        late = next(i for i, message in enumerate(messages) if i and message.role == "system")
        raise RowError(row.place, "late system turn", f"{key}[{late}]: a system turn may only come first.")
    for before, i in zip([None, *turns], turns, strict=False):
        role = messages[i].role
        wanted = {first} if before is None else _roles_after(messages[before].role)
        if role not in wanted:
            after = "first" if before is None else f"after {messages[before].role}"
            raise RowError(row.place, "roles out of order", f"{key}[{i}]: role {role} cannot come {after}.")
    return messages


def _roles_after(role: str) -> set[str]:
    return {"user": {"assistant"}, "assistant": {"user", "tool"}, "tool": {"tool", "assistant"}}[role]


def _message(item: Any, row: SourceRow, where: str) -> Message:
    if not isinstance(item, Mapping):
        raise RowError(row.place, "wrong type", f"{where}: {kind_of(item)}, not a message with role and content.")
    role = field_of(item, "role", row, f"{where}.")
    if role not in ROLES:
        raise RowError(row.place, "unknown role", f"{where}.role: {role!r} is not one of {', '.join(ROLES)}.")
    is_plain = len(item) == 2 and "content" in item
    more = (
        {}
        if is_plain
        else {key: _clean_within(item[key], row, f"{where}.{key}") for key in OPTIONAL_KEYS if item.get(key)}
    )
    if "tool_calls" in more:
        check_calls(more["tool_calls"], row, f"{where}.tool_calls")
    for key in REASONING:
        if not isinstance(more.get(key, ""), str):
            raise RowError(row.place, "wrong type", f"{where}.{key}: {describe(more[key])}, not a text.")
    if "tool_calls" in more and item.get("content") is None:
        return Message(role, "", more)
    content = field_of(item, "content", row, f"{where}.")
    return Message(role, _clean(_text(content, row, f"{where}.content"), row, f"{where}.content"), more)


def check_calls(calls: Any, row: SourceRow, where: str) -> None:
    """Raise a RowError unless each tool call has a name and valid arguments.

    Arguments may be an object, the JSON text of an object, or missing.
    """
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise RowError(row.place, "bad tool call", f"{where}: {describe(calls)}, not a list of calls.")
    for i, call in enumerate(calls):
        function = call.get("function", call)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise RowError(row.place, "bad tool call", f"{where}[{i}]: the function has no name.")
        arguments = function.get("arguments")
        if isinstance(arguments, str) and arguments.strip():
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                raise RowError(row.place, "bad tool call", f"{where}[{i}]: the arguments are not JSON.") from None
        if arguments and not isinstance(arguments, Mapping):
            message = f"{where}[{i}]: the arguments are {describe(arguments)}, not an object."
            raise RowError(row.place, "bad tool call", message)


def _text(content: Any, row: SourceRow, where: str) -> str:
    """Return the content of a message as a text. A list of parts {"type": "text", "text" or "value": ...} is joined."""
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


def describe(value: Any) -> str:
    """Describe a value for an error message: a number by its digits, anything else by its type."""
    return repr(value) if isinstance(value, int | float) and not isinstance(value, bool) else kind_of(value)


def _clean(text: str, row: SourceRow, key: str) -> str:
    """Return the text. Raise a RowError if it cannot be encoded as UTF-8, or contains the character SHIELD, which is reserved."""
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(
            row.place,
            "lone surrogate",
            f"{key}: an incomplete character (a lone surrogate) at position {error.start}. Remove it.",
        ) from None
    if SHIELD in text:
        at = text.index(SHIELD)
        raise RowError(row.place, "noncharacter", f"{key}: the noncharacter U+FDD0 at position {at}. Remove it.")
    return text


def _clean_within(value: Any, row: SourceRow, key: str) -> Any:
    """Apply `_clean` to every text inside a value."""
    if isinstance(value, str):
        _clean(value, row, key)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            _clean_within(name, row, key)
            _clean_within(inner, row, key)
    elif isinstance(value, list):
        for inner in value:
            _clean_within(inner, row, key)
    return value


def score_of(value: Any, row: SourceRow, where: str) -> float | None:
    return None if value is None else number_of(value, row, where, "score")


def number_of(value: Any, row: SourceRow, where: str, what: str) -> float:
    """Return `value` as a float. Raise a RowError if it is not a finite number in the range of float32.

    `what`: the kind of number, such as "score" or "weight", for error messages.
    """
    is_number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
    if not is_number or (not isinstance(value, int) and not math.isfinite(value)):
        comma = DECIMAL_COMMA.fullmatch(value.strip()) if isinstance(value, str) else None
        hint = f" Write it with a decimal point: {comma[0].replace(',', '.')}." if comma else ""
        raise RowError(row.place, f"bad {what}", f"{where}: {value!r} is not a finite number.{hint}")
    if abs(value) > MAX_SCORE:
        number = f"{value:.3g}" if abs(value) < 10**300 else f"a number of {len(str(abs(value)))} digits"
        message = f"{where}: {number} is too large. {what.capitalize()}s are stored as float32, up to {MAX_SCORE:.1e}."
        raise RowError(row.place, f"bad {what}", message)
    return float(value)
