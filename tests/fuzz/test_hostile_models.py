"""Mutated models, adapters and tokenizers are loaded, or refused with a message."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import VALUES, copy_of, files_below, mutate_file, mutate_tree, try_all
from models import MODEL

from tandem.config.load import load_config
from tandem.config.schema import Config
from tandem.data.text.template import make_template
from tandem.data.text.tokenizer import check_export, load_tokenizer
from tandem.model.architecture import check_packable
from tandem.model.checks.positions import position_limit
from tandem.model.files.source import find_model, find_tokenizer, weights_fingerprint
from tandem.model.load import load_policy
from tandem.model.lora.adapters import load_adapted
from tandem.model.lora.layers import plan_lora

pytestmark = pytest.mark.slow

NUMBER = 2500
# Settings of config.json that the embedded model does not have.
UNUSUAL = {
    "quantization_config": {"quant_method": "mxfp4", "bits": 4, "modules_to_not_convert": ["lm_head"]},
    "fusion_config": {"patch_embeddings": True},
    "dtype": "float16",
    "torch_dtype": "nn",
    "auto_map": {"AutoConfig": "code.Config"},
    "attn_implementation": "someone/kernels",
    "experts_implementation": "someone/kernels",
    "transformers_weights": "model-00001-of-00002.safetensors",
    "rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 128},
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 16,
    "text_config": {"hidden_size": 64},
    "attention_chunk_size": 8,
    "index_topk": 4,
    "num_experts": 4,
    "tie_word_embeddings": True,
    "pruned_heads": {"0": [0]},
    "id2label": {"0": "a"},
    "return_dict": False,
    "gguf_file": "model.gguf",
    "chunk_size_feed_forward": 7,
}
METHODS = ("bitsandbytes", "gptq", "awq", "fp8", "fbgemm_fp8", "compressed-tensors", "quanto", "hqq", "torchao", "gguf")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model in two weight files with an index, like a large model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("model")
    loaded = AutoModelForCausalLM.from_pretrained(MODEL)
    size = sum(parameter.numel() * 4 for parameter in loaded.parameters())
    loaded.save_pretrained(folder, max_shard_size=int(size * 0.7))
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    assert (folder / "model.safetensors.index.json").is_file()
    return folder


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("adapter")
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(r=2)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("part", range(5))
def test_mutated_models_are_loaded_or_refused(tmp_path: Path, model: Path, adapter: Path, part: int) -> None:
    victim = tmp_path / "victim"
    copy_of(model, victim)
    (victim / "file.txt").write_text("{}")
    given, added = copy_of(model, tmp_path / "given"), copy_of(adapter, tmp_path / "added")
    overrides = [f"policy.model_name={given}", "policy.max_total_sequence_length=64"]
    alone = load_config(None, overrides).config
    adapted = load_config(None, [*overrides, f"policy.lora.adapter={added}", "policy.lora.enabled=true"]).config
    for config in (alone, adapted):
        _read_model(config)  # imports modules once, so that the children need not

    def make(rng: random.Random) -> Callable[[], Any]:
        copy_of(model, given)
        copy_of(adapter, added)
        mutated = added if rng.random() < 0.2 else given
        if mutated is given and rng.random() < 0.25:
            add_unusual(rng, given / "config.json")
        mutate_file(rng, rng.choice(files_below(mutated)), victim)
        return lambda: _read_model(adapted if mutated is added else alone)

    tried = try_all("model", range(part * NUMBER // 5, (part + 1) * NUMBER // 5), make, victim)
    assert not tried.problems, str(tried)


def add_unusual(rng: random.Random, file: Path) -> None:
    """Add settings that change how transformers loads a model, some of them mutated."""
    described = json.loads(file.read_text())
    for key in rng.sample(list(UNUSUAL), rng.choice([1, 1, 2])):
        value = json.loads(json.dumps(UNUSUAL[key]))
        if key == "quantization_config" and rng.random() < 0.7:
            value["quant_method"] = rng.choice(METHODS)
        described[key] = mutate_tree(rng, {key: value}) if rng.random() < 0.2 else value
        if rng.random() < 0.3:
            described[key] = rng.choice(VALUES)
    file.write_text(json.dumps(described))


def _read_model(config: Config) -> None:
    source = find_model(config.policy)
    check_packable(source, config.policy)
    position_limit(source.config)
    plan = plan_lora(source, config.policy.lora, CPU, "float32")
    named = find_tokenizer(config.policy, source)
    tokenizer = load_tokenizer(named)
    check_export(tokenizer, named, source.config)
    template = make_template(tokenizer, config.policy.tokenizer)
    template.tokenizer("Two words, and \u00e9 more.")
    weights_fingerprint(source)
    if plan is None:
        load_policy(source, config.policy, CPU)
    else:
        load_adapted(source, config.policy, CPU, plan)
