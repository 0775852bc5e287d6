"""What tandem derives from the configuration and the class of a model, before weights load."""

import pytest
import torch
from models import tiny_config
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.model.architecture import (
    architecture_of,
    decoder_layers,
    feed_forward_width,
    has_layer_list,
    head_of,
    trunk_of,
)
from tandem.model.head import HeadRule, LanguageModelHead


def empty(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize(
    ("config", "layers", "recurrent", "window", "num_attention_layers"),
    [
        (AutoConfig.for_model("llama", num_hidden_layers=3), None, (), None, 3),
        (
            AutoConfig.for_model(
                "gemma3_text",
                num_hidden_layers=2,
                layer_types=["sliding_attention", "full_attention"],
                sliding_window=7,
            ),
            ("window", "full"),
            (),
            7,
            2,
        ),
        (
            AutoConfig.for_model(
                "qwen3_next",
                num_hidden_layers=3,
                layer_types=["linear_attention", "full_attention", "linear_attention"],
            ),
            ("recurrent", "full", "recurrent"),
            ("linear_attention",),
            None,
            1,
        ),
    ],
    ids=["all alike", "windows", "recurrent"],
)
def test_the_layers_of_a_model_by_how_they_mix_tokens(config, layers, recurrent, window, num_attention_layers):
    found = architecture_of(config)
    assert (found.layers, found.recurrent, found.window) == (layers, recurrent, window)
    assert found.num_attention_layers == num_attention_layers


def test_a_stateful_class_without_a_list_of_layers_is_recurrent():
    assert architecture_of(AutoConfig.for_model("rwkv")).recurrent == ("rwkv",)


def test_special_cases_of_model_types():
    found = {
        name: architecture_of(AutoConfig.for_model(name)) for name in ("llama", "gemma2", "gpt_oss", "phimoe", "mpt")
    }

    def where(fact):
        return [name for name, architecture in found.items() if fact(architecture)]

    assert where(lambda one: one.caps_scores) == ["gemma2"]
    assert where(lambda one: one.plain_attention == "eager") == ["gemma2", "gpt_oss", "mpt"]
    assert where(lambda one: one.has_sinks) == ["gpt_oss"]
    assert where(lambda one: one.has_experts) == ["gpt_oss", "phimoe"]
    assert where(lambda one: one.hides_positions) == ["mpt"]


@pytest.mark.parametrize(
    ("model_type", "sizes", "width"),
    [
        ("llama", {"intermediate_size": 100}, 100),
        ("mixtral", {"intermediate_size": 100, "num_local_experts": 8, "num_experts_per_tok": 2}, 200),
        ("gpt_oss", {"intermediate_size": 100, "num_local_experts": 8, "num_experts_per_tok": 4}, 400),
        ("qwen3_moe", {"intermediate_size": 100, "moe_intermediate_size": 30, "num_experts_per_tok": 8}, 240),
        # and one shared expert of 50
        (
            "qwen2_moe",
            {"moe_intermediate_size": 30, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 50},
            170,
        ),
        # and two shared experts of 30
        ("deepseek_v3", {"moe_intermediate_size": 30, "num_experts_per_tok": 4, "n_shared_experts": 2}, 180),
        # Of six layers, two are feed-forward networks, and two are experts, of which one is shared.
        (
            "nemotron_h",
            {
                "layers_block_type": ["mamba", "mlp", "attention", "moe", "mlp", "moe"],
                "intermediate_size": 100,
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 30,
                "moe_shared_expert_intermediate_size": 140,
            },
            100,
        ),
        # Granite 4 without experts
        ("granitemoehybrid", {"intermediate_size": 10, "num_local_experts": 0, "shared_intermediate_size": 100}, 100),
    ],
)
def test_a_token_passes_through_the_experts_it_is_sent_to(model_type, sizes, width):
    assert feed_forward_width(AutoConfig.for_model(model_type, **sizes)) == width


def test_a_model_without_a_layer_of_experts_has_none_even_if_it_says_how_many():
    kinds = ["mamba", "mlp", "attention", "mlp"]
    config = AutoConfig.for_model("nemotron_h", layers_block_type=kinds, intermediate_size=100, n_routed_experts=8)
    assert not architecture_of(config).has_experts
    assert feed_forward_width(config) == 50
    with_experts = AutoConfig.for_model("nemotron_h", layers_block_type=[*kinds, "moe"], n_routed_experts=8)
    assert architecture_of(with_experts).has_experts


def test_a_margin_of_the_router_of_phimoe_is_not_random():
    assert (
        "router_jitter_noise"
        in architecture_of(AutoConfig.for_model("mixtral", router_jitter_noise=0.01)).random_settings
    )
    assert "router_jitter_noise" not in architecture_of(AutoConfig.for_model("phimoe")).random_settings


def test_the_trunk_and_its_layers_are_found_in_a_model_without_weights():
    # in Llama 4's text model, `base_model` is the model itself
    for name in ("llama", "llama4_text"):
        model = empty(tiny_config(name))
        assert trunk_of(model) is model.model
        assert decoder_layers(model) == list(model.model.layers)
    assert not has_layer_list(empty(tiny_config("gpt2")))  # in `h`


@pytest.mark.parametrize(
    ("name", "settings", "rule"),
    [
        ("llama", {}, HeadRule()),
        ("cohere", {"logit_scale": 0.25}, HeadRule(scale=0.25)),
        ("granite", {"logits_scaling": 4.0}, HeadRule(scale=0.25)),
        ("gemma2", {"final_logit_softcapping": 3.0}, HeadRule(softcap=3.0)),
    ],
)
def test_the_head_scales_and_caps_logits_as_the_model_does(name, settings, rule):
    assert head_of(empty(tiny_config(name, **settings)), chunk=8) == LanguageModelHead(rule=rule, chunk=8)


def test_the_auto_class_of_an_architecture_builds_its_class():
    config = tiny_config("llama")
    found = architecture_of(config)
    assert type(empty(config)) is found.model_class
    assert found.auto_class is AutoModelForCausalLM
