"""Reads a YAML configuration and the files that its `defaults:` lists."""

import json
import os
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tandem.config.sections.section import expand_home
from tandem.config.source.yaml_text import YamlLimitError, is_scalar, listed_in, read_yaml_text, resolve_config_path
from tandem.config.validation import flatten
from tandem.errors import ConfigError, one_line
from tandem.terminal.printable import not_utf8

TreeAndOrigins = tuple[dict[str, Any], dict[str, str]]  # a tree of values, and the file that each key came from
DEFAULTS = "defaults"
THIS_FILE = "_self_"  # in Hydra's lists: the place of the file itself among those that it lists
MAX_DEFAULTS = 64  # files in a chain of `defaults:`


def read_file(path: Path) -> TreeAndOrigins:
    """Read a YAML file, merged over the files that its `defaults:` lists.

    The key `defaults` remains if it lists groups of Hydra, which are mappings. `refuse_groups` refuses them.
    """
    return _read(path, (), {})


def refuse_groups(tree: dict[str, Any], origins: dict[str, str]) -> None:
    """Raise ConfigError if `defaults:` lists groups of Hydra. Only files of other trainers may have them."""
    if DEFAULTS in tree:
        raise _not_file_names(origins[DEFAULTS], tree[DEFAULTS])


def _not_file_names(path: Path | str, given: Any) -> ConfigError:
    return ConfigError(f"{path}: `defaults:` must be a file name or a list of file names, not {json.dumps(given)}.")


def _read(path: Path, above: tuple[Path, ...], known: dict[Path, TreeAndOrigins]) -> TreeAndOrigins:
    """Read a YAML file and merge it over the files that its `defaults:` lists.

    Paths in `defaults:` are relative to the file, and later files override earlier ones. `above`: the chain of files whose
    `defaults:` led to this file, to detect cycles. `known`: the results of files that were already read.
    """
    path = resolve_config_path(path, above[-1] if above else None)
    if path in above:
        chain = " -> ".join(str(p) for p in (*above, path))
        raise ConfigError(f"{path}: circular `defaults:`: {chain}. Remove one of these files from `defaults:`.")
    if len(above) > MAX_DEFAULTS:
        raise ConfigError(f"{above[0]}: `defaults:` form a chain of more than {MAX_DEFAULTS} files. Shorten it.")
    if path in known:
        return known[path]
    try:
        is_mapping = not is_scalar(read_yaml_text(path))  # OmegaConf would parse the text of a scalar as YAML again
        loaded: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False) if is_mapping else ""
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file{listed_in(above[-1] if above else None)}.") from None
    except YamlLimitError as error:
        raise ConfigError(f"{path}: {error} Is it a configuration file?") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: {not_utf8(error)}") from None
    except (yaml.YAMLError, ValueError, OSError, OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {one_line(error)}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: a configuration must be a mapping of sections, not a {type(loaded).__name__}.")
    parents = loaded.pop(DEFAULTS, [])
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(isinstance(parent, str | dict) for parent in parents):
        raise _not_file_names(path, parents)
    if any(isinstance(parent, dict) for parent in parents):
        loaded[DEFAULTS] = parents
    parents = [parent for parent in parents if isinstance(parent, str)]
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for parent in parents[:-1] if parents[-1:] == [THIS_FILE] else parents:
        below, below_origins = _read(_listed_file(path, parent), (*above, path), known)
        tree = merge(tree, below)
        origins |= below_origins
    known[path] = merge(tree, loaded), origins | dict.fromkeys(flatten(loaded), str(path))
    return known[path]


def _listed_file(path: Path, name: str) -> Path:
    """The file that `defaults:` of `path` calls `name`. Hydra leaves out .yaml."""
    file = path.parent / expand_home(name)
    with_suffix = file.with_name(f"{file.name}.yaml")
    return with_suffix if not os.path.lexists(file) and os.path.lexists(with_suffix) else file


def merge(below: dict[Any, Any], above: dict[Any, Any]) -> dict[Any, Any]:
    """Return `below` updated with `above`, key by key.

    A section of `above` with `_override_: true` replaces the section of `below`.
    """
    above = dict(above)
    merged = {} if above.pop("_override_", False) else dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = merge(under if isinstance(under, dict) else {}, value) if isinstance(value, dict) else value
    return merged
