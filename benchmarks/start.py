"""Times a run from its command to the end of its first step, with every cache empty and then again with all of them warm.

    python benchmarks/start.py --tokenizer FOLDER --data hh_harmless_test.jsonl.gz [--shape qwen2.5-1.5b] --folder /tmp/start

The model is created beforehand and not timed. Prints each line of a run with its time. The last line is one JSON object.
"""

import json
import os
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
    parser.add_argument("--more", nargs="*", default=[], help="KEY=VALUE for the runs")
    options = parser.parse_args()
    model = make_model(options.shape, options.tokenizer, options.folder / options.shape)
    given = [f"policy.model_name={model}", f"data.train.data_path={options.data}", *SETTINGS, *options.more]
    caches = {
        name: str(options.folder / name) for name in ("TANDEM_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    }
    seconds = []
    for number in range(options.times):
        print(f"\nrun {number}", flush=True)
        seconds.append(until_first_step([*given, f"run.dir={options.folder}/run-{number}"], caches))
    print(f"\nseconds to the end of the first step: {', '.join(f'{one:.1f}' for one in seconds)}")
    print(json.dumps({"benchmark": "start", "shape": options.shape, "seconds": seconds}))


def until_first_step(overrides: list[str], caches: dict[str, str]) -> float:
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "tandem", "train", *overrides],
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
            if line.startswith("step 1/"):
                run.kill()
                return passed
    raise SystemExit("the run ended before its first step")


if __name__ == "__main__":
    main()
