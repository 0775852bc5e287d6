"""Rows as preferences, and the exact words for each row that is none."""

import pytest

from tandem.config.schema import DatasetFields
from tandem.data.formats import Completion, Message, Preference, binary, detect_format, ranked
from tandem.data.sources import RowError, SourceRow

KEYS = DatasetFields()


def row(value) -> SourceRow:
    return SourceRow(value, "pairs.jsonl", 3)


def pair(**changes) -> SourceRow:
    return row({"prompt": "Hi", "chosen": "yes", "rejected": "no"} | changes)


def group(*completions, **changes) -> SourceRow:
    return row({"context": "Hi", "completions": list(completions)} | changes)


def said(role, content):
    return {"role": role, "content": content}


def refusal(read, source: SourceRow, keys: DatasetFields = KEYS) -> tuple[str, str, str]:
    with pytest.raises(RowError) as caught:
        read(source, keys)
    error = caught.value
    assert str(error) == f"pairs.jsonl:3: {error.message}"
    return error.kind, error.reason, error.message


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
    assert [completion.text for completion in preference.completions] == ["yes", "no"]


def test_tools_may_answer_after_the_assistant():
    prompt = [said("user", "Hi"), said("assistant", "look"), said("tool", "1"), said("tool", "2")]
    assert len(binary(pair(prompt=prompt), KEYS).prompt) == 4


def test_a_ranked_row_keeps_all_completions_in_order_with_rank_and_score():
    source = group(
        {"rank": 2, "completion": "c", "score": 1},
        {"rank": 0, "completion": [said("assistant", "a")], "reward": 3.5},
        {"rank": 0, "completion": "b"},
    )
    assert ranked(source, KEYS).completions == (
        Completion("c", 2, 1.0),
        Completion("a", 0, 3.5),
        Completion("b", 0, None),
    )


def test_a_text_is_kept_to_the_last_blank():
    assert binary(pair(prompt=" Hi\n", chosen="yes \n"), KEYS).prompt == " Hi\n"
    assert binary(pair(chosen="yes \n"), KEYS).completions[0].text == "yes \n"


def test_the_format_is_told_by_the_keys():
    assert detect_format(pair(), KEYS) == "BinaryPreferenceDataset"
    assert detect_format(group(A, B), KEYS) == "PreferenceDataset"
    assert detect_format(group(A, B, chosen="x"), KEYS) == "BinaryPreferenceDataset"
    assert detect_format(group(A, B, chosen="x"), DatasetFields(chosen_key="good")) == "PreferenceDataset"


# Malformed rows


def test_a_missing_key_is_told_with_the_nearest_and_with_those_found():
    source = row({"prompt": "Hi", "choosen": "yes", "rejected": "no"})
    assert refusal(binary, source) == (
        "bad",
        "missing key",
        "no key chosen. Is choosen meant? Keys found: prompt, choosen, rejected. data.train.chosen_key names another.",
    )


def test_an_empty_object_has_no_keys():
    assert refusal(binary, row({})) == (
        "bad",
        "missing key",
        "no key prompt. Keys found: none. data.train.prompt_key names another.",
    )


BAD_PAIRS = {
    "null": ({"chosen": None}, "null", "chosen is null; it must hold a text or messages."),
    "number as completion": (
        {"chosen": 3},
        "wrong type",
        "chosen[0]: a number, not a message with role and content.",
    ),
    "number as prompt": ({"prompt": 3}, "wrong type", "prompt: a number, not a text or a list of messages."),
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
    "list as content": (
        {"prompt": [said("user", [1])]},
        "wrong type",
        "prompt[0].content: a list, not a text.",
    ),
    "blank prompt": ({"prompt": " \n"}, "empty prompt", "prompt is empty."),
    "no messages": ({"prompt": []}, "empty prompt", "prompt is an empty list of messages."),
    "message without content": (
        {"prompt": [{"role": "user", "contents": "Hi"}]},
        "missing key",
        "no key prompt[0].content. Is prompt[0].contents meant?",
    ),
    "null content": (
        {"prompt": [said("user", None)]},
        "null",
        "prompt[0].content is null; it must hold a text or messages.",
    ),
    "unknown role": (
        {"prompt": [said("human", "Hi")]},
        "unknown role",
        "prompt[0].role: 'human' is none of system, user, assistant, tool.",
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
        "prompt[1]: the prompt ends in an assistant turn; it must end before the answer.",
    ),
    "two completion messages": (
        {"chosen": [said("assistant", "a"), said("user", "u")]},
        "wrong roles",
        "chosen: roles assistant, user; a completion is one assistant message.",
    ),
    "completion by the user": (
        {"chosen": [said("user", "u")]},
        "roles out of order",
        "chosen[0]: role user cannot come first.",
    ),
    "surrogate in the prompt": (
        {"prompt": "a\ud800"},
        "lone surrogate",
        "prompt: half a character (a lone surrogate) at position 1.",
    ),
    "surrogate in a message": (
        {"chosen": [said("assistant", "ab\udc00")]},
        "lone surrogate",
        "chosen[0].content: half a character (a lone surrogate) at position 2.",
    ),
}


@pytest.mark.parametrize(("changes", "reason", "message"), BAD_PAIRS.values(), ids=BAD_PAIRS.keys())
def test_a_malformed_pair_is_refused_with_the_place_inside_it(changes, reason, message):
    assert refusal(binary, pair(**changes)) == ("bad", reason, message)


BAD_GROUPS = {
    "one completion": (
        [A],
        "one completion",
        "completions: a preference needs a list of two or more completions.",
    ),
    "text as completion": ([A, "b"], "wrong type", "completions[1]: a text, not an object."),
    "no rank": (
        [A, {"rnk": 1, "completion": "b"}],
        "missing key",
        "no key completions[1].rank. Is completions[1].rnk meant?",
    ),
    "no text": ([A, {"rank": 1}], "missing key", "no key completions[1].completion."),
    "negative rank": (
        [A, {"rank": -1, "completion": "b"}],
        "bad rank",
        "completions[1].rank: -1 is no rank; ranks are integers from 0.",
    ),
    "broken rank": (
        [A, {"rank": 0.5, "completion": "b"}],
        "bad rank",
        "completions[1].rank: 0.5 is no rank; ranks are integers from 0.",
    ),
    "truth as rank": (
        [A, {"rank": True, "completion": "b"}],
        "bad rank",
        "completions[1].rank: True is no rank; ranks are integers from 0.",
    ),
    "NaN score": (
        [A, B | {"score": float("nan")}],
        "bad score",
        "completions[1].score: nan is not a finite number.",
    ),
    "infinite reward": (
        [A, B | {"reward": float("inf")}],
        "bad score",
        "completions[1].score: inf is not a finite number.",
    ),
    "text as score": ([A, B | {"score": "3"}], "bad score", "completions[1].score: '3' is not a finite number."),
    "truth as score": ([A, B | {"score": True}], "bad score", "completions[1].score: True is not a finite number."),
    "score beyond floats": (
        [A, B | {"score": 10**400}],
        "bad score",
        f"completions[1].score: {10**400} is not a finite number.",
    ),
}


@pytest.mark.parametrize(("completions", "reason", "message"), BAD_GROUPS.values(), ids=BAD_GROUPS.keys())
def test_malformed_completions_are_refused_with_their_number(completions, reason, message):
    assert refusal(ranked, group(*completions)) == ("bad", reason, message)


def test_completions_that_are_no_list_are_refused():
    assert refusal(ranked, row({"context": "Hi", "completions": "ab"}))[2] == (
        "completions: a preference needs a list of two or more completions."
    )


# Rows that are well-formed but teach nothing


@pytest.mark.parametrize("blank", ["", " \n"])
def test_an_empty_completion_is_filtered(blank):
    assert refusal(binary, pair(rejected=blank)) == ("filtered", "empty completion", "a completion is empty.")


def test_equal_completions_are_filtered():
    assert refusal(binary, pair(rejected="yes")) == (
        "filtered",
        "equal completions",
        "chosen and rejected are identical, so the pair teaches nothing.",
    )


def test_some_equal_completions_among_others_are_kept():
    assert len(ranked(group(A, A, B), KEYS).completions) == 3


def test_a_tie_is_filtered():
    assert refusal(ranked, group(A, B | {"rank": 0})) == (
        "filtered",
        "equal ranks",
        "all completions have the same rank: a tie.",
    )
