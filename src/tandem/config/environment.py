"""Finds the environment variables that a configuration reads, hides their values, and checks which ones are sent to servers."""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

from omegaconf import DictConfig, Node, OmegaConf
from omegaconf.base import Container
from omegaconf.resolvers import oc

from tandem.config.keys import all_keys
from tandem.config.schema import Config
from tandem.config.sections.datasets import DatasetFields
from tandem.config.sections.section import EMBEDDED
from tandem.config.source.yaml_text import MAX_CHARACTERS, MAX_VALUES
from tandem.config.tracked import METRICS
from tandem.errors import ConfigError
from tandem.terminal.arguments import option
from tandem.terminal.printable import SECRETS

Place = tuple[Any, ...]  # path of a value: the keys, and the indices of list items, that lead to it

# Text that may name a model or dataset on the hub, if no such path exists.
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
DATA_FILE = re.compile(r"\.(jsonl?|csv|parquet|arrow|npy)(\.(gz|zst))?\Z")
LOCAL_MLFLOW = ("sqlite:///", "file:///", "/", ".")
DIRECTORIES = (("run", "dir"), ("checkpointing", "checkpoint_dir"))
HUB_DATASET_FIELDS = ("data_path", "subset", "split", "revision")

_reading: ContextVar[set[str] | None] = ContextVar("_reading", default=None)


@dataclass(frozen=True, slots=True)
class Interpolated:
    """A configuration value that contains interpolations, ${...}.

    Has the path of the value, its text in the file, and the environment variables that are read to resolve it.
    """

    place: Place
    written: str
    variables: frozenset[str]

    @property
    def key(self) -> str:
        return ".".join(map(str, self.place))


def interpolations(tree: dict[str, Any], everything: DictConfig) -> list[Interpolated]:
    """Return the values of the nested dict `tree` that contain interpolations.

    `everything`: `tree` merged over the default configuration. An interpolation may refer to any value of `everything`.
    """
    OmegaConf.register_new_resolver("oc.env", _env, replace=True)
    return [
        Interpolated(place, written, _variables(everything, place))
        for place, written in _texts(tree)
        if "${" in written
    ]


def as_written(tree: dict[str, Any]) -> dict[Place, Any]:
    """Return a dict from path to unresolved value, for the values that must not be shown resolved.

    A resolver such as oc.env may return a secret, and any interpolation may refer to that secret. So if an interpolation calls a
    resolver, the dict has all values that contain interpolations. Otherwise the dict is empty.
    """
    values = {place: value for place, value in _values(tree) if any("${" in text for _, text in _texts(value))}
    uses_resolver = any(":" in text.partition("${")[2] for value in values.values() for _, text in _texts(value))
    return values if uses_resolver else {}


def check_sent_variables(
    config: Config, found: list[Interpolated], origins: Mapping[Place, str], allowed: Collection[str]
) -> tuple[str, ...]:
    """Return the names of the environment variables whose values are sent to a tracker or the hub.

    Raise ConfigError if a value from a file sends a variable that is not in `allowed`. Values from the command line may send any
    variable. `origins`: the file that each value came from; values from the command line are not in it.
    """
    sent_places = list(_sent_places(config))
    sent: set[str] = set()
    for one in found:
        if not one.variables or not any(place[: len(one.place)] == one.place for place in sent_places):
            continue
        if one.place in DIRECTORIES and not _is_in_name(one.written):
            continue
        sent |= one.variables
        refused = sorted(one.variables - set(allowed))
        if refused and one.place in origins:
            raise ConfigError(
                f"{origins[one.place]}: {one.key} = {json.dumps(one.written, ensure_ascii=False)}: the value of "
                f"{' and '.join(refused)} would be sent over the network. If you trust the file, add "
                f"{option('allow_env', refused)}; otherwise set {one.key} on the command line."
            )
    return tuple(sorted(sent))


def _sent_places(config: Config) -> Iterator[Place]:
    """Yield the paths of the configuration values that are sent to trackers or to the hub."""
    logger = config.logger
    uri = logger.mlflow.tracking_uri
    mlflow = logger.mlflow_enabled and not (uri or "").startswith(LOCAL_MLFLOW)
    if logger.wandb_enabled:
        yield from (("logger", "wandb", name) for name in ("project", "name", "entity"))
    if mlflow:
        yield from (("logger", "mlflow", name) for name in ("experiment_name", "run_name", "tracking_uri"))
    if logger.tensorboard_enabled and "://" in (logger.tensorboard.log_dir or ""):
        yield "logger", "tensorboard", "log_dir"
    if (logger.wandb_enabled and not logger.wandb.name) or (mlflow and not logger.mlflow.run_name):
        yield from (("run", "name"), *DIRECTORIES)  # the default name of a run in trackers contains them
    named = {
        ("policy", "model_name"): config.policy.model_name,
        ("policy", "tokenizer", "name"): config.policy.tokenizer.name,
        ("policy", "lora", "adapter"): config.policy.lora.adapter,
        ("reference", "model"): config.reference.model,
    }
    yield from (place for place, name in named.items() if _is_on_hub(name))
    if _is_on_hub(config.policy.model_name):
        yield "policy", "revision"
    for place, dataset in _datasets(config):
        if _is_on_hub(dataset.data_path) and not DATA_FILE.search(dataset.data_path or ""):
            yield from ((*place, name) for name in HUB_DATASET_FIELDS)
            yield from (("data", "default", name) for name in HUB_DATASET_FIELDS)


def _is_in_name(path: str) -> bool:
    """Whether the last component of `path` may contain an interpolation.

    True for runs/${oc.env:NAME}; False for ${oc.env:SCRATCH}/runs/a.
    """
    name = path.rpartition("/")[2]
    return name in ("", ".", "..") or "${" in name or "}" in name


def _datasets(config: Config) -> Iterator[tuple[Place, DatasetFields]]:
    data = config.data
    if isinstance(data.train, list):
        yield from ((("data", "train", number), one) for number, one in enumerate(data.train))
    else:
        yield ("data", "train"), data.train
    if data.validation:
        yield ("data", "validation"), data.validation
    yield from ((("data", "val_data_paths", name), one) for name, one in data.val_data_paths.items())


def _is_on_hub(name: str | None) -> bool:
    if name is None or name == EMBEDDED:
        return False
    return HUB_NAME.fullmatch(name) is not None and not os.path.exists(name)  # noqa: PTH110 - pathlib raises for some text


def _variables(everything: DictConfig, place: Place) -> frozenset[str]:
    """Return the environment variables that a value reads, directly or through other interpolations."""
    with _record_variables() as names:
        value: Any = everything
        for part in place:
            value = value[part]
        if OmegaConf.is_config(value):
            OmegaConf.to_container(value, resolve=True)
    return frozenset(names)


@contextmanager
def _record_variables() -> Iterator[set[str]]:
    """Yield a set. Inside this context, the name of every environment variable that oc.env reads is added to the set."""
    names: set[str] = set()
    token = _reading.set(names)
    try:
        yield names
    finally:
        _reading.reset(token)


def _env(*arguments: Any) -> str | None:
    """Resolve oc.env as OmegaConf does; also record the variable and hide its value in all later messages."""
    name, names = str(arguments[0]), _reading.get()
    if name in os.environ:
        SECRETS.add(name, os.environ[name], _words())
        if names is not None:
            names.add(name)
    return oc.env(*arguments)


@cache
def _words() -> frozenset[str]:
    """Return the words of the schema, such as float32.

    They are never hidden, even if an environment variable has such a value.
    """
    keys = " ".join(f"{key.name} {key.type} {key.default}" for key in all_keys())
    words = re.findall(r"[\w-]+(?:\.[\w-]+)*", keys)
    return frozenset([*words, *(part for word in words for part in word.split(".")), *METRICS])


def _values(tree: dict[Any, Any], above: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield each leaf of nested dicts with its path: {"a": {"b": [1]}} yields (("a", "b"), [1])."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _values(value, (*above, key))
        else:
            yield (*above, key), value


def _texts(value: Any, above: Place = ()) -> Iterator[tuple[Place, str]]:
    """Yield each string in nested dicts and lists with its path: {"a": ["b"]} yields (("a", 0), "b")."""
    if isinstance(value, str):
        yield above, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _texts(inner, (*above, key))


MAX_RESOLVED = 2_000  # most interpolations to resolve, repeats included; each takes about half a millisecond


@dataclass(slots=True)
class _ResolutionCost:
    """How many interpolations were resolved so far, and how large the results are."""

    resolved: int = 0
    values: int = 0
    characters: int = 0

    def is_too_much(self) -> bool:
        return self.resolved > MAX_RESOLVED or self.values > MAX_VALUES or self.characters > MAX_CHARACTERS

    def add(self, found: Any) -> None:
        if OmegaConf.is_config(found):
            found = OmegaConf.to_container(found, resolve=False)
        elif isinstance(found, Node):
            found = found._value()
        self._measure(found)
        self.check()

    def check(self) -> None:
        if self.is_too_much():
            raise ValueError("interpolations expand to more than the limit")

    def _measure(self, value: Any) -> None:
        self.values += 1
        self.characters += len(value) if isinstance(value, str) else 0
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            self._measure(inner)


@contextmanager
def limited_resolution() -> Iterator[None]:
    """Raise ConfigError if OmegaConf resolves too much inside this context. A small file can expand to any size.

    Example: with a: ${b}${b}, b: ${c}${c} and c: x, resolving a resolves b twice and c four times, because OmegaConf does not
    cache.
    """
    resolve, spent = Container.resolve_parse_tree, _ResolutionCost()

    def counted(self: Container, *given: Any, **named: Any) -> Any:
        spent.resolved += 1
        spent.check()
        found = resolve(self, *given, **named)
        spent.add(found)
        return found

    Container.resolve_parse_tree = counted  # type: ignore[method-assign]
    try:
        yield
    except Exception:
        if spent.is_too_much():
            raise ConfigError(
                f"configuration: its interpolations (${{key}}) expand to more than {MAX_RESOLVED:,} resolved "
                f"references, {MAX_VALUES:,} values or {MAX_CHARACTERS:,} characters. Use fewer interpolations."
            ) from None
        raise
    finally:
        Container.resolve_parse_tree = resolve  # type: ignore[method-assign]
