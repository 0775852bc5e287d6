"""Loads a configuration: reads YAML files and their `defaults:`, applies overrides, and validates the result."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import reduce
from importlib import resources
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tandem.config.code import load_named_functions
from tandem.config.compat.interpolation import resolved
from tandem.config.compat.records import Translation
from tandem.config.compat.suggest import describe_unknown_key
from tandem.config.compat.table import load_table
from tandem.config.compat.table import origins as known_origins
from tandem.config.compat.translate import OWN_FORMAT, recognise, start_without_file, translate
from tandem.config.environment import (
    Interpolated,
    Place,
    as_written,
    check_sent_variables,
    interpolations,
    limited_resolution,
)
from tandem.config.keys import all_keys, key_names
from tandem.config.losses import join_names
from tandem.config.schema import Config
from tandem.config.sections.datasets import DatasetFields
from tandem.config.sections.section import EMBEDDED, expand_home
from tandem.config.source.files import TreeAndOrigins, merge, read_file, refuse_groups
from tandem.config.source.flags import with_flags
from tandem.config.source.overrides import Change, changes_in, parse_change
from tandem.config.source.script import is_script, read_script
from tandem.config.source.yaml_text import load_own_yaml, to_yaml
from tandem.config.validation import GIVEN_BY_USER, PYTHON, flatten, origin_of, validate
from tandem.errors import ConfigError, one_line
from tandem.terminal.arguments import in_command, option
from tandem.terminal.commands import key_of
from tandem.terminal.commands import override as override_text
from tandem.terminal.printable import SECRETS, Secrets, escaped, scrubbed

Overrides = Mapping[str, Any] | Sequence[str | Mapping[str, Any]]
Given = tuple[str | Mapping[str, Any], ...]  # overrides in the order in which they are applied
SCRIPT_FORMAT = "trl"  # the trainer whose scripts are read
EMBEDDED_DEFAULT = "the embedded default"  # the origin of its values
SHOWN_OVERRIDES = 8  # in a notebook
PLAIN_LEVELS = 16  # nested deeper than any key of the schema
MODEL_OR_DATA = ("policy.model_name.", "data.train.", "data.validation.", "data.val_data_paths.", "data.default.")


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The validated configuration, and where each key was set: in a file or on the command line."""

    config: Config
    origins: dict[str, str]
    # Values that may come from the environment, with the interpolation that is shown instead.
    from_environment: dict[Place, Any]
    file: str | None = None  # the configuration file, if one was given
    given: Given = ()  # overrides, as given
    sent_variables: tuple[str, ...] = ()  # environment variables that are sent to trackers or the hub
    allows_code: bool = False  # whether the file may name Python code
    from_format: str | None = None  # the trainer that the file was written for, if the user named it
    translation: Translation | None = None  # if the file was written for another trainer
    refused_formats: Mapping[str, str] = field(default_factory=dict)  # formats that are not loaded, and why
    secrets: Secrets = field(default_factory=Secrets, repr=False, compare=False)  # values to hide in messages

    def __repr__(self) -> str:
        """Where the settings are from, and the overrides, as given. A notebook prints this."""
        start = "the embedded default" if EMBEDDED_DEFAULT in self.origins.values() else "defaults"
        given = self.overrides
        more = [f"{len(given) - SHOWN_OVERRIDES} more overrides"] if len(given) > SHOWN_OVERRIDES else []
        lines = [self.file or start, *given[:SHOWN_OVERRIDES], *more]
        return "<LoadedConfig " + "\n  ".join(escaped(scrubbed(one)) for one in lines) + ">"

    @property
    def overrides(self) -> tuple[str, ...]:
        """The overrides as texts, for commands to copy."""
        return tuple(
            text
            for one in self.given
            for text in (
                [override_text(change.key, change.value) for change in changes_in(one)]
                if isinstance(one, Mapping)
                else [one]
            )
        )

    @property
    def options(self) -> list[str]:
        """The --allow-env and --allow-code options that a command needs if it reads this configuration from a file."""
        code = ["--allow-code"] if self.config.run.code else []
        return [*code, *(part for name in self.sent_variables for part in ("--allow-env", name))]

    @property
    def file_arguments(self) -> list[str]:
        """The arguments of a command that reads the same configuration, except the overrides."""
        file = [] if self.file is None else ["--config", self.file, *self.options]
        return [*file, *([] if self.from_format is None else ["--from-format", self.from_format])]

    def keys_set_by(self, override: str) -> set[str]:
        """Return the keys of tandem that an override sets. Its own key may be that of another trainer."""
        key = key_of(override)
        rows = self.translation.rows if self.translation is not None else ()
        return next((set(row.outcome.settings) for row in rows if row.key == key and row.outcome.settings), {key})

    def is_set_by_user(self, key: str) -> bool:
        """Whether a file or an override sets the key, and not only the embedded default."""
        *sections, name = key.split(".")
        section = reduce(getattr, sections, self.config)
        return name in section.model_fields_set and origin_of(key, self.origins) != EMBEDDED_DEFAULT

    def with_overrides(self, overrides: Overrides) -> "LoadedConfig":
        """Load the same file with other overrides."""
        given = {"allow_code": self.allows_code, "from_format": self.from_format}
        return load_config(self.file, overrides, self.sent_variables, **given)

    def as_yaml(self) -> str:
        """Return the resolved configuration as YAML."""
        return to_yaml(self.as_tree())

    def as_tree(self) -> dict[str, Any]:
        """Return the resolved configuration as it is stored. Values from the environment are shown as interpolations, ${...}.

        If the user must still choose a training set, data.train is left out, because its default is the bundled pairs.
        """
        tree = self.config.model_dump()
        if any(place[:2] == ("data", "default") for place in self.from_environment):
            _refer_to_default(tree["data"])
        if _setting_that_needs_training_set(self.config) is not None:
            del tree["data"]["train"]
        for place, interpolation in self.from_environment.items():
            _set(tree, list(place), interpolation)
        return tree


def load_config(
    config: Overrides | str | Path | None = None,
    overrides: Overrides = (),
    allow_env: Collection[str] = (),
    *,
    allow_code: bool = False,
    from_format: str | None = None,
    needs_formats: bool = True,
) -> LoadedConfig:
    """Read a file (or the embedded default), apply overrides, and validate the result.

    config: the path of a YAML file, or overrides, which are then applied to the embedded default.
    A file of another trainer (docs/from-nemo.md, docs/from-trl.md) is translated; overrides may be in its names or in tandem's.

    overrides: Hydra-style texts, such as "dpo.max_num_steps=10", or a dict of keys to values, nested or with dots. A value that
    is a function is the user's own loss or format (docs/python.md).
    allow_env: environment variables whose values a file may send to trackers or the hub.
    allow_code: whether a file may name Python code to run, as FILE.py:FUNCTION. Overrides may.
    from_format: the trainer that the file was written for, such as nemo-rl; None: recognised by its keys.
    needs_formats: whether a file that names a format may not be read without allow_code.
    """
    SECRETS.clear()
    file, given = _file_and_overrides(config, overrides)
    given, file = with_flags(deepcopy(given), file, from_format)
    from_format = from_format or (SCRIPT_FORMAT if file and is_script(file) else None)
    changes = [change for one in given for change in _changes(one)]
    _check_format(from_format)
    tree, origins = _start(file, from_format, changes)
    for change in changes:
        _apply(change, tree, origins)
    translation = _translated(tree, origins, from_format) if file or from_format else None
    if translation is not None:
        tree, origins = translation.tree, translation.origins
    else:
        refuse_groups(tree, origins)
    from_environment = as_written(tree)
    found, values = _resolved(tree)
    hidden = {".".join(map(str, place)): value for place, value in from_environment.items()}
    may_be_from_file = {one.key: file for one in found} if file else {}
    permission = {"allow_code": allow_code, "needs_formats": needs_formats}
    code = load_named_functions(values, origins, may_be_from_file, **permission)
    checked = validate(values, origins, hidden)
    from_files = {one.place: origin_of(one.key, origins) for one in found}
    from_files = {place: origin for place, origin in from_files.items() if origin not in GIVEN_BY_USER}
    return LoadedConfig(
        config=checked.model_copy(update={"run": checked.run.model_copy(update={"code": code.digests})}),
        origins=origins,
        from_environment=from_environment,
        file=file,
        given=given,
        sent_variables=check_sent_variables(checked, found, from_files, allow_env),
        allows_code=allow_code,
        from_format=from_format,
        translation=translation,
        refused_formats=code.refused_formats,
        secrets=SECRETS.copy(),
    )


def _file_and_overrides(config: Overrides | str | Path | None, overrides: Overrides) -> tuple[str | None, Given]:
    """Return the configuration file, and all overrides in order. `config` is either of them."""
    if isinstance(config, str) and "=" in config and not in_command() and not Path(config).exists():
        given = option("config", config)
        raise ConfigError(f"{given}: a single text is the path of a YAML file. Give settings as a list.")
    more = in_order(overrides)
    if config is None or isinstance(config, str | Path):
        return None if config is None else str(config), more
    return None, (*in_order(config, "config"), *more)


def in_order(overrides: Overrides, argument: str = "overrides") -> Given:
    """Return overrides in the order in which they are applied. `argument`: which gave them, for messages."""
    if isinstance(overrides, Mapping | str):
        return (overrides,)
    is_list = isinstance(overrides, Iterable)
    given = tuple(overrides) if is_list else (overrides,)
    wrong = [type(one).__name__ for one in given if not isinstance(one, str | Mapping)]
    if not wrong:
        return given
    what = f"{'has an item' if is_list else 'is'} of type {wrong[0]}"
    file = ", or the path of a YAML file" if argument == "config" else ""
    raise ConfigError(
        f'{argument} {what}. Give a dict such as {{"run.seed": 1}}, or a list of texts such as "run.seed=1"{file}.'
    )


def _changes(given: str | Mapping[str, Any]) -> list[Change]:
    if isinstance(given, Mapping):
        return changes_in(given)
    change = parse_change(given)
    return [change if in_command() else replace(change, origin=PYTHON)]


def _start(file: str | None, from_format: str | None, changes: list[Change]) -> TreeAndOrigins:
    if file is None:
        return _start_without_file(changes, from_format)
    path = Path(expand_home(file))
    return read_script(path) if is_script(file) else read_file(path)


def _translated(tree: dict[str, Any], origins: dict[str, str], from_format: str | None) -> Translation | None:
    """Return the translation of another trainer's configuration, or None if it is tandem's own."""
    origin = from_format or recognise(tree)
    if origin in (None, OWN_FORMAT):
        return None
    return translate(origin, resolved(tree, load_table(origin).absent), origins)


def _check_format(from_format: str | None) -> None:
    known = (OWN_FORMAT, *known_origins())
    if from_format not in (None, *known):
        raise ConfigError(f"{option('from_format', from_format)}: not a known format. Give {join_names(known, 'or')}.")


def require_training_set(config: Config) -> None:
    """Raise ConfigError if a model or a validation set is given, but no training set.

    Without a training set, the run would train on the bundled pairs.
    """
    if (given := _setting_that_needs_training_set(config)) is not None:
        raise ConfigError(
            f"{given}, but no training set is given, so the run would use the bundled pairs. Set "
            "data.train.data_path=FILE, or data.train.data_path=embedded if you want the bundled pairs."
        )


def _setting_that_needs_training_set(config: Config) -> str | None:
    """Return a setting that needs a training set, such as the user's own model or validation set, as "key = value".

    Return None if there is no such setting, or if a training set is given.
    """
    data = config.data
    own = {"policy.model_name": config.policy.model_name, "data.default.data_path": data.default.data_path}
    own |= {"data.validation": data.validation.data_path or data.validation.dataset_name} if data.validation else {}
    own |= {f"data.val_data_paths.{name}": one.data_path for name, one in data.val_data_paths.items()}
    given = next((f"{key} = {value}" for key, value in own.items() if value not in (None, EMBEDDED)), None)
    return None if "train" in data.model_fields_set else given


def _start_without_file(changes: list[Change], from_format: str | None) -> TreeAndOrigins:
    if from_format not in (None, OWN_FORMAT):
        return start_without_file(from_format)
    # The learning rate of the embedded default is for a tiny random model, so it must not apply to other models:
    # the embedded default is used only if neither a model nor data is given.
    keys = [change.key for change in changes]
    if "policy" in keys or "data" in keys or any(f"{key}.".startswith(MODEL_OR_DATA) for key in keys):
        return {}, {}
    text = resources.files("tandem.embedded").joinpath("default.yaml").read_text(encoding="utf-8")
    tree = load_own_yaml(text)
    return tree, dict.fromkeys(flatten(tree), EMBEDDED_DEFAULT)


def _apply(change: Change, tree: dict[str, Any], origins: dict[str, str]) -> None:
    if change.deletes:
        _delete(change.key, tree)
    else:
        _set(tree, change.key.split("."), change.value)
    prefix = change.key
    for key in [key for key in origins if key == prefix or key.startswith(prefix + ".")]:
        del origins[key]
    origins[prefix] = change.origin


def _delete(key: str, tree: dict[str, Any]) -> None:
    """Apply the override `~key`: set an optional key to null, and any other key to its default."""
    path = key.split(".")
    if key not in key_names() and not _holds(tree, path):
        raise ConfigError(f"override '~{key}': {describe_unknown_key(key)}")
    node = tree
    for part in path[:-1]:
        node = node.setdefault(part, {})
    node.pop(path[-1], None)
    if _optional(key):
        _set(tree, path, None)


def _optional(key: str) -> bool:
    return any(k.name == key and "null" in k.type.split(" or ") for k in all_keys())


def _holds(tree: Any, path: list[str]) -> bool:
    for part in path:
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    return True


def _set(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for depth, part in enumerate(path[:-1]):
        under = tree.get(part)
        # A dataset may be given as a plain path. Setting one of its fields turns it into a mapping.
        is_dataset = part in ("train", "validation") or path[:depth] == ["data", "val_data_paths"]
        if isinstance(under, str) and is_dataset:
            under = {"data_path": under}
        tree[part] = under = under if isinstance(under, dict) else {}
        tree = under
    tree[path[-1]] = value


def _refer_to_default(data: dict[str, Any]) -> None:
    """In each dataset, replace values that come from data.default with interpolations, ${data.default.NAME}.

    Values from data.default may come from the environment, and must not be shown.
    """
    train = data["train"] if isinstance(data["train"], list) else [data["train"]]
    for dataset in (*train, data["validation"] or {}, *data["val_data_paths"].values()):
        for name in dataset:
            if dataset[name] == data["default"][name] != DatasetFields.model_fields[name].default:
                dataset[name] = f"${{data.default.{name}}}"


def _resolved(tree: dict[str, Any]) -> tuple[list[Interpolated], dict[str, Any]]:
    """Return the interpolations in a configuration, and the configuration with their values."""
    if _is_plain(tree):  # building OmegaConf's nodes takes longer than everything else here
        return [], _given_part(tree, deepcopy(tree))
    everything = _with_defaults(tree)
    with _one_line_errors(), limited_resolution():
        found = interpolations(tree, everything)
        values: Any = OmegaConf.to_container(everything, resolve=True)
    return found, _given_part(tree, values)


def _is_plain(value: Any, levels: int = PLAIN_LEVELS) -> bool:
    """Whether OmegaConf would return a value as it is: without interpolations, and of types and depth that it accepts."""
    if isinstance(value, str):
        return type(value) is str and "${" not in value
    if type(value) is dict:
        return levels > 0 and all(type(key) is str and _is_plain(one, levels - 1) for key, one in value.items())
    if type(value) is list:
        return levels > 0 and all(_is_plain(one, levels - 1) for one in value)
    return value is None or type(value) in (bool, int, float)


def _with_defaults(tree: dict[str, Any]) -> Any:
    """Return `tree` merged over the default configuration, so that interpolations can refer to default values."""
    with _one_line_errors():
        return OmegaConf.create(merge(Config().model_dump(), tree))


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Turn OmegaConf's errors inside this context into a ConfigError with a message of one line."""
    try:
        yield
    except (OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"configuration: {one_line(error)}") from None


def _given_part(given: dict[Any, Any], resolved: dict[Any, Any]) -> dict[Any, Any]:
    """Return the part of `resolved` that the user set: only the keys in `given`, without defaults."""
    return {
        key: _given_part(value, resolved[key]) if isinstance(value, dict) else resolved[key]
        for key, value in given.items()
        if key != "_override_"
    }
