"""Compares the time of steps during which a checkpoint is written behind the run's back with steps of a run that saves none.

    python benchmarks/saving.py --tokenizer FOLDER --data hh_harmless_test.jsonl.gz [--shape qwen2.5-0.5b] --folder /tmp/saving

The twelve steps behind a save are compared, the copy off the device among them. Exits 1 when they take over 5 % longer on
average. Its last line is one JSON object.
"""

import argparse
import json
import statistics
from pathlib import Path

from made_model import SHAPES, make_model, run

SETTINGS = [
    "policy.train_global_batch_size=128",
    "dpo.max_num_steps=24",
    "dpo.max_num_epochs=4",
    "dpo.val_at_start=false",
    "dpo.val_at_end=false",
    "policy.max_total_sequence_length=4096",
]
SAVE_PERIOD = 12  # about the steps that a checkpoint takes to write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/tandem-saving"))
    options = parser.parse_args()
    model = make_model(options.shape, options.tokenizer, options.folder / options.shape)
    given = [f"policy.model_name={model}", f"data.train.data_path={options.data}", *SETTINGS]
    saving = [f"checkpointing.save_period={SAVE_PERIOD}", "checkpointing.keep_top_k=1"]
    _, plain = run([*given, "checkpointing.enabled=false"], options.folder / "plain")
    _, saved = run([*given, *saving], options.folder / "saving")
    times = {
        name: [record["step_seconds"] for record in records[SAVE_PERIOD:]]
        for name, records in (("plain", plain), ("saving", saved))
    }
    means = {name: statistics.mean(values) for name, values in times.items()}
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratio = means["saving"] / means["plain"]
    for name, values in times.items():
        print(f"{name:<7} mean {means[name]:.3f} s a step, median {medians[name]:.3f}, longest {max(values):.3f}")
    print(f"steps while saving take {ratio - 1:+.1%} on average")
    print(json.dumps({"means": means, "medians": medians, "ratio": ratio, "times": times}))
    raise SystemExit(ratio > 1.05)


if __name__ == "__main__":
    main()
