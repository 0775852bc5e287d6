"""Tensors that a run goes on changing in; a copy of them on the host, as they are now, out."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Tensors on the host. On a GPU they are still arriving when this is made."""

    tensors: dict[str, Any]
    arrival: torch.cuda.Event | None = None

    def arrived(self) -> dict[str, Any]:
        """The tensors, once all are there."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.tensors


class HostCopier:
    """Copies beside the run's own work: a GPU's next step begins at once, and only its update waits for the copy.

    To pinned memory a GPU copies many times faster, but that takes long to get. It is used again, so that one copy must be
    done with before the next is made.
    """

    def __init__(self, device: torch.device, optimizer: Optimizer):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arrival: torch.cuda.Event | None = None
        self._memory: dict[str, Any] = {}
        optimizer.register_step_pre_hook(self._hold_update)

    def copy(self, tensors: dict[str, Any]) -> HostCopy:
        if self._stream is None:
            return HostCopy({name: tensor.detach().clone() for name, tensor in tensors.items()})
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for name, tensor in tensors.items():
                if name not in self._memory:
                    self._memory[name] = _memory_for(tensor)
                _local(self._memory[name]).copy_(_local(tensor), non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record(self._stream)
        return HostCopy({name: self._memory[name] for name in tensors}, self._arrival)

    def _hold_update(self, *_: Any) -> None:
        if self._arrival is not None:
            torch.cuda.current_stream().wait_event(self._arrival)
            self._arrival = None


def _memory_for(tensor: Any) -> Any:
    """Memory on the host of a tensor's shape; of a sharded one, of this worker's part."""
    local = _local(tensor)
    pinned = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda and local.numel() > 0)
    if not isinstance(tensor, DTensor):
        return pinned
    sharded: Any = tensor.to("cpu")
    sharded._local_tensor = pinned  # as torch's own staging does: there is no public way to a shard that is elsewhere
    return sharded


def _local(tensor: Any) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
