"""Tiny random multimodal checkpoints of every supported family, with the embedded tokenizer and files of a processor."""

import json
from pathlib import Path
from typing import Any

import torch
from architectures import tiny_config
from models import SMALL, WINDOW
from safetensors import safe_open
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from tandem.model.files.tiny import tiny_model as embedded_model
from tandem.model.text_models import TEXT_MODELS

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "image_size": 32,
    "patch_size": 16,
}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**SLIDING, "query_pre_attn_scalar": 8},
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
    },
    "gemma4": {
        "text_config": {
            **SLIDING,
            "num_hidden_layers": 4,
            "layer_types": 2 * SLIDING["layer_types"],
            "num_kv_shared_layers": 2,
            "global_head_dim": 32,
            "vocab_size_per_layer_input": 2048,
            "hidden_size_per_layer_input": 8,
            "final_logit_softcapping": 3.0,
        },
        "vision_config": {**VISION, "position_embedding_size": 16},
        "audio_config": {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "output_proj_dims": 32,
            "subsampling_conv_channels": [8, 4],
        },
    },
    "qwen2_5_vl": {"text_config": MROPE, "vision_config": {**QWEN_VISION, "fullatt_block_indexes": [0]}},
    "qwen3_vl": {
        "text_config": {},
        "vision_config": {**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    },
    "qwen3_5": {"text_config": LINEAR, "vision_config": {**QWEN_VISION, "num_position_embeddings": 16}},
    "mistral3": {"text_config": {"model_type": "mistral", "sliding_window": WINDOW}, "vision_config": VISION},
    "llama4": {
        "text_config": {
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 48,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 512,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
        },
        "vision_config": {**VISION, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
    },
}
# The other types, with the configurations that the table of docs/architectures.md is made with.
OTHER_TYPES = [name for name in TEXT_MODELS if name not in FAMILIES]
PROCESSOR = {
    "preprocessor_config.json": '{"do_resize": true}',
    "processor_config.json": '{"image_seq_length": 4}',
    "video_preprocessor_config.json": '{"fps": 2}',
}


def multimodal_config(family: str, *, tied: bool = True, **changes: Any) -> Any:
    """`changes`: of the text model. `tied` and `changes` apply to FAMILIES only."""
    if family not in FAMILIES:
        return tiny_config(family)
    given = FAMILIES[family]
    own = {**given["text_config"], **changes}
    text = {**SMALL, "vocab_size": 2048, "eos_token_id": 2, "tie_word_embeddings": tied, **own}
    return CONFIG_MAPPING[family](**{**given, "text_config": text, "tie_word_embeddings": tied})


def multimodal_folder(
    folder: Path, family: str, *, tied: bool = True, as_in_model: bool = False, **changes: Any
) -> Path:
    """Save a checkpoint in bfloat16. `as_in_model`: with the names of weights in the model, not those of earlier checkpoints."""
    disable_progress_bar()
    config = multimodal_config(family, tied=tied, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder, save_original_format=not as_in_model)
    AutoTokenizer.from_pretrained(embedded_model()).save_pretrained(folder)
    for name, text in PROCESSOR.items():
        (folder / name).write_text(text)
    return folder


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor that the index of a folder, or its only weight file, holds."""
    index = folder / "model.safetensors.index.json"
    files = (
        sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    )
    tensors = {}
    for file in files:
        with safe_open(folder / file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    return tensors
