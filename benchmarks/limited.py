"""Runs `tandem train` with torch's memory limited as on a smaller card: loading, reference pass, rehearsal, steps and export.

    python benchmarks/limited.py --shape llama3.1-8b --limit-gib 16 --tokenizer FOLDER --data FILE KEY=VALUE ...

For example, 8B within 16 GiB: policy.lora.enabled=true policy.lora.quantization=nf4 policy.activation_checkpointing=full
policy.packing.pack_length=8192.

The model is created beforehand, with random weights. The command runs in this process, after
`torch.cuda.set_per_process_memory_fraction`; a run that needs more fails with exit code 6. CUDA's own memory, about half a GiB,
is not limited. tandem still sees the memory of the whole card, so give `policy.packing.pack_length`. Without --tokenizer and
--data, the embedded ones are used, whose pairs are short. Needs a GPU. The last line is one JSON object; the exit code is that of
the run.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from made_model import SHAPES, make_model
from options import options_of

GIB = 2**30
SETTINGS = [
    "policy.train_global_batch_size=128",
    "dpo.max_num_steps=4",
    "dpo.val_period=0",
    "dpo.val_at_start=false",
    "dpo.val_at_end=false",
    "checkpointing.enabled=false",
    "data.max_filtered_share=0.5",
    "cluster.gpus_per_node=1",
]


def limit_memory(gib: float) -> None:
    """Make torch fail where a card of this size would run out of memory."""
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / torch.cuda.mem_get_info()[1]))


def run_tandem(overrides: list[str]) -> int:
    """Run `tandem train` in this process, and return its exit code."""
    from tandem.cli.main import main as tandem

    with mock.patch.object(sys, "argv", ["tandem", "train", *overrides]):
        try:
            tandem()
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def steps_of(run: Path) -> list[dict[str, Any]]:
    """Loss, gradient norm, seconds and tokens of every step that the run finished."""
    names = ("step", "loss", "grad_norm", "step_seconds", "num_tokens", "memory_gib")
    if not (run / "metrics.jsonl").is_file():
        return []
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{name: one[name] for name in names} for one in records if one["split"] == "train"]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--limit-gib", type=float, required=True)
    parser.add_argument("--tokenizer", help="a folder with a tokenizer; if not given, the embedded one")
    parser.add_argument("--data", default="embedded", help="a file of pairs")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/tandem-limited"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of the run")
    o = parser.parse_args()
    if o.limit_gib <= 0:
        parser.error("--limit-gib is more than 0")
    if not torch.cuda.is_available():
        parser.error("--limit-gib is of a GPU, and there is none")
    from tandem.model.files.tiny import tiny_tokenizer

    model = make_model(o.shape, o.tokenizer or str(tiny_tokenizer()), o.folder / o.shape)
    torch.cuda.empty_cache()  # of making the model
    torch.cuda.reset_peak_memory_stats()
    limit_memory(o.limit_gib)
    run = o.folder / f"run-{time.time():.0f}"
    began = time.perf_counter()
    given = [f"policy.model_name={model}", f"data.train.data_path={o.data}", f"run.dir={run}"]
    given.append(f"reference.cache_dir={run}-reference")  # so that every run computes its reference
    code = run_tandem([*given, *SETTINGS, *o.overrides])
    result = {
        "benchmark": "limited",
        "shape": o.shape,
        "limit_gib": o.limit_gib,
        "overrides": o.overrides,
        "exit_code": code,
        "seconds": round(time.perf_counter() - began, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 1),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 1),
        "steps": steps_of(run),
        "exported": (run / "model").is_dir(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    print(json.dumps(result))
    sys.exit(code)


if __name__ == "__main__":
    main()
