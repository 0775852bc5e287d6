"""Tiny random models with recurrent layers, of every type that can be packed, computed in packs and for each sequence alone."""

from typing import Any

import numpy as np
import pytest
import torch
from models import VOCABULARY, plain_token_logps, tiny_model
from transformers import __version__
from transformers.activations import ACT2FN
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tandem.data.text.tokens import TokenizedPreference
from tandem.model.recurrent.families import FIRST_TRANSFORMERS
from tandem.packing.layout import join, lay_out

INSTALLED = tuple(map(int, __version__.split(".")[:2]))
CURRENT = (5, 23)  # the transformers that has all types
# Model types with experts whose routers report their logits only in the current transformers.
WITHOUT_LOGITS = ("granitemoe", "granitemoe_swa", "granitemoeshared") if INSTALLED < CURRENT else ()
WEIGHTS = torch.randn(1000, generator=torch.Generator().manual_seed(1))  # of log-probabilities in a loss

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
KIMI = {
    **EXPERTS,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_local_experts": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
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

SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**LINEAR, **EXPERTS, "decoder_sparse_step": 1},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": {**LINEAR, **EXPERTS},
    "olmo_hybrid": {**LINEAR, "linear_num_key_heads": 4},
    "kimi_linear": {**KIMI, "linear_num_heads": 4, "linear_head_dim": 8, "n_shared_experts": 1},
    "bailing_hybrid": {**KIMI, "num_shared_experts": 1, "q_lora_rank": None, "rms_norm_eps": 1e-2},
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


def _is_supported(name: str) -> bool:
    """Whether the installed transformers has the type, and passes packs on to its layers."""
    first = tuple(map(int, FIRST_TRANSFORMERS.get(name, "5.0").split(".")))
    return name in CONFIG_MAPPING_NAMES and first <= INSTALLED


HYBRIDS = {name: settings for name, settings in SETTINGS.items() if _is_supported(name)}
# Settings that a type derives from others and does not accept.
DERIVED = {"bamba": ["layer_types"], "falcon_h1": ["layer_types"]}


def hybrid_settings(architecture: str) -> dict[str, Any]:
    return {name: one for name, one in HYBRIDS[architecture].items() if name not in DERIVED.get(architecture, ())}


def tiny_hybrid(architecture: str, **changes: Any) -> Any:
    """A model whose states decay slowly, so that the beginning of a sequence affects its end."""
    model = tiny_model(architecture, **{**hybrid_settings(architecture), **changes}).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.linspace(-3, -1, parameter.numel()).view_as(parameter))
    return model


def preference(rng, prompt, *completions):
    def ids(length):
        return rng.integers(3, VOCABULARY, length).astype(np.int32)

    return TokenizedPreference(ids(prompt), tuple(ids(length) for length in completions), ((0, 1),), "test:1")


def two_rows():
    """Prompts shorter than a convolution and longer than a chunk of 64 tokens, answers of one token, 2 to 4 completions."""
    rng = np.random.default_rng(0)
    first = [preference(rng, 1, 1, 5), preference(rng, 70, 66, 1, 3), preference(rng, 3, 2, 2, 9, 4)]
    return first, [preference(rng, 10, 30, 1), preference(rng, 2, 1, 2)]


def packed_rows(rows, arrangement="shared", length=256):
    return join([lay_out(range(len(row)), row, length=length, arrangement=arrangement) for row in rows])


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def computed(model, policy, pack):
    model.zero_grad()
    inputs = policy.inputs(pack, model.device)
    logps = policy(inputs)[: inputs.num_scored]
    (logps * WEIGHTS[: len(logps)].to(logps)).sum().backward()
    return logps.detach(), gradients(model)


def alone(model, rows):
    """Each sequence alone, by the model's own eager forward."""
    model.zero_grad()
    logps = torch.cat([one for row in rows for preference in row for one in plain_token_logps(model, preference)])
    (logps * WEIGHTS[: len(logps)].to(logps)).sum().backward()
    return logps.detach(), gradients(model)


def logp_difference(found, wanted):
    return float((found[0] - wanted[0]).abs().max())


def gradient_difference(found, wanted):
    assert found[1].keys() == wanted[1].keys()
    return max(float((found[1][name] - one).norm() / (one.norm() + 1e-6)) for name, one in wanted[1].items())


def convolution_by_torch(x, weight, bias=None, *, activation=None):
    """The signature of flash-linear-attention's convolution: [batch, length, channels]."""
    padded = torch.nn.functional.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
    out = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=weight.shape[0]).transpose(1, 2)
    return (out if activation is None else ACT2FN[activation](out)), None


def assert_same_training(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Compare the training records of two runs whose rounding differs: the losses move, and they and the gradients agree.

    The gradient of the first step is of the same weights. The losses may differ by a fifth of how far they moved.
    """
    losses = [[line["loss"] for line in lines] for lines in (found, wanted)]
    moved = max(abs(loss - losses[1][0]) for loss in losses[1])
    assert moved > 0.01, f"the losses hardly move, so comparing them says nothing: {losses[1]}"
    assert losses[0] == pytest.approx(losses[1], abs=0.2 * moved)
    assert found[0]["grad_norm"] == pytest.approx(wanted[0]["grad_norm"], rel=0.05)
    assert [line["grad_norm"] for line in found] == pytest.approx([line["grad_norm"] for line in wanted], rel=0.2)
