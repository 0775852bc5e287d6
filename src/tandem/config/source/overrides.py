"""Parses overrides of keys: texts in Hydra's syntax, such as dpo.max_num_steps=10, or dicts given in Python."""

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException

from tandem.config.validation import COMMAND_LINE, PYTHON
from tandem.errors import ConfigError, one_line
from tandem.terminal.arguments import option
from tandem.terminal.commands import override
from tandem.user_code import name_function

# Replaces a ~ at the start of a value, which Hydra does not accept. Quoted text is left alone.
TILDE = "__tilde__"
HOME_TILDE = re.compile(r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|(?:(?<=[\[{,:\s])|\A)~""")
# Replaces the colon of FILE.py:FUNCTION where it is a key of a map, {my_losses.py:focal: 1}, which Hydra would end at the colon.
COLON = "__colon__"
FUNCTION_IN_MAP = re.compile(r"""(?<=[{,\s])(["']?)([^"'{}\[\],\s]+\.py):([^\W\d]\w*)\1(?=\s*:)""")
CONFIG_ENDINGS = (".yaml", ".yml", ".py")  # of files that are configurations; .py: a script for TRL
# A quoted text, or a quote that is not closed.
QUOTED = re.compile(r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|["']""")
BRACKET = re.compile(r"[()\[\]{}]")
BRACKETS = {"(": ")", "[": "]", "{": "}"}
MAPPED_KEYS = ("dpo.preference_loss",)  # keys whose value may be a map, with keys that contain dots


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one key: the value to set, or `deletes`."""

    key: str
    value: Any = None
    deletes: bool = False
    origin: str = COMMAND_LINE


def parse_override(text: str) -> Override:
    """Parse key=value, +key=value or ~key. The value may be a sweep, such as a,b or range(1,4)."""
    try:
        parsed = _parsed(_without_tildes(_without_colons(text)))
    except RecursionError:
        raise ConfigError(f"override {text[:40]!r}…: nested too deeply. Use fewer levels.") from None
    except HydraException as error:
        if "=" not in text and not text.startswith("~"):
            raise ConfigError(f"override {text!r}: {_without_key(text)}") from None
        known = one_line(error) if " while evaluating " in str(error) else None  # of a function, such as range(1,4)
        raise ConfigError(f"override {text!r}: {_what_is_wrong(text, known)}") from None
    if not parsed.key_or_group:
        raise ConfigError(f"override {text!r}: no key before the =. Write key=value.")
    return parsed


def _what_is_wrong(text: str, known: str | None) -> str:
    """Return what is wrong with an override that has a =, and how to write it. `known`: the reason, if it is known."""
    key, _, value = text.partition("=")
    if not _is_key(key):
        return "its key cannot be read. Write key=value, +key=value or ~key. `tandem config` lists all keys."
    quoted = override(key, value) if '"' in value or value.endswith("\\") else f'{key}="{value}"'
    text_is_quoted = f"quote the value if it is text: {shlex.quote(quoted)}."
    if known is not None:
        return f"{known}. Correct it, or {text_is_quoted}"
    for found in QUOTED.finditer(value):
        if len(found[0]) == 1:
            return f"its {found[0]} is not closed. Close it, or {text_is_quoted}"
    opened: list[str] = []
    for found in BRACKET.finditer(QUOTED.sub("", value)):
        if found[0] in BRACKETS:
            opened.append(found[0])
        elif not opened:
            return f"its {found[0]} closes nothing. Leave it out, or {text_is_quoted}"
        elif BRACKETS[opened[-1]] == found[0]:
            opened.pop()
        else:
            break
    if opened:
        return f"its {opened[-1]} is not closed. Close it, or {text_is_quoted}"
    return (
        "its value is not a number, a list [a,b] or a map {a: b}, and other text with special characters needs quotes. Correct "
        f"it, or {text_is_quoted}"
    )


def _is_key(key: str) -> bool:
    try:
        _parsed(f"{key}=1")
    except HydraException:
        return False
    return True


def _without_key(text: str) -> str:
    """Return what an argument without = probably means, and how to give it."""
    if text.lower().endswith(CONFIG_ENDINGS):
        return f"a configuration file. Write {option('config', text)}."
    if os.path.isfile(text):  # noqa: PTH113 - pathlib raises if the text is too long for a name
        return (
            f"a file without a key. To train on it, write data.train={text}; for several files, use a pattern in quotes, "
            "'FOLDER/*.jsonl'."
        )
    if "/" in text:
        return (
            f"a path without a key. Write {option('config', metavar='FILE')} for a configuration, or data.train={text}."
        )
    return "an override is KEY=VALUE, such as run.seed=1. Write the key and its value."


@lru_cache(maxsize=1024)
def _parsed(text: str) -> Override:
    return OverridesParser.create().parse_override(text)


def parse_change(text: str) -> Change:
    """Parse an override of a single run. Raise ConfigError if it has several values."""
    parsed = parse_override(text)
    if parsed.is_sweep_override():
        key, value = parsed.key_or_group, text.partition("=")[2]
        grouped = re.fullmatch(r"\d{1,3}(,\d{3})+", value)
        one_number = f" Write a number without commas: {key}={value.replace(',', '')}." if grouped else ""
        list_key = "data.train" if key == "data.train.data_path" else key  # a set has one path; data.train takes a list
        raise ConfigError(
            f"override {text!r}: several values are a sweep, which a single run cannot do. To train one run per "
            f"value, use `tandem sweep`. For a list, write {list_key}=[a,b].{one_number}"
        )
    if parsed.type == OverrideType.DEL:
        return Change(parsed.key_or_group, deletes=True)
    return Change(parsed.key_or_group, plain_value(parsed.value()))


def changes_in(tree: Mapping[str, Any]) -> list[Change]:
    """Return the changes that a dict describes. Its keys may be nested, or have dots: {"run": {"seed": 1}}, {"run.seed": 1}."""
    found: list[Change] = []

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping) and value and prefix not in MAPPED_KEYS:
            for key, inner in value.items():
                add(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            found.append(Change(prefix, _without_functions(prefix, value), origin=PYTHON))

    add("", tree)
    return [change for change in found if change.key]


def _without_functions(key: str, value: Any) -> Any:
    """Return a value with functions replaced by their names, and paths by texts."""
    if isinstance(value, Mapping):
        return {_without_functions(key, name): _without_functions(key, inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_functions(key, one) for one in value]
    if isinstance(value, Path):
        return str(value)
    return name_function(key, value) if callable(value) else value


def plain_value(value: Any) -> Any:
    """Convert a value parsed by Hydra to plain Python types. Hydra represents quoted strings as objects."""
    if isinstance(value, dict):
        return {str(plain_value(k)): plain_value(v) for k, v in value.items()}
    if isinstance(value, list):
        return [plain_value(v) for v in value]
    value = value.text if hasattr(value, "text") else value
    return value.replace(TILDE, "~").replace(COLON, ":") if isinstance(value, str) else value


def _without_colons(text: str) -> str:
    """In a map of losses to weights, replace the colon in the name of a user's function with a placeholder."""
    key, equals, value = text.partition("=")
    if key.lstrip("+") not in ("dpo", *MAPPED_KEYS):
        return text
    return f"{key}{equals}{FUNCTION_IN_MAP.sub(lambda found: f'{found[2]}{COLON}{found[3]}', value)}"


def _without_tildes(text: str) -> str:
    """Replace ~ in the value of an override, such as data.train=~/pairs.jsonl, with a placeholder that Hydra accepts."""
    key, equals, value = text.partition("=")
    return f"{key}{equals}{HOME_TILDE.sub(lambda found: found[1] or TILDE, value)}"
