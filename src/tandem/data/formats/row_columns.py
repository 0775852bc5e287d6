"""The columns that keys of a data set name, such as weight_key: read from a row, or refused with a reason."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from tandem.columns import COLUMNS, OPTIONAL_COLUMNS
from tandem.config.sections.datasets import DatasetFields
from tandem.data.formats.preference import Preference, number_of
from tandem.data.read.sources import RowError, SourceRow
from tandem.terminal.printable import listed


def refused_as(column: str) -> str:
    """The reason under which rows without a usable value are counted."""
    return f"bad {column}"


def with_columns(preference: Preference, row: SourceRow, keys: DatasetFields) -> Preference:
    """A preference with the values that its data set's keys name; RowError where a value is missing or out of range.

    A field that has the name of a column while its key is not set is noted, and not read.
    """
    unread = tuple(map(unread_note, unread_columns(row, keys)))
    if not keys.columns and not unread:
        return preference
    columns = {name: _value(name, key, row) for name, key in keys.columns.items()}
    return replace(preference, columns=columns, notes=(*preference.notes, *unread))


def unread_in(notes: Mapping[str, int]) -> list[str]:
    """The columns that the notes on a set name as unread."""
    return [column.name for column in OPTIONAL_COLUMNS if unread_note(column.name) in notes]


def unread_columns(row: SourceRow, keys: DatasetFields) -> Iterator[str]:
    for column in OPTIONAL_COLUMNS:
        given = row.value.get(column.name)
        if column.name not in keys.columns and column.name not in keys.columns.values() and given not in (None, ""):
            yield column.name


def unread_note(column: str) -> str:
    return f"rows with a field {column}, which is not used, since {COLUMNS[column].key} is not set"


def _value(name: str, key: str, row: SourceRow) -> float:
    column, reason = COLUMNS[name], refused_as(name)
    if key not in row.value:
        found = listed(row.value)
        message = f"no key {key}, which data.train.{column.key} names. Keys found: {found}."
        raise RowError(row.place, reason, message)
    value = _as_number(row.value[key])
    if value is None:
        raise RowError(
            row.place, reason, f"{key} is empty; every row needs a {name}, since data.train.{column.key} is set."
        )
    number = number_of(value, row, key, name)
    if number < column.least:
        raise RowError(row.place, reason, f"{key}: {number:g} is below {column.least:g}, the least {name} allowed.")
    return number


def _as_number(value: Any) -> Any:
    """A text that is a number as that number, since csv files hold nothing else; an empty one as None."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    with suppress(ValueError):
        return float(value)
    return value
