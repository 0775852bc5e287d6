"""Folders with the configuration of real models and a small tokenizer, without weights."""

import json
import shutil
from pathlib import Path

from tandem.model.files.tiny import tiny_tokenizer

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
