"""Folders with the configuration of real models and a small tokenizer, without weights; the pairs of the benchmarks."""

import json
import shutil
from pathlib import Path

import numpy as np

from tandem.model.files.tiny import tiny_tokenizer
from tandem.packing.distribution import row_cost
from tandem.planning.speed import ModelSize, Work

NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SHAPES = {
    "qwen2.5-0.5b": ("qwen2", (896, 4864, 24, 14, 2), 151_936, True),
    "qwen2.5-1.5b": ("qwen2", (1536, 8960, 28, 12, 2), 151_936, True),
    "llama3.1-8b": ("llama", (4096, 14336, 32, 32, 8), 128_256, False),
}


def model_folder(shape: str, folder: Path) -> Path:
    """A model folder of this shape, with config.json and a tokenizer only."""
    kind, sizes, vocabulary, tied = SHAPES[shape]
    folder.mkdir(parents=True, exist_ok=True)
    for file in tiny_tokenizer().iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    described = dict(zip(NAMES, sizes, strict=True)) | {"vocab_size": vocabulary, "tie_word_embeddings": tied}
    architecture = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}[kind]
    described |= {"model_type": kind, "architectures": [architecture], "dtype": "bfloat16"}
    described |= {"max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps(described), encoding="utf-8")
    return folder


def measured_pairs(size: ModelSize, num: int = 4096) -> Work:
    """Pairs with the lengths of the benchmark: log-normal, prompts of 200 tokens, completions of 250, at most 2,048 together."""
    rng = np.random.default_rng(0)
    means = np.array([200, 250, 250])
    lengths = np.maximum(4, rng.lognormal(np.log(means) - 0.7**2 / 2, 0.7, (num, 3)).astype(np.int64))
    lengths = lengths[lengths[:, 0] + lengths[:, 1:].max(1) <= 2048]
    prompts, completions = lengths[:, 0], lengths[:, 1:].ravel()
    cost = row_cost(prompts, completions, np.full(len(prompts), 2), hidden_size=size.hidden).sum()
    tokens = lengths.sum() / len(lengths)
    return Work(tokens, completions.sum() / len(lengths), attention=cost / len(lengths) / tokens, fill=0.99)
