"""Tiny random models with recurrent layers, of every type that can be packed."""

from typing import Any

import torch
from models import tiny_model

LINEAR = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MAMBA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}
CONVOLUTIONS = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}

HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**LINEAR, **EXPERTS, "decoder_sparse_step": 1},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": {**LINEAR, **EXPERTS},
    "olmo_hybrid": {**LINEAR, "linear_num_key_heads": 4},
    "kimi_linear": {
        **LINEAR,
        **EXPERTS,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_local_experts": 4,
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        "conv_kernel": 4,
        "expand": 2,
        "chunk_size": 32,
    },
    "granitemoehybrid": {**MAMBA, "num_local_experts": 0, "shared_intermediate_size": 48, "logits_scaling": 3.0},
    "falcon_h1": {**MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": 64, "lm_head_multiplier": 0.7},
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 8,
        "chunk_size": 32,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "head_dim": 16,
        "num_key_value_heads": 4,
    },
    "lfm2": {**CONVOLUTIONS, "block_multiple_of": 16},
    "lfm2_moe": {**CONVOLUTIONS, **EXPERTS, "num_dense_layers": 1},
    "lfm3": CONVOLUTIONS,
}
# Settings that a type derives from others and does not accept.
DERIVED = {"bamba": ["layer_types"], "falcon_h1": ["layer_types"]}


def hybrid_settings(architecture: str) -> dict[str, Any]:
    return {name: one for name, one in HYBRIDS[architecture].items() if name not in DERIVED.get(architecture, ())}


def tiny_hybrid(architecture: str, **changes: Any) -> Any:
    """A model whose states decay slowly, so that the beginning of a sequence affects its end."""
    model = tiny_model(architecture, **hybrid_settings(architecture), **changes).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.linspace(-3, -1, parameter.numel()).view_as(parameter))
    return model
