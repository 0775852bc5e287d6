"""Times training steps of a model with recurrent layers, packed and unpacked, on the same random pairs as train.py.

    python benchmarks/hybrids.py --shape granite4-h-1b --pairs 128 --pack-length 16384 --rows 16
    python benchmarks/hybrids.py --shape qwen3.5-2b --pairs 128 --pack-length 16384 --rows 16

"A pair per row" computes with the kernels of packs, but every row holds one pair, with its prompt twice, and filler: this shows
what packing and shared prompts gain. Unpacked, every sequence is a row, sorted by length and padded as
`policy.packing.mode=none` does it, in the operations of transformers. --rows is the number of pairs that go through the model
together in these two ways. If they do not fit in memory, half as many are tried, and so on. Each way runs in its own process.
Prints a table, how the recurrent layers were computed, and one JSON object per way. The times are meaningful only on a GPU.
"""

import argparse
import json
import subprocess
import sys

import numpy as np
import torch
from made_model import SHAPES, WARM_UP
from options import options_of
from train import Bench, parsed, prepared

from tandem.model.distributed.process_group import leave_process_group
from tandem.model.recurrent.outlook import describe_recurrent_layers
from tandem.packing.distribution import Round
from tandem.packing.layout import IntArray
from tandem.packing.packer import Packer, row_lengths

WAYS = {
    "packed": [],
    "packed, not compiled": ["--no-compile"],
    "a pair per row": ["--no-compile", "--no-sharing"],
    "unpacked": ["--mode", "none", "--no-compile"],
}


class PairPerRow(Packer):
    """Puts every preference into a row of its own."""

    def rounds(self, preferences: IntArray, bounds: IntArray | None = None) -> list[Round]:
        return super().rounds(preferences, np.arange(len(preferences) + 1))


def padded_packer(bench: Bench, rows: int) -> Packer:
    """A packer of rows with one preference each, `rows` of similar length at a time."""
    packer = bench.packer
    return PairPerRow(
        packer.store, packer.sizes, row_lengths(int(packer.sizes.max())), "repeated", rows, packer.algorithm
    )


def unpacked_packer(bench: Bench, rows: int) -> Packer:
    """The packer of policy.packing.mode=none: `rows` preferences of similar length at a time."""
    longest = [len(p.prompt) + max(map(len, p.completions)) for p in bench.store.preferences]
    sizes = np.array(longest, np.int64)
    return Packer(bench.store.as_store(), sizes, row_lengths(max(longest)), "separate", rows, "first_fit_decreasing")


def measure(way: str, o: argparse.Namespace) -> None:
    """Time one way in this process, and print its result as JSON."""
    shared = ["--shape", o.shape, "--pairs", str(o.pairs), "--steps", str(o.steps), "--weights", o.weights]
    shared += ["--state-dtype", o.state_dtype, "--checkpointing", o.checkpointing]
    shared += ["--pack-length", str(o.pack_length)] if way != "unpacked" else []
    if o.checkpointing != "none":
        shared += ["--no-compile"]  # recurrent layers cannot be compiled then
    sys.argv = [sys.argv[0], *shared, *WAYS[way]]
    bench = prepared(parsed())
    cuda = bench.device.type == "cuda"
    if way == "unpacked":
        bench.packer = unpacked_packer(bench, o.rows)
    elif way == "a pair per row":
        bench.packer = padded_packer(bench, o.rows)
    else:
        bench.compile()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    ends, reports = zip(*bench.steps(o.steps), strict=True)
    seconds, done = ends[-1] - ends[WARM_UP - 1], reports[WARM_UP:]
    config = bench.policy.model.config.get_text_config()
    given = {"shares_prompts": bench.config.policy.packing.share_prompts}
    how = describe_recurrent_layers(config, bench.device, "bfloat16" if cuda else "float32", **given)
    result = {
        "benchmark": "hybrids",
        "way": way,
        **{name: value for name, value in vars(o).items() if name not in ("ways", "only")},
        "pairs_per_second": round(sum(report.num_pairs for report in done) / seconds, 2),
        "unique_tokens_per_second": round(sum(report.num_tokens for report in done) / seconds),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if cuda else None,
        "recurrent_layers": how if way != "unpacked" else "transformers' own",
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
    }
    leave_process_group()
    print(json.dumps(result))


def run(way: str, rows: int) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *sys.argv, "--rows", str(rows), "--only", way]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True)


def main() -> None:
    parser = options_of(__doc__)
    shapes = [name for name, shape in SHAPES.items() if shape.has_recurrent_layers]
    parser.add_argument("--shape", choices=shapes, default="tiny-granite4")
    parser.add_argument("--pairs", type=int, default=64, help="pairs per global batch")
    parser.add_argument("--pack-length", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=8, help="pairs that go through the model together without packing")
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after two to warm up")
    parser.add_argument("--weights", choices=["float32", "bfloat16_stochastic"], default="float32")
    parser.add_argument("--state-dtype", choices=["float32", "bfloat16", "int8"], default="float32")
    parser.add_argument("--checkpointing", choices=["none", "selective", "full"], default="none")
    parser.add_argument("--ways", choices=WAYS, nargs="*", default=list(WAYS))
    parser.add_argument("--only", choices=WAYS, help=argparse.SUPPRESS)  # in a child process
    o = parser.parse_args()
    if o.only:
        measure(o.only, o)
        return
    results = []
    for way in o.ways:
        rows = o.rows
        while (child := run(way, rows)).returncode and way in ("a pair per row", "unpacked") and rows > 1:
            rows //= 2
            print(f"{way:>22}  failed, see above; next with --rows {rows}", flush=True)
        if child.returncode:
            print(f"{way:>22}  failed, see above", flush=True)
            continue
        results.append(json.loads(child.stdout.splitlines()[-1]))
        one = results[-1]
        print(
            f"{way:>22}  {one['pairs_per_second']:>8} pairs/s  {one['peak_gib']} GiB  {one['recurrent_layers']}",
            flush=True,
        )
    for one in results:
        print(json.dumps(one))


if __name__ == "__main__":
    main()
