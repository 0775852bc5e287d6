"""A file or manifest of a prepared folder in; the same out, once nothing in it can be read out of bounds.

A manifest's SHA-256 only shows that a file is the one the manifest was written for. A prepared folder may come from
anybody, and numpy follows whatever offsets and lengths it is given.
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

# Batches are mapped, not copied: only compressed ones, which tandem never writes, take memory.
READ_BYTES = 1024**3
REJECT_BYTES = 1024**2  # of one line; what tandem writes is much shorter

Count = Annotated[int, Field(ge=0)]
Fingerprint = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]  # part of the names of folders
Limit = Annotated[str, Field(pattern=r"^[0-9]{1,18}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class _Counts(_Strict):
    model_config = ConfigDict(strict=True, extra="forbid")

    rows: Count
    accepted: Count
    bad: dict[str, Count]
    filtered: dict[str, Count]


class _Example(_Strict):
    """A row that was left out."""

    model_config = ConfigDict(strict=True, extra="forbid")

    place: str
    kind: str
    reason: str
    message: str


class _MadeOf(_Strict):
    sources: list[Annotated[list[str], Field(min_length=3, max_length=3)]]
    limits: dict[str, Any]
    text: dict[str, str]


class _Facts(_Strict):
    """The contents of a store's manifest."""

    fingerprint: Fingerprint
    tokens_fingerprint: Fingerprint | None = None
    format: str
    format_reason: str
    made_of: _MadeOf
    counts: _Counts
    examples: list[_Example]
    packs: list[dict[str, Any]] = []
    notes: dict[str, Count]
    noted_at: dict[str, str]
    longer_than: dict[Limit, Count]


def check_manifest(manifest: dict[str, Any], folder: Path) -> None:
    """Refuse a store's manifest in which a value is missing or has the wrong type."""
    try:
        _Facts.model_validate(manifest)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{folder}/manifest.json: {where}: {first['msg']}") from None
    counts = manifest["counts"]
    if counts["rows"] != counts["accepted"] + sum(counts["bad"].values()) + sum(counts["filtered"].values()):
        raise ValueError(f"{folder}/manifest.json: counts: accepted, bad and filtered rows do not add up to rows")


def check_rejects(file: Path) -> None:
    """Refuse a `rejects.jsonl` with a line that is not a reject: a run copies every line of it."""
    with file.open("rb") as lines:
        number = 0
        while line := lines.readline(REJECT_BYTES):
            number += 1
            try:
                _Example.model_validate_json(line)
            except ValidationError:
                raise ValueError(f"{file}:{number}: not a row that was left out") from None


def open_batches(path: Path, schema: pa.Schema, optional: pa.Schema | None = None) -> list[pa.RecordBatch]:
    """The record batches of an Arrow file, memory-mapped and fully validated: lists without nulls, end to end.

    `optional`: further fields, which it may have.
    """
    try:
        # Not closed: the batches refer to it.
        file = pa.memory_map(str(path))
        reader = pa.ipc.open_file(file)
        more = [field for field in optional or () if reader.schema.get_field_index(field.name) >= 0]
        schema = pa.schema([*schema, *more])
        if not reader.schema.equals(schema):
            raise ValueError(f"{path} has other columns than tandem writes")
        with bounded_memory(READ_BYTES):
            batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        if sum(batch.get_total_buffer_size() for batch in batches) > file.size():
            raise ValueError(f"{path} has batches that are compressed or repeated, which tandem does not write")
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
        # A batch of no rows may have no offsets.
        ends = [column.offsets[0].as_py(), column.offsets[-1].as_py()] if len(column.offsets) else [0, 0]
        if ends != [0, len(column.values)]:
            raise ValueError(f"{where} has values that belong to no row")


Columns = dict[str, tuple[NDArray[np.int64], NDArray[Any]]]  # of a batch: offsets and values, by name


def check_preferences(columns: Columns, where: str) -> None:
    """Refuse a batch whose columns do not fit each other: every row must be a preference that tandem could have written."""
    if len(columns["prompt"][0]) < 2:
        raise ValueError(f"{where}: it has no rows")
    sizes = {name: np.diff(offsets) for name, (offsets, _) in columns.items()}
    values = {name: of_rows for name, (_, of_rows) in columns.items()}
    offsets, lengths = columns["lengths"]
    completions = sizes["lengths"]
    problem = None
    if completions.min() < 2:
        problem = "a preference has fewer than two completions"
    elif sizes["prompt"].min() < 1 or lengths.min() < 1:
        problem = "a prompt or a completion has no tokens"
    elif (np.add.reduceat(lengths.astype(np.int64), offsets[:-1]) != sizes["completions"]).any():
        problem = "lengths do not add up to the tokens of their completions"
    elif misfit := next((column for column in COLUMNS.values() if _misfits(column, columns, completions)), None):
        problem = f"{misfit.stored_as} do{'' if misfit.per == 'completion' else 'es'} not fit the {misfit.per}s"
    elif sizes["winners"].min() < 1 or (sizes["winners"] != sizes["losers"]).any():
        problem = "winners and losers do not make pairs"
    elif not _are_indices(np.stack([values["winners"], values["losers"]]), np.repeat(completions, sizes["winners"])):
        problem = "a pair names a completion that is not there"
    elif (values["winners"] == values["losers"]).any():
        problem = "a pair compares a completion with itself"
    elif not _are_indices(values["unscored"], np.repeat(sizes["completions"], sizes["unscored"])):
        problem = "a position that is not scored is outside of the completions"
    elif not _rises_in_rows(columns["unscored"]):
        problem = "positions that are not scored do not rise"
    elif min(values["prompt"].min(), values["completions"].min()) < 0:
        problem = "a token id is negative"
    if problem:
        raise ValueError(f"{where}: {problem}")


def _misfits(column: Column, columns: Columns, completions: NDArray[np.int64]) -> bool:
    """Whether a batch has other values of it than tandem writes. A column that a key names may be missing."""
    if column.stored_as not in columns:
        return column.key is None
    offsets, values = columns[column.stored_as]
    if column.per == "completion" and (np.diff(offsets) != completions).any():
        return True
    missing_is_allowed = math.isnan(column.default)
    return bool((np.isinf(values) | (values < column.least) | (np.isnan(values) & (not missing_is_allowed))).any())


def _are_indices(values: NDArray[np.int32], counts: NDArray[np.int64]) -> bool:
    return bool(((values >= 0) & (values < counts)).all())


def _rises_in_rows(column: tuple[NDArray[np.int64], NDArray[np.int32]]) -> bool:
    """Whether the values of every row rise. Rows of [1, 4] and [2, 3]: 1 < 4 and 2 < 3 count, 4 > 2 does not."""
    offsets, values = column
    rises = np.diff(values) > 0
    starts = offsets[1:-1]
    starts = starts[(starts > 0) & (starts < len(values))]
    rises[starts - 1] = True
    return bool(rises.all())
