"""Models, adapters and tokenizers of a stranger, mutated: each is read or refused in words."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import copy_of, files_below, mutate_file, try_all
from models import MODEL

from tandem.config.load import load_config
from tandem.data.template import make_template
from tandem.data.tokenizer import check_export, load_tokenizer
from tandem.model.adapter_files import read_adapter
from tandem.model.load import check_packable, load_policy
from tandem.model.source import find_model, find_tokenizer, weights_fingerprint

pytestmark = pytest.mark.slow

NUMBER = 2500
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model in two files with an index, as large ones are published."""
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
def test_models(tmp_path: Path, model: Path, adapter: Path, part: int) -> None:
    victim = tmp_path / "victim"
    copy_of(model, victim)
    (victim / "file.txt").write_text("{}")
    warm = [lambda: _read_model(model, adapter)]
    warm[0]()  # what is imported here need not be imported in every child

    def make(rng: random.Random) -> Callable[[], Any]:
        given = copy_of(model, tmp_path / "given")
        added = copy_of(adapter, tmp_path / "added")
        hurt = added if rng.random() < 0.2 else given
        mutate_file(rng, rng.choice(files_below(hurt)), victim)
        return lambda: _read_model(given, added if hurt is added else None)

    try_all("model", range(part * NUMBER // 5, (part + 1) * NUMBER // 5), make, victim)


def _read_model(folder: Path, adapter: Path | None) -> None:
    overrides = [f"policy.model_name={folder}", "policy.max_total_sequence_length=64"]
    overrides += [f"policy.lora.adapter={adapter}", "policy.lora.enabled=true"] if adapter else []
    config = load_config(None, overrides).config
    source = find_model(config.policy)
    check_packable(source, config.policy)
    if adapter is not None:
        read_adapter(str(adapter))
    named = find_tokenizer(config.policy, source)
    tokenizer = load_tokenizer(named)
    check_export(tokenizer, named, source.config)
    template = make_template(tokenizer, config.policy.tokenizer)
    template.tokenizer("Two words, and \u00e9 more.")
    weights_fingerprint(source)
    load_policy(source, config.policy, CPU)
