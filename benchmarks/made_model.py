"""Models of real shapes with random weights: their configurations, folders that `tandem train` can load, and runs of it.

TRL's interpreter imports this file too, so it must not import tandem.
"""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WARM_UP = 2  # steps before the clock starts, in every system
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's architecture and sizes."""

    family: str
    sizes: tuple[int, ...]  # in the order of NAMES
    vocabulary: int
    tied: bool  # whether embeddings and head share weights
    more: dict[str, Any] = field(default_factory=dict)  # other settings of the configuration

    @property
    def hidden(self) -> int:
        return self.sizes[0]

    @property
    def has_recurrent_layers(self) -> bool:
        return "layer_types" in self.more

    @property
    def active_experts(self) -> float:
        """The share of the experts that a token is sent to."""
        return self.more["num_experts_per_tok"] / self.more["num_experts"] if "num_experts" in self.more else 1.0


# Every tenth layer, from the sixth on, has attention; the others are Mamba-2.
GRANITE = {
    "layer_types": ["full_attention" if number % 10 == 5 else "linear_attention" for number in range(40)],
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "num_local_experts": 0,
    "position_embedding_type": "nope",
}
# Every fourth layer has attention; the others are gated delta rules.
QWEN_LINEAR = {
    "layer_types": ["full_attention" if number % 4 == 3 else "linear_attention" for number in range(24)],
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
# Every token is sent to 8 of 128 experts, each with an intermediate size of 768.
QWEN_EXPERTS = {
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
SHAPES = {
    "tiny": Shape("llama", (256, 512, 4, 4, 2), 4096, tied=True),
    "smollm2-135m": Shape("llama", (576, 1536, 30, 9, 3), 49_152, tied=True),
    "qwen2.5-0.5b": Shape("qwen2", (896, 4864, 24, 14, 2), 151_936, tied=True),
    "qwen2.5-1.5b": Shape("qwen2", (1536, 8960, 28, 12, 2), 151_936, tied=True),
    "qwen2.5-3b": Shape("qwen2", (2048, 11008, 36, 16, 2), 151_936, tied=True),
    "llama3.1-8b": Shape("llama", (4096, 14336, 32, 32, 8), 128_256, tied=False),
    "qwen2.5-14b": Shape("qwen2", (5120, 13824, 48, 40, 8), 152_064, tied=False),
    "qwen2.5-32b": Shape("qwen2", (5120, 27648, 64, 40, 8), 152_064, tied=False),
    "llama3.1-70b": Shape("llama", (8192, 28672, 80, 64, 8), 128_256, tied=False),
    "tiny-granite4": Shape(
        "granitemoehybrid",
        (256, 512, 2, 4, 2),
        4096,
        tied=True,
        more={
            **GRANITE,
            "layer_types": ["linear_attention", "full_attention"],
            "shared_intermediate_size": 512,
            "mamba_n_heads": 8,
        },
    ),
    "granite4-h-1b": Shape(
        "granitemoehybrid",
        (1536, 4096, 40, 12, 4),
        100_352,
        tied=True,
        more={**GRANITE, "shared_intermediate_size": 4096, "mamba_n_heads": 48},
    ),
    "granite4-h-micro": Shape(
        "granitemoehybrid",
        (2048, 8192, 40, 32, 8),
        100_352,
        tied=True,
        more={**GRANITE, "shared_intermediate_size": 8192, "mamba_n_heads": 64},
    ),
    "tiny-moe": Shape(
        "qwen3_moe",
        (128, 256, 2, 4, 2),
        4096,
        tied=False,
        more={**QWEN_EXPERTS, "head_dim": 32, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2},
    ),
    "olmoe-1b-7b": Shape(
        "olmoe",
        (2048, 1024, 16, 16, 16),
        50_304,
        tied=False,
        more={"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
    ),
    # The layers of Qwen3-30B-A3B, 12 of 48: 8.1 of 30.5 billion weights.
    "qwen3-30b-a3b-12-layers": Shape("qwen3_moe", (2048, 6144, 12, 32, 4), 151_936, tied=False, more=QWEN_EXPERTS),
    "qwen3.5-2b": Shape("qwen3_5_text", (2048, 6144, 24, 8, 2), 248_320, tied=True, more=QWEN_LINEAR),
}


def config_of(name: str, longest: int = 8192) -> Any:
    """The transformers configuration of a shape."""
    from transformers import AutoConfig

    shape = SHAPES[name]
    sizes = dict(zip(NAMES, shape.sizes, strict=True))
    settings = {"vocab_size": shape.vocabulary, "tie_word_embeddings": shape.tied, "max_position_embeddings": longest}
    return AutoConfig.for_model(shape.family, **sizes, **settings, **shape.more)


def make_model(name: str, tokenizer: str, folder: Path, seed: int = 0) -> Path:
    """The folder of a bfloat16 model of that shape, created if it is not there."""
    if (folder / "tokenizer_config.json").is_file():  # the file that is saved last
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    own = AutoTokenizer.from_pretrained(tokenizer)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config_of(name), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    own.save_pretrained(folder)
    return folder


def run(overrides: list[str], folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """Run `tandem train` in `folder`; return its output and its training records."""
    command = [sys.executable, "-m", "tandem", "train", *overrides, f"run.dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return done.stdout, [record for record in records if record["split"] == "train"]
