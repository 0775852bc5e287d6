"""Sequences longer than the positions a model has, or was trained with."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from models import tiny_config
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.config.load import load_config
from tandem.data.store.sets import Sets
from tandem.errors import ConfigError
from tandem.model.checks.positions import check_positions, long_sequence_warnings, position_limit
from tandem.model.files.source import ModelSource
from tandem.model.files.tiny import tiny_model
from tandem.report.setup_warnings import unusual_settings
from tandem.training.start.setup import set_up


class Store(SimpleNamespace):
    def __len__(self):
        return len(self.longest)


def sets(*longest, **validation):
    stores = {name: Store(longest=np.array(lengths)) for name, lengths in validation.items()}
    return Sets({}, Store(longest=np.array(longest)), (), stores)  # type: ignore[arg-type]


def source(architecture="llama", key="policy.model_name", **changes):
    return ModelSource("it", tiny_model(), tiny_config(architecture, **changes), key)


@pytest.mark.parametrize(
    ("architecture", "changes", "limit"),
    [
        ("llama", {"max_position_embeddings": 100}, 100),
        # YaRN: Qwen2.5 keeps the number it was extended from
        ("qwen2", {"max_position_embeddings": 100, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 400),
        (
            "llama",
            {
                "max_position_embeddings": 400,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100},
            },
            400,
        ),
        # without a factor, it follows from the two numbers
        (
            "llama",
            {
                "max_position_embeddings": 400,
                "rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 100},
            },
            400,
        ),
        # others keep the extended number: Llama 3.1, Gemma 3
        (
            "llama",
            {
                "max_position_embeddings": 800,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 100,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                },
            },
            800,
        ),
        (
            "gemma3_text",
            {
                "max_position_embeddings": 800,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            },
            800,
        ),
    ],
)
def test_the_position_limit_is_the_extended_number(architecture, changes, limit):
    assert position_limit(tiny_config(architecture, **changes)) == limit


def test_a_model_whose_configuration_has_no_number_of_positions_has_no_limit():
    assert position_limit(AutoConfig.for_model("bloom")) is None
    assert position_limit(AutoConfig.for_model("gpt2", n_positions=7)) == 7


def test_a_warning_counts_the_sequences_longer_than_a_model_was_trained_for():
    model = source(max_position_embeddings=100)
    assert long_sequence_warnings(sets(100, 99), model, None) == []
    other = source(max_position_embeddings=200, key="reference.model")
    found = long_sequence_warnings(sets(100, 101, 1300, default=[40], held=[120]), model, other)
    assert found == [
        "policy.model_name = it: 2 of 3 preferences in train are too long for it: the longest has 1,300 tokens, and the model "
        "was trained for 100 (max_position_embeddings): beyond that its log-probabilities are unreliable. With "
        "policy.max_total_sequence_length=100, data.overlong decides what happens to such preferences.",
        "policy.model_name = it: 1 of 1 preferences in validation-held are too long for it: the longest has 120 tokens, and the "
        "model was trained for 100 (max_position_embeddings): beyond that its log-probabilities are unreliable. With "
        "policy.max_total_sequence_length=100, data.overlong decides what happens to such preferences.",
        "reference.model = it: 1 of 3 preferences in train are too long for it: the longest has 1,300 tokens, and the model was "
        "trained for 200 (max_position_embeddings): beyond that its log-probabilities are unreliable. With "
        "policy.max_total_sequence_length=200, data.overlong decides what happens to such preferences.",
    ]


TABLES = {
    "gpt2": {"n_positions": 100, "n_embd": 32, "n_layer": 1, "n_head": 2},
    "gpt_bigcode": {"n_positions": 100, "n_embd": 32, "n_layer": 1, "n_head": 2},
    "openai-gpt": {"n_positions": 100, "n_embd": 32, "n_layer": 1, "n_head": 2},
    "gptj": {"n_positions": 100, "n_embd": 32, "n_layer": 1, "n_head": 2, "rotary_dim": 8},
    "codegen": {"n_positions": 100, "n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 8},
    "opt": {"max_position_embeddings": 100, "hidden_size": 36, "num_hidden_layers": 1, "word_embed_proj_dim": 36},
    "biogpt": {"max_position_embeddings": 100, "hidden_size": 32, "num_hidden_layers": 1},
    "mpt": {"max_seq_len": 100},
}


@pytest.mark.parametrize("kind", TABLES)
def test_sequences_longer_than_a_table_of_positions_are_refused(kind):
    model = ModelSource("it", tiny_model(), AutoConfig.for_model(kind, vocab_size=96, **TABLES[kind]))
    check_positions(sets(100), model, None)
    with pytest.raises(ConfigError) as refused:
        check_positions(sets(99, 101), model)
    assert str(refused.value) == (
        "policy.model_name = it: 1 of 2 preferences in train are too long for it: the longest has 101 tokens, and the model has "
        "no positions beyond 100. Set policy.max_total_sequence_length=100."
    )


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_neox"])
def test_long_sequences_are_not_refused_if_positions_are_computed(architecture):
    check_positions(sets(600), source(architecture))


def test_a_table_of_positions_is_checked_before_weights_load(tmp_path):
    folder = shutil.copytree(tiny_model(), tmp_path / "model")
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    (folder / "config.json").unlink()
    config = AutoConfig.for_model("gpt2", vocab_size=vocabulary, **TABLES["gpt2"])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    overrides = [f"policy.model_name={folder}", "data.train.data_path=embedded"]
    with pytest.raises(ConfigError) as refused:
        set_up(load_config(None, overrides).config, torch.device("cpu"))
    assert str(refused.value).endswith(
        "and the model has no positions beyond 100. Set policy.max_total_sequence_length=100."
    )
    # the advised setting works
    data = ["data.overlong=drop", "data.max_filtered_share=1"]
    overrides = [*overrides, *data, "policy.max_total_sequence_length=100"]
    set_up(load_config(None, overrides).config, torch.device("cpu"))


def test_a_run_warns_of_long_sequences_and_of_settings_far_from_the_paper(tmp_path):
    folder = shutil.copytree(tiny_model(), tmp_path / "model")
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "max_position_embeddings": 120}))
    overrides = [f"policy.model_name={folder}", "data.train.data_path=embedded", "dpo.preference_loss=simpo"]
    setup = set_up(load_config(None, overrides).config, torch.device("cpu"))
    assert [text.partition(":")[0] for text in unusual_settings(setup)] == [
        "dpo.reference_policy_kl_penalty = 0.1 is 20 times less than the published value for simpo (2 to 10, arXiv",
        *[f"policy.model_name = {folder}"] * 2,  # one for the training set, one for the validation set
    ]
