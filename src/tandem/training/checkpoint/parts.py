"""Writes each rank's shards to a file, and loads them again. The number of ranks may differ between writing and loading.

The files are in the safetensors format, but are not written by the safetensors library: the code here hardly blocks other Python
threads, so it can run during training. Tensors are sharded by rows, so each part holds consecutive rows.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from tandem.errors import CheckpointError
from tandem.model.distributed.shards import own_rows
from tandem.terminal.arguments import option

DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int64: "I64",
}
FIRST_ROWS = "first_rows"
# Bytes per write call. Other Python threads are blocked only between two calls.
SLICE_BYTES = 16 * 1024**2


def other_checkpoint_hint() -> str:
    return f"Move the checkpoint elsewhere to resume from an earlier one, or start again with {option('fresh', True)}."


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a tensor that this rank holds: the whole tensor, or consecutive rows that start at row `first`."""

    tensor: Tensor
    first: int = 0

    def fill(self, stored: Any, first: int) -> None:
        """Copy rows from a stored part, which starts at row `first` of the tensor, into this part.

        Only rows that are in both parts are copied.
        """
        low = max(self.first, first)
        high = min(self.first + len(self.tensor), first + stored.get_shape()[0])
        if low < high:
            self.tensor[low - self.first : high - self.first].copy_(stored[low - first : high - first])


def part_of(tensor: Any) -> Part:
    """Return what this rank holds of a tensor. A part that is given is returned as it is."""
    if isinstance(tensor, Part):
        return tensor
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return Part(tensor)
    return Part(tensor.to_local(), own_rows(tensor).start)


def write_parts(file: Path, parts: dict[str, Part]) -> str:
    """Write parts in host memory to a file, and return the SHA-256 of the file."""
    # Wide dtypes first, so that every tensor is aligned to its item size, as readers expect.
    names = sorted(parts, key=lambda name: -parts[name].tensor.element_size())
    header: dict[str, Any] = {"__metadata__": {FIRST_ROWS: json.dumps({name: parts[name].first for name in names})}}
    end = 0
    for name in names:
        tensor, start = parts[name].tensor, end
        end += tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    digest = hashlib.sha256()
    with file.open("wb") as out:
        for piece in _pieces(len(encoded).to_bytes(8, "little") + encoded, (parts[name].tensor for name in names)):
            out.write(piece)
            digest.update(piece)
    return digest.hexdigest()


def _pieces(header: bytes, tensors: Iterable[Tensor]) -> Iterator[bytes | memoryview]:
    yield header
    for tensor in tensors:
        numbers: Any = tensor.contiguous().flatten().view(torch.uint8).numpy()
        raw = memoryview(numbers)
        yield from (raw[start : start + SLICE_BYTES] for start in range(0, len(raw), SLICE_BYTES))


def names_in(folder: Path) -> set[str]:
    """Return the names of all tensors in the files of a folder."""
    return {name for _, stored in _open_files(folder) for name in stored.keys()}  # noqa: SIM118 - not a mapping


def fill_parts(folder: Path, parts: dict[str, Part]) -> None:
    """Fill this rank's parts in place from the files of a checkpoint. Raise CheckpointError if rows are missing."""
    filled: dict[str, list[range]] = {name: [] for name in parts}
    for file, stored in _open_files(folder):
        first_rows = _first_rows(file, stored)
        for name in first_rows.keys() & parts.keys():
            filled[name].append(_fill(file, stored, name, parts[name], first=first_rows[name]))
    for name, part in parts.items():
        reached = part.first
        for rows in sorted(filled[name], key=lambda rows: rows.start):
            reached = max(reached, rows.stop) if rows.start <= reached else reached
        if reached < part.first + _num_rows(part):
            raise CheckpointError(
                f"{folder}: the tensor {name} is incomplete, so no run can resume from this checkpoint. "
                f"{other_checkpoint_hint()}"
            )


def _open_files(folder: Path) -> Iterator[tuple[Path, Any]]:
    """Yield each file of a folder and its open reader. Raise CheckpointError if a file is damaged."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            if not file.is_file():
                raise SafetensorError("not a regular file")
            with safe_open(file, framework="pt") as stored:
                yield file, stored
        except SafetensorError as error:
            raise CheckpointError(
                f"{file}: {error}, so no run can resume from this checkpoint. {other_checkpoint_hint()}"
            ) from None


def _first_rows(file: Path, stored: Any) -> dict[str, int]:
    """Return, for each tensor in a file, the number of the first of its rows that the file holds."""
    try:
        found = json.loads((stored.metadata() or {})[FIRST_ROWS])
    except (ValueError, KeyError, RecursionError):
        found = None
    names = set(stored.keys())
    if not isinstance(found, dict) or not all(type(row) is int and row >= 0 for row in found.values()):
        raise CheckpointError(
            f"{file}: the header does not list which rows the file holds, so no run can resume from this checkpoint. "
            f"{other_checkpoint_hint()}"
        )
    return {name: row for name, row in found.items() if name in names}


def _fill(file: Path, stored: Any, name: str, part: Part, first: int) -> range:
    """Copy the rows of a part that the file holds into the part. Return the range of rows that the file holds."""
    piece, own = stored.get_slice(name), part.tensor
    shape = piece.get_shape()
    if piece.get_dtype() != DTYPES[own.dtype] or len(shape) != own.ndim or shape[1:] != list(own.shape[1:]):
        raise CheckpointError(
            f"{file}: the tensor {name} has shape {shape} and dtype {piece.get_dtype()}, which does not match the model of "
            f"this run, so the run cannot resume from this checkpoint. {other_checkpoint_hint()}"
        )
    if own.ndim:
        part.fill(piece, first)
    else:
        own.copy_(stored.get_tensor(name))
    return range(first, first + (shape[0] if shape else 1))


def _num_rows(part: Part) -> int:
    return len(part.tensor) if part.tensor.ndim else 1
