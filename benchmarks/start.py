"""Times a run from its command to the end of its first step, with every cache empty and then again with all of them warm.

    python benchmarks/start.py --tokenizer FOLDER --data hh_harmless_test.jsonl.gz [--shape qwen2.5-1.5b] --folder /tmp/start \\
        --results benchmarks/results/start_runs.jsonl

The model is created beforehand and not timed. Prints each line of a run with its time. The last line is one JSON object. With
`--results`, each run appends a JSON object to the file: the seconds to the end of the first step, those of each phase, and every
line that the run printed with its time.
"""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
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
PHASE = re.compile(r"([a-z][a-z ]*) ([0-9.]+)")


@dataclass(slots=True)
class Start:
    """The start of one run, in seconds from its command."""

    seconds: float | None = None  # to the end of the first step
    phases: dict[str, float] = field(default_factory=dict)  # as `tandem train --verbose` prints them
    lines: list[tuple[float, str]] = field(default_factory=list)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-1.5b")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/tandem-start"))
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--results", type=Path, help="a file to which each run appends a JSON object")
    parser.add_argument("--more", nargs="*", default=[], help="KEY=VALUE for the runs")
    options = parser.parse_args()
    model = make_model(options.shape, options.tokenizer, options.folder / options.shape)
    given = [f"policy.model_name={model}", f"data.train.data_path={options.data}", *SETTINGS, *options.more]
    caches = {
        name: str(options.folder / name) for name in ("TANDEM_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    }
    starts: list[Start] = []
    for number in range(options.times):
        print(f"\nrun {number}", flush=True)
        were_empty = not any(Path(one).exists() for one in caches.values())
        starts.append(until_first_step([*given, f"run.dir={options.folder}/run-{number}"], caches))
        if options.results is not None:
            about = {"benchmark": "start", "date": datetime.now(UTC).isoformat(timespec="seconds")}
            settings = {"shape": options.shape, "more": options.more, "caches": "empty" if were_empty else "warm"}
            with options.results.open("a", encoding="utf-8") as results:
                results.write(json.dumps({**about, **settings, **asdict(starts[-1])}) + "\n")
    print(f"\nseconds to the end of the first step: {', '.join(f'{one.seconds:.1f}' for one in starts)}")
    result = {"benchmark": "start", "shape": options.shape}
    print(json.dumps({**result, "seconds": [one.seconds for one in starts], "phases": [one.phases for one in starts]}))


def until_first_step(overrides: list[str], caches: dict[str, str]) -> Start:
    """Run `tandem train` until it has printed the times of its phases, which follow the line of the first step."""
    start, began = Start(), time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "tandem", "train", "--verbose", *overrides],
        env={**os.environ, **caches, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if not (text := line.rstrip()):
                continue
            passed = round(time.perf_counter() - began, 2)
            start.lines.append((passed, text))
            print(f"{passed:7.1f} s  {text}", flush=True)
            if text.startswith("step 1/"):
                start.seconds = passed
            if text.startswith("Until the end of step 1: "):
                start.phases = {name: float(seconds) for name, seconds in PHASE.findall(text.partition("(")[2])}
                run.kill()
                return start
    raise SystemExit("the run ended before its first step")


if __name__ == "__main__":
    main()
