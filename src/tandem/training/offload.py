"""Keeps optimizer states in host memory, and moves them through the device during an update.

Weights are updated in buckets. While one bucket is updated, the states of the next one arrive, and those of the one before leave.
"""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack, to_dlpack

from tandem.model.distributed.shards import local_shard
from tandem.training.checkpoint.host_copy import PinnedMemory
from tandem.training.checkpoint.parts import Part, part_of

BUCKET_BYTES = 128 * 1024**2  # of states
NUM_BUCKETS = 3  # on the device at a time
ALIGNMENT = 256  # bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of this rank's shard of a parameter, with their states on the device."""

    parameter: nn.Parameter
    weight: Tensor
    grad: Tensor
    states: dict[str, Tensor]
    first: int  # how many numbers of the shard are before the piece


@dataclass(frozen=True, slots=True)
class _Rows:
    """The place of a piece in a parameter."""

    parameter: nn.Parameter
    rows: slice


class HostStates:
    """The optimizer states of this rank's shards, in host memory, which is pinned if the device is a GPU."""

    def __init__(self, states: dict[nn.Parameter, dict[str, Tensor]]):
        """`states`: tensors on the meta device that describe the states of each parameter's shard. States begin at 0."""
        self._device = next(iter(states)).device
        is_gpu = self._device.type == "cuda"
        self._arrivals = torch.cuda.Stream(self._device) if is_gpu else None
        self._departures = torch.cuda.Stream(self._device) if is_gpu else None
        names = {(p, name): f"{i}.{name}" for i, p in enumerate(states) for name in states[p]}
        flat = {names[p, name]: tensor for p in states for name, tensor in states[p].items()}
        self._memory = PinnedMemory(flat) if is_gpu else None
        places = (
            self._memory.places if self._memory else {k: torch.zeros_like(t, device="cpu") for k, t in flat.items()}
        )
        self._states = {p: {name: places[names[p, name]] for name in states[p]} for p in states}
        self._buckets = _in_buckets(self._states)
        self._slot_bytes = max((sum(map(self._bytes, bucket)) for bucket in self._buckets), default=0)
        self._update: Any = None  # an event, after the latest update

    def parts(self, parameter: nn.Parameter) -> dict[str, Part]:
        """Return the states of a parameter as checkpoints store them."""
        first = part_of(parameter).first
        return {name: Part(tensor, first) for name, tensor in self._states[parameter].items()}

    def arrived(self) -> None:
        """Wait until the host has the states of the latest update."""
        if self._update is not None:
            self._update.synchronize()

    def close(self) -> None:
        """Release the memory. The states can no longer be used."""
        self.arrived()
        if self._memory is not None:
            self._memory.release()

    def buckets(self, parameters: Iterable[nn.Parameter]) -> Iterator[list[Piece]]:
        """Yield pieces of these parameters with their states on the device. Changed states are then copied back.

        The host does not wait for the device.
        """
        given, arrivals, departures = set(parameters), self._arrivals, self._departures
        buckets = [own for bucket in self._buckets if (own := [one for one in bucket if one.parameter in given])]
        # Allocated for the update alone. Afterwards the memory is used for activations again.
        count = min(NUM_BUCKETS, len(buckets))
        slots = [torch.empty(self._slot_bytes, dtype=torch.uint8, device=self._device) for _ in range(count)]
        if arrivals is not None:
            arrivals.wait_stream(torch.cuda.current_stream())
        left: list[Any] = [None] * len(slots)
        for number, bucket in enumerate(buckets):
            slot = number % len(slots)
            if arrivals is not None and (event := left[slot]) is not None:
                arrivals.wait_event(event)
            with _on(arrivals):
                pieces = self._arrive(bucket, slots[slot])
            if arrivals is not None:
                torch.cuda.current_stream().wait_stream(arrivals)
            yield pieces
            if departures is not None:
                departures.wait_stream(torch.cuda.current_stream())
            with _on(departures):
                self._leave(bucket, pieces)
            if departures is not None:
                left[slot] = departures.record_event()
        if departures is not None:
            torch.cuda.current_stream().wait_stream(departures)
            self._update = torch.cuda.current_stream().record_event()

    def _arrive(self, bucket: list[_Rows], slot: Tensor) -> list[Piece]:
        pieces, start = [], 0
        for one in bucket:
            states = {}
            for name, host in self._of(one).items():
                place = slot[start : start + host.nbytes].view(host.dtype).view(host.shape)
                states[name] = _alone(place).copy_(host, non_blocking=True)
                start += _aligned(host.nbytes)
            weight, grad = (local_shard(t) for t in (one.parameter.detach(), one.parameter.grad))
            first = one.rows.start * weight[0].numel() if weight.ndim else 0
            own = (_rows(weight, one.rows), _rows(grad, one.rows))
            pieces.append(Piece(one.parameter, *own, states=states, first=first))
        return pieces

    def _leave(self, bucket: list[_Rows], pieces: list[Piece]) -> None:
        for one, piece in zip(bucket, pieces, strict=True):
            for name, host in self._of(one).items():
                host.copy_(piece.states[name], non_blocking=True)

    def _of(self, one: _Rows) -> dict[str, Tensor]:
        return {name: _rows(tensor, one.rows) for name, tensor in self._states[one.parameter].items()}

    def _bytes(self, one: _Rows) -> int:
        return sum(_aligned(tensor.nbytes) for tensor in self._of(one).values())


def bytes_on_device(states: float, *, offload: bool) -> float:
    """Return how many bytes of optimizer states are on the device during an update. `states`: bytes of all states."""
    return min(states, NUM_BUCKETS * BUCKET_BYTES) if offload else states


def _in_buckets(states: dict[nn.Parameter, dict[str, Tensor]]) -> list[list[_Rows]]:
    """Divide parameters by rows into pieces, and put as many pieces into a bucket as have BUCKET_BYTES of states.

    Example: with buckets of 100 bytes, parameters of 3 and 8 rows, and 20 bytes per row, the buckets have rows 0 to 2, and
    rows 0 to 4 and 5 to 7.
    """
    buckets: list[list[_Rows]] = []
    free = 0
    for parameter, of_parameter in states.items():
        size = sum(tensor.nbytes for tensor in of_parameter.values())
        num_rows = len(next(iter(of_parameter.values()))) if parameter.ndim else 1
        if size == 0:
            continue
        together = max(1, BUCKET_BYTES * num_rows // size)
        for start in range(0, num_rows, together):
            rows = slice(start, min(num_rows, start + together))
            needed = size * (rows.stop - rows.start) // num_rows
            if needed > free:
                buckets.append([])
                free = BUCKET_BYTES
            buckets[-1].append(_Rows(parameter, rows))
            free -= needed
    return buckets


def _rows(tensor: Tensor, rows: slice) -> Tensor:
    return tensor[rows] if tensor.ndim else tensor


def _alone(tensor: Tensor) -> Tensor:
    """Return the same memory as a tensor that is not a view: compiled updates refuse views that differ in dtype."""
    return from_dlpack(to_dlpack(tensor))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _on(stream: Any) -> Any:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
