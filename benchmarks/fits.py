"""Lists which settings fit which model on which GPU, by the estimate that `tandem train` makes before weights load.

    python benchmarks/fits.py            # print the tables
    python benchmarks/fits.py --write    # write them into docs/choosing.md and docs/memory.md

Nothing is downloaded and no GPU is needed. The second table compares the estimate with measured peaks. The third one, on
docs/memory.md, has what a model of 8 billion parameters needs, computed and measured.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from made_model import config_of
from options import options_of

from tandem.config.keys import with_table
from tandem.config.sections.policy import Policy
from tandem.model.files.source import ModelSource
from tandem.model.lora.layers import LoraPlan, plan_lora
from tandem.storage.cache import GIB
from tandem.training.memory import USABLE_SHARE, MemoryEstimate, auto_row_length, estimate_memory

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/choosing.md"
MEMORY_PAGE = ROOT / "docs/memory.md"
MEASURED = ("versus_trl", "adapters")  # in benchmarks/results
CARDS = (16, 24, 48, 80, 141)  # GB of 10^9 bytes
GPU = torch.device("cuda")
# A prompt and two completions of policy.max_total_sequence_length = 2,048 tokens each take no more.
SHORTEST = 4096
NAMES = {
    "qwen2.5-0.5b": "0.5B",
    "qwen2.5-1.5b": "1.5B",
    "qwen2.5-3b": "3B",
    "llama3.1-8b": "8B",
    "qwen2.5-14b": "14B",
    "qwen2.5-32b": "32B",
    "llama3.1-70b": "70B",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that save memory: their letter in the table, their keys, and the quantisation of frozen weights."""

    letter: str
    keys: dict[str, Any]
    quantization: str | None = None


SMALL = {"weights": "bfloat16_stochastic", "optimizer": {"state_dtype": "int8"}}
LORA = {"lora": {"enabled": True}}
FULL = {"activation_checkpointing": "full"}
# In the order they are tried.
WAYS = (
    Settings("A", {}),
    Settings("B", FULL),
    Settings("C", SMALL),
    Settings("D", SMALL | FULL),
    Settings("E", LORA),
    Settings("F", LORA | FULL),
    Settings("G", LORA | FULL, quantization="nf4"),
)
# Settings of the committed measurements, by their --settings.
OF_MEASUREMENT = {
    "learning": Settings("", {}),
    "bfloat16": Settings("", {"weights": "bfloat16_stochastic", "optimizer": {"state_dtype": "bfloat16"}}),
    "lora": Settings("", LORA),
    "qlora": Settings("", LORA, quantization="nf4"),
}


# Settings of a model of 8 billion parameters: keys, bytes per parameter, settings, tokens per row, the --settings of the
# measurement.
EIGHT_BILLION = (
    ("", "16 and 2", Settings("", {}), 2048, None),
    (
        "`policy.weights=bfloat16_stochastic policy.optimizer.state_dtype=bfloat16`",
        "10",
        OF_MEASUREMENT["bfloat16"],
        8192,
        "bfloat16",
    ),
    ("`policy.weights=bfloat16_stochastic policy.optimizer.state_dtype=int8`", "8", Settings("", SMALL), 8192, None),
    ("`policy.lora.enabled=true`", "2 frozen", OF_MEASUREMENT["lora"], 8192, "lora"),
    ("`policy.lora.enabled=true policy.lora.quantization=nf4`", "0.7 frozen", OF_MEASUREMENT["qlora"], 8192, "qlora"),
)


@cache
def source_of(shape: str) -> ModelSource:
    config = config_of(shape)
    config.dtype = torch.bfloat16
    return ModelSource(shape, Path(), config)


@cache
def adapters_of(shape: str) -> LoraPlan | None:
    return plan_lora(source_of(shape), Policy.model_validate(LORA).lora, GPU, "bfloat16")


def need_of(shape: str, way: Settings) -> tuple[MemoryEstimate, Policy]:
    policy, source = Policy.model_validate(way.keys), source_of(shape)
    plan = adapters_of(shape) if policy.lora.enabled else None
    if plan is not None:
        plan = replace(plan, quantization=way.quantization)
    return estimate_memory(source, policy, GPU, lora=plan, precision="bfloat16"), policy


def cells(shape: str, cards: Sequence[int] = CARDS) -> list[str]:
    """For each card the first settings that fit, with the row length and the memory that the estimate gives them."""
    found = dict.fromkeys(cards, "does not fit")
    for way in WAYS:
        missing = [card for card in cards if found[card] == "does not fit"]
        if not missing:
            break
        need, policy = need_of(shape, way)
        for card in missing:
            memory = card * 10**9
            row = auto_row_length(need, policy, GPU, memory).tokens
            expected = need.fixed + need.temporary(row)
            if row >= SHORTEST and expected <= USABLE_SHARE * memory:
                found[card] = f"{way.letter}: {row:,} tokens, {expected / GIB:.0f} GiB"
    return list(found.values())


def fits() -> str:
    head = ["| model | " + " | ".join(f"{card} GB" for card in CARDS) + " |", "|---" * (len(CARDS) + 1) + "|"]
    rows = [f"| {name} | " + " | ".join(cells(shape)) + " |" for shape, name in NAMES.items()]
    return "\n".join(head + rows)


def measurements() -> list[dict[str, Any]]:
    files = (ROOT / f"benchmarks/results/{name}.jsonl" for name in MEASURED)
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def compared() -> str:
    """The estimate compared with committed measurements."""
    rows = ["| model and options of `benchmarks/versus_trl.py` | computed GiB | measured GiB |", "|---|---|---|"]
    for one in measurements():
        given = one["options"].split()
        options = dict(zip(given[::2], given[1::2], strict=True))
        shape, tokens = options.get("--shape", "qwen2.5-1.5b"), int(options.get("--pack-length", 16384))
        need, _ = need_of(shape, OF_MEASUREMENT[options["--settings"]])
        computed = (need.fixed + need.temporary(tokens)) / GIB
        rows.append(f"| {NAMES[shape]}, `{one['options']}` | {computed:.0f} | {one['tandem']['peak_gib']:.0f} |")
    return "\n".join(rows)


def eight_billion() -> str:
    """What a model of 8 billion parameters needs, computed and, where it is in the committed results, measured."""
    measured = {
        one["options"].split("--settings ")[1].split()[0]: one["tandem"]["peak_gib"]
        for one in measurements()
        if "llama3.1-8b" in one["options"]
    }
    rows = ["| keys | bytes per parameter | packs | computed GiB | measured GiB |", "|---|---|---|---|---|"]
    for keys, size, settings, tokens, name in EIGHT_BILLION:
        need, _ = need_of("llama3.1-8b", settings)
        computed = (need.fixed + need.temporary(tokens)) / GIB
        found = "not measured" if name is None else f"{measured[name]}"
        rows.append(f"| {keys or 'the defaults'} | {size} | {tokens:,} | {computed:.0f} | {found} |")
    return "\n".join(rows)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--write", action="store_true", help="write the tables into the pages")
    o = parser.parse_args()
    if not o.write:
        print(f"{fits()}\n\n{compared()}\n\n{eight_billion()}")
        return
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_table(with_table(page, "fits", fits()), "estimate", compared()), encoding="utf-8")
    page = MEMORY_PAGE.read_text(encoding="utf-8")
    MEMORY_PAGE.write_text(with_table(page, "eight-billion", eight_billion()), encoding="utf-8")


if __name__ == "__main__":
    main()
