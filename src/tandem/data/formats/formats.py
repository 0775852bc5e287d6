"""Reads rows as Preferences. There is one function per data format; the format is detected from the keys of a row."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.config.sections.datasets import DatasetFields
from tandem.data.formats.advice import one_conversation, with_columns_named, with_path, without_own_keys
from tandem.data.formats.conversations import (
    chosen_and_rejected,
    dialogue_text,
    from_conversations,
    is_dialogue,
    ms_swift,
    openai_preference,
    pair_of,
    sharegpt,
)
from tandem.data.formats.labelled import arena_votes, completion_keys, has_label, helpsteer2, helpsteer3, labelled_pair
from tandem.data.formats.preference import (
    CONTRADICTED,
    OTHER_NAMES,
    Message,
    Preference,
    TextOrMessages,
    checked,
    completion_of,
    field_of,
    messages_of,
    prompt_of,
    refuse_other_media,
    refuse_spaces,
    text_of,
    tools_of,
    with_system,
)
from tandem.data.formats.prompt_files import Wording
from tandem.data.formats.rated import (
    best_of_n,
    has_ranks,
    has_scores,
    is_list_of_texts,
    is_tree,
    nectar,
    oasst_tree,
    ranked,
    scored,
    summarize_from_feedback,
    webgpt,
)
from tandem.data.read.sources import RowError, SourceRow
from tandem.terminal.printable import listed
from tandem.user_code import is_user_function

PARTS = ("prompt", "chosen", "rejected")
IGNORED_PROMPT = "a prompt that is ignored because it differs from the complete conversations in chosen and rejected"

# Keys of labels that may say that the rejected completion is the better one.
LABELS = ("label", "labels", "preference", "winner")

# Keys of a completion and its label in unpaired data.
ONE_COMPLETION = ("completion", "response", "answer", "output", "messages", "conversations", "text")
CONVERSATIONS = ("messages", "conversations")  # they contain the prompt
PROMPTS = OTHER_NAMES["prompt"]
UNPAIRED_LABELS = ("label", "labels", "kto_tag", "is_desirable")


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
    return pair_of(row, prompt_of(row, keys.prompt_key), keys.chosen_key, keys.rejected_key)


def _is_list_of_rows(value: Any, names: tuple[str, ...]) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and bool({*names, "completions", "conversations"} & first.keys())


def aligner(row: SourceRow, keys: DatasetFields) -> Preference:
    """Read a row of NeMo Aligner: `prompt` (`instruction` in sets by Argilla), `chosen_response` and `rejected_response`."""
    is_argilla = keys.prompt_key == "prompt" and "prompt" not in row.value and "instruction" in row.value
    prompt = prompt_of(row, "instruction" if is_argilla else keys.prompt_key)
    return pair_of(row, prompt, "chosen_response", "rejected_response")


def implicit_prompt(row: SourceRow, keys: DatasetFields) -> Preference:
    """Read a row in which `chosen` and `rejected` are complete conversations. The prompt is their common beginning."""
    found = from_conversations(row, keys.chosen_key, keys.rejected_key)
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
    return from_conversations(row, "chosen_messages", "rejected_messages")


def alpaca(row: SourceRow, keys: DatasetFields) -> Preference:
    """Read an Alpaca row. The prompt is `instruction` followed by `input`.

    The completions are `chosen` and `rejected`, or the list `output` with the chosen and the rejected text.
    """
    prompt = _alpaca_prompt(row)
    if keys.chosen_key in row.value:
        return pair_of(row, prompt, keys.chosen_key, keys.rejected_key)
    output = field_of(row.value, "output", row)
    if not isinstance(output, list) or len(output) != 2:
        raise RowError(
            row.place,
            "one completion",
            "output: without the keys chosen and rejected, this must be a list of two completions.",
        )
    texts = [completion_of(row, text, f"output[{i}]") for i, text in enumerate(output)]
    return checked(Preference(prompt, chosen_and_rejected(row, texts), row.place))


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
    return pair_of(row, prompt_of(row, "question"), "response_j", "response_k")


def question_pair(row: SourceRow, keys: DatasetFields) -> Preference:
    """Read a row of Orca pairs: `question` (or `input`, in distilabel's version), `chosen` and `rejected`, and `system`.

    In distilabel's version, rows with the status "tie" are ties.
    """
    prompt = prompt_of(row, "question" if "question" in row.value or "input" not in row.value else "input")
    preference = pair_of(row, prompt, keys.chosen_key, keys.rejected_key)
    if row.value.get("status") == "tie":
        raise RowError(row.place, "equal ranks", "the status of the row is tie.", kind="filtered")
    return preference


@dataclass(frozen=True, slots=True)
class Format:
    """A data format: the function that reads a row, and the keys from which the format is detected."""

    read: Callable[[SourceRow, DatasetFields], Preference]
    required_keys: tuple[str, ...]
    last_value_matches: Callable[[Any], bool] = lambda value: True  # a check on the value of the last required key
    other_keys: tuple[tuple[str, ...], ...] = ()  # other keys from which it is detected
    # Tried if no format matches by its required keys. The last key must hold completions with scores.
    fallback_keys: tuple[tuple[str, ...], ...] = ()
    # Returns the keys of a row from which the format is detected, in place of the required keys. None: another format.
    keys_in: Callable[[Mapping[str, Any], DatasetFields], tuple[str, ...] | None] | None = None


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
    "aligner": Format(
        aligner,
        ("{prompt}", "chosen_response", "rejected_response"),
        other_keys=(("instruction", "chosen_response", "rejected_response"),),
    ),
    "scored": Format(
        scored,
        ("{prompt}", "completions"),
        fallback_keys=(
            ("{prompt}", "responses"),
            ("instruction", "completions"),
            ("instruction", "responses"),
            *((prompt, "generations") for prompt in ("{prompt}", "instruction", "input")),
        ),
    ),
    "sharegpt": Format(sharegpt, ("conversations", "{chosen}", "{rejected}")),
    "alpaca": Format(alpaca, ("instruction", "{chosen}", "{rejected}")),
    "alpaca_pair": Format(alpaca, ("instruction", "output"), lambda value: isinstance(value, list)),
    "messages_pair": Format(messages_pair, ("chosen_messages", "rejected_messages")),
    "question_responses": Format(question_responses, ("question", "response_j", "response_k")),
    "dialogue_text": Format(dialogue_text, ("{chosen}", "{rejected}"), is_dialogue),
    "openai_preference": Format(
        openai_preference,
        ("input", "preferred_output", "non_preferred_output"),
        other_keys=(("input", "preferred_completion", "non_preferred_completion"),),
    ),
    "ms_swift": Format(ms_swift, ("messages", "rejected_response"), other_keys=(("messages", "rejected_messages"),)),
    "question_pair": Format(
        question_pair,
        ("question", "{chosen}", "{rejected}"),
        _is_answer,
        other_keys=(("input", "{chosen}", "{rejected}"),),
    ),
    "Tulu3Preference": Format(implicit_prompt, ("{chosen}", "{rejected}"), lambda value: isinstance(value, list)),
    "implicit_prompt": Format(implicit_prompt, ("{chosen}", "{rejected}"), lambda value: isinstance(value, list)),
    "HelpSteer2": Format(helpsteer2, ("{prompt}", "response_1", "response_2", "preference_strength")),
    "nectar": Format(nectar, ("{prompt}", "answers"), has_ranks),
    "oasst_tree": Format(oasst_tree, ("message_tree_id", "{prompt}"), is_tree),
    "webgpt": Format(webgpt, ("question", "answer_0", "answer_1", "score_0", "score_1")),
    "summarize_from_feedback": Format(summarize_from_feedback, ("info", "summaries", "choice")),
    "arena_votes": Format(
        arena_votes,
        ("{prompt}", "response_a", "response_b", "winner_model_a", "winner_model_b", "winner_tie"),
    ),
    "labelled_pair": Format(labelled_pair, ("{prompt}", "response_a", "response_b", "winner"), keys_in=has_label),
}


# Formats whose rows rank the completions. Labels in these rows are not checked.
RANKED = (
    *("PreferenceDataset", "HelpSteer3", "scored", "best_of_n", "HelpSteer2", "nectar", "oasst_tree", "webgpt"),
    *("summarize_from_feedback", "arena_votes", "labelled_pair"),
)
NOTHING_FITS = ("BinaryPreferenceDataset", "no other format matches its keys")
# Rows of alpaca and of alpaca_pair may have their completions under the configured keys.
ALPACA_KEYS = FORMATS["alpaca"].required_keys


def detect_format(row: SourceRow, keys: DatasetFields) -> tuple[str, str]:
    """Return the name of a row's format, detected from its keys, and a text that says how the format was detected."""
    names = {"{prompt}": keys.prompt_key, "{chosen}": keys.chosen_key, "{rejected}": keys.rejected_key}
    for name, known in FORMATS.items():
        if name != "Tulu3Preference" and (fields := _keys_found(known, row.value, keys, names)) is not None:
            return name, f"detected from the keys {', '.join(fields)}"
    for name, fields in ((name, fields) for name, known in FORMATS.items() for fields in known.fallback_keys):
        fields = [names.get(field, field) for field in fields]
        if all(field in row.value for field in fields) and has_scores(row.value, fields[-1]):
            return name, f"detected from the keys {', '.join(fields)}"
    return NOTHING_FITS


def _keys_found(
    known: Format, row: Mapping[str, Any], keys: DatasetFields, names: dict[str, str]
) -> Sequence[str] | None:
    """Return the keys by which a row is of the format `known`, or None. `names`: the configured keys."""
    if known.keys_in is not None:
        return known.keys_in(row, keys)
    for fields in (known.required_keys, *known.other_keys):
        fields = [names.get(field, field) for field in fields]
        if all(field in row for field in fields) and known.last_value_matches(row[fields[-1]]):
            return fields
    return None


def unused_key(name: str, keys: DatasetFields) -> str | None:
    """Return the first configured key setting that the format ignores, or None. For example, alpaca ignores prompt_key."""
    known = () if is_user_function(name) else FORMATS[name].required_keys
    used = ALPACA_KEYS if name.startswith("alpaca") and known else known
    for part in PARTS:
        if getattr(keys, f"{part}_key") != part and f"{{{part}}}" not in used:
            return f"{part}_key"
    if name != "labelled_pair":
        return next((setting for setting in ("label_key", "label_values") if getattr(keys, setting)), None)
    return None


def read_preference(row: SourceRow, keys: DatasetFields, name: str, wording: Wording) -> Preference:
    """Read a row in the format `name`, with its system turn and tools. `wording`: texts to add to the prompt."""
    refuse_other_media(row)
    try:
        preference = FORMATS[name].read(row, keys)
    except RowError as error:
        own = {key for fields in (FORMATS[name].required_keys, *FORMATS[name].other_keys) for key in fields}
        is_detected = keys.dataset_name == "auto" and name != NOTHING_FITS[0]
        advised = without_own_keys(with_path(_with_setting(error, keys), keys), own, is_detected=is_detected)
        raise _with_other_format(advised, row, keys, name) from None
    if name not in RANKED and _label_may_contradict(row):
        preference = replace(preference, notes=(*preference.notes, CONTRADICTED))
    prompt, tools = wording.apply(with_system(row, preference.prompt)), tools_of(row)
    if prompt is preference.prompt and not tools:
        return preference
    return replace(preference, prompt=prompt, tools=tools or preference.tools)


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
    if other == NOTHING_FITS and (found := _not_a_pair(row, keys)):
        return RowError(error.place, *found)
    if other == NOTHING_FITS and name == other[0] and not keys.columns:
        return with_columns_named(error, row)
    if other[0] in (name, NOTHING_FITS[0]):
        return error
    message = (
        f"the row has the format {other[0]} ({other[1]}), but earlier rows have the format {name}. Put the rows of each "
        "format into a separate file: data.train=[A.jsonl,B.jsonl]."
    )
    return RowError(error.place, "another format", message)


def _not_a_pair(row: SourceRow, keys: DatasetFields) -> tuple[str, str] | None:
    """Return a reason and a message about a row that is known to be something else than a preference, or None."""
    one = next((key for key in ONE_COMPLETION if key in row.value), None)
    label = next(
        (key for key in UNPAIRED_LABELS if str(row.value.get(key)).lower() in ("true", "false", "0", "1")), None
    )
    has_prompt = one in CONVERSATIONS or any(key in row.value and key != one for key in (keys.prompt_key, *PROMPTS))
    if one and label and not has_prompt:
        return "no pair", (
            f"one text, {one}, and a label, {label}, as for classification. That is not a preference, which has a prompt, a "
            "chosen and a rejected completion."
        )
    if one and label:
        return "unpaired", (
            f"an unpaired row (as for KTO): one completion, {one}, and its label, {label}. Training needs pairs: a chosen and "
            "a rejected completion for each prompt."
        )
    if {"message_id", "parent_id", "role", "text"} <= row.value.keys():
        return "not a tree", (
            "one message of an Open Assistant tree. Use the file of trees (for example "
            "2023-04-12_oasst_ready.trees.jsonl.gz), in which each row is a tree."
        )
    if {"response", "helpfulness", "correctness"} <= row.value.keys():
        return "one completion", (
            "one response with ratings, as in HelpSteer and HelpSteer2, not a pair. Use pairs, such as those of "
            "nvidia/HelpSteer2 with data.train.subset=preference."
        )
    if sides := completion_keys(tuple(row.value)):
        missing = keys.label_key is not None and keys.label_key not in row.value
        what = f"key {keys.label_key}, which label_key names" if missing else "known label or prompt"
        return "missing key", (
            f"two completions, {' and '.join(sides)}, but no {what}. Keys found: {listed(row.value)}. Set "
            "data.train.label_key to the key of the label, and prompt_key to that of the prompt."
        )
    return one_conversation(row, keys)
