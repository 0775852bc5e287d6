"""Rows that a format cannot use: the exact message for each, and which of them are filtered."""

from decimal import Decimal

import pytest
from rows import ASKED, GOOD, NO, YES, group, refusal, row, said, turn

from tandem.config.sections.datasets import DatasetFields
from tandem.data.formats.formats import FORMATS, ranked, read_preference
from tandem.data.formats.prompt_files import Wording
from tandem.data.read.sources import RowError

A, B = {"rank": 0, "completion": "a"}, {"rank": 1, "completion": "b"}
DIALOGUE = "\n\nHuman: Hi\n\nAssistant:"
OTHERWISE = "Set data.train.dataset_name to another format."

# Malformed rows

NEEDED = {
    "BinaryPreferenceDataset": ["prompt", "chosen", "rejected"],
    "PreferenceDataset": ["context", "completions"],
    "HelpSteer3": ["context", "response1", "response2", "overall_preference"],
    "aligner": ["prompt", "chosen_response", "rejected_response"],
    "scored": ["prompt", "completions"],
    "best_of_n": ["prompt", "chosen", "rejected"],
    "sharegpt": ["conversations", "chosen", "rejected"],
    "alpaca": ["instruction", "rejected"],
    "alpaca_pair": ["instruction", "output"],
    "messages_pair": ["chosen_messages", "rejected_messages"],
    "question_responses": ["question", "response_j", "response_k"],
    "dialogue_text": ["chosen", "rejected"],
    "Tulu3Preference": ["chosen", "rejected"],
    "implicit_prompt": ["chosen", "rejected"],
    "openai_preference": ["input", "preferred_output", "non_preferred_output"],
    "ms_swift": ["messages", "rejected_response"],
    "question_pair": ["question", "chosen", "rejected"],
    "HelpSteer2": ["prompt", "response_1", "response_2", "preference_strength"],
    "nectar": ["prompt", "answers"],
    "oasst_tree": ["prompt"],
    "webgpt": ["question", "answer_0", "answer_1", "score_0", "score_1"],
    "summarize_from_feedback": ["info", "summaries", "choice"],
    "arena_votes": ["prompt", "response_a", "response_b", "winner_model_a", "winner_model_b", "winner_tie"],
    "labelled_pair": ["prompt"],
}
NEEDED_KEYS = [(name, key) for name, keys in NEEDED.items() for key in keys]
# The nearest of the keys found, where one is near.
NEAR = {"response1": "response2", "response2": "response1", "response_j": "response_k", "response_k": "response_j"}
NEAR |= {"response_1": "response_2", "response_2": "response_1", "answer_0": "answer_1", "answer_1": "answer_0"}
NEAR |= {"response_a": "response_b", "response_b": "response_a", "winner_model_a": "winner_model_b"}
NEAR |= {"winner_model_b": "winner_model_a"}
NEAR |= {"score_0": "score_1", "score_1": "score_0"}
NEAR |= {"preferred_output": "non_preferred_output", "non_preferred_output": "preferred_output"}


@pytest.mark.parametrize(("name", "key"), NEEDED_KEYS)
def test_each_missing_key_of_a_format_is_reported_by_name(name, key):
    source = row({other: value for other, value in GOOD[name].items() if other != key})
    hint = f" Did you mean {NEAR[key]}?" if key in NEAR else ""
    usual = ("prompt", "chosen", "rejected")
    others = [other for other in source.value if other not in usual]
    found = [*others, *(other for other in source.value if other in usual)] if key in usual else source.value
    way_out = f"Add {key} to the row."
    if others:
        way_out = f"Set data.train.{key}_key to the key that has it, such as {others[0]}."
    if key not in usual:
        way_out = OTHERWISE
    message = f"no key {key}.{hint} Keys found: {', '.join(found)}. {way_out}"
    assert refusal(FORMATS[name].read, source) == ("bad", "missing key", message)


@pytest.mark.parametrize(("name", "key"), NEEDED_KEYS)
def test_null_in_a_key_that_a_format_needs_is_refused(name, key):
    source = row(GOOD[name] | {key: None})
    assert refusal(FORMATS[name].read, source) == ("bad", "null", f"{key} is null. Give it a value.")


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_filters_rows_without_a_preference(name):
    def with_no_as(answer):
        return row(_replaced(GOOD[name], "no", answer))

    equal = "chosen and rejected are identical, so there is no preference to learn."
    assert refusal(FORMATS[name].read, with_no_as("yes")) == ("filtered", "equal completions", equal)
    assert refusal(FORMATS[name].read, with_no_as("")) == ("filtered", "empty completion", "a completion is empty.")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", ["Hi", "yes", "no"])
def test_every_format_refuses_a_lone_surrogate_in_any_of_its_texts(name, text):
    source = row(_replaced(GOOD[name], text, f"{text}\ud800"))
    kind, reason, message = refusal(FORMATS[name].read, source)
    assert (kind, reason) == ("bad", "lone surrogate")
    assert ": an incomplete character (a lone surrogate) at position " in message


def _replaced(value, old, new):
    """A good row with one text for another, at any depth, also at the end of a dialogue."""
    if isinstance(value, dict):
        return {key: _replaced(item, old, new) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, old, new) for item in value]
    if isinstance(value, str) and value.startswith("\n\nHuman:"):
        return value.replace(f": {old}", f": {new}")
    return new if value == old else value


SPEAKERS = "human, user, gpt, assistant, system, function_call, observation, tool"
S = "an incomplete character (a lone surrogate) at position 1. Remove it."
BAD = {
    "HelpSteer3: text": (
        {"overall_preference": "-1"},
        "wrong type",
        "overall_preference: '-1', not an integer.",
    ),
    "HelpSteer3: fraction": (
        {"overall_preference": 0.5},
        "wrong type",
        "overall_preference: 0.5, not an integer.",
    ),
    "HelpSteer3: truth": (
        {"overall_preference": True},
        "wrong type",
        "overall_preference: True, not an integer.",
    ),
    "aligner: decimal comma": (
        {"chosen_reward": "4,5"},
        "bad score",
        "chosen_reward: '4,5' is not a finite number. Write it with a decimal point: 4.5.",
    ),
    "aligner: text": ({"chosen_reward": "2"}, "bad score", "chosen_reward: '2' is not a finite number."),
    "aligner: NaN": (
        {"rejected_reward": float("nan")},
        "bad score",
        "rejected_reward: nan is not a finite number.",
    ),
    "aligner: beyond float32": (
        {"chosen_reward": 1e39},
        "bad score",
        "chosen_reward: 1e+39 is too large. Scores are stored as float32, up to 3.4e+38.",
    ),
    "aligner: a whole number beyond float32": (
        {"chosen_reward": 10**39},
        "bad score",
        "chosen_reward: 1e+39 is too large. Scores are stored as float32, up to 3.4e+38.",
    ),
    "aligner: a decimal beyond float32": (
        {"chosen_reward": Decimal("1e39")},
        "bad score",
        "chosen_reward: 1e+39 is too large. Scores are stored as float32, up to 3.4e+38.",
    ),
    "scored: one": (
        {"completions": [{"completion": "yes", "score": 2}]},
        "one completion",
        "completions: a list of 1, but a preference needs two or more completions.",
    ),
    "scored: text": (
        {"completions": [{"completion": "yes", "score": 2}, "no"]},
        "wrong type",
        'completions[1]: a text, not an object such as {"completion": "Yes.", "score": 1}.',
    ),
    "scored: no score": (
        {"completions": [{"completion": "yes", "score": 2}, {"completion": "no"}]},
        "missing key",
        "completions[1] has no score (or reward). Add one, or remove the completion.",
    ),
    "scored: infinite": (
        {"completions": [{"completion": "yes", "reward": float("inf")}, {"completion": "no"}]},
        "bad score",
        "completions[0].reward: inf is not a finite number.",
    ),
    "scored: no answer": (
        {"completions": [{"answer": "yes", "score": 2}, {"answer": "no", "score": 1}]},
        "missing key",
        "no key completions[0].completion. Keys found: answer, score.",
    ),
    "scored: null answer": (
        {"completions": [{"text": None, "score": 2}, {"text": "no", "score": 1}]},
        "null",
        "completions[0].text is null. Give it a value.",
    ),
    "sharegpt: text": ({"conversations": "Hi"}, "wrong type", "conversations: a text, not a list of turns."),
    "sharegpt: none": ({"conversations": []}, "no messages", "conversations is an empty list of messages."),
    "sharegpt: text as turn": (
        {"conversations": ["Hi"]},
        "wrong type",
        "conversations[0]: a text, not a turn with from and value.",
    ),
    "sharegpt: no value": (
        {"conversations": [{"from": "human"}]},
        "missing key",
        "no key conversations[0].value. Keys found: from.",
    ),
    "sharegpt: stranger": (
        {"conversations": [turn("bot", "Hi")]},
        "unknown role",
        f"conversations[0].from: 'bot' is not one of {SPEAKERS}.",
    ),
    "sharegpt: list as from": (
        {"conversations": [turn(["human"], "Hi")]},
        "unknown role",
        f"conversations[0].from: ['human'] is not one of {SPEAKERS}.",
    ),
    "sharegpt: order, numbered without the system text": (
        {"system": "Be kind.", "conversations": [turn("human", "Hi"), turn("human", "Hi")]},
        "roles out of order",
        "conversations[1]: role user cannot come after user.",
    ),
    "sharegpt: answered": (
        {"conversations": [turn("human", "Hi"), turn("gpt", "Hello")]},
        "context ends in an assistant turn",
        "conversations[1]: the prompt ends in an assistant turn. End it before the completion.",
    ),
    "sharegpt: two system texts": (
        {"system": "Be kind.", "conversations": [turn("system", "Be brief."), turn("human", "Hi")]},
        "late system turn",
        "the prompt has a system turn, and the key system gives another. Remove one.",
    ),
    "sharegpt: number as system": ({"system": 3}, "wrong type", "system: 3, not a text."),
    "sharegpt: surrogate in system": ({"system": "a\ud800"}, "lone surrogate", f"system: {S}"),
    "sharegpt: list as answer": ({"chosen": ["yes"]}, "wrong type", "chosen: a list, not a turn with from and value."),
    "sharegpt: answer by the user": (
        {"rejected": turn("human", "no")},
        "wrong roles",
        "rejected: roles user, but a completion is one assistant message, or assistant and tool messages that end in "
        "an assistant message.",
    ),
    "alpaca: messages": ({"instruction": [ASKED]}, "wrong type", "instruction and input must be strings."),
    "alpaca: number as input": ({"input": 0}, "wrong type", "instruction and input must be strings."),
    "alpaca: blank": ({"instruction": " "}, "empty prompt", "instruction is empty."),
    "alpaca: surrogate in input": ({"input": "a\ud800"}, "lone surrogate", f"input: {S}"),
    "alpaca_pair: text": (
        {"output": "yes"},
        "one completion",
        "output: without the keys chosen and rejected, this must be a list of two completions.",
    ),
    "alpaca_pair: three": (
        {"output": ["a", "b", "c"]},
        "one completion",
        "output: without the keys chosen and rejected, this must be a list of two completions.",
    ),
    "alpaca_pair: number": (
        {"output": ["yes", 3]},
        "wrong type",
        "output[1]: 3, not a text or a list of messages.",
    ),
    "question_responses: blank": ({"question": ""}, "empty prompt", "question is empty."),
    "dialogue_text: no answer": (
        {"chosen": "\n\nHuman: Hi"},
        "not a dialogue",
        "chosen: no 'Human:' turn followed by an 'Assistant:' turn.",
    ),
    "dialogue_text: answer only": (
        {"chosen": "\n\nAssistant: yes"},
        "not a dialogue",
        "chosen: no 'Human:' turn followed by an 'Assistant:' turn.",
    ),
    "dialogue_text: text before the first turn": (
        {"rejected": f"Be kind.{DIALOGUE} no"},
        "not a dialogue",
        "rejected: no 'Human:' turn followed by an 'Assistant:' turn.",
    ),
    "dialogue_text: assistant first": (
        {side: f"\n\nAssistant: Hello{DIALOGUE} {side}" for side in ("chosen", "rejected")},
        "roles out of order",
        "chosen[0]: role assistant cannot come first.",
    ),
    "dialogue_text: answered before": (
        {side: f"{DIALOGUE} Hello\n\nAssistant: {side}" for side in ("chosen", "rejected")},
        "context ends in an assistant turn",
        "chosen[1]: the prompt ends in an assistant turn. End it before the completion.",
    ),
    "messages_pair: user last": (
        {"rejected_messages": [ASKED]} | {"chosen_messages": [said("user", "Ho")]},
        "wrong roles",
        "chosen_messages ends in a user turn; it must end in an assistant turn.",
    ),
    "messages_pair: image": (
        {"chosen_messages": [said("user", [{"type": "image", "url": "x"}]), YES]},
        "not a text part",
        "chosen_messages[0].content[0]: only parts of type text can be trained on.",
    ),
}
for name in ("Tulu3Preference", "implicit_prompt"):
    BAD |= {
        f"{name}: text": ({"chosen": "yes"}, "wrong type", "chosen: a text, not a list of messages."),
        f"{name}: none": ({"rejected": []}, "no messages", "rejected is an empty list of messages."),
        f"{name}: answer only": (
            {"chosen": [YES], "rejected": [NO]},
            "roles out of order",
            "chosen[0]: role assistant cannot come first.",
        ),
        f"{name}: user last": (
            {"rejected": [said("user", "Ho")], "chosen": [ASKED]},
            "wrong roles",
            "chosen ends in a user turn; it must end in an assistant turn.",
        ),
        f"{name}: tool last": (
            {side: [ASKED, YES, said("tool", side)] for side in ("chosen", "rejected")},
            "wrong roles",
            "chosen ends in a tool turn; it must end in an assistant turn.",
        ),
        f"{name}: rejected ends in a tool turn": (
            {
                "chosen": [ASKED, NO, said("tool", "1"), YES],
                "rejected": [ASKED, NO, said("tool", "1"), said("tool", "2")],
            },
            "wrong roles",
            "rejected ends in a tool turn; it must end in an assistant turn.",
        ),
    }


@pytest.mark.parametrize(
    ("case", "changes", "reason", "message"), [(case, *rest) for case, rest in BAD.items()], ids=BAD
)
def test_a_malformed_row_is_refused_with_the_place_inside_it(case, changes, reason, message):
    name = case.split(":")[0]

    def read(source, keys):
        return read_preference(source, keys, name, Wording())

    assert refusal(read, row(GOOD[name] | changes)) == ("bad", reason, message)


BAD_GROUPS = {
    "one completion": (
        [A],
        "one completion",
        "completions: a list of 1, but a preference needs two or more completions.",
    ),
    "text as completion": (
        [A, "b"],
        "wrong type",
        'completions[1]: a text, not an object such as {"rank": 0, "completion": "Yes."}.',
    ),
    "no rank": (
        [A, {"rnk": 1, "completion": "b"}],
        "missing key",
        "no key completions[1].rank. Did you mean completions[1].rnk?",
    ),
    "no text": ([A, {"rank": 1}], "missing key", "no key completions[1].completion. Keys found: rank."),
    "negative rank": (
        [A, {"rank": -1, "completion": "b"}],
        "bad rank",
        "completions[1].rank: -1 is not a rank. Ranks are integers from 0.",
    ),
    "broken rank": (
        [A, {"rank": 0.5, "completion": "b"}],
        "bad rank",
        "completions[1].rank: 0.5 is not a rank. Ranks are integers from 0.",
    ),
    "truth as rank": (
        [A, {"rank": True, "completion": "b"}],
        "bad rank",
        "completions[1].rank: True is not a rank. Ranks are integers from 0.",
    ),
    "NaN score": (
        [A, B | {"score": float("nan")}],
        "bad score",
        "completions[1].score: nan is not a finite number.",
    ),
    "infinite reward": (
        [A, B | {"reward": float("inf")}],
        "bad score",
        "completions[1].reward: inf is not a finite number.",
    ),
    "text as score": ([A, B | {"score": "3"}], "bad score", "completions[1].score: '3' is not a finite number."),
    "truth as score": ([A, B | {"score": True}], "bad score", "completions[1].score: True is not a finite number."),
    "score beyond floats": (
        [A, B | {"score": 10**400}],
        "bad score",
        "completions[1].score: a number of 401 digits is too large. Scores are stored as float32, up to 3.4e+38.",
    ),
    "score beyond float32": (
        [A, B | {"score": -1e39}],
        "bad score",
        "completions[1].score: -1e+39 is too large. Scores are stored as float32, up to 3.4e+38.",
    ),
}


@pytest.mark.parametrize(("completions", "reason", "message"), BAD_GROUPS.values(), ids=BAD_GROUPS.keys())
def test_malformed_completions_are_refused_with_their_number(completions, reason, message):
    assert refusal(ranked, group(*completions)) == ("bad", reason, message)


def test_completions_that_are_not_a_list_are_refused():
    assert refusal(ranked, row({"context": "Hi", "completions": {"rank": 0}}))[2] == (
        'completions: an object, not a list of completions such as {"rank": 0, "completion": "Yes."}.'
    )


def test_a_completion_that_is_one_message_is_named_without_a_number():
    assert refusal(
        FORMATS["BinaryPreferenceDataset"].read, row({"prompt": "a", "chosen": {"content": "b"}, "rejected": "c"})
    )[2] == ("no key chosen.role. Keys found: content.")


def test_a_missing_key_is_reported_with_the_setting_that_names_it():
    keys = DatasetFields(prompt_key="question", chosen_key="good")
    with pytest.raises(RowError) as caught:
        read_preference(
            row({"question": "a", "chosen": "b", "rejected": "c"}), keys, "BinaryPreferenceDataset", Wording(None, None)
        )
    assert caught.value.message == (
        "no key good. Keys found: question, chosen, rejected. Set data.train.dataset_name to another format. The key "
        "was set by data.train.chosen_key."
    )


DIFFER = ("filtered", "prompts differ", "chosen and rejected do not answer the same conversation.")
DIFFERING = {
    "Tulu3Preference": {"rejected": [said("user", "Ho"), NO]},
    "implicit_prompt": {"rejected": [ASKED, NO, ASKED, NO]},
    "messages_pair": {"rejected_messages": [said("system", "Be kind."), ASKED, NO]},
    "dialogue_text": {"rejected": "\n\nHuman: Ho\n\nAssistant: no"},
}


@pytest.mark.parametrize(("name", "changes"), DIFFERING.items(), ids=DIFFERING)
def test_conversations_with_different_prompts_are_filtered(name, changes):
    assert refusal(FORMATS[name].read, row(GOOD[name] | changes)) == DIFFER
