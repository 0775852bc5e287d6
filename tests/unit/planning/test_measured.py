"""The estimates of memory and speed compared with the raw results of benchmarks/train.py and hybrids.py on an H200.

`test_plan.py` and `test_speed.py` compare them with the rows that docs/benchmarks.md shows.
"""

import json
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from shapes import measured_pairs

from tandem.config.schema import Config
from tandem.model.files.source import ModelSource
from tandem.model.load import empty_model
from tandem.model.lora.layers import plan_lora
from tandem.planning.cards import find_card
from tandem.planning.speed import size_of, training_seconds
from tandem.training.memory import GIB, estimate_memory

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
FILES = ("small_models", "limited", "hybrids", "sharded", "adapters_runs")
GPU = torch.device("cuda")


def committed() -> list[Any]:
    """The rows of one GPU without sharding, with a readable name each."""
    rows = [
        (name, one.get("tandem", one))
        for name in FILES
        for line in (BENCHMARKS / f"results/{name}.jsonl").read_text(encoding="utf-8").splitlines()
        for one in [json.loads(line)]
    ]
    kept = [(name, one) for name, one in rows if not one.get("sharded")]
    assert {name for name, _ in kept} == set(FILES)
    return [pytest.param(one, id=f"{name}-{one['shape']}-{one['pack_length']}") for name, one in kept]


@cache
def source_of(shape: str) -> ModelSource:
    spec = spec_from_file_location("made_model", BENCHMARKS / "made_model.py")
    assert spec is not None and spec.loader is not None
    made_model = module_from_spec(spec)
    spec.loader.exec_module(made_model)
    config = made_model.config_of(shape)
    config.dtype = torch.bfloat16
    return ModelSource(shape, Path(), config)


def config_of(one: dict[str, Any]) -> Config:
    policy: dict[str, Any] = {
        "activation_checkpointing": one["checkpointing"],
        "optimizer": {"state_dtype": one["state_dtype"]},
    }
    lora = {"enabled": True, "dim": one.get("lora"), "quantization": one.get("quantization")}
    trained = {"lora": lora} if one.get("lora") else {"weights": one["weights"]}
    return Config.model_validate({"policy": policy | trained})


@pytest.mark.parametrize("one", committed())
def test_the_memory_is_within_9_percent_of_every_raw_result(one):
    source, policy = source_of(one["shape"]), config_of(one).policy
    lora = plan_lora(source, policy.lora, GPU, "bfloat16", is_here=False)
    need = estimate_memory(source, policy, GPU, lora=lora, precision="bfloat16")
    computed = (need.fixed + need.temporary(one["pack_length"])) / GIB
    assert computed == pytest.approx(one["peak_gib"], rel=0.09)


@pytest.mark.parametrize(
    "one", [one for one in committed() if not one.values[0].get("limit_gib")]
)  # had no card to themselves
def test_the_speed_is_within_8_percent_of_raw_results(one):
    size = size_of(empty_model(source_of(one["shape"])))
    given = (size, measured_pairs(size), one["pack_length"], config_of(one), find_card("h200-141gb"))
    expected = 1 / training_seconds(*given, num_updates=1 / one["pairs"])
    assert expected == pytest.approx(one["pairs_per_second"], rel=0.08)
