"""Which layers get adapters, what is refused before any weights load, and what stays frozen."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from adapters import trained_adapter
from models import tiny_config
from running import short_run
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from tandem.config.load import load_config
from tandem.config.sections.policy import Lora
from tandem.errors import ConfigError
from tandem.model.files.source import ModelSource, find_source, weights_fingerprint
from tandem.model.files.tiny import tiny_model
from tandem.model.head import chunked_logps
from tandem.model.lora import layers as module
from tandem.model.lora.layers import TrainingDropout, load_adapted, lora_layers, plan_lora, start_fingerprint
from tandem.report.choices import describe_choices
from tandem.train.start import references
from tandem.train.start.setup import set_up

CPU = torch.device("cpu")
LINEAR = "Its linear layers are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj."


@pytest.fixture(scope="module")
def source():
    return find_source("policy.model_name", "embedded", None)


@pytest.fixture
def adapter(tmp_path):
    return trained_adapter(tiny_model(), tmp_path / "adapter")


def plan(source, **settings):
    found = plan_lora(source, Lora(enabled=True, **settings), CPU, "float32")
    assert found is not None
    return found


def refusal(source, **settings):
    with pytest.raises(ConfigError) as refused:
        plan(source, **settings)
    return str(refused.value)


# Targets


def test_all_linear_is_every_linear_layer_but_the_head(source):
    found = plan(source)
    assert len(found.targets) == 4 * 7
    assert found.names == ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    # Of a layer: q and o are 128 to 128, k and v 128 to 64, the three of the MLP 128 to 384; 16 each way.
    assert found.num_trained == 4 * 16 * (2 * 256 + 2 * 192 + 3 * 512)
    assert found.num_frozen == sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(source.folder).parameters())


def test_names_are_matched_by_their_ends(source):
    assert plan(source, target_modules=["q_proj", "layers.1.mlp.up_proj"]).targets == (
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
        "model.layers.2.self_attn.q_proj",
        "model.layers.3.self_attn.q_proj",
    )


def test_a_text_is_one_regular_expression_for_whole_names(source):
    assert plan(source, target_modules=r".*\.(0|3)\..*\.v_proj").targets == (
        "model.layers.0.self_attn.v_proj",
        "model.layers.3.self_attn.v_proj",
    )


def test_excluded_names_are_left_out(source):
    found = plan(source, exclude_modules=["up_proj", "layers.0.self_attn.k_proj", "lm_head"])
    assert len(found.targets) == 28 - 4 - 1
    assert found.names == found.targets  # k_proj alone would mean one layer too many


@pytest.mark.parametrize("settings", [{}, {"target_modules": ["q_proj", "layers.1.mlp.up_proj"]}])
def test_what_was_planned_is_what_is_trained(source, settings):
    found = plan(source, **settings)
    policy = load_adapted(source, load_config(None, []).config.policy, CPU, found)
    assert {name for name, _ in lora_layers(policy.model)} == set(found.targets)
    assert sum(p.numel() for _, p in policy.trained()) == found.num_trained
    assert all(".lora_" in name for name, _ in policy.trained())
    assert policy.model.get_output_embeddings().weight.requires_grad is False


def test_a_target_that_matches_nothing_is_refused_with_the_names_that_exist(source):
    assert refusal(source, target_modules=["q_proj", "query"]) == (
        f"policy.lora.target_modules: query matches no linear layer of embedded. {LINEAR}"
    )
    assert refusal(source, target_modules=["self_attn"]) == (
        f"policy.lora.target_modules: self_attn matches no linear layer of embedded. {LINEAR}"
    )


def test_a_name_that_is_no_list_is_refused_with_the_way_to_write_it(source):
    assert refusal(source, target_modules="q_proj") == (
        f"policy.lora.target_modules: q_proj matches no linear layer of embedded. {LINEAR} "
        "A regular expression matches whole names; give names as a list."
    )


@pytest.mark.parametrize("targets", [["q_proj", "lm_head"], ".*lm_head"])
def test_the_head_is_refused_as_a_target(source, targets):
    named = targets if isinstance(targets, str) else "lm_head"
    assert refusal(source, target_modules=targets) == (
        f"policy.lora.target_modules: {named} takes lm_head, the head, which stays as it is: its weight is used directly, "
        "without logits being kept. Leave it out."
    )


def test_an_exclusion_that_matches_nothing_or_everything_is_refused(source):
    assert refusal(source, exclude_modules=["query"]) == (
        f"policy.lora.exclude_modules: query matches no linear layer of embedded. {LINEAR}"
    )
    assert refusal(source, target_modules=["q_proj"], exclude_modules=["q_proj"]) == (
        "policy.lora.exclude_modules leaves out every layer that policy.lora.target_modules takes, so nothing would be trained."
    )


def test_names_that_peft_takes_for_experts_are_refused_with_the_way_out():
    """A dense layer's down_proj among layers of experts: peft would adapt the experts instead."""
    mixed = ModelSource("mixed", tiny_model(), tiny_config("qwen3_moe", decoder_sparse_step=2))
    assert refusal(mixed) == (
        "policy.lora: peft takes down_proj,gate_proj,up_proj for parts of the experts of mixed, which are no linear layers. "
        "Leave them out: policy.lora.exclude_modules=[down_proj,gate_proj,up_proj]."
    )
    assert plan(mixed, exclude_modules=["down_proj", "gate_proj", "up_proj"]).names == (
        "k_proj",
        "o_proj",
        "q_proj",
        "v_proj",
    )


def test_a_refusal_comes_before_any_weights_load(tmp_path, monkeypatch):
    monkeypatch.setattr(references, "load_adapted", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(ConfigError, match="query matches no linear layer"):
        short_run(tmp_path / "run", "policy.lora.enabled=true", "policy.lora.target_modules=[query]")
    assert not (tmp_path / "run").exists()


# A trained adapter as the start


def rewritten(adapter, **changes):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return adapter


def test_a_trained_adapter_brings_its_own_settings(source, tmp_path):
    folder = trained_adapter(source.folder, tmp_path / "it", use_rslora=True, lora_dropout=0.3)
    found = plan(source, adapter=str(folder), dropout=0.1)
    assert (found.dim, found.alpha, found.rslora, found.dropout) == (4, 8.0, True, 0.1)
    assert found.names == ("down_proj", "q_proj")
    assert plan(source, adapter=str(folder), dim=4, alpha=8, target_modules=["q_proj", "down_proj"]) is not None


def test_settings_that_contradict_the_adapter_are_refused(source, adapter):
    key = f"policy.lora.adapter = {adapter}"
    assert refusal(source, adapter=str(adapter), dim=8) == (
        f"{key}: its dim is 4, but policy.lora.dim = 8. Leave that out."
    )
    assert refusal(source, adapter=str(adapter), alpha=4.5) == (
        f"{key}: its alpha is 8, but policy.lora.alpha = 4.5. Leave that out."
    )
    assert refusal(source, adapter=str(adapter), target_modules=["q_proj"]) == (
        f"{key}: it adapts other layers than policy.lora.target_modules asks for, such as model.layers.0.mlp.down_proj. "
        "Leave target_modules and exclude_modules out."
    )


def test_what_is_no_adapter_is_refused(source, tmp_path):
    assert refusal(source, adapter="./nowhere") == "policy.lora.adapter = ./nowhere: no such directory."
    assert refusal(source, adapter=str(tmp_path)) == (
        f"policy.lora.adapter = {tmp_path}: {tmp_path} holds no adapter_config.json, so it is no adapter."
    )


def test_a_pickled_adapter_is_refused(source, adapter):
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    assert refusal(source, adapter=str(adapter)) == (
        f"policy.lora.adapter = {adapter}: {adapter} holds no adapter_model.safetensors. Pickled weights are not read; "
        "save the adapter again with peft."
    )


def test_an_adapter_that_is_cut_off_is_refused(source, adapter):
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    message = refusal(source, adapter=str(adapter))
    assert message.startswith(f"policy.lora.adapter = {adapter}: its weights are not readable as safetensors (")
    assert message.endswith("Is it whole?")


def test_an_adapter_of_another_shape_is_refused(adapter):
    wide = tiny_config("llama", hidden_size=64, num_hidden_layers=4, intermediate_size=384)
    assert refusal(ModelSource("wide", tiny_model(), wide), adapter=str(adapter)) == (
        f"policy.lora.adapter = {adapter}: made for another model: model.layers.0.mlp.down_proj.lora_B is [128, 4], "
        "but wide needs [64, 4]."
    )
    short = tiny_config("llama", hidden_size=128, intermediate_size=384, head_dim=32, num_hidden_layers=2)
    assert refusal(ModelSource("short", tiny_model(), short), adapter=str(adapter)) == (
        f"policy.lora.adapter = {adapter}: made for another model: it adapts model.layers.2.mlp.down_proj, "
        "no linear layer of short."
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "LOHA"}, "a LOHA adapter; only LORA is read."),
        ({"use_dora": True}, "use_dora = true: only plain LoRA is read."),
        ({"bias": "all"}, 'bias = "all": only plain LoRA is read.'),
        ({"rank_pattern": {"q_proj": 8}}, 'rank_pattern = {"q_proj": 8}: only plain LoRA is read.'),
        ({"modules_to_save": ["lm_head"]}, 'modules_to_save = ["lm_head"]: only plain LoRA is read.'),
        (
            {"init_lora_weights": "pissa"},
            'init_lora_weights = "pissa": it belongs to base weights that this start changed. Convert it with peft to plain '
            "LoRA.",
        ),
        ({"r": None}, "its adapter_config.json gives no r and lora_alpha, so it is no LoRA adapter."),
    ],
)
def test_an_adapter_that_computes_something_else_is_refused(source, adapter, changes, words):
    rewritten(adapter, **changes)
    assert refusal(source, adapter=str(adapter)) == f"policy.lora.adapter = {adapter}: {words}"


def test_the_name_of_the_start_is_the_base_models_until_an_adapter_changes_it(source, adapter, tmp_path):
    base = weights_fingerprint(source)
    assert start_fingerprint(source, None) == start_fingerprint(source, plan(source)) == base
    before = start_fingerprint(source, plan(source, adapter=str(adapter)))
    assert before != base
    copied = shutil.copytree(adapter, tmp_path / "elsewhere")
    assert start_fingerprint(source, plan(source, adapter=str(copied))) == before
    assert start_fingerprint(source, plan(source, adapter=str(rewritten(copied, lora_alpha=9)))) != before
    weights = adapter / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert start_fingerprint(source, plan(source, adapter=str(adapter))) != before


# Quantised weights


def test_quantised_weights_are_refused_without_a_gpu_and_without_bitsandbytes(source, monkeypatch):
    assert refusal(source, quantization="nf4") == (
        "policy.lora.quantization = nf4: quantised weights need a CUDA device, and there is none here. Leave it out."
    )
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as refused:
        plan_lora(source, Lora(enabled=True, quantization="int8"), torch.device("cuda"), "bfloat16")
    assert str(refused.value) == (
        'policy.lora.quantization = int8: needs the package bitsandbytes: pip install "tandem-dpo[qlora]", or leave it out.'
    )


def test_weights_that_are_quantised_already_are_refused(source):
    config = tiny_config("llama")
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    assert refusal(ModelSource("small", source.folder, config)) == (
        "policy.model_name = small: its weights are quantised already. Give the model it was made of; "
        "policy.lora.quantization quantises that one."
    )


def test_quantised_weights_are_asked_of_transformers_as_the_paper_has_them(source):
    """nf4 with double quantisation, computing in the run's precision."""
    four = replace(plan(source), quantization="nf4", precision="bfloat16").quantization_config()
    assert (four.load_in_4bit, four.bnb_4bit_quant_type, four.bnb_4bit_use_double_quant) == (True, "nf4", True)
    assert four.bnb_4bit_compute_dtype == torch.bfloat16
    assert replace(plan(source), quantization="int8").quantization_config().load_in_8bit
    assert plan(source).quantization_config() is None


# What is frozen


class Shapes(TorchDispatchMode):
    """The shapes of everything that is computed."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.seen |= {
            tuple(t.shape) for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, torch.Tensor)
        }
        return out


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_head_computes_no_gradient_of_its_own(frozen):
    hidden = torch.randn(7, 5, requires_grad=True)
    weight, bias = torch.randn(11, 5, requires_grad=not frozen), torch.randn(11, requires_grad=not frozen)
    logps = chunked_logps(hidden, weight, bias, torch.arange(7), chunk=3)
    with Shapes() as shapes:
        logps.sum().backward()
    assert ((11, 5) in shapes.seen, (11,) in shapes.seen) == (not frozen, not frozen)
    assert (weight.grad is None, bias.grad is None) == (frozen, frozen)
    plain = torch.nn.functional.linear(hidden, weight, bias).log_softmax(-1)[torch.arange(7), torch.arange(7)]
    torch.testing.assert_close(hidden.grad, torch.autograd.grad(plain.sum(), hidden)[0])


def test_frozen_weights_keep_the_dtype_they_were_published_in_where_bfloat16_is_computed(source, tmp_path):
    folder = shutil.copytree(source.folder, tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    published = find_source("policy.model_name", str(folder), None)
    policy = load_config(None, []).config.policy
    for precision, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        found = plan_lora(published, Lora(enabled=True), CPU, precision)
        assert found is not None
        loaded = load_adapted(published, policy, CPU, found)
        assert {p.dtype for p in loaded.parameters() if not p.requires_grad} == {dtype}
        assert {p.dtype for _, p in loaded.trained()} == {torch.float32}
    assert plan_lora(source, Lora(enabled=True), CPU, "bfloat16").dtype == torch.float32


def test_dropout_is_drawn_where_gradients_are_computed_and_nowhere_else():
    dropout, ones = TrainingDropout(0.5), torch.ones(1000)
    assert sorted(set(dropout(ones).tolist())) == [0.0, 2.0]
    with torch.no_grad():
        assert torch.equal(dropout(ones), ones)


def test_what_is_in_force_is_said(tmp_path, adapter):
    said = dict(describe_choices(set_up(load_config(None, ["policy.lora.enabled=true"]).config, CPU)))
    assert said["adapters"] == (
        "LoRA, dim 16, alpha 32, on 28 layers (down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj); "
        "155,648 parameters trained, 1,049,728 frozen"
    )
    assert said["reference"] == "cached, the base model"
    assert said["precision"] == (
        "float32 computation over frozen float32 weights; adapters in float32, float32 optimizer states, 16 bytes a trained "
        "parameter"
    )
    settings = ["policy.lora.enabled=true", f"policy.lora.adapter={adapter}", "policy.lora.dropout=0.1"]
    said = dict(describe_choices(set_up(load_config(None, settings).config, CPU)))
    assert said["adapters"].endswith(f"; starting from {adapter}")
    assert said["reference"] == "cached, the base model with the adapter it starts from"
    assert said["dropout"] == "0.1 of the adapters' inputs, in training steps"
