"""Rows of data files with their file and line, and the messages for lines and files that cannot be read."""

import numpy as np
import pytest

from tandem.config.sections.datasets import DatasetFields
from tandem.data.read import sources
from tandem.data.read.files import find_files
from tandem.data.read.sources import RowError, SourceRow, read_rows
from tandem.errors import DataError


@pytest.fixture
def file(tmp_path):
    return tmp_path / "pairs.jsonl"


def read(file, content: bytes) -> list[SourceRow | RowError]:
    file.write_bytes(content)
    return list(read_rows(file))


def only_error(file, content: bytes) -> RowError:
    (error,) = read(file, content)
    assert isinstance(error, RowError)
    return error


def test_each_line_is_a_row_with_its_file_and_line(file):
    rows = read(file, b'{"a": 1}\n{"b": "\xc3\xa4"}\n')
    assert rows == [SourceRow({"a": 1}, str(file), 1), SourceRow({"b": "ä"}, str(file), 2)]
    assert [row.place for row in rows] == [f"{file}:1", f"{file}:2"]


def test_the_last_line_needs_no_line_end(file):
    assert len(read(file, b'{"a": 1}\n{"a": 2}')) == 2


def test_malformed_json_is_reported_with_line_and_column(file):
    good, bad, other = read(file, b'{"a": 1}\n{"a": 1,}\n{"a": 3}\n')
    assert isinstance(good, SourceRow) and isinstance(other, SourceRow)
    assert str(bad) == f"{file}:2: column 9: malformed JSON: Expecting property name enclosed in double quotes."
    assert (bad.reason, bad.kind) == ("malformed JSON", "bad")


def test_a_last_line_that_was_cut_off_is_reported(file):
    assert str(only_error(file, b'{"prompt": "a", "chosen": ')) == (
        f"{file}:1: column 27: malformed JSON: Expecting value. The line has no line end: was the file cut off?"
    )


def test_a_duplicate_key_is_refused_at_any_depth(file):
    assert str(only_error(file, b'{"a": 1, "b": 2, "a": 1}\n')) == (
        f"{file}:1: the key 'a' appears twice in one object. Remove one."
    )
    assert only_error(file, b'{"x": [{"c": 1, "c": 2}]}\n').message == (
        "the key 'c' appears twice in one object. Remove one."
    )


def test_bytes_that_are_not_utf8_are_reported_with_their_offset_in_the_line(file):
    rows = read(file, b'{"a": 1}\n{"a": "\xff"}\n')
    assert str(rows[1]) == f"{file}:2: not UTF-8 at byte 7 of the line. Save the file as UTF-8."
    assert rows[1].reason == "not UTF-8"


def test_a_byte_order_mark_is_left_out(file):
    assert read(file, b'\xef\xbb\xbf{"a": 1}\n') == [SourceRow({"a": 1}, str(file), 1)]


def test_crlf_line_ends_are_read_like_lf(file):
    lines = [b'{"a": "x"}', b"", b'{"b": }', b'{"c": 3}', b""]
    unix, dos = read(file, b"\n".join(lines)), read(file, b"\r\n".join(lines))
    assert [str(row) for row in unix] == [str(row) for row in dos]
    assert len(unix) == 3


def test_blank_lines_are_left_out_and_counted(file):
    rows = read(file, b'\n  \n{"a": 1}\n\t\n\n{"a": 2}\n\n')
    assert [row.line for row in rows] == [3, 6]


@pytest.mark.parametrize(
    ("line", "kind"), [(b"[1]", "a list"), (b'"x"', "a text"), (b"1.5", "a number"), (b"null", "null")]
)
def test_a_line_that_is_not_an_object_is_refused(file, line, kind):
    error = only_error(file, line + b"\n")
    assert str(error) == f"{file}:1: {kind}, not a JSON object with a prompt and completions."
    assert error.reason == "not an object"


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_absurd_nesting_is_refused_and_the_next_line_read(file, opening):
    deep, after = read(file, opening * 100_000 + b'\n{"a": 1}\n')
    assert str(deep) == f"{file}:1: JSON nested over 100 levels deep. Flatten it or remove it."
    assert isinstance(after, SourceRow)


def test_a_number_with_absurdly_many_digits_is_refused_and_the_next_line_read(file):
    number, after = read(file, b'{"a": ' + b"1" * 5000 + b'}\n{"a": 1}\n')
    assert str(number) == f"{file}:1: a number with too many digits. Shorten it."
    assert isinstance(after, SourceRow)


def test_an_empty_file_has_no_rows(file):
    assert read(file, b"") == []


def test_a_line_over_the_limit_is_refused_without_reading_further(file, monkeypatch):
    monkeypatch.setattr(sources, "MAX_RECORD_BYTES", 20)
    file.write_bytes(b'{"a": 1}\n{"a": "' + b"x" * 40)
    with pytest.raises(DataError) as caught:
        list(read_rows(file))
    assert str(caught.value) == f"{file}:2: a line over 64 MB. Write one preference per line."


# Which files


def found(data_path) -> list[str]:
    return [file.name for file in find_files(str(data_path), DatasetFields())]


def refused(data_path) -> str:
    with pytest.raises(DataError) as caught:
        find_files(str(data_path), DatasetFields())
    return str(caught.value)


def test_a_path_names_one_file_even_where_it_looks_like_a_pattern(tmp_path):
    for name in ("a.jsonl", "[a].jsonl"):
        (tmp_path / name).touch()
    assert found(tmp_path / "a.jsonl") == [f"{tmp_path}/a.jsonl"]
    assert found(tmp_path / "[a].jsonl") == [f"{tmp_path}/[a].jsonl"]


def test_a_pattern_names_its_files_in_the_order_of_their_names(tmp_path):
    for name in ("c.jsonl", "a.jsonl", "b.jsonl", "b.csv"):
        (tmp_path / name).touch()
    (tmp_path / "d.jsonl").mkdir()
    assert found(tmp_path / "*.jsonl") == [f"{tmp_path}/{name}.jsonl" for name in "abc"]
    assert found(tmp_path / "b.*") == [f"{tmp_path}/b.csv", f"{tmp_path}/b.jsonl"]
    assert found(tmp_path / "[bc].jsonl") == found(tmp_path / "?.jsonl")[1:]


def test_two_stars_match_folders_at_any_depth(tmp_path):
    for name in ("b/d/c.jsonl", "a/b.jsonl", "a.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    names = ["a/b.jsonl", "a.jsonl", "b/d/c.jsonl"]
    assert found(tmp_path / "**" / "*.jsonl") == [f"{tmp_path}/{name}" for name in names]


def test_missing_rows_of_a_call_from_python_are_reported_as_such(tmp_path):
    file = tmp_path / "rows" / f"{'0a' * 16}.jsonl"
    assert refused(file) == (
        f"{file}: this file of the cache, with the rows that a call from Python gave, no longer exists. Make the same call with "
        "the same rows again: it writes the file, and resumes the run if it is unfinished."
    )


def test_a_missing_file_is_reported_with_its_path(tmp_path):
    assert refused(tmp_path / "no.jsonl") == (
        f"{tmp_path}/no.jsonl: no such file or folder, and not the name of a hub dataset (org/name)."
    )


@pytest.mark.parametrize(
    ("given", "ending"),
    [
        ("held-out.jsonl", ", and not the name of a hub dataset (org/name). Did you mean held_out.jsonl?"),
        ("./runs/tandm-1", ", and not the name of a hub dataset (org/name). Did you mean runs/tandem-1?"),
        ("other.jsonl", ", and not the name of a hub dataset (org/name)."),
    ],
)
def test_a_missing_path_is_reported_with_what_is_near_it(tmp_path, monkeypatch, given, ending):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/tandem-1").mkdir(parents=True)
    (tmp_path / "held_out.jsonl").touch()
    (tmp_path / "held_out.csv").touch()
    assert refused(given) == f"{given}: no such file or folder{ending}"


@pytest.mark.parametrize(
    ("given", "ending"),
    [
        ("runs/tandm-1", " As a path: no such file or folder. Did you mean runs/tandem-1?"),
        ("runs/x", " As a path: no such file or folder. runs holds another, tandem-1."),
        ("empty/x", " As a path: no such file or folder."),
        ("acme/x", ""),
    ],
)
def test_what_is_not_on_the_hub_may_be_a_path_below_a_folder(tmp_path, monkeypatch, given, ending):
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/tandem-1", "runs/another", "runs/.hidden", "empty"):
        (tmp_path / folder).mkdir(parents=True)
    message = refused(given)
    assert message.startswith(f"{given}: ")
    assert message.endswith(f"or give local files as data_path.{ending}")


def test_an_empty_path_is_not_the_current_folder():
    with pytest.raises(DataError) as error:
        find_files("", DatasetFields())
    assert str(error.value) == "data_path is empty. Give a file, a folder, or the name of a hub dataset (org/name)."


def test_a_folder_of_prepared_sets_is_not_read_as_a_hub_dataset(tmp_path):
    for name in ("train", "validation-default"):
        (tmp_path / "out" / name).mkdir(parents=True)
        (tmp_path / "out" / name / "manifest.json").touch()
    assert refused(tmp_path / "out") == (
        f"{tmp_path}/out: the folder contains prepared sets. Give the path of one of them: {tmp_path}/out/train, "
        f"{tmp_path}/out/validation-default."
    )
    assert refused(tmp_path / "out/train") == (
        f"{tmp_path}/out/train: tokens.arrow is missing from this prepared set. Run tandem prepare again."
    )


def test_a_pattern_that_matches_no_file_is_refused(tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    assert refused(tmp_path / "*.jsonl") == f"{tmp_path}/*.jsonl: no file matches this pattern."


def test_a_numpy_file_is_refused_with_the_command_that_imports_packs(tmp_path):
    file = tmp_path / "packed 4096.npy"
    np.save(file, np.zeros(3))
    with pytest.raises(DataError) as caught:
        list(read_rows(file))
    assert str(caught.value) == (
        f"{file}: a NumPy file, not rows of text. To import packed files of NeMo Aligner, run: tandem prepare "
        f"--from-nemo '{file}' --output-dir DIR."
    )


@pytest.mark.parametrize(("mark", "encoding"), [(b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")])
def test_a_utf_16_file_is_refused(file, mark, encoding):
    with pytest.raises(DataError) as caught:
        read(file, mark + '{"prompt": "a"}\n'.encode(encoding))
    assert str(caught.value) == f"{file}: the text is UTF-16, which tandem cannot read. Save it as UTF-8."
