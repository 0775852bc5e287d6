"""Adapters of experts that are stored in one tensor: training, resuming and exports equal those of peft."""

import json
import math

import numpy as np
import pytest
import torch
from adapters import (
    assert_export_is_as_in_memory,
    assert_same,
    assert_same_logps,
    by_peft,
    few_pairs_with_cache,
    in_a_pack,
    plain_model,
    set_up_with,
    trained_adapter,
    with_adapter,
)
from experts import FAMILIES
from models import model_folder, random_preference
from running import few_pairs, killed_after, largest_difference, metrics_of, short_run, weights_of
from safetensors.torch import load_file

from tandem.model.lora.adapters import load_adapted
from tandem.model.lora.experts import AdaptedExperts

CPU = torch.device("cpu")
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
EXPERTS = [
    *("policy.lora.enabled=true", "policy.lora.dim=2", "policy.lora.target_modules=[q_proj]"),
    *("policy.lora.target_parameters=[experts.gate_up_proj,experts.down_proj]", "policy.optimizer.kwargs.lr=1e-3"),
]


SLOW = [
    pytest.param(family, wanted, marks=pytest.mark.slow)
    for family, wanted in (
        ("mixtral", ["down_proj"]),
        ("olmoe", ["experts.gate_up_proj"]),
        *((family, BOTH) for family in ("phimoe", "deepseek_v3", "glm4_moe")),
    )
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("base") / "model", "qwen3_moe", initializer_range=0.05)


@pytest.fixture(scope="module")
def data(base, tmp_path_factory):
    return [*few_pairs_with_cache(tmp_path_factory.mktemp("data")), f"policy.model_name={base}", "dpo.val_at_end=true"]


@pytest.mark.parametrize(
    ("family", "wanted"),
    [("qwen3_moe", BOTH), ("gpt_oss", BOTH), *SLOW],
)
def test_packed_logps_and_gradients_equal_peft_on_each_sequence_alone(family, wanted, tmp_path):
    """gpt_oss stores its experts transposed. The first layer of deepseek_v3 and glm4_moe has no experts."""
    rng = np.random.default_rng(7)
    preferences = [random_preference(rng, num_completions=n) for n in (2, 3, 4)]
    folder = model_folder(tmp_path / "base", family, **{**FAMILIES[family], "initializer_range": 0.05})
    adapter = trained_adapter(folder, tmp_path / "adapter", target_modules=["o_proj"], target_parameters=wanted)
    found = in_a_pack(folder, adapter, preferences)
    assert any(isinstance(one, AdaptedExperts) for one in found.model.modules())
    assert_same(found, by_peft(folder, adapter, preferences))
    num_layers = 1 if family in ("deepseek_v3", "glm4_moe") else 2
    assert len(found.gradients) == 2 * (2 + num_layers * len(wanted))
    assert all(gradient.any() for gradient in found.gradients.values())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["phimoe", "deepseek_v3", "glm4_moe"])
def test_exports_of_other_families_are_the_model_in_memory(family, tmp_path):
    folder = model_folder(tmp_path / "base", family, **{**FAMILIES[family], "initializer_range": 0.05})
    given = [few_pairs(tmp_path, 20), f"data.validation={tmp_path}/few.jsonl", f"policy.model_name={folder}"]
    given += [*EXPERTS, "policy.lora.target_modules=[o_proj]", "dpo.val_at_end=true", "checkpointing.enabled=false"]
    run = short_run(tmp_path / "run", *given)
    memory, exported = (metrics_of(run, f"{split}-default")[-1] for split in ("validation", "exported"))
    assert exported["loss"] == pytest.approx(memory["loss"], abs=1e-6)
    assert abs(memory["loss"] - math.log(2)) > 1e-4


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A run that exports only adapters."""
    settings = [*data, *EXPERTS, "export.merge_lora=false", "checkpointing.save_period=2"]
    return short_run(tmp_path_factory.mktemp("experts") / "run", *settings), settings


def test_the_reference_is_the_base_model_and_the_experts_learn(base, trained):
    run, _ = trained
    first, *_, last = metrics_of(run)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert abs(last["loss"] - first["loss"]) > 1e-5
    tensors = load_file(run / "model" / "adapter_model.safetensors")
    assert all(tensor.abs().max() > 0 for tensor in tensors.values())
    described = json.loads((run / "model" / "adapter_config.json").read_text())
    assert sorted(described["target_parameters"]) == sorted(BOTH)


def test_exports_are_the_model_in_memory_load_in_peft_and_merge_as_in_peft(base, trained, tmp_path):
    run, settings = trained
    merged = short_run(tmp_path / "merged", *settings, "export.merge_lora=true", "checkpointing.enabled=false")
    by_peft = with_adapter(base, run / "model")
    assert_same_logps(plain_model(merged / "model"), by_peft, set_up_with(*settings))
    for one in (run, merged):
        assert_export_is_as_in_memory(one)
    by_hand = by_peft.merge_and_unload()
    by_hand.save_pretrained(tmp_path / "by-hand")
    assert largest_difference(weights_of(merged), load_file(tmp_path / "by-hand" / "model.safetensors")) < 1e-6
    start, end = load_file(base / "model.safetensors"), weights_of(merged)
    moved = {name for name in start if not torch.equal(start[name], end[name])}
    assert moved == {name for name in start if ".experts." in name or "q_proj" in name}


def test_an_export_is_the_start_of_the_next_run_and_its_reference(base, data, trained, tmp_path):
    run, _ = trained
    settings = [*data, "policy.lora.enabled=true", f"policy.lora.adapter={run}/model", "dpo.val_at_end=false"]
    first, second = metrics_of(short_run(tmp_path / "run", *settings, "dpo.max_num_steps=2"))
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert abs(second["loss"] - first["loss"]) > 1e-6
    setup = set_up_with(*settings)
    loaded = load_adapted(setup.source, setup.config.policy, CPU, setup.lora)
    assert_same_logps(loaded.model, with_adapter(base, run / "model"), setup)


@pytest.mark.slow
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(trained, tmp_path):
    run, settings = trained
    with killed_after(3):
        short_run(tmp_path / "cut", *settings)
    cut = short_run(tmp_path / "cut", *settings)
    assert metrics_of(cut) == metrics_of(run)
    files = [load_file(one / "model" / "adapter_model.safetensors") for one in (cut, run)]
    assert largest_difference(*files) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["selective", "full"])
def test_recomputed_layers_train_the_same_weights(trained, tmp_path, how):
    run, settings = trained
    settings = [
        *settings,
        f"policy.activation_checkpointing={how}",
        "checkpointing.enabled=false",
        "dpo.max_num_steps=2",
    ]
    found = metrics_of(short_run(tmp_path / how, *settings, "dpo.val_at_end=false"))
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in metrics_of(run)[:2]], rel=1e-6)
