"""Adapters of experts that are stored in one tensor: which tensors get one, and what is refused before weights load."""

import json
from dataclasses import replace

import pytest
import torch
from adapters import trained_adapter
from models import model_folder

from tandem.config.load import load_config
from tandem.config.sections.policy import Lora, Policy
from tandem.errors import ConfigError
from tandem.model.distributed.sharded_load import plain_name
from tandem.model.files.source import find_source
from tandem.model.lora import layers as module
from tandem.model.lora.adapters import load_adapted
from tandem.model.lora.layers import adapted_weights, plan_lora
from tandem.model.precision.rounding import salt_in_policy, salt_of
from tandem.training.memory import estimate_memory

CPU = torch.device("cpu")
BOTH = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = model_folder(tmp_path_factory.mktemp("model") / "experts", "qwen3_moe")
    return find_source("policy.model_name", str(folder), None)


@pytest.fixture
def adapter(source, tmp_path):
    return trained_adapter(source.folder, tmp_path / "adapter", target_modules=["q_proj"], target_parameters=BOTH)


def plan(source, **settings):
    found = plan_lora(source, Lora(enabled=True, **settings), CPU, "float32")
    assert found is not None
    return found


def refusal(source, **settings):
    with pytest.raises(ConfigError) as refused:
        plan(source, **settings)
    return str(refused.value)


def test_names_match_the_ends_of_full_names_and_layers_may_be_left_out(source):
    assert plan(source, target_parameters=["layers.1.mlp.experts.down_proj"], target_modules=[]).experts == (
        "model.layers.1.mlp.experts.down_proj",
    )
    found = plan(source, target_parameters=BOTH, target_modules=[])
    assert len(found.experts) == 2 * 2
    assert found.targets == ()
    loaded = load_adapted(source, load_config(None, []).config.policy, CPU, found).model
    assert set(adapted_weights(loaded)) == set(found.experts)
    trained = {name: one for name, one in loaded.named_parameters() if one.requires_grad}
    assert len(trained) == 2 * 2 * 2
    assert sum(one.numel() for one in trained.values()) == found.num_trained
    plain = dict(load_adapted(source, load_config(None, []).config.policy, CPU, plan(source)).model.named_parameters())
    for name, _ in loaded.named_parameters():  # names and salts are those of the model without adapters
        if "lora_" not in name:
            assert plain_name(name) in {plain_name(one) for one in plain}
            assert salt_in_policy(f"model.{name}") == salt_of(plain_name(name))


def test_merged_experts_are_counted_in_the_memory(source):
    found = plan(source, target_parameters=["experts.down_proj"])
    experts = {name: one for name, one in module.empty_model(source).named_parameters() if "experts.down_proj" in name}
    assert found.num_in_experts == sum(one.numel() for one in experts.values())
    parts = [
        estimate_memory(source, Policy(lora=Lora(enabled=True)), CPU, lora=one, precision="float32").parts.copy
        for one in (replace(found, num_in_experts=0), found)
    ]
    assert parts[1] - parts[0] == 4 * found.num_in_experts


def test_unknown_names_are_refused_with_those_that_exist(source):
    assert refusal(source, target_parameters=["down_proj", "experts.up_proj"]) == (
        f"policy.lora.target_parameters: experts.up_proj matches no tensor of experts of {source.name}. It has down_proj, "
        "gate_up_proj."
    )
    dense = find_source("policy.model_name", "embedded", None)
    assert refusal(dense, target_parameters=["down_proj"]) == (
        "policy.lora.target_parameters: down_proj matches no tensor of experts of embedded. It has none."
    )


def test_experts_that_are_trained_in_full_are_refused(source):
    settings = {"target_parameters": ["down_proj"], "target_modules": ["q_proj"]}
    assert refusal(source, **settings, modules_to_save=["layers.0.mlp.experts"]) == (
        "policy.lora.target_parameters selects model.layers.0.mlp.experts.down_proj, which policy.lora.modules_to_save trains in "
        "full. Leave it out of one of them."
    )


def test_a_trained_adapter_of_experts_is_read_and_refused_where_it_does_not_fit(source, adapter, tmp_path, monkeypatch):
    key = f"policy.lora.adapter = {adapter}"
    found = plan(source, adapter=str(adapter))
    assert (found.expert_names, len(found.experts), len(found.targets)) == (tuple(sorted(BOTH)), 4, 2)
    assert (
        plan(source, adapter=str(adapter), target_parameters=BOTH, target_modules=["q_proj"]).experts == found.experts
    )
    assert refusal(source, adapter=str(adapter), target_parameters=["down_proj"]) == (
        f"{key}: its target_parameters are experts.down_proj, experts.gate_up_proj, but policy.lora.target_parameters selects "
        "others. Leave out policy.lora.target_parameters."
    )
    assert refusal(source, adapter=str(adapter), dropout=0.1) == (
        f"{key}: adapts experts (target_parameters), which does not work with policy.lora.dropout = 0.1. Leave it out."
    )
    other = model_folder(tmp_path / "other", "qwen3_moe", moe_intermediate_size=32)
    assert refusal(find_source("policy.model_name", str(other), None), adapter=str(adapter)) == (
        f"{key}: made for a different model: its adapter of model.layers.0.mlp.experts does not fit the experts of {other} that "
        "its target_parameters name. Set policy.model_name to the adapter's base model."
    )
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "target_parameters": ["experts.down_proj"]}))
    assert refusal(source, adapter=str(adapter)) == (
        f"{key}: made for a different model: its adapter of model.layers.0.mlp.experts.base_layer does not fit the experts of "
        f"{source.name} that its target_parameters name. Set policy.model_name to the adapter's base model."
    )
