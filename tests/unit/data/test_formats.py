"""Rows of every format as preferences, detection of formats, and the exact messages for bad rows."""

from typing import get_args

import pytest
from rows import ASKED, GOOD, KEYS, NO, YES, group, pair, refusal, row, said, turn

from tandem.config.sections.datasets import DatasetFields, DatasetName
from tandem.data.formats.formats import FORMATS, IGNORED_PROMPT, RANKED, detect_format, ranked, read_preference
from tandem.data.formats.preference import CONTRADICTED, Completion, Message
from tandem.data.formats.prompt_files import Wording
from tandem.data.read.sources import PAIR_SCORE_KEYS, RowError

A, B = {"rank": 0, "completion": "a"}, {"rank": 1, "completion": "b"}


def read(name, keys=KEYS, **changes):
    """A good row of a format with some fields changed, read."""
    return read_preference(row(GOOD[name] | changes), keys, name, Wording())


def texts_and_ranks(preference):
    return [(completion.answer, completion.rank) for completion in preference.completions]


# Good rows

PROMPTS = {"summarize_from_feedback": "POST: Hi\n\nTL;DR:"}
TEXT_PROMPTS = (
    *("BinaryPreferenceDataset", "aligner", "scored", "best_of_n", "alpaca", "alpaca_pair", "question_responses"),
    *("question_pair", "HelpSteer2", "webgpt", "summarize_from_feedback", "labelled_pair"),
)


def test_the_schema_names_the_formats_that_are_read():
    assert set(get_args(DatasetName)) - {"auto"} == set(FORMATS) == set(GOOD)
    assert len(FORMATS) == 24


@pytest.mark.parametrize("name", FORMATS)
def test_a_good_row_of_every_format_prefers_yes_to_no_as_the_answer_to_hi(name):
    preference = read(name)
    as_text = PROMPTS.get(name, "Hi")
    assert preference.prompt in (as_text, (Message("user", "Hi"),))
    assert isinstance(preference.prompt, str) == (name in TEXT_PROMPTS)
    assert texts_and_ranks(preference) == [("yes", 0), ("no", 1)]
    assert preference.place == "pairs.jsonl:3"
    if name not in ("scored", "webgpt"):
        assert [completion.score for completion in preference.completions] == [None, None]


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


@pytest.mark.parametrize(("preferred", "ranks"), [(-3, [0, 1]), (-1, [0, 1]), (1, [1, 0]), (3, [1, 0])])
def test_helpsteer3_prefers_the_first_response_below_zero_and_the_second_above(preferred, ranks):
    preference = read("HelpSteer3", overall_preference=preferred)
    assert texts_and_ranks(preference) == list(zip(["yes", "no"], ranks, strict=True))


def test_a_helpsteer3_tie_is_filtered():
    source = row(GOOD["HelpSteer3"] | {"overall_preference": 0})
    assert refusal(FORMATS["HelpSteer3"].read, source) == (
        "filtered",
        "equal ranks",
        "all completions have the same rank.",
    )


def test_lists_of_correct_and_incorrect_completions_have_two_ranks():
    preference = read("best_of_n", chosen=["yes", "sure"], rejected=["no", "never", "not"])
    assert texts_and_ranks(preference) == [("yes", 0), ("sure", 0), ("no", 1), ("never", 1), ("not", 1)]
    assert refusal(FORMATS["best_of_n"].read, row(GOOD["best_of_n"] | {"chosen": []})) == (
        "bad",
        "wrong type",
        "chosen: an empty list, not a list of completions.",
    )


@pytest.mark.parametrize(
    ("num_correct", "found"),
    [(3, "3"), (0, "0"), (1, "1"), ("two", "a text"), (True, "true or false"), ([2], "a list")],
)
def test_num_correct_is_the_number_of_correct_completions(num_correct, found):
    given = {"chosen": ["yes", "sure"], "rejected": ["no"], "num_correct": num_correct}
    assert refusal(FORMATS["best_of_n"].read, row(GOOD["best_of_n"] | given)) == (
        "bad",
        "wrong num_correct",
        f"num_correct: {found}, and chosen has 2 correct completions. Correct one of them.",
    )
    assert read("best_of_n", **{**given, "num_correct": 2}) == read("best_of_n", **{**given, "num_correct": 2.0})


def test_aligner_rows_keep_their_rewards_as_scores():
    preference = read("aligner", chosen_reward=2, rejected_reward=-0.5)
    assert preference.completions == (Completion("yes", 0, 2.0), Completion("no", 1, -0.5))


@pytest.mark.parametrize("keys", PAIR_SCORE_KEYS)
@pytest.mark.parametrize("name", [name for name in GOOD if name not in RANKED])
def test_every_format_reads_the_scores_of_chosen_and_rejected(name, keys):
    others = dict.fromkeys(key for names in PAIR_SCORE_KEYS for key in names if names != keys)
    preference = read(name, **others, **dict(zip(keys, (2, -0.5), strict=True)))
    assert [completion.score for completion in preference.completions] == [2.0, -0.5]
    assert [completion.rank for completion in preference.completions] == [0, 1]
    assert [completion.score for completion in read(name).completions] == [None, None]


def test_aligner_rows_may_hold_openai_messages():
    preference = read(
        "aligner",
        prompt=[said("system", "Be kind."), ASKED],
        chosen_response=[YES],
        rejected_response=NO,
        chosen_reward=1.5,
        rejected_reward=None,
    )
    assert preference.prompt == (Message("system", "Be kind."), Message("user", "Hi"))
    assert preference.completions == (Completion("yes", 0, 1.5), Completion("no", 1, None))


def test_scores_give_the_ranks_and_equal_scores_equal_ranks():
    answers = [("a", 1), ("b", 3.5), ("c", -2), ("d", 1)]
    preference = read("scored", completions=[{"completion": text, "score": score} for text, score in answers])
    assert preference.completions == (
        Completion("a", 1, 1.0),
        Completion("b", 0, 3.5),
        Completion("c", 2, -2.0),
        Completion("d", 1, 1.0),
    )


@pytest.mark.parametrize("text_key", ["completion", "response", "text", "content"])
@pytest.mark.parametrize("score_key", ["score", "reward"])
def test_scored_completions_may_have_other_keys(text_key, score_key):
    answers = [{text_key: "no", score_key: 0}, {text_key: "yes", score_key: 1}]
    for key in ("completions", "responses"):
        preference = FORMATS["scored"].read(row({"prompt": "Hi", key: answers}), KEYS)
        assert texts_and_ranks(preference) == [("no", 1), ("yes", 0)]


# Rows like UltraFeedback's: https://huggingface.co/datasets/openbmb/UltraFeedback
def ultrafeedback(**changes):
    completions = [
        {
            "model": model,
            "principle": "helpfulness",
            "custom_system_prompt": "Be helpful.",
            "response": text,
            "annotations": {"helpfulness": {"Rating": "4", "Rationale": "Fine."}},
            "critique": "Good.",
            "overall_score": overall,
            "fine-grained_score": fine,
        }
        for model, text, overall, fine in [("a", "no", 6.5, 4.75), ("b", "yes", 8.0, 4.5), ("c", "maybe", 6.5, 3.0)]
    ]
    given = {"source": "evol", "instruction": "Hi", "models": ["a", "b", "c"], "completions": completions}
    return given | {"correct_answers": ["None"], "incorrect_answers": ["None"]} | changes


def as_read(value, keys=KEYS):
    """Prompt, texts, ranks and scores of a row whose format is detected from its keys."""
    name, reason = detect_format(row(value), keys)
    found = read_preference(row(value), keys, name, Wording())
    return (name, reason), found.prompt, [(one.answer, one.rank, one.score) for one in found.completions]


def test_ultrafeedback_is_detected_from_its_keys_and_ranked_by_overall_scores():
    assert as_read(ultrafeedback()) == (
        ("scored", "detected from the keys instruction, completions"),
        "Hi",
        [("no", 1, 6.5), ("yes", 0, 8.0), ("maybe", 1, 6.5)],
    )


@pytest.mark.parametrize("prompt", ["prompt", "instruction"])
@pytest.mark.parametrize("several", ["completions", "responses"])
@pytest.mark.parametrize("item", ["{}", "response", "content", "messages"])
def test_scores_may_be_in_a_separate_list(prompt, several, item):
    texts = ["no", "yes"]
    if item == "messages":
        given = [[said("assistant", text)] for text in texts]
    else:
        given = texts if item == "{}" else [{item: text, "model": "a"} for text in texts]
    (name, reason), read_prompt, completions = as_read({prompt: "Hi", several: given, "scores": [1, 2.5]})
    assert (name, reason) == ("scored", f"detected from the keys {prompt}, {several}")
    assert (read_prompt, completions) == ("Hi", [("no", 1, 1.0), ("yes", 0, 2.5)])


@pytest.mark.parametrize(
    ("changes", "reason", "message"),
    [
        ({"scores": [1]}, "bad score", "scores: 1 scores for 2 responses. Give one score for each."),
        ({"scores": [1, None]}, "null", "scores[1] is null. Give it a value."),
        ({"scores": [1, "2"]}, "bad score", "scores[1]: '2' is not a finite number."),
        ({"scores": 3}, "wrong type", "scores: 3, not a list with a score for each of responses."),
        (
            {"scores": [1, 2], "responses": [{"response": "no", "score": 1}, {"response": "yes", "score": 3}]},
            "bad score",
            "responses[1]: its score is 3, but scores[1] is 2. Remove one of them.",
        ),
        (
            {"scores": None, "responses": [{"response": "a", "overall_score": 1, "score": 2}, {"response": "b"}]},
            "bad score",
            "responses[0]: score is 2, but overall_score is 1. Remove one of them.",
        ),
        (
            {"scores": None},
            "wrong type",
            'responses[0]: a text, not an object such as {"completion": "Yes.", "score": 1}.',
        ),
        ({"scores": [1, 2], "responses": ["no", 7]}, "wrong type", None),
    ],
)
def test_separate_scores_that_do_not_match_the_completions_are_refused(changes, reason, message):
    source = row({"instruction": "Hi", "responses": ["no", "yes"], "scores": [1, 2]} | changes)
    found = refusal(FORMATS["scored"].read, source)
    message = message or 'responses[1]: 7, not an object such as {"completion": "Yes.", "score": 1}.'
    assert found == ("bad", reason, message)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "Tulu3Preference"])
def test_extra_scores_and_responses_do_not_change_the_format_of_a_row(name):
    more = {"responses": ["no", "yes"], "scores": [1, 2]}
    more |= {} if "chosen" in GOOD[name] else {"instruction": "Hi"}  # which with chosen and rejected is alpaca's
    assert detect_format(row({**more, **GOOD[name]}), KEYS) == detect_format(row(GOOD[name]), KEYS)


@pytest.mark.parametrize(
    "value",
    [
        {"instruction": "Hi", "responses": ["no", "yes"]},
        {"instruction": "Hi", "responses": [{"model": "a", "response": "no"}, {"model": "b", "response": "yes"}]},
        {"instruction": "Hi", "completions": [], "scores": [1]},
        {"instruction": "Hi", "responses": "no", "scores": [1]},
    ],
)
def test_completions_without_scores_match_no_format(value):
    assert detect_format(row(value), KEYS) == ("BinaryPreferenceDataset", "no other format matches its keys")


def test_a_prompt_that_a_setting_names_is_not_replaced_by_the_instruction():
    keys = DatasetFields(prompt_key="question")
    assert as_read(ultrafeedback(question="Why?"), keys)[1] == "Why?"
    with pytest.raises(RowError, match=r"no key question\. .* The key was set by data\.train\.prompt_key"):
        as_read(ultrafeedback(), keys)


def test_a_score_and_a_reward_that_differ_are_refused():
    assert refusal(ranked, group(A | {"score": 1, "reward": 2}, B)) == (
        "bad",
        "bad score",
        "completions[0]: score is 1, but reward is 2. Remove one of them.",
    )
    same = ranked(group(A | {"score": 2, "reward": 2.0}, B), KEYS)
    assert same.completions[0].score == 2.0


def test_a_null_score_is_ignored_if_there_is_a_reward():
    """As in a table, where each row has every column."""
    preference = ranked(group(A | {"score": None, "reward": 2}, B | {"score": 1, "reward": None}), KEYS)
    assert [completion.score for completion in preference.completions] == [2.0, 1.0]


def test_equal_scores_throughout_are_a_tie():
    answers = [{"completion": "yes", "score": 1}, {"completion": "no", "score": 1.0}]
    source = row({"prompt": "Hi", "completions": answers})
    assert refusal(FORMATS["scored"].read, source)[:2] == ("filtered", "equal ranks")


def test_a_sharegpt_conversation_starts_with_its_system_text():
    turns = [turn("user", "Hi"), turn("assistant", "Hello"), turn("human", "Well?")]
    expected = [("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Well?")]
    by_key = read("sharegpt", system="Be kind.", conversations=turns)
    by_turn = read("sharegpt", system="", conversations=[turn("system", "Be kind."), *turns])
    assert by_key == by_turn
    assert by_key.prompt == tuple(Message(*message) for message in expected)


@pytest.mark.parametrize("name", ["alpaca", "alpaca_pair"])
def test_an_alpaca_prompt_is_its_instruction_and_then_its_input(name):
    assert read(name, input="there").prompt == "Hi\n\nthere"
    assert read(name, input=" \n").prompt == read(name, input=None).prompt == "Hi"


def test_a_dialogue_is_split_at_its_last_assistant_turn():
    before = "\n\nHuman: a\n\nHuman: b\n\nAssistant: c\n\nHuman: d"
    preference = read(
        "dialogue_text", chosen=f"{before}\n\nAssistant: yes\n", rejected=f"{before}\n\nAssistant: no\n\nthen"
    )
    assert preference.prompt == (Message("user", "a\n\nb"), Message("assistant", "c"), Message("user", "d"))
    assert texts_and_ranks(preference) == [("yes", 0), ("no\n\nthen", 1)]


def test_a_dialogue_need_not_start_with_blank_lines():
    good = GOOD["dialogue_text"]
    assert read("dialogue_text", **{key: text.lstrip() for key, text in good.items()}) == read("dialogue_text")


@pytest.mark.parametrize("name", ["Tulu3Preference", "implicit_prompt"])
def test_the_prompt_of_two_conversations_is_all_but_their_last_message(name):
    shared = [said("system", "Be kind."), ASKED, said("assistant", "Hello"), said("user", "Well?")]
    preference = read(name, chosen=[*shared, YES], rejected=[*shared, NO])
    assert preference.prompt == tuple(Message(**message) for message in shared)
    assert texts_and_ranks(preference) == [("yes", 0), ("no", 1)]


# Detection of formats

TOLD_BY = {
    "BinaryPreferenceDataset": "prompt, chosen, rejected",
    "PreferenceDataset": "context, completions",
    "HelpSteer3": "context, response1, response2, overall_preference",
    "aligner": "prompt, chosen_response, rejected_response",
    "scored": "prompt, completions",
    "best_of_n": "prompt, chosen, rejected",
    "sharegpt": "conversations, chosen, rejected",
    "alpaca": "instruction, chosen, rejected",
    "alpaca_pair": "instruction, output",
    "messages_pair": "chosen_messages, rejected_messages",
    "question_responses": "question, response_j, response_k",
    "dialogue_text": "chosen, rejected",
    "implicit_prompt": "chosen, rejected",
    "openai_preference": "input, preferred_output, non_preferred_output",
    "ms_swift": "messages, rejected_response",
    "question_pair": "question, chosen, rejected",
    "HelpSteer2": "prompt, response_1, response_2, preference_strength",
    "nectar": "prompt, answers",
    "oasst_tree": "message_tree_id, prompt",
    "webgpt": "question, answer_0, answer_1, score_0, score_1",
    "summarize_from_feedback": "info, summaries, choice",
    "arena_votes": "prompt, response_a, response_b, winner_model_a, winner_model_b, winner_tie",
    "labelled_pair": "prompt, response_a, response_b, winner",
}


@pytest.mark.parametrize(("name", "keys"), TOLD_BY.items(), ids=TOLD_BY)
def test_the_format_is_detected_from_the_keys_regardless_of_others(name, keys):
    expected = (name, f"detected from the keys {keys}")
    assert detect_format(row(GOOD[name]), KEYS) == expected
    assert detect_format(row({"id": 7} | GOOD[name] | {"source": "x"}), KEYS) == expected


def test_tulu3_is_only_used_if_named():
    assert detect_format(row(GOOD["Tulu3Preference"]), KEYS)[0] == "implicit_prompt"


def test_keys_that_match_no_format_are_read_as_a_pair():
    fallback = ("BinaryPreferenceDataset", "no other format matches its keys")
    assert detect_format(row({}), KEYS) == detect_format(row({"a": 1}), KEYS) == fallback
    # Two texts that are not dialogues, or an output that is not a pair, do not match either.
    assert detect_format(row({"chosen": "yes", "rejected": "no"}), KEYS) == fallback
    assert detect_format(row({"instruction": "Hi", "output": "yes"}), KEYS) == fallback


RENAMED = DatasetFields(prompt_key="q", chosen_key="good", rejected_key="bad")
OTHER_NAMES = {"prompt": "q", "chosen": "good", "rejected": "bad"}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_detected_and_read_under_configured_keys(name):
    source = row({OTHER_NAMES.get(key, key): value for key, value in GOOD[name].items()})
    assert FORMATS[name].read(source, RENAMED) == read(name)
    if name != "Tulu3Preference":
        keys = [OTHER_NAMES.get(key, key) for key in TOLD_BY[name].split(", ")]
        assert detect_format(source, RENAMED) == (name, f"detected from the keys {', '.join(keys)}")


def test_the_first_matching_format_is_used():
    assert detect_format(group(A, B, prompt="Hi", chosen="x", rejected="y"), KEYS)[0] == "BinaryPreferenceDataset"
    assert detect_format(group(A, B, prompt="Hi"), KEYS)[0] == "PreferenceDataset"
    assert detect_format(pair(), DatasetFields(chosen_key="good"))[1] == "no other format matches its keys"


def test_conversations_with_a_separate_prompt_are_read_as_conversations():
    asked = {"role": "user", "content": "Hi"}
    yes, no = ({"role": "assistant", "content": text} for text in ("Yes", "No"))
    whole = row({"prompt": "Hi", "chosen": [asked, yes], "rejected": [asked, no]})
    name, _ = detect_format(whole, DatasetFields())
    assert name == "implicit_prompt"
    assert FORMATS[name].read(whole, DatasetFields()).prompt == (Message("user", "Hi"),)


def test_completions_of_several_messages_with_a_prompt_are_answers():
    calls = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    several = [calls, said("tool", "four"), said("assistant", "four.")]
    for chosen, rejected in ((several, several), (several, "no"), ("yes", several)):
        assert detect_format(pair(chosen=chosen, rejected=rejected), KEYS)[0] == "BinaryPreferenceDataset"
    whole = [said("user", "Hi"), said("assistant", "yes")]
    assert detect_format(pair(chosen=whole, rejected=whole), KEYS)[0] == "implicit_prompt"


@pytest.mark.parametrize("prompt", ["Hi", [ASKED]])
def test_a_system_text_becomes_the_first_turn_of_the_prompt(prompt):
    found = read("BinaryPreferenceDataset", prompt=prompt, system="Be kind.")
    assert found.prompt == (Message("system", "Be kind."), Message("user", "Hi"))
    assert read("BinaryPreferenceDataset", system="").prompt == "Hi"


@pytest.mark.parametrize("name", FORMATS)
def test_a_system_text_is_read_in_every_format(name):
    expected = (Message("system", "Be kind."), Message("user", PROMPTS.get(name, "Hi")))
    assert read(name, system="Be kind.").prompt == expected


@pytest.mark.parametrize(
    ("prompt", "notes"),
    [
        ("Hi", ()),
        (" Hi\n", ()),
        ([ASKED], ()),
        (None, ()),
        (3, ()),
        ("Something else", (IGNORED_PROMPT,)),
        ([said("system", "Be kind."), ASKED], (IGNORED_PROMPT,)),
    ],
)
def test_a_separate_prompt_that_differs_from_the_conversations_is_noted(prompt, notes):
    found = read("implicit_prompt", prompt=prompt)
    assert (found.prompt, found.notes) == ((Message("user", "Hi"),), notes)


def test_scores_under_two_names_must_agree():
    scores = {"chosen_reward": 3, "rejected_reward": 1, "score_chosen": 3.0, "score_rejected": 1}
    assert [one.score for one in read("BinaryPreferenceDataset", **scores).completions] == [3.0, 1.0]
    source = pair(**{**scores, "score_rejected": 9})
    assert refusal(FORMATS["BinaryPreferenceDataset"].read, source) == (
        "bad",
        "bad score",
        "rejected_reward and score_rejected differ. Remove one of them.",
    )


def test_a_rank_may_be_an_integral_float():
    found = ranked(group({"rank": 1.0, "completion": "b"}, {"rank": 0.0, "completion": "a"}), KEYS)
    assert texts_and_ranks(found) == [("b", 1), ("a", 0)]
    odd = group({"rank": 0.5, "completion": "b"}, {"rank": 0, "completion": "a"})
    assert refusal(ranked, odd)[2] == "completions[0].rank: 0.5 is not a rank. Ranks are integers from 0."


def test_a_dialogue_that_ends_with_the_human_is_refused():
    dialogue = {**GOOD["dialogue_text"], "chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c"}
    assert refusal(FORMATS["dialogue_text"].read, row(dialogue)) == (
        "bad",
        "wrong roles",
        "chosen ends in a 'Human:' turn; it must end in an 'Assistant:' turn.",
    )


@pytest.mark.parametrize("content", ["", "  ", []])
def test_a_prompt_whose_last_turn_is_empty_is_refused(content):
    assert refusal(FORMATS["BinaryPreferenceDataset"].read, pair(prompt=[said("user", content)])) == (
        "bad",
        "empty prompt",
        "prompt[0]: the user turn is empty.",
    )


def test_a_row_of_another_format_than_earlier_rows_is_reported():
    def reads(source, keys):
        return read_preference(source, keys, "BinaryPreferenceDataset", Wording())

    assert refusal(reads, row(GOOD["alpaca"])) == (
        "bad",
        "another format",
        "the row has the format alpaca (detected from the keys instruction, chosen, rejected), but earlier rows have the "
        "format BinaryPreferenceDataset. Put the rows of each format into a separate file: data.train=[A.jsonl,B.jsonl].",
    )
    named = DatasetFields(dataset_name="BinaryPreferenceDataset")
    assert refusal(reads, row(GOOD["alpaca"]), named)[1] == "missing key"


@pytest.mark.parametrize(
    ("value", "quoted"),
    [
        ({"prompt ": "Hi", " chosen": "yes", "rejected\t": "no"}, "'prompt ', ' chosen', 'rejected\\t'"),
        ({"prompt": "Hi", "chosen": "yes", "rejected ": "no"}, "'rejected '"),
    ],
)
def test_keys_with_spaces_around_them_are_shown_in_quotes(value, quoted):
    assert refusal(FORMATS["BinaryPreferenceDataset"].read, row(value)) == (
        "bad",
        "missing key",
        f"spaces around the key {quoted}. Remove them, in a table from its header.",
    )


@pytest.mark.parametrize(
    ("more", "is_noted"),
    [
        ({"label": 0}, True),
        ({"label": "0"}, True),
        ({"preference": -1.0}, True),
        ({"labels": False}, True),
        ({"winner": "Rejected"}, True),
        ({"label": 1}, False),
        ({"label": "10"}, False),
        ({"label": None}, False),
        ({"number": 0}, False),
    ],
)
def test_a_label_that_may_prefer_the_rejected_completion_is_noted(more, is_noted):
    source = row({"prompt": "Hi", "chosen": "yes", "rejected": "no", **more})
    read = read_preference(source, DatasetFields(), "BinaryPreferenceDataset", Wording())
    assert read.notes == ((CONTRADICTED,) if is_noted else ())


def test_a_label_is_not_noted_where_rows_rank_their_completions_themselves():
    ranked = {**GOOD["HelpSteer3"], "label": 0}
    assert read_preference(row(ranked), DatasetFields(), "HelpSteer3", Wording()).notes == ()


def test_keys_with_other_capital_letters_are_reported_with_the_settings_to_use():
    source = row({"Prompt": "Hi", "Chosen": "yes", "REJECTED": "no"})
    assert refusal(FORMATS["BinaryPreferenceDataset"].read, source) == (
        "bad",
        "missing key",
        "the keys prompt, chosen, rejected are spelled with other capital letters. Set data.train.prompt_key=Prompt "
        "data.train.chosen_key=Chosen data.train.rejected_key=REJECTED.",
    )
