"""Asynchronous copies between host and device. The host waits only when it reads the values."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(given: NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """Copy an array to the device. For a GPU the copy goes through pinned memory, so the host does not wait for it."""
    tensor = given if isinstance(given, Tensor) else torch.from_numpy(np.ascontiguousarray(given))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True, slots=True, eq=False)
class PendingHostCopy:
    """A tensor that is being copied from the device to the host."""

    values: Tensor
    arrival: torch.cuda.Event | None

    def read(self) -> NDArray[Any]:
        """Wait for the copy and return the values. Does not wait for work queued on the device after the copy."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.values.numpy()


def to_host(tensor: Tensor) -> PendingHostCopy:
    """Start copying a tensor from the device to the host."""
    copy = PendingHostCopy(tensor.to("cpu", non_blocking=True), torch.cuda.Event() if tensor.is_cuda else None)
    if copy.arrival is not None:
        copy.arrival.record()
    return copy
