r"""Compares how well each precision learns: the same runs with float32 weights and states and with fewer bits, over seeds.

    python benchmarks/precision.py --model FOLDER --data hh_harmless_test.jsonl.gz llms_from_scratch_preference.json \
        [--seeds 3] [--jobs 4]

A seventh of every file is held out, the same for all runs. Learning rate 5e-6, beta 0.1, batches of 32 pairs, two epochs, no
warm-up, bfloat16 computation. Prints held-out loss and accuracy at the end, mean and spread over seeds, and whether a
precision ends within two standard errors of float32. `--jobs` is the number of runs at a time. The last line is one JSON object.
"""

import argparse
import gzip
import json
import multiprocessing
import random
import shutil
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from float8 import compute_in_float8
from options import options_of

from tandem.config.load import load_config
from tandem.model.architecture import decoder_layers
from tandem.model.policy import Policy
from tandem.report.reporter import Reporter
from tandem.training.start import references
from tandem.training.trainer import train

FLOAT8 = "float32, products in float8"  # an experiment
PRECISIONS = {
    "float32": [],
    "float32, computed in float32": ["policy.precision=float32"],
    "bfloat16 states": ["policy.optimizer.state_dtype=bfloat16"],
    "int8 states": ["policy.optimizer.state_dtype=int8"],
    "bfloat16 weights, stochastic": ["policy.weights=bfloat16_stochastic"],
    "bfloat16 weights, stochastic, int8 states": [
        "policy.weights=bfloat16_stochastic",
        "policy.optimizer.state_dtype=int8",
    ],
    "bfloat16 weights, nearest": ["policy.weights=bfloat16_nearest"],
    FLOAT8: [],
}
SETTINGS = [
    "policy.precision=bfloat16",
    "policy.optimizer.kwargs.lr=5e-6",
    "policy.scheduler=null",
    "policy.train_global_batch_size=32",
    "policy.max_total_sequence_length=1024",
    "data.max_filtered_share=0.5",
    "dpo.max_num_epochs=2",
    "dpo.val_period=0",
    "dpo.val_at_start=false",
    "dpo.val_at_end=true",
    "checkpointing.enabled=false",
]


def split(file: Path, folder: Path) -> tuple[Path, Path]:
    """Shuffle the rows of a file and write six sevenths and one seventh as JSON lines; return the two paths."""
    raw = file.read_bytes()
    text = (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode()
    rows = (
        json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines() if line]
    )
    random.Random(0).shuffle(rows)
    cut = len(rows) // 7
    folder.mkdir(parents=True, exist_ok=True)
    places = folder / "train.jsonl", folder / "held-out.jsonl"
    for place, part in zip(places, (rows[cut:], rows[:cut]), strict=True):
        place.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    return places


def ended(overrides: list[str], folder: Path, *, float8: bool) -> dict[str, float]:
    """Loss, accuracy and pairs of the last validation of a run."""
    if float8:  # the cache key does not include float8: a shared cache would return a reference computed without it
        overrides = [*overrides, f"reference.cache_dir={folder}-reference"]
    with products_in_float8() if float8 else nullcontext():
        run = train(load_config(None, [*overrides, f"run.dir={folder}"]), Reporter("quiet"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(run)
    last = [line for line in lines if line["split"] == "validation-default"][-1]
    return {"loss": last["loss"], "accuracy": last["accuracy"], "pairs": last["num_pairs"]}


@contextmanager
def products_in_float8() -> Iterator[None]:
    load = references.load_policy

    def load_in_float8(*given: Any, **more: Any) -> Policy:
        policy = load(*given, **more)
        compute_in_float8(decoder_layers(policy.model))
        return policy

    references.load_policy = load_in_float8
    try:
        yield
    finally:
        references.load_policy = load


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--precisions", choices=PRECISIONS, nargs="+", default=[name for name in PRECISIONS if name != FLOAT8]
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/tandem-precision"))
    parser.add_argument("--more", nargs="*", default=[], help="KEY=VALUE for every run")
    o = parser.parse_args()
    with ProcessPoolExecutor(o.jobs, multiprocessing.get_context("spawn")) as processes:
        print(json.dumps({file.name: of_file(file, o, processes) for file in o.data}))


def of_file(file: Path, o: argparse.Namespace, processes: ProcessPoolExecutor) -> dict[str, list[dict[str, float]]]:
    """Run every precision on the pairs of a file; return the results of all seeds by precision."""
    kept, held_out = split(file, o.folder / file.name)
    given = [
        f"policy.model_name={o.model}",
        f"data.train.data_path={kept}",
        f"data.validation.data_path={held_out}",
    ]
    started = {
        name: [
            processes.submit(
                ended,
                [*given, *SETTINGS, *PRECISIONS[name], f"run.seed={seed}", *o.more],
                o.folder / f"{file.name}-{seed}-{number}",
                float8=name == FLOAT8,
            )
            for seed in range(o.seeds)
        ]
        for number, name in enumerate(o.precisions)
    }
    print(f"\n{file.name}\n{'':<42} {'loss':>16} {'accuracy':>16}")
    found: dict[str, list[dict[str, float]]] = {}
    for name, running in started.items():
        runs = found[name] = [one.result() for one in running]
        cells = [f"{mean_of(runs, what):.4f} ± {spread_of(runs, what):.4f}" for what in ("loss", "accuracy")]
        near = "" if name == "float32" else f"  {compared(found, name)}"
        print(f"{name:<42} {cells[0]:>16} {cells[1]:>16}{near}", flush=True)
    return found


def mean_of(runs: list[dict[str, float]], what: str) -> float:
    return statistics.fmean(run[what] for run in runs)


def spread_of(runs: list[dict[str, float]], what: str) -> float:
    return statistics.stdev(run[what] for run in runs) if len(runs) > 1 else 0.0


def compared(of_file: dict[str, list[dict[str, float]]], name: str) -> str:
    """A sentence that says whether the mean loss is within two standard errors of float32's."""
    if "float32" not in of_file:
        return ""
    plain, other = of_file["float32"], of_file[name]
    error = (spread_of(plain, "loss") ** 2 / len(plain) + spread_of(other, "loss") ** 2 / len(other)) ** 0.5
    off = mean_of(other, "loss") - mean_of(plain, "loss")
    return f"{off:+.4f}, {'within' if abs(off) <= 2 * error else 'not within'} two standard errors ({2 * error:.4f})"


if __name__ == "__main__":
    main()
