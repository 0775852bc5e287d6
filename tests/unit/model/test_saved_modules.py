"""Modules that are trained in full beside adapters: what is selected, what is refused, and what is counted."""

import json

import pytest
import torch
from adapters import trained_adapter
from models import tiny_config
from multimodal import multimodal_config
from safetensors.torch import load_file, save_file

from tandem.config.load import load_config
from tandem.config.sections.policy import Lora
from tandem.errors import ConfigError
from tandem.model.files.source import ModelSource, find_source
from tandem.model.files.tiny import tiny_model
from tandem.model.lora import layers
from tandem.model.lora.adapters import load_adapted
from tandem.model.lora.layers import plan_lora
from tandem.report.choices import describe_choices
from tandem.training.memory import estimate_memory
from tandem.training.start.setup import set_up

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def source():
    """The embedded model, whose embeddings are tied: 128 wide, with 2,048 tokens."""
    return find_source("policy.model_name", "embedded", None)


@pytest.fixture(scope="module")
def untied():
    return ModelSource("untied", tiny_model(), tiny_config("llama", tie_word_embeddings=False))


def plan(source, **settings):
    found = plan_lora(source, Lora(enabled=True, **settings), CPU, "float32")
    assert found is not None
    return found


def refusal(source, **settings):
    with pytest.raises(ConfigError) as refused:
        plan(source, **settings)
    return str(refused.value)


def test_names_match_complete_parts_and_peft_gets_names_that_select_the_same(untied):
    found = plan(untied, modules_to_save=["norm"])
    assert found.saved.modules == ("model.norm",)
    assert found.peft_config("base").modules_to_save == ["model.norm"]  # norm would also match input_layernorm
    assert plan(untied, modules_to_save=["lm_head"]).peft_config("base").modules_to_save == ["lm_head"]
    assert plan(untied).peft_config("base").modules_to_save is None


def test_layers_that_are_trained_in_full_get_no_adapter(untied):
    found = plan(untied, modules_to_save=["layers.0.mlp"])
    assert not [name for name in found.targets if name.startswith("model.layers.0.mlp")]
    assert len(found.targets) == 2 * 7 - 3


def test_trained_parameters_are_counted_and_no_longer_frozen(source):
    plain, found = plan(source), plan(source, modules_to_save=["lm_head", "embed_tokens"])
    assert found.num_trained == plain.num_trained + 2048 * 128  # tied: once
    assert found.num_frozen == plain.num_frozen - 2048 * 128
    policy = load_config(None, ["policy.lora.enabled=true"]).config.policy
    loaded = load_adapted(source, policy, CPU, found)
    assert sum(p.numel() for _, p in loaded.trained()) == found.num_trained
    assert sum(p.numel() for p in loaded.parameters() if not p.requires_grad) == found.num_frozen
    before, after = (
        estimate_memory(source, policy, CPU, lora=one, precision="float32").parts for one in (plain, found)
    )
    assert after.weights == before.weights  # float32, frozen or not
    assert after.gradients - before.gradients == 4 * 2048 * 128
    assert after.states - before.states == 8 * 2048 * 128


def test_a_module_that_does_not_exist_is_refused(untied):
    assert refusal(untied, modules_to_save=["head"]) == (
        "policy.lora.modules_to_save: head matches no module with weights of untied. It has down_proj, embed_tokens, gate_proj, "
        "input_layernorm, k_proj, lm_head, norm, o_proj, post_attention_layernorm, q_proj, up_proj, v_proj."
    )


def test_the_modules_that_exist_include_a_head_that_is_tied_to_the_embeddings(source):
    assert ", embed_tokens, gate_proj, input_layernorm, k_proj, lm_head, norm, " in refusal(
        source, modules_to_save=["x"]
    )


def test_only_modules_of_the_text_model_of_a_multimodal_checkpoint_can_be_trained(tmp_path):
    source = ModelSource("it", tmp_path, multimodal_config("gemma3"))
    message = refusal(source, modules_to_save=["multi_modal_projector"])
    assert message.startswith(
        "policy.lora.modules_to_save: multi_modal_projector matches no module with weights of the text model of it. It has "
    )
    assert message.endswith(" v_proj. Modules of its other parts are not trained.")


def test_a_module_and_a_part_of_it_are_refused(untied):
    assert refusal(untied, modules_to_save=["layers.0", "layers.0.mlp"]) == (
        "policy.lora.modules_to_save selects model.layers.0 and also model.layers.0.mlp, which is a part of it. Leave one of "
        "them out."
    )


def test_an_explicit_target_that_is_trained_in_full_is_refused(untied):
    assert refusal(untied, target_modules=["q_proj"], modules_to_save=["layers.1.self_attn"]) == (
        "policy.lora.target_modules selects model.layers.1.self_attn.q_proj, which policy.lora.modules_to_save trains in full. "
        "Leave it out of one of them."
    )


@pytest.mark.parametrize(
    ("name", "own", "other"),
    [("lm_head", "lm_head", "model.embed_tokens"), ("embed_tokens", "model.embed_tokens", "lm_head")],
)
def test_one_of_two_tied_modules_is_refused(source, name, own, other):
    assert refusal(source, modules_to_save=[name]) == (
        f"policy.lora.modules_to_save: {own} and {other} are one weight in embedded (tied embeddings), so they can only be "
        "trained together. Name both: policy.lora.modules_to_save=[embed_tokens,lm_head]."
    )


def test_quantised_layers_are_refused(untied, monkeypatch):
    monkeypatch.setattr(layers, "_check_quantization", lambda *_: None)
    assert refusal(untied, quantization="nf4", modules_to_save=["layers.0.mlp.up_proj"]) == (
        "policy.lora.modules_to_save: model.layers.0.mlp.up_proj is quantised by policy.lora.quantization = nf4, and quantised "
        "weights cannot be trained. Leave model.layers.0.mlp.up_proj out, or policy.lora.quantization."
    )
    assert plan(untied, quantization="nf4", modules_to_save=["lm_head", "norm"]).saved.modules == (
        "model.norm",
        "lm_head",
    )


# Starting from an adapter that has such modules


def test_the_configuration_must_select_what_the_adapter_has(source, tmp_path):
    adapter = trained_adapter(source.folder, tmp_path / "adapter", modules_to_save=["model.norm"])
    assert plan(source, adapter=str(adapter), modules_to_save=["norm"]).saved.modules == ("model.norm",)
    assert refusal(source, adapter=str(adapter), modules_to_save=["layers.0.input_layernorm"]) == (
        f"policy.lora.adapter = {adapter}: its modules_to_save are model.norm, but policy.lora.modules_to_save selects "
        "model.layers.0.input_layernorm. Leave out policy.lora.modules_to_save."
    )


def rewritten(adapter, change, **described):
    path, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    config.write_text(json.dumps({**json.loads(config.read_text()), **described}))
    return str(adapter)


def test_weights_that_are_missing_or_of_another_shape_are_refused(source, tmp_path):
    adapter = trained_adapter(source.folder, tmp_path / "adapter", modules_to_save=["model.norm"])
    name, key = "base_model.model.model.norm.weight", f"policy.lora.adapter = {adapter}"
    wider = rewritten(adapter, lambda tensors: tensors.update({name: torch.ones(130)}))
    assert refusal(source, adapter=wider) == (
        f"{key}: made for a different model: the shape of model.norm.weight is [130], but embedded needs [128]. Set "
        "policy.model_name to the adapter's base model."
    )
    assert refusal(source, adapter=rewritten(adapter, lambda tensors: tensors.pop(name))) == (
        f"{key}: holds no model.norm.weight, which its modules_to_save name. Download it again."
    )
    other = rewritten(adapter, lambda tensors: tensors.update({name: torch.ones(128)}), modules_to_save=["score"])
    assert refusal(source, adapter=other) == (
        f"{key}: made for a different model: it holds model.norm.weight, which is not a weight of embedded that its "
        "modules_to_save name. Set policy.model_name to the adapter's base model."
    )


def test_an_adapter_that_separates_tied_embeddings_is_refused(source, tmp_path):
    adapter = trained_adapter(source.folder, tmp_path / "adapter", modules_to_save=["lm_head", "embed_tokens"])
    assert len(plan(source, adapter=str(adapter)).saved.modules) == 2  # equal, as peft copied them
    key, head = f"policy.lora.adapter = {adapter}", "base_model.model.lm_head.weight"
    rewritten(adapter, lambda tensors: tensors[head].add_(1))
    assert refusal(source, adapter=str(adapter)) == (
        f"{key}: model.embed_tokens.weight and lm_head.weight differ in it, but are one weight in embedded (tied embeddings). "
        "Merge the adapter with peft, and start from the result."
    )
    rewritten(
        adapter, lambda tensors: tensors.pop("base_model.model.model.embed_tokens.weight"), modules_to_save=["lm_head"]
    )
    assert refusal(source, adapter=str(adapter)) == (
        f"{key}: changes lm_head alone, but lm_head and model.embed_tokens are one weight in embedded (tied embeddings). Merge "
        "the adapter with peft, and start from the result."
    )


def test_what_is_trained_is_reported():
    settings = ["use_rslora=true", "loraplus_lr_ratio=16", "modules_to_save=[norm]"]
    given = ["policy.lora.enabled=true", *(f"policy.lora.{one}" for one in settings)]
    reported = dict(describe_choices(set_up(load_config(None, given).config, CPU)))
    assert reported["adapters"] == (
        "LoRA, dim 16, alpha 32 / sqrt(dim), on 28 layers (down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj); "
        "trained in full: model.norm; 155,776 parameters trained, 1,049,600 frozen"
    )
    assert "learning rate 0.001 (16 times the rate for lora_B)" in reported["optimizer"]
