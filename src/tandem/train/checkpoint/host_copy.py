"""Parts of tensors that a run goes on changing in; a copy of them on the host, as they are now, out."""

import mmap
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tandem.train.checkpoint.parts import Part

PAGE = 4096
# Memory is pinned in pieces: while one is, the GPU's driver lets nobody else work.
PIECE = 64 * 1024**2


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Parts on the host. On a GPU they are still arriving when this is made."""

    parts: dict[str, Part]
    arrival: torch.cuda.Event | None = None

    def arrived(self) -> dict[str, Part]:
        """The parts, once all are there."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.parts


class HostCopier:
    """Copies beside the run's own work: a GPU's next step begins at once, and only its update waits for the copy.

    To pinned memory a GPU copies many times faster, but that takes seconds to get: it is asked for ahead, in another thread,
    and used again, so that one copy must be done with before the next is made.
    """

    def __init__(self, device: torch.device, optimizer: Optimizer):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arrival: torch.cuda.Event | None = None
        self._memory: Future[PinnedMemory] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="host memory")
        optimizer.register_step_pre_hook(self._hold_update)

    def reserve(self, parts: dict[str, Part]) -> None:
        """Begin to get the memory for copies of these."""
        if self._stream is not None:
            self._memory = self._thread.submit(PinnedMemory, {name: part.tensor for name, part in parts.items()})

    def copy(self, parts: dict[str, Part]) -> HostCopy:
        if self._stream is None:
            return HostCopy({name: replace(part, tensor=part.tensor.clone()) for name, part in parts.items()})
        if self._memory is None:
            self.reserve(parts)
        assert self._memory is not None
        places = self._memory.result().places
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(
                [places[name] for name in parts], [part.tensor for part in parts.values()], non_blocking=True
            )
            self._arrival = torch.cuda.Event()
            self._arrival.record(self._stream)
        return HostCopy({name: replace(part, tensor=places[name]) for name, part in parts.items()}, self._arrival)

    def close(self) -> None:
        """Give the memory back; copies are done with."""
        self._thread.shutdown()
        if self._memory is not None and self._memory.exception() is None:  # which the first copy told of
            self._memory.result().release()

    def _hold_update(self, *_: Any) -> None:
        if self._arrival is not None:
            torch.cuda.current_stream().wait_event(self._arrival)
            self._arrival = None


class PinnedMemory:
    """Memory on the host that a GPU writes to directly: a place for each of some tensors.

    torch's own way to such memory takes the next power of two, and holds up every other use of the GPU while it is taken.
    """

    def __init__(self, tensors: dict[str, Tensor]):
        self.places: dict[str, Tensor] = {}
        self._pinned: list[int] = []
        piece: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            piece[name] = tensor
            if sum(map(_room, piece.values())) >= PIECE:
                self._take(piece)
                piece = {}
        self._take(piece)

    def _take(self, tensors: dict[str, Tensor]) -> None:
        size = sum(map(_room, tensors.values()))
        if size == 0:
            self.places.update({name: torch.empty_like(tensor, device="cpu") for name, tensor in tensors.items()})
            return
        memory = torch.frombuffer(_pages(size), dtype=torch.uint8)
        memory.zero_()  # the system gives pages when they are written to, which is most of the time that pinning takes
        # Where this fails the memory is as good, and slower to copy to.
        if int(_driver().cudaHostRegister(memory.data_ptr(), size, 0)) == 0:
            self._pinned.append(memory.data_ptr())
        start = 0
        for name, tensor in tensors.items():
            part = memory[start : start + tensor.numel() * tensor.element_size()]
            self.places[name] = part.view(tensor.dtype).view(tensor.shape)
            start += _room(tensor)

    def release(self) -> None:
        for address in self._pinned:
            _driver().cudaHostUnregister(address)
        self._pinned, self.places = [], {}


def _pages(size: int) -> mmap.mmap:
    if sys.platform != "linux":
        return mmap.mmap(-1, size)
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)  # fewer and larger ones are there sooner
    return pages


def _driver() -> Any:
    return torch.cuda.cudart()


def _room(tensor: Tensor) -> int:
    """Bytes that a tensor takes, in whole pages."""
    return -(-tensor.numel() * tensor.element_size() // PAGE) * PAGE
