"""Reads rows as Preferences. There is one function per data format; the format is detected from the keys of a row."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.config.sections.datasets import DatasetFields
from tandem.data.formats.preference import (
    CONTRADICTED,
    Completion,
    Message,
    Preference,
    TextOrMessages,
    as_answer,
    checked,
    completion_of,
    ended_before_answer,
    field_of,
    messages_of,
    prompt_of,
    refuse_other_media,
    refuse_spaces,
    score_of,
    text_of,
    tools_of,
    with_system,
)
from tandem.data.formats.prompt_files import Wording
from tandem.data.formats.rated import best_of_n, float_to_int, has_scores, is_list_of_texts, ranked, scored
from tandem.data.read.sources import ANY_SCORE, PAIR_SCORE_KEYS, RowError, SourceRow, kind_of
from tandem.terminal.printable import listed
from tandem.user_code import is_user_function

PARTS = ("prompt", "chosen", "rejected")
IGNORED_PROMPT = "a prompt that is ignored because it differs from the complete conversations in chosen and rejected"

# Keys of labels that may say that the rejected completion is the better one.
LABELS = ("label", "labels", "preference", "winner")


def binary(row: SourceRow, keys: DatasetFields) -> Preference:
    """Read a row with a prompt, a chosen and a rejected completion, each a text or messages. Their keys are configurable."""
    names = (keys.prompt_key, keys.chosen_key, keys.rejected_key)
    if row.value and not any(name in row.value for name in names):
        if around := [name for name, value in row.value.items() if _is_list_of_rows(value, names)]:
            message = (
                f"an object that contains rows, not a row: {listed(around)}. Save the list as a separate .json file."
            )
            raise RowError(row.place, "an object around rows", message)
        refuse_spaces(row.value, names, row)
        lowered = {name.lower(): name for name in row.value}
        if all(name in lowered for name in names):
            settings = [f"data.train.{part}_key={lowered[n]}" for part, n in zip(PARTS, names, strict=True)]
            message = f"the keys {', '.join(names)} are spelled with other capital letters. Set {' '.join(settings)}."
            raise RowError(row.place, "missing key", message)
        raise RowError(
            row.place,
            "missing key",
            f"none of the keys {', '.join(names)}. Keys found: {listed(row.value)}. Set data.train.prompt_key, "
            "chosen_key and rejected_key to other keys, or data.train.dataset_name to another format.",
        )
    return _pair(row, prompt_of(row, keys.prompt_key), keys.chosen_key, keys.rejected_key)


def _is_list_of_rows(value: Any, names: tuple[str, ...]) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and bool({*names, "completions", "conversations"} & first.keys())


def aligner(row: SourceRow, keys: DatasetFields) -> Preference:
    """Read a row of NeMo Aligner: `prompt`, `chosen_response`, `rejected_response`, and optional rewards."""
    return _pair(row, prompt_of(row, keys.prompt_key), "chosen_response", "rejected_response")


def implicit_prompt(row: SourceRow, keys: DatasetFields) -> Preference:
    """Read a row in which `chosen` and `rejected` are complete conversations. The prompt is their common beginning."""
    found = _from_conversations(row, keys.chosen_key, keys.rejected_key)
    assert not isinstance(found.prompt, str)
    return (
        found
        if _repeats_prompt(row.value.get(keys.prompt_key), found.prompt)
        else replace(found, notes=(IGNORED_PROMPT,))
    )


def _repeats_prompt(prompt: Any, messages: tuple[Message, ...]) -> bool:
    """Whether `messages` contain every text of `prompt`, the separate prompt field of a row."""
    contents = {message.content.strip() for message in messages}
    turns = prompt if isinstance(prompt, list) else [{"content": prompt}]
    texts = [turn.get("content") for turn in turns if isinstance(turn, Mapping)]
    return all(text.strip() in contents for text in texts if isinstance(text, str))


def messages_pair(row: SourceRow, keys: DatasetFields) -> Preference:
    """Read a row of two conversations, `chosen_messages` and `rejected_messages`. The prompt is their common beginning."""
    return _from_conversations(row, "chosen_messages", "rejected_messages")


def dialogue_text(row: SourceRow, keys: DatasetFields) -> Preference:
    """Read a row of Anthropic HH: two dialogues as texts, `chosen` and `rejected`. The last assistant turn is the completion."""
    (chosen, first), (rejected, second) = (_split_dialogue(row, key) for key in (keys.chosen_key, keys.rejected_key))
    if chosen != rejected:
        raise _prompts_differ(row)
    turns = messages_of(_turns(chosen), row, keys.chosen_key)
    return checked(
        Preference(
            ended_before_answer(turns, row, keys.chosen_key), _chosen_and_rejected(row, [first, second]), row.place
        )
    )


def sharegpt(row: SourceRow, keys: DatasetFields) -> Preference:
    """Read a ShareGPT row, as LLaMA-Factory writes it.

    `conversations` is a list of turns {from, value}. `chosen` and `rejected` are one such turn each.
    """
    turns = field_of(row.value, "conversations", row)
    if not isinstance(turns, list):
        raise RowError(row.place, "wrong type", f"conversations: {kind_of(turns)}, not a list of turns.")
    translated = [_from_sharegpt(turn, row, f"conversations[{i}]") for i, turn in enumerate(turns)]
    prompt = ended_before_answer(messages_of(translated, row, "conversations"), row, "conversations")
    texts = [
        completion_of(row, _from_sharegpt(field_of(row.value, key, row), row, key), key)
        for key in (keys.chosen_key, keys.rejected_key)
    ]
    return checked(Preference(prompt, _chosen_and_rejected(row, texts), row.place))


def alpaca(row: SourceRow, keys: DatasetFields) -> Preference:
    """Read an Alpaca row. The prompt is `instruction` followed by `input`.

    The completions are `chosen` and `rejected`, or the list `output` with the chosen and the rejected text.
    """
    prompt = _alpaca_prompt(row)
    if keys.chosen_key in row.value:
        return _pair(row, prompt, keys.chosen_key, keys.rejected_key)
    output = field_of(row.value, "output", row)
    if not isinstance(output, list) or len(output) != 2:
        raise RowError(
            row.place,
            "one completion",
            "output: without the keys chosen and rejected, this must be a list of two completions.",
        )
    texts = [completion_of(row, text, f"output[{i}]") for i, text in enumerate(output)]
    return checked(Preference(prompt, _chosen_and_rejected(row, texts), row.place))


def _alpaca_prompt(row: SourceRow) -> TextOrMessages:
    """Return `instruction` and `input` as one text, or as messages if the row has a `history` of earlier turns."""
    instruction = prompt_of(row, "instruction")
    extra = "" if row.value.get("input") is None else row.value["input"]
    if not isinstance(instruction, str) or not isinstance(extra, str):
        raise RowError(row.place, "wrong type", "instruction and input must be strings.")
    text = f"{instruction}\n\n{text_of(row, extra, 'input')}" if extra.strip() else instruction
    history = row.value.get("history") or []
    if not history:
        return text
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise RowError(row.place, "wrong type", "history: not a list of [question, answer] pairs.")
    earlier = [(role, said) for pair in history for role, said in zip(("user", "assistant"), pair, strict=True)]
    turns = [*earlier, ("user", text)]
    return messages_of([{"role": role, "content": said} for role, said in turns], row, "history")


def question_responses(row: SourceRow, keys: DatasetFields) -> Preference:
    """Read a row of Stack Exchange pairs: `question`, `response_j` (chosen) and `response_k` (rejected)."""
    return _pair(row, prompt_of(row, "question"), "response_j", "response_k")


def helpsteer3(row: SourceRow, keys: DatasetFields) -> Preference:
    """Read a HelpSteer3 row: `context`, `response1`, `response2` and `overall_preference`.

    If `overall_preference` is negative, `response1` is preferred; if positive, `response2`. Zero is a tie.
    """
    preferred = float_to_int(field_of(row.value, "overall_preference", row))
    if not isinstance(preferred, int) or isinstance(preferred, bool):
        raise RowError(row.place, "wrong type", f"overall_preference: {preferred!r}, not an integer.")
    ranks = (0, 1) if preferred < 0 else (1, 0) if preferred > 0 else (0, 0)
    texts = [completion_of(row, field_of(row.value, key, row), key) for key in ("response1", "response2")]
    completions = tuple(Completion(text, rank) for text, rank in zip(texts, ranks, strict=True))
    return checked(Preference(prompt_of(row, "context"), completions, row.place))


@dataclass(frozen=True, slots=True)
class Format:
    """A data format: the function that reads a row, and the keys from which the format is detected."""

    read: Callable[[SourceRow, DatasetFields], Preference]
    required_keys: tuple[str, ...]
    last_value_matches: Callable[[Any], bool] = lambda value: True  # a check on the value of the last required key
    # Tried if no format matches by its required keys. The last key must hold completions with scores.
    fallback_keys: tuple[tuple[str, ...], ...] = ()


def _is_dialogue(value: Any) -> bool:
    return isinstance(value, str) and ASSISTANT in value


def _is_answer(value: Any) -> bool:
    """Whether `value` is only the completion. In some datasets, the field holds the complete conversation with the prompt."""
    first = value[0] if isinstance(value, list) and value else None
    return not isinstance(first, Mapping) or first.get("role") == "assistant" or len(value) == 1


# In the order of detection. {prompt}, {chosen} and {rejected} are replaced by the configured keys.
FORMATS: dict[str, Format] = {
    "best_of_n": Format(best_of_n, ("{prompt}", "{chosen}", "{rejected}"), is_list_of_texts),
    "BinaryPreferenceDataset": Format(binary, ("{prompt}", "{chosen}", "{rejected}"), _is_answer),
    "PreferenceDataset": Format(ranked, ("context", "completions")),
    "HelpSteer3": Format(helpsteer3, ("context", "response1", "response2", "overall_preference")),
    "aligner": Format(aligner, ("{prompt}", "chosen_response", "rejected_response")),
    "scored": Format(
        scored,
        ("{prompt}", "completions"),
        fallback_keys=(("{prompt}", "responses"), ("instruction", "completions"), ("instruction", "responses")),
    ),
    "sharegpt": Format(sharegpt, ("conversations", "{chosen}", "{rejected}")),
    "alpaca": Format(alpaca, ("instruction", "{chosen}", "{rejected}")),
    "alpaca_pair": Format(alpaca, ("instruction", "output"), lambda value: isinstance(value, list)),
    "messages_pair": Format(messages_pair, ("chosen_messages", "rejected_messages")),
    "question_responses": Format(question_responses, ("question", "response_j", "response_k")),
    "dialogue_text": Format(dialogue_text, ("{chosen}", "{rejected}"), _is_dialogue),
    "Tulu3Preference": Format(implicit_prompt, ("{chosen}", "{rejected}"), lambda value: isinstance(value, list)),
    "implicit_prompt": Format(implicit_prompt, ("{chosen}", "{rejected}"), lambda value: isinstance(value, list)),
}


# Formats whose rows rank the completions. Labels in these rows are not checked.
RANKED = ("PreferenceDataset", "HelpSteer3", "scored", "best_of_n")
NOTHING_FITS = ("BinaryPreferenceDataset", "no other format matches its keys")
# Rows of alpaca and of alpaca_pair may have their completions under the configured keys.
ALPACA_KEYS = FORMATS["alpaca"].required_keys


def detect_format(row: SourceRow, keys: DatasetFields) -> tuple[str, str]:
    """Return the name of a row's format, detected from its keys, and a text that says how the format was detected."""
    names = {"{prompt}": keys.prompt_key, "{chosen}": keys.chosen_key, "{rejected}": keys.rejected_key}
    for name, known in FORMATS.items():
        fields = [names.get(field, field) for field in known.required_keys]
        if (
            name != "Tulu3Preference"
            and all(f in row.value for f in fields)
            and known.last_value_matches(row.value[fields[-1]])
        ):
            return name, f"detected from the keys {', '.join(fields)}"
    for name, fields in ((name, fields) for name, known in FORMATS.items() for fields in known.fallback_keys):
        fields = [names.get(field, field) for field in fields]
        if all(field in row.value for field in fields) and has_scores(row.value, fields[-1]):
            return name, f"detected from the keys {', '.join(fields)}"
    return NOTHING_FITS


def unused_key(name: str, keys: DatasetFields) -> str | None:
    """Return the first configured key setting that the format ignores, or None. For example, alpaca ignores prompt_key."""
    known = () if is_user_function(name) else FORMATS[name].required_keys
    used = ALPACA_KEYS if name.startswith("alpaca") and known else known
    for part in PARTS:
        if getattr(keys, f"{part}_key") != part and f"{{{part}}}" not in used:
            return f"{part}_key"
    return None


def read_preference(row: SourceRow, keys: DatasetFields, name: str, wording: Wording) -> Preference:
    """Read a row in the format `name`, with its system turn and tools. `wording`: texts to add to the prompt."""
    refuse_other_media(row)
    try:
        preference = FORMATS[name].read(row, keys)
    except RowError as error:
        raise _with_other_format(_with_setting(error, keys), row, keys, name) from None
    if name not in RANKED and _label_may_contradict(row):
        preference = replace(preference, notes=(*preference.notes, CONTRADICTED))
    prompt, tools = wording.apply(with_system(row, preference.prompt)), tools_of(row)
    if prompt is preference.prompt and not tools:
        return preference
    return replace(preference, prompt=prompt, tools=tools)


def _label_may_contradict(row: SourceRow) -> bool:
    """Whether the row has a label that may mean that the rejected completion is better."""
    labels = [row.value[key] for key in LABELS if row.value.get(key) is not None]
    return any(str(label).strip().lower() in ("0", "0.0", "-1", "-1.0", "false", "rejected") for label in labels)


def _with_setting(error: RowError, keys: DatasetFields) -> RowError:
    """If a setting such as prompt_key names the missing key, return an error that names the setting, else return `error`."""
    for part in PARTS:
        name = getattr(keys, f"{part}_key")
        if name != part and error.reason == "missing key" and error.message.startswith(f"no key {name}."):
            message = f"{error.message} The key was set by data.train.{part}_key."
            return RowError(error.place, error.reason, message)
    return error


def _with_other_format(error: RowError, row: SourceRow, keys: DatasetFields, name: str) -> RowError:
    """If the row has another format than earlier rows, return an error that says so. Otherwise return `error` unchanged."""
    if error.reason != "missing key" or keys.dataset_name != "auto":
        return error
    other = detect_format(row, keys)
    if other[0] in (name, NOTHING_FITS[0]):
        return error
    message = (
        f"the row has the format {other[0]} ({other[1]}), but earlier rows have the format {name}. Put the rows of each "
        "format into a separate file: data.train=[A.jsonl,B.jsonl]."
    )
    return RowError(error.place, "another format", message)


ASSISTANT = "\n\nAssistant:"
TURN = re.compile(r"\n\n(Human|Assistant):")
ROLE_OF_SPEAKER = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def _pair(row: SourceRow, prompt: TextOrMessages, chosen: str, rejected: str) -> Preference:
    texts = [completion_of(row, field_of(row.value, key, row), key) for key in (chosen, rejected)]
    return checked(Preference(prompt, _chosen_and_rejected(row, texts), row.place))


def _chosen_and_rejected(row: SourceRow, texts: Sequence[TextOrMessages]) -> tuple[Completion, ...]:
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


def _turns(dialogue: str) -> list[dict[str, str]]:
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


def _prompts_differ(row: SourceRow) -> RowError:
    message = "chosen and rejected do not answer the same conversation."
    return RowError(row.place, "prompts differ", message, kind="filtered")


def _from_conversations(row: SourceRow, chosen_key: str, rejected_key: str) -> Preference:
    """Make a preference from two conversations. The prompt is their common beginning. The turns after it are the completions.

    Both completions begin with an assistant turn. Example, with the completions in brackets:

    chosen    user assistant user [assistant]
    rejected  user assistant user [assistant tool assistant]
    """
    keys = (chosen_key, rejected_key)
    both = [messages_of(field_of(row.value, key, row), row, key, allowed="a list of messages") for key in keys]
    for key, messages in zip(keys, both, strict=True):
        if messages[-1].role != "assistant":
            message = f"{key} ends in a {messages[-1].role} turn; it must end in an assistant turn."
            raise RowError(row.place, "wrong roles", message)
    split = _length_of_prompt(*both)
    if split == 0 or any(message.role == "user" for messages in both for message in messages[split:]):
        raise _prompts_differ(row)
    answers = [as_answer(messages[split:], row, key) for key, messages in zip(keys, both, strict=True)]
    return checked(Preference(both[0][:split], _chosen_and_rejected(row, answers), row.place))


def _length_of_prompt(chosen: tuple[Message, ...], rejected: tuple[Message, ...]) -> int:
    most = min(len(chosen), len(rejected)) - 1
    common = next((i for i in range(most) if chosen[i] != rejected[i]), most)
    while common and not chosen[common].role == rejected[common].role == "assistant":
        common -= 1
    return common


def _from_sharegpt(turn: Any, row: SourceRow, where: str) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise RowError(row.place, "wrong type", f"{where}: {kind_of(turn)}, not a turn with from and value.")
    who, said = (field_of(turn, key, row, f"{where}.") for key in ("from", "value"))
    if not isinstance(who, str) or who not in ROLE_OF_SPEAKER:
        raise RowError(row.place, "unknown role", f"{where}.from: {who!r} is not one of {', '.join(ROLE_OF_SPEAKER)}.")
    return {"role": ROLE_OF_SPEAKER[who], "content": said}
