"""data.train.columns: paths to the parts of a preference inside rows of any shape, and the exact messages for bad paths."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from letters import CHAT, ids, letter_tokenizer
from pydantic import ValidationError
from rows import refusal, row, said

from tandem.config.load import load_config
from tandem.config.sections.datasets import Data, DatasetFields
from tandem.config.sections.row_paths import MAX_CHARACTERS, MAX_STEPS, parse_path
from tandem.data.formats.paths import with_paths
from tandem.data.read.sources import RowError
from tandem.data.store.opening import open_store
from tandem.data.text.template import Template
from tandem.errors import DataError

ROW = {
    "conversation": [{"who": "u", "value": "hi"}, {"who": "m", "value": "hello"}, {"who": "u", "value": "well"}],
    "answers": [{"text": "yes", "score": 2}, {"text": "no", "score": 1}],
    "deep": {"a.b": {"c": "d"}},
    "none": None,
    "number": 7,
}


def value_at(path, value=ROW):
    keys = DatasetFields(columns={"prompt": path, "chosen": "number", "rejected": "number"})
    return with_paths(row(value), keys).value["prompt"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("number", 7),
        ("none", None),
        ("conversation[0].value", "hi"),
        ("conversation[-1].value", "well"),
        ("conversation[:-1][*].value", ["hi", "hello"]),
        ("conversation[1:2]", [{"who": "m", "value": "hello"}]),
        ("conversation[5:]", []),
        ("answers[*].text", ["yes", "no"]),
        ("answers[*]", ROW["answers"]),
        ('deep["a.b"].c', "d"),
        ("deep['a.b']['c']", "d"),
        ('["number"]', 7),
    ],
)
def test_a_path_leads_to_a_value(path, expected):
    assert value_at(path) == expected


def test_every_element_of_lists_in_lists():
    value = ROW | {"outer": [{"inner": [1, 2]}, {"inner": [3]}]}
    assert value_at("outer[*].inner[*]", value) == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("answer", "the row has no key answer. Keys found: conversation, answers, deep, none, number."),
        ("answers[1].txt", "answers[1] has no key txt. Keys found: text, score."),
        ("answers[*].txt", "answers[0] has no key txt. Keys found: text, score."),
        ("answers[2].text", "answers has 2 elements, so there is no answers[2]."),
        ("answers[-3]", "answers has 2 elements, so there is no answers[-3]."),
        ("answers.text", "answers is a list, which has no keys, so there is no answers.text."),
        ("number.x", "number is 7, which has no keys, so there is no number.x."),
        ("none.x", "none is null, which has no keys, so there is no none.x."),
        ("number[0]", "number is 7, not a list, so there is no number[0]."),
        ("deep[*]", "deep is an object, not a list, so there is no deep[*]."),
        (
            "conversation[0].value.x",
            "conversation[0].value is a text, which has no keys, so there is no conversation[0].value.x.",
        ),
        ("[0]", "the row is an object, not a list, so there is no [0]."),
    ],
)
def test_a_path_that_does_not_exist_says_where_it_ended(path, message):
    keys = DatasetFields(columns={"prompt": path, "chosen": "number", "rejected": "number"})
    found = refusal(with_paths, row(ROW), keys)
    assert found == ("bad", "missing path", f"data.train.columns.prompt = {path}: {message}")


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("", "at its end"),
        (".a", "at '.a'"),
        ("a.", "at its end"),
        ("a..b", "at '.b'"),
        ("a[", "at '['"),
        ("a[]", "at '[]'"),
        ("a[x]", "at '[x]'"),
        ("a[1-2]", "at '[1-2]'"),
        ("a[0]b", "at 'b'"),
        ("a.[0]", "at '[0]'"),
        ("a]", "at ']'"),
        ("a['b]", 'at "[\'b]"'),
        ("a[0:1:2]", "at '[0:1:2]'"),
        ("a[99999999999]", "at '[99999999999]'"),
    ],
)
def test_a_path_that_cannot_be_read_is_refused_in_the_configuration(path, where):
    with pytest.raises(ValidationError) as caught:
        DatasetFields(columns={"prompt": path, "chosen": "b", "rejected": "c"})
    message = f"columns.prompt = {path}: a key, [0] or [*] is expected {where}. Write it as conversation[0].value or "
    message += "answers[*].text"
    assert message in str(caught.value)


def test_very_long_and_very_deep_paths_are_refused():
    for path, message in (
        ("a" * (MAX_CHARACTERS + 1), "the path has 501 characters, more than 500"),
        ("a" + "[0]" * MAX_STEPS, "the path has 33 steps, more than 32"),
        ("." * 100_000, "the path has 100,000 characters, more than 500"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_path(path)
        with pytest.raises(ValidationError, match=message):
            DatasetFields(columns={"prompt": path, "chosen": "b", "rejected": "c"})


@given(st.text(alphabet="ab.[]*:-01'\" \n", max_size=30), st.sampled_from([ROW, {}, {"a": [[{"b": 1}]]}]))
@settings(max_examples=500, deadline=None)
def test_any_path_gives_a_value_or_one_message(path, value):
    try:
        keys = DatasetFields(columns={"prompt": path, "chosen": path, "rejected": path})
    except ValidationError as error:
        assert len(error.errors()) == 1
        return
    try:
        with_paths(row(value), keys)
    except RowError as error:
        assert error.reason == "missing path" and error.message.endswith(".")


# Which parts belong together, and other settings

PARTS = (
    "Give chosen and rejected (and prompt), or prompt, completions and scores, or prompt, response_a, response_b and label; "
    "system and tools may be added"
)


@pytest.mark.parametrize(
    "parts",
    [
        ["prompt"],
        ["chosen"],
        ["prompt", "chosen"],
        ["prompt", "completions"],
        ["chosen", "rejected", "scores"],
        ["answer"],
    ],
)
def test_parts_that_make_no_preference_are_refused(parts):
    with pytest.raises(ValidationError) as caught:
        DatasetFields(columns=dict.fromkeys(parts, "a"))
    assert f"columns has {', '.join(parts)}. {PARTS}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"), [("dataset_name", "scored"), ("prompt_key", "q"), ("chosen_key", "q"), ("label_key", "q")]
)
def test_other_settings_of_where_parts_are_have_no_effect_and_are_refused(name, value):
    with pytest.raises(ValidationError) as caught:
        DatasetFields(columns={"chosen": "a", "rejected": "b"}, **{name: value})
    assert f"{name} = {value} has no effect, since columns says where each part is. Leave out one of them" in str(
        caught.value
    )


def test_columns_and_labels_of_the_default_apply_to_every_set_that_gives_none():
    columns, other = {"chosen": "a", "rejected": "b"}, {"chosen": "b", "rejected": "a"}
    data = {
        "default": {"columns": columns},
        "train": ["one.jsonl", {"data_path": "two.jsonl", "columns": other}],
        "validation": "three.jsonl",
        "val_data_paths": {"four": "four.jsonl", "five": {"data_path": "five.jsonl", "columns": {}}},
    }
    found = {name: dataset.columns for name, dataset in Data(**data).named_sets.items()}
    assert list(found.values()) == [columns, other, columns, columns, {}]
    labels = Data(default={"label_values": {1: "a"}}, train={"data_path": "one.jsonl"}, validation="two.jsonl")
    assert [one.label_values for one in labels.named_sets.values()] == [{"1": "a"}] * 2


def test_a_configuration_file_gives_paths_and_labels(tmp_path):
    file = tmp_path / "run.yaml"
    text = "data: {train: {data_path: a, columns: {prompt: 'q[0].t', completions: 'a[*].t', scores: 'a[*].s'}},"
    file.write_text(text + " validation: {data_path: b, label_key: best, label_values: {1: a, 0: b, 2.0: tie}}}")
    data = load_config(str(file), []).config.data
    assert data.training_sets[0].columns == {"prompt": "q[0].t", "completions": "a[*].t", "scores": "a[*].s"}
    assert data.validation is not None and data.validation.label_values == {"1": "a", "0": "b", "2": "tie"}


# Files


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def opened(*rows, **settings):
    with open("odd.jsonl", "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write("".join(json.dumps(one) + "\n" for one in rows))
    template = Template(letter_tokenizer(), CHAT, {})
    return open_store("odd.jsonl", DatasetFields(**settings), template, Data(max_filtered_share=1.0), 100)


def answers(store):
    return [[completion.tolist()[:-1] for completion in one.completions] for one in store]


SCORED = {"prompt": "conversation[0].value", "completions": "answers[*].text", "scores": "answers[*].score"}


def test_completions_with_scores_are_read_by_their_paths():
    tie = ROW | {"answers": [{"text": "yes", "score": 1}, {"text": "no", "score": 1}]}
    store = opened(ROW, tie, columns=SCORED)
    assert (store.format, store.format_reason) == ("scored", "by the paths of data.*.columns")
    assert (store.counts.rows, store.counts.accepted, store.counts.filtered) == (2, 1, {"equal ranks": 1})
    assert [one[:2] for one in answers(store)[0]] == [ids("ye"), ids("no")]
    assert store[0].scores == (2.0, 1.0) and store[0].pairs == ((0, 1),)


def test_a_pair_is_read_by_its_paths_with_scores_and_the_weight_of_the_row():
    columns = {"prompt": "conversation[2].value", "chosen": "answers[1].text", "rejected": "answers[0].text"}
    columns |= {"chosen_score": "answers[1].score", "rejected_score": "answers[0].score"}
    store = opened(ROW, columns=columns, weight_key="number")
    assert store.format == "BinaryPreferenceDataset"
    assert store[0].scores == (1.0, 2.0) and store[0].columns["weight"] == (7.0,)


def test_complete_conversations_are_read_by_their_paths_without_a_prompt():
    chats = {"one": {"turns": [said("user", "hi"), said("assistant", "yes")]}}
    chats |= {"two": {"turns": [said("user", "hi"), said("assistant", "no")]}}
    store = opened(chats, columns={"chosen": "one.turns", "rejected": "two.turns"})
    assert (store.format, store.counts.accepted) == ("implicit_prompt", 1)


def test_a_pair_and_a_label_are_read_by_their_paths():
    rows = [{"q": "hi", "out": ["yes", "no"], "vote": {"best": best}} for best in (0, 1, 1)]
    columns = {"prompt": "q", "response_a": "out[0]", "response_b": "out[1]", "label": "vote.best"}
    store = opened(*rows, columns=columns, label_values={0: "a", 1: "b"})
    assert [one.pairs for one in store] == [((0, 1),), ((1, 0),), ((1, 0),)]


def test_a_missing_path_is_reported_with_its_row():
    with pytest.raises(DataError) as caught:
        opened(ROW, {"conversation": []}, columns=SCORED)
    expected = (
        "odd.jsonl:2: data.train.columns.prompt = conversation[0].value: conversation has 0 elements, so there is no "
        "conversation[0]."
    )
    assert expected in str(caught.value)


def test_a_different_number_of_scores_is_refused():
    columns = {"prompt": "conversation[0].value", "completions": "answers[*].text", "scores": "conversation[*].who"}
    with pytest.raises(DataError, match=r"scores: 3 scores for 2 completions\. Give one score for each\."):
        opened(ROW, columns=columns)


def test_paths_and_labels_decide_the_name_of_a_store():
    labelled = {"prompt": "hi", "response_a": "yes", "response_b": "no", "label": 1, "winner": 0, "preference": 1}

    def name(**settings):
        return opened(labelled, **settings).fingerprint

    one = {"1": "a", "0": "b"}
    pair = {"prompt": "prompt", "chosen": "response_a", "rejected": "response_b"}
    names = [
        name(label_key="label", label_values=one),
        name(label_key="winner", label_values=one),
        name(label_key="label", label_values={"1": "b", "0": "a"}),
        name(columns=pair),
        name(columns=pair | {"chosen": "response_b", "rejected": "response_a"}),
    ]
    assert len(set(names)) == 5
    assert name(label_key="label", label_values={0: "b", 1: "a"}) == names[0]
