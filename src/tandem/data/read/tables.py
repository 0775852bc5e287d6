"""Reads the rows of a parquet or Arrow file, a few hundred at a time, as bytes in the Arrow stream format."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tandem.data.read.limits import MAX_COLUMNS, MAX_RECORD_BYTES, Expansion
from tandem.data.store.pool import bounded_memory
from tandem.errors import DataError, one_line

TABLE_SUFFIXES = {".parquet": "parquet", ".arrow": "arrow"}
POINTER_BYTES = 8  # the least memory that a value takes in Python


def kind_of_table(opening: bytes, path: Path) -> str | None:
    """Return "parquet" or "arrow" if a file is a table, else None.

    The kind is detected from the first bytes, or else from the suffix: pairs.parquet and pairs.parquet.gz are parquet.
    """
    if opening[:4] == b"PAR1":
        return "parquet"
    if opening[:6] == b"ARROW1" or opening[:4] == b"\xff\xff\xff\xff":
        return "arrow"
    named = Path(path.stem) if path.suffix.lower() in (".gz", ".zst") else path
    return TABLE_SUFFIXES.get(named.suffix.lower())


def table_parts(
    place: Path, kind: str, expansion: Expansion, *, batch_size: int, max_records: int
) -> Iterator[tuple[bytes, int, float]]:
    """Yield the parts of a table in order, each as (Arrow stream of the rows, number of rows, fraction of the file read so far).

    `place`: the file to read, which may be a temporary file. `expansion`: the size limits, and the user's file for
    messages.
    """
    number, before = 1, 0.0
    try:
        for batch, share in _with_memory_limit(_record_batches(place, kind, batch_size, expansion.path), expansion):
            batch.validate(full=True)  # offsets of a damaged file could point anywhere in memory
            done = 0
            for part, num_bytes in _split_batch(batch, max_records):
                if num_bytes > MAX_RECORD_BYTES:
                    raise DataError(f"{expansion.path}: row {number} is over 64 MB. Remove it or shorten it.")
                expansion.add(num_bytes)
                done += part.num_rows
                yield as_stream(part), part.num_rows, before + (share - before) * done / batch.num_rows
                number += part.num_rows
            before = share
    except MemoryError:
        raise expansion.out_of_memory() from None
    except (pa.ArrowException, ValueError, OSError, EOFError) as error:
        raise DataError(
            f"{expansion.path}: cannot be read as {kind} ({one_line(error)}). Create or download it again."
        ) from None


def _with_memory_limit(
    batches: Iterator[tuple[pa.RecordBatch, float]], expansion: Expansion
) -> Iterator[tuple[pa.RecordBatch, float]]:
    """Yield the batches. Raise MemoryError if reading a batch takes more memory than `expansion` allows."""
    while True:
        with bounded_memory(expansion.memory):
            found = next(batches, None)
        if found is None:
            return
        yield found


def _record_batches(place: Path, kind: str, batch_size: int, path: Path) -> Iterator[tuple[pa.RecordBatch, float]]:
    if kind == "parquet":
        import pyarrow.parquet as parquet

        with parquet.ParquetFile(place) as file:
            _check_columns(file.schema_arrow, path)
            total, done = max(1, file.metadata.num_rows), 0
            # In one thread: other threads could not report that memory ran out.
            for batch in file.iter_batches(batch_size=batch_size, use_threads=False):
                done += batch.num_rows
                yield batch, done / total
        return
    with pa.memory_map(str(place)) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
        _check_columns(reader.schema, path)
        if isinstance(reader, pa.ipc.RecordBatchFileReader):
            for i in range(reader.num_record_batches):
                yield reader.get_batch(i), (i + 1) / reader.num_record_batches
        else:
            for batch in reader:
                yield batch, file.tell() / max(1, file.size())


def _check_columns(schema: pa.Schema, path: Path) -> None:
    if len(schema) > MAX_COLUMNS:
        raise too_many_columns(str(path), len(schema))
    for field in schema:
        if (odd := _repeating_type(field.type)) is not None:
            raise DataError(
                f"{path}: column {field.name!r} has the Arrow type {odd}, which tandem cannot read. Convert it to a plain "
                "list or text."
            )


def too_many_columns(place: str, num: int) -> DataError:
    return DataError(
        f"{place}: {num} columns, over the limit of {MAX_COLUMNS}. Keep only those of the prompts and completions."
    )


def _repeating_type(type: pa.DataType) -> str | None:
    """If `type` is or contains an Arrow type that can encode any number of values in a few bytes, return its name.

    Otherwise return None. A small file with such a type could take all memory.
    """
    if (
        pa.types.is_union(type)
        or pa.types.is_run_end_encoded(type)
        or str(type).startswith(("list_view", "large_list_view"))
    ):
        return str(type).partition("<")[0]
    if pa.types.is_dictionary(type):  # dictionaries of texts or numbers are common and allowed
        return "dictionary of nested values" if type.value_type.num_fields else None
    inner = [type.field(i).type for i in range(type.num_fields)]
    return next((odd for one in inner if (odd := _repeating_type(one)) is not None), None)


def _split_batch(batch: pa.RecordBatch, max_records: int) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Split a batch into parts of at most `max_records` rows and MAX_RECORD_BYTES. Yield (part, size in bytes).

    The size is the memory that the values take as Python objects. A part of a single row may be larger than
    MAX_RECORD_BYTES.
    """
    for start in range(0, batch.num_rows, max_records):
        pending = [batch.slice(start, max_records)]
        while pending:
            part = pending.pop()
            num_bytes = sum(expanded_bytes(column) for column in part.columns)
            if num_bytes <= MAX_RECORD_BYTES or part.num_rows == 1:
                yield part, num_bytes
            else:
                half = part.num_rows // 2
                pending += [part.slice(half), part.slice(0, half)]


def expanded_bytes(array: pa.Array) -> int:
    """Estimate the memory in bytes that the values of an array take as Python objects. A repeated value is counted every time."""
    pointers = POINTER_BYTES * len(array)
    if isinstance(array, pa.ExtensionArray):
        return expanded_bytes(array.storage)
    if isinstance(array, pa.DictionaryArray):
        return pointers + int(_value_sizes(array.dictionary)[array.indices.drop_null().to_numpy()].sum())
    if isinstance(array, pa.StructArray):
        return pointers + sum(map(expanded_bytes, array.flatten()))
    if isinstance(array, pa.FixedSizeListArray):
        return pointers + expanded_bytes(array.flatten())
    if isinstance(array, pa.ListArray | pa.LargeListArray):  # includes maps
        start, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
        return pointers + expanded_bytes(array.values.slice(start, end - start))
    if _is_view(array.type):
        return pointers + int(_value_sizes(array).sum())
    return pointers + array.nbytes


def _is_view(type: pa.DataType) -> bool:
    return pa.types.is_string_view(type) or pa.types.is_binary_view(type)


def _value_sizes(array: pa.Array) -> NDArray[np.int64]:
    """Return the number of bytes of each value."""
    if _is_view(array.type) and len(array):
        # A view takes 16 bytes. The first 4 are the length of its value.
        lengths = np.frombuffer(array.buffers()[1], np.int32)[::4][array.offset : array.offset + len(array)]
        return np.where(array.is_valid().to_numpy(zero_copy_only=False), lengths, 0).astype(np.int64)
    if array.type in (pa.string(), pa.binary(), pa.large_string(), pa.large_binary()) and len(array):
        width = np.int32 if array.type in (pa.string(), pa.binary()) else np.int64
        offsets = np.frombuffer(array.buffers()[1], width)[array.offset : array.offset + len(array) + 1]
        return np.diff(offsets).astype(np.int64)
    return np.array([array.slice(i, 1).nbytes for i in range(len(array))], np.int64)


def as_stream(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def stream_values(stream: bytes) -> list[dict[str, Any]]:
    """Return the rows of an Arrow stream as Python objects."""
    return [_without_nulls(value) for batch in pa.ipc.open_stream(stream) for value in batch.to_pylist()]


def _without_nulls(value: Any, depth: int = 0) -> Any:
    """Drop keys with null values from nested objects.

    In a table, all objects of a column have the same keys. A key that is missing in an object is stored as null.
    """
    if isinstance(value, dict):
        return {k: _without_nulls(v, depth + 1) for k, v in value.items() if depth == 0 or v is not None}
    return [_without_nulls(item, depth + 1) for item in value] if isinstance(value, list) else value
