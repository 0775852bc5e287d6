"""The formats of rows, for Python: their names, how one is detected, and what a row is read as.

    tandem.formats.names()
    tandem.formats.read({"prompt": "Hi", "chosen": "Hello!", "rejected": "What?"})

A format of your own is a function that turns a row (a dict) into a row of a known format, or into None to leave it out. Name it
as `dataset_name` of a dataset: the function itself in Python, or FILE.py:FUNCTION (docs/python.md).
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.config.sections.datasets import DatasetFields
from tandem.data.formats.formats import FORMATS, detect_format, read_preference
from tandem.data.formats.preference import Completion, Message, Preference
from tandem.data.formats.prompt_files import Wording
from tandem.data.formats.user_formats import converted
from tandem.data.read.sources import RowError, SourceRow
from tandem.errors import ConfigError, DataError
from tandem.user_code import is_user_function, name_function

__all__ = ["Completion", "FormatDescription", "Message", "Preference", "describe", "names", "read", "register"]


@dataclass(frozen=True, slots=True)
class FormatDescription:
    """What is known about a format. The keys prompt, chosen and rejected can be changed by prompt_key and so on."""

    name: str
    description: str
    keys: tuple[str, ...]  # from which it is detected


def names() -> list[str]:
    """Return the name of every format, in the order of detection."""
    return list(FORMATS)


def describe(name: str) -> FormatDescription:
    """Return what is known about a format."""
    if name not in FORMATS:
        raise ConfigError(f"{name}: not a format. Use one of {', '.join(FORMATS)}.")
    known = FORMATS[name]
    description = inspect.getdoc(known.read) or ""
    return FormatDescription(name, description, tuple(key.strip("{}") for key in known.required_keys))


def read(row: Mapping[str, Any], format: str | Callable[..., Any] = "auto") -> Preference:
    """Return what a row is read as. Raise DataError, with the reason, if it cannot be used.

    format: a name, or a function of your own; auto: detected from the keys.
    """
    name = register(format) if callable(format) else format
    if name != "auto" and not is_user_function(name):
        describe(name)
    source, keys = SourceRow(dict(row), "row", 1), DatasetFields()
    try:
        source, name = (source, detect_format(source, keys)[0]) if name == "auto" else converted(source, name)
        return read_preference(source, keys, name, Wording())
    except RowError as error:
        raise DataError(error.message) from None


def register(function: Callable[[dict[str, Any]], Mapping[str, Any] | None]) -> str:
    """Return the name by which a configuration can name your function, as dataset_name. It also takes the function itself."""
    return name_function("format", function)
