"""Validates the files of a prepared folder, so that no offset or index in them leads out of bounds.

A matching SHA-256 only shows that a file belongs to its manifest. The folder itself may come from an untrusted source,
and numpy does not check offsets and lengths.
"""

import math
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tandem.columns import COLUMNS, Column
from tandem.data.store.pool import bounded_memory
from tandem.errors import one_line

# Batches are memory-mapped, not copied. Only compressed ones, which tandem never writes, take memory.
READ_BYTES = 1024**3
REJECT_BYTES = 1024**2  # limit for one line of rejects.jsonl; tandem writes much shorter lines

Count = Annotated[int, Field(ge=0)]
Fingerprint = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]  # used in names of folders
Limit = Annotated[str, Field(pattern=r"^[0-9]{1,18}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class _Counts(_Strict):
    model_config = ConfigDict(strict=True, extra="forbid")

    rows: Count
    accepted: Count
    bad: dict[str, Count]
    filtered: dict[str, Count]


class _Reject(_Strict):
    """A row that was left out of the set, with the reason."""

    model_config = ConfigDict(strict=True, extra="forbid")

    place: str
    kind: str
    reason: str
    message: str


class _Origin(_Strict):
    sources: list[Annotated[list[str], Field(min_length=3, max_length=3)]]
    limits: dict[str, Any]
    text: dict[str, str]


class _Manifest(_Strict):
    """The schema of a token store's manifest."""

    fingerprint: Fingerprint
    tokens_fingerprint: Fingerprint | None = None
    format: str
    format_reason: str
    made_of: _Origin
    counts: _Counts
    examples: list[_Reject]
    packs: list[dict[str, Any]] = []
    notes: dict[str, Count]
    noted_at: dict[str, str]
    longer_than: dict[Limit, Count]


def check_manifest(manifest: dict[str, Any], folder: Path) -> None:
    """Raise ValueError if a manifest has missing values, values of a wrong type, or counts that do not add up."""
    try:
        _Manifest.model_validate(manifest)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{folder}/manifest.json: {where}: {first['msg']}") from None
    counts = manifest["counts"]
    if counts["rows"] != counts["accepted"] + sum(counts["bad"].values()) + sum(counts["filtered"].values()):
        raise ValueError(f"{folder}/manifest.json: accepted, bad and filtered rows do not add up to the number of rows")


def check_rejects(file: Path) -> None:
    """Raise ValueError if a line of `rejects.jsonl` is not a valid entry. All lines are checked, because a run copies them."""
    with file.open("rb") as lines:
        number = 0
        while line := lines.readline(REJECT_BYTES):
            number += 1
            try:
                _Reject.model_validate_json(line)
            except ValidationError:
                raise ValueError(f"{file}:{number}: not a valid entry for a row that was left out") from None


def open_batches(path: Path, schema: pa.Schema, optional: pa.Schema | None = None) -> list[pa.RecordBatch]:
    """Memory-map an Arrow file and return its record batches. Raise ValueError if the file is not valid.

    The file must have the columns of `schema`, and may have those of `optional`. Null values are not allowed, and every
    value of a list column must belong to a row.
    """
    try:
        # Never closed here, because the batches refer to this memory.
        file = pa.memory_map(str(path))
        reader = pa.ipc.open_file(file)
        present = [field for field in optional or () if reader.schema.get_field_index(field.name) >= 0]
        schema = pa.schema([*schema, *present])
        if not reader.schema.equals(schema):
            raise ValueError(f"{path} does not have the columns that tandem writes")
        with bounded_memory(READ_BYTES):
            batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        if sum(batch.get_total_buffer_size() for batch in batches) > file.size():
            raise ValueError(f"{path} has compressed or repeated batches, which tandem does not write")
        for number, batch in enumerate(batches):
            batch.validate(full=True)
            for name, column in zip(schema.names, batch.columns, strict=True):
                _check_column(column, f"{path}: batch {number}: {name}")
        return batches
    except (pa.ArrowException, MemoryError, OSError) as error:
        detail = one_line(error)
        raise ValueError(detail if str(path) in detail else f"{path}: {detail}") from None


def _check_column(column: pa.Array, where: str) -> None:
    if column.null_count:
        raise ValueError(f"{where} has null values")
    if isinstance(column, pa.LargeListArray):
        if column.values.null_count:
            raise ValueError(f"{where} has null values")
        # A batch without rows may have no offsets.
        first_and_last = [column.offsets[0].as_py(), column.offsets[-1].as_py()] if len(column.offsets) else [0, 0]
        if first_and_last != [0, len(column.values)]:
            raise ValueError(f"{where} has values that belong to no row")


Columns = dict[str, tuple[NDArray[np.int64], NDArray[Any]]]  # the offsets and values of each column of a batch, by name


def check_preferences(columns: Columns, where: str) -> None:
    """Raise ValueError if a row of a batch is not a valid preference: its columns must be consistent with each other."""
    if problem := _problem_in(columns):
        raise ValueError(f"{where}: {problem}")


def _problem_in(columns: Columns) -> str | None:
    if len(columns["prompt"][0]) < 2:
        return "it has no rows"
    sizes = {name: np.diff(offsets) for name, (offsets, _) in columns.items()}
    values = {name: column_values for name, (_, column_values) in columns.items()}
    offsets, lengths = columns["lengths"]
    num_completions = sizes["lengths"]
    if num_completions.min() < 2:
        return "a preference has fewer than two completions"
    if sizes["prompt"].min() < 1 or lengths.min() < 1:
        return "a prompt or a completion has no tokens"
    if (np.add.reduceat(lengths.astype(np.int64), offsets[:-1]) != sizes["completions"]).any():
        return "lengths do not add up to the number of completion tokens"
    for column in COLUMNS.values():
        if _has_invalid_values(column, columns, num_completions):
            return f"column {column.stored_as} has missing or invalid values"
    if sizes["winners"].min() < 1 or (sizes["winners"] != sizes["losers"]).any():
        return "winners and losers do not form pairs"
    pairs = np.stack([values["winners"], values["losers"]])
    if not _are_indices(pairs, np.repeat(num_completions, sizes["winners"])):
        return "a pair refers to a completion that does not exist"
    if (values["winners"] == values["losers"]).any():
        return "a pair compares a completion with itself"
    if not _are_indices(values["unscored"], np.repeat(sizes["completions"], sizes["unscored"])):
        return "a position in unscored is outside the completions"
    if not _increases_in_rows(columns["unscored"]):
        return "positions in unscored are not in increasing order"
    if min(values["prompt"].min(), values["completions"].min()) < 0:
        return "a token id is negative"
    return None


def _has_invalid_values(column: Column, columns: Columns, num_completions: NDArray[np.int64]) -> bool:
    """Whether a column has the wrong number of values, or values out of range. Only an optional column may be missing."""
    if column.stored_as not in columns:
        return column.key is None
    offsets, values = columns[column.stored_as]
    if column.per == "completion" and (np.diff(offsets) != num_completions).any():
        return True
    missing_is_allowed = math.isnan(column.default)
    return bool((np.isinf(values) | (values < column.least) | (np.isnan(values) & (not missing_is_allowed))).any())


def _are_indices(values: NDArray[np.int32], counts: NDArray[np.int64]) -> bool:
    return bool(((values >= 0) & (values < counts)).all())


def _increases_in_rows(column: tuple[NDArray[np.int64], NDArray[np.int32]]) -> bool:
    """Whether the values increase within every row. For rows [1, 4] and [2, 3], return True, although 2 follows 4."""
    offsets, values = column
    increases = np.diff(values) > 0
    starts = offsets[1:-1]
    starts = starts[(starts > 0) & (starts < len(values))]
    increases[starts - 1] = True
    return bool(increases.all())
