"""Chooses how many runs of a sweep are trained at a time, and on which GPU each of them."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.config.schema import Config
from tandem.errors import ConfigError, OutOfMemoryError
from tandem.terminal.arguments import option

# Memory of a GPU that each process needs besides its tensors: the CUDA context, kernels, and gaps between tensors.
PROCESS_BYTES = 2**30
MAX_PER_GPU = 4  # more hardly pay: the runs then wait for each other, and for the CPU
LIVE_REFERENCE_BYTES = 6  # per weight: in float32, with a bfloat16 copy
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of this machine: their names for CUDA_VISIBLE_DEVICES, and the memory of the smallest in bytes."""

    names: tuple[str, ...]
    memory: int


def choose_environments(configs: Sequence[Config], parallel: int | None) -> list[Mapping[str, str]]:
    """Return an environment for each process that trains at the same time.

    `parallel`: their number; None: one on a CPU, and on GPUs as many as fit, at most MAX_PER_GPU on each. Raise
    OutOfMemoryError if as many as `parallel` do not fit in the memory of the GPUs.
    """
    if parallel is not None and parallel < 1:
        raise ConfigError(f"{option('parallel', parallel)}: at least one run is trained at a time. Write 1 or more.")
    if len(configs) < 2 or parallel == 1:
        return [{}]
    gpus = visible_gpus()
    if gpus is None:
        return [{}] * min(parallel or 1, len(configs))
    # The largest runs may be trained at the same time.
    needs = sorted((needed_bytes(config, gpus) for config in configs), reverse=True)
    wanted = min(len(configs), parallel or MAX_PER_GPU * len(gpus.names))
    fitting = min(wanted, _num_fitting(needs, gpus.memory) * len(gpus.names))
    if parallel is not None and fitting < wanted:
        raise OutOfMemoryError(_does_not_fit(needs, wanted, gpus))
    return [{VISIBLE: gpus.names[slot % len(gpus.names)]} for slot in range(max(1, fitting))]


def uses_several_gpus(config: Config) -> bool:
    """Whether a run of a sweep uses several GPUs. By default it uses one, so that several runs can be trained at a time."""
    return config.cluster.gpus_per_node not in ("all", 1)


def refuse_parallel(configs: Sequence[Config], parallel: int | None) -> None:
    """Raise ConfigError if runs that use several GPUs would be trained at the same time."""
    if parallel is not None and parallel > 1 and any(uses_several_gpus(config) for config in configs):
        raise ConfigError(
            f"{option('parallel', parallel)}: a run with cluster.gpus_per_node above 1 is trained alone. Leave out one of them."
        )


def _num_fitting(needs: Sequence[float], memory: int) -> int:
    """Return how many of the largest runs fit on one GPU together."""
    from tandem.training.memory import USABLE_SHARE

    num = 0
    while num < len(needs) and sum(needs[: num + 1]) <= USABLE_SHARE * memory:
        num += 1
    return num


def _does_not_fit(needs: Sequence[float], wanted: int, gpus: Gpus) -> str:
    from tandem.training.memory import GIB

    each = -(-wanted // len(gpus.names))
    where = "the GPU has" if len(gpus.names) == 1 else "the smallest GPU has"
    return (
        f"{option('parallel', wanted)}: {each} runs on one GPU are expected to need {sum(needs[:each]) / GIB:.0f} GiB "
        f"together, and {where} {gpus.memory / GIB:.0f}. Lower {option('parallel')}, or leave it out to train as many at a "
        "time as fit."
    )


def visible_gpus() -> Gpus | None:
    """Return the GPUs that a run on this machine could use; None if it would use the CPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    num = torch.cuda.device_count()
    given = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    names = given[:num] if given else [str(number) for number in range(num)]
    return Gpus(tuple(names), min(torch.cuda.get_device_properties(number).total_memory for number in range(num)))


def needed_bytes(config: Config, gpus: Gpus) -> float:
    """Return the memory that a run is expected to need on a GPU, in bytes, without looking at its data.

    It is an upper bound of the estimate that the run makes itself: rows may be shorter than assumed here.
    """
    import torch

    from tandem.model.files.source import find_model
    from tandem.training.memory import auto_row_length, estimate_memory
    from tandem.training.start.machine import check_machine

    policy, device = config.policy, torch.device("cuda", 0)
    source = find_model(policy)
    machine = check_machine(config, source, device)
    need = estimate_memory(source, policy, device, lora=machine.lora, precision=machine.precision)
    given, longest = policy.packing.pack_length, policy.max_total_sequence_length
    rows = auto_row_length(need, policy, device, gpus.memory).tokens if given == "auto" else given
    # A packed row holds at least one preference: a prompt and two completions.
    tokens = longest if policy.packing.mode == "none" else max(rows, 2 * longest)
    reference = LIVE_REFERENCE_BYTES * need.num_weights if config.reference.mode == "live" else 0
    return need.fixed + need.temporary(tokens * policy.packing.packs_per_micro_batch) + reference + PROCESS_BYTES
