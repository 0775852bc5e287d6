"""Stand-ins for Slurm's sbatch, srun and scontrol, which run a job on this machine with the variables that Slurm sets.

`install(folder)` writes them as programs. sbatch runs the job before it returns, and again if the job asks to be requeued.
srun writes the arguments and the exit code of every task to srun.jsonl. If SIGNAL_WHEN names a path, it sends the signal of
#SBATCH --signal to all tasks as soon as the path exists, once. If PREEMPT_WHEN names a path, it sends them SIGTERM then. If
CANCEL_WHEN names a path, it does the same as scancel then: it sends SIGTERM to the tasks and to the batch script.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

JOB_ID = "1234567"


def install(folder: Path) -> Path:
    """Write the programs into a folder, which must be the first one on the PATH. Return the folder."""
    folder.mkdir()
    for name in ("sbatch", "srun", "scontrol"):
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -P {Path(__file__).resolve()} {name} "$@"\n')
        program.chmod(0o755)
    return folder


def directives(script: str) -> dict[str, str]:
    """The options of a script: what follows #SBATCH in the comments before its first command."""
    found = {}
    for line in script.splitlines():
        if not line.startswith("#"):
            break
        if one := re.match(r"#SBATCH --([a-z-]+)(?:=(.*))?$", line):
            found[one[1]] = (one[2] or "").strip('"')
    return found


def sbatch(arguments: list[str]) -> int:
    (script,) = [one for one in arguments if one != "--"]
    given = directives(Path(script).read_text())
    print(f"Submitted batch job {JOB_ID}", flush=True)
    requeued = Path("requeued")
    environment = os.environ | {
        "SLURM_JOB_ID": JOB_ID,
        "SLURM_NNODES": given["nodes"],
        "SLURM_NTASKS_PER_NODE": given["ntasks-per-node"],
        "SLURM_NTASKS": str(int(given["nodes"]) * int(given["ntasks-per-node"])),
        "SLURM_PROCID": "0",  # the batch script has it too, although it is not a task
        "SLURM_LOCALID": "0",
        "SLURM_RESTART_COUNT": "0",
        "STUB_SIGNAL": given.get("signal", ""),
    }
    for restarts in range(5):
        requeued.unlink(missing_ok=True)
        environment["SLURM_RESTART_COUNT"] = str(restarts)
        with Path(given["output"].replace("%j", JOB_ID)).open("ab") as log:
            subprocess.run(["bash", script], env=environment, stdout=log, stderr=log, check=False)
        if not requeued.exists():
            break
    return 0


def srun(arguments: list[str]) -> int:
    options = [one for one in arguments if one.startswith("--") and arguments.index(one) < _first_word(arguments)]
    command = arguments[_first_word(arguments) :]
    output = next(one.partition("=")[2] for one in options if one.startswith("--output="))
    per_node, count = int(os.environ["SLURM_NTASKS_PER_NODE"]), int(os.environ["SLURM_NTASKS"])
    shared = {
        "SLURM_STEP_ID": os.environ["SLURM_RESTART_COUNT"],
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{count // per_node})" if count > per_node else str(per_node),
        "SLURM_STEP_NODELIST": "localhost",
    }
    tasks = []
    for number in range(count):
        own = {"SLURM_PROCID": number, "SLURM_LOCALID": number % per_node, "SLURM_NODEID": number // per_node}
        environment = os.environ | shared | {name: str(value) for name, value in own.items()}
        with Path(output.replace("%t", str(number))).open("ab") as log:
            tasks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    codes = _wait(tasks)
    with Path("srun.jsonl").open("a") as log:
        log.write(json.dumps({"command": command, "options": options, "codes": codes}) + "\n")
    return max(code if code >= 0 else 128 - code for code in codes)


def _first_word(arguments: list[str]) -> int:
    return next(number for number, one in enumerate(arguments) if not one.startswith("--"))


def _wait(tasks: list[subprocess.Popen[bytes]]) -> list[int]:
    done, of_limit = Path("signalled"), os.environ["STUB_SIGNAL"].partition("@")[0]
    names = {"CANCEL_WHEN": "TERM", "PREEMPT_WHEN": "TERM", "SIGNAL_WHEN": of_limit}
    while any(task.poll() is None for task in tasks):
        for variable, name in names.items():
            when = os.environ.get(variable, "")
            if when and Path(when).exists() and not done.exists():
                done.touch()
                if variable == "CANCEL_WHEN":
                    os.kill(os.getppid(), signal.SIGTERM)  # bash, which runs the script
                for task in tasks:
                    task.send_signal(getattr(signal, "SIG" + name))
        time.sleep(0.05)
    return [task.returncode for task in tasks]


def scontrol(arguments: list[str]) -> int:
    assert arguments == ["requeue", JOB_ID], arguments
    Path("requeued").touch()
    return 0


if __name__ == "__main__":
    sys.exit({"sbatch": sbatch, "srun": srun, "scontrol": scontrol}[sys.argv[1]](sys.argv[2:]))
