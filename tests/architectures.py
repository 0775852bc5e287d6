"""Trains a tiny random model of every causal language model type in transformers for one step, packed and unpacked.

PYTHONPATH=tests python -m architectures              writes the table of docs/architectures.md
PYTHONPATH=tests python -m architectures llama mpt    prints the outcome of these types
"""

import json
import os
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

os.environ.setdefault("TANDEM_CACHE", tempfile.mkdtemp(prefix="tandem-tests-"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from models import embedded_model
from running import metrics_of, short_run
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from tandem.errors import TandemError
from tandem.model.text_models import TEXT_MODELS
from tandem.training.start import references

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
HEADER = "| model type | packed | unpacked |\n|---|---|---|\n"

VOCABULARY = 2048  # of the embedded tokenizer
NUM_LAYERS = 4
WINDOW = 7

SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ["vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size", "decoder_vocab_size"], VOCABULARY
    ),
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "embedding_size"], 32),
    **dict.fromkeys(["word_embed_proj_dim", "input_embedding_size", "output_embedding_size", "lru_width"], 32),
    **dict.fromkeys(["attention_hidden_size", "hidden_size_per_layer_input", "hidden_size_global"], 32),
    **dict.fromkeys(["intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim", "ffn_hidden_size"], 48),
    **dict.fromkeys(["dim_ff", "dff", "d_inner", "n_inner", "feed_forward_size", "intermediate_size_mlp"], 48),
    **dict.fromkeys(["dense_intermediate_size", "prompt_mid_dim"], 48),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"], 16),
    **dict.fromkeys(["shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"], 16),
    **dict.fromkeys(["shared_intermediate_size"], 16),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"], NUM_LAYERS),
    **dict.fromkeys(["encoder_layers", "num_encoder_layers", "num_decoder_layers", "num_blocks"], NUM_LAYERS),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"], 4),
    **dict.fromkeys(["decoder_attention_heads", "encoder_attention_heads", "swa_num_attention_heads"], 4),
    **dict.fromkeys(["num_encoder_attention_heads", "num_decoder_attention_heads", "index_n_heads"], 4),
    **dict.fromkeys(
        ["num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_global_key_value_heads"], 2
    ),
    **dict.fromkeys(["head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "index_head_dim"], 8),
    **dict.fromkeys(["dim_head", "d_head", "attention_head_size", "kv_channels", "rotary_dim", "swa_head_dim"], 8),
    **dict.fromkeys(["global_head_dim", "d_rel", "laurel_rank"], 8),
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank", "o_lora_rank", "adapter_rank", "gated_norm_rank"], 16),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"], 512),
    **dict.fromkeys(["max_target_positions", "max_source_positions", "rel_extent", "model_max_length"], 512),
    **dict.fromkeys(["sliding_window", "window_size", "sliding_window_size", "local_attention"], WINDOW),
    "attention_window_size": WINDOW,
    # Longer than the sequences. With longer sequences, chunked attention is refused in packs; and an indexer would have to
    # choose between equal scores, so that its selection would depend on the length of the row.
    **dict.fromkeys(["attention_chunk_size", "index_topk"], 512),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"], 2),
    **dict.fromkeys(["n_group", "num_expert_group", "topk_group"], 1),
    **dict.fromkeys(["n_shared_experts", "num_shared_experts", "moe_num_shared_experts"], 1),
    **dict.fromkeys(["first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"], 1),
    **dict.fromkeys(["linear_num_key_heads", "linear_num_value_heads", "linear_num_heads", "mamba_num_heads"], 4),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "mamba_head_dim"], 8),
    **dict.fromkeys(["mamba_d_state", "state_size", "ssm_state_size"], 8),
    **dict.fromkeys(["mamba_n_groups", "mamba_ngroups", "n_groups"], 1),
    **dict.fromkeys(["mamba_chunk_size", "chunk_size"], 16),
    "num_kv_shared_layers": 1,
    "query_pre_attn_scalar": 8,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 3.0,
    "logit_scale": 0.25,
    "logits_scaling": 3.0,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
NO_PER_LAYER_INPUT = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
LINEAR_AND_FULL = {"layer_types": ["linear_attention", "full_attention"] * 2}

MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}

FULL_MROPE = {"text_config": {"rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}}}

# Further settings that a type needs, so that its parts fit together and every kind of layer occurs.
CHANGES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": LINEAR_AND_FULL,
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"clip_qkv": 8.0, "rope_theta": 10000.0, "kv_n_heads": 2, "attn_pdrop": 0.1}},
    "diffllama": {"attention_dropout": 0.0},  # cannot be built with dropout
    "dots3_note": {
        "text_config": {"head_dim": 16, "per_layer_config": {2: {"kv_lora_rank": 8}, 3: {"kv_lora_rank": 8}}},
        "vision_config": {"num_hidden_layers": 42, "adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots3_note_text": {"head_dim": 16, "per_layer_config": {2: {"kv_lora_rank": 8}, 3: {"kv_lora_rank": 8}}},
    "gemma3": {"text_config": SLIDING},
    "gemma3_text": SLIDING,
    "gemma3n": {"text_config": SLIDING},
    "gemma3n_text": SLIDING,
    "gemma4": {"text_config": SLIDING},
    "gemma4_assistant": {"text_config": {**SLIDING, **NO_PER_LAYER_INPUT, "num_kv_shared_layers": 4}},
    "gemma4_text": SLIDING,
    "gemma4_unified": {"text_config": SLIDING},
    "gemma4_unified_assistant": {"text_config": {**SLIDING, **NO_PER_LAYER_INPUT}},
    "gemma4_unified_text": SLIDING,
    "glm46v": FULL_MROPE,
    "glm4v": FULL_MROPE,
    "glm4v_moe": FULL_MROPE,
    "glm_ocr": FULL_MROPE,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"] * 2},
    "hunyuan_vl": {"text_config": {"rope_parameters": MROPE}},
    "inkling2_text": {"layer_types": ["hybrid_sliding", "hybrid"] * 2},
    "inkling_text": {"layer_types": ["hybrid_sliding", "hybrid"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": LINEAR_AND_FULL,
    "kolibri1": SLIDING,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_vl": {"text_config": {"layer_types": ["conv", "full_attention"] * 2}},
    "lfm3_vl": {"text_config": {"layer_types": ["conv", "full_attention", "sliding_attention", "conv"]}},
    "lfm3": {"layer_types": ["conv", "full_attention", "sliding_attention", "conv"]},
    "mamba2": {"num_heads": 8},
    "paddleocr_vl": {"text_config": {"rope_parameters": MROPE}},
    "phimoe": {"sliding_window": None},  # refused in packs with a window, which only its mask implements
    "qwen2_5_vl": {"text_config": {"rope_parameters": MROPE}},
    "qwen2_5_omni_thinker": {"text_config": {"rope_parameters": MROPE}},
    "qwen2_vl": {"text_config": {"rope_parameters": MROPE}},
    "qwen3_vl_moe": {"text_config": {"sliding_window": None}},  # its layers have no windows
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "reformer": {"is_decoder": True, "axial_pos_shape": [16, 32], "axial_pos_embds_dim": [8, 24]},
    "roc_bert": {
        "shape_vocab_size": 64,
        "shape_embed_dim": 16,
        "pronunciation_vocab_size": 64,
        "pronunciation_embed_dim": 16,
    },
    "zamba": {"num_hidden_layers": 8, "attention_hidden_size": 64},
    "zamba2": {"attention_hidden_size": 64, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}

# Encoders by default, which is_decoder turns into decoders.
DECODERS = [
    "bert",
    "bert-generation",
    "big_bird",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "megatron-bert",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
]
AS_DECODER = " with is_decoder"
NOT_CAUSAL = ["t5"]
# The second mapping has the first, and types that read speech.
MULTIMODAL = {*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
CAUSAL = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
NAMES = sorted({*CAUSAL, *(name + AS_DECODER for name in DECODERS), *MULTIMODAL, *TEXT_MODELS, *NOT_CAUSAL})
# Multimodal types that are decided by their name alone: no configuration is needed, and no model is built.
BY_NAME = MULTIMODAL - CAUSAL - TEXT_MODELS.keys()

COMPOSED = {"vision-encoder-decoder": {"encoder": {"model_type": "vit"}, "decoder": {"model_type": "gpt2"}}}

# Settings that add randomness in training mode. All are enabled, to test that they have no effect.
RANDOM_SETTINGS = {"dropout": 0.1, "pdrop": 0.1, "layerdrop": 0.1, "jitter": 0.01}

Mode = Literal["batch", "none"]  # of policy.packing

# In nats per token. A leak, a lost window or a wrong scale of the logits makes a difference above 1e-3.
EXACT = 1e-5

# Part of the message with which a type is refused -> the reason in the table.
REASONS = {
    "attends to prompts in both directions": "sees later tokens",
    "is an encoder, in which": "sees later tokens",
    "is multimodal": "unknown multimodal type",
    "is not a causal language model in transformers": "not a causal model",
    "not a causal language model: a later token": "sees later tokens",
    "its recurrent layers": "recurrent layers",
    "cannot be replaced": "attention cannot be replaced",
    "do not pass the pack's mask on": "mask not passed on",
    "uses its own mask": "own mask",
    "selects the tokens that it attends to": "selects tokens",
    "layers pass their window": "window only in its mask",
    "transformers cannot build": "not built by transformers",
    "transformers cannot load": "not loaded by transformers",
    "a few tokens through": "forward fails",
    "attention layers use the pack's mask": "other calls of attention",
    "differ from the model's plain forward": "not exact",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Either exact, with the largest mean difference per token from the plain forward, or refused, with the message."""

    difference: float | None = None
    message: str = ""

    def in_words(self) -> str:
        """The entry in the table. AssertionError if the model was trained without being exact, or the message is malformed."""
        if self.difference is not None:
            assert self.difference <= EXACT, f"trained although it is not exact: {self.difference:.2g} nats a token"
            return "exact"
        assert "\n" not in self.message and self.message.endswith("."), self.message
        return f"refused: {next(reason for part, reason in REASONS.items() if part in self.message)}"


def tiny_config(name: str) -> Any:
    """A tiny configuration of a model type, or of one of DECODERS as a decoder."""
    model_type = name.removesuffix(AS_DECODER)
    config_class = CONFIG_MAPPING[model_type]
    default = config_class(**({"text_config": NO_PER_LAYER_INPUT} if model_type == "gemma4_assistant" else {}))
    given = _tiny_settings(default.to_dict())
    for name in default.sub_configs:
        if (part := getattr(default, name, None)) is not None and not isinstance(part, dict):
            given[name] = _tiny_settings(part.to_dict())
    text = given.get("text_config", given)
    if "kv_lora_rank" in text:
        text["num_key_value_heads"] = text["num_attention_heads"]
    for name, value in CHANGES.get(model_type, {}).items():
        given[name] = {**given.get(name, {}), **value} if isinstance(value, dict) else value
    if name.endswith(AS_DECODER):
        given["is_decoder"] = True
    return config_class(**given)


def _tiny_settings(default: dict[str, Any]) -> dict[str, Any]:
    # Not all classes of a type may support a number that is None by default (a soft-cap, a scale).
    sized = {
        name: SIZES[name]
        for name, value in default.items()
        if name in SIZES and not (value is None and isinstance(SIZES[name], float))
    }
    for name, value in default.items():
        for part, amount in RANDOM_SETTINGS.items():
            if part in name and (isinstance(value, float) or value is None):
                sized[name] = amount
    return sized


def make_model(folder: Path, model_type: str) -> None:
    """Save a model with weights so large that every visible token changes the output.

    Of a type that transformers cannot build, save only the configuration; of one of BY_NAME, only its name.
    """
    folder.mkdir(exist_ok=True)
    for file in embedded_model().glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    if model_type in BY_NAME:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type, **COMPOSED.get(model_type, {})}))
        save_file({"none": torch.zeros(1)}, folder / "model.safetensors")
        return
    config = tiny_config(model_type)
    torch.manual_seed(0)
    try:
        auto = AutoModelForImageTextToText if model_type in TEXT_MODELS else AutoModelForCausalLM
        model = auto.from_config(config)
    except Exception:
        save_file({"none": torch.zeros(1)}, folder / "model.safetensors")
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.15 * torch.randn_like(parameter))
        model.save_pretrained(folder)
    config.save_pretrained(folder)  # a multimodal model saves only the configuration of its text part


def _pairs(folder: Path) -> Path:
    """Write a few pairs of different lengths, all longer than WINDOW."""
    words = str.split("the quick brown fox jumps over the lazy dog and runs back home before the rain comes down")
    rows = [
        {
            "prompt": " ".join(words[: 6 + 3 * i]),
            "chosen": " ".join(words[i : 9 + i]),
            "rejected": " ".join(words[-7 - i :]),
        }
        for i in range(4)
    ]
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def outcome(folder: Path, model: Path, mode: Mode) -> Outcome:
    """Train for one step, as a user would."""
    audits: list[Any] = []

    def audited(*given: Any, **named: Any) -> Any:
        audits.append(audit(*given, **named))
        return audits[-1]

    audit = references.audit
    settings = [
        f"policy.model_name={model}",
        f"policy.packing.mode={mode}",
        "dpo.max_num_steps=1",
        "policy.train_global_batch_size=4",
        "policy.max_total_sequence_length=256",
        "checkpointing.enabled=false",
        f"data.train.data_path={_pairs(folder)}",
        f"reference.cache_dir={folder / mode / 'reference'}",
    ]
    with mock.patch.object(references, "audit", audited):
        try:
            run = short_run(folder / mode, *settings)
        except TandemError as error:
            return Outcome(message=str(error))
    (line,) = metrics_of(run)
    assert abs(line["loss"] - 0.693147) < 1e-5, line
    return Outcome(difference=audits[-1].plain_difference)


def outcomes(name: str) -> tuple[str, str]:
    """The entries in the table, packed and unpacked."""
    disable_progress_bar()
    set_verbosity_error()
    with tempfile.TemporaryDirectory() as temporary, warnings.catch_warnings(action="ignore"):
        folder = Path(temporary)
        make_model(folder / "model", name)
        packed, unpacked = (outcome(folder, folder / "model", mode).in_words() for mode in ("batch", "none"))
    return packed, unpacked


def table() -> dict[str, tuple[str, str]]:
    """The table of the page, by model type."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {name.replace("`", ""): (packed, unpacked) for name, packed, unpacked in cells}


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    found = {}
    for name in names or NAMES:
        found[name] = outcomes(name)
        print(f"{name}: packed {found[name][0]}, unpacked {found[name][1]}", file=sys.stderr, flush=True)
    if names:
        return
    rows = "".join(f"| `{name}` | {packed} | {unpacked} |\n" for name, (packed, unpacked) in found.items())
    before = PAGE.read_text(encoding="utf-8").split(HEADER)[0]
    PAGE.write_text(f"{before}{HEADER}{rows}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
