"""Reads rows of no known format: data.train.columns gives the path of each part of a preference inside the row."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from tandem.config.sections.datasets import DatasetFields
from tandem.config.sections.row_paths import Step, parse_path
from tandem.data.formats.preference import describe
from tandem.data.read.sources import RowError, SourceRow
from tandem.terminal.printable import listed

REASON = "missing path"
parsed = lru_cache(maxsize=64)(parse_path)


def with_paths(row: SourceRow, keys: DatasetFields) -> SourceRow:
    """Return a row of the parts that data.train.columns names. If it is not set, return `row`.

    Raise a RowError if a path does not exist in the row.
    """
    if not keys.columns:
        return row
    return replace(row, value={part: _value(row, part, path) for part, path in keys.columns.items()})


def _value(row: SourceRow, part: str, path: str) -> Any:
    try:
        return _follow(row.value, parsed(path), "")
    except LookupError as error:
        message = f"data.train.columns.{part} = {path}: {error.args[0]}"
        raise RowError(row.place, REASON, message) from None


def _follow(value: Any, steps: tuple[Step, ...], above: str) -> Any:
    """Return the value at the end of a path. Raise a LookupError, with the reason, if the path ends before.

    `above`: the part of the path that leads to `value`, for error messages.
    """
    if not steps:
        return value
    step, *rest = steps
    name = above or "the row"
    here = f"{above}{'.' if above and step.text[0] != '[' else ''}{step.text}"
    if isinstance(step.take, str):
        if not isinstance(value, Mapping):
            raise LookupError(f"{name} is {_described(value)}, which has no keys, so there is no {here}.")
        if step.take not in value:
            raise LookupError(f"{name} has no key {step.take}. Keys found: {listed(value) or 'none'}.")
        return _follow(value[step.take], tuple(rest), here)
    if not isinstance(value, list):
        raise LookupError(f"{name} is {_described(value)}, not a list, so there is no {here}.")
    if isinstance(step.take, int):
        if not -len(value) <= step.take < len(value):
            count = "1 element" if len(value) == 1 else f"{len(value)} elements"
            raise LookupError(f"{name} has {count}, so there is no {here}.")
        return _follow(value[step.take], tuple(rest), here)
    if isinstance(step.take, slice):
        return _follow(value[step.take], tuple(rest), here)
    return [_follow(element, tuple(rest), f"{above}[{i}]") for i, element in enumerate(value)]


def _described(value: Any) -> str:
    return "null" if value is None else describe(value)
