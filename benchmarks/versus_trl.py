"""Compares the speed of training steps of tandem and TRL on the same pairs.

    python benchmarks/versus_trl.py --shape qwen2.5-1.5b [--settings learning bfloat16 stock lora qlora] [--trl-python PYTHON]

Every step has the same 128 pairs on both sides; clipping and metrics are on. `learning`: float32 weights, bfloat16
computation, the reference computed beforehand. `bfloat16`: bfloat16 weights and optimizer states on both sides, tandem's
rounded stochastically. `stock`: TRL's defaults (live reference, activation checkpointing) and tandem's. `lora`: adapters of
rank 16 on all linear layers except the head, over bfloat16 weights. `qlora`: the same over weights quantised to nf4.
`--repeats` times the steps several times on each side, after building and compiling once, and prints the median and the range.
Needs a GPU. The last line is one JSON object.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trl_python
from made_model import SHAPES, WARM_UP
from options import options_of

HERE = Path(__file__).parent
# When the card's memory is nearly full: at 1.5B with bfloat16 weights, TRL processes a fifth more pairs per second with it.
MEMORY = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
PAIRS = 128
# TRL's pairs in a micro-batch: the largest power of two that fits on one H200. Half as many are 15 to 34 % slower.
# With adapters at 8B, 8 ran out of memory; with nf4, 4 is assumed.
MICRO_BATCH = {
    ("qwen2.5-1.5b", "learning"): 8,
    ("qwen2.5-1.5b", "bfloat16"): 16,
    ("llama3.1-8b", "bfloat16"): 4,
    ("llama3.1-8b", "lora"): 4,
    ("llama3.1-8b", "qlora"): 4,
}
OURS = {
    "learning": [],
    "bfloat16": ["--weights", "bfloat16_stochastic", "--state-dtype", "bfloat16"],
    "stock": [],
    "lora": ["--lora", "16"],
    "qlora": ["--lora", "16", "--quantization", "nf4"],
}
THEIRS = {
    "learning": ["--weights", "float32", "--liger"],
    "bfloat16": ["--weights", "bfloat16", "--liger"],
    "stock": ["--weights", "bfloat16", "--stock"],
    "lora": ["--weights", "bfloat16", "--liger", "--lora", "16"],
    "qlora": ["--weights", "bfloat16", "--liger", "--lora", "16", "--quantization", "nf4"],
}


def write_pairs(path: Path, num: int, vocabulary: int) -> None:
    """Write random pairs with log-normal lengths: prompt mean 200, completions mean 250, sigma 0.7, at most 2,048 together."""
    rng = np.random.default_rng(0)

    def length(mean: float) -> int:
        return max(4, int(rng.lognormal(np.log(mean) - 0.7**2 / 2, 0.7)))

    with path.open("w") as file:
        while num:
            lengths = {"prompt": length(200), "chosen": length(250), "rejected": length(250)}
            if lengths["prompt"] + max(lengths["chosen"], lengths["rejected"]) <= 2048:
                row = {f"{part}_ids": rng.integers(10, vocabulary, n).tolist() for part, n in lengths.items()}
                file.write(json.dumps(row) + "\n")
                num -= 1


def run(python: str, script: str, *arguments: str, memory: dict[str, str] | None = None) -> dict[str, Any]:
    command = [python, str(HERE / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | (memory or {}))
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        print(f"{' '.join(command)}\n  failed: {' '.join(last)[:300]}", flush=True)
        return {"pairs_per_second": None, "peak_gib": None, "failed": " ".join(last)[:300]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-1.5b")
    parser.add_argument("--settings", choices=OURS, nargs="+", default=["learning", "bfloat16"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--repeats", type=int, default=1, help="how often the steps are timed on each side, for a median"
    )
    parser.add_argument("--pack-length", type=int, default=16384)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--trl-compile", action="store_true", help="run TRL with torch_compile instead of Liger")
    parser.add_argument(
        "--trl-micro-batch",
        type=int,
        help="pairs in a micro-batch of TRL; if not given, a power of two that fits on one H200",
    )
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/tandem-versus"))
    o = parser.parse_args()
    if min(o.pairs, o.steps, o.repeats, 1 if o.trl_micro_batch is None else o.trl_micro_batch) < 1:
        parser.error("--pairs, --steps, --repeats and --trl-micro-batch are at least 1")
    if not torch.cuda.is_available():
        parser.error("TRL is timed with Liger's kernels, which need a GPU, and there is none")
    trl_python.check(o.trl_python, "datasets", "liger_kernel", "trl")
    micro = {one: o.trl_micro_batch or min(o.pairs, MICRO_BATCH.get((o.shape, one), 8)) for one in o.settings}
    if left := [one for one, pairs in micro.items() if o.pairs % pairs]:
        sys.exit(
            f"--pairs {o.pairs} is not a multiple of TRL's micro-batch of {micro[left[0]]} pairs. "
            "Change --pairs or --trl-micro-batch."
        )
    o.folder.mkdir(parents=True, exist_ok=True)
    data = o.folder / "pairs.jsonl"
    write_pairs(data, o.pairs * (o.steps + WARM_UP), SHAPES[o.shape].vocabulary)
    common = ["--shape", o.shape, "--data", str(data), "--steps", str(o.steps), "--repeats", str(o.repeats)]
    found: dict[str, Any] = {}
    wide = 32 if o.repeats > 1 else 16
    print(f"{'':<10} {'tandem':>{wide}} {'TRL':>{wide}} {'ratio':>7}")
    for setting in o.settings:
        ours = run(
            sys.executable,
            "train.py",
            *common,
            *("--pairs", str(o.pairs), "--pack-length", str(o.pack_length)),
            *OURS[setting],
        )
        print(f"{setting}: tandem {speed_and_memory(ours)}", file=sys.stderr, flush=True)  # TRL takes longer
        batch = ("--micro-batch", str(micro[setting]), "--accumulate", str(o.pairs // micro[setting]))
        tuned = THEIRS[setting]
        if o.trl_compile:  # torch.compile cannot trace Liger's kernels: both together are slower than Liger alone
            tuned = [*(option for option in tuned if option != "--liger"), "--compile"]
        theirs = run(o.trl_python, "trl_steps.py", *common, *batch, *tuned, memory=MEMORY)
        found[setting] = {"tandem": ours, "trl": theirs}
        print(
            f"{setting:<10} {speed_and_memory(ours):>{wide}} {speed_and_memory(theirs):>{wide}} {ratio(ours, theirs):>7}",
            flush=True,
        )
    print(json.dumps(found))
    raise SystemExit(any(one["pairs_per_second"] is None for both in found.values() for one in both.values()))


def speed_and_memory(one: dict[str, Any]) -> str:
    """The speed, of several repeats the median with its range, and the peak."""
    if not one["pairs_per_second"]:
        return "failed"
    between = f", {min(one['each'])} to {max(one['each'])}" if len(one["each"]) > 1 else ""
    return f"{one['pairs_per_second']} ({one['peak_gib']} GiB{between})"


def ratio(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    both = ours["pairs_per_second"], theirs["pairs_per_second"]
    return f"{both[0] / both[1]:.2f}" if all(both) else "-"


if __name__ == "__main__":
    main()
