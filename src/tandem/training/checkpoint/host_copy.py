"""Copies tensors to host memory, so that a checkpoint can be written while training changes the tensors."""

import mmap
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tandem.training.checkpoint.parts import Part

PAGE_BYTES = 4096
# Memory is pinned in pieces, because the GPU's driver blocks all other calls while it pins one.
PIECE_BYTES = 64 * 1024**2


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Copies of tensor parts in host memory. A copy from a GPU may still be in progress."""

    parts: dict[str, Part]
    arrival: torch.cuda.Event | None = None

    def arrived(self) -> dict[str, Part]:
        """Wait until the copy is complete, and return the parts."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.parts


class HostCopier:
    """Copies tensors to the host asynchronously.

    The GPU starts the next step at once; only the optimizer update waits for the copy.
    Copies to pinned memory are many times faster, but pinning takes seconds. Therefore another thread pins the memory in advance,
    and the memory is reused for every copy. A copy must be written to disk before the next copy starts.
    """

    def __init__(self, device: torch.device, optimizer: Optimizer, arrived: Callable[[], None] = lambda: None):
        """`arrived`: waits until tensors that are in host memory already have their values."""
        self._arrived = arrived
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arrival: torch.cuda.Event | None = None
        self._memory: Future[PinnedMemory] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="host memory")
        optimizer.register_step_pre_hook(self._hold_update)

    def reserve(self, parts: dict[str, Part]) -> None:
        """Start allocating host memory for copies of these parts, in the background."""
        if self._stream is not None:
            self._memory = self._thread.submit(PinnedMemory, {name: part.tensor for name, part in parts.items()})

    def copy(self, parts: dict[str, Part]) -> HostCopy:
        if self._stream is None:
            return HostCopy({name: replace(part, tensor=part.tensor.clone()) for name, part in parts.items()})
        if self._memory is None:
            self.reserve(parts)
        assert self._memory is not None
        places = self._memory.result().places
        self._arrived()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(
                [places[name] for name in parts], [part.tensor for part in parts.values()], non_blocking=True
            )
            self._arrival = torch.cuda.Event()
            self._arrival.record(self._stream)
        return HostCopy({name: replace(part, tensor=places[name]) for name, part in parts.items()}, self._arrival)

    def close(self) -> None:
        """Release the memory. No copy may still be in use."""
        self._thread.shutdown()
        if (
            self._memory is not None and self._memory.exception() is None
        ):  # copy has already raised an exception of the thread
            self._memory.result().release()

    def _hold_update(self, *_: Any) -> None:
        if self._arrival is not None:
            torch.cuda.current_stream().wait_event(self._arrival)
            self._arrival = None


class PinnedMemory:
    """Pinned host memory, which a GPU can write to directly. `places`: for each given tensor, a tensor in pinned memory.

    torch's own pinned memory is not used: its size is rounded up to a power of two, and allocating it blocks all other use of the
    GPU.

    Memory that is freed must not stay pinned: when the system gives its addresses to something else, the GPU would still read the
    old pages there.
    """

    def __init__(self, tensors: dict[str, Tensor]):
        self.places: dict[str, Tensor] = {}
        self._pinned: list[int] = []
        piece: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            piece[name] = tensor
            if sum(map(_paged_bytes, piece.values())) >= PIECE_BYTES:
                self._allocate(piece)
                piece = {}
        self._allocate(piece)
        self._release = weakref.finalize(self, _unpin, self._pinned)
        self._release.atexit = False  # a process that ends frees everything

    def _allocate(self, tensors: dict[str, Tensor]) -> None:
        size = sum(map(_paged_bytes, tensors.values()))
        if size == 0:
            self.places.update({name: torch.empty_like(tensor, device="cpu") for name, tensor in tensors.items()})
            return
        memory = torch.frombuffer(_pages(size), dtype=torch.uint8)
        memory.zero_()  # the system allocates pages on the first write; that takes longer than pinning them
        # If pinning fails, the memory still works and copies are slower.
        if int(_driver().cudaHostRegister(memory.data_ptr(), size, 0)) == 0:
            self._pinned.append(memory.data_ptr())
        start = 0
        for name, tensor in tensors.items():
            part = memory[start : start + tensor.numel() * tensor.element_size()]
            self.places[name] = part.view(tensor.dtype).view(tensor.shape)
            start += _paged_bytes(tensor)

    def release(self) -> None:
        self._release()
        self.places = {}


def _unpin(addresses: list[int]) -> None:
    for address in addresses:
        _driver().cudaHostUnregister(address)


def _pages(size: int) -> mmap.mmap:
    if sys.platform != "linux":
        return mmap.mmap(-1, size)
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)  # fewer, larger pages are allocated faster
    return pages


def _driver() -> Any:
    return torch.cuda.cudart()


def _paged_bytes(tensor: Tensor) -> int:
    """Return the size of a tensor in bytes, rounded up to whole pages."""
    return -(-tensor.numel() * tensor.element_size() // PAGE_BYTES) * PAGE_BYTES
