"""Validates the values of a configuration. One message reports all errors, each with the file that sets the value."""

import json
import re
from itertools import islice
from typing import Any

from pydantic import ValidationError

from tandem.config.compat.suggest import describe_unknown_key, similar_key, suggestion
from tandem.config.compat.table import load_table, trainers_with
from tandem.config.schema import Config
from tandem.errors import ConfigError
from tandem.terminal.arguments import option

COMMAND_LINE = "command line"
PYTHON = "given in Python"
GIVEN_BY_USER = (COMMAND_LINE, PYTHON)  # origins of values that are not in a file
SHOWN_ERRORS = 20
MOST_ERRORS = 50  # errors to process; a file may have any number of wrong keys
# For a union, pydantic adds the type that it tried to the location of an error. These parts are not keys.
UNION_BRANCH = re.compile(
    r"(function-.*|list\[.*|literal\[.*|constrained-.*|scheduler-.*|Scheduler|Milestones|one|several|int|float|bool|str)\Z"
)

SHORT_DTYPES = {"bfloat16": ("bf16",), "float16": ("fp16", "f16", "half"), "float32": ("fp32", "f32", "float")}


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one dict with dotted keys: {'a': {'b': 1}} is returned as {'a.b': 1}. Empty dicts stay as values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        elif key != "_override_":
            flat[f"{prefix}{key}"] = value
    return flat


def validate(tree: dict[str, Any], origins: dict[str, str], hidden: dict[str, Any]) -> Config:
    """Return the Config that a nested dict of values describes. Raise one ConfigError that reports all errors.

    `origins`: a dict from key to the file that sets the key. `hidden`: a dict from key to what messages show instead of the
    key's value, which may be secret.
    """
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        # A default that depends on another key is not computed if that key has an error. Only the first error is the user's.
        errors = [e for e in error.errors() if e["type"] != "default_factory_not_called"]
        num_more = len(errors[MOST_ERRORS:])
        errors = [one for e in _without_repeats(errors[:MOST_ERRORS]) for one in _split_unknown_section(e)]
        explained = [_explain(e, origins, hidden) for e in errors]
        raise ConfigError("\n".join([_join_errors(explained, num_more), *_keys_of_others(tree)])) from None


def _keys_of_others(tree: dict[str, Any]) -> list[str]:
    """Return a line on the trainers whose keys these are, if two or more keys outside tandem's sections are keys of one."""
    foreign = {key: value for key, value in tree.items() if key not in Config.model_fields}
    found = trainers_with(list(islice(flatten(foreign), MOST_ERRORS)))
    if not found:
        return []
    names = " and ".join(load_table(origin).name for origin in found)
    options = " or ".join(f"`{option('from_format', origin)}`" for origin in found)
    return [f"These are keys of {names}: {options} reads them."]


def _split_unknown_section(error: Any) -> list[Any]:
    """Split the error about an unknown section into a list of errors about the keys of the section.

    Only keys with a suggestion are included. The list holds just `error` itself if no key has a suggestion, if the section's own
    name is similar to a known key, or if `error` is not about an unknown section.
    """
    given = error["input"]
    if (
        error["type"] != "extra_forbidden"
        or not isinstance(given, dict)
        or similar_key(".".join(map(str, error["loc"])))
    ):
        return [error]
    inside = [(*error["loc"], *key.split(".")) for key in islice(flatten(given), MOST_ERRORS)]
    return [{**error, "loc": loc} for loc in inside if suggestion(".".join(map(str, loc)))] or [error]


def _without_repeats(errors: list[Any]) -> list[Any]:
    """Remove duplicate errors. An error in data.default occurs again for every dataset that inherits the value."""

    def identify(error: Any) -> tuple[Any, str]:
        return error["loc"][-1:], repr(error["input"])

    of_default = [e for e in errors if e["loc"][:2] == ("data", "default")]
    known = {identify(e) for e in of_default}
    return [e for e in errors if e in of_default or e["loc"][:1] != ("data",) or identify(e) not in known]


def _join_errors(explained: list[tuple[str, str | None]], num_more: int = 0) -> str:
    """Join errors into a text with one line per invalid value, and at most SHOWN_ERRORS lines.

    `explained`: a message and a reason for each error (see `_explain`). Reasons with the same message are joined on one line,
    because pydantic reports an error for each type of a union.
    """
    reasons: dict[str, list[str]] = {}
    for mistake, reason in explained:
        known = reasons.setdefault(mistake, [])
        if reason and reason not in known:
            known.append(reason)
    lines = [f"{mistake}: {', or '.join(why)}." if why else mistake for mistake, why in reasons.items()]
    num_more += len(lines[SHOWN_ERRORS:])
    return "\n".join([*lines[:SHOWN_ERRORS], *([f"... and {num_more:,} more."] if num_more else [])])


def _explain(error: Any, origins: dict[str, str], hidden: dict[str, Any]) -> tuple[str, str | None]:
    """Return the message about an error, and a reason to append to it. The reason is None if the message is complete."""
    loc = [str(part) for part in error["loc"] if not UNION_BRANCH.match(str(part))]
    key = ".".join(loc)
    place = origin_of(key, origins)
    if error["type"] == "extra_forbidden":
        return f"{place}: {describe_unknown_key(key)}", None
    if error["type"] == "value_error":
        return f"{place}: {error['ctx']['error']}.", None
    if error["type"] in ("dict_type", "model_type"):
        error = {**error, "msg": "it must be a mapping, such as {KEY: VALUE}"}
    if error["type"] == "too_short":
        least, given = error["ctx"]["min_length"], error["ctx"]["actual_length"]
        error = {**error, "msg": f"it has {given} items and needs at least {least}"}
    # A value from the environment may be a secret, so its interpolation is shown instead.
    shown = next((v for k, v in hidden.items() if f"{key}.".startswith(f"{k}.")), error["input"])
    reason = error["msg"][0].lower() + error["msg"][1:]
    meant = dtype_meant(error["input"]) if error["type"] == "literal_error" else None
    if meant is not None and f"'{meant}'" in error["ctx"]["expected"]:
        reason = f"did you mean {meant}? {error['msg']}"
    return f"{place}: {key} = {json.dumps(shown, default=str, ensure_ascii=False)}", reason


def dtype_meant(given: object) -> str | None:
    """Return the data type that a short spelling means: bfloat16 for bf16; None if it is not one."""
    return next(
        (name for name, short in SHORT_DTYPES.items() if isinstance(given, str) and given.lower() in short), None
    )


def origin_of(key: str, origins: dict[str, str]) -> str:
    """Return the file that sets a key; COMMAND_LINE or PYTHON if the user sets the key or a part of its value there."""
    found = [
        origin
        for known, origin in origins.items()
        if known == key or known.startswith(key + ".") or key.startswith(known + ".")
    ]
    return next((one for one in GIVEN_BY_USER if one in found), next(iter(found), "configuration"))
