"""LoRA adapters created with peft, and models with them."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

TRAINED = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}


def plain_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def trained_adapter(base: Path, folder: Path, *, seed: int = 1, **settings: Any) -> Path:
    """Save an adapter with peft, with both of its weights far from 0, and return its folder."""
    torch.manual_seed(seed)
    model = get_peft_model(plain_model(base), LoraConfig(**{"task_type": "CAUSAL_LM", **TRAINED, **settings}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "trainable_tokens" in name:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def with_adapter(base: Path, folder: Path) -> Any:
    """Load the model with the adapter, using peft."""
    return PeftModel.from_pretrained(plain_model(base), folder)
