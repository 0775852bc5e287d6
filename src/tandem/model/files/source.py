"""A model's name in; its folder and its checked configuration out. No weights are loaded, and little is imported."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.config.sections.policy import Policy as PolicyConfig
from tandem.config.sections.section import EMBEDDED
from tandem.errors import ConfigError
from tandem.model.files.folder import (
    HeldWeights,
    held_by,
    read_json,
    refuse_large_counts,
    refuse_rebuilding,
    refuse_wrong_types,
    weight_files,
)
from tandem.storage.cache import content_of, fingerprint, is_checkpoint, is_run, refuse_outside

if TYPE_CHECKING:
    import torch

TOKENIZER_FILES = ["*.json", "*.model", "*.jinja", "*.txt"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on disk: where, and what its configuration says."""

    name: str
    folder: Path
    config: Any
    key: str = "policy.model_name"  # that names it in the configuration
    held: HeldWeights | None = None  # by its weight files; None: not looked at

    @property
    def dtype(self) -> "torch.dtype":
        """The dtype the model was published in."""
        import torch

        given = self.config.get_text_config().dtype or self.config.dtype or torch.float32
        found = getattr(torch, given, None) if isinstance(given, str) else given
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise ConfigError(
                f"{self.key} = {self.name}: {self.folder / 'config.json'} gives dtype = {str(given)[:100]}, which is not a "
                "floating-point type of torch. Download the model again, or choose another."
            )
        return found

    @property
    def vocabulary(self) -> int:
        return self.config.get_text_config().vocab_size


def find_model(policy: PolicyConfig) -> ModelSource:
    refuse_revision(policy)
    return find_source("policy.model_name", policy.model_name, policy.revision)


def refuse_revision(policy: PolicyConfig) -> None:
    """A folder is what it is: only a model of the hub has revisions."""
    name, revision = policy.model_name, policy.revision
    if revision is not None and (name == EMBEDDED or Path(name).is_dir()):
        what = "built here" if name == EMBEDDED else "a folder"
        raise ConfigError(
            f"policy.revision = {revision}: policy.model_name = {name} is {what}, which has no revisions. Leave out "
            "policy.revision."
        )


def check_folder(key: str, name: str, folder: Path) -> None:
    """Refuse a folder that holds no model, and say what it holds instead."""
    if (folder / "config.json").is_file():
        return
    hint = ""
    if is_checkpoint(folder):
        hint = " It is a checkpoint: a run's model is in its folder model."
    elif _is_adapter(folder):  # which has a tokenizer too
        hint = " It is an adapter: give its base model here, and it as policy.lora.adapter."
    elif key == "policy.model_name" and (folder / "tokenizer.json").is_file():
        hint = f" It is a tokenizer: policy.tokenizer.name={name} uses it."
    raise ConfigError(f"{key} = {name}: {folder} holds no config.json, so it is not a model.{hint}")


def find_source(key: str, name: str, revision: str | None) -> ModelSource:
    """The folder of a model: embedded, local, or from the hub; refused here if it needs code of its own.

    `key` is the one that names it in the configuration.
    """
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    refuse_run(key, name)
    folder = _folder(key, name, revision)
    check_folder(key, name, folder)
    described = read_json(folder / "config.json")
    refuse_outside(folder, folder / "generation_config.json")
    if "auto_map" in described and not _known(described.get("model_type")):
        raise ConfigError(
            f"{key} = {name}: this model needs Python code from its own repository, "
            "which tandem does not run. Use a model type that transformers knows."
        )
    refuse_rebuilding(f"{key} = {name}", folder, described)
    files = weight_files(key, name, folder, described)
    held = held_by(f"{key} = {name}", files)
    refuse_large_counts(f"{key} = {name}", folder, described, held)
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:
        raise ConfigError(f"{key} = {name}: {one_line(error)}") from None
    with suppress(ValueError):  # it has several language models: refused with its class
        refuse_wrong_types(f"{key} = {name}", folder, config.get_text_config())
    return ModelSource(name, folder, config, key, held)


def check_path(key: str, name: str) -> None:
    """Refuse a local path that is not there or holds no model. Nothing is imported, made or fetched for it."""
    if name == EMBEDDED:
        return
    refuse_run(key, name)
    if Path(name).is_dir():
        check_folder(key, name, _folder(key, name, None))
    else:
        refuse_missing(key, name)


def refuse_run(key: str, name: str) -> None:
    """A run directory holds a model but is not one."""
    if not is_run(Path(name)):
        return
    model = Path(name) / "model"
    if not model.is_dir():
        raise ConfigError(
            f"{key} = {name}: {name} is a run directory; its model will be in {model} once it is finished. Finish it: "
            f"tandem train --resume {name}"
        )
    if _is_adapter(model) and key in ("policy.model_name", "reference.model"):
        raise ConfigError(
            f"{key} = {name}: {name} is a run directory; its model is in {model}, and is an adapter. Give its base model here, "
            f"and policy.lora.adapter={model}."
        )
    raise ConfigError(f"{key} = {name}: {name} is a run directory; its model is in {model}. Set {key}={model}.")


def _is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file()


def weights_of(source: ModelSource) -> list[Path]:
    """The files that its weights are read from. Others in its folder are not looked into."""
    return weight_files(source.key, source.name, source.folder, read_json(source.folder / "config.json"))


def weights_fingerprint(source: ModelSource) -> str:
    """A name for what the model computes: the content of the weight files that are read, and of its configuration."""
    described = read_json(source.folder / "config.json")
    files = weights_of(source)
    with ThreadPoolExecutor() as threads:
        digests = list(threads.map(content_of, files))
    names = [file.name for file in files]
    return fingerprint(dict(zip(names, digests, strict=True)), described)


def find_tokenizer(policy: PolicyConfig, source: ModelSource) -> Path:
    """The folder (or SentencePiece file) of the tokenizer: the model's own, or the one that is named."""
    name = policy.tokenizer.name
    return source.folder if name is None else _named_tokenizer(name)


def find_tokenizer_alone(policy: PolicyConfig) -> Path:
    """The same without the weights of the embedded model, which only torch makes."""
    if policy.model_name != EMBEDDED:
        return find_tokenizer(policy, find_model(policy))
    from tandem.model.files.tiny import tiny_tokenizer

    return tiny_tokenizer() if policy.tokenizer.name is None else _named_tokenizer(policy.tokenizer.name)


def _named_tokenizer(name: str) -> Path:
    refuse_run("policy.tokenizer.name", name)
    path = Path(name)
    if path.is_file() and path.suffix == ".json":
        raise ConfigError(f"policy.tokenizer.name = {name}: a file of a tokenizer. Give its folder: {path.parent}.")
    if path.exists() or path.suffix == ".model":
        return path
    return fetched("policy.tokenizer.name", name, None, TOKENIZER_FILES)


def _folder(key: str, name: str, revision: str | None) -> Path:
    if name == EMBEDDED:
        from tandem.model.files.tiny import tiny_model

        return tiny_model()
    if Path(name).is_dir():
        return Path(name).resolve()
    return fetched(key, name, revision, [*TOKENIZER_FILES, "*.safetensors"])


def fetched(key: str, name: str, revision: str | None, wanted: list[str]) -> Path:
    """Files of a repository of the hub."""
    refuse_missing(key, name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except LocalEntryNotFoundError:
        raise ConfigError(
            f"{key} = {name}: there is no such folder here, the hub cannot be reached, and no copy of such a model was fetched "
            "before. Check the path, or the name and the connection."
        ) from None
    except Exception as error:
        raise ConfigError(
            f"{key} = {name}: neither a directory here nor to be had from the hub: {one_line(error)} "
            "Give a local folder, or check the name and the connection."
        ) from None


def refuse_missing(key: str, name: str) -> None:
    """Of a name that is no folder here: refused unless the hub may know it."""
    if name.startswith(("/", "./", "../", "~")):
        raise ConfigError(f"{key} = {name}: no such directory.")


def _known(model_type: Any) -> bool:
    from transformers import CONFIG_MAPPING

    return isinstance(model_type, str) and model_type in CONFIG_MAPPING


def described(error: Exception) -> str:
    """An error that is not known, as part of a sentence."""
    return f"{type(error).__name__}: {one_line(error).rstrip('.')}"


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]
