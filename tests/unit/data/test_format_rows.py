"""Rows of training tools and of published sets in detail: calls, ratings and trees, and the exact messages for bad rows."""

import json

import pytest
from rows import ASKED, GOOD, KEYS, NO, YES, refusal, row, said, turn

from tandem.data.formats.formats import FORMATS, detect_format, read_preference
from tandem.data.formats.preference import Completion, Message
from tandem.data.formats.prompt_files import Wording
from tandem.data.formats.rated import split_tree


def read(name, **changes):
    return read_preference(row(GOOD[name] | changes), KEYS, name, Wording())


def refused(name, **changes):
    return refusal(FORMATS[name].read, row(GOOD[name] | changes))


CALL = {"name": "look", "arguments": {"at": "sky"}}
AS_MESSAGE = Message("assistant", "", {"tool_calls": [{"type": "function", "function": CALL}]})
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}

# OpenAI


def test_the_tools_of_an_openai_row_are_those_of_its_input():
    given = {"messages": [said("developer", "Be kind."), ASKED], "tools": [TOOL], "parallel_tool_calls": False}
    calls = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    found = read("openai_preference", input=given, preferred_output=[{"role": "assistant", "tool_calls": calls}])
    assert found.prompt == (Message("system", "Be kind."), Message("user", "Hi"))
    assert found.tools == (TOOL,)
    assert found.completions[0].answer == (Message("assistant", "", {"tool_calls": calls}),)
    with_system = read("openai_preference", input=given | {"messages": [ASKED]}, system="Be kind.")
    assert (with_system.prompt, with_system.tools) == (found.prompt, (TOOL,))


@pytest.mark.parametrize(
    ("changes", "reason", "message"),
    [
        ({"input": "Hi"}, "wrong type", "input: a text, not an object with messages."),
        ({"input": {}}, "missing key", "no key input.messages. Keys found: none."),
        ({"input": {"messages": "Hi"}}, "wrong type", "input.messages: a text, not a list of messages."),
        (
            {"input": {"messages": [ASKED, YES]}},
            "context ends in an assistant turn",
            "input.messages[1]: the prompt ends in an assistant turn. End it before the completion.",
        ),
        (
            {"input": {"messages": [ASKED], "tools": 7}},
            "bad tools",
            "tools: 7, not a list of objects that describe tools.",
        ),
        (
            {"preferred_output": [ASKED]},
            "roles out of order",
            "preferred_output[0]: role user cannot come first.",
        ),
    ],
)
def test_a_malformed_openai_row_is_refused(changes, reason, message):
    assert refused("openai_preference", **changes) == ("bad", reason, message)


# ShareGPT


@pytest.mark.parametrize("value", [json.dumps(CALL), json.dumps([CALL]), CALL])
def test_a_sharegpt_call_is_an_assistant_turn_and_its_observation_a_tool_turn(value):
    turns = [turn("human", "Hi"), turn("function_call", value), turn("observation", "blue")]
    found = read("sharegpt", conversations=turns, chosen="yes", rejected=turn("gpt", "no"))
    assert found.prompt == (Message("user", "Hi"), AS_MESSAGE, Message("tool", "blue"))
    assert [one.answer for one in found.completions] == ["yes", "no"]


def test_a_sharegpt_answer_may_be_a_call():
    found = read("sharegpt", chosen=turn("function_call", json.dumps(CALL)))
    assert found.completions[0].answer == (AS_MESSAGE,)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("look(sky)", "chosen.value: the function call is not JSON."),
        ("7", 'chosen.value: a text, not a function call such as {"name": "f", "arguments": {}}.'),
        ([], 'chosen.value: a list, not a function call such as {"name": "f", "arguments": {}}.'),
        ('{"arguments": {}}', "chosen.tool_calls[0]: the function has no name."),
        ("[" * 100_000, "chosen.value: the function call is not JSON."),
    ],
)
def test_a_sharegpt_call_that_cannot_be_read_is_refused(value, message):
    assert refused("sharegpt", chosen=turn("function_call", value)) == ("bad", "bad tool call", message)


# ms-swift


def test_swift_calls_and_results_are_translated_and_calls_at_once_are_one_message():
    calls = [said("tool_call", json.dumps(CALL)), said("tool_call", json.dumps(CALL))]
    turns = [ASKED, *calls, said("tool_response", "blue"), YES]
    found = read("ms_swift", messages=turns)
    twice = Message("assistant", "", {"tool_calls": AS_MESSAGE.more["tool_calls"] * 2})
    assert found.prompt == (Message("user", "Hi"), twice, Message("tool", "blue"))
    other = read("ms_swift", messages=turns, rejected_response=None, rejected_messages=[ASKED, NO])
    assert other.prompt == (Message("user", "Hi"),)
    assert other.completions[0].answer == (twice, Message("tool", "blue"), Message("assistant", "yes"))


@pytest.mark.parametrize(
    ("changes", "kind", "reason", "message"),
    [
        ({"messages": "Hi"}, "bad", "wrong type", "messages: a text, not a list of messages."),
        (
            {"messages": [ASKED]},
            "bad",
            "wrong roles",
            "messages must end in an assistant turn, the chosen completion, after at least one other turn.",
        ),
        (
            {"rejected_messages": [said("user", "Ho"), NO]},
            "filtered",
            "prompts differ",
            "messages and rejected_messages do not answer the same conversation.",
        ),
        (
            {"tools": [TOOL], "rejected_tools": [TOOL, TOOL]},
            "bad",
            "bad tools",
            "rejected_tools differ from tools, but both completions need the same prompt. Remove this row.",
        ),
        (
            {"messages": [ASKED, said("tool_call", "look"), YES]},
            "bad",
            "bad tool call",
            "messages[1].content: the function call is not JSON.",
        ),
    ],
)
def test_a_malformed_swift_row_is_refused(changes, kind, reason, message):
    assert refused("ms_swift", **changes) == (kind, reason, message)


# Scores and ranks


def test_argilla_ratings_are_the_scores_of_the_completions():
    for keys in (("chosen_rating", "rejected_rating"), ("rating_chosen", "rating_rejected")):
        found = read("question_pair", **dict(zip(keys, (4.5, 2), strict=True)))
        assert found.completions == (Completion("yes", 0, 4.5), Completion("no", 1, 2.0))


def test_the_mean_of_the_ratings_is_the_score_of_a_completion_without_another():
    def rated(text, *ratings, **more):
        return {"response": text, "annotations": {str(i): {"Rating": one} for i, one in enumerate(ratings)}} | more

    value = {"instruction": "Hi", "completions": [rated("no", "1", "N/A", "4"), rated("yes", "5", "4")]}
    name, _ = detect_format(row(value), KEYS)
    found = read_preference(row(value), KEYS, name, Wording())
    assert (name, found.completions) == ("scored", (Completion("no", 1, 2.5), Completion("yes", 0, 4.5)))
    value["completions"][0] |= {"fine-grained_score": 9, "overall_score": 5.0}
    value["completions"][1] |= {"fine-grained_score": 4.75}
    assert [one.score for one in read_preference(row(value), KEYS, name, Wording()).completions] == [5.0, 4.75]
    value["completions"][1] = rated("yes", "N/A")
    assert refusal(FORMATS["scored"].read, row(value)) == (
        "bad",
        "missing key",
        "completions[1] has no score (or reward). Add one, or remove the completion.",
    )


def test_a_null_rating_of_distilabel_is_refused():
    value = {"instruction": "Hi", "generations": ["yes", "no"], "ratings": [5, None]}
    assert refusal(FORMATS["scored"].read, row(value)) == ("bad", "null", "ratings[1] is null. Give it a value.")


def test_a_rating_next_to_completions_with_scores_is_not_read():
    assert [one.score for one in read("scored", rating=7, ratings=[1]).completions] == [2.0, 1.0]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", "Hi"),
        ("Human: Hi\n\nAssistant:", (Message("user", "Hi"),)),
        ("First\n\nHuman: Hi\n\nAssistant:", "First\n\nHuman: Hi\n\nAssistant:"),
        (
            "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:",
            (Message("user", "a"), Message("assistant", "b"), Message("user", "c")),
        ),
    ],
)
def test_the_dialogue_of_a_nectar_prompt_becomes_turns(prompt, expected):
    assert read("nectar", prompt=prompt).prompt == expected


def test_a_nectar_answer_needs_a_rank():
    answers = [{"answer": "yes", "rank": 1}, {"answer": "no"}]
    assert refused("nectar", answers=answers) == ("bad", "missing key", "no key answers[1].rank. Keys found: answer.")
    answers[1]["rank"] = 1.5
    message = "answers[1].rank: 1.5 is not a rank. Ranks are integers from 0."
    assert refused("nectar", answers=answers) == ("bad", "bad rank", message)


def test_the_prompt_of_a_summary_has_what_is_known_about_the_post():
    info = {"post": " long story\n", "title": "T", "subreddit": "tifu", "article": None}
    prompt = "SUBREDDIT: r/tifu\n\nTITLE: T\n\nPOST: long story\n\nTL;DR:"
    assert read("summarize_from_feedback", info=info).prompt == prompt
    news = {"article": "News.", "title": "T", "post": None, "subreddit": None}
    assert read("summarize_from_feedback", info=news).prompt == "TITLE: T\n\nNews.\n\nTL;DR:"


@pytest.mark.parametrize(
    ("changes", "reason", "message"),
    [
        ({"choice": 2}, "bad label", "choice: 2 is not the index of one of 2 summaries."),
        ({"choice": True}, "bad label", "choice: True is not the index of one of 2 summaries."),
        ({"info": "p"}, "wrong type", "info: a text, not an object with a post or an article."),
        ({"info": {"title": "T"}}, "empty prompt", "info has no post and no article."),
        ({"summaries": [{"text": "yes"}]}, "one completion", None),
    ],
)
def test_a_malformed_comparison_of_summaries_is_refused(changes, reason, message):
    message = message or "summaries: a list of 1, but a preference needs two or more completions."
    assert refused("summarize_from_feedback", **changes) == ("bad", reason, message)


def test_webgpt_scores_are_kept_and_equal_ones_are_a_tie():
    found = read("webgpt", score_0=-0.25, score_1=0.25, question="Hi")
    assert found.completions == (Completion("yes", 1, -0.25), Completion("no", 0, 0.25))
    assert refused("webgpt", score_0=0, score_1=0.0)[:2] == ("filtered", "equal ranks")
    assert refused("webgpt", score_0="high")[1:] == ("bad score", "score_0: 'high' is not a finite number.")


def test_a_helpsteer2_prompt_of_several_turns_is_split():
    found = read("HelpSteer2", prompt="a\n<extra_id_1>Assistant\nb\n<extra_id_1>User\nc")
    assert found.prompt == (Message("user", "a"), Message("assistant", "b"), Message("user", "c"))
    assert refused("HelpSteer2", preference_strength=1.5) == (
        "bad",
        "wrong type",
        "preference_strength: 1.5, not an integer.",
    )


def test_an_orca_row_of_status_tie_is_filtered():
    assert refused("question_pair", status="tie") == ("filtered", "equal ranks", "the status of the row is tie.")


# Trees


def message(role, text, *replies, rank=None, **more):
    return {"role": role, "text": text, "rank": rank, "replies": list(replies)} | more


def tree(root):
    return row({"message_tree_id": "t", "prompt": root})


TWO = [message("assistant", "yes", rank=0), message("assistant", "no", rank=1)]


def test_each_prompt_of_a_tree_with_ranked_replies_is_a_preference():
    again = message("prompter", "again", *TWO)
    better = message("assistant", "better", again, rank=0)
    root = message("prompter", "Hi", message("assistant", "worse", rank=1), better)
    found = [read_preference(one, KEYS, "oasst_tree", Wording()) for one in split_tree(tree(root), KEYS)]
    assert [[turn.content for turn in one.prompt] for one in found] == [["Hi"], ["Hi", "better", "again"]]
    assert [[(c.answer, c.rank) for c in one.completions] for one in found] == [
        [("worse", 1), ("better", 0)],
        [("yes", 0), ("no", 1)],
    ]


def test_replies_without_a_rank_and_deleted_ones_are_not_compared():
    replies = [*TWO, message("assistant", "gone", rank=2, deleted=True), message("assistant", "new")]
    found = read("oasst_tree", prompt=message("prompter", "Hi", *replies))
    assert [one.answer for one in found.completions] == ["yes", "no"]


@pytest.mark.parametrize(
    ("root", "kind", "reason", "text"),
    [
        ("Hi", "bad", "wrong type", "prompt: a text, not a message with replies."),
        (
            message("prompter", "Hi", TWO[0]),
            "filtered",
            "no ranked replies",
            "no message of the tree has two or more replies of the assistant with a rank.",
        ),
        (message("bot", "Hi", *TWO), "bad", "unknown role", "prompt.role: 'bot' is not one of prompter, assistant."),
        (message(["x"], "Hi", *TWO), "bad", "unknown role", "prompt.role: ['x'] is not one of prompter, assistant."),
        (
            message("prompter", "Hi", message("assistant", "yes", rank="best"), TWO[1]),
            "bad",
            "bad rank",
            "replies[0].rank: 'best' is not a rank. Ranks are integers from 0.",
        ),
    ],
)
def test_a_malformed_tree_is_refused(root, kind, reason, text):
    assert refusal(FORMATS["oasst_tree"].read, tree(root)) == (kind, reason, text)


def test_a_very_deep_tree_is_read():
    root = message("prompter", "Hi", *TWO)
    for _ in range(500):
        root = message("prompter", "Hi", message("assistant", "so", root))
    (found,) = split_tree(tree(root), KEYS)
    assert len(read_preference(found, KEYS, "oasst_tree", Wording()).prompt) == 1001


# Votes of Chatbot Arena


def test_a_conversation_of_several_turns_with_the_same_earlier_answers_is_a_pair():
    found = read("arena_votes", prompt='["Hi", "Ho"]', response_a=["yes", "a"], response_b='["yes", "b"]')
    assert [(message.role, message.content) for message in found.prompt] == [
        ("user", "Hi"),
        ("assistant", "yes"),
        ("user", "Ho"),
    ]
    assert [(one.answer, one.rank) for one in found.completions] == [("a", 0), ("b", 1)]


VOTES = "winner_model_a, winner_model_b, winner_tie"


@pytest.mark.parametrize(
    ("changes", "reason", "message"),
    [
        ({"winner_tie": 1}, "bad label", f"{VOTES}: 1, 0, 1. One of them must be 1 and the others 0."),
        ({"winner_model_a": 0.25}, "bad label", f"{VOTES}: 0.25, 0, 0. One of them must be 1 and the others 0."),
        ({"prompt": "Hi"}, "wrong type", "prompt: a text, not a list with a text for each turn."),
        ({"response_a": "[]"}, "wrong type", "response_a: a list, not a list with a text for each turn."),
        ({"response_b": "[null]"}, "null", "response_b[0] is null. Give it a value."),
        (
            {"prompt": ["Hi", "Ho"]},
            "wrong type",
            "response_a: 1 texts for the 2 of prompt. Each turn needs one answer.",
        ),
    ],
)
def test_a_malformed_vote_is_refused(changes, reason, message):
    assert refused("arena_votes", **changes) == ("bad", reason, message)


def test_different_conversations_of_several_turns_are_filtered_also_with_an_answer_that_is_null():
    changes = {"prompt": ["Hi", "Ho"], "response_a": ["yes", "a"], "response_b": ["no", None]}
    message = "response_a and response_b do not answer the same conversation."
    assert refused("arena_votes", **changes) == ("filtered", "prompts differ", message)


def test_numbers_of_a_csv_file_are_votes():
    found = read("arena_votes", winner_model_a="0", winner_model_b="1", winner_tie="0")
    assert [(one.answer, one.rank) for one in found.completions] == [("yes", 1), ("no", 0)]


# Rows of Argilla and of HelpSteer


def test_the_average_ratings_of_argilla_are_scores_and_the_instruction_is_the_prompt():
    value = {"instruction": "Hi", "chosen_response": "yes", "rejected_response": "no"}
    source = row(value | {"chosen_avg_rating": 4.5, "rejected_avg_rating": 2})
    name, how = detect_format(source, KEYS)
    assert (name, how) == ("aligner", "detected from the keys instruction, chosen_response, rejected_response")
    found = read_preference(source, KEYS, name, Wording())
    assert (found.prompt, [one.score for one in found.completions]) == ("Hi", [4.5, 2.0])


def test_a_single_rated_response_is_named_as_such():
    source = row({"prompt": "c#", "response": "A", "helpfulness": 3, "correctness": 4, "coherence": 4})
    assert refusal(
        lambda source, keys: read_preference(source, keys, detect_format(source, keys)[0], Wording()), source
    ) == (
        "bad",
        "one completion",
        "one response with ratings, as in HelpSteer and HelpSteer2, not a pair. Use pairs, such as those of nvidia/HelpSteer2 "
        "with data.train.subset=preference.",
    )
