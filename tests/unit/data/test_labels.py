"""Rows of two completions and a label: known spellings, label_key and label_values, and the exact messages for bad labels."""

from decimal import Decimal

import pytest
from pydantic import ValidationError
from rows import ASKED, GOOD, NO, YES, refusal, row, said

from tandem.config.sections.datasets import DatasetFields
from tandem.data.formats.formats import FORMATS, detect_format, read_preference, unused_key
from tandem.data.formats.prompt_files import Wording

KEYS = DatasetFields()


def read(value, keys=KEYS):
    name, _ = detect_format(row(value), keys)
    found = read_preference(row(value), keys, name, Wording())
    return name, found.prompt, [(one.answer, one.rank) for one in found.completions]


def preferred(keys=KEYS, **changes):
    """The text of the better completion of a row with the label `changes`; None for a tie."""
    source = row({"prompt": "Hi", "response_a": "first", "response_b": "second"} | changes)
    try:
        found = read_preference(source, keys, "labelled_pair", Wording())
    except Exception as error:
        assert (error.kind, error.reason) == ("filtered", "equal ranks"), error
        return None
    return next(one.answer for one in found.completions if one.rank == 0)


def refused(keys=KEYS, **changes):
    source = row({"prompt": "Hi", "response_a": "first", "response_b": "second"} | changes)
    return refusal(lambda source, keys: read_preference(source, keys, "labelled_pair", Wording()), source, keys)


@pytest.mark.parametrize("label", ["a", "A", " a\n", "model_a", "Model_A", "response_a", "answer_a", "[[A]]"])
def test_a_known_spelling_names_the_first_completion_and_its_counterpart_the_second(label):
    assert preferred(winner=label) == "first"
    other = label.replace("A]", "B]") if "]" in label else label.strip()[:-1] + "b"
    assert preferred(winner=other) == "second"


@pytest.mark.parametrize("label", ["tie", "Tie", "tie (bothbad)", "both_bad", "equal", "neither", "[[C]]"])
def test_a_tie_is_filtered(label):
    assert preferred(winner=label) is None


def test_a_label_may_be_the_name_of_the_better_model():
    assert preferred(winner="gpt-4", model_a="vicuna", model_b="gpt-4") == "second"
    assert preferred(winner="vicuna", model_a="vicuna", model_b="gpt-4") == "first"
    same = refused(winner="gpt-4", model_a="gpt-4", model_b="gpt-4")
    assert same[1] == "bad label"


@pytest.mark.parametrize(
    ("first", "second"),
    [("response_1", "response_2"), ("answer_0", "answer_1"), ("outputA", "outputB"), ("completion1", "completion2")],
)
@pytest.mark.parametrize("prompt", ["prompt", "question", "instruction", "query", "input", "context", "history"])
@pytest.mark.parametrize("label", ["winner", "preference", "label", "overall_preference", "choice", "verdict"])
def test_other_names_of_prompt_completions_and_label_are_detected(first, second, prompt, label):
    value = {prompt: "Hi", first: "yes", second: "no", label: first}
    expected = ("labelled_pair", f"detected from the keys {prompt}, {first}, {second}, {label}")
    assert detect_format(row(value), KEYS) == expected
    assert read(value) == ("labelled_pair", "Hi", [("yes", 0), ("no", 1)])
    assert read(value | {label: second})[2] == [("yes", 1), ("no", 0)]


def test_two_conversations_with_a_label_need_no_prompt():
    value = {"conversation_a": [ASKED, YES], "conversation_b": [ASKED, NO], "winner": "model_b"}
    name, prompt, completions = read(value)
    assert (name, completions) == ("labelled_pair", [("yes", 1), ("no", 0)])
    assert [message.content for message in prompt] == ["Hi"]
    other = value | {"conversation_b": [said("user", "Ho"), NO]}
    assert refusal(FORMATS["labelled_pair"].read, row(other)) == (
        "filtered",
        "prompts differ",
        "conversation_a and conversation_b do not answer the same conversation.",
    )


def test_the_instruction_is_followed_by_its_input():
    value = {"instruction": "Add", "input": "1 2", "output_1": "3", "output_2": "4", "preference": 1}
    keys = DatasetFields(label_values={"1": "a", "2": "b"})
    assert read(value, keys)[1:] == ("Add\n\n1 2", [("3", 0), ("4", 1)])


def test_three_completions_are_not_a_pair():
    value = {"prompt": "Hi", "response_0": "a", "response_1": "b", "response_2": "c", "winner": "response_0"}
    assert detect_format(row(value), KEYS)[0] == "BinaryPreferenceDataset"


# label_values


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        (1, "first"),
        (1.0, "first"),
        ("1", "first"),
        (Decimal("1"), "first"),
        (0, "second"),
        (2, None),
        ("Left", "first"),
        ("LEFT ", "first"),
        (True, "second"),
        (None, None),
    ],
)
def test_label_values_say_what_a_label_means(label, expected):
    keys = DatasetFields(label_values={1: "a", "0": "b", 2: "tie", "left": "a", "true": "b", None: "tie"})
    assert preferred(keys, winner=label) == expected


def test_label_values_replace_the_known_spellings():
    keys = DatasetFields(label_values={"A": "b", "B": "a"})
    assert preferred(keys, winner="A") == "second"
    assert refused(keys, winner="tie") == (
        "bad",
        "bad label",
        "winner: the label 'tie' is not in data.train.label_values, which has A, B. Add it.",
    )


def number(shown, key="labels", first="response_a", second="response_b"):
    return (
        f"{key} is {shown}, a number, which does not say which completion is better. Set data.train.label_values, with "
        f"{{{shown}: a}} if {first} is, or {{{shown}: b}} if {second} is."
    )


@pytest.mark.parametrize(
    ("label", "shown"),
    [(1, "1"), (0, "0"), (-1, "-1"), (1.0, "1"), (0.5, "0.5"), ("1", "1"), (" 2", "2"), ("-1", "-1")],
)
def test_a_number_is_never_guessed(label, shown):
    assert refused(labels=label) == ("bad", "bad label", number(shown))


def test_a_number_is_not_taken_for_the_name_of_a_model():
    assert refused(labels=1, model_a="0", model_b="1") == ("bad", "bad label", number("1"))


def test_shp_is_refused_until_its_labels_are_given_and_both_completions_are_named():
    value = {"history": "Hi", "human_ref_A": "yes", "human_ref_B": "no", "labels": 1}
    message = number("1", first="human_ref_A", second="human_ref_B")
    assert refusal(FORMATS["labelled_pair"].read, row(value)) == ("bad", "bad label", message)
    assert read(value, DatasetFields(label_values={"1": "a", "0": "b"}))[2] == [("yes", 0), ("no", 1)]


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("left", "the label 'left' does not say which completion is better"),
        (True, "the label true does not say which completion is better"),
        ("x" * 100, f"the label '{'x' * 40}...' does not say which completion is better"),
    ],
)
def test_an_unknown_label_is_refused_with_both_meanings(label, message):
    kind, reason, found = refused(winner=label)
    shown = message.split(" does")[0].removeprefix("the label ")
    assert (kind, reason) == ("bad", "bad label")
    assert found == (
        f"winner: {message}. Set data.train.label_values, with {{{shown}: a}} if response_a is, or {{{shown}: b}} if "
        "response_b is."
    )


@pytest.mark.parametrize("label", [["a"], {"a": 1}, [], b"a"])
def test_a_label_that_is_not_a_text_or_a_number_is_refused(label):
    kind, reason, message = refused(winner=label)
    assert (kind, reason) == ("bad", "bad label")
    assert message.startswith("winner: ") and message.endswith(", not a label.")


def test_a_null_label_is_refused():
    assert refused(winner=None) == (
        "bad",
        "null",
        "winner is null. If that is a tie, set data.train.label_values for each label, with {null: tie}. Otherwise give it a "
        "value, or leave such rows out with data.on_bad_row=skip.",
    )
    as_tie = DatasetFields(label_values={"a": "a", "b": "b", None: "tie"})
    assert (preferred(as_tie, winner=None), preferred(as_tie, winner="a")) == (None, "first")


# label_key


def test_two_labels_are_refused_until_one_is_named():
    value = {"prompt": "Hi", "response_0": "yes", "response_1": "no", "better_response_id": 0, "safer_response_id": 1}
    assert refusal(FORMATS["labelled_pair"].read, row(value)) == (
        "bad",
        "several labels",
        "2 labels: better_response_id, safer_response_id. Set data.train.label_key to the one to train on.",
    )
    assert read(value, DatasetFields(label_key="better_response_id"))[2] == [("yes", 0), ("no", 1)]
    assert read(value, DatasetFields(label_key="safer_response_id"))[2] == [("yes", 1), ("no", 0)]


def test_the_number_of_a_response_must_be_that_of_one_of_them():
    value = {"prompt": "Hi", "response_0": "yes", "response_1": "no", "better_response_id": 2}
    message = number("2", "better_response_id", "response_0", "response_1")
    assert refusal(FORMATS["labelled_pair"].read, row(value)) == ("bad", "bad label", message)


def test_of_two_labels_in_a_table_the_one_that_is_not_null_counts():
    assert preferred(winner=None, preference="b") == "second"


def test_label_key_names_a_label_with_any_name():
    value = {"prompt": "Hi", "response_a": "yes", "response_b": "no", "chosen": "B"}
    keys = DatasetFields(label_key="chosen")
    assert read(value, keys)[2] == [("yes", 1), ("no", 0)]
    missing = refused(DatasetFields(label_key="judge"), winner="a")
    assert missing == (
        "bad",
        "missing key",
        "two completions, response_a and response_b, but no key judge, which label_key names. Keys found: prompt, response_a, "
        "response_b, winner. Set data.train.label_key to the key of the label, and prompt_key to that of the prompt.",
    )


def test_a_pair_without_a_known_label_says_which_setting_names_it():
    value = {"prompt": "Hi", "response_a": "yes", "response_b": "no", "judge": "A"}
    name, _ = detect_format(row(value), KEYS)
    found = refusal(lambda source, keys: read_preference(source, keys, name, Wording()), row(value))
    assert found == (
        "bad",
        "missing key",
        "two completions, response_a and response_b, but no known label or prompt. Keys found: prompt, response_a, "
        "response_b, judge. Set data.train.label_key to the key of the label, and prompt_key to that of the prompt.",
    )


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "labelled_pair"])
def test_other_formats_do_not_use_the_label_settings(name):
    assert unused_key(name, DatasetFields(label_key="x")) == "label_key"
    assert unused_key(name, DatasetFields(label_values={"1": "a"})) == "label_values"
    assert unused_key("labelled_pair", DatasetFields(label_key="x", label_values={"1": "a"})) is None


def test_one_label_cannot_have_two_meanings():
    with pytest.raises(ValidationError, match=r"'A' and 'a' are the same label, but mean a and b\. Remove one"):
        DatasetFields(label_values={"A": "a", "a": "b"})
    assert DatasetFields(label_values={"A": "a", "a": "a", 1: "b"}).sides_by_label == {"a": "a", "1": "b"}


# Rows that are not pairs


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": "The sky is", "completion": " blue.", "label": True},  # TRL, docs/source/dataset_formats.md
        {"prompt": "Hi", "response": "yes", "label": False},
        {"prompt": "Hi", "response": "yes", "label": 1},
        {"conversations": [{"from": "human", "value": "Hi"}], "kto_tag": True},  # LLaMA-Factory, data/README.md
        {"messages": [ASKED, YES], "label": True},  # ms-swift, Custom-dataset.md
    ],
)
def test_an_unpaired_row_is_named_as_such(value):
    name, _ = detect_format(row(value), KEYS)
    found = refusal(lambda source, keys: read_preference(source, keys, name, Wording()), row(value))
    one, label = [key for key in value if key != "prompt"]
    assert found == (
        "bad",
        "unpaired",
        f"an unpaired row (as for KTO): one completion, {one}, and its label, {label}. Training needs pairs: a chosen and a "
        "rejected completion for each prompt.",
    )


def test_a_text_with_a_label_is_no_unpaired_preference():
    value = {"text": "A fine film.", "label": 1}
    name, _ = detect_format(row(value), KEYS)
    assert refusal(lambda source, keys: read_preference(source, keys, name, Wording()), row(value)) == (
        "bad",
        "no pair",
        "one text, text, and a label, label, as for classification. That is not a preference, which has a prompt, a chosen and a "
        "rejected completion.",
    )


def test_a_message_of_a_tree_is_named_as_such():
    value = {"message_id": "m", "parent_id": None, "text": "Hi", "role": "prompter", "message_tree_id": "t"}
    found = refusal(
        lambda source, keys: read_preference(source, keys, "BinaryPreferenceDataset", Wording()), row(value)
    )
    assert found == (
        "bad",
        "not a tree",
        "one message of an Open Assistant tree. Use the file of trees (for example "
        "2023-04-12_oasst_ready.trees.jsonl.gz), in which each row is a tree.",
    )


def test_a_good_row_with_a_label_is_not_taken_for_an_unpaired_one():
    assert read(GOOD["BinaryPreferenceDataset"] | {"label": True, "response": "x"})[0] == "BinaryPreferenceDataset"
