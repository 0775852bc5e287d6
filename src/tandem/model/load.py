"""A ModelSource in; the Policy with weights on their device out."""

from collections.abc import Iterable
from typing import Any

import torch

from tandem.config.sections.policy import Policy as PolicyConfig
from tandem.errors import ConfigError, MachineError
from tandem.model.attention.pack_attention import IMPLEMENTATION, AttentionKind
from tandem.model.checks.trial import check_forward, is_out_of_memory
from tandem.model.files.build_limits import within_limits
from tandem.model.files.source import ModelSource, described, one_line
from tandem.model.policy import Policy, auto_head_chunk

# Parts of the names of settings that add randomness in training mode.
RANDOM = ("dropout", "pdrop", "layerdrop", "jitter")


def check_packable(source: ModelSource, policy: PolicyConfig) -> None:
    """Refuse, before any weights load, what is not a causal model, and packing where a mask cannot keep sequences apart."""
    model_class = _model_class(source)
    _ = source.dtype  # refused if it is none
    _refuse_row_dependent_positions(source, policy)
    if policy.packing.mode == "none":
        return
    config = source.config.get_text_config()
    mixing = {
        kind for kind in getattr(config, "layer_types", None) or [] if "attention" not in kind or "linear" in kind
    }
    if mixing or getattr(model_class, "_is_stateful", False):
        kinds = ", ".join(sorted(mixing)) or config.model_type
        raise ConfigError(
            f"{source.key} = {source.name}: its recurrent layers ({kinds}) carry state along a row, so packed "
            "sequences would leak into each other. Train it unpacked: policy.packing.mode=none."
        )
    if not model_class._can_set_attn_implementation():
        raise _attention_is_fixed(source)
    if getattr(config, "index_topk", None):
        raise ConfigError(
            f"{source.key} = {source.name}: its attention selects the tokens that it sees (index_topk), which packs cannot pass "
            "on to it. Train it unpacked: policy.packing.mode=none."
        )
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk and policy.max_total_sequence_length > chunk:
        raise ConfigError(
            f"{source.key} = {source.name}: its attention works in chunks of {chunk} tokens, which packs do not have. Set "
            f"policy.max_total_sequence_length={chunk} or less, or policy.packing.mode=none."
        )


def _refuse_row_dependent_positions(source: ModelSource, policy: PolicyConfig) -> None:
    """Some RoPE scalings are chosen by the longest position in a batch of rows, packed or not: one sequence changes another."""
    config = source.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    of_model = getattr(config, "max_position_embeddings", None)
    for kind in (
        rope,
        *(kind for kind in rope.values() if isinstance(kind, dict)),
    ):  # one for each type of layer, in some
        # Longrope changes at the one number, dynamic at the other.
        original = min((one for one in (kind.get("original_max_position_embeddings"), of_model) if one), default=0)
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
    """The model, loaded straight to its device. What is trained is float32; what is frozen may be less.

    In evaluation mode: what is trained is what the exported model computes, without dropout, noise or sampled experts.
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
            "Is the download whole?"
        ) from None
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if isinstance(error, KeyError) and error.args == (IMPLEMENTATION,):  # a table of classes by their names
            raise _attention_is_fixed(source) from None
        raise ConfigError(
            f"{source.key} = {source.name}: transformers cannot load it ({described(error)}). Choose another model, or "
            "download it again."
        ) from error
    model, found = answer
    if quantization is None and source.key == "policy.model_name" and getattr(model, "is_quantized", False):
        raise ConfigError(
            f"{source.key} = {source.name}: its weights are quantised ({_method(source)}), and quantised weights are not "
            "trained: only its embeddings and norms would be. Give the model that it was made of."
        )
    _refuse_missing_weights(source, model, found["missing_keys"])
    chunk = policy.head_chunk_tokens
    if chunk == "auto":
        chunk = auto_head_chunk(source.vocabulary, device)
    loaded = Policy(model.eval(), packed=packed, attention=attention_kind(policy, device), head_chunk=chunk)
    check_forward(loaded, source, device, longest=policy.max_total_sequence_length)
    return loaded


def _refuse_missing_weights(source: ModelSource, model: Any, missing: Iterable[str]) -> None:
    """transformers draws random numbers for weights that no file holds: a classifier has no head, for example."""
    parameters = {name for name, _ in model.named_parameters()}
    names = sorted(parameters.intersection(missing))
    if not names:
        return
    raise ConfigError(
        f"{source.key} = {source.name}: {len(names)} of its {len(parameters)} weights are in none of its files, such as "
        f"{names[0]}, and would be random numbers. Is it a causal language model, saved complete, under the names that "
        "transformers gives its weights?"
    )


def _method(source: ModelSource) -> str:
    """How a model was quantised, by the name in its configuration."""
    given = source.config.quantization_config
    return str(given.get("quant_method") if isinstance(given, dict) else given.quant_method)


def empty_model(source: ModelSource) -> Any:
    """The model without weights, to look at its layers."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"), within_limits(source):
            return AutoModelForCausalLM.from_config(source.config, attn_implementation="eager")
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{source.key} = {source.name}: transformers cannot build a {source.config.model_type} model from this "
            f"configuration ({described(error)}). Choose another model."
        ) from None


def attention_kind(policy: PolicyConfig, device: torch.device) -> AttentionKind:
    """How attention inside packs is computed."""
    if policy.attention == "flex" and device.type != "cuda":
        raise MachineError(
            "policy.attention = flex: FlexAttention has no backward on the CPU. Use policy.attention=auto or sdpa."
        )
    if policy.attention == "auto" and device.type == "cuda":
        return "flex"
    if policy.attention in ("auto", "sdpa"):
        # Trees of other sizes in every row would be compiled anew, and are too many launches for a GPU.
        return "sdpa" if device.type == "cuda" or policy.compile is True else "trees"
    return policy.attention


def attention_in_words(policy: PolicyConfig, device: torch.device) -> str:
    if policy.packing.mode == "none":
        return "the model's own"
    return {
        "flex": "FlexAttention",
        "varlen": "flash kernels" if device.type == "cuda" else "a sequence at a time",
        "sdpa": "with dense masks",
        "trees": "a preference at a time",
    }[attention_kind(policy, device)]


def check_varlen(source: ModelSource, policy: PolicyConfig, precision: str, device: torch.device) -> None:
    """Refuse what the kernels of policy.attention=varlen do not know."""
    if policy.attention != "varlen":
        return
    if device.type != "cuda" and policy.compile is True:
        raise MachineError(
            "policy.attention = varlen: without a GPU its layers cannot be compiled. Leave out policy.compile."
        )
    if device.type == "cuda" and precision == "float32":
        raise ConfigError("policy.attention = varlen: its kernels compute in bfloat16. Use policy.attention=flex.")
    config = source.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None) or config.model_type == "gpt_oss":
        raise ConfigError(
            f"policy.attention = varlen: the attention of {source.name} caps its scores or has sinks, which these kernels do "
            "not know. Use policy.attention=auto."
        )


def has_experts(config: Any) -> bool:
    text = config.get_text_config()
    return any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def dropouts(config: Any) -> dict[str, float]:
    """The settings of a model that add randomness while training and are not 0."""
    values = config.get_text_config().to_dict()
    if config.get_text_config().model_type == "phimoe":
        values.pop("router_jitter_noise")  # by which its router compares scores, in evaluation too
    return {k: v for k, v in values.items() if any(part in k for part in RANDOM) and isinstance(v, float) and v > 0}


def _plain_attention(source: ModelSource) -> str:
    # transformers' SDPA path drops a soft-cap of attention scores without a word.
    capped = getattr(source.config.get_text_config(), "attn_logit_softcapping", None)
    return "eager" if capped or not _model_class(source)._supports_sdpa else "sdpa"


def _attention_is_fixed(source: ModelSource) -> ConfigError:
    return ConfigError(
        f"{source.key} = {source.name}: the attention of {_model_class(source).__name__} in transformers cannot be replaced, so "
        "packed sequences would see each other. Train it unpacked: policy.packing.mode=none."
    )


def _model_class(source: ModelSource) -> Any:
    """The class that transformers loads for a causal language model with this configuration."""
    from transformers import AutoModelForCausalLM

    try:
        text = source.config.get_text_config()
        if any(getattr(text, name, None) is None for name in ("hidden_size", "num_hidden_layers", "vocab_size")):
            raise KeyError
        return AutoModelForCausalLM._model_mapping[type(source.config)]
    except (KeyError, ValueError):  # ValueError: it has several language models
        raise ConfigError(
            f"{source.key} = {source.name}: model type {source.config.model_type!r} is not a causal language model that "
            "transformers knows. Choose a model that continues text."
        ) from None
