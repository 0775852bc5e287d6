"""What tandem knows about the models of transformers: every special case of a model type or class is in this module.

`architecture_of` describes a model from its configuration and class, before weights load. `trunk_of`, `decoder_layers` and others
find parts of a model that is loaded or built without weights. `check_packable` refuses models that would compute different
results in packs.

- To support another type of multimodal checkpoints with a text model inside: add it to text_models.py. `auto_class` then returns
  the class that loads and exports its text model, which `trunk_of` finds, and `architecture_of` describes the configuration of
  the text model.
- To support the recurrent layers of another type in packs: add it to recurrent/families.py, and replacements for the functions
  that its layers call to recurrent/layers.py. `check_packable` refuses all other recurrent layers (`Architecture.recurrent`).
"""

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from transformers import __version__ as transformers_version

from tandem.config.sections.policy import Policy as PolicyConfig
from tandem.errors import ConfigError
from tandem.model.files.layer_values import values_of
from tandem.model.files.source import ModelSource
from tandem.model.head import Head, HeadRule, LanguageModelHead
from tandem.model.multimodal import text_model_class
from tandem.model.recurrent.families import FAMILIES, FIRST_TRANSFORMERS, Scan
from tandem.model.text_models import TEXT_MODELS

# How a layer mixes tokens: attention to all earlier tokens; to those in a sliding window; a state carried along the row; both
# full attention and a state; or not at all.
Mixing = Literal["full", "window", "recurrent", "both", "none"]
# Kinds of layers, as configurations name them, that are only a feed-forward network.
WITHOUT_MIXING = ("mlp", "moe")

# A setting whose name contains one of these adds randomness in training mode.
RANDOM_SETTINGS = ("dropout", "pdrop", "layerdrop", "jitter")
# Settings with such names that are not random. In PhiMoE, jitter is a margin that the router uses in evaluation mode too.
NOT_RANDOM = {"phimoe": ("router_jitter_noise",)}
# Model types whose attention has sinks: one more score per head that takes part in the softmax.
TYPES_WITH_SINKS = ("gpt_oss",)
# Model types with a table of positions that is neither an embedding nor a buffer.
TYPES_WITH_HIDDEN_TABLE = ("ctrl", "mpt")
# Widths of experts that all tokens pass through.
SHARED_EXPERT_SIZES = (
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "moe_shared_expert_intermediate_size",
)
NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Model types whose routers choose the experts with the highest logits, and return logits, weights and chosen experts. Others
# have no load-balancing loss, as those that balance with a bias instead (DeepSeek-V3), or return something else.
TYPES_WITH_BALANCE = (
    *(
        "flex_olmo",
        "gpt_oss",
        "granitemoe",
        "granitemoe_swa",
        "granitemoeshared",
        "mellum",
        "mixtral",
        "olmoe",
        "phimoe",
    ),
    *("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text"),
)
# Model types that are encoders unless their configuration has is_decoder=true. Others have such a setting and ignore it.
ENCODERS = (
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
    *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
)
# Multimodal types whose text model attends to prompts in both directions.
TYPES_WITH_PREFIX_ATTENTION = ("paligemma",)
LOGIT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # Gemma, RecurrentGemma, xLSTM
REQUIRED_SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")


@dataclass(frozen=True, slots=True)
class Architecture:
    """The properties of a model that training depends on, except its sizes."""

    model_type: str  # of the text model
    auto_class: Any  # the class that builds, loads and exports the model
    model_class: Any  # the class of the model, which auto_class chooses
    num_layers: int
    layers: tuple[Mixing, ...] | None  # None: the configuration does not list its layers
    recurrent: tuple[str, ...]  # the kinds of recurrent layers, as the configuration names them, or mamba
    scan: Scan | None  # what the recurrent layers compute; None: there are none, or none that can be packed
    window: int | None  # the sliding window of the configuration
    caps_scores: bool  # attention scores are soft-capped
    has_sinks: bool
    has_experts: bool
    hides_positions: bool  # has a table of positions that cannot be found among its modules
    random_settings: dict[str, float]  # nonzero settings that would add randomness in training mode

    @property
    def num_attention_layers(self) -> int:
        return self.num_layers if self.layers is None else sum(one in ("full", "window", "both") for one in self.layers)

    @property
    def plain_attention(self) -> str:
        """The attention implementation of transformers for unpacked training.

        If scores are soft-capped, this is eager attention, because SDPA in transformers silently ignores the soft-cap.
        """
        return "eager" if self.caps_scores or not self.model_class._supports_sdpa else "sdpa"


def is_multimodal(config: Any) -> bool:
    """Whether a configuration is that of a multimodal checkpoint of which only the text model is loaded."""
    return config.model_type in TEXT_MODELS


def auto_class(config: Any, *, complete: bool = False) -> Any:
    """Return the class that builds (`from_config`) and loads (`from_pretrained`) a model with this configuration.

    It is an auto class of transformers or, for a multimodal checkpoint, a class that builds only its text model. Raise KeyError
    if transformers has no class for the checkpoint. `complete`: build all parts of a multimodal checkpoint.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if not is_multimodal(config):
        return AutoModelForCausalLM
    if complete:
        return AutoModelForImageTextToText
    return text_model_class(AutoModelForImageTextToText._model_mapping[type(config)], TEXT_MODELS[config.model_type])


def architecture_of(config: Any, model_class: Any = None) -> Architecture:
    """Return the Architecture of the model that a configuration describes.

    `model_class`: the model's class. If it is None, transformers' causal language model for this type of configuration is
    used; raise KeyError if transformers has none.
    """
    text = config.get_text_config()
    auto = auto_class(config)
    if model_class is None:
        model_class = auto if is_multimodal(config) else auto._model_mapping[type(config)]
    kinds = getattr(text, "layer_types", None) or []
    recurrent = tuple(sorted({_shown(kind, text) for kind in kinds if _mixing(kind) in ("recurrent", "both")}))
    if not recurrent and getattr(model_class, "_is_stateful", False):
        recurrent = (text.model_type,)
    windows = [window for window in values_of(text, "sliding_window") if isinstance(window, int)]
    return Architecture(
        model_type=text.model_type,
        auto_class=auto,
        model_class=model_class,
        num_layers=text.num_hidden_layers,
        layers=tuple(_mixing(kind) for kind in kinds) or None,
        recurrent=recurrent,
        scan=FAMILIES.get(text.model_type) if recurrent else None,
        window=max(windows, default=None),
        caps_scores=bool(getattr(text, "attn_logit_softcapping", None)),
        has_sinks=text.model_type in TYPES_WITH_SINKS,
        has_experts=_has_experts(text),
        hides_positions=text.model_type in TYPES_WITH_HIDDEN_TABLE,
        random_settings=_random_settings(text),
    )


def check_architecture(source: ModelSource) -> Architecture:
    """Return the Architecture of a model. Raise ConfigError if transformers has no causal language model of the model's type."""
    _refuse_unknown_multimodal(source)
    try:
        text = source.config.get_text_config()
        if any(getattr(text, name, None) is None for name in REQUIRED_SIZES):
            raise KeyError
        architecture = architecture_of(source.config)
    except (KeyError, ValueError):  # ValueError: several language models in one
        raise ConfigError(
            f"{source.place}: model type {source.config.model_type!r} is not a causal language model in transformers. "
            "Choose a model that generates text."
        ) from None
    if text.model_type in ENCODERS and not getattr(text, "is_decoder", False):
        raise ConfigError(
            f"{source.place}: a {text.model_type} model whose configuration has is_decoder=false is an encoder, in which tokens "
            "see later ones, so it is not a causal language model. Choose a model that generates text."
        )
    return architecture


def _refuse_unknown_multimodal(source: ModelSource) -> None:
    """Raise ConfigError for a multimodal checkpoint whose text model cannot be trained alone."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM

    config = source.config
    if is_multimodal(config) and getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{source.place}: a multimodal checkpoint with quantised weights, whose text model cannot be exported again "
            "with its other parts. Give the checkpoint that it was quantised from."
        )
    if is_multimodal(config):
        return
    if config.model_type in TYPES_WITH_PREFIX_ATTENTION:
        raise ConfigError(
            f"{source.place}: model type {config.model_type!r} attends to prompts in both directions, which tandem does not "
            "compute. Choose a checkpoint of a type that docs/multimodal.md lists."
        )
    # Those of speech are only in the last mapping, in which a few causal language models are, too.
    speech = type(config) in AutoModelForMultimodalLM._model_mapping
    if type(config) in AutoModelForImageTextToText._model_mapping or (
        speech and type(config) not in AutoModelForCausalLM._model_mapping
    ):
        raise ConfigError(
            f"{source.place}: model type {config.model_type!r} is multimodal, and tandem does not know where its text "
            "model is, to train it and export the rest unchanged. Save its text model as a causal language model and "
            "train that, or choose a checkpoint of a type that docs/multimodal.md lists."
        )


def _mixing(kind: str) -> Mixing:
    """Return how a layer mixes tokens. `kind`: an item of `layer_types` in config.json, such as sliding_attention."""
    if kind in WITHOUT_MIXING:
        return "none"
    if "hybrid" in kind:
        return "both"
    if "attention" not in kind or "linear" in kind:
        return "recurrent"
    return "window" if "sliding" in kind else "full"


def _shown(kind: str, text: Any) -> str:
    """Return the name of a kind of recurrent layers. transformers names Mamba layers linear_attention, as it does many others."""
    is_mamba = "mamba" in text.model_type or any(name.startswith("mamba_") for name in text.to_dict())
    return "mamba" if kind == "linear_attention" and is_mamba else kind


def _random_settings(text: Any) -> dict[str, float]:
    left_out = NOT_RANDOM.get(text.model_type, ())
    return {
        name: value
        for name, value in text.to_dict().items()
        if any(part in name for part in RANDOM_SETTINGS) and name not in left_out
        if isinstance(value, float) and value > 0
    }


def trunk_of(model: Any) -> Any:
    """Return the part of a causal language model below its head."""
    if (path := TEXT_MODELS.get(model.config.model_type)) is not None:
        return model.get_submodule(path)
    # In Llama 4's text model, `base_model_prefix` does not match the attribute's name.
    return model.base_model if model.base_model is not model else model.model


def decoder_layers(model: Any) -> list[nn.Module]:
    """Return the repeated layers of the trunk. Call this only if `has_layer_list` is true."""
    return list(trunk_of(model).layers)


def has_layer_list(model: Any) -> bool:
    """Whether the trunk holds its repeated layers in a list named `layers`, where `decoder_layers` finds them."""
    return isinstance(getattr(trunk_of(model), "layers", None), nn.ModuleList)


def router_class(architecture: Architecture) -> type[nn.Module] | None:
    """Return the class of a model's routers, if they can be trained with a load-balancing loss."""
    if architecture.model_type not in TYPES_WITH_BALANCE:
        return None
    reported = architecture.model_class._can_record_outputs.get(
        "router_logits"
    )  # not by earlier versions for some types
    return None if reported is None else reported.target_class


def _has_experts(config: Any) -> bool:
    """Whether some layers route tokens to experts. Nemotron-H has numbers of experts even if no layer has them."""
    kinds = _feed_forward_layers(config)
    return any(getattr(config, name, None) for name in NUMBERS_OF_EXPERTS) and (not kinds or "moe" in kinds)


def _feed_forward_layers(config: Any) -> list[str]:
    """Return the kinds of the layers that are only a feed-forward network. Most models have none."""
    return [kind for kind in getattr(config, "layer_types", None) or [] if kind in WITHOUT_MIXING]


def feed_forward_width(config: Any) -> float:
    """Return the width of the feed-forward networks that a token passes through in a layer, on average.

    With experts, these are the experts that the token is sent to, and shared ones.
    """
    widths = values_of(config, "intermediate_size") or [4 * config.hidden_size]
    wide = sum(widths) / len(widths)
    chosen = getattr(config, "num_experts_per_tok", None)
    shared = next((size for name in SHARED_EXPERT_SIZES if (size := getattr(config, name, None))), 0)
    one = getattr(config, "moe_intermediate_size", None) or wide
    with_experts = (chosen or 0) * one + (shared or (getattr(config, "n_shared_experts", None) or 0) * one)
    if kinds := _feed_forward_layers(config):  # the other layers have none
        of_kind = {"mlp": wide, "moe": with_experts}
        return sum(of_kind[kind] for kind in kinds) / config.num_hidden_layers
    return with_experts if chosen and _has_experts(config) else shared or wide


def windows_of(model: Any) -> set[int | None]:
    """Return the sizes of the sliding windows of a model's layers. The set always includes None, which means no window."""
    config = model.config.get_text_config()
    found = [*values_of(config, "sliding_window"), *(getattr(m, "sliding_window", None) for m in model.modules())]
    return {None, *(window for window in found if isinstance(window, int) and window > 0)}


def head_of(model: Any, *, chunk: int) -> Head:
    """Return the head that a loaded model is trained with.

    `chunk`: number of scored tokens whose logits are in memory at a time.
    """
    return LanguageModelHead(rule=head_rule(model), chunk=chunk)


def head_rule(model: Any) -> HeadRule:
    """Return how this model scales and caps its logits. A model whose rule is missing here fails the audit."""
    config = model.config.get_text_config()
    scale = 1.0
    if isinstance(given := getattr(model, "logit_scale", None), int | float):  # Cohere
        scale = float(given)
    elif isinstance(given := getattr(config, "logits_scaling", None), int | float):  # Granite divides by it
        scale = float(given) if config.model_type == "hyperclovax" else 1 / float(given)
    elif isinstance(given := getattr(config, "lm_head_multiplier", None), int | float):  # Falcon-H1
        scale = float(given)
    return HeadRule(scale, next((cap for name in LOGIT_CAPS if (cap := getattr(config, name, None))), None))


def check_packable(source: ModelSource, policy: PolicyConfig) -> None:
    """Raise ConfigError for a model that is not a causal language model, or that would compute different results in packs.

    In packs, only the attention mask separates sequences. Called before any weights load.
    """
    architecture = check_architecture(source)
    _ = source.dtype  # raises if it is not a floating-point dtype
    _refuse_row_dependent_positions(source, policy)
    if policy.packing.mode == "none":
        return
    if architecture.recurrent:
        _refuse_leaking_states(source, architecture)
    if not architecture.model_class._can_set_attn_implementation():
        raise fixed_attention_error(source)
    config = source.config.get_text_config()
    if getattr(config, "index_topk", None):
        raise ConfigError(
            f"{source.place}: its attention selects the tokens that it attends to (index_topk), which packing does not "
            "support. Train it unpacked: policy.packing.mode=none."
        )
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk and policy.max_total_sequence_length > chunk:
        raise ConfigError(
            f"{source.place}: its attention works in chunks of {chunk} tokens, which packing does not support. Set "
            f"policy.max_total_sequence_length={chunk} or less, or policy.packing.mode=none."
        )


def _refuse_leaking_states(source: ModelSource, architecture: Architecture) -> None:
    """Raise ConfigError for recurrent layers whose states would leak from one sequence of a pack into the next."""
    if architecture.scan is None:
        raise ConfigError(
            f"{source.place}: its recurrent layers ({', '.join(architecture.recurrent)}) carry state along a row, so "
            "packed sequences would leak into each other. Train it unpacked: policy.packing.mode=none."
        )
    first = FIRST_TRANSFORMERS.get(architecture.model_type)
    if first and tuple(map(int, transformers_version.split(".")[:2])) < tuple(map(int, first.split("."))):
        raise ConfigError(
            f"{source.place}: its recurrent layers ({', '.join(architecture.recurrent)}) can be packed with transformers "
            f"{first} or later, and {transformers_version} is installed. Upgrade it, or train unpacked: "
            "policy.packing.mode=none."
        )


def _refuse_row_dependent_positions(source: ModelSource, policy: PolicyConfig) -> None:
    """Raise ConfigError if the model's RoPE scaling depends on the longest sequence that is computed at the same time.

    One sequence would then change the results of another, with and without packing.
    """
    config = source.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    model_limit = getattr(config, "max_position_embeddings", None)
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]  # some models: one per type of layer
    for kind in kinds:
        # The scaling of longrope changes at the first of these limits, that of dynamic at the second.
        original = min((one for one in (kind.get("original_max_position_embeddings"), model_limit) if one), default=0)
        if kind.get("rope_type") in ("dynamic", "longrope") and policy.max_total_sequence_length > original:
            raise ConfigError(
                f"{source.place}: beyond {original} tokens its {kind['rope_type']} position scaling depends on the longest "
                "sequence computed at the same time, so sequences would change each other. Set "
                f"policy.max_total_sequence_length={original} or less."
            )


def fixed_attention_error(source: ModelSource) -> ConfigError:
    name = check_architecture(source).model_class.__name__
    return ConfigError(
        f"{source.place}: the attention of {name} in transformers cannot be replaced, so packed sequences would attend to "
        "each other. Train it unpacked: policy.packing.mode=none."
    )
