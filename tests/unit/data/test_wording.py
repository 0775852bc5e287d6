"""The prompt file and the system prompt file of a dataset."""

import json

import pytest
from letters import CHAT, END, ids, letter_tokenizer
from rows import pair, said

from tandem.config.sections.datasets import Data, DatasetFields
from tandem.data.formats.formats import read_preference
from tandem.data.formats.preference import Message
from tandem.data.formats.prompt_files import Wording, wording_of
from tandem.data.read.sources import RowError
from tandem.data.store.opening import open_store
from tandem.data.text.template import Template
from tandem.errors import ConfigError, DataError

USER, ANSWER, SYSTEM = Message("user", "Hi"), Message("assistant", "Ho"), Message("system", "Be kind.")
TOOL = Message("tool", "four")


@pytest.fixture
def files(tmp_path):
    def write(**texts: str | bytes) -> DatasetFields:
        given = {}
        for key, text in texts.items():
            (tmp_path / key).write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
            given[key] = str(tmp_path / key)
        return DatasetFields(**given)

    return write


# What the files say


def test_only_the_final_newline_of_a_prompt_file_is_dropped(files):
    assert wording_of(files(prompt_file="Q: {}\n\n", system_prompt_file=" Be\nkind.\n"), "a.jsonl") == Wording(
        "Q: {}\n", " Be\nkind."
    )


def test_without_files_prompts_stay_as_they_are():
    assert wording_of(DatasetFields(), "a.jsonl") == Wording(None, None)
    for prompt in ("Hi", (USER,), (SYSTEM, USER)):
        assert Wording().apply(prompt) == prompt


def test_a_prompt_file_without_a_place_for_the_prompt_is_refused(files):
    given = files(prompt_file="Question:\n")
    with pytest.raises(ConfigError) as caught:
        wording_of(given, "a.jsonl")
    place = f"a.jsonl: prompt_file = {given.prompt_file}"
    assert str(caught.value) == f"{place}: the file has no {{}}. Add {{}} where the prompt belongs."


@pytest.mark.parametrize("text", ["", "\n", " \n\n"])
def test_an_empty_system_prompt_file_is_refused(files, text):
    given = files(system_prompt_file=text)
    with pytest.raises(ConfigError) as caught:
        wording_of(given, "a.jsonl")
    place = f"a.jsonl: system_prompt_file = {given.system_prompt_file}"
    assert str(caught.value) == f"{place}: the file is empty. Write the system prompt into it, or leave out the key."


@pytest.mark.parametrize("key", ["prompt_file", "system_prompt_file"])
def test_a_file_that_is_missing_is_refused_by_its_key(tmp_path, key):
    file = f"{tmp_path}/no.txt"
    with pytest.raises(ConfigError) as caught:
        wording_of(DatasetFields(**{key: file}), "a.jsonl")
    assert str(caught.value) == f"a.jsonl: {key} = {file}: cannot be read (No such file or directory). Check the path."


@pytest.mark.parametrize("key", ["prompt_file", "system_prompt_file"])
def test_a_file_that_is_not_utf8_is_refused_by_its_key(files, key):
    given = files(**{key: b"one\ntwo \xff {}"})
    with pytest.raises(ConfigError) as caught:
        wording_of(given, "a.jsonl")
    assert str(caught.value) == (
        f"a.jsonl: {key} = {getattr(given, key)}: not UTF-8 at byte 4 of line 2. Save the file as UTF-8."
    )


# What becomes of prompts


def test_a_prompt_replaces_every_placeholder_of_the_prompt_file():
    assert Wording("Q: {}\nAgain: {}\nA:").apply("Hi") == "Q: Hi\nAgain: Hi\nA:"


def test_braces_in_a_prompt_and_other_braces_in_the_file_are_kept():
    assert Wording('{"a": {}} {0}').apply("{} {x}") == '{"a": {} {x}} {0}'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((USER,), (Message("user", "Q: Hi"),)),
        ((SYSTEM, USER), (SYSTEM, Message("user", "Q: Hi"))),
        ((USER, ANSWER, USER), (USER, ANSWER, Message("user", "Q: Hi"))),
        ((USER, ANSWER, TOOL), (Message("user", "Q: Hi"), ANSWER, TOOL)),
    ],
)
def test_in_messages_the_last_user_turn_is_inserted(before, after):
    assert Wording("Q: {}").apply(before) == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Hi", (SYSTEM, USER)),
        ((USER, ANSWER, USER), (SYSTEM, USER, ANSWER, USER)),
        ((Message("system", "Be brief."), USER), (Message("system", "Be brief."), USER)),
    ],
)
def test_a_system_turn_is_put_before_prompts_that_have_none(before, after):
    assert Wording(None, "Be kind.").apply(before) == after


def test_both_files_together():
    assert Wording("Q: {}", "Be kind.").apply("Hi") == (SYSTEM, Message("user", "Q: Hi"))


def read(wording: Wording, **changes):
    return read_preference(pair(**changes), DatasetFields(), "BinaryPreferenceDataset", wording)


def test_completions_are_left_alone():
    found = read(Wording("Q: {}", "Be kind."))
    assert [completion.answer for completion in found.completions] == ["yes", "no"]


def test_a_prompt_without_a_user_turn_is_refused_as_a_row():
    with pytest.raises(RowError):
        read(Wording("Q: {}"), prompt=[said("system", "Be kind.")])


# In a set


@pytest.fixture
def opened(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "pairs.jsonl"
    source.write_text(json.dumps({"prompt": "hi", "chosen": "yes", "rejected": "no"}))

    def open_it(keys: DatasetFields, template=CHAT):
        return open_store(str(source), keys, Template(letter_tokenizer(), template, {}), Data(), 100)

    return open_it


def test_the_files_reach_the_tokens(opened, files):
    store = opened(files(prompt_file="so {}?", system_prompt_file="be kind"))
    assert store[0].prompt.tolist() == [
        *ids("system:be kind"),
        END,
        *ids("\nuser:so hi?"),
        END,
        *ids("\nassistant:"),
    ]


def test_a_prompt_file_serves_raw_text_too(opened, files):
    assert opened(files(prompt_file="so {}?"), None)[0].prompt.tolist() == ids("so hi?")


def test_a_system_turn_needs_a_template(opened, files):
    with pytest.raises(
        DataError, match=r"system_prompt_file = \S+, but there is no chat template to render a system turn"
    ):
        opened(files(system_prompt_file="be kind"), None)


def test_a_system_turn_that_the_template_leaves_out_is_refused(opened, files):
    without_system = CHAT.replace(
        "{% for message in messages %}", "{% for message in messages if message.role != 'system' %}"
    )
    with pytest.raises(DataError, match=r"system_prompt_file = \S+, but the chat template leaves out system turns"):
        opened(files(system_prompt_file="be kind"), without_system)


def test_a_set_is_tokenised_again_only_if_the_text_of_a_file_changes(opened, files):
    plain = opened(DatasetFields()).fingerprint
    first = opened(files(prompt_file="so {}")).fingerprint
    second = opened(files(prompt_file="why {}")).fingerprint
    assert len({plain, first, second, opened(files(system_prompt_file="so {}")).fingerprint}) == 4
    assert opened(files(prompt_file="so {}\n")).fingerprint == first
