"""What messages about rows advise: keys that help, paths for texts inside other objects, and the path that a value is from."""

from rows import refusal, row

from tandem.config.sections.datasets import DatasetFields
from tandem.data.formats.formats import detect_format, read_preference
from tandem.data.formats.paths import with_paths
from tandem.data.formats.prompt_files import Wording

KEYS = DatasetFields()
NESTED = {"q": {"text": "Why?"}, "answers": {"good": "yes", "bad": "no"}}


def message_about(value, keys=KEYS, name=None):
    source = with_paths(row(value), keys)
    name = name or detect_format(source, keys)[0]
    return refusal(lambda source, keys: read_preference(source, keys, name, Wording()), source, keys)[2]


def test_texts_inside_other_objects_are_named_by_paths():
    paths = "{prompt: q.text, chosen: answers.good, rejected: answers.bad}"
    assert message_about(NESTED).endswith(
        f" For texts inside other objects, set data.train.columns to their paths, such as '{paths}'."
    )
    assert message_about({"q": "Why?", "a": [1]}).endswith(
        " For texts inside other objects, set data.train.columns to their paths."
    )
    assert "columns" not in message_about({"q": "Why?", "good": "yes", "bad": "no"})  # prompt_key is enough


def test_a_conversation_alone_is_not_advised_to_be_read_by_paths():
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": "Hm"},
    ]
    what = "as for supervised fine-tuning. That is not a preference, which has a chosen and a rejected completion."
    for others in ({}, {"id": "a1", "source": "web", "turns": 3}):
        assert message_about({"messages": turns, **others}) == (
            f"one conversation, messages, {what} Add the worse answer as rejected_response; the last message is then the chosen "
            "one."
        )
    assert message_about({"conversations": [{"from": "human", "value": "Hi"}], "tools": []}) == (
        f"one conversation, conversations, {what} Let it end with the user's turn, and add the better answer as chosen and the "
        "worse one as rejected."
    )
    # Other keys may hold the answers.
    assert "Set data.train.prompt_key" in message_about({"messages": turns, "good": "yes", "bad": "no"})
    assert "set data.train.columns" in message_about({"messages": turns, "answers": {"good": "yes", "bad": "no"}})
    asked = DatasetFields(prompt_key="messages", chosen_key="good", rejected_key="bad")
    assert message_about({"messages": turns, "good": "yes"}, asked).startswith("no key bad.")


def test_the_path_of_a_wrong_value_is_named():
    keys = DatasetFields(columns={"prompt": "q.text", "chosen": "answers.good", "rejected": "answers.bad"})
    found = message_about({**NESTED, "answers": {"good": "yes", "bad": 7}}, keys)
    assert found.startswith("answers.bad: 7, not a ")
    found = message_about({**NESTED, "answers": {"good": None, "bad": "no"}}, keys)
    assert found == "answers.good is null. Give it a value."


def test_a_key_that_the_format_needs_is_not_suggested_for_another():
    value = {"input": {"messages": [{"role": "user", "content": "Why?"}]}, "preferred_output": []}
    openai = {**value, "preferred_output": [{"role": "assistant", "content": "yes"}]}
    found = message_about(openai, name="openai_preference")
    assert found == (
        "no key non_preferred_output. Keys found: input, preferred_output. Add it to the row, or leave such rows out with "
        "data.on_bad_row=skip."
    )
    # Where the user chose the format, another one may be the answer.
    chosen = DatasetFields(dataset_name="openai_preference")
    assert message_about(openai, chosen, "openai_preference").endswith("Set data.train.dataset_name to another format.")
