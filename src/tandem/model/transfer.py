"""Numbers brought to the device and back, neither side waiting for the other until they are read."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(given: NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """What is on the host, on the device. A GPU fetches it when it comes to it: from pinned memory the host need not wait."""
    tensor = given if isinstance(given, Tensor) else torch.from_numpy(np.ascontiguousarray(given))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True, slots=True, eq=False)
class PendingHostCopy:
    """A tensor of the device, on its way to the host."""

    values: Tensor
    arrival: torch.cuda.Event | None

    def read(self) -> NDArray[Any]:
        """Waits for what was asked of the device before it, and for nothing after."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.values.numpy()


def to_host(tensor: Tensor) -> PendingHostCopy:
    on_its_way = PendingHostCopy(tensor.to("cpu", non_blocking=True), torch.cuda.Event() if tensor.is_cuda else None)
    if on_its_way.arrival is not None:
        on_its_way.arrival.record()
    return on_its_way
