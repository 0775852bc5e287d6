"""A rehearsed pack in; a Forecast out: what a run will need of its device's memory, part by part."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tandem.config.policy import Policy as PolicyConfig
from tandem.errors import OutOfMemoryError
from tandem.model.policy import Policy
from tandem.train.row_length import USED, what_to_lower

GIB = 2**30
# AdamW keeps two moments of every trained number.
MOMENTS = 2


@dataclass(frozen=True, slots=True)
class Forecast:
    """Bytes on this worker's device."""

    weights: int
    gradients: int
    states: int  # the optimizer's
    activations: int  # of the longest micro-batch, with everything else that comes and goes
    length: int  # tokens of its rows

    @property
    def fixed(self) -> int:
        """Without the copy of the weights that is computed with: it is measured with the activations."""
        return self.weights + self.gradients + self.states

    @property
    def total(self) -> int:
        return self.fixed + self.activations

    def __str__(self) -> str:
        return (
            f"weights {_gib(self.weights)}, gradients {_gib(self.gradients)}, optimizer states {_gib(self.states)}, "
            f"activations in rows of {self.length:,} tokens {_gib(self.activations)}: {_gib(self.total)} GiB"
        )


def forecast(policy: Policy, peak: int, length: int, *, state_bytes: float) -> Forecast:
    """From the peak of forward and backward beside gradients that are there already; the optimizer's states come later.

    `state_bytes`: of each number of a moment.
    """
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    weights = sum(_bytes(parameter) for parameter in policy.parameters())
    gradients = sum(torch.float32.itemsize * _local(parameter).numel() for parameter in trained)
    states = int(sum(MOMENTS * state_bytes * _local(parameter).numel() for parameter in trained))
    return Forecast(weights, gradients, states, max(0, peak - weights - gradients), length)


def refuse_what_cannot_fit(expected: Forecast, device: torch.device, policy: PolicyConfig) -> None:
    """Before the first step, rather than in it."""
    room = torch.cuda.get_device_properties(device).total_memory
    if expected.total > room:
        raise OutOfMemoryError(
            f"the run needs {_gib(expected.total)} GiB of a GPU that has {_gib(room)}: {expected}. "
            f"{what_to_lower(expected.length, policy, shorter_rows_help=expected.fixed < USED * room)}"
        )


def out_of_memory(error: Exception, length: int, policy: PolicyConfig) -> OutOfMemoryError | None:
    """What to tell the user if the device, or the host, had no room left; None for any other error."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if not known and "DefaultCPUAllocator: " not in str(error):  # "can't allocate", or "not enough memory"
        return None
    return OutOfMemoryError(f"{' '.join(str(error).split())} {what_to_lower(length, policy, shorter_rows_help=True)}")


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"


def _local(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _bytes(parameter: nn.Parameter) -> int:
    local = _local(parameter)
    return local.numel() * local.element_size()
