"""A JSONL file in; SourceRows out, each with its place, or a RowError that names file, line and column."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tandem.errors import DataError

MAX_LINE_BYTES = 64 * 1024 * 1024


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


def read_rows(path: Path) -> Iterator[SourceRow | RowError]:
    """Every non-blank line of a JSONL file, in order: a row, or why it is none."""
    if not path.is_file():
        raise DataError(f"{path}: no such file. Check data.train.data_path and the validation paths.")
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise DataError(f"{path}:{number}: a line over 64 MB. JSONL has one preference on a line.")
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield _parse(line, path, number)


def _parse(line: bytes, path: Path, number: int) -> SourceRow | RowError:
    place = f"{path}:{number}"
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return RowError(place, "not UTF-8", f"not UTF-8 at byte {error.start} of the line. Save the file as UTF-8.")
    try:
        value = json.loads(text, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        cut = "" if line.endswith(b"\n") else " The line has no end: was the file cut off?"
        return RowError(place, "malformed JSON", f"column {error.colno}: malformed JSON: {error.msg}.{cut}")
    except ValueError:  # Python's own limit on the digits of an integer
        return RowError(place, "malformed JSON", "a number with too many digits to be read.")
    except _DuplicateKey as error:
        return RowError(place, "duplicate key", f"the key {error.args[0]!r} stands twice in one object. Remove one.")
    except RecursionError:
        return RowError(place, "nested too deeply", "JSON nested too deeply to be a preference.")
    if not isinstance(value, dict):
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
    }
    return names.get(type(value), "null")


class _DuplicateKey(Exception):
    pass


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        raise _DuplicateKey(next(key for key, _ in pairs if key in seen or seen.add(key)))
    return value
