"""Reads another trainer's flags, such as --beta 0.1, as overrides: beta=0.1."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.config.compat.table import Table, load_table, origins
from tandem.config.compat.translate import is_own_key
from tandem.errors import ConfigError
from tandem.terminal.commands import key_of, override

NUMBER = re.compile(r"[-+]?(\d{1,30}\.?\d{0,30}|\.\d{1,30})([eE][-+]?\d{1,3})?", re.ASCII)
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)

Given = tuple[str | Mapping[str, Any], ...]  # overrides


def with_flags(given: Given, file: str | None, from_format: str | None) -> tuple[Given, str | None]:
    """Return overrides in which flags are replaced by overrides, and the configuration file, which --config may name.

    Example: (run.name=a, --beta, 0.1, --bf16) is returned as (run.name=a, beta=0.1, bf16=true).
    """
    first = next((one for one in given if _is_flag(one)), None)
    if first is None:
        return given, file
    if from_format not in origins():
        raise ConfigError(
            f"{first}: flags after -- are those of another trainer. Name it with --from-format, such as --from-format trl; "
            "tandem's own keys are given as key=value."
        )
    others, flags = _split(given)
    table = load_table(from_format)
    overrides: list[str] = []
    for flag, values in flags:
        if flag == "config":
            file = _only_file(file, values)
        else:
            key, value = _key_and_value(flag, values, table)
            overrides.append(override(key, value))
    return (*overrides, *others), file


def _is_flag(one: Any) -> bool:
    return isinstance(one, str) and one.startswith("--") and len(one) > 2


def _split(given: Given) -> tuple[list[str | Mapping[str, Any]], list[tuple[str, list[str]]]]:
    """Return the overrides, and each flag with its values: the texts up to the next flag or override."""
    others: list[str | Mapping[str, Any]] = []
    flags: list[tuple[str, list[str]]] = []
    for one in given:
        if isinstance(one, str) and _is_flag(one):
            name, equals, value = one.removeprefix("--").partition("=")
            flags.append((name.replace("-", "_"), [value] if equals else []))
        elif isinstance(one, str) and flags and not is_own_key(key_of(one)):
            flags[-1][1].append(one)
        else:
            others.append(one)
    return others, flags


def _only_file(file: str | None, values: list[str]) -> str:
    if len(values) != 1:
        raise ConfigError(f"--config: {len(values)} files are given. Give one.")
    if file is not None:
        raise ConfigError(f"--config is given twice, with {file} and {values[0]}. Leave out one of them.")
    return values[0]


def _key_and_value(flag: str, values: Sequence[str], table: Table) -> tuple[str, Any]:
    """Return the key and value of a flag. Without a value it is true, and --no_FLAG without a value is false."""
    if not NAME.fullmatch(flag):
        raise ConfigError(f"--{flag}: not the name of a flag. Write --NAME VALUE.")
    positive = flag.removeprefix("no_")
    if not values and positive != flag and not table.cases(flag) and table.cases(positive):
        return positive, False
    if not values:
        return flag, True
    read = [_value(one) for one in values]
    return flag, read[0] if len(read) == 1 else read


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if NUMBER.fullmatch(text):
        return int(text) if text.lstrip("+-").isdecimal() else float(text)
    if text[:1] in ("{", "["):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return text
