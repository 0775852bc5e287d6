"""Checks torch and one step of training in child processes, so that a broken library, a crash or a hang becomes a finding."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tandem.diagnosis.finding import Finding, finding
from tandem.errors import MAX_QUOTED_CHARACTERS
from tandem.isolation import separate_environment
from tandem.storage.cache import GIB
from tandem.terminal.commands import tandem_command

PROBE_SECONDS = 180.0  # a first import from a slow disk takes minutes
TRAINING_SECONDS = 600.0  # layers are compiled on a GPU
OLDEST_CAPABILITY = (8, 0)  # bfloat16 matrix products
BUSY_SHARE = 0.8  # a GPU with less free memory is used by another process
# One step on the embedded pairs, as short as training can be: without validation, and without a reference of every pair.
ONE_STEP = (
    "reference.mode=live",
    "dpo.max_num_steps=1",
    "policy.train_global_batch_size=8",
    "dpo.val_period=0",
    "dpo.val_at_start=false",
    "dpo.val_at_end=false",
    "cluster.gpus_per_node=1",
)


def probe_torch() -> tuple[dict[str, Any] | None, list[Finding]]:
    """Import torch in a child process. Return what it found (None: torch is broken), and the findings."""
    code, out, err = _run([sys.executable, "-P", "-m", "tandem.diagnosis.probe"], PROBE_SECONDS)
    try:
        found = json.loads(out.splitlines()[-1]) if code == 0 else None
    except (ValueError, IndexError):
        found = None
    if found is None:
        return None, [
            finding(
                "torch",
                "problem",
                f"torch and transformers cannot be imported: {_last_line(err, code)}",
                fix="Install them again in this environment.",
                command="pip install --force-reinstall 'torch>=2.11' 'transformers>=5.17,<6'",
            )
        ]
    cuda = f"CUDA {found['cuda']}" if found["cuda"] else "CPU only"
    return found, [finding("torch", "ok", f"torch {found['torch']} ({cuda}), transformers {found['transformers']}")]


def device_findings(found: dict[str, Any] | None) -> list[Finding]:
    """Return findings on GPUs, attention and compilation. `found`: by `probe_torch`."""
    if found is None:
        return [finding("GPU", "note", "not checked, because torch cannot be imported")]
    if not found["devices"]:
        return [_no_gpu(found), finding("attention", "ok", found["attention"])]
    findings = [_gpu(number, one, found) for number, one in enumerate(found["devices"])]
    findings.append(finding("attention", "ok", found["attention"]))
    return [*findings, _compiler(found)]


def _no_gpu(found: dict[str, Any]) -> Finding:
    memory = f"{found['memory'] / GIB:.0f} GiB of memory"
    if found["driver"] is None:
        return finding("GPU", "note", f"none; training uses the CPU, with {memory}")
    if found["cuda"] is None:
        return finding(
            "GPU",
            "problem",
            f"the NVIDIA driver {found['driver']} is installed, but torch is a build for CPUs",
            fix="Install torch for CUDA as https://pytorch.org/get-started/locally/ describes.",
        )
    return finding(
        "GPU",
        "problem",
        f"torch finds no GPU, although the NVIDIA driver {found['driver']} is installed (torch is for CUDA {found['cuda']})",
        fix="Check CUDA_VISIBLE_DEVICES, and that the driver supports this version of CUDA: nvidia-smi shows its newest.",
    )


def _gpu(number: int, one: dict[str, Any], found: dict[str, Any]) -> Finding:
    capability = tuple(one["capability"])
    text = (
        f"{number}: {one['name']}, {one['free'] / GIB:.0f} of {one['total'] / GIB:.0f} GiB free, compute capability "
        f"{capability[0]}.{capability[1]}, driver {found['driver'] or 'unknown'}"
    )
    if capability < OLDEST_CAPABILITY:
        return finding(
            "GPU", "warning", f"{text}: it does not compute in bfloat16", fix="Train with policy.precision=float32."
        )
    if one["free"] < BUSY_SHARE * one["total"]:
        fix = (
            "Stop the other processes that use it (nvidia-smi lists them), or choose another with CUDA_VISIBLE_DEVICES."
        )
        return finding("GPU", "warning", f"{text}: other processes use its memory", fix=fix)
    return finding("GPU", "ok", text)


def _compiler(found: dict[str, Any]) -> Finding:
    """Check what compiled layers need: Triton, and a C compiler for the code that launches its kernels."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    compiler = next((place for name in names if (place := shutil.which(name))), None)
    if found["triton"] is None:
        return finding("compilation", "problem", "the package triton is missing", command="pip install triton")
    if compiler is None:
        return finding(
            "compilation",
            "problem",
            f"no C compiler ({', '.join(names)}), which Triton needs to launch kernels",
            fix="Install gcc, for example with apt-get install gcc, or train with policy.compile=false policy.attention=sdpa.",
        )
    return finding("compilation", "ok", f"triton {found['triton']}, {compiler}")


def train_one_step() -> Finding:
    """Train the embedded model for one step, in a folder and with a cache that are removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="tandem-doctor-") as folder:
        command = [sys.executable, "-P", "-m", "tandem", "train", "--quiet", *ONE_STEP, f"run.dir={folder}/run"]
        started = time.perf_counter()
        code, _, err = _run(command, TRAINING_SECONDS, folder=folder, TANDEM_CACHE=f"{folder}/cache")
        seconds = time.perf_counter() - started
        exported = (Path(folder) / "run/model/model.safetensors").is_file()
    if code == 0 and exported:
        return finding("self-test", "ok", f"one step of training and an export in {seconds:.0f} s")
    return finding(
        "self-test",
        "problem",
        f"one step of training failed: {_last_line(err, code)}",
        fix="The same step, with all messages:",
        command=tandem_command("train", "--fresh", "run.dir=doctor-run", *ONE_STEP),
    )


def _run(
    command: list[str], seconds: float, folder: str | None = None, **environment: str
) -> tuple[int | None, str, str]:
    """Run a command. Return its exit code (None: it ran for too long), standard output and standard error."""
    try:
        done = subprocess.run(
            command,
            env={**separate_environment(), **environment},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, "", f"it did not end within {seconds:.0f} s"
    except OSError as error:
        return None, "", str(error)
    return done.returncode, done.stdout, done.stderr


def _last_line(err: str, code: int | None) -> str:
    """Return the last line of an error message. A traceback ends with the error."""
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    ended = f"exit code {code}" if code is None or code >= 0 else f"killed by signal {-code}"
    last = lines[-1].removeprefix("tandem: error: ") if lines else ended
    return last[:MAX_QUOTED_CHARACTERS].rstrip(".")
