"""Counts the host memory that a machine needs for optimizer states (policy.optimizer.offload). Refuses a run without it."""

from dataclasses import dataclass

import torch

from tandem.config.schema import Config
from tandem.errors import MachineError
from tandem.model.distributed.mesh import MeshShape
from tandem.model.lora.layers import LoraPlan
from tandem.storage.cache import GIB
from tandem.training.memory import MemoryEstimate, device_memory

OFFLOAD = "policy.optimizer.offload"


@dataclass(frozen=True, slots=True)
class HostNeed:
    """The host memory of one machine for optimizer states, in bytes."""

    states: float  # of all ranks on the machine
    copies: float  # of weights and states, while a checkpoint is written

    @property
    def total(self) -> float:
        return self.states + self.copies

    def __str__(self) -> str:
        copies = f" ({_gib(self.total)} with the copies that a checkpoint is written from)" if self.copies else ""
        return f"{_gib(self.states)} GiB{copies}"


def host_need(
    need: MemoryEstimate, config: Config, *, lora: LoraPlan | None, mesh: MeshShape, ranks_here: int
) -> HostNeed:
    """Return what the states of all ranks on a machine take in host memory. `ranks_here`: the ranks on the machine."""
    checkpointing, states = config.checkpointing, need.parts.all_states
    trained = need.parts.weights if lora is None else 4 * lora.num_trained / mesh.weight_shards
    saved = trained + (states if checkpointing.save_optimizer else 0)
    # Replicas are equal, and only the first one is saved.
    saving = min(ranks_here, mesh.weight_shards) if checkpointing.enabled else 0
    return HostNeed(states=ranks_here * states, copies=saving * saved)


def refuse_full_host(need: HostNeed, ranks_here: int, available: int | None = None) -> None:
    """Raise MachineError, before weights load, if the machine does not have the memory. `available`: None: of this machine."""
    available = available or host_memory()
    if need.total <= available:
        return
    whose = "the optimizer states" if ranks_here == 1 else f"the optimizer states of {ranks_here} ranks"
    raise MachineError(
        f"{OFFLOAD} = true: {whose} need {need} of this machine's memory, which has {_gib(available)} GiB. "
        "Use policy.optimizer.state_dtype=int8 or more machines, or leave it out."
    )


def offload_advice(need: MemoryEstimate, host: HostNeed, config: Config, device: torch.device) -> str:
    """Return the override that moves optimizer states to the host, with what it needs there.

    Return nothing if it would have no effect, or if this machine does not have the memory.
    """
    is_useless = device.type != "cuda" or config.policy.optimizer.offload or need.parts.all_states < GIB
    return (
        "" if is_useless or host.total > host_memory() else f"{OFFLOAD}=true ({_gib(host.states)} GiB of host memory)"
    )


def host_memory() -> int:
    """Return the memory of this machine in bytes."""
    return device_memory(torch.device("cpu"))


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f}"
