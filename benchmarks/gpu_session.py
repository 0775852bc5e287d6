"""Runs all benchmarks that need a GPU, the most valuable first, in sessions that may be cut off.

    python benchmarks/gpu_session.py --out DIR --tokenizer FOLDER --data hh_harmless_test.jsonl.gz --model SMOLLM2 [--part 1]
    python benchmarks/gpu_session.py --out DIR --list

Each benchmark runs in its own process with a time limit. What it printed as JSON is one line of DIR/results.jsonl as soon as it
ends, with the command, the seconds and the exit code; everything else is in DIR/session.log. The same command continues: a
benchmark that has succeeded in DIR/results.jsonl, or in a file given with --done, is not run again. With --budget, benchmarks
that would not finish in time are not started. A part is what fits in ten minutes on one H200; without --part, all parts run. A
benchmark whose option (--model, --tokenizer, --data) or package is missing is left out and named.
`--jobs FILE` runs other commands: a JSON list of objects with name, command, seconds and, if wanted, part and packages.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from options import options_of

HERE = Path(__file__).parent
KEPT_LINES = 60  # of what a benchmark printed, in its result


@dataclass(frozen=True, slots=True)
class Job:
    """A command, and about how long it takes on one H200. `{model}` and the like stand for options of this script."""

    name: str
    part: int
    seconds: int
    command: tuple[str, ...]
    packages: tuple[str, ...] = ()  # that the first word of the command, a Python, must be able to import


def _job(part: int, seconds: int, name: str, line: str, *packages: str, python: str = "{python}") -> Job:
    script, *words = shlex.split(line)
    return Job(name, part, seconds, (python, str(HERE / script), *words), packages)


VERSUS = "versus_trl.py --shape llama3.1-8b --pack-length 8192 --steps 2 --repeats 3 --trl-python {trl_python}"
TRAIN = "train.py --pairs 128"
FEW_BITS = "--weights bfloat16_stochastic --state-dtype bfloat16"
RUN = "--tokenizer {tokenizer} --data {data}"
UNSLOTH = "unsloth_steps.py --shape llama3.1-8b --steps 2 --repeats 3 --lora 16"
BFLOAT16 = "policy.weights=bfloat16_stochastic policy.optimizer.state_dtype=bfloat16"
GRANITE = "hybrids.py --shape granite4-h-1b --pairs 128 --pack-length 16384"
EAGER = "'packed, not compiled' 'a pair per row'"
NF4 = "policy.lora.enabled=true policy.lora.quantization=nf4 policy.activation_checkpointing=full"
SMALL = "policy.weights=bfloat16_stochastic policy.optimizer.state_dtype=int8 policy.activation_checkpointing=selective"
JOBS = [
    Job(
        "gpu suite",
        1,
        500,
        ("{python}", "-m", "pytest", "-m", "gpu", "-n", "8", "-rs", str(HERE.parent / "tests")),
        ("pytest", "xdist"),
    ),
    _job(2, 330, "lora 8b vs trl", f"{VERSUS} --settings lora", "peft"),
    _job(2, 150, "start 1.5b", f"start.py {RUN} --folder {{scratch}}/start"),
    _job(3, 400, "qlora 8b vs trl", f"{VERSUS} --settings qlora", "peft", "bitsandbytes"),
    _job(
        3,
        120,
        "limited 1.5b",
        f"limited.py --shape qwen2.5-1.5b --limit-gib 24 {RUN} {SMALL} policy.packing.pack_length=8192",
    ),
    _job(
        4,
        400,
        "curve lora",
        "curve.py --model {model} --data {data} --lora 16 --rate 1e-4 --seeds 3 --trl-python {trl_python}",
        "peft",
    ),
    _job(
        4,
        150,
        "limited 8b",
        f"limited.py --shape llama3.1-8b --limit-gib 16 {RUN} {NF4} policy.packing.pack_length=8192",
        "bitsandbytes",
    ),
    _job(5, 200, "hybrid granite", f"{GRANITE} --rows 8 --ways packed {EAGER}", "fla"),
    _job(5, 240, "hybrid granite unpacked", f"{GRANITE} --rows 1 --steps 1 --ways unpacked", "fla"),
    _job(6, 60, "135m 49152", f"{TRAIN} --shape smollm2-135m --pack-length 49152 --repeats 3 --profile"),
    _job(6, 150, "olmoe", f"{TRAIN} --shape olmoe-1b-7b --pack-length 16384 --steps 3 {FEW_BITS} --profile"),
    _job(
        6,
        180,
        "qwen3 experts",
        f"{TRAIN} --shape qwen3-30b-a3b-12-layers --pack-length 8192 --steps 3 {FEW_BITS} --profile",
    ),
    _job(
        6,
        180,
        "start 8b",
        f"start.py --shape llama3.1-8b {RUN} --folder {{scratch}}/start-8b --more {BFLOAT16}",
    ),
    _job(7, 240, "unsloth lora 8b", UNSLOTH, "unsloth", python="{unsloth_python}"),
    _job(7, 300, "unsloth qlora 8b", f"{UNSLOTH} --quantization nf4", "unsloth", python="{unsloth_python}"),
    _job(8, 200, "hybrid qwen3.5", "hybrids.py --shape qwen3.5-2b --pairs 128 --pack-length 16384 --rows 4", "fla"),
]


def given_jobs(path: Path) -> list[Job]:
    """Jobs of a file. The first word of a command may be `{python}`."""
    try:
        return [
            Job(
                one["name"],
                one.get("part", 1),
                one["seconds"],
                tuple(one["command"]),
                tuple(one.get("packages", ())),
            )
            for one in json.loads(path.read_text(encoding="utf-8"))
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SystemExit(f"--jobs {path}: cannot be read: {error!r}") from None


def succeeded(files: list[Path]) -> set[str]:
    """Names of the jobs that these files have a successful result of. A line that was cut off counts as none."""
    found = set()
    for line in (line for path in files if path.is_file() for line in path.read_text(encoding="utf-8").splitlines()):
        try:
            one = json.loads(line)
        except ValueError:
            continue
        if one.get("exit_code") == 0:
            found.add(one["name"])
    return found


def filled_in(job: Job, values: dict[str, str | None]) -> tuple[list[str], list[str]]:
    """Return the command with the options of this script, and the names of those that are missing."""
    command, missing = [], []
    for word in job.command:
        for name, value in values.items():
            if f"{{{name}}}" in word:
                word = word.replace(f"{{{name}}}", value or "")
                missing += [] if value else [name]
        command.append(word)
    return command, missing


def missing_packages(python: str, packages: tuple[str, ...]) -> list[str]:
    """Return the packages that this Python does not have. Nothing is imported."""
    found = f"import importlib.util as i; print(*[n for n in {packages!r} if i.find_spec(n) is None])"
    try:
        done = subprocess.run([python, "-c", found], capture_output=True, text=True)
    except OSError:
        return list(packages)
    return done.stdout.split() if done.returncode == 0 else list(packages)


def json_lines(text: str) -> list[Any]:
    """The JSON objects that a benchmark printed, one per line."""
    found = []
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


def run(job: Job, command: list[str], limit: float, log: Path) -> dict[str, Any]:
    """Run the command in its own process group, which is killed at the limit, and return its result."""
    began = time.perf_counter()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("ab") as kept:
        kept.write(f"\n== {job.name}: {' '.join(command)}\n".encode())
        kept.flush()
        at = kept.tell()
        try:
            child = subprocess.Popen(
                command, stdout=kept, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        except OSError as error:
            kept.write(f"{error}\n".encode())
            return {"exit_code": 127, "seconds": 0.0, "results": [], "last_lines": [str(error)]}
        try:
            code: int | None = child.wait(limit)
        except BaseException as error:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            code = None
    with log.open("rb") as kept:
        kept.seek(at)
        printed = kept.read().decode(errors="replace")
    return {
        "exit_code": code,  # null: it ran past its limit
        "seconds": round(time.perf_counter() - began, 1),
        "results": json_lines(printed),
        "last_lines": [line[:300] for line in printed.splitlines()[-KEPT_LINES:] if not line.startswith("{")],
    }


def parsed() -> argparse.Namespace:
    parser = options_of(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of results.jsonl and session.log")
    parser.add_argument("--part", type=int, nargs="*", help="run these parts; if not given, all")
    parser.add_argument("--only", nargs="*", help="run the benchmarks of these names")
    parser.add_argument("--done", type=Path, nargs="*", default=[], help="results.jsonl of earlier sessions")
    parser.add_argument("--budget", type=float, help="seconds for this call; nothing is started that needs more")
    parser.add_argument("--list", action="store_true", help="print what would run, and run nothing")
    parser.add_argument("--jobs", type=Path, help="other commands, as JSON")
    parser.add_argument("--model", help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--tokenizer", help="folder with a tokenizer")
    parser.add_argument("--data", help="file of pairs")
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("--unsloth-python", default=sys.executable)
    parser.add_argument("--scratch", default="/tmp/tandem-session", help="folder for models and runs")
    return parser.parse_args()


def main() -> None:
    o = parsed()
    began = time.perf_counter()
    o.out.mkdir(parents=True, exist_ok=True)
    Path(o.scratch).mkdir(parents=True, exist_ok=True)
    results = o.out / "results.jsonl"
    names = ("model", "tokenizer", "data", "trl_python", "unsloth_python", "scratch")
    values: dict[str, str | None] = {"python": sys.executable, **{name: getattr(o, name) for name in names}}
    jobs = given_jobs(o.jobs) if o.jobs else JOBS
    if unknown := set(o.only or ()) - {job.name for job in jobs}:
        sys.exit(f"--only: unknown: {', '.join(sorted(unknown))}. Known: {', '.join(job.name for job in jobs)}.")
    done = succeeded([results, *o.done])
    failed = 0
    for job in jobs:
        if (o.part and job.part not in o.part) or (o.only and job.name not in o.only):
            continue
        if job.name in done:
            print(f"{job.name}: done", flush=True)
            continue
        command, missing = filled_in(job, values)
        if missing:
            print(f"{job.name}: left out, needs {', '.join(f'--{one}' for one in dict.fromkeys(missing))}", flush=True)
            continue
        if packages := missing_packages(command[0], job.packages):
            print(f"{job.name}: left out, {command[0]} has no {', '.join(packages)}", flush=True)
            continue
        left = float("inf") if o.budget is None else o.budget - (time.perf_counter() - began)
        if left < job.seconds:
            print(f"{job.name}: left out, takes about {job.seconds} s and {left:.0f} s are left", flush=True)
            continue
        if o.list:
            print(f"part {job.part}, about {job.seconds} s, {job.name}: {' '.join(command)}")
            continue
        found = run(job, command, min(left, 2 * job.seconds), o.out / "session.log")
        line = {"name": job.name, "part": job.part, "date": f"{date.today()}", "command": command[1:], **found}
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        how = "ran past its limit" if found["exit_code"] is None else f"exit code {found['exit_code']}"
        print(f"{job.name}: {how}, {found['seconds']} s, {len(found['results'])} results", flush=True)
        failed += found["exit_code"] != 0
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
