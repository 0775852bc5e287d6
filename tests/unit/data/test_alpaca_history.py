"""Alpaca rows with a system text or earlier turns become messages; those without stay one text."""

import pytest
from rows import GOOD, refusal, row

from tandem.config.sections.datasets import DatasetFields
from tandem.data.formats.formats import FORMATS, read_preference
from tandem.data.formats.preference import Message
from tandem.data.formats.prompt_files import Wording

READ = FORMATS["alpaca"].read


def prompt_of(**changes):
    return read_preference(row(GOOD["alpaca"] | changes), DatasetFields(), "alpaca", Wording()).prompt


def test_a_system_text_is_the_first_turn():
    assert prompt_of(system="Be kind.") == (Message("system", "Be kind."), Message("user", "Hi"))


def test_the_history_is_earlier_turns_of_user_and_assistant():
    assert prompt_of(history=[["One?", "1"], ["Two?", "2"]]) == (
        Message("user", "One?"),
        Message("assistant", "1"),
        Message("user", "Two?"),
        Message("assistant", "2"),
        Message("user", "Hi"),
    )


def test_system_history_and_input_come_in_this_order():
    assert prompt_of(system="Be kind.", history=[["One?", "1"]], input="Now.") == (
        Message("system", "Be kind."),
        Message("user", "One?"),
        Message("assistant", "1"),
        Message("user", "Hi\n\nNow."),
    )


@pytest.mark.parametrize("nothing", [{}, {"system": ""}, {"history": []}, {"system": None, "history": None}])
def test_without_system_and_history_the_prompt_is_one_text(nothing):
    assert prompt_of(**nothing) == "Hi"


def test_a_pair_of_outputs_has_the_same_prompt():
    pair = GOOD["alpaca_pair"] | {"system": "Be kind."}
    found = read_preference(row(pair), DatasetFields(), "alpaca_pair", Wording())
    assert found.prompt == prompt_of(system="Be kind.")


@pytest.mark.parametrize("history", ["One?", [["One?"]], [["One?", "1", "2"]], [["One?", "1"], "Two?"], {"One?": "1"}])
def test_a_history_that_is_not_a_list_of_pairs_is_refused(history):
    assert refusal(READ, row(GOOD["alpaca"] | {"history": history})) == (
        "bad",
        "wrong type",
        "history: not a list of [question, answer] pairs.",
    )


def test_a_turn_that_is_not_text_is_refused_with_its_place():
    assert refusal(READ, row(GOOD["alpaca"] | {"history": [["One?", 1]]})) == (
        "bad",
        "wrong type",
        "history[1].content: a number, not a text.",
    )
