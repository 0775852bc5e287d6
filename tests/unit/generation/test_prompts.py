"""Prompts are read from text, rows, preference data and rows of a format of the user's; a bad row ends in one message."""

import json

import pytest

from tandem.config.load import load_config
from tandem.data.formats.preference import Message
from tandem.errors import ConfigError, DataError
from tandem.generation.prompts import OwnFormats, one_prompt, prompts_from
from tandem.terminal.arguments import command_words
from tandem.terminal.commands import tandem_command
from tandem.user_code import RefusedCodeError


def rows(path, *values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def test_one_skipped_row_is_counted_in_the_singular(tmp_path):
    with pytest.raises(DataError) as refused:
        prompts_from(
            rows(
                tmp_path / "p.jsonl",
                {"chosen": "\n\nHuman: A?\n\nAssistant: a", "rejected": "\n\nHuman: B?\n\nAssistant: b"},
            )
        )
    assert "no prompts; skipped 1 row without a usable prompt. " in str(refused.value)


def test_a_text_file_has_a_prompt_per_line_and_blank_lines_are_skipped(tmp_path):
    file = tmp_path / "p.txt"
    file.write_text("Hi\r\n\n  \nHow far?\n", encoding="utf-8")
    prompts, skipped = prompts_from(file)
    assert [(p.index, p.place, p.prompt) for p in prompts] == [(0, f"{file}:1", "Hi"), (1, f"{file}:4", "How far?")]
    assert skipped == 0


def test_rows_give_a_prompt_or_messages_a_system_turn_and_their_other_columns(tmp_path):
    file = rows(
        tmp_path / "p.jsonl",
        {"prompt": "Hi", "answer": 4},
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"prompt": "Hi", "system": "Be brief."},
    )
    prompts, _ = prompts_from(file)
    assert [p.prompt for p in prompts] == [
        "Hi",
        (Message("user", "Hi"),),
        (Message("system", "Be brief."), Message("user", "Hi")),
    ]
    assert [dict(p.row) for p in prompts] == [{"answer": 4}, {}, {}]


def test_a_csv_file_gives_its_column_prompt(tmp_path):
    file = tmp_path / "p.csv"
    file.write_text('prompt,kind\n"a, b",x\n', encoding="utf-8")
    [prompt] = prompts_from(file)[0]
    assert (prompt.prompt, dict(prompt.row)) == ("a, b", {"kind": "x"})


def test_a_text_file_that_is_not_utf8_is_refused_with_its_line(tmp_path):
    file = tmp_path / "p.txt"
    file.write_bytes(b"Hi\ncaf\xe9\n")
    with pytest.raises(DataError) as error:
        prompts_from(file)
    assert str(error.value) == f"{file}: not UTF-8 at byte 3 of line 2. Save the file as UTF-8."


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hi", "chosen": "a", "rejected": "b"},
        {"prompt": "Hi", "chosen": "a", "rejected": "a"},  # no preference, but a prompt
        {"prompt": "Hi", "completions": [{"completion": "a", "score": None}]},  # an output without scores
        {"question": "Hi", "response_j": "a", "response_k": "b"},
        {"chosen": "\n\nHuman: Hi\n\nAssistant: a", "rejected": "\n\nHuman: Hi\n\nAssistant: b"},
    ],
)
def test_preference_data_gives_its_prompts(tmp_path, row):
    [prompt] = prompts_from(rows(tmp_path / "p.jsonl", row))[0]
    assert prompt.prompt in ("Hi", (Message("user", "Hi"),))


def test_rows_of_preference_data_without_one_common_prompt_are_skipped_and_counted(tmp_path):
    pair = {"chosen": "\n\nHuman: Hi\n\nAssistant: a", "rejected": "\n\nHuman: Hi\n\nAssistant: b"}
    other = {**pair, "rejected": "\n\nHuman: Ho\n\nAssistant: b"}
    prompts, skipped = prompts_from(rows(tmp_path / "p.jsonl", pair, other))
    assert (len(prompts), skipped) == (1, 1)


def test_lists_of_texts_and_messages_are_prompts():
    prompts, _ = prompts_from(["Hi", [{"role": "user", "content": "Ho"}]])
    assert [p.prompt for p in prompts] == ["Hi", (Message("user", "Ho"),)]


def test_prompts_of_a_list_are_named_by_their_index():
    with pytest.raises(DataError) as error:
        prompts_from(["Hi", " "])
    assert str(error.value) == "prompts[1]: prompt is empty."
    with pytest.raises(DataError) as error:
        prompts_from([])
    assert (
        str(error.value) == "prompts is empty. Give a list of texts, lists of messages or rows, or the path of a file."
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "",
            "{file}: no prompts. Give a file with one prompt per line, or with rows that have a key prompt or messages.",
        ),
        ('{"text": "Hi"}\n', "{file}:1: no key prompt or messages, and not preference data. Keys found: text."),
        ('{"prompt": " "}\n', "{file}:1: prompt is empty."),
        (
            '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}\n',
            "{file}:1: messages[1]: the prompt ends in an assistant turn. End it before the completion.",
        ),
    ],
)
def test_a_file_without_usable_prompts_is_refused(tmp_path, text, message):
    file = tmp_path / "p.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(DataError) as error:
        prompts_from(file)
    assert str(error.value) == message.format(file=file)


def test_the_first_bad_rows_are_listed_together(tmp_path):
    file = rows(tmp_path / "p.jsonl", *[{"text": "Hi"}] * 5)
    with pytest.raises(DataError) as error:
        prompts_from(file)
    lines = str(error.value).split("\n")
    assert [line.split(": ")[0] for line in lines[:3]] == [f"{file}:{n}" for n in (1, 2, 3)]
    assert lines[3:] == ["... and 2 more rows"]


def test_an_empty_prompt_is_refused():
    with pytest.raises(ConfigError, match=r"^--prompt is empty\. Give a text\.$"):
        one_prompt(" ")


@pytest.fixture
def coded(tmp_path, monkeypatch):
    """A run that was trained with a format function, which leaves out rows without an answer."""
    monkeypatch.chdir(tmp_path)
    code = """def mine(row):
    if not row['bad']:
        return None
    return {'prompt': [{'role': 'user', 'content': row['ask']}], 'chosen': row['good'], 'rejected': row['bad']}
"""
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "run").mkdir()
    keys = ["data.train.data_path=train.jsonl", "data.train.dataset_name=mine.py:mine"]
    (tmp_path / "run" / "config.yaml").write_text(load_config(None, keys).as_yaml())
    return tmp_path / "run"


OWN_ROWS = [{"ask": "Why?", "good": "So.", "bad": "No."}, {"ask": "How?", "good": "So.", "bad": ""}]


def test_the_format_function_of_a_run_reads_prompts_that_no_format_fits(coded, tmp_path):
    own = OwnFormats((coded,), allow_code=True)
    file = rows(tmp_path / "own.jsonl", *OWN_ROWS)
    for given in (str(file), OWN_ROWS):
        (found,), num_skipped = prompts_from(given, own)
        assert (found.prompt, found.row, num_skipped) == ((Message("user", "Why?"),), OWN_ROWS[0], 1)
    assert prompts_from(["Hi"], own)[0][0].prompt == "Hi"


def test_the_format_function_of_a_run_is_run_only_where_it_is_needed_and_allowed(coded, tmp_path):
    (tmp_path / "mine.py").write_text("raise AssertionError('must not be run')")
    own, file = OwnFormats((coded,)), rows(tmp_path / "own.jsonl", *OWN_ROWS)
    known = rows(tmp_path / "known.jsonl", {"prompt": "Hi", "chosen": "yes", "rejected": "no"})
    assert prompts_from(str(known), own)[0][0].prompt == "Hi"
    expected = (
        f"{file}:1: no known format fits this row, and the run's own format may not be run. {coded}/config.yaml: "
        "data.train.dataset_name = mine.py:mine names Python code, which would be run. If you trust it, add "
    )
    with pytest.raises(RefusedCodeError) as error:
        prompts_from(str(file), own)
    assert str(error.value) == f"{expected}allow_code=True."
    with command_words(["generate", "run", "--prompts", "own.jsonl"]), pytest.raises(RefusedCodeError) as error:
        prompts_from(str(file), own)
    command = tandem_command("generate", "run", "--prompts", "own.jsonl", "--allow-code")
    assert str(error.value) == f"{expected}--allow-code: {command}"


def test_rows_that_the_format_of_the_run_cannot_read_either_are_refused_as_such(coded, tmp_path):
    file = rows(tmp_path / "ask.jsonl", {"ask": "Why?"})
    with pytest.raises(DataError) as error:
        prompts_from(str(file), OwnFormats((coded,), allow_code=True))
    assert str(error.value) == (
        f"{file}:1: no key prompt or messages, and not preference data. Keys found: ask. mine.py:mine, the format of the run, "
        "cannot read it either."
    )
