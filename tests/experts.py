"""Settings of tiny mixtures of experts, by model type."""

from typing import Any

GROUPED: dict[str, Any] = {
    "n_group": 2,
    "topk_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
}
# Multi-head latent attention, with heads of different sizes for queries and values.
LATENT: dict[str, Any] = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "gpt_oss": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    # The margin within which routers of PhiMoE compare scores; it has an effect in evaluation mode.
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.3, "head_dim": 8},
    "deepseek_v3": {
        **GROUPED,
        **LATENT,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
    "glm4_moe": {**GROUPED, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
}
