"""Compares the time of steps during which a checkpoint is written behind the run's back with steps of a run that saves none.

    python benchmarks/saving.py --tokenizer FOLDER --data hh_harmless_test.jsonl.gz [--shape qwen2.5-0.5b] --folder /tmp/saving

Exits 1 when steps take over 5 % longer. Its last line is one JSON object.
"""

import argparse
import json
import statistics
from pathlib import Path

from made_model import SHAPES, make_model, run

SETTINGS = [
    "policy.train_global_batch_size=128",
    "dpo.max_num_steps=18",
    "dpo.max_num_epochs=4",
    "dpo.val_at_start=false",
    "dpo.val_at_end=false",
    "policy.max_total_sequence_length=4096",
]
SAVE_PERIOD = 6  # a checkpoint takes longer to write than six steps take, so that every step behind the sixth meets one


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
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratio = medians["saving"] / medians["plain"]
    for name, values in times.items():
        print(f"{name:<7} median {medians[name]:.3f} s a step, longest {max(values):.3f}")
    print(f"steps while saving take {ratio - 1:+.1%}")
    print(json.dumps({"medians": medians, "ratio": ratio, "times": times}))
    raise SystemExit(ratio > 1.05)


if __name__ == "__main__":
    main()
