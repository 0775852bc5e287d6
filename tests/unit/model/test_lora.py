"""LoRA: which layers get adapters, what is refused before any weights load, and what stays frozen."""

import copy
import json
import shutil
from dataclasses import replace

import pytest
import torch
from adapters import trained_adapter
from models import model_folder, tiny_config
from multimodal import multimodal_folder
from running import short_run
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.config.load import load_config
from tandem.config.sections.policy import Lora
from tandem.errors import ConfigError
from tandem.model.files.source import ModelSource, find_source, weights_fingerprint
from tandem.model.files.tiny import tiny_model
from tandem.model.head import chunked_logps
from tandem.model.lora import layers as module
from tandem.model.lora.adapters import load_adapted
from tandem.model.lora.fingerprints import rounds_frozen_weights, start_fingerprint
from tandem.model.lora.layers import TrainingDropout, lora_layers, plan_lora
from tandem.report.choices import describe_choices
from tandem.training.memory import estimate_memory
from tandem.training.start import references
from tandem.training.start.setup import set_up

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


def test_all_linear_selects_every_linear_layer_except_the_head(source):
    found = plan(source)
    assert len(found.targets) == 4 * 7
    assert found.names == ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    # In each layer: q and o are 128 x 128, k and v 128 x 64, the three of the MLP 128 x 384; adapters of rank 16.
    assert found.num_trained == 4 * 16 * (2 * 256 + 2 * 192 + 3 * 512)
    assert found.num_frozen == sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(source.folder).parameters())


def test_names_match_the_ends_of_full_names(source):
    assert plan(source, target_modules=["q_proj", "layers.1.mlp.up_proj"]).targets == (
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
        "model.layers.2.self_attn.q_proj",
        "model.layers.3.self_attn.q_proj",
    )


def test_a_string_is_a_regular_expression_for_full_names(source):
    assert plan(source, target_modules=r".*\.(0|3)\..*\.v_proj").targets == (
        "model.layers.0.self_attn.v_proj",
        "model.layers.3.self_attn.v_proj",
    )


def test_excluded_names_are_left_out(source):
    found = plan(source, exclude_modules=["up_proj", "layers.0.self_attn.k_proj", "lm_head"])
    assert len(found.targets) == 28 - 4 - 1
    assert found.names == found.targets  # k_proj would match one layer too many


@pytest.mark.parametrize("settings", [{}, {"target_modules": ["q_proj", "layers.1.mlp.up_proj"]}])
def test_exactly_the_planned_layers_are_trained(source, settings):
    found = plan(source, **settings)
    policy = load_adapted(source, load_config(None, []).config.policy, CPU, found)
    assert {name for name, _ in lora_layers(policy.model)} == set(found.targets)
    assert sum(p.numel() for _, p in policy.trained()) == found.num_trained
    assert all(".lora_" in name for name, _ in policy.trained())
    assert policy.model.get_output_embeddings().weight.requires_grad is False


def test_the_refusal_of_a_target_that_matches_nothing_lists_the_linear_layers(source):
    assert refusal(source, target_modules=["q_proj", "query"]) == (
        f"policy.lora.target_modules: query matches no linear layer of embedded. {LINEAR}"
    )
    assert refusal(source, target_modules=["self_attn"]) == (
        f"policy.lora.target_modules: self_attn matches no linear layer of embedded. {LINEAR}"
    )


def test_the_refusal_of_a_layer_that_does_not_exist_names_the_numbers_of_those_that_do(source, tmp_path):
    for key in ("target_modules", "exclude_modules"):
        assert refusal(source, **{key: ["layers.9.mlp.up_proj"]}) == (
            f"policy.lora.{key}: layers.9.mlp.up_proj matches no linear layer of embedded. Its layers of this name have the "
            "numbers 0 to 3."
        )
        assert refusal(source, **{key: ["layers.9.query"]}).endswith(LINEAR)
    settings = {"layer_types": ["full_attention", "linear_attention"] * 2, "num_hidden_layers": 4}
    hybrid = ModelSource("it", tmp_path, tiny_config("qwen3_next", **settings))
    message = refusal(hybrid, target_modules=["layers.1.self_attn.q_proj"])
    assert message.endswith(" of it. Its layers of this name have the numbers 0, 2.")


def test_the_refusal_of_a_name_outside_a_list_explains_how_to_write_it(source):
    assert refusal(source, target_modules="q_proj") == (
        f"policy.lora.target_modules: q_proj matches no linear layer of embedded. {LINEAR} "
        "A regular expression must match full names; give short names as a list."
    )


@pytest.mark.parametrize("targets", [["q_proj", "lm_head"], ".*lm_head"])
def test_the_head_is_refused_as_a_target(source, targets):
    named = targets if isinstance(targets, str) else "lm_head"
    assert refusal(source, target_modules=targets) == (
        f"policy.lora.target_modules: {named} selects lm_head, the head, which cannot have an adapter: its weight is used "
        "directly, so that logits need not be stored. Leave it out."
    )


def test_an_exclusion_that_matches_nothing_or_everything_is_refused(source):
    assert refusal(source, exclude_modules=["query"]) == (
        f"policy.lora.exclude_modules: query matches no linear layer of embedded. {LINEAR}"
    )
    assert refusal(source, target_modules=["q_proj"], exclude_modules=["q_proj"]) == (
        "policy.lora.exclude_modules excludes every layer that policy.lora.target_modules selects, so nothing would be trained. "
        "Exclude fewer."
    )


def test_names_that_peft_interprets_as_experts_are_refused_with_advice():
    """For the down_proj of a dense layer among layers of experts, peft would adapt the experts instead."""
    mixed = ModelSource("mixed", tiny_model(), tiny_config("qwen3_moe", decoder_sparse_step=2))
    named = ["down_proj", "gate_proj", "up_proj", "q_proj"]
    assert refusal(mixed, target_modules=named) == (
        "policy.lora: peft interprets down_proj,gate_proj,up_proj as parts of the experts of mixed, which are not linear layers. "
        "Leave them out: policy.lora.exclude_modules=[down_proj,gate_proj,up_proj]."
    )
    excluded = plan(mixed, exclude_modules=named[:3])
    assert excluded.names == ("k_proj", "o_proj", "q_proj", "v_proj")
    by_itself = plan(mixed)
    assert by_itself.left_out == ("down_proj, gate_proj, up_proj, which peft takes for experts",)
    assert replace(by_itself, left_out=()) == excluded


def test_a_router_that_is_a_subclass_of_linear_gets_no_adapter():
    """PhiMoE's router returns logits, weights and experts; peft would add an adapter's output to this tuple."""
    found = plan(ModelSource("phimoe", tiny_model(), tiny_config("phimoe", num_local_experts=4)))
    assert found.names == ("k_proj", "o_proj", "q_proj", "v_proj")


def test_names_that_peft_refuses_in_models_with_mamba_layers_are_refused_with_the_way_out():
    mamba = ModelSource("mamba", tiny_model(), tiny_config("falcon_h1"))
    assert refusal(mamba, target_modules=["in_proj", "out_proj"]) == (
        "policy.lora: peft does not adapt out_proj in models with Mamba layers, whose kernels read the weight without the "
        "adapter. Leave it out: policy.lora.exclude_modules=[out_proj]."
    )
    excluded, by_itself = plan(mamba, exclude_modules=["out_proj"]), plan(mamba)
    assert "out_proj" not in excluded.names
    assert by_itself.left_out == ("out_proj, which peft does not adapt in models with Mamba layers",)
    assert replace(by_itself, left_out=()) == excluded


def test_a_model_without_linear_layers_cannot_have_adapters():
    """Its layers are of a class of transformers' own, which peft adapts in another orientation."""
    gpt2 = ModelSource("gpt2", tiny_model(), tiny_config("gpt2", n_embd=32, n_layer=2, n_head=4))
    for targets in ("all-linear", ["c_attn"]):
        assert refusal(gpt2, target_modules=targets) == (
            "policy.lora: gpt2 (model type gpt2) has no linear layers that can have adapters. Train it in full: leave out "
            "policy.lora."
        )


def test_weights_that_would_be_quantised_are_those_of_linear_layers_except_the_head():
    """Not experts in one tensor, which transformers does not quantise either."""
    config = tiny_config("qwen3_moe")
    found = plan(ModelSource("experts", tiny_model(), config))
    model = AutoModelForCausalLM.from_config(config)
    projections = [weight for name, weight in model.named_parameters() if name.endswith("_proj.weight")]
    assert found.num_quantisable == sum(weight.numel() for weight in projections)
    assert len(projections) == config.num_hidden_layers * 4
    kept = found.num_frozen - found.num_quantisable
    experts = sum(weight.numel() for name, weight in model.named_parameters() if "experts" in name)
    assert experts < kept < found.num_frozen


def test_another_refusal_of_pefts_is_quoted_in_part_with_what_to_do(source, adapter, monkeypatch):
    def refuse(*_):
        raise ValueError(f"Layer\nof {'x' * 1000}.")

    monkeypatch.setattr("peft.inject_adapter_in_model", refuse)
    quoted = f"peft cannot adapt these layers of embedded (Layer of {'x' * 491})"
    assert refusal(source) == (
        f"policy.lora: {quoted}. Choose others with policy.lora.target_modules and policy.lora.exclude_modules."
    )
    assert refusal(source, adapter=str(adapter)) == (
        f"policy.lora.adapter = {adapter}: {quoted}. Start from another adapter, or without one."
    )


def test_only_the_weight_files_that_are_read_decide_whether_weights_are_rounded(source, tmp_path):
    folder = shutil.copytree(source.folder, tmp_path / "model")
    (folder / "other.safetensors").write_bytes(b"not weights")
    config = copy.deepcopy(source.config)
    config.dtype = torch.bfloat16
    found = replace(plan(source), dtype=torch.bfloat16)
    assert rounds_frozen_weights(
        ModelSource(str(folder), folder, config), found
    )  # the embedded model has float32 weights


def test_unknown_targets_are_refused_before_any_weights_load(tmp_path, monkeypatch):
    monkeypatch.setattr(references, "load_adapted", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(ConfigError, match="query matches no linear layer"):
        short_run(tmp_path / "run", "policy.lora.enabled=true", "policy.lora.target_modules=[query]")
    assert not (tmp_path / "run").exists()


# Starting from a trained adapter


def rewrite_config(adapter, **changes):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return adapter


def test_the_settings_of_a_trained_adapter_are_used(source, tmp_path):
    folder = trained_adapter(source.folder, tmp_path / "it", use_rslora=True, lora_dropout=0.3)
    found = plan(source, adapter=str(folder), dropout=0.1)
    assert (found.dim, found.alpha, found.rslora, found.dropout) == (4, 8.0, True, 0.1)
    assert found.names == ("down_proj", "q_proj")
    assert plan(source, adapter=str(folder), dim=4, alpha=8, target_modules=["q_proj", "down_proj"]) is not None


def test_settings_that_contradict_the_adapter_are_refused(source, adapter):
    key = f"policy.lora.adapter = {adapter}"
    assert refusal(source, adapter=str(adapter), dim=8) == (
        f"{key}: its dim is 4, but policy.lora.dim = 8. Leave out policy.lora.dim."
    )
    assert refusal(source, adapter=str(adapter), alpha=4.5) == (
        f"{key}: its alpha is 8, but policy.lora.alpha = 4.5. Leave out policy.lora.alpha."
    )
    assert refusal(source, adapter=str(adapter), use_rslora=True) == (
        f"{key}: its scale is alpha / dim, but policy.lora.use_rslora = true. Leave out policy.lora.use_rslora."
    )
    assert refusal(source, adapter=str(adapter), target_modules=["q_proj"]) == (
        f"{key}: its layers differ from those selected by policy.lora.target_modules, for example in "
        "model.layers.0.mlp.down_proj. Leave out target_modules and exclude_modules."
    )


def test_a_folder_that_is_not_an_adapter_is_refused(source, tmp_path):
    assert refusal(source, adapter="./nowhere") == "policy.lora.adapter = ./nowhere: no such directory. Check the path."
    assert refusal(source, adapter=str(tmp_path)) == (
        f"policy.lora.adapter = {tmp_path}: {tmp_path} holds no adapter_config.json, so it is not an adapter. Give a folder "
        "saved by peft."
    )


def test_a_pickled_adapter_is_refused(source, adapter):
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    assert refusal(source, adapter=str(adapter)) == (
        f"policy.lora.adapter = {adapter}: {adapter} holds no adapter_model.safetensors. Pickled weights are not read; "
        "save the adapter again with peft."
    )


def test_a_truncated_adapter_is_refused(source, adapter):
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    message = refusal(source, adapter=str(adapter))
    assert message.startswith(f"policy.lora.adapter = {adapter}: its weights are not readable as safetensors (")
    assert message.endswith("Is it complete?")


def test_an_adapter_made_for_a_different_model_is_refused(adapter):
    wide = tiny_config("llama", hidden_size=64, num_hidden_layers=4, intermediate_size=384)
    assert refusal(ModelSource("wide", tiny_model(), wide), adapter=str(adapter)) == (
        f"policy.lora.adapter = {adapter}: made for a different model: the shape of model.layers.0.mlp.down_proj.lora_B is "
        "[128, 4], but wide needs [64, 4]. Set policy.model_name to the adapter's base model."
    )
    short = tiny_config("llama", hidden_size=128, intermediate_size=384, head_dim=32, num_hidden_layers=2)
    assert refusal(ModelSource("short", tiny_model(), short), adapter=str(adapter)) == (
        f"policy.lora.adapter = {adapter}: made for a different model: it adapts model.layers.2.mlp.down_proj, which is not a "
        "linear layer of short. Set policy.model_name to the adapter's base model."
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"peft_type": "LOHA"},
            "its peft_type is LOHA. Only LORA adapters are supported.",
        ),
        (
            {"use_dora": True},
            "has no lora_magnitude_vector of model.layers.0.mlp.down_proj, but use_dora is true in its adapter_config.json. Save "
            "it again with peft.",
        ),
        (
            {"trainable_token_indices": [5, 5]},
            "trainable_token_indices in its adapter_config.json is not one list of different ids. Merge the adapter with peft, "
            "and start from the result.",
        ),
        (
            {"trainable_token_indices": [5]},
            "holds no model.embed_tokens.token_adapter.trainable_tokens_delta, which its trainable_token_indices need. Download "
            "it again.",
        ),
        (
            {"use_qalora": True},
            "use_qalora = true: only plain LoRA and DoRA adapters are supported.",
        ),
        (
            {"bias": "all"},
            'bias = "all": only plain LoRA and DoRA adapters are supported.',
        ),
        (
            {"rank_pattern": {"q_proj": 8}},
            'rank_pattern = {"q_proj": 8}: only plain LoRA and DoRA adapters are supported.',
        ),
        (
            {"modules_to_save": "lm_head"},
            "modules_to_save in its adapter_config.json is not a list of names. Save it again with peft.",
        ),
        (
            {"init_lora_weights": "pissa"},
            'init_lora_weights = "pissa": the adapter belongs to base weights that this initialisation changed. Convert it to '
            "plain LoRA with peft.",
        ),
        (
            {"r": None},
            "its adapter_config.json has no valid r and lora_alpha, so it is not a LoRA adapter. Save it again with peft.",
        ),
    ],
)
def test_an_adapter_that_is_not_plain_lora_is_refused(source, adapter, changes, words):
    rewrite_config(adapter, **changes)
    assert refusal(source, adapter=str(adapter)) == f"policy.lora.adapter = {adapter}: {words}"


def test_a_dora_adapter_is_read_and_refused_where_it_does_not_fit(source, adapter, tmp_path, monkeypatch):
    folder = trained_adapter(source.folder, tmp_path / "dora", use_dora=True)
    found, key = plan(source, adapter=str(folder)), f"policy.lora.adapter = {folder}"
    assert found.dora
    assert found.num_magnitudes == 4 * (128 + 128)  # q_proj and down_proj of four layers
    assert plan(source, adapter=str(folder), use_dora=True).dora
    assert refusal(source, adapter=str(adapter), use_dora=True) == (
        f"policy.lora.adapter = {adapter}: it is not a DoRA adapter, but policy.lora.use_dora = true. Leave out "
        "policy.lora.use_dora."
    )
    monkeypatch.setattr(module, "_check_quantization", lambda *_: None)
    assert refusal(source, adapter=str(folder), quantization="nf4") == (
        f"{key}: a DoRA adapter does not work with policy.lora.quantization = nf4: row norms are computed from weights "
        "that are not quantised. Leave out policy.lora.quantization."
    )
    assert refusal(source, adapter=str(rewrite_config(folder, use_dora=False))) == (
        f"{key}: has a lora_magnitude_vector of model.layers.0.mlp.down_proj, but use_dora is false in its adapter_config.json. "
        "Save it again with peft."
    )


def test_magnitudes_are_trained_and_listed(source):
    found = plan(source, use_dora=True, target_modules=["q_proj"])
    policy = load_adapted(source, load_config(None, []).config.policy, CPU, found)
    assert found.num_trained == sum(p.numel() for _, p in policy.trained()) == 4 * (16 * (128 + 128) + 128)
    assert found.num_magnitudes == 4 * 128
    config = load_config(None, ["policy.lora.enabled=true"]).config.policy
    of_lora, of_dora = (
        estimate_memory(source, config, CPU, lora=one, precision="float32")
        for one in (replace(found, num_magnitudes=0), found)
    )
    assert of_dora.per_token - of_lora.per_token == 4 * 4 * 128  # the outputs of layers, before rows are scaled
    setup = set_up(load_config(None, ["policy.lora.enabled=true", "policy.lora.use_dora=true"]).config, CPU)
    assert dict(describe_choices(setup))["adapters"].startswith("DoRA, dim 16, alpha 32, on 28 layers (")


def test_the_start_fingerprint_is_the_base_models_unless_a_trained_adapter_changes_it(source, adapter, tmp_path):
    base = weights_fingerprint(source)
    assert start_fingerprint(source, None) == start_fingerprint(source, plan(source)) == base
    before = start_fingerprint(source, plan(source, adapter=str(adapter)))
    assert before != base
    copied = shutil.copytree(adapter, tmp_path / "elsewhere")
    assert start_fingerprint(source, plan(source, adapter=str(copied))) == before
    assert start_fingerprint(source, plan(source, adapter=str(rewrite_config(copied, lora_alpha=9)))) != before
    weights = adapter / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert start_fingerprint(source, plan(source, adapter=str(adapter))) != before


# Quantised weights


def test_quantised_weights_are_refused_without_a_gpu_and_without_bitsandbytes(source, monkeypatch):
    assert refusal(source, quantization="nf4") == (
        "policy.lora.quantization = nf4: quantised weights need a CUDA device, and this machine has none. Leave it out."
    )
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as refused:
        plan_lora(source, Lora(enabled=True, quantization="int8"), torch.device("cuda"), "bfloat16")
    assert str(refused.value) == (
        "policy.lora.quantization = int8: the package bitsandbytes is not installed. In the tandem checkout, run "
        "pip install '.[qlora]', or leave it out."
    )


def test_weights_that_are_already_quantised_are_refused(source):
    config = tiny_config("llama")
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    assert refusal(ModelSource("small", source.folder, config)) == (
        "policy.model_name = small: its weights are already quantised. Give the model that it was quantised from; "
        "policy.lora.quantization quantises that model."
    )


def test_quantisation_is_configured_as_in_the_qlora_paper(source):
    """nf4 with double quantisation, computing in the run's precision."""
    four = replace(plan(source), quantization="nf4", precision="bfloat16").quantization_config()
    assert (four.load_in_4bit, four.bnb_4bit_quant_type, four.bnb_4bit_use_double_quant) == (True, "nf4", True)
    assert four.bnb_4bit_compute_dtype == torch.bfloat16
    assert replace(plan(source), quantization="int8").quantization_config().load_in_8bit
    assert plan(source).quantization_config() is None


# Frozen weights


class Shapes(TorchDispatchMode):
    """Records the shapes of all computed tensors."""

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
def test_no_gradient_is_computed_for_a_frozen_head(frozen):
    hidden = torch.randn(7, 5, requires_grad=True)
    weight, bias = torch.randn(11, 5, requires_grad=not frozen), torch.randn(11, requires_grad=not frozen)
    logps = chunked_logps(hidden, weight, bias, torch.arange(7), chunk=3)
    with Shapes() as shapes:
        logps.sum().backward()
    assert ((11, 5) in shapes.seen, (11,) in shapes.seen) == (not frozen, not frozen)
    assert (weight.grad is None, bias.grad is None) == (frozen, frozen)
    plain = torch.nn.functional.linear(hidden, weight, bias).log_softmax(-1)[torch.arange(7), torch.arange(7)]
    torch.testing.assert_close(hidden.grad, torch.autograd.grad(plain.sum(), hidden)[0])


def test_frozen_weights_keep_their_published_dtype_with_bfloat16_computation(source, tmp_path):
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


def test_dropout_applies_only_while_gradients_are_computed():
    dropout, ones = TrainingDropout(0.5), torch.ones(1000)
    assert sorted(set(dropout(ones).tolist())) == [0.0, 2.0]
    with torch.no_grad():
        assert torch.equal(dropout(ones), ones)


def test_the_adapters_in_use_are_reported(tmp_path, adapter):
    reported = dict(describe_choices(set_up(load_config(None, ["policy.lora.enabled=true"]).config, CPU)))
    assert reported["adapters"] == (
        "LoRA, dim 16, alpha 32, on 28 layers (down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj); "
        "155,648 parameters trained, 1,049,728 frozen"
    )
    assert reported["reference"] == "cached, the base model"
    assert reported["precision"] == (
        "float32 computation over frozen float32 weights; adapters in float32, float32 optimizer states, 16 bytes per trained "
        "parameter"
    )
    settings = ["policy.lora.enabled=true", f"policy.lora.adapter={adapter}", "policy.lora.dropout=0.1"]
    reported = dict(describe_choices(set_up(load_config(None, settings).config, CPU)))
    assert reported["adapters"].endswith(f"; starting from {adapter}")
    assert reported["reference"] == "cached, the base model with the adapter it starts from"
    assert reported["dropout"] == "0.1 of the adapters' inputs, in training steps"


def test_one_adapted_layer_is_reported_in_the_singular():
    settings = ["policy.lora.enabled=true", "policy.lora.target_modules=[layers.1.mlp.up_proj]"]
    reported = dict(describe_choices(set_up(load_config(None, settings).config, CPU)))
    assert ", on 1 layer (model.layers.1.mlp.up_proj); " in reported["adapters"]


def test_adapters_of_experts_alone_are_reported_without_layers(tmp_path):
    model = model_folder(tmp_path / "model", "qwen3_moe")
    lora = ["enabled=true", "target_modules=[]", "target_parameters=[experts.down_proj]"]
    settings = [f"policy.model_name={model}", *(f"policy.lora.{one}" for one in lora)]
    setup = set_up(load_config(None, settings).config, CPU)
    assert ", alpha 32, on 2 tensors of experts (experts.down_proj); " in dict(describe_choices(setup))["adapters"]


@pytest.mark.parametrize(
    ("targets", "printed"),
    [
        ("[q_proj,v_proj]", "on 4 layers (q_proj, v_proj, in the text model); "),
        ("[layers.1.self_attn.q_proj]", "on 1 layer (model.language_model.layers.1.self_attn.q_proj); "),
    ],
)
def test_layers_of_a_multimodal_checkpoint_are_reported_by_short_names(targets, printed, tmp_path):
    """Its vision tower has layers of the same names, so that an exported adapter lists full names."""
    model = multimodal_folder(tmp_path / "model", "gemma3")
    settings = [f"policy.model_name={model}", "policy.lora.enabled=true", f"policy.lora.target_modules={targets}"]
    setup = set_up(load_config(None, settings).config, CPU)
    assert printed in dict(describe_choices(setup))["adapters"]
    assert all(name.startswith("model.language_model.") for name in setup.lora.names)


def test_a_multimodal_checkpoint_cannot_be_quantised(tmp_path):
    source = ModelSource("it", tmp_path, AutoConfig.for_model("gemma3"))
    assert refusal(source, quantization="nf4") == (
        "policy.lora.quantization = nf4: it is a multimodal checkpoint (gemma3), of which only the text model is loaded, and "
        "quantising it is not supported. Leave out policy.lora.quantization."
    )
