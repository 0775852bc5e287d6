"""`tandem plan` refuses what training refuses, suggests what training accepts, and needs no package of another machine."""

import json
import shutil

import pytest
import torch
from models import model_folder as saved_model
from models import tiny_config
from shapes import model_folder

from tandem.config.load import load_config
from tandem.errors import ConfigError
from tandem.model.files.tiny import tiny_tokenizer
from tandem.planning.plan import plan
from tandem.planning.show import show
from tandem.report.reporter import Reporter
from tandem.training.start.setup import set_up

DATA = ["data.train.data_path=embedded", "policy.train_global_batch_size=64"]
FULL = "policy.activation_checkpointing=full"


def folder_of(folder, architecture, **changes):
    """A model folder without weights."""
    shutil.copytree(tiny_tokenizer(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tiny_config(architecture, vocab_size=2048, eos_token_id=2, **changes).save_pretrained(folder)
    return f"policy.model_name={folder}"


def planned(*overrides, gpu="h100-80gb"):
    return plan(load_config(None, [*DATA, *overrides]), gpu=gpu)


def refusal(act):
    with pytest.raises(ConfigError) as refused:
        act()
    return str(refused.value)


def test_what_training_cannot_recompute_is_neither_planned_nor_suggested(tmp_path):
    model = f"policy.model_name={saved_model(tmp_path / 'gpt2', 'gpt2', n_embd=32, n_layer=2, n_head=4)}"
    said = refusal(lambda: planned(model, FULL))
    assert said == refusal(lambda: set_up(load_config(None, [*DATA, model, FULL]).config, torch.device("cpu")))
    assert said == (
        "policy.activation_checkpointing = full: needs a model whose layers are in a list named `layers`, which "
        f"{tmp_path / 'gpt2'} (model type gpt2) does not have. Leave it out."
    )
    large = folder_of(tmp_path / "large", "gpt2", hidden_size=6400, num_hidden_layers=48, num_attention_heads=25)
    found = planned(large)
    assert found.memory.verdict == "does not fit"
    assert not any("activation_checkpointing" in one.command or "lora" in one.command for one in found.suggestions)


def test_a_multimodal_checkpoint_with_quantised_weights_is_refused_for_another_card_too(tmp_path, capsys):
    model = folder_of(tmp_path / "model", "llama")
    described = json.loads((tmp_path / "model/config.json").read_text(encoding="utf-8"))
    outer = {"model_type": "gemma3", "text_config": described | {"model_type": "gemma3_text"}, "dtype": "bfloat16"}
    (tmp_path / "model/config.json").write_text(json.dumps(outer), encoding="utf-8")
    show(planned(model), Reporter("normal"))
    assert "all trained; multimodal (gemma3): only its text model is trained\n" in capsys.readouterr().out
    said = refusal(lambda: planned(model, "policy.lora.enabled=true", "policy.lora.quantization=nf4"))
    assert "is a multimodal checkpoint (gemma3), of which only the text model is loaded, and quantising it" in said


def test_a_package_that_is_missing_here_is_not_needed_to_plan_for_another_machine(tmp_path, monkeypatch):
    monkeypatch.setattr("tandem.model.lora.layers.importlib.util.find_spec", lambda name: None)
    model = f"policy.model_name={model_folder('llama3.1-8b', tmp_path / '8b')}"
    lora = [model, "policy.lora.enabled=true"]
    plain, quantised = planned(*lora), planned(*lora, "policy.lora.quantization=nf4")
    # Of a linear weight half a byte and 1 / 64 instead of 2; embeddings and head are not quantised.
    linear = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert plain.memory.weights - quantised.memory.weights == pytest.approx((2 - 0.515625) * linear)


def test_adapters_are_suggested_for_a_model_of_which_peft_does_not_adapt_every_layer(tmp_path):
    """In falcon_h1, that is a part of its Mamba layers."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 40, "mamba_d_ssm": 4096}
    model = folder_of(tmp_path / "hybrid", "falcon_h1", **sizes)
    found = planned(model)
    assert found.memory.verdict == "does not fit"
    assert any("policy.lora.enabled=true" in one.command for one in found.suggestions)
    said = "no adapters on out_proj, which peft does not adapt in models with Mamba layers"
    assert planned(model, "policy.lora.enabled=true").notes == (said,)
