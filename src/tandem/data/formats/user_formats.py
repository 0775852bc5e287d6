"""Formats of the user's: a function turns a row into a row of a known format, which is then read and checked as any other."""

from collections.abc import Iterable, Mapping
from typing import Any

from tandem.config.sections.datasets import DatasetFields
from tandem.data.formats.formats import NOTHING_FITS, PARTS, detect_format
from tandem.data.read.sources import RowError, SourceRow, kind_of
from tandem.errors import one_line
from tandem.terminal.printable import listed
from tandem.user_code import RefusedCodeError, is_user_function, known_function

REASON = "format function"


def converted(row: SourceRow, name: str) -> tuple[SourceRow, str]:
    """Return the row that the user's function makes of a row, and its format. If `name` is a known format, return the row.

    Raise RowError if the function fails, returns None to leave the row out, or returns something else than a preference.
    """
    if not is_user_function(name):
        return row, name
    try:
        made = known_function(name).function(dict(row.value))
    except Exception as error:
        raise RowError(row.place, REASON, f"{name} fails with {type(error).__name__}: {one_line(error)}.") from None
    if made is None:
        raise RowError(
            row.place, "left out by the format", f"{name} returned None, which leaves the row out.", kind="filtered"
        )
    if not isinstance(made, Mapping) or not all(isinstance(key, str) for key in made):
        raise RowError(row.place, REASON, f"{name} returned {kind_of(made)}, {_expected()}")
    found = SourceRow(_plain(made), row.file, row.line)
    format_name = detect_format(found, DatasetFields())
    if format_name == NOTHING_FITS and not all(part in made for part in PARTS):
        raise RowError(row.place, REASON, f"{name} returned the keys {listed(made) or 'none'}, {_expected()}")
    return found, format_name[0]


def formats_of(sets: Iterable[DatasetFields]) -> tuple[str, ...]:
    """Return the names of the functions of the user's by which data sets are read."""
    names = (one.dataset_name for one in sets)
    return tuple(dict.fromkeys(name for name in names if is_user_function(name)))


def own_format(row: SourceRow, names: Iterable[str], refused: Mapping[str, str]) -> str | None:
    """Return the first function of the user's that reads a row, or leaves it out; None if there is none.

    `refused`: functions that may not be run, and why. Raise RefusedCodeError where one of them would be.
    """
    for name in names:
        if name in refused:
            raise RefusedCodeError(
                f"{row.place}: no known format fits this row, and the run's own format may not be run. {refused[name]}"
            )
        try:
            converted(row, name)
        except RowError as error:
            if error.kind == "bad":
                continue
        return name
    return None


def _expected() -> str:
    return "not a preference. Return a dict with prompt, chosen and rejected, or with the keys of another known format."


def _plain(value: Any) -> Any:
    """Return dicts and lists in place of other mappings and tuples, as rows of a file have them."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
