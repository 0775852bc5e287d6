"""Prints the tables of docs/benchmarks.md from benchmarks/results/*.jsonl, or writes them into the page.

python benchmarks/tables.py            # print them
python benchmarks/tables.py --write    # write them into docs/benchmarks.md
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from options import options_of

from tandem.config.keys import with_table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGE = ROOT / "docs/benchmarks.md"

Record = dict[str, Any]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|" for line in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def versus_trl(records: list[Record]) -> str:
    def speed(one: Record) -> str:
        return f"{one['pairs_per_second']} pairs/s, {one['peak_gib']} GiB"

    def ratio(one: Record) -> str:
        spread = " ({:.2f} to {:.2f})".format(*one["ratio_range"]) if "ratio_range" in one else ""
        return f"{one['ratio']:.2f}{spread}"

    rows = [
        [one["name"], f"`{one['options']}`", f"{one['runs']}", speed(one["tandem"]), speed(one["trl"]), ratio(one)]
        for one in records
    ]
    return table(["model and precision", "options", "runs", "tandem", "TRL", "ratio"], rows)


def train(records: list[Record]) -> str:
    rows = [
        [
            one["name"],
            one["card"],
            f"{one['pairs_per_second']:.1f}",
            f"{one['tokens_per_second']:,}",
            f"{one['useful_tflops']}",
            f"{one['peak_gib']:.1f}",
        ]
        for one in records
    ]
    return table(["model and settings", "card", "pairs/s", "tokens/s", "useful TFLOP/s", "peak GiB"], rows)


def gains(records: list[Record]) -> str:
    sizes = list(dict.fromkeys(size for one in records for size in one["ratio"]))
    rows = [
        [one["name"], *(f"{one['ratio'][size]}" if size in one["ratio"] else "" for size in sizes)] for one in records
    ]
    return table(["what is compared", *sizes], rows)


def curve(records: list[Record]) -> str:
    def seconds(value: int | None) -> str:
        return "" if value is None else f"{value} s"

    rows = [
        [
            one["system"],
            f"{one['accuracy']:.3f}",
            f"{one['loss']:.3f}",
            seconds(one["seconds_from_command"]),
            seconds(one["seconds_from_first_step"]),
        ]
        for one in records
    ]
    return table(["", "held-out accuracy", "held-out loss", "from the command", "from the first step"], rows)


def precision(records: list[Record]) -> str:
    rows = [
        [
            one["weights"],
            one["states"],
            f"{one['loss']:.4f} ± {one['loss_spread']:.4f}",
            f"{one['accuracy']:.3f} ± {one['accuracy_spread']:.3f}",
        ]
        for one in records
    ]
    return table(["weights", "optimizer states", "held-out loss", "held-out accuracy"], rows)


def start(records: list[Record]) -> str:
    return table(
        ["what is timed", "tandem", "TRL"], [[one["name"], one["tandem"], one["trl"] or ""] for one in records]
    )


SIZES = {"smollm2-135m": "135M", "qwen2.5-0.5b": "0.5B", "qwen2.5-1.5b": "1.5B", "llama3.1-8b": "8B"}
HYBRIDS = {"granite4-h-1b": "Granite 4's 1B", "qwen3.5-2b": "Qwen3.5's 2B"}


def small_models(records: list[Record]) -> str:
    def idle(one: Record) -> str:
        return f"{one['where_time_goes']['idle']:.0%}".replace("%", " %") if "where_time_goes" in one else ""

    order = sorted(records, key=lambda one: (list(SIZES).index(one["shape"]), one["pack_length"]))
    rows = [
        [
            f"{SIZES[one['shape']]}, packs of {one['pack_length']:,}",
            f"{one['pairs_per_second']:.0f}",
            f"{one['useful_tflops']:.0f}",
            idle(one),
            f"{one['peak_gib']:.1f}",
        ]
        for one in order
    ]
    return table(["model", "pairs/s", "useful TFLOP/s", "no kernel runs", "peak GiB"], rows)


def limited(records: list[Record]) -> str:
    def settings(one: Record) -> str:
        weights = f"adapters of rank {one['lora']} on {one['quantization']}" if one["lora"] else one["weights"]
        states = "" if one["lora"] else f", states in {one['state_dtype']}"
        return f"{weights}{states}, `policy.activation_checkpointing={one['checkpointing']}`"

    rows = [
        [
            f"{SIZES[one['shape']]}, packs of {one['pack_length']:,}",
            settings(one),
            *(f"{one[name]:.1f}" for name in ("limit_gib", "peak_gib", "reserved_gib")),
        ]
        for one in records
    ]
    return table(["model", "settings", "limit, GiB", "peak of tensors", "reserved by torch"], rows)


def offload(records: list[Record]) -> str:
    """The time is the mean of all steps but the first."""
    rows = []
    for on, name in ((False, "on the GPU"), (True, "in host memory (`policy.optimizer.offload=true`)")):
        steps = [one for one in records if one["offload"] is on]
        seconds = [one["step_seconds"] for one in steps if one["step"] > 1]
        tokens = sum(one["num_tokens"] for one in steps) / len(steps)
        peak = max(one["memory_gib"] for one in steps)
        rows.append([name, f"{tokens:,.0f}", f"{sum(seconds) / len(seconds):.2f}", f"{peak:.1f}"])
    return table(["optimizer states", "tokens in a batch", "seconds per step", "peak GiB"], rows)


def hybrids(records: list[Record]) -> str:
    rows = [
        [
            HYBRIDS[one["shape"]],
            one["way"] + (f", {one['rows']} pairs at a time" if one["way"] in ("a pair per row", "unpacked") else ""),
            f"{one['pairs_per_second']:.1f}",
            f"{one['unique_tokens_per_second']:,}",
            f"{one['peak_gib']:.1f}",
        ]
        for one in records
    ]
    return table(["model", "way", "pairs/s", "tokens/s", "peak GiB"], rows)


TABLES: dict[str, Callable[[list[Record]], str]] = {
    "versus_trl": versus_trl,
    "adapters": versus_trl,
    "train": train,
    "gains": gains,
    "curve": curve,
    "precision": precision,
    "start": start,
    "small_models": small_models,
    "limited": limited,
    "offload": offload,
    "hybrids": hybrids,
}


def made() -> dict[str, str]:
    """Every table by the name of its results file, which is also the name of its markers in the page."""
    lines = {name: (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines() for name in TABLES}
    return {name: make([json.loads(line) for line in lines[name]]) for name, make in TABLES.items()}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--write", action="store_true", help="write them into docs/benchmarks.md")
    o = parser.parse_args()
    if not o.write:
        print("\n\n".join(f"{name}\n{text}" for name, text in made().items()))
        return
    page = PAGE.read_text(encoding="utf-8")
    for name, text in made().items():
        page = with_table(page, name, text)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
