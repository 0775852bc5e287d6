"""Rows of preference sets: one good row of every format, written by hand, and the refusals of bad ones."""

from typing import Any

import pytest

from tandem.config.sections.datasets import DatasetFields
from tandem.data.read.sources import RowError, SourceRow

KEYS = DatasetFields()


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def turn(who: str, value: Any) -> dict[str, Any]:
    return {"from": who, "value": value}


ASKED, YES, NO = said("user", "Hi"), said("assistant", "yes"), said("assistant", "no")

# In each of them, "yes" is preferred to "no" as the answer to "Hi".
GOOD: dict[str, dict[str, Any]] = {
    "BinaryPreferenceDataset": {"prompt": "Hi", "chosen": "yes", "rejected": "no"},
    "PreferenceDataset": {
        "context": [ASKED],
        "completions": [{"rank": 0, "completion": [YES]}, {"rank": 1, "completion": [NO]}],
    },
    "HelpSteer3": {"context": [ASKED], "response1": "yes", "response2": "no", "overall_preference": -2},
    "aligner": {"prompt": "Hi", "chosen_response": "yes", "rejected_response": "no"},
    "scored": {"prompt": "Hi", "completions": [{"completion": "yes", "score": 2}, {"completion": "no", "score": 1}]},
    "best_of_n": {"prompt": "Hi", "chosen": ["yes"], "rejected": ["no"]},
    "sharegpt": {
        "conversations": [turn("human", "Hi")],
        "chosen": turn("gpt", "yes"),
        "rejected": turn("gpt", "no"),
    },
    "alpaca": {"instruction": "Hi", "input": "", "output": "yes", "chosen": "yes", "rejected": "no"},
    "alpaca_pair": {"instruction": "Hi", "input": "", "output": ["yes", "no"]},
    "messages_pair": {"chosen_messages": [ASKED, YES], "rejected_messages": [ASKED, NO]},
    "question_responses": {"question": "Hi", "response_j": "yes", "response_k": "no"},
    "dialogue_text": {
        "chosen": "\n\nHuman: Hi\n\nAssistant: yes",
        "rejected": "\n\nHuman: Hi\n\nAssistant: no",
    },
    "Tulu3Preference": {"chosen": [ASKED, YES], "rejected": [ASKED, NO]},
    "implicit_prompt": {"chosen": [ASKED, YES], "rejected": [ASKED, NO]},
    "openai_preference": {
        "input": {"messages": [ASKED], "tools": [], "parallel_tool_calls": True},
        "preferred_output": [YES],
        "non_preferred_output": [NO],
    },
    "ms_swift": {"messages": [ASKED, YES], "rejected_response": "no"},
    "question_pair": {"question": "Hi", "chosen": "yes", "rejected": "no"},
    "HelpSteer2": {"prompt": "Hi", "response_1": "yes", "response_2": "no", "preference_strength": -1},
    "nectar": {
        "prompt": "\n\nHuman: Hi\n\nAssistant: ",
        "answers": [{"answer": "yes", "model": "gpt-4", "rank": 0.0}, {"answer": "no", "model": "mpt", "rank": 1.0}],
    },
    "oasst_tree": {
        "message_tree_id": "t",
        "prompt": {
            "role": "prompter",
            "text": "Hi",
            "replies": [
                {"role": "assistant", "text": "yes", "rank": 0, "replies": []},
                {"role": "assistant", "text": "no", "rank": 1, "replies": []},
            ],
        },
    },
    "webgpt": {
        "question": {"dataset": "eli5", "id": "q", "full_text": "Hi"},
        "answer_0": "yes",
        "answer_1": "no",
        "score_0": 0.5,
        "score_1": -0.5,
    },
    "summarize_from_feedback": {
        "info": {"id": "p", "post": "Hi", "title": None, "subreddit": None, "site": None, "article": None},
        "summaries": [{"text": "yes"}, {"text": "no"}],
        "choice": 0,
    },
    "arena_votes": {
        "prompt": ["Hi"],
        "response_a": ["yes"],
        "response_b": ["no"],
        "winner_model_a": 1,
        "winner_model_b": 0,
        "winner_tie": 0,
    },
    "labelled_pair": {"prompt": "Hi", "response_a": "yes", "response_b": "no", "winner": "response_a"},
}


def row(value: dict[str, Any]) -> SourceRow:
    return SourceRow(value, "pairs.jsonl", 3)


def pair(**changes: Any) -> SourceRow:
    return row(GOOD["BinaryPreferenceDataset"] | changes)


def group(*completions: Any, **changes: Any) -> SourceRow:
    return row({"context": "Hi", "completions": list(completions)} | changes)


def refusal(read: Any, source: SourceRow, keys: DatasetFields = KEYS) -> tuple[str, str, str]:
    with pytest.raises(RowError) as caught:
        read(source, keys)
    error = caught.value
    assert str(error) == f"pairs.jsonl:3: {error.message}"
    return error.kind, error.reason, error.message
