"""Reads the tables of other trainers' keys (tables/README.md)."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from tandem.config.compat.records import Given
from tandem.config.source.yaml_text import load_own_yaml


@cache
def origins() -> tuple[str, ...]:
    """The trainers that have a table, by the names of --from-format."""
    files = resources.files("tandem.config.compat").joinpath("tables").iterdir()
    return tuple(sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml")))


@dataclass(frozen=True, slots=True)
class Case:
    """What becomes of a key, and the values for which it does."""

    action: str  # same, to, option, no_effect, refused or rule
    argument: str = ""
    values: Mapping[Any, Any] | None = None
    note: str | None = None
    when: tuple[Any, ...] | None = None
    conditions: Mapping[str, Any] | None = None

    def applies(self, value: Any, given: Given) -> bool:
        return (self.when is None or _is_one_of(value, self.when)) and holds(self.conditions or {}, given)


@dataclass(frozen=True, slots=True)
class Inactive:
    """Keys without effect unless some other key has a value."""

    keys: str
    reason: str
    conditions: Mapping[str, Any]
    if_met: bool

    def applies(self, key: str, given: Given) -> bool:
        return key not in self.conditions and matches(self.keys, key) and holds(self.conditions, given) == self.if_met


@dataclass(frozen=True, slots=True)
class Table:
    """The keys of one trainer."""

    name: str
    recognised_by: tuple[tuple[str, ...], ...]
    inactive: tuple[Inactive, ...]
    keys: Mapping[str, tuple[Case, ...]]
    defaults: Mapping[str, Any]
    absent: Mapping[str, Any]  # keys that interpolations may refer to, although not set
    without_file: Mapping[str, Any]  # values of the trainer's own configuration file
    required: Mapping[str, str]  # keys that must be set, with the reason
    null_is_unset: bool  # whether null means that the default applies
    hidden: tuple[str, ...]  # keys whose values may be secrets, and are not shown

    def cases(self, key: str) -> tuple[Case, ...]:
        """The cases of a key: those of its own name, or of the longest pattern that matches it."""
        if key in self.keys:
            return self.keys[key]
        found = [pattern for pattern in self.keys if "*" in pattern and matches(pattern, key)]
        return self.keys[max(found, key=len)] if found else ()

    def recognises(self, given: Given) -> bool:
        return any(
            all(any(matches(pattern, key) for key in given.values) for pattern in patterns)
            for patterns in self.recognised_by
        )


def trainers_with(keys: Collection[str]) -> list[str]:
    """Return the trainers that have two or more of these keys, by the names of --from-format: those that have the most."""
    counts = {origin: sum(1 for key in keys if load_table(origin).cases(key)) for origin in origins()}
    most = max(counts.values(), default=0)
    return [origin for origin, count in counts.items() if count == most >= 2]


def holds(conditions: Mapping[str, Any], given: Given) -> bool:
    """Whether every key has its value. A missing key has the value null; null and false are the same."""
    return all((given.get(key) or None) == (value or None) for key, value in conditions.items())


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    # True == 1 in Python, but not in a configuration.
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    parts = re.escape(pattern.removesuffix(".**")).replace(r"\*", "[^.]+")
    return re.compile(parts + (r"(\..+)?" if pattern.endswith(".**") else ""), re.DOTALL)


def matches(pattern: str, key: str) -> bool:
    return _expression(pattern).fullmatch(key) is not None


@cache
def load_table(origin: str) -> Table:
    text = resources.files("tandem.config.compat").joinpath(f"tables/{origin}.yaml").read_text(encoding="utf-8")
    read = load_own_yaml(text)
    reasons: dict[str, str] = read.get("reasons", {})
    return Table(
        name=read["name"],
        recognised_by=tuple(tuple(keys) for keys in read["recognised_by"]),
        inactive=tuple(
            Inactive(one["keys"], _text(one["reason"], reasons), one.get("if") or one["unless"], "if" in one)
            for one in read.get("inactive", [])
        ),
        keys={
            key: tuple(_case(one, reasons) for one in (entry if isinstance(entry, list) else [entry]))
            for key, entry in read["keys"].items()
        },
        defaults=read.get("defaults", {}),
        absent=read.get("absent", {}),
        without_file=read.get("without_file", {}),
        required={key: _text(reason, reasons) for key, reason in read.get("required", {}).items()},
        null_is_unset=read.get("null_is_unset", False),
        hidden=tuple(read.get("hidden", [])),
    )


def _case(entry: str | dict[str, Any], reasons: dict[str, str]) -> Case:
    if isinstance(entry, str):
        if entry == "same":
            return Case("same")
        if entry.startswith("-> "):
            return Case("to", entry.removeprefix("-> "))
        return Case("no_effect", _text(entry, reasons))
    (action,) = entry.keys() & {"to", "option", "no_effect", "refused", "rule", "same"}
    note = entry.get("note")
    return Case(
        action,
        _text(entry[action], reasons) if isinstance(entry[action], str) else "",
        entry.get("values"),
        None if note is None else _text(note, reasons),
        tuple(entry["when"]) if "when" in entry else None,
        entry.get("if"),
    )


def _text(written: str, reasons: dict[str, str]) -> str:
    return reasons[written.removeprefix("$")] if written.startswith("$") else written
