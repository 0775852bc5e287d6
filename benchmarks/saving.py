"""Compares the steps during which a checkpoint is written with the steps before it in the same run.

    python benchmarks/saving.py --tokenizer FOLDER --data hh_harmless_test.jsonl.gz [--shape qwen2.5-1.5b] --folder /tmp/saving

The checkpoint is saved in the middle of the run; the steps after it include the copy from the device. Batches differ in length,
so seconds per token are compared. Exits with 1 if they increase by over 5 %. The last line is one JSON object.
"""

import json
import statistics
from pathlib import Path
from typing import Any

from made_model import SHAPES, make_model, run
from options import options_of

SETTINGS = [
    "policy.train_global_batch_size=128",
    "dpo.max_num_epochs=9",
    "dpo.val_at_start=false",
    "dpo.val_at_end=false",
    "policy.max_total_sequence_length=4096",
    "checkpointing.keep_top_k=1",
]
WARM_UP = 5  # steps that are not timed


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-1.5b")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/tandem-saving"))
    parser.add_argument(
        "--steps", type=int, default=12, help="number of timed steps before the save, and again after it"
    )
    parser.add_argument("--more", nargs="*", default=[], help="KEY=VALUE for the run")
    options = parser.parse_args()
    save_at = WARM_UP + options.steps
    model = make_model(options.shape, options.tokenizer, options.folder / options.shape)
    given = [f"policy.model_name={model}", f"data.train.data_path={options.data}", *SETTINGS, *options.more]
    steps = [f"dpo.max_num_steps={save_at + options.steps}", f"checkpointing.save_period={save_at}"]
    _, records = run([*given, *steps], options.folder / "run")
    parts = {"before": records[WARM_UP:save_at], "beside": records[save_at:]}
    pace = {name: mean_pace(part) for name, part in parts.items()}
    ratio = pace["beside"] / pace["before"]
    for name, part in parts.items():
        seconds = [record["step_seconds"] for record in part]
        print(
            f"{name:<7} {1e6 * pace[name]:.2f} µs a token; a step {statistics.mean(seconds):.3f} s, longest {max(seconds):.3f}"
        )
    print(f"time per token during a save: {ratio - 1:+.1%}")
    times = {name: [[r["step_seconds"], r["num_tokens"]] for r in part] for name, part in parts.items()}
    print(json.dumps({"shape": options.shape, "pace": pace, "ratio": ratio, "times": times}))
    raise SystemExit(ratio > 1.05)


def mean_pace(records: list[dict[str, Any]]) -> float:
    return sum(record["step_seconds"] for record in records) / sum(record["num_tokens"] for record in records)


if __name__ == "__main__":
    main()
