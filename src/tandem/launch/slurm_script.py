"""Writes a batch script for Slurm that trains a run on the nodes and GPUs of its configuration."""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem.config.load import LoadedConfig
from tandem.errors import ConfigError
from tandem.model.distributed.mesh import mesh_shape
from tandem.terminal.commands import key_of
from tandem.terminal.printable import counted

MARK = "# Written by tandem launch slurm."
SAVE_KEY = "checkpointing.checkpoint_must_save_by"
MAX_RESTARTS = 100
SHORTEST_SECONDS = 300
# Of the time limit: how long before its end the ranks get a signal. They stop by their own clock twice as long before the end.
LEAD_SHARE, SHORTEST_LEAD, LONGEST_LEAD = 20, 60, 600
LITERAL = "# Dollar signs in arguments are not expanded.\n# shellcheck disable=SC2016\n"
# After the first rank has ended, srun waits so long for the others before it ends them.
WAIT_SECONDS = 120
# A value that sbatch reads as it is written. Others are put in quotes.
PLAIN_VALUE = re.compile(r"[A-Za-z0-9_.,:%@/+=*\[\]()-]*", re.ASCII)
# sbatch parses quotes and backslashes in its own way.
FORBIDDEN = re.compile(r"[\x00-\x1f\x7f\"'\\]")
OPTION_NAME = re.compile(r"[a-z][a-z0-9-]*", re.ASCII)
# Options of sbatch that the script sets, or that would change how many ranks it starts, and what to give instead.
ONE_TASK_PER_GPU = "the script starts one task per GPU. Set cluster.num_nodes and cluster.gpus_per_node instead."
FROM_TIME = "the run must know its time limit to save before it. Use --time LIMIT instead."
SET_OTHERWISE = {
    "job-name": "it has its own option. Use --job-name NAME instead.",
    "partition": "it has its own option. Use --partition NAME instead.",
    "account": "it has its own option. Use --account NAME instead.",
    "nodes": "the script asks for as many nodes as the run uses. Set cluster.num_nodes instead.",
    "ntasks": ONE_TASK_PER_GPU,
    "ntasks-per-node": ONE_TASK_PER_GPU,
    "tasks-per-node": ONE_TASK_PER_GPU,
    "ntasks-per-gpu": ONE_TASK_PER_GPU,
    "gpus": ONE_TASK_PER_GPU,
    "gpus-per-node": "the script asks for as many GPUs as the run uses. Set cluster.gpus_per_node instead; to name a type of "
    "GPU, use --sbatch gres=gpu:TYPE:N.",
    "time": FROM_TIME,
    "time-min": FROM_TIME,
    "signal": "the script asks for a signal before the time limit. Use --time LIMIT instead.",
    "requeue": "the script contains it already. Leave it out.",
    "no-requeue": "the script requeues a job that has saved and stopped. Leave it out, and end the job with scancel.",
}
DURATION = re.compile(r"(?:(\d{1,4})-)?(\d{1,6})(?::(\d{1,2}))?(?::(\d{1,2}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """What the script asks Slurm for, besides nodes and GPUs."""

    job_name: str
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    extra: Mapping[str, str | None] = field(
        default_factory=dict
    )  # of sbatch; `output` and `open-mode` replace the script's


def batch_script(loaded: LoadedConfig, arguments: Sequence[str], options: SlurmOptions, folder: Path) -> str:
    """Return the script. `arguments`: of `tandem train`. `folder`: the directory in which the job runs.

    Raise ConfigError if the configuration does not say how many GPUs a node has, if they cannot form its mesh, or if sbatch
    could not read a value.
    """
    if "\n" in str(folder):
        raise ConfigError(f"the working directory {str(folder)!r} has a line break in its name. Choose another.")
    seconds = None if options.time is None else time_limit(options.time)
    given = loaded.config.checkpointing.seconds_to_save_by
    if seconds is not None and given is not None and given >= seconds:
        raise ConfigError(
            f"{SAVE_KEY} = {loaded.config.checkpointing.checkpoint_must_save_by} is not below --time {options.time}: the job "
            "would end before the run saves. Lower it, or leave it out: it is then derived from --time."
        )
    if seconds is not None and given is None and loaded.config.checkpointing.enabled:
        arguments = [*arguments, f"{SAVE_KEY}={_days(seconds - 2 * lead_seconds(seconds))}"]
    lines = [f"#SBATCH --{line}" for line in _directives(loaded, options, seconds)]
    mesh_shape(loaded.config.policy.parallel, _gpus_per_node(loaded) * loaded.config.cluster.num_nodes)
    command = shlex.join([sys.executable, "-P", "-m", "tandem", "train", *arguments])
    return _BODY.format(
        mark=MARK,
        directives="\n".join(lines),
        folder=shlex.quote(str(folder)),
        wait=WAIT_SECONDS,
        command=command,
        literal=LITERAL if re.search(r"[$`]", f"{command}{folder}") else "",
        max_restarts=MAX_RESTARTS,
    )


_BODY = """\
#!/bin/bash
{mark} Submit it with sbatch, from any directory.
{directives}
{literal}set -euo pipefail

cd -- {folder}
logs="slurm-$SLURM_JOB_ID"
mkdir -p -- "$logs"
# Since Slurm 22.05, srun does not take this from sbatch.
if [ -n "${{SLURM_CPUS_PER_TASK:-}}" ]; then
  export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
fi

# scancel sends SIGTERM to this script too, not only to the ranks. bash runs the trap when srun has ended.
is_cancelled=no
trap 'is_cancelled=yes' TERM

code=0
srun --kill-on-bad-exit=0 --wait={wait} --open-mode=append --output="$logs/rank-%t.log" \\
  {command} || code=$?

# 129, 138 and 143: stopped by a signal or by the time limit. The same command resumes from the checkpoint that was saved.
case "$is_cancelled $code" in
  "no 129" | "no 138" | "no 143")
    if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {max_restarts} ]; then
      scontrol requeue "$SLURM_JOB_ID"
    fi
    ;;
esac
exit "$code"
"""


def _directives(loaded: LoadedConfig, options: SlurmOptions, seconds: int | None) -> list[str]:
    """Return the options of sbatch, as in --NAME=VALUE."""
    cluster, gpus = loaded.config.cluster, _gpus_per_node(loaded)
    if cluster.launcher not in ("auto", "slurm"):
        raise ConfigError(
            f"cluster.launcher = {cluster.launcher}, but srun starts the ranks of a Slurm job. Leave out the key."
        )
    found: dict[str, str | None] = {
        "job-name": options.job_name,
        "partition": options.partition,
        "account": options.account,
        "nodes": str(cluster.num_nodes),
        "ntasks-per-node": str(gpus),
        "gpus-per-node": str(gpus),
        "time": options.time,
        # To the ranks: they save a checkpoint and stop.
        "signal": None if seconds is None else f"USR1@{lead_seconds(seconds)}",
        "output": "slurm-%j.log",
        "open-mode": "append",
    }
    if (asked := _gpus_of_gres(options.extra.get("gres") or "")) is not None:
        if asked != gpus:
            raise ConfigError(
                f"--sbatch gres asks for {counted(asked, 'GPU')} per node, but cluster.gpus_per_node = "
                f"{gpus}. Give both the same number."
            )
        del found["gpus-per-node"]
    lines = {name: value for name, value in found.items() if value is not None and name not in options.extra}
    extra = [name if value is None else _directive(name, value) for name, value in options.extra.items()]
    return [*(_directive(name, value) for name, value in lines.items()), "requeue", *extra]


def _gpus_per_node(loaded: LoadedConfig) -> int:
    """Return the number of GPUs that each node must have. Raise ConfigError if it is not known."""
    if (gpus := loaded.config.cluster.gpus_per_node) == "all":
        raise ConfigError(
            "cluster.gpus_per_node = all: a batch script must name the number of GPUs per node, which this machine cannot know. "
            "Set cluster.gpus_per_node=N."
        )
    return gpus


def _gpus_of_gres(given: str) -> int | None:
    """Return the number of GPUs per node in a value of --gres, or None if it names none.

    Examples: "gpu:a100:8,nvme:1" is 8, "gpu:2" is 2, "gpu" is 1 and "nvme:1" is None.
    """
    parts = [one.split(":") for one in given.split(",")]
    counts = [int(last) if (last := part[-1]).isdecimal() else 1 for part in parts if part[0] in ("gpu", "gres/gpu")]
    return sum(counts) if counts else None


def _directive(name: str, value: str) -> str:
    if FORBIDDEN.search(value):
        raise ConfigError(
            f"--{name} {value!r}: sbatch cannot read line breaks, quotes, backslashes and control characters in a script. "
            "Choose another value."
        )
    return f"{name}={value}" if PLAIN_VALUE.fullmatch(value) else f'{name}="{value}"'


def parse_extra(given: Sequence[str]) -> dict[str, str | None]:
    """Return the options given as --sbatch KEY=VALUE, or --sbatch KEY for an option without a value.

    Raise ConfigError for an option that the script sets, and for one that is given twice.
    """
    found: dict[str, str | None] = {}
    for one in given:
        name, equals, value = one.removeprefix("--").partition("=")
        if not OPTION_NAME.fullmatch(name):
            raise ConfigError(
                f"--sbatch {one!r}: not an option of sbatch. Write KEY=VALUE with its long name, such as --sbatch qos=high."
            )
        if name in SET_OTHERWISE:
            raise ConfigError(f"--sbatch {name}: {SET_OTHERWISE[name]}")
        if name in found:
            raise ConfigError(f"--sbatch {name} is given twice. Leave out one of them.")
        found[name] = value if equals else None
    return found


def check_job_name(name: str | None) -> None:
    """Raise ConfigError for a name that would put the script into another folder."""
    if name is not None and "/" in name:
        raise ConfigError(
            f"--job-name {name!r}: a name, not a path. Leave out the slash; --out FILE says where the script is written."
        )


def time_limit(text: str) -> int:
    """Return the seconds of a time limit as sbatch reads it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    found = DURATION.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"--time {text!r}: not a time limit. Write minutes, HH:MM:SS or D-HH:MM:SS, such as 04:00:00."
        )
    days, *parts = found.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is not None:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    else:
        hours, minutes, seconds = {1: (0, *numbers, 0), 2: (0, *numbers), 3: numbers}[len(numbers)]
    total = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if total < SHORTEST_SECONDS:
        raise ConfigError(
            f"--time {text}: {total} seconds. A run needs time to load its model and to save: give at least "
            f"{SHORTEST_SECONDS // 60} minutes."
        )
    return total


def lead_seconds(limit: int) -> int:
    """Return how long before the end of a job its ranks get a signal, for a time limit in seconds."""
    return min(LONGEST_LEAD, max(SHORTEST_LEAD, limit // LEAD_SHARE))


def _days(seconds: int) -> str:
    """Return seconds as DD:HH:MM:SS."""
    minutes, hours = seconds // 60, seconds // 3600
    return f"{hours // 24:02}:{hours % 24:02}:{minutes % 60:02}:{seconds % 60:02}"


def check_arguments(overrides: Sequence[str]) -> None:
    """Raise ConfigError if an argument of the run cannot be in a script."""
    for one in overrides:
        if "\0" in one:
            raise ConfigError(f"override {key_of(one)!r} has a NUL character, which no command can have. Remove it.")
