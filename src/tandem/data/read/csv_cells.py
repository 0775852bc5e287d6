"""Handles special cases of csv files: JSON in cells, separators other than commas, and spreadsheets named .csv."""

import csv
import io
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tandem.data.read.json_array import DuplicateKey, decode
from tandem.errors import DataError

# Columns that always hold a list.
LIST_COLUMNS = (
    *(
        "completions",
        "responses",
        "generations",
        "scores",
        "ratings",
        "conversations",
        "output",
        "answers",
        "summaries",
    ),
)
OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}
PYTHON_LIST = re.compile(r"\s*(array\()?\[\s*\{\s*'")
XLS_MAGIC = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"  # the first bytes of an .xls file
# Files of type .xlsx and .ods are zip archives. One of these texts is near the beginning.
WORKBOOK_MEMBERS = (b"[Content_Types].xml", b"xl/", b"_rels/.rels", b"opendocument.spreadsheet")


def refuse_spreadsheet(raw: io.BufferedReader) -> None:
    """Raise a DataError if the file is an Excel or OpenDocument file, whatever its name."""
    opening = raw.peek(4096)[:4096]
    is_workbook = opening.startswith(b"PK\x03\x04") and any(part in opening for part in WORKBOOK_MEMBERS)
    if is_workbook or opening.startswith(XLS_MAGIC):
        raise DataError(
            f"{raw.name}: the file is a spreadsheet (Excel or OpenDocument), which tandem cannot read. Save the sheet "
            "as CSV in UTF-8, with commas."
        )


def check_first_line(line: str, path: Path) -> None:
    """Raise a DataError if the first line shows that lines do not end in LF, or that commas are not the separator."""
    if "\r" in line.rstrip("\r\n"):
        raise DataError(
            f"{path}:1: lines end in a carriage return only (old Mac style). Save the file with line feeds (LF or CRLF)."
        )
    if len(next(csv.reader([line]), [])) > 1:
        return
    for sign, word in OTHER_SEPARATORS.items():
        if len(next(csv.reader([line], delimiter=sign), [])) > 1:
            raise DataError(f"{path}:1: the column names are separated by {word}. Save the file with commas.")


def is_python_list(text: str) -> bool:
    """Whether the text is a list of messages in Python syntax, as str() and pandas to_csv write it: [{'role': ...}]."""
    return bool(PYTHON_LIST.match(text)) and ("'role'" in text or "'from'" in text)


def parse_json_cell(name: str, text: str) -> Any:
    """Parse a cell that holds a list or a message as JSON. Return None if the cell is plain text."""
    start = text.lstrip()[:1]
    if start not in ("[", "{") or not (name in LIST_COLUMNS or '"role"' in text or '"from"' in text):
        return None
    with suppress(ValueError, RecursionError, DuplicateKey):  # not valid JSON, so plain text
        value = decode(text.strip())
        if isinstance(value, list) and (name in LIST_COLUMNS or (value and all(map(_is_message, value)))):
            return value
        return value if _is_message(value) else None
    return None


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and ("role" in value or {"from", "value"} <= value.keys())
