"""Decides what starts the ranks of a run, and how many there are. Everything is checked before any weights load."""

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from tandem.config.load import LoadedConfig
from tandem.config.sections.cluster import Cluster
from tandem.config.validation import GIVEN_BY_USER, origin_of
from tandem.errors import ConfigError, MachineError
from tandem.isolation import LAUNCHER
from tandem.launch.srun import is_in_step
from tandem.terminal.commands import install_command

OWN_PROCESSES = ("local", "ray", "sweep")  # started by tandem, which has checked the configuration
GPUS_KEY = "cluster.gpus_per_node"
RANKS_WITHOUT_GPUS = 16  # or as many as the machine has cores
SHARE_GPU = "TANDEM_SHARE_GPU"  # for tests: all ranks use the same GPU
GPU_DEVICES = ("nvidia[0-9]*", "dxg", "kfd")  # files in /dev: NVIDIA's, NVIDIA's under WSL, AMD's
PROGRAMS = {"torchrun": "torchrun", "slurm": "srun"}


def started_by() -> str | None:
    """Return what started this process as a rank: torchrun, slurm, local, ray or sweep. None: it was started alone."""
    given = os.environ.get(LAUNCHER)
    return given or ("torchrun" if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None)


def choose_launcher(cluster: Cluster) -> Literal["local", "ray"] | None:
    """Return what must start the ranks of this run. None: this process is a rank already.

    Raise ConfigError if the configuration asks for another launcher, or for another number of ranks. Does not import torch.
    """
    by = started_by()
    if by in OWN_PROCESSES:
        return None
    _check_launcher(cluster, by)
    if by is not None or cluster.launcher == "slurm":
        _check_counts(cluster, by or "slurm")
        return None
    if cluster.launcher == "ray":
        if find_spec("ray") is None:
            raise MachineError(
                f"cluster.launcher=ray needs the package ray. Install it: {install_command('ray')}, or leave out the key."
            )
        return "ray"
    if cluster.num_nodes > 1:
        raise ConfigError(
            f"cluster.num_nodes = {cluster.num_nodes}, but tandem train was started on this machine alone. Start it on every "
            "machine with tandem launch slurm, torchrun or cluster.launcher=ray (docs/cluster.md), or set cluster.num_nodes=1."
        )
    return "local"


def _check_launcher(cluster: Cluster, by: str | None) -> None:
    """Raise ConfigError if cluster.launcher is not what started this process."""
    wanted = cluster.launcher
    if wanted == "torchrun" and by != "torchrun":
        raise ConfigError(
            "cluster.launcher=torchrun, but torchrun did not start this process: RANK and WORLD_SIZE are not set. Start it with "
            "torchrun --nproc-per-node N --no-python tandem train, or leave out the key."
        )
    if wanted == "slurm" and by != "slurm" and not is_in_step():
        raise ConfigError(
            "cluster.launcher=slurm, but srun did not start this process: SLURM_STEP_ID is not set. Write a batch script with "
            "tandem launch slurm, or leave out the key."
        )
    if wanted in ("local", "ray") and by is not None:
        raise ConfigError(
            f"cluster.launcher={wanted} starts the ranks of the run, but {PROGRAMS.get(by, by)} has started this process as rank "
            f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}. Leave out the key, or start tandem train alone."
        )


def _check_counts(cluster: Cluster, by: str) -> None:
    """Raise ConfigError if the launcher has started another number of ranks than the configuration asks for."""
    total = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0" if total > 1 else "1"))  # 0: not known
    program = PROGRAMS.get(by, by)
    if cluster.gpus_per_node != "all" and local not in (0, cluster.gpus_per_node):
        raise ConfigError(
            f"cluster.gpus_per_node = {cluster.gpus_per_node}, but {program} started {local} "
            f"rank{'' if local == 1 else 's'} on this machine. Start as many, or set cluster.gpus_per_node=all."
        )
    if cluster.num_nodes > 1 and local and total != cluster.num_nodes * local:
        raise ConfigError(
            f"cluster.num_nodes = {cluster.num_nodes}, but {program} started {total} rank{'' if total == 1 else 's'}, of which "
            f"{local} {'is' if local == 1 else 'are'} on this machine. Start as many nodes, or set cluster.num_nodes=1."
        )


def check_python_call(cluster: Cluster) -> None:
    """Raise ConfigError if a call from Python would need ranks that nothing has started. Such a call is one rank."""
    by = started_by()
    _check_launcher(cluster, by)
    if by is not None:
        _check_counts(cluster, by)
        return
    for key, value, is_wanted in (
        (GPUS_KEY, cluster.gpus_per_node, cluster.gpus_per_node not in ("all", 1)),
        ("cluster.num_nodes", cluster.num_nodes, cluster.num_nodes > 1),
        ("cluster.launcher", cluster.launcher, cluster.launcher == "ray"),
    ):
        if is_wanted:
            raise ConfigError(
                f"{key} = {value}, but a call from Python is one process. Start the script with torchrun or srun, use the "
                "command tandem train, or leave out the key."
            )


def num_local_ranks(loaded: LoadedConfig) -> int:
    """Return the number of ranks to start on this machine: one per GPU, or as many as asked for on its CPU.

    The number of GPUs in another trainer's file does not count on a machine without GPUs. Raise MachineError if the machine has
    fewer GPUs than asked for.
    """
    wanted, found = loaded.config.cluster.gpus_per_node, _num_gpus()
    if wanted == "all" or (found == 0 and is_number_of_another_trainer(loaded)):
        return max(1, found)
    most = max(RANKS_WITHOUT_GPUS, os.cpu_count() or 1)
    if found == 0 and wanted > most:
        raise MachineError(
            f"cluster.gpus_per_node = {wanted}: this machine has no GPU, and would start as many processes on its CPU. Set at "
            f"most {most}, or leave it out for one."
        )
    if 0 < found < wanted and os.environ.get(SHARE_GPU) != "1":
        raise MachineError(
            f"cluster.gpus_per_node = {wanted}, but this machine has {found} GPU{'' if found == 1 else 's'}. Set "
            f"cluster.gpus_per_node={found} or all."
        )
    return wanted


def is_number_of_another_trainer(loaded: LoadedConfig) -> bool:
    """Whether cluster.gpus_per_node is the number in another trainer's file."""
    return loaded.translation is not None and origin_of(GPUS_KEY, loaded.origins) not in GIVEN_BY_USER


def num_ray_ranks(cluster: Cluster, nodes: Sequence[Mapping[str, float]]) -> tuple[int, bool]:
    """Return the number of ranks, and whether they use GPUs. `nodes`: the resources of each node of the Ray cluster.

    Raise MachineError if the cluster does not have them.
    """
    on_gpus = any(node.get("GPU", 0) >= 1 for node in nodes)
    kind = "GPU" if on_gpus else "CPU"
    sizes = sorted((int(node.get(kind, 0)) for node in nodes), reverse=True)
    smallest = sizes[cluster.num_nodes - 1] if len(sizes) >= cluster.num_nodes else 0
    wanted = (smallest if on_gpus else 1) if cluster.gpus_per_node == "all" else cluster.gpus_per_node
    if smallest < max(1, wanted):
        found = ", ".join(map(str, sizes))
        raise MachineError(
            f"cluster.num_nodes = {cluster.num_nodes}, cluster.gpus_per_node = {cluster.gpus_per_node}: the Ray cluster has "
            f"{len(sizes)} node{'' if len(sizes) == 1 else 's'} with {found} {kind}s. Add nodes, or lower the numbers."
        )
    return wanted * cluster.num_nodes, on_gpus


def _num_gpus() -> int:
    """Return the number of GPUs. Imports torch only where there may be one."""
    if "torch" not in sys.modules and not any(one for name in GPU_DEVICES for one in Path("/dev").glob(name)):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
