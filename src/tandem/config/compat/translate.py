"""Translates the configuration of another trainer into tandem's keys, and says what became of each of its keys."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from tandem.config.compat.records import Given, Outcome, TranslatedKey, Translation, nested, no_effect, refused
from tandem.config.compat.rules.registry import RULES
from tandem.config.compat.suggest import closest, suggestion
from tandem.config.compat.table import Case, Table, load_table, matches, origins
from tandem.config.keys import all_keys, key_names
from tandem.config.losses import join_names
from tandem.config.source.files import DEFAULTS
from tandem.config.validation import GIVEN_BY_USER, flatten
from tandem.errors import ConfigError

OWN_FORMAT = "tandem"
UNKNOWN = "unknown key"
SHOWN = 20  # refused keys in a message
HIDDEN = "(not shown)"


def recognise(tree: dict[str, Any]) -> str | None:
    """The trainer that a configuration was written for, or None if it may be tandem's own."""
    given = Given(tree, flatten(tree), {})
    if all(is_own_key(key) for key in given.values):
        return None
    return next((origin for origin in origins() if load_table(origin).recognises(given)), None)


def translate(origin: str, tree: dict[str, Any], places: Mapping[str, str]) -> Translation:
    """Translate a configuration, whose interpolations are resolved. Raise ConfigError if a key cannot be translated.

    `places`: where each key was set.
    """
    table = load_table(origin)
    values = flatten(tree)
    given = Given(tree, values, {key: _place(key, places) for key in values})
    rows = [
        TranslatedKey(key, _shown(table, key, value), _outcome(table, key, value, given))
        for key, value in values.items()
    ]
    defaults = [row for key, value in table.defaults.items() for row in _default(key, value, given)]
    _refuse(table, [*rows, *_missing(table, given)], defaults, given)
    settings: dict[str, Any] = {}
    set_by: dict[str, str] = {}
    # What the user set in tandem's own names counts more than what a key of the other trainer is translated to.
    for row in sorted(rows, key=lambda row: (given.origins[row.key] in GIVEN_BY_USER, row.kind == "same")):
        for key, value in row.outcome.settings.items():
            _check_agreement(table.name, key, value, settings, set_by, given, row)
            settings[key], set_by[key] = value, row.key
    _check_sections(table.name, settings, set_by, given)
    rows += [
        row
        for row in defaults
        if row.key not in settings
        and not any(name.startswith(f"{row.key}.") or row.key.startswith(f"{name}.") for name in settings)
    ]
    settings |= {row.key: row.value for row in rows if row.kind == "default"}
    return Translation(
        origin=table.name,
        rows=tuple(rows),
        tree=nested(settings),
        origins={key: given.origins[set_by[key]] if key in set_by else table.name for key in settings},
    )


def _place(key: str, places: Mapping[str, str]) -> str:
    """Where a key, or a section that contains it, was set."""
    while key not in places and "." in key:
        key = key.rpartition(".")[0]
    return places.get(key, "configuration")


def start_without_file(origin: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The values that the trainer reads from its own file if none is given, and where they are set."""
    table = load_table(origin)
    return nested(table.without_file), dict.fromkeys(table.without_file, f"{table.name}'s own configuration")


def _default(key: str, value: Any, given: Given) -> list[TranslatedKey]:
    """The keys that a default sets: a value, or {rule: NAME}, which may set several, none, or be refused."""
    if not isinstance(value, dict) or list(value) != ["rule"]:
        return [TranslatedKey(key, value, Outcome("default", {key: value}))]
    outcome = _by_rule(value["rule"], key, None, given)
    if outcome.kind == "refused":
        return [TranslatedKey(key, None, outcome)]
    return [
        TranslatedKey(name, one, Outcome("default", {name: one}, outcome.note))
        for name, one in outcome.settings.items()
    ]


def is_own_key(key: str) -> bool:
    """Whether a key is in tandem's schema, or below one of its keys that take a mapping."""
    return key in key_names() or key.startswith(_mapping_keys())


@cache
def _mapping_keys() -> tuple[str, ...]:
    others = ("policy.scheduler", "data.validation")  # their fields are not listed as keys
    return tuple(f"{key.name}." for key in all_keys() if "map to" in key.type or key.name in others)


def _outcome(table: Table, key: str, value: Any, given: Given) -> Outcome:
    for inactive in table.inactive:
        if inactive.applies(key, given):
            return no_effect(inactive.reason)
    cases = table.cases(key)
    means_something = any(case.when is not None and None in case.when for case in cases)
    if value is None and table.null_is_unset and not means_something and not is_own_key(key):
        return no_effect("It is not set.")
    for case in cases:
        if not case.applies(value, given):
            continue
        match case.action:
            case "same":
                return Outcome("same", {key: value}, case.note)
            case "no_effect":
                return no_effect(case.argument)
            case "refused":
                return refused(case.argument)
            case "option":
                shown = ",".join(map(str, value)) if isinstance(value, list) else str(value)
                return Outcome("translated", note=case.note, options={case.argument: shown})
            case "rule":
                return _by_rule(case.argument, key, value, given)
            case _:
                return _renamed(key, value, case)
    if is_own_key(key):
        return Outcome("same", {key: value})
    if key == DEFAULTS:
        return no_effect("It chooses groups of Hydra's configuration, which only that trainer has.")
    return refused(UNKNOWN)


def _shown(table: Table, key: str, value: Any) -> Any:
    """The value of a key as tables and messages show it."""
    return HIDDEN if any(matches(pattern, key) for pattern in table.hidden) else value


def _by_rule(name: str, key: str, value: Any, given: Given) -> Outcome:
    try:
        return RULES[name](key, value, given)
    except (TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError):
        return refused("It, or a key that belongs to it, has a value of another type than expected. Correct it.")


def _renamed(key: str, value: Any, case: Case) -> Outcome:
    new = value
    if case.values is not None:
        if isinstance(value, dict | list) or value not in case.values:
            return refused(f"tandem knows {join_names([json.dumps(one) for one in case.values], 'or')}.")
        new = case.values[value]
    is_same = (case.argument, new) == (key, value)
    return Outcome("same" if is_same else "translated", {case.argument: new}, case.note)


def _check_agreement(
    name: str,
    key: str,
    value: Any,
    settings: Mapping[str, Any],
    set_by: Mapping[str, str],
    given: Given,
    row: TranslatedKey,
) -> None:
    """Raise ConfigError if two keys of the same file would set one key to different values, or an override cannot apply."""
    above = next((one for one in _sections(key) if one in settings), None)
    if above is not None and not isinstance(settings[above], dict):
        raise ConfigError(
            f"{given.origins[row.key]}: {key} cannot be set, because {set_by[above]} of {name} is translated to {above} = "
            f"{json.dumps(settings[above], ensure_ascii=False)}. Set {above} instead."
        )
    if key not in settings or settings[key] == value or given.origins[row.key] in GIVEN_BY_USER:
        return
    other = set_by[key]
    raise ConfigError(
        f"{given.origins[row.key]}: {other} and {row.key} of {name} both set {key} here, to "
        f"{json.dumps(settings[key])} and {json.dumps(value)}. Remove one of them."
    )


def _sections(key: str) -> Iterator[str]:
    """The sections that a key is in: a and a.b of a.b.c."""
    *above, _ = key.split(".")
    return (".".join(above[:end]) for end in range(1, len(above) + 1))


def _check_sections(name: str, settings: Mapping[str, Any], set_by: Mapping[str, str], given: Given) -> None:
    """Raise ConfigError if one key sets a value here, and another a part of that value."""
    for key in settings:
        sections = (one for one in _sections(key) if one in settings)
        if section := next((one for one in sections if not isinstance(settings[one], dict)), None):
            raise ConfigError(
                f"{given.origins[set_by[key]]}: {set_by[section]} and {set_by[key]} of {name} both set {section} here. Remove "
                "one of them."
            )


def _missing(table: Table, given: Given) -> list[TranslatedKey]:
    """The keys that must be set, and are not."""
    return [TranslatedKey(key, None, refused(why)) for key, why in table.required.items() if given.get(key) is None]


def _refuse(table: Table, rows: list[TranslatedKey], defaults: list[TranslatedKey], given: Given) -> None:
    """Raise one ConfigError about every key that is refused."""
    problems = [row for row in rows if row.kind == "refused"]
    reasons = {row.outcome.note for row in problems}  # a default may be refused for the same reason as a key
    problems += [row for row in defaults if row.kind == "refused" and row.outcome.note not in reasons]
    if not problems:
        return
    somewhere = next(iter(given.origins.values()), "configuration")
    near = [name for name in table.keys if "*" not in name]
    # Known keys that are refused together, for one reason, are in one line.
    by_reason: dict[tuple[str, ...], list[str]] = {}
    for row in problems[:SHOWN]:
        where = (given.origins.get(row.key, somewhere), _reason(table.name, row, near))
        alone = (row.key,) if row.outcome.note == UNKNOWN else ()
        by_reason.setdefault((*where, *alone), []).append(f"{row.key} = {json.dumps(row.value, ensure_ascii=False)}")
    lines = [f"  {place}: {', '.join(keys)}: {reason}" for (place, reason, *_), keys in by_reason.items()]
    count = "a key" if len(problems) == 1 else f"{len(problems):,} keys"
    more = [f"  and {len(problems) - SHOWN:,} more"] if len(problems) > SHOWN else []
    raise ConfigError("\n".join([f"{table.name} configuration: {count} cannot be translated.", *lines, *more]))


def _reason(name: str, row: TranslatedKey, known: list[str]) -> str:
    if row.outcome.note != UNKNOWN:
        return row.outcome.note or ""
    near = closest(row.key, known)
    hint = f"Did you mean {near}?" if near else suggestion(row.key)
    return f"tandem does not know this key of {name}. {f'{hint} Otherwise remove it.' if hint else 'Remove it.'}"
