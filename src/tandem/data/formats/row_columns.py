"""Reads optional numbers of a row, such as a weight. A setting of the dataset, such as weight_key, names the field to read."""

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
    """Return the reason under which a row is counted as bad if its value of `column` is missing or invalid."""
    return f"bad {column}"


def with_columns(preference: Preference, row: SourceRow, keys: DatasetFields) -> Preference:
    """Add the values of the configured columns to a preference. Raise a RowError if a value is missing or out of range.

    If the row has a field for an optional column that is not configured, the field is not read. A note about it is added
    to the preference and later reported to the user.
    """
    unread = tuple(map(unread_note, unread_columns(row, keys)))
    if not keys.number_columns and not unread:
        return preference
    columns = {name: _value(name, key, row) for name, key in keys.number_columns.items()}
    return replace(preference, columns=columns, notes=(*preference.notes, *unread))


def unread_in(notes: Mapping[str, int]) -> list[str]:
    """Return the optional columns that are in the data, but are not read because no setting names them.

    `notes`: a dict from the text of a note about the set to the number of rows. Unread columns are found by their notes.
    """
    return [column.name for column in OPTIONAL_COLUMNS if unread_note(column.name) in notes]


def unread_columns(row: SourceRow, keys: DatasetFields) -> Iterator[str]:
    """Yield the optional columns for which the row has a value, but which are not configured."""
    for column in OPTIONAL_COLUMNS:
        given = row.value.get(column.name)
        if (
            column.name not in keys.number_columns
            and column.name not in keys.number_columns.values()
            and given not in (None, "")
        ):
            yield column.name


def unread_note(column: str) -> str:
    """Return the text that is reported to the user if rows have the field `column`, but no setting names this field.

    Do not change the text, because existing prepared data contains it.
    """
    return f"rows with a field {column}, which is not used, since {COLUMNS[column].key} is not set"


def _value(name: str, key: str, row: SourceRow) -> float:
    column, reason = COLUMNS[name], refused_as(name)
    if key not in row.value:
        found = listed(row.value)
        message = f"no key {key}, which is set by data.train.{column.key}. Keys found: {found}."
        raise RowError(row.place, reason, message)
    value = _as_number(row.value[key])
    if value is None:
        raise RowError(
            row.place, reason, f"{key} is empty, but data.train.{column.key} is set, so every row needs a {name}."
        )
    number = number_of(value, row, key, name)
    if number < column.least:
        raise RowError(row.place, reason, f"{key}: {number:g} is below {column.least:g}, the smallest {name} allowed.")
    return number


def _as_number(value: Any) -> Any:
    """Convert a text to a number if possible, and an empty text to None. Csv files hold numbers as texts."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    with suppress(ValueError):
        return float(value)
    return value
