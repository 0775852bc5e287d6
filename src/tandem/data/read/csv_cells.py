"""What csv files hold besides plain texts between commas: JSON in cells, other separators, other files of that name."""

import csv
import io
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tandem.data.read.json_array import DuplicateKey, decode
from tandem.errors import DataError

# Columns that are lists in every format that has them.
LISTS = ("completions", "responses", "scores", "conversations", "output")
OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}
PYTHON_LIST = re.compile(r"\s*(array\()?\[\s*\{\s*'")
OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"  # how .xls begins
# Names of parts, which stand near the beginning of the zip archives that spreadsheets are.
WORKBOOK_PARTS = (b"[Content_Types].xml", b"xl/", b"_rels/.rels", b"opendocument.spreadsheet")


def refuse_spreadsheet(raw: io.BufferedReader) -> None:
    opening = raw.peek(4096)[:4096]
    is_workbook = opening.startswith(b"PK\x03\x04") and any(part in opening for part in WORKBOOK_PARTS)
    if is_workbook or opening.startswith(OLE):
        raise DataError(
            f"{raw.name}: a spreadsheet (Excel or OpenDocument), which is not read, whatever its name. Save the sheet as "
            "CSV in UTF-8, with commas."
        )


def refuse_first_line(line: str, path: Path) -> None:
    """Stop where the first line of a csv file shows that its lines or columns are separated in another way."""
    if "\r" in line.rstrip("\r\n"):
        raise DataError(
            f"{path}:1: lines end in a carriage return alone, as on old Macs. Save the file with line feeds as line ends."
        )
    if len(next(csv.reader([line]), [])) > 1:
        return
    for sign, word in OTHER_SEPARATORS.items():
        if len(next(csv.reader([line], delimiter=sign), [])) > 1:
            raise DataError(f"{path}:1: the names of columns are separated by {word}. Write the file with commas.")


def is_python_list(text: str) -> bool:
    """Whether a list of messages was written by str() or, as pandas does, by to_csv: [{'role': ...}]."""
    return bool(PYTHON_LIST.match(text)) and ("'role'" in text or "'from'" in text)


def json_cell(name: str, text: str) -> Any:
    """The messages, or the list, that a cell holds as JSON; None where it is a text."""
    start = text.lstrip()[:1]
    if start not in ("[", "{") or not (name in LISTS or '"role"' in text or '"from"' in text):
        return None
    with suppress(ValueError, RecursionError, DuplicateKey):  # else it stays the text it is
        value = decode(text.strip())
        if isinstance(value, list) and (name in LISTS or (value and all(map(_is_message, value)))):
            return value
        return value if _is_message(value) else None
    return None


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and ("role" in value or {"from", "value"} <= value.keys())
