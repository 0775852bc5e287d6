"""Reads rows of conversations: dialogues as texts, ShareGPT turns, and the fine-tuning files of OpenAI and ms-swift.

Also defines what other formats share: a chosen and a rejected completion with their scores, and the common beginning of two
conversations.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tandem.config.sections.datasets import DatasetFields
from tandem.data.formats.preference import (
    Completion,
    Message,
    Preference,
    TextOrMessages,
    as_answer,
    checked,
    completion_of,
    describe,
    ended_before_answer,
    field_of,
    messages_of,
    score_of,
    text_of,
    tools_of,
)
from tandem.data.read.sources import ANY_SCORE, PAIR_SCORE_KEYS, RowError, SourceRow, kind_of

ASSISTANT = "\n\nAssistant:"
TURN = re.compile(r"\n\n(Human|Assistant):")
CALL, RESULT = "call", "tool"  # a turn that calls functions, and a turn with their result
ROLE_OF_SPEAKER = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "function_call": CALL,
    "observation": RESULT,
    "tool": RESULT,
}
# OpenAI's current names of the two completions, and those of its earlier schema.
OUTPUTS = (("preferred_output", "non_preferred_output"), ("preferred_completion", "non_preferred_completion"))
SWIFT_ROLES = {"tool_call": CALL, "tool_response": RESULT}


# Shared by several formats


def pair_of(row: SourceRow, prompt: TextOrMessages, chosen: str, rejected: str) -> Preference:
    """Make a preference of a prompt and the completions under two keys."""
    texts = [completion_of(row, field_of(row.value, key, row), key) for key in (chosen, rejected)]
    return checked(Preference(prompt, chosen_and_rejected(row, texts), row.place))


def chosen_and_rejected(row: SourceRow, texts: Sequence[TextOrMessages]) -> tuple[Completion, ...]:
    """Return the chosen and the rejected completion, with scores if the row has them."""
    given = None
    if not row.value.keys().isdisjoint(ANY_SCORE):
        # A table has every column in every row, with null for missing values.
        several = [keys for keys in PAIR_SCORE_KEYS if any(row.value.get(key) is not None for key in keys)]
        given = several[0] if several else None
        for one, two in ((a, b) for other in several[1:] for a, b in zip(several[0], other, strict=True)):
            if row.value.get(one) != row.value.get(two):
                raise RowError(row.place, "bad score", f"{one} and {two} differ. Remove one of them.")
    if given is None:
        return tuple(Completion(text, i) for i, text in enumerate(texts))
    scores = [score_of(row.value.get(key), row, key) for key in given]
    return tuple(Completion(text, i, score) for i, (text, score) in enumerate(zip(texts, scores, strict=True)))


def from_conversations(row: SourceRow, chosen_key: str, rejected_key: str) -> Preference:
    """Make a preference from two conversations. The prompt is their common beginning. The turns after it are the completions.

    Both completions begin with an assistant turn. Example, with the completions in brackets:

    chosen    user assistant user [assistant]
    rejected  user assistant user [assistant tool assistant]
    """
    keys = (chosen_key, rejected_key)
    prompt, answers = split_conversations(row, keys, [field_of(row.value, key, row) for key in keys])
    return checked(Preference(prompt, chosen_and_rejected(row, answers), row.place))


def split_conversations(
    row: SourceRow, keys: tuple[str, str], values: list[Any], what: str = "chosen and rejected"
) -> tuple[tuple[Message, ...], list[TextOrMessages]]:
    """Return the common beginning of two conversations, and the turns of each one after it.

    `keys` and `what`: names of the conversations, for error messages.
    """
    both = [messages_of(value, row, key, allowed="a list of messages") for key, value in zip(keys, values, strict=True)]
    for key, messages in zip(keys, both, strict=True):
        if messages[-1].role != "assistant":
            message = f"{key} ends in a {messages[-1].role} turn; it must end in an assistant turn."
            raise RowError(row.place, "wrong roles", message)
    split = _length_of_prompt(*both)
    if split == 0 or any(message.role == "user" for messages in both for message in messages[split:]):
        raise prompts_differ(row, what)
    answers = [as_answer(messages[split:], row, key) for key, messages in zip(keys, both, strict=True)]
    return both[0][:split], answers


def _length_of_prompt(chosen: tuple[Message, ...], rejected: tuple[Message, ...]) -> int:
    most = min(len(chosen), len(rejected)) - 1
    common = next((i for i in range(most) if chosen[i] != rejected[i]), most)
    while common and not chosen[common].role == rejected[common].role == "assistant":
        common -= 1
    return common


def prompts_differ(row: SourceRow, what: str = "chosen and rejected") -> RowError:
    message = f"{what} do not answer the same conversation."
    return RowError(row.place, "prompts differ", message, kind="filtered")


# Dialogues as texts


def dialogue_text(row: SourceRow, keys: DatasetFields) -> Preference:
    """Read a row of Anthropic HH: two dialogues as texts, `chosen` and `rejected`. The last assistant turn is the completion."""
    (chosen, first), (rejected, second) = (_split_dialogue(row, key) for key in (keys.chosen_key, keys.rejected_key))
    if chosen != rejected:
        raise prompts_differ(row)
    turns = messages_of(dialogue_turns(chosen), row, keys.chosen_key)
    prompt = ended_before_answer(turns, row, keys.chosen_key)
    return checked(Preference(prompt, chosen_and_rejected(row, [first, second]), row.place))


def is_dialogue(value: Any) -> bool:
    return isinstance(value, str) and ASSISTANT in value


def _split_dialogue(row: SourceRow, key: str) -> tuple[str, str]:
    """Return the text before the last assistant turn, and the text of that turn."""
    text = text_of(row, field_of(row.value, key, row), key)
    before, found, answer = text.rpartition(ASSISTANT)
    before = f"\n\n{before.lstrip()}"
    if not found or not TURN.match(before):
        raise RowError(row.place, "not a dialogue", f"{key}: no 'Human:' turn followed by an 'Assistant:' turn.")
    if TURN.search(answer):
        raise RowError(row.place, "wrong roles", f"{key} ends in a 'Human:' turn; it must end in an 'Assistant:' turn.")
    return before, answer.strip()


def dialogue_turns(dialogue: str) -> list[dict[str, str]]:
    """Convert a dialogue text to messages. Consecutive turns of the same role are merged."""
    turns: list[dict[str, str]] = []
    _, *parts = TURN.split(dialogue)
    for who, said in zip(parts[::2], parts[1::2], strict=True):
        role = ROLE_OF_SPEAKER[who.lower()]
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += f"\n\n{said.strip()}"
        else:
            turns.append({"role": role, "content": said.strip()})
    return turns


# Files of training tools and services


def sharegpt(row: SourceRow, keys: DatasetFields) -> Preference:
    """Read a ShareGPT row, as LLaMA-Factory writes it.

    `conversations` is a list of turns {from, value}. `chosen` and `rejected` are one such turn or a text each.
    """
    turns = field_of(row.value, "conversations", row)
    if not isinstance(turns, list):
        raise RowError(row.place, "wrong type", f"conversations: {kind_of(turns)}, not a list of turns.")
    translated = [_from_sharegpt(turn, row, f"conversations[{i}]") for i, turn in enumerate(turns)]
    prompt = ended_before_answer(messages_of(translated, row, "conversations"), row, "conversations")
    texts = []
    for key in (keys.chosen_key, keys.rejected_key):
        answer = field_of(row.value, key, row)
        given = answer if isinstance(answer, str) else _from_sharegpt(answer, row, key)
        texts.append(completion_of(row, given, key))
    return checked(Preference(prompt, chosen_and_rejected(row, texts), row.place))


def _from_sharegpt(turn: Any, row: SourceRow, where: str) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise RowError(row.place, "wrong type", f"{where}: {kind_of(turn)}, not a turn with from and value.")
    who, said = (field_of(turn, key, row, f"{where}.") for key in ("from", "value"))
    if not isinstance(who, str) or who not in ROLE_OF_SPEAKER:
        raise RowError(row.place, "unknown role", f"{where}.from: {who!r} is not one of {', '.join(ROLE_OF_SPEAKER)}.")
    if ROLE_OF_SPEAKER[who] == CALL:
        return _calls(said, row, f"{where}.value")
    return {"role": ROLE_OF_SPEAKER[who], "content": said}


def _calls(said: Any, row: SourceRow, where: str) -> dict[str, Any]:
    """Make an assistant message of a turn that calls one or more functions: JSON such as {"name": "f", "arguments": {}}."""
    calls = said
    if isinstance(said, str):
        try:
            calls = json.loads(said)
        except (ValueError, RecursionError):
            raise RowError(row.place, "bad tool call", f"{where}: the function call is not JSON.") from None
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, Mapping) for call in calls):
        message = f'{where}: {describe(said)}, not a function call such as {{"name": "f", "arguments": {{}}}}.'
        raise RowError(row.place, "bad tool call", message)
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": dict(call)} for call in calls],
    }


def openai_preference(row: SourceRow, keys: DatasetFields) -> Preference:
    """Read a row of OpenAI's and Azure's preference fine-tuning: `input`, `preferred_output` and `non_preferred_output`.

    `input` has `messages` and optional `tools`. The outputs are lists of assistant messages.
    """
    chosen, rejected = next((names for names in OUTPUTS if names[0] in row.value), OUTPUTS[0])
    given = field_of(row.value, "input", row)
    if not isinstance(given, Mapping):
        raise RowError(row.place, "wrong type", f"input: {describe(given)}, not an object with messages.")
    turns = field_of(given, "messages", row, "input.")
    if isinstance(turns, list):
        turns = [_developer_as_system(turn) for turn in turns]
    messages = messages_of(turns, row, "input.messages", allowed="a list of messages")
    prompt = ended_before_answer(messages, row, "input.messages")
    preference = pair_of(row, prompt, chosen, rejected)
    tools = tools_of(replace(row, value={"tools": given.get("tools")}))
    return replace(preference, tools=tools) if tools else preference


def _developer_as_system(turn: Any) -> Any:
    is_developer = isinstance(turn, Mapping) and turn.get("role") == "developer"
    return {**turn, "role": "system"} if is_developer else turn


def ms_swift(row: SourceRow, keys: DatasetFields) -> Preference:
    """Read a row of ms-swift: the conversation `messages` ends in the chosen answer.

    `rejected_response` replaces that answer, or `rejected_messages` is the complete rejected conversation.
    """
    other_tools = row.value.get("rejected_tools")
    if other_tools and other_tools != row.value.get("tools"):
        message = "rejected_tools differ from tools, but both completions need the same prompt. Remove this row."
        raise RowError(row.place, "bad tools", message)
    chosen = _swift_turns(field_of(row.value, "messages", row), row, "messages")
    if row.value.get("rejected_messages") is not None:
        key = "rejected_messages"
        rejected = _swift_turns(row.value[key], row, key)
        prompt, answers = split_conversations(row, ("messages", key), [chosen, rejected], f"messages and {key}")
        return checked(Preference(prompt, chosen_and_rejected(row, answers), row.place))
    messages = messages_of(chosen, row, "messages", allowed="a list of messages")
    if messages[-1].role != "assistant" or len(messages) == 1:
        message = "messages must end in an assistant turn, the chosen completion, after at least one other turn."
        raise RowError(row.place, "wrong roles", message)
    rejected = completion_of(row, field_of(row.value, "rejected_response", row), "rejected_response")
    answers = [as_answer(messages[-1:], row, "messages"), rejected]
    prompt = ended_before_answer(messages[:-1], row, "messages")
    return checked(Preference(prompt, chosen_and_rejected(row, answers), row.place))


def _swift_turns(turns: Any, row: SourceRow, key: str) -> Any:
    """Translate the roles of ms-swift's agent format, tool_call and tool_response. Other values are returned unchanged."""
    if not isinstance(turns, list):
        return turns
    translated, before = [], None
    for i, turn in enumerate(turns):
        role = turn.get("role") if isinstance(turn, Mapping) else None
        kind = SWIFT_ROLES.get(role) if isinstance(role, str) else None
        if kind == CALL:
            turn = _calls(turn.get("content"), row, f"{key}[{i}].content")
        if kind == CALL == before:  # consecutive turns are several calls of one message
            translated[-1]["tool_calls"] += turn["tool_calls"]
        else:
            translated.append({**turn, "role": RESULT} if kind == RESULT else turn)
        before = kind
    return translated
