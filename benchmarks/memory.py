"""Compares the memory that a run expects before its first step with its peak, for three configurations.

    python benchmarks/memory.py --tokenizer FOLDER --data hh_harmless_test.jsonl.gz --folder /tmp/memory

Needs a GPU. Exits with 1 if an estimate is off by more than a tenth. The last line is one JSON object.
"""

import json
import re
import shutil
from pathlib import Path

import torch
from made_model import make_model, run
from options import options_of

CASES = {
    "0.5B, all weights, packs of 8,192": ("qwen2.5-0.5b", ["policy.packing.pack_length=8192"]),
    "0.5B, all weights, packs of 16,384, selective": (
        "qwen2.5-0.5b",
        ["policy.packing.pack_length=16384", "policy.activation_checkpointing=selective"],
    ),
    "0.5B, LoRA, two packs of 8,192 at a time": (
        "qwen2.5-0.5b",
        ["policy.packing.pack_length=8192", "policy.packing.packs_per_micro_batch=2", "policy.lora.enabled=true"],
    ),
}
SETTINGS = [
    "policy.train_global_batch_size=128",
    "dpo.max_num_steps=3",
    "dpo.val_at_start=false",
    "dpo.val_at_end=false",
    "checkpointing.enabled=false",
    "policy.max_total_sequence_length=4096",
]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/tandem-memory"))
    parser.add_argument("--cases", type=int, nargs="+", choices=range(len(CASES)), default=list(range(len(CASES))))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("the memory is a GPU's, and there is none")
    found = {}
    for number in options.cases:
        name, (shape, own) = list(CASES.items())[number]
        model = make_model(shape, options.tokenizer, options.folder / shape)
        given = [f"policy.model_name={model}", f"data.train.data_path={options.data}", *SETTINGS, *own]
        out, _ = run(given, options.folder / f"run-{number}")
        shutil.rmtree(options.folder / f"run-{number}")
        parts = re.search(r"Memory: (weights .*)", out)
        compared = re.search(r"Memory: ([\d.]+) GiB used at most, ([\d.]+) GiB expected", out)
        assert parts and compared, out
        used, expected = map(float, compared.groups())
        found[name] = {"used_gib": used, "expected_gib": expected, "off": expected / used - 1}
        print(
            f"{name}\n  expected: {parts[1]}\n  used at most {used} GiB, expected {expected}: {expected / used - 1:+.1%}",
            flush=True,
        )
    print(json.dumps(found))
    raise SystemExit(any(abs(one["off"]) > 0.1 for one in found.values()))


if __name__ == "__main__":
    main()
