"""Tiny random models of real architectures, and random preferences for them."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from tandem.data.text.tokens import TokenizedPreference
from tandem.model.architecture import head_of
from tandem.model.attention.pack_attention import IMPLEMENTATION, AttentionKind
from tandem.model.files.tiny import tiny_model as embedded_model
from tandem.model.policy import Policy

VOCABULARY = 96

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 7  # shorter than most sequences in the tests

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "phi3": {},
    "gemma2": {
        "num_hidden_layers": 2,
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 8,
    },
    "gemma3_text": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 8,
    },
    "gpt_oss": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "cohere": {"logit_scale": 0.25},
}


def tiny_config(architecture: str, **changes: Any) -> Any:
    return AutoConfig.for_model(architecture, **{**SMALL, **ARCHITECTURES.get(architecture, {}), **changes})


def tiny_model(architecture: str, *, seed: int = 0, **changes: Any) -> Any:
    """A model with weights so large that every part of it affects the output."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(architecture, **changes), attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model.float()


def as_policy(model: Any, *, head_chunk: int = 8, packed: bool = True, attention: AttentionKind = "trees") -> Policy:
    model.set_attn_implementation(IMPLEMENTATION if packed else "eager")
    return Policy(model, packed=packed, attention=attention, head=head_of(model, chunk=head_chunk))


def random_preference(
    rng: np.random.Generator, *, num_completions: int = 2, max_prompt: int = 12, max_completion: int = 9
) -> TokenizedPreference:
    def ids(longest: int) -> np.ndarray:
        return rng.integers(3, VOCABULARY, rng.integers(1, longest + 1)).astype(np.int32)

    completions = tuple(ids(max_completion) for _ in range(num_completions))
    pairs = tuple((i, j) for i in range(num_completions) for j in range(i + 1, num_completions))
    return TokenizedPreference(ids(max_prompt), completions, pairs, "test:1")


def plain_token_logps(model: Any, preference: TokenizedPreference) -> list[torch.Tensor]:
    """Log-probabilities of each sequence alone, by the model's own eager forward and a full log-softmax, with gradients."""
    model.set_attn_implementation("eager")
    logps = []
    for completion in preference.completions:
        ids = torch.from_numpy(np.concatenate([preference.prompt, completion]).astype(np.int64))[None].to(model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(preference.prompt) - 1 : -1]
        targets = ids[0, len(preference.prompt) :, None]
        logps.append(logits.log_softmax(-1).gather(-1, targets)[:, 0])
    return logps


def model_folder(folder: Path, architecture: str, **changes: Any) -> Path:
    """Save a random model together with the embedded tokenizer."""
    disable_progress_bar()
    config = tiny_config(architecture, vocab_size=2048, eos_token_id=2, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(embedded_model()).save_pretrained(folder)
    return folder


def small_model() -> Path:
    """The model that most test runs train, created once. Its weights are so large that every visible token affects the output,
    as in the embedded model."""
    folder = Path(os.environ["TANDEM_CACHE"]) / "small"
    if not folder.is_dir():
        model_folder(folder, "llama", initializer_range=0.05, tie_word_embeddings=True)
    return folder


# On a GPU, kernels are tested with the sizes of the embedded model.
ON_A_GPU = torch.cuda.is_available()
MODEL = embedded_model() if ON_A_GPU else small_model()


def bfloat16_start(folder: Path) -> Path:
    """The model of short runs with weights that are exact in bfloat16, like those of published models."""
    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder
