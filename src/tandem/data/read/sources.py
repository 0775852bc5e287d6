"""A file in; Chunks of unparsed records out, and of each chunk its SourceRows, or RowErrors that name file, line and column.

JSONL, a JSON array, parquet, arrow and csv; each also as .gz and .zst, told by their content. A chunk is small and
plain, so that it can be parsed, rendered and tokenised in another process.
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
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from tandem.config.sections.datasets import MAX_EXPANSION
from tandem.data.read.csv_cells import is_python_list, json_cell, refuse_first_line, refuse_spreadsheet
from tandem.data.read.json_array import MAX_BYTES, NESTED, DuplicateKey, decode, elements
from tandem.data.read.limits import COLUMNS, Expansion
from tandem.data.read.tables import kind_of_table, one_line, stream_values, table_parts, too_many_columns
from tandem.errors import DataError, full_disk

# A chunk ends with the record that reaches one of these. They decide the layout of a store, whoever works on it.
CHUNK_RECORDS = 512
CHUNK_BYTES = 128 * 1024
NUMPY = b"\x93NUMPY"
BOM = b"\xef\xbb\xbf"
BUFFER_BYTES = 128 * 1024  # unpacked together
# Known by how they start, so that they are not read as lines.
OTHER_ARCHIVES = {"zip": b"PK\x03\x04", "bzip2": b"BZh", "xz": b"\xfd7zXZ\x00", "7z": b"7z\xbc\xaf\x27\x1c"}
# Names under which scores stand beside two completions.
SCORE_KEYS = (
    ("chosen_reward", "rejected_reward"),
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
)
ANY_SCORE = frozenset(chain.from_iterable(SCORE_KEYS))
# Columns of csv files, whose values are texts, that hold numbers.
CSV_NUMBERS = (*chain.from_iterable(SCORE_KEYS), "overall_preference")


class RowError(Exception):
    """One row that cannot be used. `bad` rows are malformed; `filtered` ones are well-formed but teach nothing."""

    def __init__(self, place: str, reason: str, message: str, kind: Literal["bad", "filtered"] = "bad"):
        super().__init__(f"{place}: {message}")
        self.place, self.reason, self.message, self.kind = place, reason, message, kind

    def __reduce__(self) -> Any:  # it travels between processes
        return RowError, (self.place, self.reason, self.message, self.kind)


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A parsed record and where it stands."""

    value: dict[str, Any]
    file: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of records of one file: lines of JSON, parsed values, or rows of a table, numbered as in the file."""

    file: str
    numbers: tuple[int, ...]
    records: Any  # a tuple, or a table as an Arrow stream in bytes
    kind: Literal["lines", "values", "table"]
    done: float  # share of the file read so far
    has_bom: bool = False


def read_rows(path: Path) -> Iterator[SourceRow | RowError]:
    """Every record of a file, in order: a row, or why it is none."""
    return (row for chunk in read_chunks(path) for row in rows_of(chunk))


def read_chunks(
    path: Path, name: str | None = None, at_once: int | None = None, max_expansion: float = MAX_EXPANSION
) -> Iterator[Chunk]:
    """A file's records, a few hundred at a time; its rows are known by `name`. Its kind is told by its content.

    max_expansion: how many times its size it may expand to.
    """
    name, at_once = name or str(path), at_once or CHUNK_RECORDS
    with path.open("rb") as raw:
        size = max(1, path.stat().st_size)
        file = _uncompressed(raw, Expansion(path, size, max_expansion))

        def share() -> float:
            return raw.tell() / size

        try:
            opening = file.peek(512)
            if opening[257:262] == b"ustar":
                raise DataError(f"{path}: a tar archive, which is not read. Unpack it.")
            if opening.startswith(NUMPY):
                raise DataError(
                    f"{path}: a NumPy file, not rows of text. NeMo Aligner's packed files become a set by: tandem prepare "
                    f"--from-nemo {shlex.quote(str(path))} --output-dir DIR."
                )
            if opening.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise DataError(f"{path}: text in UTF-16, which is not read. Save it as UTF-8.")
            if (table := kind_of_table(opening, path)) is not None:
                unpacked = nullcontext(path) if file is raw else _unpacked(file)
                with unpacked as place:
                    yield from _table_chunks(place, table, name, Expansion(path, size, max_expansion), at_once)
                return
            starts = opening.removeprefix(BOM).lstrip()[:1]
            suffixes = path.name.lower().split(".")[1:]
            if "tsv" in suffixes:
                raise DataError(f"{path}: a table with tabs, which is not read. Write it as .csv, with commas.")
            if "csv" in suffixes:
                yield from _chunks(_csv_values(file, path), "values", name, share, opening, at_once)
            elif "json" in suffixes and starts == b"[":
                yield from _chunks(elements(file, path), "values", name, share, opening, at_once)
            elif _is_indented(opening):
                raise DataError(
                    f"{path}: an object over several lines, which is no row. A .json file holds a list of rows, [...]; any "
                    "other has one row on a line."
                )
            else:
                lines = ((number, line, len(line)) for number, line in _numbered(file, path) if line.strip())
                yield from _chunks(lines, "lines", name, share, opening, at_once)
        except (EOFError, gzip.BadGzipFile, zlib.error, pa.ArrowInvalid, OSError) as error:
            if full_disk(error):  # where a packed table was unpacked
                raise
            raise DataError(
                f"{path}: the archive is damaged or cut off ({one_line(error)}). Write or fetch it again."
            ) from None


def rows_of(chunk: Chunk) -> Iterator[SourceRow | RowError]:
    """Parse the records of a chunk."""
    values = chunk.records
    if chunk.kind == "lines":
        yield from (_parse(line, chunk.file, n) for n, line in zip(chunk.numbers, values, strict=True))
        return
    if isinstance(values, bytes):
        values = stream_values(values)
    for number, value in zip(chunk.numbers, values, strict=True):
        yield value if isinstance(value, RowError) else _as_row(value, chunk.file, number)


def _chunks(
    records: Iterator[tuple[int, Any, int]],
    kind: Literal["lines", "values"],
    name: str,
    share: Callable[[], float],
    opening: bytes,
    at_once: int,
) -> Iterator[Chunk]:
    """Records (number, value, bytes) gathered into chunks."""
    numbers: list[int] = []
    values: list[Any] = []
    num_bytes, has_bom = 0, opening.startswith(BOM)
    for number, value, size in records:
        numbers.append(number)
        values.append(value)
        num_bytes += size
        if len(values) == at_once or num_bytes >= CHUNK_BYTES:
            yield Chunk(name, tuple(numbers), tuple(values), kind, share(), has_bom)
            numbers, values, num_bytes, has_bom = [], [], 0, False
    if values or has_bom:
        yield Chunk(name, tuple(numbers), tuple(values), kind, 1.0, has_bom)


def _is_indented(opening: bytes) -> bool:
    """Whether a JSON object opens on a line of its own and goes on in the next."""
    first, _, rest = opening.removeprefix(BOM).lstrip().partition(b"\n")
    return first.strip() == b"{" and rest.lstrip()[:1] == b'"'


def _uncompressed(raw: io.BufferedReader, expansion: Expansion) -> io.BufferedReader:
    """The content of a file, unpacked if it starts like a gzip or zstd archive, whatever its name."""
    magic = raw.peek(8)[:8]
    refuse_spreadsheet(raw)
    if magic.startswith(b"\x1f\x8b"):
        return io.BufferedReader(_Counted(gzip.GzipFile(fileobj=raw), expansion), BUFFER_BYTES)
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        unpacked = pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd")
        return io.BufferedReader(_Counted(unpacked, expansion), BUFFER_BYTES)
    for kind, start in OTHER_ARCHIVES.items():
        if magic.startswith(start):
            raise DataError(
                f"{expansion.path}: a {kind} archive, which is not read. Unpack it, or pack it by gzip or zstd."
            )
    return raw


class _Counted(io.RawIOBase):
    """What an archive holds, counted as it is unpacked."""

    def __init__(self, file: gzip.GzipFile | pa.NativeFile, expansion: Expansion):
        self._file, self._expansion = file, expansion

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        num_bytes = self._file.readinto(buffer)
        self._expansion.add(num_bytes)
        return num_bytes


@contextmanager
def _unpacked(file: io.BufferedReader) -> Iterator[Path]:
    """A file with what an archive holds: tables are read here and there."""
    with tempfile.NamedTemporaryFile(prefix="tandem-") as unpacked:
        shutil.copyfileobj(file, unpacked)
        unpacked.flush()
        yield Path(unpacked.name)


def _numbered(file: io.BufferedReader, path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(MAX_BYTES + 1):
        number += 1
        if len(line) > MAX_BYTES:
            raise DataError(f"{path}:{number}: a line over 64 MB. JSONL has one preference on a line.")
        yield number, line.removeprefix(BOM) if number == 1 else line


def _csv_values(file: io.BufferedReader, path: Path) -> Iterator[tuple[int, Any, int]]:
    """The rows of a table with a header line, values as texts; a row is numbered by the line it begins on."""
    csv.field_size_limit(MAX_BYTES)  # Python's own limit, 128 kB, is less than some answers
    damaged: dict[int, str] = {}  # lines that are not UTF-8, until their row has been read
    reader = csv.reader(_decoded(file, path, damaged), strict=True)
    ended = 0  # the last line of the row before
    try:
        names = next(reader, [])
        _check_header(names, path)
        ended = reader.line_num
        for texts in reader:
            ended = reader.line_num
            if not texts:
                continue
            number = reader.line_num - sum(text.count("\n") for text in texts)
            if damaged:
                message = "; ".join(damaged.values())
                damaged.clear()
                yield number, RowError(f"{path}:{number}", "not UTF-8", f"{message}. Save the file as UTF-8."), 0
                continue
            if [texts[0].removeprefix("\ufeff"), *texts[1:]] == names:
                message = "the header again, as where files were joined. Remove this line."
                yield number, RowError(f"{path}:{number}", "repeated header", message), 0
                continue
            if len(texts) != len(names):
                message = f"{len(texts)} fields where the header has {len(names)}."
                yield number, RowError(f"{path}:{number}", "wrong number of fields", message), 0
                continue
            value: dict[str, Any] = dict(zip(names, texts, strict=True))
            if (column := next((name for name, text in value.items() if is_python_list(text)), None)) is not None:
                message = (
                    f"{column}: messages as Python prints them, not as JSON. Write the column by json.dumps, or the table as "
                    ".parquet."
                )
                yield number, RowError(f"{path}:{number}", "not JSON", message), 0
            else:
                yield number, _with_numbers(_with_messages(value)), sum(map(len, texts))
    except csv.Error as error:
        raise DataError(f"{path}:{ended + 1}: malformed csv in the row from here: {error}.") from None


def _check_header(names: list[str], path: Path) -> None:
    if names and (other := _no_header(names)):
        raise DataError(f"{path}:1: {other}")
    if len(names) > COLUMNS:
        raise too_many_columns(f"{path}:1", len(names))
    if len(set(names)) < len(names):
        seen: set[str] = set()
        twice = next(name for name in names if name in seen or seen.add(name))
        raise DataError(f"{path}:1: the column {twice!r} stands twice in the header. Remove one.")


def _no_header(names: list[str]) -> str | None:
    """What the first line of a csv file is, if it is not the names of columns between commas."""
    if names[0].lstrip().startswith("{"):
        return "an object, not the names of columns. A file with a JSON object on every line is named .jsonl."
    return None


def _with_messages(value: dict[str, Any]) -> dict[str, Any]:
    """Messages and lists, which a table of texts can hold as JSON alone."""
    for name, text in value.items():
        if text and (parsed := json_cell(name, text)) is not None:
            value[name] = parsed
    return value


def _with_numbers(value: dict[str, Any]) -> dict[str, Any]:
    """The known columns of numbers as numbers, where they are; an empty one is none."""
    for name in CSV_NUMBERS:
        if (text := value.get(name)) is not None:
            with suppress(ValueError, RecursionError, DuplicateKey):  # else the format refuses it by name, as a text
                value[name] = decode(text) if text.strip() else None
    return value


def _decoded(file: io.BufferedReader, path: Path, damaged: dict[int, str]) -> Iterator[str]:
    """The lines as text; one that is not UTF-8 is noted in `damaged`, unless it is the header."""
    for number, line in _numbered(file, path):
        try:
            text = line.decode("utf-8")
            if number == 1:
                refuse_first_line(text, path)
            yield text
        except UnicodeDecodeError as error:
            damaged[number] = f"not UTF-8 at byte {error.start} of line {number}"
            if number == 1:
                raise DataError(f"{path}:1: {damaged[1]}. Save the file as UTF-8.") from None
            yield line.decode("utf-8", errors="replace")


def _table_chunks(place: Path, kind: str, name: str, expansion: Expansion, at_once: int) -> Iterator[Chunk]:
    """The rows of the table at a place, numbered from 1."""
    number = 1
    for stream, num_rows, done in table_parts(place, kind, expansion, batch_size=CHUNK_RECORDS, at_once=at_once):
        yield Chunk(name, tuple(range(number, number + num_rows)), stream, "table", done)
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
        cut = "" if line.endswith(b"\n") else " The line has no end: was the file cut off?"
        return RowError(place, "malformed JSON", f"column {error.colno}: malformed JSON: {error.msg}.{cut}")
    except ValueError:  # Python's own limit on the digits of an integer
        return RowError(place, "malformed JSON", "a number with too many digits to be read.")
    except DuplicateKey as error:
        return RowError(place, "duplicate key", f"the key {error.args[0]!r} stands twice in one object. Remove one.")
    except RecursionError:
        return RowError(place, "nested too deeply", f"{NESTED}, which no preference needs.")
    return _as_row(value, file, number)


def _as_row(value: Any, file: str, number: int) -> SourceRow | RowError:
    if not isinstance(value, dict):
        message = f"{kind_of(value)}, not a JSON object with a prompt and completions."
        return RowError(f"{file}:{number}", "not an object", message)
    return SourceRow(value, file, number)


def kind_of(value: Any) -> str:
    """What a JSON value is, in words."""
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
