"""Forecasts the memory of a step from a measured forward and backward pass, after the weights are loaded."""

from dataclasses import dataclass

import torch
from torch import nn

from tandem.config.sections.policy import Policy as PolicyConfig
from tandem.errors import OutOfMemoryError
from tandem.model.distributed.shards import local_shard
from tandem.model.policy import Policy
from tandem.storage.cache import GIB
from tandem.training.memory import USABLE_SHARE, suggest_less_memory
from tandem.training.offload import bytes_on_device


@dataclass(frozen=True, slots=True)
class Forecast:
    """The memory that the run needs on this rank's device, in bytes.

    The forecast is based on a measured forward and backward pass.
    """

    weights: int
    gradients: int
    states: int  # of the optimizer
    activations: int  # of the longest micro-batch, with other temporary tensors
    length: int  # tokens per row of that micro-batch

    @property
    def fixed(self) -> int:
        """Bytes of weights, gradients and optimizer states. The bfloat16 copy of the weights counts as activations."""
        return self.weights + self.gradients + self.states

    @property
    def total(self) -> int:
        return self.fixed + self.activations

    def __str__(self) -> str:
        return (
            f"weights {_gib(self.weights)}, gradients {_gib(self.gradients)}, optimizer states {_gib(self.states)}, "
            f"activations in rows of {self.length:,} tokens {_gib(self.activations)}: {_gib(self.total)} GiB"
        )


def forecast(policy: Policy, peak: int, length: int, *, state_bytes: float, offload: bool = False) -> Forecast:
    """Forecast the memory of a step. `peak`: the peak memory of a forward and backward pass with gradients already allocated.

    Optimizer states are not part of the peak and are added here. `state_bytes`: bytes of optimizer state per trained parameter.
    `offload`: whether they are in host memory, and only a few buckets on the device.
    """
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    weights = sum(_bytes(parameter) for parameter in policy.parameters())
    gradients = sum(torch.float32.itemsize * local_shard(parameter).numel() for parameter in trained)
    states = int(
        bytes_on_device(sum(state_bytes * local_shard(parameter).numel() for parameter in trained), offload=offload)
    )
    return Forecast(
        weights=weights,
        gradients=gradients,
        states=states,
        activations=max(0, peak - weights - gradients),
        length=length,
    )


def refuse_forecast_overflow(expected: Forecast, device: torch.device, policy: PolicyConfig, offload: str = "") -> None:
    """Raise OutOfMemoryError if the first step would run out of GPU memory."""
    available = torch.cuda.get_device_properties(device).total_memory
    if expected.total > available:
        raise OutOfMemoryError(
            f"the run needs {_gib(expected.total)} GiB and the GPU has {_gib(available)}: {expected}. "
            f"{suggest_less_memory(expected.length, policy, expected.fixed < USABLE_SHARE * available, offload)}"
        )


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"


def _bytes(parameter: nn.Parameter) -> int:
    local = local_shard(parameter)
    return local.numel() * local.element_size()
