"""Checks the model of a ModelSource and loads its weights to a device, as a Policy."""

import copy
from collections.abc import Iterable
from typing import Any

import torch

from tandem.config.sections.policy import Policy as PolicyConfig
from tandem.errors import ConfigError, MachineError, one_line
from tandem.model.architecture import auto_class, check_architecture, fixed_attention_error, head_of
from tandem.model.attention.pack_attention import IMPLEMENTATION, AttentionKind
from tandem.model.checks.trial import check_forward, is_out_of_memory
from tandem.model.distributed.sharded_load import UnloadedModel, model_without_weights, recipes_for
from tandem.model.files.build_limits import within_limits
from tandem.model.files.layer_values import values_of
from tandem.model.files.source import ModelSource, describe
from tandem.model.head import auto_head_chunk
from tandem.model.policy import Policy

FLEX_HEAD = 16  # FlexAttention is compiled for no smaller heads (torch 2.11 to 2.13)


def load_policy(
    source: ModelSource,
    policy: PolicyConfig,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    quantization: Any = None,
) -> Policy:
    """Load a model directly to its device. `dtype`: float32 for trained weights; frozen weights may have a smaller dtype.

    The model is in evaluation mode, without dropout, noise or sampled experts, so training computes what the exported model
    computes.
    """
    model, found = _read_weights(source, policy, device, dtype=dtype, quantization=quantization)
    if quantization is None and source.key == "policy.model_name" and getattr(model, "is_quantized", False):
        raise ConfigError(
            f"{source.place}: its weights are quantised ({_quantization_method(source)}), so only its embeddings and norms "
            "would be trained. Give the model that it was quantised from."
        )
    _refuse_missing_weights(source, model, found["missing_keys"])
    loaded = as_policy(model, source, policy, device)
    check_forward(loaded, source, device, longest=policy.max_total_sequence_length)
    return loaded


def as_policy(model: Any, source: ModelSource, policy: PolicyConfig, device: torch.device) -> Policy:
    """Return a policy that computes with transformers' model, in evaluation mode."""
    chunk = policy.head_chunk_tokens
    if chunk == "auto":
        chunk = auto_head_chunk(source.vocabulary, device)
    packed = policy.packing.mode != "none"
    head = head_of(model, chunk=chunk)
    return Policy(model.eval(), packed=packed, attention=attention_kind(policy, device, source.config), head=head)


def unloaded_model(source: ModelSource, policy: PolicyConfig, dtype: torch.dtype) -> UnloadedModel | None:
    """Return a model whose weights can be read shard by shard with `read_shards`. Return None if they cannot."""
    try:
        model = model_without_weights(source, dtype, attention_name(source, policy))
        recipes = recipes_for(source, model)
        return None if recipes is None else UnloadedModel(model, recipes)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None  # the usual way of loading reports what is wrong


def attention_name(source: ModelSource, policy: PolicyConfig) -> str:
    """Return transformers' name of the attention that a model computes with."""
    return IMPLEMENTATION if policy.packing.mode != "none" else check_architecture(source).plain_attention


def _read_weights(
    source: ModelSource, policy: PolicyConfig, device: torch.device, *, dtype: torch.dtype, quantization: Any
) -> Any:
    """Return transformers' model and its loading info. Raise ConfigError if the files cannot be loaded."""
    from safetensors import SafetensorError

    try:
        with within_limits(source):
            return auto_class(source.config).from_pretrained(
                str(source.folder),
                output_loading_info=True,
                config=source.config,
                dtype=dtype,
                quantization_config=quantization,
                device_map=device,
                attn_implementation=attention_name(source, policy),
                trust_remote_code=False,
                use_safetensors=True,
            )
    except ConfigError:
        raise
    except SafetensorError as error:
        raise ConfigError(
            f"{source.place}: its weights are not readable as safetensors ({one_line(error)}). Is the download complete?"
        ) from None
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if isinstance(error, KeyError) and error.args == (
            IMPLEMENTATION,
        ):  # the model looks attention classes up by name
            raise fixed_attention_error(source) from None
        raise ConfigError(
            f"{source.place}: transformers cannot load it ({describe(error)}). Choose another model, or download it again."
        ) from error


def _refuse_missing_weights(source: ModelSource, model: Any, missing: Iterable[str]) -> None:
    """Raise ConfigError if weights of the model are missing from its files: transformers would fill them with random numbers."""
    parameters = {name for name, _ in model.named_parameters()}
    names = sorted(parameters.intersection(missing))
    if not names:
        return
    raise ConfigError(
        f"{source.place}: {len(names)} of its {len(parameters)} weights, such as {names[0]}, are in none of its files and "
        "would be random. Is it a causal language model, saved completely, with the weight names that transformers uses?"
    )


def _quantization_method(source: ModelSource) -> str:
    """Return the quantisation method that a model's configuration names."""
    given = source.config.quantization_config
    return str(given.get("quant_method") if isinstance(given, dict) else given.quant_method)


def empty_model(source: ModelSource, *, complete: bool = False) -> Any:
    """Return the model without weights (on the meta device), to inspect its layers.

    `complete`: with the parts of a multimodal checkpoint that are not trained.
    """
    try:
        with torch.device("meta"), within_limits(source):
            config = copy.deepcopy(source.config)  # from_config changes its dtype, which exports use
            return auto_class(config, complete=complete).from_config(config, attn_implementation="eager")
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{source.place}: transformers cannot build a {source.config.model_type} model from this configuration "
            f"({describe(error)}). Choose another model."
        ) from None


def attention_kind(policy: PolicyConfig, device: torch.device, config: Any) -> AttentionKind:
    """Return how attention inside packs is computed: flex, varlen, sdpa (with a dense mask) or trees.

    `trees` computes each prompt with its completions separately. `config`: the model's, or None if there is no model yet. Raise
    MachineError if the device does not support policy.attention.
    """
    smallest = FLEX_HEAD if config is None else smallest_head(config)
    if policy.attention == "flex" and device.type != "cuda":
        raise MachineError(
            "policy.attention = flex: FlexAttention has no backward pass on the CPU. Use policy.attention=auto or sdpa."
        )
    if policy.attention == "flex" and policy.packing.mode != "none" and smallest < FLEX_HEAD:
        raise ConfigError(
            f"policy.attention = flex: FlexAttention needs heads of at least {FLEX_HEAD} numbers, and those of this model have "
            f"{smallest}. Use policy.attention=auto."
        )
    if policy.attention == "auto" and device.type == "cuda" and smallest >= FLEX_HEAD:
        return "flex"
    if policy.attention in ("auto", "sdpa"):
        # Trees differ in size from row to row: each size would be compiled separately, and a GPU would need too many launches.
        return "sdpa" if device.type == "cuda" or policy.compile is True else "trees"
    return policy.attention


def smallest_head(config: Any) -> int:
    """Return the smallest number of dimensions of a model's queries, keys or values, per head."""
    text = config.get_text_config()
    given = [size for name in ("head_dim", "v_head_dim", "qk_head_dim") for size in values_of(text, name)]
    if given:
        return min(given)
    heads = max(values_of(text, "num_attention_heads"), default=0)
    return text.hidden_size // heads if heads else FLEX_HEAD


def describe_attention(policy: PolicyConfig, device: torch.device, config: Any) -> str:
    if policy.packing.mode == "none":
        return "the model's own"
    return {
        "flex": "FlexAttention",
        "varlen": "flash kernels" if device.type == "cuda" else "a sequence at a time",
        "sdpa": "with dense masks",
        "trees": "a preference at a time",
    }[attention_kind(policy, device, config)]


def check_varlen(source: ModelSource, policy: PolicyConfig, precision: str, device: torch.device) -> None:
    """Raise an error if policy.attention=varlen is set but does not support the model, the device or another setting."""
    if policy.attention != "varlen":
        return
    if device.type != "cuda" and policy.compile is True:
        raise MachineError("policy.attention = varlen: it cannot be compiled without a GPU. Leave out policy.compile.")
    if device.type == "cuda" and precision == "float32":
        raise ConfigError(
            "policy.attention = varlen: its kernels do not compute in float32, only in bfloat16. Use policy.attention=flex."
        )
    architecture = check_architecture(source)
    if architecture.caps_scores or architecture.has_sinks:
        raise ConfigError(
            f"policy.attention = varlen: the attention of {source.name} caps its scores or has sinks, which these kernels do "
            "not support. Use policy.attention=auto."
        )
