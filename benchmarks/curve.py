"""Compares held-out accuracy over wall-clock time, tandem and TRL with the same model, pairs and settings.

    python benchmarks/curve.py --model FOLDER --data hh_harmless_test.jsonl.gz [--seeds 3] [--plot FILE] [--trl-python PYTHON]
    python benchmarks/curve.py ... --systems "TRL, float32" --seeds 1 --steps 20
    python benchmarks/curve.py ... --lora 16 --rate 1e-4

tandem tokenises the pairs once, and both train on its token ids. Float32 weights, bfloat16 computation on a GPU, AdamW,
learning rate 5e-6, beta 0.1, batches of 32 pairs, two epochs, no warm-up; validation before, every 20 steps and after. Times
count from the command and from the first step. The first seed runs alone and is the only one timed and plotted; the others
run at the same time, for their final values only (`--only-ends`: all seeds do). Each result is printed when its run ends.
"TRL, float32" computes in float32, which takes minutes. `--lora` trains adapters of all linear layers but the head. The last
line is one JSON object.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import trl_python
from drawing import COLOURS, key, line, rule, svg, text
from options import options_of
from precision import split

from tandem.config.load import load_config
from tandem.errors import TandemError
from tandem.training.start.setup import set_up

HERE = Path(__file__).parent
EPOCHS, BETA, LONGEST = 2, 0.1, 1024


def settings_of(o: argparse.Namespace, kept: Path, held_out: Path) -> list[str]:
    return [
        f"policy.model_name={o.model}",
        f"data.train.data_path={kept}",
        f"data.validation.data_path={held_out}",
        f"policy.train_global_batch_size={o.pairs}",
        f"policy.optimizer.kwargs.lr={o.rate}",
        "policy.scheduler=null",
        f"policy.max_total_sequence_length={LONGEST}",
        f"dpo.reference_policy_kl_penalty={BETA}",
        f"dpo.max_num_epochs={EPOCHS}",
        f"dpo.val_period={o.period}",
        "dpo.val_at_start=true",
        "dpo.val_at_end=true",
        "data.max_filtered_share=0.5",
        "data.drop_last=false",
        *([f"dpo.max_num_steps={o.steps}"] if o.steps > 0 else []),
        *(
            ["policy.lora.enabled=true", f"policy.lora.dim={o.lora}", f"policy.lora.alpha={2 * o.lora}"]
            if o.lora
            else []
        ),
        "checkpointing.enabled=false",
        *o.more,
    ]


def write_tokens(given: list[str], train: Path, held_out: Path) -> None:
    """Write the first pair of every preference as token ids, one JSON object per line."""
    setup = set_up(load_config(None, given).config, torch.device("cpu"))
    for packer, place in ((setup.plan.train, train), (setup.plan.validation["default"], held_out)):
        with place.open("w") as file:
            for index in range(len(packer.store)):
                one = packer.store[index]
                best, worst = one.pairs[0]
                parts = {"prompt": one.prompt, "chosen": one.completions[best], "rejected": one.completions[worst]}
                file.write(json.dumps({f"{name}_ids": part.tolist() for name, part in parts.items()}) + "\n")


def ours(o: argparse.Namespace, given: list[str], seed: int, folder: Path) -> list[dict[str, float]]:
    """Validation points of a run of `tandem train`, each with the time at which its line arrived."""
    began, first, points = time.time(), 0.0, []
    command = [sys.executable, "-m", "tandem", "train", "--json", *given, f"run.seed={seed}", f"run.dir={folder}"]
    errors = folder.with_suffix(".err")
    with (
        errors.open("w") as said,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True) as run,
    ):
        assert run.stdout is not None
        for line in run.stdout:
            now, record = time.time(), json.loads(line)
            if record.get("split") == "train" and not first:
                first = now - record["step_seconds"]
            if record.get("split") == "validation-default":
                point = {"step": record["step"], "accuracy": record["accuracy"], "loss": record["loss"]}
                points.append({**point, "command": now - began, "first_step": now - first if first else 0.0})
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {run.returncode}\n{errors.read_text()[-3000:]}")
    return points


def theirs(
    o: argparse.Namespace, tokens: tuple[Path, Path], seed: int, *, bfloat16: bool = True
) -> list[dict[str, float]]:
    shared = {
        "bfloat16": bfloat16,
        "epochs": EPOCHS,
        "steps": o.steps,
        "pairs": o.pairs,
        "rate": o.rate,
        "beta": BETA,
        "longest": LONGEST,
        "period": o.period,
        "lora": o.lora,
    }
    command = [
        *(o.trl_python, str(HERE / "trl_curve.py"), "--began", str(time.time()), "--model", o.model),
        *("--train", str(tokens[0]), "--held-out", str(tokens[1]), "--settings", json.dumps(shared)),
        *("--seed", str(seed), "--micro-batch", str(o.micro_batch)),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    points = json.loads(done.stdout.strip().splitlines()[-1])["points"]
    # Before the first step every pair is a tie, which counts one half in tandem and zero in TRL.
    return [{**point, "accuracy": point["accuracy"] if point["step"] else 0.5} for point in points]


def plot(curves: dict[str, list[dict[str, float]]]) -> str:
    """An SVG of held-out accuracy over seconds from the command."""
    width, height, left, top, right, bottom = 760, 420, 70, 40, 30, 60
    every = [point for run in curves.values() for point in run]
    longest = max(point["command"] for point in every)
    lowest, highest = min(p["accuracy"] for p in every), max(p["accuracy"] for p in every)
    span = (highest - lowest) or 1.0

    def x(seconds: float) -> float:
        return left + (width - left - right) * seconds / longest

    def y(accuracy: float) -> float:
        return top + (height - top - bottom) * (1 - (accuracy - lowest) / span)

    parts = [text(left, 24, "held-out accuracy over seconds from the command")]
    for share in range(5):
        accuracy, seconds = lowest + span * share / 4, longest * share / 4
        parts.append(rule(left, y(accuracy), width - right - left))
        parts.append(text(left - 8, y(accuracy) + 4, f"{accuracy:.2f}", anchor="end"))
        parts.append(text(x(seconds), height - bottom + 20, f"{seconds:.0f}", anchor="middle"))
    for number, (name, run) in enumerate(curves.items()):
        parts.append(line([(x(p["command"]), y(p["accuracy"])) for p in run], COLOURS[number]))
        parts += key(left + number * 160, height - 16, name, COLOURS[number])
    return svg(width, height, parts)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--systems", nargs="+", default=["tandem", "TRL"], choices=["tandem", "TRL", "TRL, float32"])
    parser.add_argument("--steps", type=int, default=-1, help="number of steps; -1: all")
    parser.add_argument("--pairs", type=int, default=32, help="pairs in a step")
    parser.add_argument("--period", type=int, default=20, help="steps between validations")
    parser.add_argument("--rate", type=float, default=5e-6, help="learning rate")
    parser.add_argument(
        "--lora", type=int, default=0, metavar="DIM", help="train adapters of this rank; 0: all weights"
    )
    parser.add_argument("--only-ends", action="store_true", help="run all seeds at the same time; nothing is timed")
    parser.add_argument("--micro-batch", type=int, default=16, help="pairs in a micro-batch of TRL")
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/tandem-curve"))
    parser.add_argument("--more", nargs="*", default=[], help="KEY=VALUE for every run of tandem")
    o = parser.parse_args()
    if not o.data.is_file():
        parser.error(f"--data {o.data}: there is no such file")
    if any(system.startswith("TRL") for system in o.systems):
        trl_python.check(o.trl_python, "datasets", "trl")
    kept, held_out = split(o.data, o.folder)
    given = settings_of(o, kept, held_out)
    tokens = o.folder / "train.ids.jsonl", o.folder / "held-out.ids.jsonl"
    try:
        write_tokens(given, *tokens)
    except TandemError as error:
        raise SystemExit(f"curve.py: {error}") from None
    systems: dict[str, Callable[[int], list[dict[str, float]]]] = {
        "tandem": lambda seed: ours(o, given, seed, o.folder / f"run-{seed}-{time.time():.0f}"),
        "TRL": lambda seed: theirs(o, tokens, seed),
        "TRL, float32": lambda seed: theirs(o, tokens, seed, bfloat16=False),
    }
    systems = {name: run for name, run in systems.items() if name in o.systems}
    curves: dict[str, list[list[dict[str, float]]]] = {}

    def run_and_print(name: str, seed: int) -> list[dict[str, float]]:
        points = systems[name](seed)
        last = points[-1]
        said = f"{name}, seed {seed}: accuracy {last['accuracy']:.4f}, loss {last['loss']:.4f}"
        print(f"{said}\n{json.dumps({'system': name, 'seed': seed, 'points': points})}", flush=True)
        return points

    for name in systems if not o.only_ends else ():
        curves[name] = [run_and_print(name, 0)]
        last = curves[name][0][-1]
        print(
            f"{name}: {last['command']:.0f} s from the command, {last['first_step']:.0f} s from the first step",
            flush=True,
        )
    with ThreadPoolExecutor() as together:
        started = {
            name: [together.submit(run_and_print, name, seed) for seed in range(not o.only_ends, o.seeds)]
            for name in systems
        }
        for name, rest in started.items():
            curves.setdefault(name, []).extend(one.result() for one in rest)
    for what in ("accuracy", "loss"):
        ends = {name: [run[-1][what] for run in runs] for name, runs in curves.items()}
        print(f"{what}: " + ", ".join(f"{name} {statistics.fmean(values):.4f}" for name, values in ends.items()))
        if o.seeds > 1 and len(ends) == 2:
            error = 2 * (sum(statistics.variance(values) for values in ends.values()) / o.seeds) ** 0.5
            print(f"{what}: two standard errors of the difference {error:.4f}")
    if o.plot and not o.only_ends:
        o.plot.write_text(plot({name: runs[0] for name, runs in curves.items()}), encoding="utf-8")
    result: dict[str, Any] = {"benchmark": "curve", "data": o.data.name, "curves": curves}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
