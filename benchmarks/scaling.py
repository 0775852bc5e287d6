"""Computes memory per rank, traffic and speed on several GPUs, from the sizes of models and meshes. Nothing is measured.

    python benchmarks/scaling.py [--gpu h100-80gb] [--write]

Prints a table and, as its last line, one JSON object. `--write` puts the table into docs/scaling.md. Memory is the estimate that
`tandem train` chooses row lengths with. Speed is that of one GPU, times the efficiency, both as in `tandem plan
--gpus`: exchanged bytes are counted by tandem.planning.traffic, at the bandwidths that it assumes for the card. Ranks do not wait
for each other.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from made_model import config_of
from options import options_of

from tandem.config.keys import with_table
from tandem.config.schema import Config
from tandem.model.distributed.layer_sizes import layers_of
from tandem.model.distributed.mesh import MeshShape
from tandem.model.files.source import ModelSource
from tandem.model.load import empty_model
from tandem.planning.cards import Card, find_card
from tandem.planning.gpus import GpuCount, GpuOptions
from tandem.planning.speed import Work, size_of, training_seconds
from tandem.planning.traffic import OVERLAPPED, Traffic, efficiency, exchange_seconds, traffic
from tandem.storage.cache import GIB
from tandem.training.memory import estimate_memory

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
GPUS_PER_MACHINE = 8
PAIR = Work(tokens=673, scored=484, attention=1.07, fill=0.97)  # a pair of benchmarks/train.py, its prompt once


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model, a mesh and the settings that make it fit."""

    shape: str
    mesh: MeshShape
    row_tokens: int
    settings: dict[str, Any]

    @property
    def config(self) -> Config:
        return Config.model_validate({"policy": self.settings})

    @property
    def gpus(self) -> GpuCount:
        machines = -(-self.mesh.num_ranks // GPUS_PER_MACHINE)
        return GpuCount(self.mesh.num_ranks // machines, machines)


NOTHING: dict[str, Any] = {}
SELECTIVE = {"activation_checkpointing": "selective"}
FULL = {"activation_checkpointing": "full"}
BFLOAT16 = {"weights": "bfloat16_stochastic", "optimizer": {"state_dtype": "int8"}}
RECIPES = [
    Recipe("qwen2.5-1.5b", MeshShape(), 16384, NOTHING),
    Recipe("qwen2.5-1.5b", MeshShape(shard=8), 16384, NOTHING),
    Recipe("qwen2.5-1.5b", MeshShape(replicate=8, shard=8), 16384, NOTHING),
    Recipe("llama3.1-8b", MeshShape(), 4096, {**BFLOAT16, **FULL}),
    Recipe("llama3.1-8b", MeshShape(shard=8), 16384, SELECTIVE),
    Recipe("llama3.1-8b", MeshShape(replicate=8, shard=8), 16384, SELECTIVE),
    Recipe("llama3.1-8b", MeshShape(shard=4, context=2), 65536, FULL),
    Recipe("llama3.1-70b", MeshShape(shard=32), 4096, {**BFLOAT16, **FULL}),
    Recipe("llama3.1-70b", MeshShape(shard=64), 8192, FULL),
    Recipe("llama3.1-70b", MeshShape(shard=16, context=4), 32768, FULL),
]


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a recipe is expected to need and to reach."""

    memory: float  # bytes per rank
    traffic: Traffic  # of a pack
    exchange_seconds: float  # of a pack
    compute_seconds: float  # of a pack
    efficiency: float
    pairs_per_second: float


def estimate(recipe: Recipe, card: Card) -> Estimate:
    source, mesh, policy = ModelSource(recipe.shape, Path(), config_of(recipe.shape)), recipe.mesh, recipe.config.policy
    model = empty_model(source)
    size = size_of(model)
    need = estimate_memory(source, policy, torch.device("cuda"), lora=None, precision="bfloat16", mesh=mesh)
    sent = traffic(
        layers_of(model),
        mesh,
        row_tokens=recipe.row_tokens,
        recomputes=policy.activation_checkpointing != "none",
    )
    if mesh.num_ranks == 1:
        sent = Traffic()
    seconds = exchange_seconds(sent, mesh, recipe.gpus, GpuOptions().links(card, recipe.gpus))
    # A row holds as many pairs as fit; a rank computes its share of the row.
    pairs = recipe.row_tokens * PAIR.fill / PAIR.tokens
    computed = (
        training_seconds(size, PAIR * pairs, recipe.row_tokens // mesh.context, recipe.config, card) / mesh.context
    )
    share = efficiency(computed, seconds, OVERLAPPED)
    return Estimate(
        memory=need.fixed + need.temporary(recipe.row_tokens),
        traffic=sent,
        exchange_seconds=seconds,
        compute_seconds=computed,
        efficiency=share,
        pairs_per_second=pairs / computed * share * mesh.data_parallel,
    )


def as_row(recipe: Recipe, found: Estimate) -> str:
    settings = ", ".join(f"`{name}={value}`" for name, value in flat(recipe.settings).items()) or "defaults"
    sizes = f"{recipe.mesh.replicate} x {recipe.mesh.shard} x {recipe.mesh.context}"
    exchanged = f"{found.traffic.total / 1e9:.0f} GB" if found.traffic.total else "nothing"
    cells = [
        *(
            recipe.shape,
            recipe.mesh.num_ranks,
            sizes,
            f"{recipe.row_tokens:,}",
            settings,
            f"{found.memory / GIB:.0f} GiB",
        ),
        *(exchanged, f"{found.compute_seconds:.1f} s", f"{found.efficiency:.0%}", f"{found.pairs_per_second:,.0f}"),
    ]
    return f"| {' | '.join(map(str, cells))} |"


def flat(settings: dict[str, Any]) -> dict[str, Any]:
    """{"optimizer": {"state_dtype": "int8"}} becomes {"optimizer.state_dtype": "int8"}."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        inner = flat(value) if isinstance(value, dict) else {"": value}
        found |= {f"{name}.{key}".rstrip("."): one for key, one in inner.items()}
    return found


def table(card: Card) -> str:
    names = [
        *(
            "model",
            "GPUs",
            "replicate x shard x context",
            "pack length",
            "settings (under `policy.`)",
            "memory per rank",
        ),
        *("exchanged per pack", "computed per pack", "efficiency", "pairs/s"),
    ]
    rows = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    return "\n".join([*rows, *(as_row(recipe, estimate(recipe, card)) for recipe in RECIPES)])


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--gpu", default="h100-80gb")
    parser.add_argument("--write", action="store_true", help="put the table into docs/scaling.md")
    options = parser.parse_args()
    card = find_card(options.gpu)
    print(text := table(card))
    if options.write:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), "scaling", text), encoding="utf-8")
    found = [(recipe, estimate(recipe, card)) for recipe in RECIPES]
    print(json.dumps([{"shape": r.shape, "mesh": str(r.mesh), "gib": round(e.memory / GIB, 1)} for r, e in found]))


if __name__ == "__main__":
    main()
