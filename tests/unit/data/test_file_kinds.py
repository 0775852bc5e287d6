"""Files other than plain JSONL give the same rows as JSONL; damaged files give exact messages."""

import bz2
import csv
import gzip
import io
import json
import lzma
import tarfile
import zipfile

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from tandem.data.read import sources
from tandem.data.read.sources import RowError, SourceRow, read_rows
from tandem.errors import DataError

TEXTS = [
    {"prompt": "Why?", "chosen": 'So\nit is,\r\n"then".', "rejected": ""},
    {"prompt": "ä €", "chosen": " [", "rejected": "no, none"},
]
NESTED_ROWS = [
    {"context": [{"role": "user", "content": "Hi"}], "completions": [{"rank": 0, "score": 1.5}], "id": 1},
    {"context": [{"role": "user", "content": "Ho"}], "completions": [{"rank": 2, "score": -1.0}], "id": None},
]


def jsonl(rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def array(rows) -> bytes:
    return json.dumps(rows, indent=2).encode()


def as_csv(rows) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def as_parquet(rows, **options) -> bytes:
    sink = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows), sink, **options)
    return sink.getvalue()


def arrow_file(rows, new=pa.ipc.new_file) -> bytes:
    table = pa.Table.from_pylist(rows)
    sink = io.BytesIO()
    with new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    return sink.getvalue()


def arrow_stream(rows) -> bytes:
    return arrow_file(rows, pa.ipc.new_stream)


def zipped(content: bytes) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr("pairs.jsonl", content)
    return sink.getvalue()


def zstd(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


@pytest.fixture
def read(tmp_path):
    """The rows of a file of this name and content."""

    def rows_of(name: str, content: bytes) -> list[SourceRow | RowError]:
        (tmp_path / name).write_bytes(content)
        return list(read_rows(tmp_path / name))

    return rows_of


@pytest.fixture
def values(read):
    return lambda name, content: [row.value for row in read(name, content)]


@pytest.fixture
def refusal(read, tmp_path):
    """Why the file as a whole is refused, without the folder it lies in."""

    def message(name: str, content: bytes) -> str:
        with pytest.raises(DataError) as caught:
            read(name, content)
        return str(caught.value).replace(f"{tmp_path}/", "")

    return message


# The same rows

KINDS = {
    "pairs.jsonl": jsonl,
    "pairs.json": array,
    "pairs.JSON": array,
    "lines.json": jsonl,
    "pairs.parquet": as_parquet,
    "pairs.arrow": arrow_file,
    "stream.arrow": arrow_stream,
}


@pytest.mark.parametrize(("name", "written"), KINDS.items(), ids=KINDS)
@pytest.mark.parametrize("rows", [TEXTS, NESTED_ROWS], ids=["texts", "nested"])
def test_every_kind_of_file_gives_the_rows_that_were_written(values, name, written, rows):
    assert values(name, written(rows)) == rows


@pytest.mark.parametrize("name", ["pairs.csv", "pairs.CSV"])
def test_a_csv_file_gives_the_texts_that_were_written(values, name):
    assert values(name, as_csv(TEXTS)) == TEXTS


def test_messages_in_a_csv_file_are_read_as_json(values):
    asked = [{"role": "user", "content": "Why?"}]
    rows = [{"prompt": json.dumps(asked), "chosen": '[{"role"', "rejected": "[{}]"}]
    assert values("pairs.csv", as_csv(rows)) == [{**rows[0], "prompt": asked}]


TURN = {"role": "user", "content": "Hi"}
SHARED = {"from": "human", "value": "Hi"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt", [TURN]),
        ("chosen", TURN),  # one message
        ("chosen", SHARED),
        ("conversations", [SHARED]),
        ("completions", [{"response": "yes", "overall_score": 9}, {"response": "no", "overall_score": 1}]),
        ("responses", ["yes", "no"]),
        ("scores", [9, 1]),
        ("output", ["yes", "no"]),
    ],
)
def test_json_in_a_csv_file_may_have_any_layout(values, name, value):
    for text in (json.dumps(value), json.dumps(value, indent=2), f" {json.dumps(value)}\n"):
        assert values("pairs.csv", as_csv([{name: text, "id": "1"}])) == [{name: value, "id": "1"}]


@pytest.mark.parametrize(
    "text", ['{"value": 3}', '["a", "b"]', '[{"id": 1, "of": "role"}]', '[{"role": "user"', "[]", "{}"]
)
def test_json_that_is_an_answer_stays_a_text_in_a_csv_file(values, text):
    assert values("pairs.csv", as_csv([{"prompt": text, "chosen": text}])) == [{"prompt": text, "chosen": text}]


def test_messages_in_python_syntax_in_a_csv_file_are_refused(read, tmp_path):
    asked = str([{"role": "user", "content": "Why?"}])
    refused, kept = read(
        "pairs.csv", as_csv([{"prompt": asked, "chosen": "a"}, {"prompt": "[{'a': 1}]", "chosen": "b"}])
    )
    assert str(refused) == (
        f"{tmp_path}/pairs.csv:2: prompt: messages in Python syntax, not JSON. Write the column with json.dumps, or "
        "save the table as .parquet."
    )
    assert kept.value == {"prompt": "[{'a': 1}]", "chosen": "b"}


def test_a_tar_archive_is_refused(refusal, tmp_path):
    (tmp_path / "inside.jsonl").write_bytes(jsonl(TEXTS))
    for name, mode in (("pairs.tar.gz", "w:gz"), ("pairs.tar", "w")):
        with tarfile.open(tmp_path / "made", mode) as archive:
            archive.add(tmp_path / "inside.jsonl")
        content = (tmp_path / "made").read_bytes()
        assert refusal(name, content) == f"{name}: a tar archive, which tandem cannot read. Unpack it."


@pytest.mark.parametrize("packed", [gzip.compress, zstd])
@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("pairs.jsonl", jsonl),
        ("pairs.jsonl.gz", jsonl),
        ("pairs.jsonl.zst", jsonl),
        ("pairs", jsonl),
        ("pairs.json", array),
        ("pairs.json.gz", array),
        ("pairs.csv", as_csv),
        ("pairs.csv.zst", as_csv),
        ("pairs.parquet.gz", as_parquet),
        ("pairs.parquet", as_parquet),
        ("pairs.arrow.zst", arrow_file),
        ("stream.arrow.gz", arrow_stream),
        ("pairs.gz", as_parquet),
    ],
)
def test_compressed_files_are_detected_from_their_content(values, packed, name, written):
    assert values(name, packed(written(TEXTS))) == TEXTS


@pytest.mark.parametrize(
    ("kind", "packed"),
    [
        ("zip", zipped),
        ("bzip2", bz2.compress),
        ("xz", lzma.compress),
        ("7z", lambda content: b"7z\xbc\xaf\x27\x1c" + content),
    ],
)
def test_other_archives_are_refused(refusal, kind, packed):
    assert refusal("pairs.jsonl", packed(jsonl(TEXTS))) == (
        f"pairs.jsonl: a {kind} archive, which tandem cannot read. Unpack it, or compress it with gzip or zstd."
    )


@pytest.mark.parametrize("name", ["pairs.parquet.gz", "pairs.parquet"])
def test_an_archive_named_like_a_table_without_a_table_is_refused(refusal, name):
    assert refusal(name, gzip.compress(jsonl(TEXTS))).startswith(f"{name}: cannot be read as parquet (")


@pytest.mark.parametrize("name", ["pairs.jsonl.gz", "pairs.jsonl.zst"])
def test_a_plain_file_named_like_an_archive_is_read(values, name):
    assert values(name, jsonl(TEXTS)) == TEXTS


@pytest.mark.parametrize("written", [as_parquet, arrow_file, arrow_stream])
def test_tables_are_detected_from_their_content(values, written):
    assert values("pairs.jsonl", written(TEXTS)) == TEXTS


@pytest.mark.parametrize("packed", [gzip.compress, zstd])
def test_concatenated_archives_are_read_to_the_end(values, packed):
    assert values("pairs.jsonl", packed(jsonl(TEXTS)) + packed(jsonl(TEXTS))) == TEXTS * 2


@pytest.mark.parametrize("name", ["pairs.json", "pairs.parquet", "pairs.arrow", "stream.arrow"])
def test_elements_and_table_rows_are_numbered_from_one(read, tmp_path, name):
    rows = read(name, KINDS[name](TEXTS))
    assert [row.place for row in rows] == [f"{tmp_path}/{name}:1", f"{tmp_path}/{name}:2"]


def test_a_table_is_numbered_through_all_its_batches(read, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK_RECORDS", 2)
    rows = [{"a": number} for number in range(5)]
    found = read("pairs.parquet", as_parquet(rows, row_group_size=3))
    assert [(row.value["a"], row.line) for row in found] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]


# Archives


@pytest.mark.parametrize("cut", [1, 8, 9, 20])
def test_a_gzip_archive_that_was_cut_off_is_refused(refusal, cut):
    assert refusal("pairs.jsonl.gz", gzip.compress(jsonl(TEXTS))[:-cut]) == (
        "pairs.jsonl.gz: the archive is damaged or cut off (Compressed file ended before the end-of-stream marker was "
        "reached). Create or download it again."
    )


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_zstd_archive_that_was_cut_off_is_refused(refusal, cut):
    assert refusal("pairs.jsonl.zst", zstd(jsonl(TEXTS))[:-cut]) == (
        "pairs.jsonl.zst: the archive is damaged or cut off (Truncated compressed stream). Create or download it again."
    )


def test_an_archive_with_a_wrong_checksum_is_refused(refusal):
    content = bytearray(gzip.compress(jsonl(TEXTS)))
    content[-8:-4] = b"\0\0\0\0"
    assert refusal("pairs.jsonl", bytes(content)).startswith(
        "pairs.jsonl: the archive is damaged or cut off (CRC check failed "
    )


@pytest.mark.parametrize(("name", "packed"), [("pairs.json", zstd), ("pairs.csv", gzip.compress)])
def test_an_array_or_a_table_in_an_archive_that_was_cut_off_is_refused(refusal, name, packed):
    content = packed({"pairs.json": array, "pairs.csv": as_csv}[name](TEXTS))[:-9]
    assert refusal(name, content).startswith(f"{name}: the archive is damaged or cut off (")


# JSON arrays


def test_an_element_that_is_not_an_object_is_refused_by_its_number(read, tmp_path):
    good, number, nothing, after = read("pairs.json", b'[{"a": 1}, 3, null, {"a": 4}]')
    assert str(number) == f"{tmp_path}/pairs.json:2: a number, not a JSON object with a prompt and completions."
    assert str(nothing) == f"{tmp_path}/pairs.json:3: null, not a JSON object with a prompt and completions."
    assert (number.reason, good.value, after.line) == ("not an object", {"a": 1}, 4)


BAD_ARRAYS = {
    "cut off": (
        b'[{"a": 1},\n {"a": ',
        "pairs.json:2: column 8: malformed JSON: Expecting value. The file ends here: was it cut off?",
    ),
    "two arrays": (b"[]\n[]", "pairs.json:2: column 1: malformed JSON: Extra data."),
    "duplicate key": (
        b'[{"a": 1, "a": 2}]',
        "pairs.json: element 1: the key 'a' appears twice in one object. Remove one.",
    ),
    "not UTF-8": (b'[{"a": "\xff"}]', "pairs.json: not UTF-8 at byte 8. Save the file as UTF-8."),
    "deep": (
        b"[" * 100_000,
        "pairs.json: element 1: JSON nested over 100 levels deep. Flatten it or remove it.",
    ),
    "many digits": (
        b"[" + b"1" * 5000 + b"]",
        "pairs.json: element 1 has a number with too many digits. Shorten the number.",
    ),
}


@pytest.mark.parametrize(("content", "message"), BAD_ARRAYS.values(), ids=BAD_ARRAYS)
def test_a_malformed_array_is_refused(refusal, content, message):
    assert refusal("pairs.json", content) == message


def test_an_array_may_start_with_a_byte_order_mark_and_blanks(values):
    assert values("pairs.json", b'\xef\xbb\xbf\n [{"a": 1}]\n') == [{"a": 1}]
    assert values("pairs.json", b"[]") == []


def test_an_array_on_a_line_of_a_jsonl_file_is_refused(read):
    (error,) = read("pairs.jsonl", b'[{"a": 1}]\n')
    assert error.message == "a list, not a JSON object with a prompt and completions."


# csv


def test_a_csv_row_is_numbered_by_the_line_it_begins_on(read):
    rows = read("pairs.csv", b'prompt,chosen\r\nHi,"a\nb\r\nc"\r\n\r\nHo,"say ""d"""\r\n')
    assert [(row.value["chosen"], row.line) for row in rows] == [("a\nb\r\nc", 2), ('say "d"', 6)]


def test_a_byte_order_mark_is_not_part_of_the_first_column(values):
    assert values("pairs.csv", b"\xef\xbb\xbfprompt,chosen\nHi,yes\n") == [{"prompt": "Hi", "chosen": "yes"}]


def test_a_csv_row_with_another_number_of_fields_is_refused_and_the_next_one_read(read, tmp_path):
    fewer, more, after = read("pairs.csv", b"a,b,c\n1\n1,2,3,4,5\n1,2,3\n")
    assert str(fewer) == f"{tmp_path}/pairs.csv:2: 1 fields, but the header has 3."
    assert str(more) == f"{tmp_path}/pairs.csv:3: 5 fields, but the header has 3."
    assert {fewer.reason, more.reason} == {"wrong number of fields"}
    assert after.value == {"a": "1", "b": "2", "c": "3"}


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_the_header_of_a_joined_csv_file_is_refused_and_the_next_row_read(read, tmp_path, mark):
    file = mark + b"prompt,chosen,rejected\n"
    before, header, after = read("pairs.csv", file + b"Hi,yes,no\n" + file + b"prompt,yes,rejected\n")
    assert str(header) == f"{tmp_path}/pairs.csv:3: the header is repeated, as when files are joined. Remove this line."
    assert header.reason == "repeated header"
    assert [before.value["chosen"], after.value["chosen"]] == ["yes", "yes"]


def test_a_csv_row_that_is_not_utf8_is_refused_and_the_next_one_read(read, tmp_path):
    first, over_lines, after = read("pairs.csv", b'a,b\n1,\xff\n2,"x\n\xe9"\n3,4\n')
    assert str(first) == f"{tmp_path}/pairs.csv:2: not UTF-8 at byte 2 of line 2. Save the file as UTF-8."
    assert str(over_lines) == f"{tmp_path}/pairs.csv:3: not UTF-8 at byte 0 of line 4. Save the file as UTF-8."
    assert {first.reason, over_lines.reason} == {"not UTF-8"}
    assert after.value == {"a": "3", "b": "4"}


BAD_CSV = {
    "open quote": (
        b'a,b\n1,2\n3,"4\n5\n',
        "pairs.csv:3: malformed csv in the row that begins here: unexpected end of data.",
    ),
    "after a quote": (
        b'a,b\n1,"2"x\n',
        "pairs.csv:2: malformed csv in the row that begins here: ',' expected after '\"'.",
    ),
    "header": (b'a,"b\n', "pairs.csv:1: malformed csv in the row that begins here: unexpected end of data."),
    "not UTF-8": (b"a,\xff\n1,2\n", "pairs.csv:1: not UTF-8 at byte 2 of line 1. Save the file as UTF-8."),
    "duplicate column": (b"a,b,a\n1,2,3\n", "pairs.csv:1: the column 'a' appears twice in the header. Remove one."),
    "nameless columns": (b"a,,\n1,2,3\n", "pairs.csv:1: the column '' appears twice in the header. Remove one."),
}


@pytest.mark.parametrize(("content", "message"), BAD_CSV.values(), ids=BAD_CSV)
def test_a_malformed_csv_file_is_refused(refusal, content, message):
    assert refusal("pairs.csv", content) == message


def test_a_csv_value_may_be_longer_than_pythons_own_limit(values):
    assert values("pairs.csv", b"a\n" + b"x" * 200_000 + b"\n") == [{"a": "x" * 200_000}]


@pytest.mark.parametrize("content", [b"", b"prompt,chosen\n"])
def test_a_csv_file_without_rows_has_none(values, content):
    assert values("pairs.csv", content) == []


# Tables


@pytest.mark.parametrize("name", ["pairs.parquet", "pairs.arrow", "stream.arrow"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_table_that_was_cut_off_is_refused(refusal, name, share):
    content = KINDS[name](TEXTS * 10)
    kind = name.split(".")[1]
    assert refusal(name, content[: int(len(content) * share)]).startswith(f"{name}: cannot be read as {kind} (")


def test_a_cut_parquet_file_is_refused_in_one_sentence(refusal):
    assert refusal("pairs.parquet", as_parquet(TEXTS)[:-10]) == (
        "pairs.parquet: cannot be read as parquet (Parquet magic bytes not found in footer. "
        "Either the file is corrupted or this is not a parquet file). Create or download it again."
    )


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_file_that_is_only_named_like_a_table_is_refused(refusal, kind):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    assert refusal(f"pairs.{kind}", pointer).startswith(f"pairs.{kind}: cannot be read as {kind} (")


@pytest.mark.parametrize("written", [as_parquet, arrow_file, arrow_stream])
def test_a_text_in_a_table_that_is_not_utf8_is_refused(refusal, written):
    content = written([{"a": "xyzxyz"}]).replace(b"xyzxyz", b"xyz\xffyz")
    assert "cannot be read as " in refusal("pairs.table", content)


def test_offsets_beyond_the_texts_are_refused_and_not_followed(refusal):
    content = bytearray(arrow_file([{"a": ["x" * 300, "y"]}]))
    end = content.rindex((300).to_bytes(4, "little"), 0, content.index(b"xxx"))  # offsets [0, 300, 301], then the texts
    content[end : end + 4] = (2**30).to_bytes(4, "little")
    assert refusal("pairs.arrow", bytes(content)).startswith("pairs.arrow: cannot be read as arrow (In column 0: ")


@pytest.mark.parametrize(("name", "content"), [("a.json", '{\n "train": [\n'), ("a.jsonl", '{\n  "prompt": "a",\n')])
def test_an_object_that_spans_several_lines_is_refused(refusal, name, content):
    assert refusal(name, content.encode()) == (
        f"{name}: a JSON object that spans several lines is not a row. Write a .json file with a list of rows, [...], "
        "or a .jsonl file with one row per line."
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.csv",
            "prompt;chosen;rejected\n",
            "a.csv:1: the column names are separated by semicolons. Save the file with commas.",
        ),
        (
            "a.csv",
            "prompt\tchosen\n",
            "a.csv:1: the column names are separated by tabs. Save the file with commas.",
        ),
        (
            "a.csv",
            '\ufeff"prompt";"chosen";"rejected"\n"a";"b";"c"\n',
            "a.csv:1: the column names are separated by semicolons. Save the file with commas.",
        ),
        (
            "a.csv",
            "prompt|chosen|rejected\na|b, c|d\n",
            "a.csv:1: the column names are separated by vertical bars. Save the file with commas.",
        ),
        (
            "a.csv",
            "prompt,chosen,rejected\ra,b,c\r",
            "a.csv:1: lines end in a carriage return only (old Mac style). Save the file with line feeds (LF or CRLF).",
        ),
        (
            "a.csv",
            '{"prompt": "a", "chosen": "b"}\n',
            "a.csv:1: a JSON object, not column names. Rename a file with one JSON object per line to .jsonl.",
        ),
        (
            "a.tsv",
            "prompt\tchosen\n",
            "a.tsv: a tab-separated table, which tandem cannot read. Save it as .csv with commas.",
        ),
        (
            "a.json",
            '[{"prompt": "a"}, {"prompt": ',
            "a.json:1: column 30: malformed JSON: Expecting value. The file ends here: was it cut off?",
        ),
    ],
)
def test_files_that_do_not_match_their_name_or_are_cut_off_are_refused(refusal, name, content, message):
    assert refusal(name, content.encode()) == message


def zipped(name):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(name, "<x/>")
    return content.getvalue()


@pytest.mark.parametrize("name", ["pairs.csv", "pairs.xlsx", "pairs.jsonl"])
@pytest.mark.parametrize(
    "content",
    [zipped("[Content_Types].xml"), zipped("xl/workbook.xml"), b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600)],
)
def test_a_spreadsheet_is_refused_by_its_content(refusal, name, content):
    assert refusal(name, content) == (
        f"{name}: the file is a spreadsheet (Excel or OpenDocument), which tandem cannot read. Save the sheet as CSV "
        "in UTF-8, with commas."
    )


def test_a_zip_archive_that_is_not_a_spreadsheet_is_refused_as_an_archive(refusal):
    message = "pairs.csv: a zip archive, which tandem cannot read. Unpack it, or compress it with gzip or zstd."
    assert refusal("pairs.csv", zipped("pairs.csv")) == message
