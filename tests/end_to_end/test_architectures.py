"""Every tested architecture trains for a step and exports a model that loads. Recurrent models train only without packing."""

import pytest
import torch
from models import ARCHITECTURES, model_folder
from running import few_pairs, metrics_of, short_run
from transformers import AutoModelForCausalLM

from tandem.errors import ConfigError

OVERRIDES = [
    "dpo.max_num_steps=1",
    "policy.max_total_sequence_length=512",
    "policy.train_global_batch_size=4",
    "checkpointing.enabled=false",
]


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in ("granite", "cohere")])
def test_a_model_trains_for_a_step_and_its_export_loads(architecture, tmp_path):
    model = model_folder(tmp_path / "model", architecture)
    run = short_run(tmp_path / "run", *OVERRIDES, few_pairs(tmp_path), f"policy.model_name={model}")
    (line,) = metrics_of(run)
    assert line["loss"] == pytest.approx(0.693147, abs=1e-5)
    start = AutoModelForCausalLM.from_pretrained(model)
    trained = AutoModelForCausalLM.from_pretrained(run / "model")
    assert type(trained) is type(start)
    before, after = dict(start.named_parameters()), dict(trained.named_parameters())
    assert before.keys() == after.keys()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert any("embed" in name for name in changed)
    assert any("layers.0" in name for name in changed)


def test_the_export_keeps_the_dropout_that_training_disabled(tmp_path):
    model = model_folder(tmp_path / "model", "llama", attention_dropout=0.25)
    run = short_run(tmp_path / "run", *OVERRIDES, few_pairs(tmp_path), f"policy.model_name={model}")
    assert AutoModelForCausalLM.from_pretrained(run / "model").config.attention_dropout == 0.25


def hybrid(path):
    return model_folder(
        path,
        "qwen3_next",
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )


def test_packing_a_recurrent_hybrid_is_refused_before_weights_load(tmp_path):
    model = hybrid(tmp_path / "model")
    with pytest.raises(ConfigError) as refused:
        short_run(tmp_path / "run", *OVERRIDES, few_pairs(tmp_path), f"policy.model_name={model}")
    assert str(refused.value) == (
        f"policy.model_name = {model}: its recurrent layers (linear_attention) carry state along a row, so packed "
        "sequences would leak into each other. Train it unpacked: policy.packing.mode=none."
    )


def test_a_recurrent_hybrid_trains_unpacked(tmp_path):
    model = hybrid(tmp_path / "model")
    run = short_run(
        tmp_path / "run", *OVERRIDES, few_pairs(tmp_path), f"policy.model_name={model}", "policy.packing.mode=none"
    )
    assert metrics_of(run)[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert AutoModelForCausalLM.from_pretrained(run / "model").config.model_type == "qwen3_next"
