"""Files in; SourceRows out, each with its place, or a RowError that names file, line and column.

JSONL, a JSON array, parquet, arrow and csv; text files also as .gz and .zst, told by their content.
"""

import csv
import glob
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from tandem.errors import DataError

MAX_LINE_BYTES = 64 * 1024 * 1024
TABLE_BATCH = 1024
BOM = b"\xef\xbb\xbf"


class RowError(Exception):
    """One row that cannot be used. `bad` rows are malformed; `filtered` ones are well-formed but teach nothing."""

    def __init__(self, place: str, reason: str, message: str, kind: Literal["bad", "filtered"] = "bad"):
        super().__init__(f"{place}: {message}")
        self.place, self.reason, self.message, self.kind = place, reason, message, kind


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A parsed record and where it stands."""

    value: dict[str, Any]
    file: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def find_files(data_path: str) -> list[Path]:
    """The files that a path names: one file, or all that a pattern with * ? [ ] matches, in order of their names."""
    path = Path(data_path)
    if path.is_file():
        return [path]
    if any(sign in data_path for sign in "*?["):
        files = sorted(name for name in map(Path, glob.glob(data_path, recursive=True)) if name.is_file())  # noqa: PTH207
        if not files:
            raise DataError(f"{data_path}: no file matches this pattern.")
        return files
    if path.is_dir():
        raise DataError(f"{data_path}: a directory. Name its files, for example by the pattern {path}/*.jsonl.")
    raise DataError(f"{data_path}: no such file. Check data.train.data_path and the validation paths.")


def read_rows(path: Path) -> Iterator[SourceRow | RowError]:
    """Every record of a file, in order: a row, or why it is none. The kind of file is told by its content."""
    kind = _kind_of_table(path)
    if kind is not None:
        yield from _table_rows(path, kind)
        return
    with _uncompressed(path) as file:
        try:
            starts = file.peek(64).removeprefix(BOM).lstrip()[:1]
            suffixes = path.name.lower().split(".")[1:]
            if "csv" in suffixes:
                yield from _csv_rows(file, path)
            elif "json" in suffixes and starts == b"[":
                yield from _array_rows(file, path)
            else:
                yield from _lines(file, path)
        except (EOFError, gzip.BadGzipFile, zlib.error, pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{path}: the archive is damaged or cut off ({_one_line(error)}).") from None


def _uncompressed(path: Path) -> io.BufferedReader:
    """The content of a file, unpacked if it starts like a gzip or zstd archive, whatever its name."""
    with path.open("rb") as file:
        magic = file.read(4)
    if magic[:2] == b"\x1f\x8b":
        return io.BufferedReader(gzip.open(path, "rb"))  # type: ignore[arg-type]
    if magic == b"\x28\xb5\x2f\xfd":
        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"))
    return path.open("rb")


def _lines(file: io.BufferedReader, path: Path) -> Iterator[SourceRow | RowError]:
    for number, line in _numbered(file, path):
        if line.strip():
            yield _parse(line, path, number)


def _numbered(file: io.BufferedReader, path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise DataError(f"{path}:{number}: a line over 64 MB. JSONL has one preference on a line.")
        yield number, line.removeprefix(BOM) if number == 1 else line


def _csv_rows(file: io.BufferedReader, path: Path) -> Iterator[SourceRow | RowError]:
    """The rows of a table with a header line, all values texts; a row is numbered by the line it ends on."""
    csv.field_size_limit(MAX_LINE_BYTES)  # Python's own limit, 128 kB, is less than some answers
    reader = csv.DictReader(_decoded(file, path), strict=True)
    try:
        names = list(reader.fieldnames or [])
        twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
        if twice is not None:
            raise DataError(f"{path}:1: the column {twice!r} stands twice in the header. Remove one.")
        for value in reader:
            surplus = value.pop(None, [])
            num_fields = sum(field is not None for field in value.values()) + len(surplus)
            if num_fields != len(names):
                message = f"{num_fields} fields where the header has {len(names)}."
                yield RowError(f"{path}:{reader.line_num}", "wrong number of fields", message)
            else:
                yield SourceRow(value, str(path), reader.line_num)
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num + 1}: malformed csv in the row from here: {error}.") from None


def _decoded(file: io.BufferedReader, path: Path) -> Iterator[str]:
    for number, line in _numbered(file, path):
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            place = f"{path}:{number}"
            raise DataError(f"{place}: not UTF-8 at byte {error.start} of the line. Save the file as UTF-8.") from None


def _array_rows(file: io.BufferedReader, path: Path) -> Iterator[SourceRow | RowError]:
    """The elements of one JSON array, numbered from 1. It is read whole: for large sets JSONL is the better form."""
    try:
        values = json.loads(file.read().decode("utf-8-sig"), object_pairs_hook=_no_duplicates)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}. Save the file as UTF-8.") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: column {error.colno}: malformed JSON: {error.msg}.") from None
    except _DuplicateKey as error:
        raise DataError(f"{path}: the key {error.args[0]!r} stands twice in one object. Remove one.") from None
    except ValueError:  # Python's own limit on the digits of an integer
        raise DataError(f"{path}: a number with too many digits to be read.") from None
    except RecursionError:
        raise DataError(f"{path}: JSON nested too deeply to hold preferences.") from None
    for number, value in enumerate(values, start=1):
        yield _as_row(value, path, number)


def _kind_of_table(path: Path) -> str | None:
    """parquet or arrow, told by the first bytes; a file with such a name is nothing else."""
    with path.open("rb") as file:
        magic = file.read(8)
    if magic[:4] == b"PAR1":
        return "parquet"
    if magic[:6] == b"ARROW1" or magic[:4] == b"\xff\xff\xff\xff":
        return "arrow"
    return {".parquet": "parquet", ".arrow": "arrow"}.get(path.suffix.lower())


def _table_rows(path: Path, kind: str) -> Iterator[SourceRow | RowError]:
    """The rows of a table, numbered from 1."""
    number = 0
    try:
        for batch in _record_batches(path, kind):
            batch.validate(full=True)  # offsets of a damaged file would be followed anywhere in memory
            for value in batch.to_pylist():
                number += 1
                yield _as_row(value, path, number)
    except (pa.ArrowException, ValueError, OSError, EOFError) as error:
        raise DataError(f"{path}: damaged, or no {kind} file: {_one_line(error)}.") from None


def _record_batches(path: Path, kind: str) -> Iterator[pa.RecordBatch]:
    if kind == "parquet":
        import pyarrow.parquet as parquet

        with parquet.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=TABLE_BATCH)
    else:
        with pa.memory_map(str(path)) as file:
            is_file = file.read(6) == b"ARROW1"
            file.seek(0)
            if is_file:
                reader = pa.ipc.open_file(file)
                yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
            else:
                yield from pa.ipc.open_stream(file)


def _parse(line: bytes, path: Path, number: int) -> SourceRow | RowError:
    place = f"{path}:{number}"
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return RowError(place, "not UTF-8", f"not UTF-8 at byte {error.start} of the line. Save the file as UTF-8.")
    try:
        value = json.loads(text.rstrip("\r\n"), object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        cut = "" if line.endswith(b"\n") else " The line has no end: was the file cut off?"
        return RowError(place, "malformed JSON", f"column {error.colno}: malformed JSON: {error.msg}.{cut}")
    except ValueError:  # Python's own limit on the digits of an integer
        return RowError(place, "malformed JSON", "a number with too many digits to be read.")
    except _DuplicateKey as error:
        return RowError(place, "duplicate key", f"the key {error.args[0]!r} stands twice in one object. Remove one.")
    except RecursionError:
        return RowError(place, "nested too deeply", "JSON nested too deeply to be a preference.")
    return _as_row(value, path, number)


def _as_row(value: Any, path: Path, number: int) -> SourceRow | RowError:
    if not isinstance(value, dict):
        place = f"{path}:{number}"
        return RowError(place, "not an object", f"{kind_of(value)}, not a JSON object with a prompt and completions.")
    return SourceRow(value, str(path), number)


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


class _DuplicateKey(Exception):
    pass


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        raise _DuplicateKey(next(key for key, _ in pairs if key in seen or seen.add(key)))
    return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
