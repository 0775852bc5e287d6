"""Reading the parts of a preference from texts and messages, and the exact messages for malformed parts."""

import pytest
from rows import KEYS, group, pair, refusal, row, said

from tandem.config.sections.datasets import DatasetFields
from tandem.data.formats.formats import binary, ranked
from tandem.data.formats.preference import Completion, Message, Preference

A, B = {"rank": 0, "completion": "a"}, {"rank": 1, "completion": "b"}


# Well-formed rows


def test_a_binary_row_is_a_prompt_with_two_completions_the_chosen_ranked_first():
    assert binary(pair(), KEYS) == Preference("Hi", (Completion("yes", 0), Completion("no", 1)), "pairs.jsonl:3")


def test_binary_keys_may_have_other_names():
    keys = DatasetFields(prompt_key="q", chosen_key="good", rejected_key="bad")
    assert binary(row({"q": "Hi", "good": "yes", "bad": "no"}), keys) == binary(pair(), KEYS)


def test_prompts_and_completions_may_be_messages():
    prompt = [said("system", "Be kind."), said("user", "Hi"), said("assistant", "Hello"), said("user", "Well?")]
    preference = binary(pair(prompt=prompt, chosen=[said("assistant", "yes")], rejected=said("assistant", "no")), KEYS)
    assert preference.prompt == (
        Message("system", "Be kind."),
        Message("user", "Hi"),
        Message("assistant", "Hello"),
        Message("user", "Well?"),
    )
    assert [completion.answer for completion in preference.completions] == ["yes", "no"]


def test_tools_may_answer_after_the_assistant():
    prompt = [said("user", "Hi"), said("assistant", "look"), said("tool", "1"), said("tool", "2")]
    assert len(binary(pair(prompt=prompt), KEYS).prompt) == 4


def test_a_text_is_kept_to_the_last_blank():
    assert binary(pair(prompt=" Hi\n", chosen="yes \n"), KEYS).prompt == " Hi\n"
    assert binary(pair(chosen="yes \n"), KEYS).completions[0].answer == "yes \n"


def test_typed_parts_are_joined_with_text_under_either_key():
    parts = [{"type": "text", "text": "He"}, {"type": "text", "value": "llo"}]
    preference = binary(pair(prompt=[said("user", parts)], chosen=[said("assistant", parts)]), KEYS)
    assert preference.prompt == (Message("user", "Hello"),)
    assert preference.completions[0].answer == "Hello"


def test_control_characters_are_kept():
    assert binary(pair(chosen="a\x00\x1b"), KEYS).completions[0].answer == "a\x00\x1b"


# Malformed rows


def test_a_missing_key_is_reported_with_the_nearest_and_with_those_found():
    source = row({"prompt": "Hi", "choosen": "yes", "rejected": "no"})
    assert refusal(binary, source) == (
        "bad",
        "missing key",
        "no key chosen. Did you mean choosen? Keys found: choosen, prompt, rejected. Set data.train.chosen_key to "
        "the key that has it, such as choosen.",
    )


def test_a_key_with_other_capital_letters_is_suggested():
    source = row({"prompt": "Hi", "Chosen": "yes", "rejected": "no"})
    assert refusal(binary, source)[2].startswith(
        "no key chosen. Did you mean Chosen? Keys found: Chosen, prompt, rejected."
    )


def test_an_empty_object_has_no_keys():
    assert refusal(binary, row({})) == (
        "bad",
        "missing key",
        "no key prompt. Keys found: none. Add prompt to the row.",
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ["id", "instruction", "chosen", "question", "rejected"],
            "no key prompt. Keys found: question, instruction, id, chosen, rejected. Set data.train.prompt_key to the key that "
            "has it, such as question.",
        ),
        (
            ["id", "prompts", "chosen", "rejected"],
            "no key prompt. Did you mean prompts? Keys found: prompts, id, chosen, rejected. Set data.train.prompt_key to the "
            "key that has it, such as prompts.",
        ),
        (
            ["prompt", "id", "worse", "better"],
            "no key chosen. Keys found: better, id, worse, prompt. Set data.train.chosen_key to the key that has it, such as "
            "better.",
        ),
        (["prompt", "chosen"], "no key rejected. Keys found: prompt, chosen. Add rejected to the row."),
    ],
)
def test_a_missing_key_is_reported_with_the_keys_of_the_row_the_most_plausible_first(keys, message):
    assert refusal(binary, row(dict.fromkeys(keys, "text"))) == ("bad", "missing key", message)


def test_a_missing_key_without_a_setting_suggests_another_format():
    assert refusal(ranked, row({"a": 1})) == (
        "bad",
        "missing key",
        "no key completions. Keys found: a. Set data.train.dataset_name to another format.",
    )


BAD_PAIRS = {
    "null": ({"chosen": None}, "null", "chosen is null. Give it a value."),
    "number as completion": (
        {"chosen": 3},
        "wrong type",
        "chosen: 3, not a text or a list of messages.",
    ),
    "number as prompt": ({"prompt": 3}, "wrong type", "prompt: 3, not a text or a list of messages."),
    "object as prompt": (
        {"prompt": said("user", "Hi")},
        "wrong type",
        "prompt: an object, not a text or a list of messages.",
    ),
    "truth as prompt": ({"prompt": True}, "wrong type", "prompt: true or false, not a text or a list of messages."),
    "texts as messages": (
        {"prompt": ["Hi"]},
        "wrong type",
        "prompt[0]: a text, not a message with role and content.",
    ),
    "null as message": ({"prompt": [None]}, "wrong type", "prompt[0]: null, not a message with role and content."),
    "object as content": (
        {"prompt": [said("user", {"text": "Hi"})]},
        "wrong type",
        "prompt[0].content: an object, not a text.",
    ),
    "bytes as content": (
        {"prompt": [said("user", b"Hi")]},
        "wrong type",
        "prompt[0].content: a value of type bytes, not a text.",
    ),
    "number as part": (
        {"prompt": [said("user", [{"type": "text", "text": "Hi"}, 1])]},
        "not a text part",
        "prompt[0].content[1]: only parts of type text can be trained on.",
    ),
    "image as part": (
        {"prompt": [said("user", [{"type": "image", "text": "Hi"}])]},
        "not a text part",
        "prompt[0].content[0]: only parts of type text can be trained on.",
    ),
    "image as url": (
        {"prompt": [said("user", [{"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": {"url": "x"}}])]},
        "not a text part",
        "prompt[0].content[1]: only parts of type text can be trained on.",
    ),
    "part without a text": (
        {"prompt": [said("user", [{"type": "text"}])]},
        "not a text part",
        "prompt[0].content[0]: only parts of type text can be trained on.",
    ),
    "surrogate in a part": (
        {"prompt": [said("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b\udc00"}])]},
        "lone surrogate",
        "prompt[0].content: an incomplete character (a lone surrogate) at position 2. Remove it.",
    ),
    "null role": ({"prompt": [said(None, "Hi")]}, "null", "prompt[0].role is null. Give it a value."),
    "list as role": (
        {"prompt": [said(["user"], "Hi")]},
        "unknown role",
        "prompt[0].role: ['user'] is not one of system, user, assistant, tool.",
    ),
    "blank prompt": ({"prompt": " \n"}, "empty prompt", "prompt is empty."),
    "no messages": ({"prompt": []}, "no messages", "prompt is an empty list of messages."),
    "message without content": (
        {"prompt": [{"role": "user", "contents": "Hi"}]},
        "missing key",
        "no key prompt[0].content. Did you mean prompt[0].contents?",
    ),
    "null content": (
        {"prompt": [said("user", None)]},
        "null",
        "prompt[0].content is null. Give it a value.",
    ),
    "unknown role": (
        {"prompt": [said("human", "Hi")]},
        "unknown role",
        "prompt[0].role: 'human' is not one of system, user, assistant, tool.",
    ),
    "assistant first": (
        {"prompt": [said("system", "s"), said("assistant", "a"), said("user", "u")]},
        "roles out of order",
        "prompt[1]: role assistant cannot come first.",
    ),
    "user twice": (
        {"prompt": [said("user", "u"), said("user", "v")]},
        "roles out of order",
        "prompt[1]: role user cannot come after user.",
    ),
    "user after tool": (
        {"prompt": [said("user", "u"), said("assistant", "a"), said("tool", "t"), said("user", "v")]},
        "roles out of order",
        "prompt[3]: role user cannot come after tool.",
    ),
    "late system": (
        {"prompt": [said("user", "u"), said("system", "s")]},
        "late system turn",
        "prompt[1]: a system turn may only come first.",
    ),
    "assistant last": (
        {"prompt": [said("user", "u"), said("assistant", "a")]},
        "context ends in an assistant turn",
        "prompt[1]: the prompt ends in an assistant turn. End it before the completion.",
    ),
    "two completion messages": (
        {"chosen": [said("assistant", "a"), said("user", "u")]},
        "wrong roles",
        "chosen: roles assistant, user, but a completion is one assistant message, or assistant and tool messages that "
        "end in an assistant message.",
    ),
    "completion by the user": (
        {"chosen": [said("user", "u")]},
        "roles out of order",
        "chosen[0]: role user cannot come first.",
    ),
    "surrogate in the prompt": (
        {"prompt": "a\ud800"},
        "lone surrogate",
        "prompt: an incomplete character (a lone surrogate) at position 1. Remove it.",
    ),
    "surrogate in a message": (
        {"chosen": [said("assistant", "ab\udc00")]},
        "lone surrogate",
        "chosen[0].content: an incomplete character (a lone surrogate) at position 2. Remove it.",
    ),
}


@pytest.mark.parametrize(("changes", "reason", "message"), BAD_PAIRS.values(), ids=BAD_PAIRS.keys())
def test_a_malformed_pair_is_refused_with_the_place_inside_it(changes, reason, message):
    assert refusal(binary, pair(**changes)) == ("bad", reason, message)


# Rows that are well-formed but teach nothing


@pytest.mark.parametrize("blank", ["", " \n"])
def test_an_empty_completion_is_filtered(blank):
    assert refusal(binary, pair(rejected=blank)) == ("filtered", "empty completion", "a completion is empty.")


def test_equal_completions_are_filtered():
    assert refusal(binary, pair(rejected="yes")) == (
        "filtered",
        "equal completions",
        "chosen and rejected are identical, so there is no preference to learn.",
    )


def test_some_equal_completions_among_others_are_kept():
    assert len(ranked(group(A, A, B), KEYS).completions) == 3


def test_a_tie_is_filtered():
    assert refusal(ranked, group(A, B | {"rank": 0})) == (
        "filtered",
        "equal ranks",
        "all completions have the same rank.",
    )
