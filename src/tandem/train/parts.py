"""This worker's parts of tensors in; a file of them out, from which any number of workers fill their own parts again.

The files are safetensors, written here in one go: nothing but writing happens, so that a thread can do it while a run goes
on. A sharded tensor is a row of parts, each some rows of it.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int64: "I64",
}
FIRST_ROWS = "first_rows"
# Written at once. Between two of them, and only there, Python is held up.
SLICE = 16 * 1024**2


@dataclass(frozen=True, slots=True)
class Part:
    """What this worker holds of a tensor: all of it, or its rows from `first` on."""

    tensor: Tensor
    first: int = 0

    def fill(self, stored: Any, first: int) -> None:
        """Copy the rows that this part and a stored one, which begins at row `first`, both have."""
        low = max(self.first, first)
        high = min(self.first + len(self.tensor), first + stored.get_shape()[0])
        if low < high:
            self.tensor[low - self.first : high - self.first].copy_(stored[low - first : high - first])


def part_of(tensor: Any) -> Part:
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return Part(tensor)
    (placement,), mesh, rows = tensor.placements, tensor.device_mesh, tensor.shape[0]
    assert placement.is_shard(0), placement
    each = -(-rows // mesh.size())  # the last have fewer, or none
    return Part(tensor.to_local(), min(rows, each * mesh.get_local_rank()))


def write_parts(file: Path, parts: dict[str, Part]) -> str:
    """Write parts, which are on the host; return the SHA-256 of the file."""
    # Wide numbers first: each then lies at a multiple of its size, as readers want it.
    names = sorted(parts, key=lambda name: -parts[name].tensor.element_size())
    header: dict[str, Any] = {"__metadata__": {FIRST_ROWS: json.dumps({name: parts[name].first for name in names})}}
    end = 0
    for name in names:
        tensor, start = parts[name].tensor, end
        end += tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    told = json.dumps(header).encode()
    told += b" " * (-len(told) % 8)
    digest = hashlib.sha256()
    with file.open("wb") as out:
        for piece in _pieces(len(told).to_bytes(8, "little") + told, (parts[name].tensor for name in names)):
            out.write(piece)
            digest.update(piece)
    return digest.hexdigest()


def _pieces(header: bytes, tensors: Iterable[Tensor]) -> Iterator[bytes | memoryview]:
    yield header
    for tensor in tensors:
        numbers: Any = tensor.contiguous().flatten().view(torch.uint8).numpy()
        raw = memoryview(numbers)
        yield from (raw[start : start + SLICE] for start in range(0, len(raw), SLICE))


def names_in(folder: Path) -> set[str]:
    """The tensors of which there are parts in the files of a folder."""
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as stored:
            names.update(stored.keys())
    return names


def fill_parts(folder: Path, parts: dict[str, Part]) -> None:
    """Fill this worker's parts, in place, from all files of a folder."""
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as stored:
            first_rows = json.loads(stored.metadata()[FIRST_ROWS])
            for name in first_rows.keys() & parts.keys():
                if parts[name].tensor.ndim:
                    parts[name].fill(stored.get_slice(name), first_rows[name])
                else:
                    parts[name].tensor.copy_(stored.get_tensor(name))
