"""Reads a data file in chunks of records, and parses the records of a chunk into SourceRows or RowErrors.

The file is JSONL, a JSON array, parquet, arrow or csv, and may be compressed as .gz or .zst. Chunks are small and can be
pickled, so that other processes can parse, render and tokenise them.
"""

import codecs
import csv
import gzip
import io
import json
import shlex
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from tandem.config.sections.datasets import MAX_EXPANSION
from tandem.data.read.csv_cells import check_first_line, is_python_list, parse_json_cell, refuse_spreadsheet
from tandem.data.read.json_array import NESTED_TOO_DEEPLY, DuplicateKey, decode, elements
from tandem.data.read.limits import MAX_COLUMNS, MAX_RECORD_BYTES, Expansion
from tandem.data.read.tables import kind_of_table, stream_values, table_parts, too_many_columns
from tandem.errors import DataError, full_disk, one_line

# A chunk ends when it has reached one of these sizes. They determine the layout of a store; the number of workers does not.
CHUNK_RECORDS = 512
CHUNK_BYTES = 128 * 1024
NUMPY_MAGIC = b"\x93NUMPY"
BOM = b"\xef\xbb\xbf"
BUFFER_BYTES = 128 * 1024  # decompressed at a time
# First bytes of archives that are refused. Otherwise they would be read as lines of text.
OTHER_ARCHIVES = {"zip": b"PK\x03\x04", "bzip2": b"BZh", "xz": b"\xfd7zXZ\x00", "7z": b"7z\xbc\xaf\x27\x1c"}
# Keys for the scores of the chosen and the rejected completion.
PAIR_SCORE_KEYS = (
    ("chosen_reward", "rejected_reward"),
    *(("score_chosen", "score_rejected"), ("chosen_score", "rejected_score")),
    *(("chosen_rating", "rejected_rating"), ("chosen-rating", "rejected-rating"), ("rating_chosen", "rating_rejected")),
    ("chosen_avg_rating", "rejected_avg_rating"),
)
ANY_SCORE = frozenset(chain.from_iterable(PAIR_SCORE_KEYS))
# Columns of csv files that are parsed as numbers.
CSV_NUMBERS = (*ANY_SCORE, "overall_preference", "preference_strength", "choice", "score_0", "score_1")


class RowError(Exception):
    """Raised if a row cannot be used. `kind`: "bad" if it is malformed, "filtered" if it has no preference to learn."""

    def __init__(self, place: str, reason: str, message: str, kind: Literal["bad", "filtered"] = "bad"):
        super().__init__(f"{place}: {message}")
        self.place, self.reason, self.message, self.kind = place, reason, message, kind

    def __reduce__(self) -> Any:  # it is sent between processes
        return RowError, (self.place, self.reason, self.message, self.kind)


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A parsed record, its file, and its position in the file: the number of the line, table row or array element."""

    value: dict[str, Any]
    file: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive records of one file, and their numbers in the file. Records are lines of JSON, parsed values or table rows."""

    file: str
    numbers: tuple[int, ...]
    records: Any  # a tuple, or a table as an Arrow stream in bytes; records beyond the numbers are not read
    kind: Literal["lines", "values", "table"]
    done: float  # fraction of the file read so far
    has_bom: bool = False  # the file starts with a byte-order mark, and this is its first chunk


def read_rows(path: Path) -> Iterator[SourceRow | RowError]:
    """Yield a SourceRow or a RowError for every record of a file, in order."""
    return (row for chunk in read_chunks(path) for row in rows_of(chunk))


def read_chunks(
    path: Path, name: str | None = None, max_records: int | None = None, max_expansion: float = MAX_EXPANSION
) -> Iterator[Chunk]:
    """Yield the records of a file, a few hundred at a time. The kind of file is detected from its content and its name.

    `name`: the file's name in messages. `max_records`: the maximum number of records in a chunk. `max_expansion`: the
    maximum size of the decompressed content, as a multiple of the file size.
    """
    name, max_records = name or str(path), max_records or CHUNK_RECORDS
    with path.open("rb") as raw:
        size = max(1, path.stat().st_size)
        file = _uncompressed(raw, Expansion(path, size, max_expansion))
        try:
            opening = file.peek(512)
            _refuse_other_kinds(opening, path)
            if (table := kind_of_table(opening, path)) is not None:
                decompressed = nullcontext(path) if file is raw else _decompressed_file(file)
                with decompressed as place:
                    expansion = Expansion(path, size, max_expansion)
                    yield from _table_chunks(place, table, name=name, expansion=expansion, max_records=max_records)
                return
            grouped = partial(
                _chunks,
                name=name,
                fraction_read=lambda: raw.tell() / size,
                has_bom=opening.startswith(BOM),
                max_records=max_records,
            )
            starts = opening.removeprefix(BOM).lstrip()[:1]
            suffixes = path.name.lower().split(".")[1:]
            if "tsv" in suffixes:
                raise DataError(
                    f"{path}: a tab-separated table, which tandem cannot read. Save it as .csv with commas."
                )
            if "csv" in suffixes:
                yield from grouped(_csv_values(file, path), "values")
            elif "json" in suffixes and starts == b"[":
                yield from grouped(elements(file, path), "values")
            elif _is_indented(opening):
                raise DataError(
                    f"{path}: a JSON object that spans several lines is not a row. Write a .json file with a list of rows, "
                    "[...], or a .jsonl file with one row per line."
                )
            else:
                lines = ((number, line, len(line)) for number, line in _numbered_lines(file, path) if line.strip())
                yield from grouped(lines, "lines")
        except (EOFError, gzip.BadGzipFile, zlib.error, pa.ArrowInvalid, OSError) as error:
            if full_disk(error):  # while decompressing a table
                raise
            raise DataError(
                f"{path}: the archive is damaged or cut off ({one_line(error)}). Create or download it again."
            ) from None


def rows_of(chunk: Chunk) -> Iterator[SourceRow | RowError]:
    """Yield each record of a chunk as a SourceRow, or as a RowError if it cannot be parsed."""
    values = chunk.records
    if chunk.kind == "lines":
        yield from (_parse(line, chunk.file, n) for n, line in zip(chunk.numbers, values, strict=False))
        return
    if isinstance(values, bytes):
        values = stream_values(values)
    for number, value in zip(chunk.numbers, values, strict=False):
        yield value if isinstance(value, RowError) else _as_row(value, chunk.file, number)


def _chunks(
    records: Iterator[tuple[int, Any, int]],
    kind: Literal["lines", "values"],
    *,
    name: str,
    fraction_read: Callable[[], float],
    has_bom: bool,
    max_records: int,
) -> Iterator[Chunk]:
    """Group records into chunks. Each record is a tuple (number, value, size in bytes)."""
    numbers: list[int] = []
    values: list[Any] = []
    num_bytes = 0

    def chunk(done: float) -> Chunk:
        return Chunk(file=name, numbers=tuple(numbers), records=tuple(values), kind=kind, done=done, has_bom=has_bom)

    for number, value, size in records:
        numbers.append(number)
        values.append(value)
        num_bytes += size
        if len(values) == max_records or num_bytes >= CHUNK_BYTES:
            yield chunk(fraction_read())
            numbers, values, num_bytes, has_bom = [], [], 0, False
    if values or has_bom:
        yield chunk(1.0)


def _refuse_other_kinds(opening: bytes, path: Path) -> None:
    """Raise a DataError if the first bytes show a tar archive, a NumPy file, or text in UTF-16."""
    if opening[257:262] == b"ustar":
        raise DataError(f"{path}: a tar archive, which tandem cannot read. Unpack it.")
    if opening.startswith(NUMPY_MAGIC):
        raise DataError(
            f"{path}: a NumPy file, not rows of text. To import packed files of NeMo Aligner, run: tandem prepare "
            f"--from-nemo {shlex.quote(str(path))} --output-dir DIR."
        )
    if opening.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{path}: the text is UTF-16, which tandem cannot read. Save it as UTF-8.")


def _is_indented(opening: bytes) -> bool:
    """Whether the file starts with a JSON object that spans several lines."""
    first, _, rest = opening.removeprefix(BOM).lstrip().partition(b"\n")
    return first.strip() == b"{" and rest.lstrip()[:1] == b'"'


def _uncompressed(raw: io.BufferedReader, expansion: Expansion) -> io.BufferedReader:
    """Return a reader of the file's content. If the first bytes are those of gzip or zstd, the content is decompressed."""
    magic = raw.peek(8)[:8]
    refuse_spreadsheet(raw)
    if magic.startswith(b"\x1f\x8b"):
        return io.BufferedReader(_CountingReader(gzip.GzipFile(fileobj=raw), expansion), BUFFER_BYTES)
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        decompressed = pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd")
        return io.BufferedReader(_CountingReader(decompressed, expansion), BUFFER_BYTES)
    for kind, start in OTHER_ARCHIVES.items():
        if magic.startswith(start):
            raise DataError(
                f"{expansion.path}: a {kind} archive, which tandem cannot read. Unpack it, or compress it with gzip or zstd."
            )
    return raw


class _CountingReader(io.RawIOBase):
    """Reads decompressed content and counts its bytes, so that its size can be limited."""

    def __init__(self, file: gzip.GzipFile | pa.NativeFile, expansion: Expansion):
        self._file, self._expansion = file, expansion

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        num_bytes = self._file.readinto(buffer)
        self._expansion.add(num_bytes)
        return num_bytes


@contextmanager
def _decompressed_file(file: io.BufferedReader) -> Iterator[Path]:
    """Yield a temporary file with the decompressed content. Reading a table needs seeking, which streams do not support."""
    with tempfile.NamedTemporaryFile(prefix="tandem-") as decompressed:
        shutil.copyfileobj(file, decompressed)
        decompressed.flush()
        yield Path(decompressed.name)


def _numbered_lines(file: io.BufferedReader, path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(MAX_RECORD_BYTES + 1):
        number += 1
        if len(line) > MAX_RECORD_BYTES:
            raise DataError(f"{path}:{number}: a line over 64 MB. Write one preference per line.")
        yield number, line.removeprefix(BOM) if number == 1 else line


def _csv_values(file: io.BufferedReader, path: Path) -> Iterator[tuple[int, Any, int]]:
    """Yield a tuple for each row of a csv file with a header: (number of its first line, row or RowError, size in characters)."""
    csv.field_size_limit(MAX_RECORD_BYTES)  # Python's default, 128 kB, is too small for some completions
    damaged: dict[int, str] = {}  # lines of the current row that are not UTF-8
    reader = csv.reader(_decode_lines(file, path, damaged), strict=True)
    last_line = 0  # the last line of the previous row
    try:
        names = next(reader, [])
        _check_header(names, path)
        last_line = reader.line_num
        for texts in reader:
            last_line = reader.line_num
            if not texts:
                continue
            number = reader.line_num - sum(text.count("\n") for text in texts)
            if damaged:
                message = "; ".join(damaged.values())
                damaged.clear()
                yield number, RowError(f"{path}:{number}", "not UTF-8", f"{message}. Save the file as UTF-8."), 0
                continue
            if [texts[0].removeprefix("\ufeff"), *texts[1:]] == names:
                message = "the header is repeated, as when files are joined. Remove this line."
                yield number, RowError(f"{path}:{number}", "repeated header", message), 0
                continue
            if len(texts) != len(names):
                message = f"{len(texts)} fields, but the header has {len(names)}."
                yield number, RowError(f"{path}:{number}", "wrong number of fields", message), 0
                continue
            value: dict[str, Any] = dict(zip(names, texts, strict=True))
            if (column := next((name for name, text in value.items() if is_python_list(text)), None)) is not None:
                message = (
                    f"{column}: messages in Python syntax, not JSON. Write the column with json.dumps, or save the table as "
                    ".parquet."
                )
                yield number, RowError(f"{path}:{number}", "not JSON", message), 0
            else:
                yield number, _parse_numbers(_parse_lists(value)), sum(map(len, texts))
    except csv.Error as error:
        raise DataError(f"{path}:{last_line + 1}: malformed csv in the row that begins here: {error}.") from None


def _check_header(names: list[str], path: Path) -> None:
    if names and (other := _describe_non_header(names)):
        raise DataError(f"{path}:1: {other}")
    if len(names) > MAX_COLUMNS:
        raise too_many_columns(f"{path}:1", len(names))
    if len(set(names)) < len(names):
        seen: set[str] = set()
        twice = next(name for name in names if name in seen or seen.add(name))
        raise DataError(f"{path}:1: the column {twice!r} appears twice in the header. Remove one.")


def _describe_non_header(names: list[str]) -> str | None:
    """If the first line of a csv file is not a header, return a text that says what it is. Otherwise return None."""
    if names[0].lstrip().startswith("{"):
        return "a JSON object, not column names. Rename a file with one JSON object per line to .jsonl."
    return None


def _parse_lists(value: dict[str, Any]) -> dict[str, Any]:
    """Parse the JSON in cells that hold messages or lists."""
    for name, text in value.items():
        if text and (parsed := parse_json_cell(name, text)) is not None:
            value[name] = parsed
    return value


def _parse_numbers(value: dict[str, Any]) -> dict[str, Any]:
    """Parse the cells of the known numeric columns. An empty cell becomes None."""
    for name in CSV_NUMBERS:
        if (text := value.get(name)) is not None:
            with suppress(
                ValueError, RecursionError, DuplicateKey
            ):  # not a number: stays a text, which is refused later
                value[name] = decode(text) if text.strip() else None
    return value


def _decode_lines(file: io.BufferedReader, path: Path, damaged: dict[int, str]) -> Iterator[str]:
    """Yield the lines of a csv file as text. If a line is not UTF-8, add it to `damaged`; for the header, raise a DataError."""
    for number, line in _numbered_lines(file, path):
        try:
            text = line.decode("utf-8")
            if number == 1:
                check_first_line(text, path)
            yield text
        except UnicodeDecodeError as error:
            damaged[number] = f"not UTF-8 at byte {error.start} of line {number}"
            if number == 1:
                raise DataError(f"{path}:1: {damaged[1]}. Save the file as UTF-8.") from None
            yield line.decode("utf-8", errors="replace")


def _table_chunks(place: Path, kind: str, *, name: str, expansion: Expansion, max_records: int) -> Iterator[Chunk]:
    """Yield the rows of a table in chunks. Rows are numbered from 1. `place`: the file to read, which may be a temporary file."""
    number = 1
    for stream, num_rows, done in table_parts(
        place, kind, expansion, batch_size=CHUNK_RECORDS, max_records=max_records
    ):
        numbers = tuple(range(number, number + num_rows))
        yield Chunk(file=name, numbers=numbers, records=stream, kind="table", done=done)
        number += num_rows


def _parse(line: bytes, file: str, number: int) -> SourceRow | RowError:
    place = f"{file}:{number}"
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return RowError(place, "not UTF-8", f"not UTF-8 at byte {error.start} of the line. Save the file as UTF-8.")
    try:
        value = decode(text.rstrip("\r\n"))
    except json.JSONDecodeError as error:
        cut = "" if line.endswith(b"\n") else " The line has no line end: was the file cut off?"
        return RowError(place, "malformed JSON", f"column {error.colno}: malformed JSON: {error.msg}.{cut}")
    except ValueError:  # Python limits the number of digits of an integer
        return RowError(place, "malformed JSON", "a number with too many digits. Shorten it.")
    except DuplicateKey as error:
        return RowError(place, "duplicate key", f"the key {error.args[0]!r} appears twice in one object. Remove one.")
    except RecursionError:
        return RowError(place, "nested too deeply", f"{NESTED_TOO_DEEPLY}. Flatten it or remove it.")
    return _as_row(value, file, number)


def _as_row(value: Any, file: str, number: int) -> SourceRow | RowError:
    if not isinstance(value, dict):
        message = f"{kind_of(value)}, not a JSON object with a prompt and completions."
        return RowError(f"{file}:{number}", "not an object", message)
    return SourceRow(value, file, number)


def kind_of(value: Any) -> str:
    """Return the type of a JSON value in words, for messages."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
        type(None): "null",
    }
    return names.get(type(value), f"a value of type {type(value).__name__}")
