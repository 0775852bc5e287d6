"""Options of adapters: rank-stabilised scales, learning rates of LoRA+, and modules that are trained in full."""

import json
import math

import pytest
import torch
from adapters import (
    assert_export_is_as_in_memory,
    assert_same_logps,
    few_pairs_with_cache,
    plain_losses,
    plain_model,
    set_up_with,
    trained_adapter,
    with_adapter,
)
from models import MODEL, model_folder
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from running import killed_after, largest_difference, metrics_of, short_run, weights_of
from safetensors.torch import load_file

from tandem.model.lora.adapters import load_adapted

CPU = torch.device("cpu")
RATE, RATIO = 1e-3, 8.0
OPTIONS = [
    *("policy.lora.enabled=true", "policy.lora.dim=4", "policy.lora.target_modules=[q_proj,down_proj]"),
    *("policy.lora.use_rslora=true", f"policy.lora.loraplus_lr_ratio={RATIO}", f"policy.optimizer.kwargs.lr={RATE}"),
]
SAVED = "policy.lora.modules_to_save=[lm_head,model.norm,layers.1.input_layernorm]"
TIED = "policy.lora.modules_to_save=[lm_head,embed_tokens]"


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("untied") / "model", "llama", initializer_range=0.05)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return few_pairs_with_cache(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def trained(untied, data, tmp_path_factory):
    """A run with all options that exports only adapters, and its configuration."""
    settings = [*data, *OPTIONS, SAVED, f"policy.model_name={untied}", "export.merge_lora=false", "dpo.val_at_end=true"]
    return short_run(tmp_path_factory.mktemp("options") / "run", *settings), settings


def test_a_run_trains_the_same_weights_as_peft_in_a_plain_loop(untied, trained):
    """The plain loop uses the peft model, one sequence at a time, full logits, and one parameter group for each rate."""
    run, settings = trained
    setup = set_up_with(*settings)
    torch.manual_seed(setup.config.run.seed)
    own = dict(load_adapted(setup.source, setup.config.policy, CPU, setup.lora).trained())
    wanted = LoraConfig(
        r=4,
        lora_alpha=32,
        use_rslora=True,
        target_modules=["q_proj", "down_proj"],
        modules_to_save=["lm_head", "model.norm", "layers.1.input_layernorm"],
        task_type="CAUSAL_LM",
    )
    model, base = get_peft_model(plain_model(untied), wanted), plain_model(untied)
    parameters = {
        name.removeprefix("base_model.model.").replace(".modules_to_save.default", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert {f"model.{name}" for name in parameters} == own.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(own[f"model.{name}"])
    fast = [parameter for name, parameter in parameters.items() if "lora_B" in name]
    slow = [parameter for name, parameter in parameters.items() if "lora_B" not in name]
    groups = [{"params": fast, "lr": RATIO * RATE}, {"params": slow, "lr": RATE}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01, betas=(0.9, 0.98), eps=1e-5)
    losses = plain_losses(model, base, setup, optimizer)
    assert [line["loss"] for line in metrics_of(run)] == pytest.approx(losses, rel=2e-5)
    want = {f"base_model.model.{name.replace('.default', '')}": p.detach() for name, p in parameters.items()}
    assert largest_difference(load_file(run / "model" / "adapter_model.safetensors"), want) < 2e-4


def test_the_reference_is_the_base_model(trained):
    run, _ = trained
    first = metrics_of(run)[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["accuracy"] == 0.5


def test_exports_are_the_model_in_memory_and_load_in_peft(untied, trained, tmp_path):
    run, settings = trained
    merged = short_run(tmp_path / "merged", *settings, "export.merge_lora=true", "checkpointing.enabled=false")
    by_peft = AutoPeftModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32, attn_implementation="eager")
    assert_same_logps(plain_model(merged / "model"), by_peft, set_up_with(*settings))
    for one in (run, merged):
        assert_export_is_as_in_memory(one)
    start, end = load_file(untied / "model.safetensors"), weights_of(merged)
    moved = {name for name in start if not torch.equal(start[name], end[name])}
    assert moved == {
        *(f"model.layers.{i}.{one}.weight" for i in range(2) for one in ("self_attn.q_proj", "mlp.down_proj")),
        *("lm_head.weight", "model.norm.weight", "model.layers.1.input_layernorm.weight"),
    }


def test_an_export_is_the_start_of_the_next_run_and_its_reference(trained, tmp_path):
    run, settings = trained
    kept = [one for one in settings if not one.startswith("policy.lora")]
    start = [*kept, "policy.lora.enabled=true", f"policy.lora.adapter={run}/model", "dpo.max_num_steps=2"]
    start += ["dpo.val_at_end=false", "export.merge_lora=true", "checkpointing.enabled=false"]
    first, second = metrics_of(short_run(tmp_path / "run", *start))
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert abs(second["loss"] - first["loss"]) > 1e-5
    found = set_up_with(*start).lora
    assert (found.rslora, found.saved.modules) == (
        True,
        ("model.layers.1.input_layernorm", "model.norm", "lm_head"),
    )


def test_an_adapter_with_saved_modules_made_by_peft_is_the_start(data, tmp_path):
    """In a model with tied embeddings, both names are one weight."""
    adapter = trained_adapter(MODEL, tmp_path / "adapter", modules_to_save=["norm"])
    settings = [*data, "policy.lora.enabled=true", f"policy.lora.adapter={adapter}"]
    setup = set_up_with(*settings)
    loaded = load_adapted(setup.source, setup.config.policy, CPU, setup.lora)
    # peft compares the ends of names: norm also selects the norms of the layers.
    assert len(setup.lora.saved.modules) == 2 * 2 + 1
    assert_same_logps(loaded.model, with_adapter(MODEL, adapter), setup)


def test_tied_embeddings_are_trained_once_and_exported_under_both_names(data, tmp_path):
    settings = [*data, *OPTIONS, TIED, "dpo.val_at_end=true", "dpo.max_num_steps=2", "export.merge_lora=false"]
    run = short_run(tmp_path / "run", *settings, "checkpointing.enabled=false")
    tensors = load_file(run / "model" / "adapter_model.safetensors")
    both = [tensors[f"base_model.model.{name}.weight"] for name in ("lm_head", "model.embed_tokens")]
    assert torch.equal(*both)
    assert not torch.equal(both[0], load_file(MODEL / "model.safetensors")["model.embed_tokens.weight"])
    described = json.loads((run / "model" / "adapter_config.json").read_text())
    assert described["modules_to_save"] == ["embed_tokens", "lm_head"]
    assert_export_is_as_in_memory(run)
    by_peft = AutoPeftModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32, attn_implementation="eager")
    setup = set_up_with(*settings, f"policy.lora.adapter={run}/model")
    assert_same_logps(load_adapted(setup.source, setup.config.policy, CPU, setup.lora).model, by_peft, setup)


@pytest.mark.slow
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(data, tmp_path):
    settings = [*data, *OPTIONS, TIED, "checkpointing.save_period=2", "policy.optimizer.state_dtype=int8"]
    whole = short_run(tmp_path / "whole", *settings)
    with killed_after(3):
        short_run(tmp_path / "cut", *settings)
    cut = short_run(tmp_path / "cut", *settings)
    assert metrics_of(cut) == metrics_of(whole)
    assert largest_difference(weights_of(cut), weights_of(whole)) == 0.0
