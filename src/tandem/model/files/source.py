"""Finds a model by name and returns its folder and its checked configuration, without loading weights."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.config.sections.policy import Policy as PolicyConfig
from tandem.config.sections.section import EMBEDDED
from tandem.errors import ConfigError, one_line
from tandem.model.files.folder import (
    StoredWeights,
    has_weights,
    read_json,
    read_weight_headers,
    refuse_large_counts,
    refuse_rebuilding,
    refuse_wrong_types,
    weight_files,
)
from tandem.storage.cache import (
    cache_dir,
    content_of,
    fingerprint,
    is_checkpoint,
    is_run,
    refuse_outside,
    sha256_of,
)
from tandem.storage.ownership import lock_holder
from tandem.terminal.arguments import setting
from tandem.terminal.commands import export_call, resume_call

if TYPE_CHECKING:
    import torch

TOKENIZER_FILES = ["*.json", "*.model", "*.jinja", "*.txt"]
LICENCE_FILES = ["README.md", "LICENSE*"]
MODEL_KEYS = ("policy.model_name", "reference.model")  # keys that also accept a run or a checkpoint
EXPORT_VERSION = 1  # increased whenever the same checkpoint would be exported differently


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on disk: its folder and its configuration."""

    name: str
    folder: Path
    config: Any
    key: str = "policy.model_name"  # the configuration key or the argument that names it
    stored: StoredWeights | None = None  # size of its weight files; None: not read

    @property
    def place(self) -> str:
        """How messages name it: the key or the argument, with its value."""
        return setting(self.key, self.name)

    @property
    def dtype(self) -> "torch.dtype":
        """The dtype of the model's weights according to config.json; float32 if config.json does not name one."""
        import torch

        given = self.config.get_text_config().dtype or self.config.dtype or torch.float32
        found = getattr(torch, given, None) if isinstance(given, str) else given
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise ConfigError(
                f"{self.place}: {self.folder / 'config.json'} has dtype = {str(given)[:100]}, which is not a "
                "floating-point dtype of torch. Download the model again, or choose another."
            )
        return found

    @property
    def vocabulary(self) -> int:
        return self.config.get_text_config().vocab_size


def find_model(policy: PolicyConfig, *, needs_weights: bool = True) -> ModelSource:
    """Find the model that policy.model_name names. `needs_weights`: as in `find_source`."""
    refuse_revision(policy)
    return find_source("policy.model_name", policy.model_name, policy.revision, needs_weights=needs_weights)


def refuse_revision(policy: PolicyConfig) -> None:
    """Raise ConfigError if policy.revision is set for a model that is not on the hub, because only hub models have revisions."""
    name, revision = policy.model_name, policy.revision
    if revision is not None and (name == EMBEDDED or Path(name).is_dir()):
        what = "the embedded model" if name == EMBEDDED else "a folder"
        raise ConfigError(
            f"policy.revision = {revision}: policy.model_name = {name} is {what}, which has no revisions. Leave out "
            "policy.revision."
        )


def check_folder(key: str, name: str, folder: Path) -> None:
    """Raise ConfigError if a folder does not hold a model. The message says what the folder holds instead."""
    if (folder / "config.json").is_file():
        return
    hint = " Give a model folder, a hub name, or a run directory."
    if _is_adapter(folder):  # tested before the tokenizer, which an adapter folder has too
        hint = f" It is an adapter: give its base model here, and set policy.lora.adapter={name}."
    elif key == "policy.model_name" and (folder / "tokenizer.json").is_file():
        hint = f" It is a tokenizer: to use it, set policy.tokenizer.name={name}."
    raise ConfigError(f"{setting(key, name)}: {folder} holds no config.json, so it is not a model.{hint}")


def find_source(key: str, name: str, revision: str | None, *, needs_weights: bool = True) -> ModelSource:
    """Find a model that is embedded, local or on the hub. Raise ConfigError if the model needs Python code from its repository.

    `key`: the configuration key that names the model. `needs_weights`: if False, weights are not downloaded, and the folder may
    be without weight files; weight files that are there are still checked.
    """
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    refuse_run(key, name)
    folder = _folder(key, name, revision, with_weights=needs_weights)
    check_folder(key, name, folder)
    described = read_json(folder / "config.json")
    refuse_outside(folder, folder / "generation_config.json")
    if "auto_map" in described and not _is_known(described.get("model_type")):
        raise ConfigError(
            f"{setting(key, name)}: this model needs Python code from its own repository, which tandem does not run. Use a "
            "model type that transformers supports."
        )
    refuse_rebuilding(setting(key, name), folder, described)
    stored = None
    if needs_weights or has_weights(folder):
        stored = read_weight_headers(setting(key, name), weight_files(key, name, folder, described))
    refuse_large_counts(setting(key, name), folder, described, stored)
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:
        raise ConfigError(f"{setting(key, name)}: {one_line(error)}.") from None
    with suppress(ValueError):  # several language models in one: architecture.check_packable refuses it
        refuse_wrong_types(setting(key, name), folder, config.get_text_config())
    return ModelSource(name=name, folder=folder, config=config, key=key, stored=stored)


def check_path(key: str, name: str, revision: str | None = None) -> None:
    """Raise ConfigError if a local path does not exist or holds no model, or if the hub has no model of this name.

    Does not import torch or transformers, so that a wrong name is reported at once. Downloads at most config.json.
    """
    if name == EMBEDDED:
        return
    refuse_run(key, name)
    if is_checkpoint(Path(name)):
        checkpoint_export(key, name)
    elif Path(name).is_dir():
        check_folder(key, name, _folder(key, name, None))
    else:
        download(key, name, revision, ["config.json"])


def refuse_run(key: str, name: str) -> None:
    """Raise ConfigError if `name` is a run directory that cannot be used for `key`. The message says what to use instead.

    policy.model_name and reference.model accept the directory of a finished run, and use the model that the run exported.
    """
    if not is_run(Path(name)):
        return
    model = Path(name) / "model"
    if not model.is_dir():
        newest = Path(name) / "checkpoints" / "latest"
        hint = f" Or give one of its checkpoints: {key}={newest}" if key in MODEL_KEYS and newest.is_dir() else ""
        process = lock_holder(Path(name))
        finish = (
            f"Finish it: {resume_call(name)}"
            if process is None
            else f"It is being trained by process {process}: wait until it is finished."
        )
        raise ConfigError(
            f"{setting(key, name)}: {name} is a run directory; its model will be in {model} once the run is finished. "
            f"{finish}{hint}"
        )
    if key in MODEL_KEYS and not _is_adapter(model):
        return
    if key in MODEL_KEYS:
        raise ConfigError(
            f"{setting(key, name)}: {name} is a run directory; its model in {model} is an adapter. Give the adapter's base "
            f"model here, and set policy.lora.adapter={model}."
        )
    raise ConfigError(f"{setting(key, name)}: {name} is a run directory; its model is in {model}. Set {key}={model}.")


def _is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file()


def weights_of(source: ModelSource) -> list[Path]:
    """Return the files that a model's weights are read from. Other files in the model's folder are ignored."""
    return weight_files(source.key, source.name, source.folder, read_json(source.folder / "config.json"))


def weights_on_disk(key: str, name: str, revision: str | None) -> list[Path]:
    """Return the weight files of a model that are on this machine. Does not import torch, and downloads and builds nothing.

    Raise an error if the model is not complete, not supported, or not there.
    """
    if name == EMBEDDED:
        return []
    if Path(name).is_dir():
        folder = _folder(key, name, revision)
    else:
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
    return weight_files(key, name, folder, read_json(folder / "config.json"))


def weights_fingerprint(source: ModelSource) -> str:
    """Return a hash of everything that determines what a model computes: its weight files and its configuration."""
    described = read_json(source.folder / "config.json")
    files = weights_of(source)
    with ThreadPoolExecutor() as threads:
        digests = list(threads.map(content_of, files))
    names = [file.name for file in files]
    return fingerprint(dict(zip(names, digests, strict=True)), described)


def find_tokenizer(policy: PolicyConfig, source: ModelSource) -> Path:
    """Return the folder (or SentencePiece file) of the tokenizer: policy.tokenizer.name, or by default the model's folder."""
    name = policy.tokenizer.name
    return source.folder if name is None else _named_tokenizer(name)


def find_tokenizer_without_torch(policy: PolicyConfig) -> Path:
    """Like `find_tokenizer`, but does not need torch: for the embedded model, only the tokenizer is built, not the weights."""
    if policy.model_name != EMBEDDED:
        return find_tokenizer(policy, find_model(policy))
    from tandem.model.files.tiny import tiny_tokenizer

    return tiny_tokenizer() if policy.tokenizer.name is None else _named_tokenizer(policy.tokenizer.name)


def _named_tokenizer(name: str) -> Path:
    refuse_run("policy.tokenizer.name", name)
    path = Path(name)
    if path.is_file() and path.suffix == ".json":
        raise ConfigError(
            f"policy.tokenizer.name = {name}: this is one file of a tokenizer. Give its folder: {path.parent}."
        )
    if path.exists() or path.suffix == ".model":
        return path
    return download("policy.tokenizer.name", name, None, TOKENIZER_FILES)


def _folder(key: str, name: str, revision: str | None, *, with_weights: bool = True) -> Path:
    if name == EMBEDDED:
        from tandem.model.files.tiny import tiny_model

        return tiny_model()
    if is_checkpoint(Path(name)):
        folder = checkpoint_export(key, name)
        if not folder.is_dir():
            raise ConfigError(
                f"{setting(key, name)}: a checkpoint, which has to be exported before this command can read it. Run "
                f"{export_call(name)}, and give the folder that it writes."
            )
        return folder
    if is_run(Path(name)):
        return (Path(name) / "model").resolve()
    if Path(name).is_dir():
        return Path(name).resolve()
    weights = ["*.safetensors"] if with_weights else []
    return download(key, name, revision, [*TOKENIZER_FILES, *weights, *LICENCE_FILES])


def checkpoint_export(key: str, name: str) -> Path:
    """Return the cache folder for the model exported from a checkpoint. Its name is a hash of the checkpoint's manifest."""
    manifest = Path(name) / "manifest.json"
    if not manifest.is_file():
        raise ConfigError(
            f"{setting(key, name)}: a damaged checkpoint: its manifest.json is missing. Give another checkpoint."
        )
    return cache_dir() / "models" / f"checkpoint-{fingerprint(EXPORT_VERSION, sha256_of(manifest))[:16]}"


def download(key: str, name: str, revision: str | None, wanted: list[str]) -> Path:
    """Download the files that match the patterns `wanted` from a hub repository, and return their folder."""
    refuse_missing(key, name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except LocalEntryNotFoundError:
        raise ConfigError(
            f"{setting(key, name)}: there is no such folder here, the hub cannot be reached, and the cache holds no copy "
            "from an earlier download. Check the path or the name. Without a connection, give the folder of a model."
        ) from None
    except Exception as error:
        raise ConfigError(
            f"{setting(key, name)}: there is no such folder here, and the hub does not provide it: {one_line(error)}. Give "
            "a local folder, or check the name and the connection."
        ) from None


def refuse_missing(key: str, name: str) -> None:
    """Raise ConfigError if `name` looks like a local path. Call this only if no local folder has this name.

    A name that does not look like a path is accepted, because it may be the name of a hub repository.
    """
    if name.startswith(("/", "./", "../", "~")):
        raise ConfigError(f"{setting(key, name)}: no such directory. Check the path.")


def refuse_missing_model(place: str, name: str) -> None:
    """Raise ConfigError if the name of a model or a run is a path that does not exist. `place`: for the message.

    Any name that may be on the hub is accepted: runs/x is a path if there is a folder runs.
    """
    looks_local = name.startswith(("/", "./", "../", "~")) or ("/" in name and Path(name).parent.is_dir())
    if name != EMBEDDED and (looks_local or name.count("/") > 1):
        raise ConfigError(f"{place}: no such directory. Give a model folder, a hub name, or a run directory.")


def _is_known(model_type: Any) -> bool:
    from transformers import CONFIG_MAPPING

    return isinstance(model_type, str) and model_type in CONFIG_MAPPING


def describe(error: Exception) -> str:
    """Return the type and text of an unexpected error, to quote in a message."""
    return f"{type(error).__name__}: {one_line(error)}"
