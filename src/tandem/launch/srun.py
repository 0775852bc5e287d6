"""The variables that srun sets for its tasks, as those that torchrun would set for its ranks."""

import os
import re
from collections.abc import Mapping, MutableMapping

from tandem.errors import ConfigError
from tandem.isolation import GPU_INDEX, LAUNCHER

FIRST_PORT, NUM_PORTS = 20000, 10000  # below the range from which Linux assigns ports to clients
VISIBLE = "CUDA_VISIBLE_DEVICES"


def is_in_step(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether srun started this process.

    The batch script of a job also has variables such as SLURM_PROCID and SLURM_NTASKS, but is not a task of a step.
    """
    return "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment


def adopt_srun_variables(environment: MutableMapping[str, str] = os.environ) -> None:
    """If srun started this process as one of several tasks, set the variables that torchrun would set.

    Does nothing if the variables are set already. MASTER_ADDR and MASTER_PORT may be set by the user.
    """
    if "WORLD_SIZE" in environment or not is_in_step(environment):
        return
    num_tasks = _number("SLURM_STEP_NUM_TASKS", environment, fallback="SLURM_NTASKS")
    if num_tasks == 1:
        return
    sizes = tasks_per_node(_text("SLURM_STEP_TASKS_PER_NODE", environment, fallback="SLURM_TASKS_PER_NODE"))
    node = _number("SLURM_NODEID", environment) if len(sizes) > 1 else 0
    if node >= len(sizes) or sum(sizes) != num_tasks:
        raise ConfigError(
            f"Slurm's variables disagree: {num_tasks} tasks, on nodes with {', '.join(map(str, sizes))}, and this is node "
            f"{node}. Start tandem train with srun, in its own step."
        )
    local = _number("SLURM_LOCALID", environment)
    ranks = {
        "RANK": str(_number("SLURM_PROCID", environment)),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(num_tasks),
        "LOCAL_WORLD_SIZE": str(sizes[node]),
        "GROUP_RANK": str(node),
        LAUNCHER: "slurm",
    }
    environment.update(ranks)
    environment.setdefault("MASTER_ADDR", _master_address(environment, num_nodes=len(sizes)))
    environment.setdefault("MASTER_PORT", str(_master_port(environment)))
    if (index := _gpu_index(environment, num_local=sizes[node])) is not None:
        environment[GPU_INDEX] = str(index)


def hosts_of(node_list: str) -> list[str]:
    """Return the host names of a Slurm node list: "a[01-02,7],b" is returned as ["a01", "a02", "a7", "b"]."""
    return [host for part in _split(node_list) for host in _expanded(part)]


def tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each node of a step: "2(x3),1" is returned as [2, 2, 2, 1]."""
    sizes: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part.strip(), re.ASCII)
        if found is None:
            raise ConfigError(
                f"SLURM_STEP_TASKS_PER_NODE = {text!r}: not a list of counts such as 2(x3),1. Start tandem train with srun."
            )
        sizes += [int(found[1])] * int(found[2] or 1)
    return sizes


def _split(node_list: str) -> list[str]:
    """Split at commas outside brackets."""
    parts = re.findall(r"(?:[^,\[\]]|\[[0-9,-]+\])+", node_list)
    if ",".join(parts) != node_list or not parts:
        raise ConfigError(
            f"SLURM_STEP_NODELIST = {node_list!r}: not a list of hosts such as node[01-03,07]. Set MASTER_ADDR to the name of "
            "the first host."
        )
    return parts


def _expanded(part: str) -> list[str]:
    """Return the hosts of one part, such as rack[1-2]node[01-03]. The last numbers change fastest."""
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    numbers, _, after = rest.partition("]")
    return [before + number + end for number in _numbers(numbers) for end in _expanded(after)]


def _numbers(ranges: str) -> list[str]:
    """Return the numbers of "01-03,7" as texts: ["01", "02", "03", "7"]."""
    numbers: list[str] = []
    for one in ranges.split(","):
        first, dash, last = one.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(one) > 20:
            raise ConfigError(f"SLURM_STEP_NODELIST: {one!r} is not a range of numbers. Set MASTER_ADDR.")
        end = min(int(last or first), int(first) + 2**16)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), end + 1)]
    return numbers


def _master_address(environment: Mapping[str, str], *, num_nodes: int) -> str:
    """Return the address of the first rank: the loopback address if all ranks are on this machine."""
    if num_nodes == 1:
        return "127.0.0.1"
    return hosts_of(_text("SLURM_STEP_NODELIST", environment, fallback="SLURM_NODELIST"))[0]


def _master_port(environment: Mapping[str, str]) -> int:
    """Return a port that all tasks derive from the job and the step, so that jobs on one machine use different ports."""
    job, step = _number("SLURM_JOB_ID", environment, fallback="SLURM_JOBID"), environment["SLURM_STEP_ID"]
    return FIRST_PORT + (job * 7 + (int(step) if step.isdecimal() else 0)) % NUM_PORTS


def _gpu_index(environment: Mapping[str, str], *, num_local: int) -> int | None:
    """Return 0 if the task sees only its own GPU, as with srun --gpus-per-task=1. None: the GPU of its local rank."""
    visible = [one for one in environment.get(VISIBLE, "").split(",") if one.strip()]
    if len(visible) != 1 or num_local == 1:
        return None
    on_node = environment.get("SLURM_GPUS_ON_NODE", "")
    if on_node.isdecimal() and int(on_node) < num_local:
        raise ConfigError(
            f"srun started {num_local} tasks on this machine, where the job has {on_node} "
            f"GPU{'' if on_node == '1' else 's'}. Start one task per GPU (--ntasks-per-node)."
        )
    return 0


def _text(name: str, environment: Mapping[str, str], fallback: str | None = None) -> str:
    names = (name,) if fallback is None else (name, fallback)
    found = next((environment[one] for one in names if environment.get(one)), None)
    if found is None:
        raise ConfigError(
            f"srun started this process, but {' and '.join(names)} {'are' if fallback else 'is'} not set. Start tandem train "
            "with srun, and keep the variables that srun sets."
        )
    return found


def _number(name: str, environment: Mapping[str, str], fallback: str | None = None) -> int:
    text = _text(name, environment, fallback)
    if not (text.isascii() and text.isdecimal()) or len(text) > 12:
        raise ConfigError(f"{name} = {text!r}: not a number. Start tandem train with srun.")
    return int(text)
