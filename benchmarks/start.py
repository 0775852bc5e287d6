"""Times a run from its command to the end of its first step, with every cache empty and then again with all of them warm.

    python benchmarks/start.py --tokenizer FOLDER --data hh_harmless_test.jsonl.gz [--shape qwen2.5-1.5b] --folder /tmp/start

The model is created beforehand and not timed. Prints each line of a run with its time. `--breakdown` adds the seconds of each
phase, as `tandem train --verbose` prints them. The last line is one JSON object.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from made_model import SHAPES, make_model
from options import options_of

SETTINGS = [
    "policy.train_global_batch_size=128",
    "policy.max_total_sequence_length=4096",
    "dpo.max_num_steps=2",
    "dpo.val_at_start=false",
    "dpo.val_at_end=false",
    "checkpointing.enabled=false",
]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-1.5b")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/tandem-start"))
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--breakdown", action="store_true", help="the seconds of each phase of the start")
    parser.add_argument("--more", nargs="*", default=[], help="KEY=VALUE for the runs")
    options = parser.parse_args()
    model = make_model(options.shape, options.tokenizer, options.folder / options.shape)
    given = [
        *(["--verbose"] if options.breakdown else []),
        f"policy.model_name={model}",
        f"data.train.data_path={options.data}",
        *SETTINGS,
        *options.more,
    ]
    caches = {
        name: str(options.folder / name) for name in ("TANDEM_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    }
    seconds, phases = [], []
    for number in range(options.times):
        print(f"\nrun {number}", flush=True)
        passed, found = until_first_step([*given, f"run.dir={options.folder}/run-{number}"], caches)
        seconds.append(passed)
        phases.append(found)
    print(f"\nseconds to the end of the first step: {', '.join(f'{one:.1f}' for one in seconds)}")
    result = {"benchmark": "start", "shape": options.shape, "seconds": seconds}
    print(json.dumps(result | ({"phases": phases} if options.breakdown else {})))


def phases_of(line: str) -> dict[str, float]:
    """Example: "Until the end of step 1: 9.5 s (imports and settings 5.0, weights 4.5)" gives the two phases."""
    _, _, listed = line.rstrip(")\n").partition("(")
    return {name: float(spent) for name, spent in re.findall(r"([^,(]+?) ([\d.]+)(?:, |$)", listed)}


def until_first_step(arguments: list[str], caches: dict[str, str]) -> tuple[float, dict[str, float]]:
    """Return the seconds until the line of the first step and, with --verbose, the seconds of each phase."""
    wants_phases, passed_first, phases = "--verbose" in arguments, 0.0, {}
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "tandem", "train", *arguments],
        env={**os.environ, **caches, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            passed = time.perf_counter() - began
            if line.strip():
                print(f"{passed:7.1f} s  {line.rstrip()[:100]}", flush=True)
            if line.startswith("Until the end of "):
                phases = phases_of(line)
            if line.startswith("step 1/"):
                passed_first = passed
            if passed_first and (phases or not wants_phases):
                run.kill()
                return passed_first, phases
    if passed_first:
        return passed_first, phases
    raise SystemExit("the run ended before its first step")


if __name__ == "__main__":
    main()
