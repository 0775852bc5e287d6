"""Defines the file format of tokens.arrow: its version, its schema, and functions that write and read preferences.

A row is a preference. Optional columns of `tandem.columns`, such as weight, are stored only if a setting such as
weight_key names their field. So existing files stay valid if tandem gets a new optional column.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tandem.columns import COLUMNS, OPTIONAL_COLUMNS, Column, columns_in_use
from tandem.data.store.check import Columns, check_preferences, open_batches
from tandem.data.text.tokens import TokenizedPreference

# Increased whenever the same input would give other tokens or another layout.
FORMAT_VERSION = 12
NO_POSITIONS = np.zeros(0, np.int32)


def _type_of(column: Column) -> pa.DataType:
    number = pa.from_numpy_dtype(np.dtype(column.dtype))
    return pa.large_list(number) if column.per == "completion" else number


SCHEMA = pa.schema(
    {
        "prompt": pa.large_list(pa.int32()),
        "completions": pa.large_list(pa.int32()),  # tokens of all completions, concatenated
        "lengths": pa.large_list(pa.int32()),  # tokens of each completion
        "unscored": pa.large_list(pa.int32()),  # positions in `completions` of tokens that are not scored
        "winners": pa.large_list(pa.int32()),
        "losers": pa.large_list(pa.int32()),
        **{column.stored_as: _type_of(column) for column in columns_in_use(())},
        "digest": pa.uint64(),  # a hash of the tokens, equal for duplicates
        "place": pa.large_string(),
    }
)
OPTIONAL = pa.schema({column.stored_as: _type_of(column) for column in OPTIONAL_COLUMNS})


def schema_with(columns: Iterable[str]) -> pa.Schema:
    """Return the schema of a file with the optional columns `columns`."""
    return pa.schema([*SCHEMA, *(OPTIONAL.field(COLUMNS[name].stored_as) for name in columns)])


def as_stream(rows: list[TokenizedPreference], digests: bytes, columns: Iterable[str] = ()) -> bytes:
    """Return preferences as an Arrow stream with one record batch."""
    schema = schema_with(columns)
    arrays = {**_token_arrays(rows), **_column_arrays(rows, columns_in_use(columns))}
    arrays["digest"] = pa.array(np.frombuffer(digests, np.dtype("<u8")))
    arrays["place"] = pa.array([row.place for row in rows], pa.large_string())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.record_batch([arrays[name] for name in schema.names], schema=schema))
    return sink.getvalue().to_pybytes()


def _token_arrays(rows: list[TokenizedPreference]) -> dict[str, pa.Array]:
    completions = [completion for row in rows for completion in row.completions]
    num_pairs = [len(row.pairs) for row in rows]
    unscored = [_flat_unscored(row) for row in rows]
    lengths = np.array([len(completion) for completion in completions], np.int32)
    return {
        "prompt": _lists(np.concatenate([row.prompt for row in rows]), [len(row.prompt) for row in rows]),
        "completions": _lists(np.concatenate(completions), [sum(map(len, row.completions)) for row in rows]),
        "lengths": _lists(lengths, [len(row.completions) for row in rows]),
        "unscored": _lists(np.concatenate(unscored), [len(positions) for positions in unscored]),
        "winners": _lists(np.array([winner for row in rows for winner, _ in row.pairs], np.int32), num_pairs),
        "losers": _lists(np.array([loser for row in rows for _, loser in row.pairs], np.int32), num_pairs),
    }


def _column_arrays(rows: list[TokenizedPreference], columns: list[Column]) -> dict[str, pa.Array]:
    arrays = {}
    for column in columns:
        values = np.array([value for row in rows for value in row.values(column.name)], column.dtype)
        counts = [len(row.completions) for row in rows]
        arrays[column.stored_as] = _lists(values, counts) if column.per == "completion" else pa.array(values)
    return arrays


def _lists(values: NDArray[Any], sizes: list[int]) -> pa.LargeListArray:
    """Return a list column. `values`: the concatenated values of all rows. `sizes`: the number of values in each row."""
    offsets = np.cumsum([0, *sizes], dtype=np.int64)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))


def _flat_unscored(row: TokenizedPreference) -> NDArray[np.int32]:
    """Convert positions within each completion to positions in the concatenated completions.

    Completions of 4 and 5 tokens with unscored positions [1] and [2] are returned as [1, 6].
    """
    if not row.unscored:
        return NO_POSITIONS
    starts = np.cumsum([0, *(len(completion) for completion in row.completions)])
    flat = [part + start for part, start in zip(row.unscored, starts, strict=False)]
    return np.concatenate(flat).astype(np.int32)


class TokensFile:
    """Reads tokens.arrow as numpy arrays.

    Reading a row takes one offset lookup and one slice, without a Python object per token.
    """

    def __init__(self, path: Path):
        self._batches = open_batches(path, SCHEMA, OPTIONAL)
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])
        names = self._batches[0].schema.names if self._batches else SCHEMA.names
        self.columns = tuple(
            column.name for column in OPTIONAL_COLUMNS if column.stored_as in names
        )  # optional columns
        self._arrays: list[Columns] = [
            {name: _as_lists(batch.column(name)) for name in names if name not in ("digest", "place")}
            for batch in self._batches
        ]
        for number, columns in enumerate(self._arrays):
            check_preferences(columns, f"{path}: batch {number}")

    def __len__(self) -> int:
        return int(self._starts[-1])

    def preference(self, index: int) -> TokenizedPreference:
        lengths = self.row("lengths", index)
        flat = self.row("completions", index)
        ends = np.cumsum(lengths)
        return TokenizedPreference(
            prompt=self.row("prompt", index),
            completions=tuple(flat[end - n : end] for n, end in zip(lengths, ends, strict=True)),
            pairs=tuple(zip(self.row("winners", index).tolist(), self.row("losers", index).tolist(), strict=True)),
            place=self.text("place", index),
            unscored=self._unscored(index, lengths),
            columns={c.name: tuple(self.row(c.stored_as, index).tolist()) for c in columns_in_use(self.columns)},
        )

    def _unscored(self, index: int, lengths: NDArray[np.int32]) -> tuple[NDArray[np.int32], ...]:
        """Return the unscored positions within each completion. This is the inverse of `_flat_unscored`."""
        flat = self.row("unscored", index)
        if not len(flat):
            return ()
        ends = np.cumsum(lengths)
        parts = np.split(flat, np.searchsorted(flat, ends[:-1]))
        return tuple((part - (end - n)).astype(np.int32) for part, n, end in zip(parts, lengths, ends, strict=True))

    def _find(self, index: int) -> tuple[int, int]:
        batch = int(np.searchsorted(self._starts, index, side="right")) - 1
        return batch, index - int(self._starts[batch])

    def row(self, name: str, index: int) -> NDArray[Any]:
        batch, i = self._find(index)
        offsets, values = self._arrays[batch][name]
        return values[offsets[i] : offsets[i + 1]]

    def text(self, name: str, index: int) -> str:
        batch, i = self._find(index)
        return self._batches[batch].column(name)[i].as_py()

    def numbers(self, name: str) -> NDArray[Any]:
        """Return the values of a column that has one number per row."""
        return np.concatenate([np.zeros(0, np.uint64), *(batch.column(name).to_numpy() for batch in self._batches)])

    def sizes(self, name: str) -> NDArray[np.int64]:
        return np.concatenate([np.zeros(0, np.int64), *(np.diff(arrays[name][0]) for arrays in self._arrays)])

    def values(self, name: str) -> NDArray[Any]:
        return np.concatenate([np.zeros(0, np.int32), *(arrays[name][1] for arrays in self._arrays)])

    def highest(self, name: str) -> int:
        return max(int(arrays[name][1].max()) for arrays in self._arrays)

    def reduce(self, name: str, ufunc: np.ufunc) -> NDArray[np.int64]:
        parts = [ufunc.reduceat(values, offsets[:-1]) for offsets, values in (a[name] for a in self._arrays)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _as_lists(column: pa.Array) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return the offsets and values of a list column. A column of numbers is treated as lists of one number each."""
    if isinstance(column, pa.LargeListArray):
        return column.offsets.to_numpy(), column.values.to_numpy()
    return np.arange(len(column) + 1), column.to_numpy()
