"""Rows given in Python: stored in the cache as a file that is named by its content, and read as any other file.

So they get the same checks, limits and caches as a file. The same rows have the same file, so a run with them can be resumed.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from tandem.data.read.sources import kind_of
from tandem.errors import ConfigError, DataError, TandemError
from tandem.storage.cache import cache_dir, check_cache_dir, replacing

NAME_DIGITS = 32  # of the hash of rows, in the name of their file
Rows = Iterable[Mapping[str, Any]]


def store_rows(name: str, rows: Rows) -> Path:
    """Write rows to a file in the cache, and return its path. `name`: the argument that gave them, for messages."""
    if isinstance(rows, str | bytes | Path | Mapping) or not isinstance(rows, Iterable):
        hint = " Give the path of a file as data.train.data_path." if isinstance(rows, str | Path) else ""
        raise ConfigError(f"{name} is of type {type(rows).__name__}, not a list of dicts or another iterable.{hint}")
    check_cache_dir()
    folder = cache_dir() / "rows"
    folder.mkdir(parents=True, exist_ok=True)
    digest, num_rows = hashlib.sha256(), 0
    unnamed = folder / f"unnamed-{uuid4().hex}.jsonl"  # other threads may store rows meanwhile
    try:
        with replacing(unnamed, binary=True) as file:
            for row in rows:
                line = _as_line(f"{name}[{num_rows}]", row).encode()
                digest.update(line)
                file.write(line)
                num_rows += 1
            if num_rows == 0:
                raise DataError(f"{name} has no rows. An iterator may have been read to its end before.")
        return unnamed.replace(folder / f"{digest.hexdigest()[:NAME_DIGITS]}.jsonl")
    finally:
        unnamed.unlink(missing_ok=True)


def _as_line(place: str, row: Any) -> str:
    if not isinstance(row, Mapping):
        hint = ' For a DataFrame, give frame.to_dict("records").' if isinstance(row, str) else ""
        raise DataError(f"{place} is {kind_of(row)}, not a dict such as {{prompt, chosen, rejected}}.{hint}")
    if other := [key for key in row if not isinstance(key, str)]:
        raise DataError(f"{place}: the key {other[0]!r} is not a string.")
    return _json(place, row) + "\n"


def plain_row(place: str, row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a row as it would be read from a file."""
    return json.loads(_json(place, row))


def _json(place: str, row: Mapping[Any, Any]) -> str:
    try:
        return json.dumps(dict(row), default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{place} cannot be written as JSON: {error}.") from None


def _plain(value: Any) -> Any:
    """Convert mappings, and the arrays and numbers of numpy, which JSON does not have."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__}")


@contextmanager
def places_of(files: Mapping[str, Path]) -> Iterator[None]:
    """Inside this context, an error names rows by their argument instead of the file that holds them. `files`: by argument."""
    try:
        yield
    except TandemError as error:
        if files:
            error.args = (with_places(str(error), files), *error.args[1:])
        raise


def with_places(message: str, files: Mapping[str, Path]) -> str:
    """Return a message with the places of rows as in Python: rows[2] instead of FILE:3. `files`: by argument."""
    for name, path in files.items():
        parts = message.split(f"{path}:")
        message = parts[0] + "".join(_with_place(name, path, part) for part in parts[1:])
        message = message.replace(str(path), name)
    for folder in {path.parent for path in files.values()}:  # of a run with other rows
        message = re.sub(rf"{re.escape(str(folder))}/[0-9a-f]{{{NAME_DIGITS}}}\.jsonl", "other rows", message)
    return message


def _with_place(name: str, path: Path, rest: str) -> str:
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    return f"{name}[{int(digits) - 1}]{rest[len(digits) :]}" if digits else f"{path}:{rest}"
