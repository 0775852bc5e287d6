"""`tandem inspect`: a preference as the model will see it."""

import errno
import json

import pytest
from models import MODEL
from rich.console import Console

from tandem.cli import main as cli
from tandem.config.load import load_config
from tandem.errors import ConfigError, DataError, full_disk
from tandem.inspect import as_json, inspect_data, show, write_page


@pytest.fixture
def file(tmp_path):
    rows = [
        {"prompt": "Hi", "chosen": "Yes <b>", "rejected": "No"},
        {"prompt": "Hi", "chosen": "", "rejected": "No"},
        {"prompt": "Well?", "chosen": "a", "rejected": "b"},
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def inspected(file, row=None, *overrides):
    return inspect_data(str(file), load_config(None, overrides).config, row and str(row))


def texts(tokens):
    return "".join(token.text for token in tokens)


def test_the_first_usable_row_is_shown_without_a_number(file):
    found = inspected(file)
    assert found.place == f"{file}:1"
    assert (found.rows, found.accepted) == (3, 2)
    assert texts(found.prompt) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert [texts(completion) for completion in found.completions] == ["Yes <b><|im_end|>", "No<|im_end|>"]
    assert found.pairs == [(0, 1)]


def test_labels_and_paths_are_shown_with_the_format_they_are_read_as(tmp_path):
    path = tmp_path / "votes.jsonl"
    path.write_text(json.dumps({"question": "Hi", "answer_1": "Yes", "answer_2": "No", "preference": 2}))
    found = inspected(path, None, "data.train.label_values={1:a,2:b}")
    assert (found.format, found.pairs) == ("labelled_pair", [(1, 0)])
    assert found.format_reason == "detected from the keys question, answer_1, answer_2, preference"
    paths = {"prompt": "question", "chosen": "answer_1", "rejected": "answer_2"}
    found = inspected(path, None, *(f"data.train.columns.{part}={one}" for part, one in paths.items()))
    assert (found.format, found.format_reason, found.pairs) == (
        "BinaryPreferenceDataset",
        "by the paths of data.*.columns",
        [(0, 1)],
    )


def test_positions_of_every_completion_continue_from_the_prompt(file):
    found = inspected(file)
    assert [token.position for token in found.prompt] == list(range(len(found.prompt)))
    assert {completion[0].position for completion in found.completions} == {len(found.prompt)}


def test_only_completions_are_scored_and_special_tokens_are_marked(file):
    found = inspected(file)
    assert not any(token.scored for token in found.prompt)
    assert all(token.scored for completion in found.completions for token in completion)
    assert {token.text for token in found.prompt if token.special} == {"<|im_start|>", "<|im_end|>"}


def test_a_row_is_found_by_its_line(file):
    assert inspected(file, 3).place == f"{file}:3"


def test_a_row_that_was_left_out_is_reported_with_the_reason(file):
    with pytest.raises(DataError) as error:
        inspected(file, 2)
    assert str(error.value) == f"{file}:2: a completion is empty."


def test_a_row_that_does_not_exist_is_reported(file):
    with pytest.raises(DataError) as error:
        inspected(file, 9)
    assert str(error.value) == f"{file}: there is no row 9. The nearest is 3."


def test_the_nearest_row_is_reported_by_its_line_if_lines_are_empty(file):
    file.write_text(file.read_text().replace("\n", "\n\n"))
    with pytest.raises(DataError, match=r"there is no row 2\. The nearest is [13]\.$"):
        inspected(file, 2)


def test_nothing_in_the_data_is_obeyed_by_the_terminal(tmp_path, capsys):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "Hi", "chosen": "a\x1b[31mb\x07\x9bc\r", "rejected": "No"}) + "\n")
    show(inspected(path), Console(highlight=False, soft_wrap=True), positions=False)
    shown = capsys.readouterr().out
    assert "a\N{SYMBOL FOR ESCAPE}[31mb\N{SYMBOL FOR BELL}" in shown
    assert not any(sign in shown for sign in "\x1b\x07\x9b\r")


def test_a_character_of_several_tokens_is_shown_once(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "naïve 🦄?", "chosen": "一 🦄", "rejected": "a \ufffd b"}) + "\n")
    found = inspected(path)
    assert "naïve 🦄?" in texts(found.prompt)
    assert [texts(one) for one in found.completions] == ["一 🦄<|im_end|>", "a \ufffd b<|im_end|>"]


def test_a_missing_template_is_reported(file, capsys):
    show(inspected(file, None, "policy.tokenizer.chat_template=null"), Console(), positions=False)
    assert "No chat template: texts are used as they are." in capsys.readouterr().out


def test_of_several_completions_those_in_a_pair_are_shown(tmp_path):
    path = tmp_path / "pairs.jsonl"
    answers = [{"completion": text, "score": score} for text, score in (("a", 3), ("b", 2), ("c", 1))]
    path.write_text(json.dumps({"prompt": "Hi", "completions": answers}) + "\n")
    assert [texts(one) for one in inspected(path).completions] == ["a<|im_end|>", "c<|im_end|>"]
    assert len(inspected(path, None, "data.pairing=all").completions) == 3


def test_the_page_escapes_the_text_and_loads_nothing(file, tmp_path):
    write_page(inspected(file), tmp_path / "page.html", positions=False)
    page = (tmp_path / "page.html").read_text()
    assert "<b>" not in page
    assert "&lt;" in page
    assert "default-src 'none'" in page
    assert "http://" not in page and "https://" not in page


def test_the_output_names_place_format_and_counts(file, capsys):
    show(inspected(file), Console(width=1000, highlight=False), positions=True)
    said = capsys.readouterr().out
    assert (
        f"{file}:1: read as BinaryPreferenceDataset, detected from the keys prompt, chosen, rejected; 2 of 3 rows usable "
        "(empty completion: 1)" in said
    )
    assert "tokens, scored, preferred to completion 1" in said


DIRTY = [
    {"prompt": "Hi", "chosen": "Yes", "rejected": "No"},
    {"prompt": "Hi", "chosen": "Yes", "rejected": "No"},
    {"prompt": "Hi", "chosen": "No", "rejected": "Yes"},
    *({"prompt": f"Well {i}?", "chosen": "a", "rejected": "b"} for i in range(9)),
    {"prompt": "", "chosen": "a", "rejected": "b"},
]


@pytest.fixture
def dirty(tmp_path):
    path = tmp_path / "dirty.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in DIRTY))
    return path


def test_rows_that_stop_training_are_reported_with_the_error_of_training(dirty, capsys):
    stops = (
        f"{dirty}: 1 of 13 rows are malformed:\n"
        "  empty prompt: 1\n"
        f"    {dirty}:13: prompt is empty.\n"
        "Fix them, or leave them out: data.on_bad_row=skip data.max_bad_share=0.08."
    )
    found = inspected(dirty)
    assert found.stops == stops
    show(found, Console(width=1000, highlight=False), positions=False)
    indented = "".join(f"  {line}\n" for line in stops.splitlines())
    assert f"Training stops at rows of this file:\n{indented}" in capsys.readouterr().out
    skips = ("data.on_bad_row=skip", "data.max_bad_share=0.08")
    assert inspected(dirty, None, *skips).stops is None
    assert inspected(dirty, None, *skips, "data.duplicates=error").stops == (
        f"{dirty}:2: the row has the same prompt and completions as {dirty}:1, which data.duplicates=error does not allow. "
        "Remove the duplicate, or set data.duplicates=drop."
    )


def test_rows_that_are_only_left_out_do_not_stop_training(file):
    assert inspected(file, None, "data.max_filtered_share=0.34").stops is None
    assert inspected(file).stops == (
        f"{file}: 1 of 3 rows were filtered, over data.max_filtered_share=0.1:\n"
        "  empty completion: 1\n"
        f"    {file}:2: a completion is empty.\n"
        "Fix the file, or set data.max_filtered_share=0.34."
    )


def test_duplicates_are_reported_with_what_training_does(dirty, file, capsys):
    repeats = f"Preferences that repeat an earlier one: 1, the first at {dirty}:2. "
    kept = [
        f"{repeats}They are trained on each time; data.duplicates=drop keeps the first.",
        f"Preferences that another row has with chosen and rejected swapped: 3, the first at {dirty}:1. Both are trained on: "
        "check which one is right.",
    ]
    found = inspected(dirty)
    assert found.duplicates == kept
    show(found, Console(width=1000, highlight=False), positions=False)
    assert "\n".join(kept) in capsys.readouterr().out
    assert inspected(dirty, None, "data.duplicates=drop").duplicates[0] == (
        f"{repeats}data.duplicates=drop leaves them out of training."
    )
    assert inspected(file).duplicates == []


def test_json_holds_every_token(file):
    assert json.loads(as_json(inspected(file)))["completions"][1][-1]["text"] == "<|im_end|>"


def test_settings_of_data_default_apply_to_the_inspected_set(tmp_path):
    file = tmp_path / "asked.jsonl"
    file.write_text(json.dumps({"question": "Hi?", "chosen": "Yes.", "rejected": "No."}) + "\n")
    (tmp_path / "system.txt").write_text("Be brief.\n")
    changes = ["data.default.prompt_key=question", f"data.default.system_prompt_file={tmp_path}/system.txt"]
    found = inspect_data(str(file), load_config(None, changes).config, None)
    assert "Be brief." in "".join(token.text for token in found.prompt)
    own = inspect_data(str(file), load_config(None, [*changes, "data.train.prompt_key=question"]).config, None)
    assert own == found


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("no/page.html", "No such file or directory. Choose another file."),
        ("", "a directory. Give the name of a file."),
        ("/dev/null", "not a plain file. Give the name of a file."),
    ],
)
def test_a_page_that_cannot_be_written_is_reported_in_one_line(file, tmp_path, place, reason):
    with pytest.raises(ConfigError) as refused:
        write_page(inspected(file), tmp_path / place, positions=False)
    assert str(refused.value) == f"--html {tmp_path / place}: {reason}"


def test_a_full_disk_leaves_no_page(file, tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    found = inspected(file)
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError) as error:
        write_page(found, tmp_path / "pages.html", positions=False)
    assert full_disk(error.value).filename == str(tmp_path / "pages.html")
    assert not list(tmp_path.glob("*pages.html*"))


def test_a_page_is_written_through_a_link(file, tmp_path):
    (tmp_path / "page.html").touch()
    (tmp_path / "link").symlink_to("page.html")
    write_page(inspected(file), tmp_path / "link", positions=False)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "page.html").stat().st_size > 0


def test_a_page_replaces_an_earlier_page_and_nothing_else(file, tmp_path):
    page, data = tmp_path / "page.html", tmp_path / "data.jsonl"
    for _ in range(2):
        write_page(inspected(file), page, positions=False)
    data.write_text('{"prompt": "Hi"}\n')
    with pytest.raises(ConfigError) as refused:
        write_page(inspected(file), data, positions=False)
    assert str(refused.value) == (
        f"--html {data}: this file exists and is not a page of tandem inspect, so it is kept. Choose another file."
    )
    assert data.read_text() == '{"prompt": "Hi"}\n'


def test_data_of_ones_own_is_seen_under_the_limits_of_training(tmp_path, monkeypatch, capsys):
    row = {"prompt": "why " * 700, "chosen": "because", "rejected": "no"}
    (tmp_path / "long.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setattr("sys.argv", ["tandem", "inspect", str(tmp_path / "long.jsonl"), "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)
    assert len(found["prompt"]) > 512


@pytest.mark.parametrize(
    "named", ["data.train.data_path=other.jsonl", "data.train=other.jsonl", "+data.train={data_path: other.jsonl}"]
)
def test_a_file_named_twice_is_refused(file, monkeypatch, capsys, named):
    monkeypatch.setattr("sys.argv", ["tandem", "inspect", str(file), named])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"tandem: error: inspect shows {file}, so {named} has no effect. Leave it out.\n"
    )


def test_a_row_that_is_too_long_is_shown_with_a_note(file):
    limit = "policy.max_total_sequence_length=14"
    found = inspected(file, 1, limit)
    assert texts(found.completions[0]) == "Yes <b><|im_end|>"
    assert found.note == f"Training leaves it out: {file}:1: 18 tokens, over {limit}."
    console = Console(record=True, width=200)
    show(found, console, positions=False)
    assert f"\nTraining leaves it out: {file}:1: 18 tokens, over {limit}.\n" in console.export_text()
    assert inspected(file, 3, "policy.max_total_sequence_length=40", "data.overlong=error").note is None
    assert (
        inspected(file, 1, limit, "data.overlong=error").note
        == f"Training stops at it: {file}:1: 18 tokens, over {limit}."
    )


def test_a_row_truncated_by_data_overlong_is_shown_truncated(file):
    found = inspected(file, 1, "policy.max_total_sequence_length=14", "data.overlong=truncate_completion")
    assert texts(found.completions[0]) == "Yes "
    assert found.note == "Truncated from 18 tokens by data.overlong=truncate_completion."
    assert inspected(file, 1, "policy.max_total_sequence_length=18", "data.overlong=truncate_completion").note is None


def test_a_row_of_one_file_among_several_is_named_with_it(file):
    (file.parent / "z.jsonl").write_text(json.dumps({"prompt": "Z", "chosen": "a", "rejected": "b"}) + "\n")
    pattern = file.parent / "*.jsonl"
    assert inspected(pattern, "1").place == f"{file}:1"
    assert inspected(pattern, "z.jsonl:1").place == inspected(pattern, f"{file.parent}/z.jsonl:1").place
    assert inspected(pattern, "z.jsonl:1").place == f"{file.parent}/z.jsonl:1"
    with pytest.raises(DataError) as nearest:
        inspected(pattern, "z.jsonl:7")
    assert str(nearest.value) == f"{pattern}: there is no row z.jsonl:7. The nearest is 1."
    with pytest.raises(DataError) as unknown:
        inspected(pattern, "no.jsonl:7")
    assert str(unknown.value) == f"{pattern}: no row comes from a file no.jsonl. Check the name of the file in --row."


@pytest.mark.parametrize("row", ["0", "-1", "x", "a.jsonl:"])
def test_a_row_that_is_not_a_number_is_refused(row, file, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tandem", "inspect", str(file), f"--row={row}"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"tandem: error: --row {row}: not a row number. Count from 1; with several files, write FILE:N.\n"
    )


def test_special_tokens_show_whether_they_are_scored(file):
    console = Console(record=True, force_terminal=True, color_system="standard", width=200)
    show(inspected(file), console, positions=False)
    shown = [segment for segment in console._record_buffer if segment.text in ("<|im_start|>", "<|im_end|>")]
    styles = {str(segment.style) for segment in shown}
    assert styles == {"bold black on cyan", "bold black on green", "bold black on red"}


def test_the_tokenizer_of_the_tokens_is_named(file):
    console = Console(record=True, width=200)
    show(inspected(file), console, positions=False)
    assert "Tokens of the embedded model; --model M uses the tokenizer of another model." in console.export_text()


def test_a_position_is_on_the_line_of_its_token(file):
    console = Console(record=True, width=200)
    show(inspected(file), console, positions=True)
    assert "er₂ ⏎₃ \nHi₄" in console.export_text().replace("  ", " ")


def test_the_model_given_as_option_and_as_key_is_refused(file, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tandem", "inspect", str(file), "--model", "embedded", "policy.model_name=other"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "tandem: error: --model embedded and policy.model_name=other set the same key. Leave out one of them.\n"
    )


def test_prompts_that_training_warns_of_are_warned_of(tmp_path, capsys):
    path = tmp_path / "tagged.jsonl"
    path.write_text(json.dumps({"prompt": "\n\nHuman: Hi\n\nAssistant:", "chosen": "Yes", "rejected": "No"}))
    found = inspected(path)
    warning = (
        f"{path}: Human: or Assistant: tags in 1 prompt, the first at {path}:1, which become part of a single user "
        "turn. Give messages, or complete dialogues as chosen and rejected (dataset_name=dialogue_text); for complete "
        "texts set policy.tokenizer.chat_template=null."
    )
    assert found.warnings == [warning]
    assert json.loads(as_json(found))["warnings"] == [warning]
    show(found, Console(highlight=False, soft_wrap=True), positions=False)
    assert f"warning: {warning}\n" in capsys.readouterr().out


def test_prompts_that_are_as_they_should_be_are_not(file):
    assert inspected(file).warnings == []


def test_a_cache_that_cannot_be_written_is_refused_before_rows_are_read(file, tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "pairs.jsonl"))
    with pytest.raises(ConfigError) as refused:
        inspected(file, None, f"policy.model_name={MODEL}")
    assert str(refused.value) == (
        f"the cache directory {file} cannot be written (File exists). Set TANDEM_CACHE to a writable directory."
    )
