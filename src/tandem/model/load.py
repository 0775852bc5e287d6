"""Checks a ModelSource and loads its weights to their device, as a Policy."""

from collections.abc import Iterable
from typing import Any

import torch

from tandem.config.sections.policy import Policy as PolicyConfig
from tandem.errors import ConfigError, MachineError, one_line
from tandem.model.attention.pack_attention import IMPLEMENTATION, AttentionKind
from tandem.model.checks.trial import check_forward, is_out_of_memory
from tandem.model.files.build_limits import within_limits
from tandem.model.files.source import ModelSource, describe
from tandem.model.policy import Policy, auto_head_chunk

# A setting whose name contains one of these adds randomness in training mode.
RANDOM_SETTINGS = ("dropout", "pdrop", "layerdrop", "jitter")


def check_packable(source: ModelSource, policy: PolicyConfig) -> None:
    """Refuse a model that is not causal, or that cannot be packed because a mask does not separate its sequences.

    Called before any weights load.
    """
    model_class = _model_class(source)
    _ = source.dtype  # raises if it is not a floating-point dtype
    _refuse_row_dependent_positions(source, policy)
    if policy.packing.mode == "none":
        return
    config = source.config.get_text_config()
    recurrent = {
        kind for kind in getattr(config, "layer_types", None) or [] if "attention" not in kind or "linear" in kind
    }
    if recurrent or getattr(model_class, "_is_stateful", False):
        kinds = ", ".join(sorted(recurrent)) or config.model_type
        raise ConfigError(
            f"{source.key} = {source.name}: its recurrent layers ({kinds}) carry state along a row, so packed "
            "sequences would leak into each other. Train it unpacked: policy.packing.mode=none."
        )
    if not model_class._can_set_attn_implementation():
        raise _fixed_attention_error(source)
    if getattr(config, "index_topk", None):
        raise ConfigError(
            f"{source.key} = {source.name}: its attention selects the tokens that it attends to (index_topk), which packing "
            "does not support. Train it unpacked: policy.packing.mode=none."
        )
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk and policy.max_total_sequence_length > chunk:
        raise ConfigError(
            f"{source.key} = {source.name}: its attention works in chunks of {chunk} tokens, which packing does not support. Set "
            f"policy.max_total_sequence_length={chunk} or less, or policy.packing.mode=none."
        )


def _refuse_row_dependent_positions(source: ModelSource, policy: PolicyConfig) -> None:
    """Refuse RoPE scaling that depends on the longest position in a batch, packed or not: one sequence would change another."""
    config = source.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    model_limit = getattr(config, "max_position_embeddings", None)
    for kind in (
        rope,
        *(kind for kind in rope.values() if isinstance(kind, dict)),
    ):  # some models have one entry per type of layer
        # The scaling of longrope changes at the first of these limits, that of dynamic at the second.
        original = min((one for one in (kind.get("original_max_position_embeddings"), model_limit) if one), default=0)
        if kind.get("rope_type") in ("dynamic", "longrope") and policy.max_total_sequence_length > original:
            raise ConfigError(
                f"{source.key} = {source.name}: beyond {original} tokens its {kind['rope_type']} position scaling depends on the "
                "longest sequence computed at the same time, so training would not be exact. Set "
                f"policy.max_total_sequence_length={original} or less."
            )


def load_policy(
    source: ModelSource,
    policy: PolicyConfig,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    quantization: Any = None,
) -> Policy:
    """Load a model directly to its device. Trained weights are float32; frozen ones may have a smaller dtype.

    The model is in evaluation mode: training sees what the exported model computes, without dropout, noise or sampled experts.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    packed = policy.packing.mode != "none"
    try:
        with within_limits(source):
            answer: Any = AutoModelForCausalLM.from_pretrained(
                str(source.folder),
                output_loading_info=True,
                config=source.config,
                dtype=dtype,
                quantization_config=quantization,
                device_map=device,
                attn_implementation=IMPLEMENTATION if packed else _plain_attention(source),
                trust_remote_code=False,
                use_safetensors=True,
            )
    except ConfigError:
        raise
    except SafetensorError as error:
        raise ConfigError(
            f"{source.key} = {source.name}: its weights are not readable as safetensors ({one_line(error)}). "
            "Is the download complete?"
        ) from None
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if isinstance(error, KeyError) and error.args == (
            IMPLEMENTATION,
        ):  # the model looks attention classes up by name
            raise _fixed_attention_error(source) from None
        raise ConfigError(
            f"{source.key} = {source.name}: transformers cannot load it ({describe(error)}). Choose another model, or "
            "download it again."
        ) from error
    model, found = answer
    if quantization is None and source.key == "policy.model_name" and getattr(model, "is_quantized", False):
        raise ConfigError(
            f"{source.key} = {source.name}: its weights are quantised ({_quantization_method(source)}), so only its embeddings "
            "and norms would be trained. Give the model that it was quantised from."
        )
    _refuse_missing_weights(source, model, found["missing_keys"])
    chunk = policy.head_chunk_tokens
    if chunk == "auto":
        chunk = auto_head_chunk(source.vocabulary, device)
    loaded = Policy(model.eval(), packed=packed, attention=attention_kind(policy, device), head_chunk=chunk)
    check_forward(loaded, source, device, longest=policy.max_total_sequence_length)
    return loaded


def _refuse_missing_weights(source: ModelSource, model: Any, missing: Iterable[str]) -> None:
    """Refuse a model with weights that are in no file, such as a classifier's head: transformers would make them random."""
    parameters = {name for name, _ in model.named_parameters()}
    names = sorted(parameters.intersection(missing))
    if not names:
        return
    raise ConfigError(
        f"{source.key} = {source.name}: {len(names)} of its {len(parameters)} weights, such as {names[0]}, are in none of its "
        "files and would be random. Is it a causal language model, saved completely, with the weight names that transformers "
        "uses?"
    )


def _quantization_method(source: ModelSource) -> str:
    """The quantisation method named in a model's configuration."""
    given = source.config.quantization_config
    return str(given.get("quant_method") if isinstance(given, dict) else given.quant_method)


def empty_model(source: ModelSource) -> Any:
    """Build the model without weights, to inspect its layers."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"), within_limits(source):
            return AutoModelForCausalLM.from_config(source.config, attn_implementation="eager")
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{source.key} = {source.name}: transformers cannot build a {source.config.model_type} model from this "
            f"configuration ({describe(error)}). Choose another model."
        ) from None


def attention_kind(policy: PolicyConfig, device: torch.device) -> AttentionKind:
    """Choose how attention inside packs is computed."""
    if policy.attention == "flex" and device.type != "cuda":
        raise MachineError(
            "policy.attention = flex: FlexAttention has no backward pass on the CPU. Use policy.attention=auto or sdpa."
        )
    if policy.attention == "auto" and device.type == "cuda":
        return "flex"
    if policy.attention in ("auto", "sdpa"):
        # Trees differ in size from row to row: each size would be compiled separately, and a GPU would need too many launches.
        return "sdpa" if device.type == "cuda" or policy.compile is True else "trees"
    return policy.attention


def describe_attention(policy: PolicyConfig, device: torch.device) -> str:
    if policy.packing.mode == "none":
        return "the model's own"
    return {
        "flex": "FlexAttention",
        "varlen": "flash kernels" if device.type == "cuda" else "a sequence at a time",
        "sdpa": "with dense masks",
        "trees": "a preference at a time",
    }[attention_kind(policy, device)]


def check_varlen(source: ModelSource, policy: PolicyConfig, precision: str, device: torch.device) -> None:
    """Refuse settings and models that the kernels of policy.attention=varlen do not support."""
    if policy.attention != "varlen":
        return
    if device.type != "cuda" and policy.compile is True:
        raise MachineError(
            "policy.attention = varlen: without a GPU, layers with it cannot be compiled. Leave out policy.compile."
        )
    if device.type == "cuda" and precision == "float32":
        raise ConfigError("policy.attention = varlen: its kernels compute in bfloat16. Use policy.attention=flex.")
    config = source.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None) or config.model_type == "gpt_oss":
        raise ConfigError(
            f"policy.attention = varlen: the attention of {source.name} caps its scores or has sinks, which these kernels do "
            "not support. Use policy.attention=auto."
        )


def has_experts(config: Any) -> bool:
    text = config.get_text_config()
    return any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def dropouts(config: Any) -> dict[str, float]:
    """The nonzero settings of a model that would add randomness in training mode."""
    values = config.get_text_config().to_dict()
    if config.get_text_config().model_type == "phimoe":
        values.pop("router_jitter_noise")  # not randomness: a margin that its router uses in evaluation too
    return {
        k: v for k, v in values.items() if any(part in k for part in RANDOM_SETTINGS) and isinstance(v, float) and v > 0
    }


def _plain_attention(source: ModelSource) -> str:
    # transformers' SDPA path silently ignores a soft-cap of attention scores.
    capped = getattr(source.config.get_text_config(), "attn_logit_softcapping", None)
    return "eager" if capped or not _model_class(source)._supports_sdpa else "sdpa"


def _fixed_attention_error(source: ModelSource) -> ConfigError:
    return ConfigError(
        f"{source.key} = {source.name}: the attention of {_model_class(source).__name__} in transformers cannot be replaced, so "
        "packed sequences would attend to each other. Train it unpacked: policy.packing.mode=none."
    )


def _model_class(source: ModelSource) -> Any:
    """Return the class that transformers uses for a causal language model with this configuration."""
    from transformers import AutoModelForCausalLM

    try:
        text = source.config.get_text_config()
        if any(getattr(text, name, None) is None for name in ("hidden_size", "num_hidden_layers", "vocab_size")):
            raise KeyError
        return AutoModelForCausalLM._model_mapping[type(source.config)]
    except (KeyError, ValueError):  # ValueError: several language models in one
        raise ConfigError(
            f"{source.key} = {source.name}: model type {source.config.model_type!r} is not a causal language model in "
            "transformers. Choose a model that generates text."
        ) from None
