"""A model's name in; its folder, its checked configuration, and the Policy with weights on their device out."""

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tandem.cache import content_of, fingerprint
from tandem.config.policy import Policy as PolicyConfig
from tandem.config.section import EMBEDDED
from tandem.errors import ConfigError
from tandem.model.attention import IMPLEMENTATION
from tandem.model.policy import Policy, auto_head_chunk
from tandem.model.tiny import tiny_model

# Parts of the names of settings that add randomness while training.
RANDOM = ("dropout", "pdrop", "layerdrop", "jitter")


TOKENIZER_FILES = ["*.json", "*.model", "*.jinja", "*.txt"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on disk: where, and what its configuration says. No weights are loaded yet."""

    name: str
    folder: Path
    config: Any
    key: str = "policy.model_name"  # that names it in the configuration

    @property
    def dtype(self) -> torch.dtype:
        """The dtype the model was published in."""
        given = self.config.get_text_config().dtype or self.config.dtype
        return getattr(torch, given) if isinstance(given, str) else given or torch.float32

    @property
    def vocabulary(self) -> int:
        return self.config.get_text_config().vocab_size


def find_model(policy: PolicyConfig) -> ModelSource:
    return find_source("policy.model_name", policy.model_name, policy.revision)


def find_source(key: str, name: str, revision: str | None) -> ModelSource:
    """The folder of a model: embedded, local, or from the hub; refused here if it needs code of its own.

    `key` is the one that names it in the configuration.
    """
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = _folder(key, name, revision)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{key} = {name}: {folder} holds no config.json, so it is no model.")
    described = read_json(folder / "config.json")
    if "auto_map" in described and not _known(described.get("model_type")):
        raise ConfigError(
            f"{key} = {name}: this model needs Python code from its own repository, "
            "which tandem does not run. Use a model type that transformers knows."
        )
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:
        raise ConfigError(f"{key} = {name}: {_one_line(error)}") from None
    if not list(folder.glob("*.safetensors")):
        raise ConfigError(
            f"{key} = {name}: {folder} holds no .safetensors weights. "
            "Pickled weights are not read; convert them with transformers' save_pretrained."
        )
    return ModelSource(name, folder, config, key)


def check_packable(source: ModelSource, policy: PolicyConfig) -> None:
    """Refuse packing where a mask cannot keep sequences apart, before any weights load."""
    if policy.packing.mode == "none":
        return
    config = source.config.get_text_config()
    mixing = {
        kind for kind in getattr(config, "layer_types", None) or [] if "attention" not in kind or "linear" in kind
    }
    if mixing or _stateful(source.config):
        kinds = ", ".join(sorted(mixing)) or config.model_type
        raise ConfigError(
            f"{source.key} = {source.name}: its recurrent layers ({kinds}) carry state along a row, so packed "
            "sequences would leak into each other. Train it unpacked: policy.packing.mode=none."
        )
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", 0)
    if rope.get("rope_type") in ("dynamic", "longrope") and policy.max_total_sequence_length > original:
        raise ConfigError(
            f"{source.key} = {source.name}: its {rope['rope_type']} position scaling depends on the longest "
            f"sequence in a row beyond {original} tokens. Set policy.max_total_sequence_length={original} or less, or "
            "policy.packing.mode=none."
        )


def load_policy(
    source: ModelSource,
    policy: PolicyConfig,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    quantization: Any = None,
) -> Policy:
    """The model, loaded straight to its device, dropout off. What is trained is float32; what is frozen may be less."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    packed = policy.packing.mode != "none"
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(source.folder),
            config=without_dropout(source.config),
            dtype=dtype,
            quantization_config=quantization,
            device_map=device,
            attn_implementation=IMPLEMENTATION if packed else _plain_attention(source.config),
            trust_remote_code=False,
            use_safetensors=True,
        )
    except SafetensorError as error:
        raise ConfigError(
            f"{source.key} = {source.name}: its weights are not readable as safetensors ({_one_line(error)}). "
            "Is the download whole?"
        ) from None
    chunk = policy.head_chunk_tokens
    if chunk == "auto":
        chunk = auto_head_chunk(source.vocabulary, device)
    return Policy(model.train(), packed=packed, flex=packed and uses_flex(policy, device), head_chunk=chunk)


def empty_model(source: ModelSource) -> Any:
    """The model without weights, to look at its layers."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(source.config, attn_implementation="eager")


def uses_flex(policy: PolicyConfig, device: torch.device) -> bool:
    if policy.attention == "flex" and device.type != "cuda":
        raise ConfigError(
            "policy.attention = flex: FlexAttention has no backward on the CPU. Use policy.attention=auto or sdpa."
        )
    return policy.attention == "flex" or (policy.attention == "auto" and device.type == "cuda")


def has_experts(config: Any) -> bool:
    text = config.get_text_config()
    return any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def dropouts(config: Any) -> dict[str, float]:
    """The settings of a model that add randomness while training and are not 0."""
    values = config.get_text_config().to_dict()
    return {k: v for k, v in values.items() if any(part in k for part in RANDOM) and isinstance(v, float) and v > 0}


def without_dropout(config: Any) -> Any:
    """A copy: the export keeps the model's own settings."""
    config = copy.deepcopy(config)
    for name in dropouts(config):
        setattr(config.get_text_config(), name, 0.0)
    return config


def weights_fingerprint(source: ModelSource) -> str:
    """A name for what the model computes: the content of its weights and of its configuration."""
    files = sorted(source.folder.glob("*.safetensors"))
    with ThreadPoolExecutor() as threads:
        digests = list(threads.map(content_of, files))
    names = [file.name for file in files]
    return fingerprint(dict(zip(names, digests, strict=True)), read_json(source.folder / "config.json"))


def find_tokenizer(policy: PolicyConfig, source: ModelSource) -> Path:
    """The folder (or SentencePiece file) of the tokenizer: the model's own, or the one that is named."""
    name = policy.tokenizer.name
    if name is None:
        return source.folder
    path = Path(name)
    if path.exists() or path.suffix == ".model":
        return path
    return fetched("policy.tokenizer.name", name, None, TOKENIZER_FILES)


def _folder(key: str, name: str, revision: str | None) -> Path:
    if name == EMBEDDED:
        return tiny_model()
    if Path(name).is_dir():
        return Path(name).resolve()
    return fetched(key, name, revision, [*TOKENIZER_FILES, "*.safetensors"])


def fetched(key: str, name: str, revision: str | None, wanted: list[str]) -> Path:
    """Files of a repository of the hub."""
    if name.startswith(("/", "./", "../", "~")):
        raise ConfigError(f"{key} = {name}: no such directory.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except Exception as error:
        raise ConfigError(
            f"{key} = {name}: neither a directory here nor to be had from the hub: {_one_line(error)} "
            "Give a local folder, or check the name and the connection."
        ) from None


def _plain_attention(config: Any) -> str:
    # transformers' SDPA path drops a soft-cap of attention scores without a word.
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else "sdpa"


def _stateful(config: Any) -> bool:
    from transformers import AutoModelForCausalLM

    try:
        model_class = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise ConfigError(
            f"model type {config.model_type!r} is not a causal language model that transformers knows."
        ) from None
    return bool(getattr(model_class, "_is_stateful", False))


def _known(model_type: str | None) -> bool:
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not readable as JSON: {error}") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]
