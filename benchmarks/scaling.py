"""Computes memory per rank, traffic and speed on several GPUs, from the sizes of models and meshes. Nothing is measured.

    python benchmarks/scaling.py [--write]

Prints two tables and, as its last line, one JSON object. `--write` puts the tables into docs/scaling-recipes.md. Memory is the
estimate that `tandem train` chooses row lengths with. Speed is that of one GPU, times the efficiency, both as in `tandem plan
--gpus`: exchanged bytes are counted by tandem.planning.traffic, at the bandwidths that it assumes for the card. Ranks do not wait
for each other. The second table has the bytes of a step of 1,024 pairs, by collective operation.
"""

import json
import math
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from made_model import config_of
from options import options_of

from tandem.config.keys import with_table
from tandem.config.schema import Config
from tandem.config.sections.policy import Policy
from tandem.model.distributed.layer_sizes import layers_of
from tandem.model.distributed.mesh import MeshShape
from tandem.model.files.source import ModelSource
from tandem.model.load import empty_model
from tandem.model.lora.layers import LoraPlan, plan_lora
from tandem.planning.cards import Card, find_card
from tandem.planning.gpus import GpuCount, GpuOptions
from tandem.planning.speed import Work, size_of, training_seconds
from tandem.planning.traffic import OVERLAPPED, Traffic, efficiency, exchange_seconds, traffic
from tandem.storage.cache import GIB
from tandem.training.memory import estimate_memory

PAGE = Path(__file__).parents[1] / "docs" / "scaling-recipes.md"
GPUS_PER_MACHINE = 8
CUDA = torch.device("cuda")
PAIRS_PER_STEP = 1024
H100, H200 = "h100-80gb", "h200-141gb"
CARD_NAMES = {H100: "H100", H200: "H200"}
PAIR = Work(tokens=673, scored=484, attention=1.07, fill=0.97)  # a pair of benchmarks/train.py, its prompt once


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model, a mesh and the settings that make it fit."""

    shape: str
    mesh: MeshShape
    row_tokens: int
    settings: dict[str, Any]
    card: str = H100

    @property
    def packs_per_step(self) -> int:
        """How many packs a rank computes in a step of PAIRS_PER_STEP pairs."""
        tokens = PAIRS_PER_STEP * PAIR.tokens / PAIR.fill
        return math.ceil(tokens / self.row_tokens / self.mesh.data_parallel)

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
QLORA = {"lora": {"enabled": True, "quantization": "nf4"}}
RECIPES = [
    Recipe("qwen2.5-1.5b", MeshShape(), 16384, NOTHING),
    Recipe("qwen2.5-1.5b", MeshShape(shard=8), 16384, NOTHING),
    Recipe("qwen2.5-1.5b", MeshShape(replicate=2, shard=8), 16384, NOTHING),
    Recipe("qwen2.5-1.5b", MeshShape(replicate=8, shard=8), 16384, NOTHING),
    Recipe("llama3.1-8b", MeshShape(), 4096, {**BFLOAT16, **FULL}),
    Recipe("llama3.1-8b", MeshShape(shard=8), 16384, SELECTIVE),
    Recipe("llama3.1-8b", MeshShape(shard=4, context=2), 65536, FULL),
    Recipe("llama3.1-8b", MeshShape(replicate=2, shard=8), 16384, SELECTIVE),
    Recipe("llama3.1-8b", MeshShape(replicate=8, shard=8), 16384, SELECTIVE),
    Recipe("llama3.1-70b", MeshShape(), 4096, {**QLORA, **FULL}),
    Recipe("llama3.1-70b", MeshShape(shard=8), 8192, {**BFLOAT16, **FULL}, card=H200),
    Recipe("llama3.1-70b", MeshShape(shard=16), 8192, {**BFLOAT16, **FULL}, card=H200),
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
    reduced_once: float  # bytes of a step with policy.parallel.reduce_once_per_step=true
    memory_reduced_once: float


def estimate(recipe: Recipe, card: Card) -> Estimate:
    source, mesh, policy = ModelSource(recipe.shape, Path(), config_of(recipe.shape)), recipe.mesh, recipe.config.policy
    model = empty_model(source)
    size = size_of(model)
    lora = _planned_adapters(source, policy)
    given: dict[str, Any] = {"lora": lora, "precision": "bfloat16", "mesh": mesh}
    need = estimate_memory(source, policy, CUDA, **given)
    layers = layers_of(model)
    sizes: dict[str, Any] = {
        "row_tokens": recipe.row_tokens,
        "recomputes": policy.activation_checkpointing != "none",
        "num_trained": None if lora is None else lora.num_trained,
    }
    layers = layers if lora is None or lora.quantization is None else layers.quantised()
    sent = traffic(layers, mesh, **sizes)
    once = traffic(layers, mesh, summed_over=recipe.packs_per_step, **sizes)
    parallel = policy.parallel.model_copy(update={"reduce_once_per_step": True})
    need_once = estimate_memory(source, policy.model_copy(update={"parallel": parallel}), CUDA, **given)
    if mesh.num_ranks == 1:
        sent = once = Traffic()
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
        reduced_once=once.total * recipe.packs_per_step,
        memory_reduced_once=need_once.fixed + need_once.temporary(recipe.row_tokens),
    )


def _planned_adapters(source: ModelSource, policy: Policy) -> LoraPlan | None:
    """Return the plan of the adapters. Packages that quantise weights need not be installed here."""
    return plan_lora(source, policy.lora, CUDA, "bfloat16", is_here=False)


def first_cells(recipe: Recipe) -> list[str]:
    return [recipe.shape, str(recipe.mesh.num_ranks), " x ".join(map(str, astuple(recipe.mesh)))]


def recipe_cells(recipe: Recipe, found: Estimate) -> list[str]:
    return [
        *first_cells(recipe),
        CARD_NAMES[recipe.card],
        f"{recipe.row_tokens:,}",
        ", ".join(f"`{name}={str(value).lower()}`" for name, value in flat(recipe.settings).items()) or "defaults",
        f"{found.memory / GIB:.0f} GiB",
        gigabytes(found.traffic.total),
        f"{found.compute_seconds:.1f} s",
        f"{found.efficiency:.0%}",
        f"{found.pairs_per_second:,.{0 if found.pairs_per_second >= 10 else 1}f}",
    ]


def step_cells(recipe: Recipe, found: Estimate) -> list[str]:
    sent = found.traffic * recipe.packs_per_step
    is_alone = recipe.packs_per_step == 1  # then gradients are reduced once anyway
    once = f"{gigabytes(found.reduced_once)}, {found.memory_reduced_once / GIB:.0f} GiB"
    kinds = (sent.gathered, sent.scattered, sent.replicated, sent.exchanged, sent.total)
    return [*first_cells(recipe), str(recipe.packs_per_step), *map(gigabytes, kinds), "the same" if is_alone else once]


def gigabytes(size: float) -> str:
    return f"{size / 1e9:,.0f} GB" if size >= 1e9 else f"{size / 1e9:.1f} GB" if size else "0"


def flat(settings: dict[str, Any]) -> dict[str, Any]:
    """{"optimizer": {"state_dtype": "int8"}} becomes {"optimizer.state_dtype": "int8"}."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        inner = flat(value) if isinstance(value, dict) else {"": value}
        found |= {f"{name}.{key}".rstrip("."): one for key, one in inner.items()}
    return found


RECIPE_COLUMNS = ["model", "GPUs", "replicate x shard x context", "card", "pack length", "settings (under `policy.`)"]
RECIPE_COLUMNS += ["memory per rank", "exchanged per pack", "computed per pack", "efficiency", "pairs/s"]
STEP_COLUMNS = ["model", "GPUs", "replicate x shard x context", "packs per rank", "all-gather: weights"]
STEP_COLUMNS += ["reduce-scatter: gradients", "all-reduce: gradients of replicas", "all-to-all: attention", "total"]
STEP_COLUMNS += ["total and memory with `reduce_once_per_step`"]


def estimates() -> list[tuple[Recipe, Estimate]]:
    return [(recipe, estimate(recipe, find_card(recipe.card))) for recipe in RECIPES]


def tables(found: list[tuple[Recipe, Estimate]]) -> dict[str, str]:
    """Return the tables of the page, by the name of their place."""
    recipes = [recipe_cells(*one) for one in found]
    steps = [step_cells(*one) for one in found if one[0].mesh.num_ranks > 1]
    return {"scaling": _table(RECIPE_COLUMNS, recipes), "scaling-steps": _table(STEP_COLUMNS, steps)}


def _table(columns: list[str], rows: list[list[str]]) -> str:
    return "\n".join(
        [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *(f"| {' | '.join(row)} |" for row in rows)]
    )


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/scaling-recipes.md")
    options = parser.parse_args()
    found = estimates()
    for name, text in tables(found).items():
        print(text, end="\n\n")
        if options.write:
            PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), name, text), encoding="utf-8")
    print(json.dumps([{"shape": r.shape, "mesh": str(r.mesh), "gib": round(e.memory / GIB, 1)} for r, e in found]))


if __name__ == "__main__":
    main()
