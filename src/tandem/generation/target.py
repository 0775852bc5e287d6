"""Finds what MODEL|RUN names: a model folder, a hub name, the embedded model, the model of a run, or one of its checkpoints.

Does not import torch.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from tandem.config.sections.policy import Tokenizer as TokenizerConfig
from tandem.config.sections.section import EMBEDDED
from tandem.config.source.yaml_text import YamlLimitError, read_own_yaml
from tandem.data.text.template import Template, make_template
from tandem.data.text.tokenizer import load_tokenizer
from tandem.errors import ConfigError, TandemError
from tandem.exporting.cached import export_checkpoint
from tandem.model.files.folder import read_json
from tandem.model.files.source import (
    ModelSource,
    checkpoint_export,
    find_source,
    refuse_missing_model,
    weights_fingerprint,
)
from tandem.storage.cache import content_of, fingerprint, is_checkpoint, is_export
from tandem.terminal.arguments import option
from tandem.training.checkpoint.start_model import base_of, config_without_data, refuse_changed
from tandem.training.run.other_folders import hint_of_run, refuse_without_model, what_runs_it_holds

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Target:
    """A model to use: its name as given, where its weights are, the adapter on top of them, and its chat template."""

    name: str
    model: str  # a folder, a hub name, or embedded
    adapter: Path | None = None
    run: Path | None = None  # that trained the adapter
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)


@dataclass(frozen=True, slots=True, eq=False)
class FoundModel:
    """A model whose files have been checked: no weights are loaded yet."""

    target: Target
    source: ModelSource
    template: Template

    @property
    def max_tokens(self) -> int | None:
        """The longest sequence that the model was made for; None if its configuration does not say."""
        return getattr(self.source.config.get_text_config(), "max_position_embeddings", None)

    def fingerprint(self) -> str:
        """Names the content of the weights, the adapter and the template."""
        adapter = self.target.adapter
        parts = [content_of(adapter / ADAPTER_WEIGHTS), read_json(adapter / ADAPTER_CONFIG)] if adapter else []
        parts += ["as_is"] if self.template.plain_text_as_is else []
        return fingerprint(weights_fingerprint(self.source), self.template.source, self.template.kwargs, *parts)


def find_target(argument: str, name: str) -> Target:
    """Resolve MODEL|RUN. A run means the model in its folder `model`, with the chat template that it trained with.

    A checkpoint means the model that `tandem export` writes from it; `open_target` exports it to the cache.
    """
    folder = Path(name)
    if name == EMBEDDED or not folder.exists():
        refuse_missing_model(option(argument, name), name)
        return Target(name, name)
    if not folder.is_dir():
        raise ConfigError(
            f"{option(argument, name)}: a file, not a folder. Give a model folder, a hub name, or a run directory."
        )
    if is_checkpoint(folder):
        checkpoint_export(argument, name)  # raises an error if it is damaged
        return Target(name, name, tokenizer=_stored_tokenizer(folder))
    if (folder / "config.yaml").is_file() and not is_export(folder):
        return _run_target(argument, name, folder)
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
        return _adapter_target(argument, name, folder, TokenizerConfig())
    if not (folder / "config.json").is_file() and (runs := what_runs_it_holds(folder)):
        raise ConfigError(f"{option(argument, name)}: {runs}.{hint_of_run(folder)}")
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{option(argument, name)}: neither a model (it has no config.json) nor a run (it has no config.yaml). Give a "
            "model folder, a hub name, or a run directory."
        )
    return Target(name, name)


def open_target(argument: str, target: Target, chat_template: str | None = None) -> FoundModel:
    """Find and check the files of a model, and load its tokenizer. chat_template: a file, or none for raw text."""
    export_checkpoint(argument, target.model, lambda _: None)
    source = find_source(argument, target.model, None)
    if target.run is not None:
        _refuse_changed_base(target.run, source)
    settings = target.tokenizer
    if chat_template is not None:
        given = None if chat_template == "none" else chat_template
        settings = settings.model_copy(
            update={"chat_template": given, "chat_template_kwargs": {}, "plain_text": "turn"}
        )
    try:
        template = make_template(load_tokenizer(target.adapter or source.folder), settings)
    except ConfigError as error:
        raise ConfigError(about_own_argument(str(error))) from None
    return FoundModel(target, source, template)


def _refuse_changed_base(run: Path, source: ModelSource) -> None:
    """Refuse adapters of a run whose base model is not the model that they were trained on."""
    try:
        config = config_without_data(run)
    except TandemError:
        return  # the run's settings are not needed to generate
    if (base := base_of(run, config)) is not None:
        refuse_changed(base, source)


def about_own_argument(message: str) -> str:
    """A message about a configuration key, about the argument chat_template, which sets the same here."""
    key, own = "policy.tokenizer.chat_template", option("chat_template", metavar="")
    return message.replace(f"{key} = ", own).replace(f"{key}=", own)


def _run_target(argument: str, name: str, run: Path) -> Target:
    model = run / "model"
    refuse_without_model(option(argument, name), run)
    settings = _stored_tokenizer(run)
    if (model / ADAPTER_CONFIG).is_file():
        return replace(_adapter_target(argument, name, model, settings), run=run)
    return Target(name, str(model), tokenizer=settings)


def _adapter_target(argument: str, name: str, folder: Path, settings: TokenizerConfig) -> Target:
    base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ConfigError(
            f"{option(argument, name)}: an adapter whose {ADAPTER_CONFIG} names no base model. Merge it into its base "
            "model, and give that."
        )
    return Target(name, base, adapter=folder, tokenizer=settings)


def _stored_tokenizer(run: Path) -> TokenizerConfig:
    """The template settings of a run. Its model folder holds the template itself, so a template file is not read again."""
    try:
        stored: Any = read_own_yaml(run / "config.yaml")
        given = stored["policy"]["tokenizer"]
        template, kwargs = given.get("chat_template", "default"), given.get("chat_template_kwargs") or {}
        plain_text = given.get("plain_text", "turn")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError, YamlLimitError):
        return TokenizerConfig()
    return TokenizerConfig(
        chat_template=None if template is None else "default",
        chat_template_kwargs=dict(kwargs),
        plain_text="as_is" if plain_text == "as_is" else "turn",
    )
