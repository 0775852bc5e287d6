"""A randomly initialised model of a real shape as a folder that `tandem train` loads, and runs of that command."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SHAPES = {"tiny": (64, 128, 2, 4, 2), "0.5b": (896, 4864, 24, 14, 2), "1.5b": (1536, 8960, 28, 12, 2)}


def make_model(shape: str, tokenizer: str, folder: Path) -> Path:
    """A Qwen2 model of that shape in bfloat16, made once."""
    if (folder / "config.json").is_file():
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    own = AutoTokenizer.from_pretrained(tokenizer)
    sizes = dict(zip(NAMES, SHAPES[shape], strict=True))
    config = AutoConfig.for_model("qwen2", vocab_size=152_064, tie_word_embeddings=True, **sizes)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    own.save_pretrained(folder)
    return folder


def run(overrides: list[str], folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """`tandem train` into `folder`: what it printed, and its training records."""
    command = [sys.executable, "-m", "tandem", "train", *overrides, f"run.dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return done.stdout, [record for record in records if record["split"] == "train"]
