"""Shows what became of the keys of another trainer's configuration."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from tandem.config.compat.records import Outcome, TranslatedKey, Translation

HEADINGS = {
    "translated": "Translated",
    "default": "Not set, so the other trainer's default applies",
    "same": "The same here",
    "no effect": "Without effect here",
}


def summary(translation: Translation, file: str | None) -> str:
    """One sentence with the number of keys of each kind."""
    rows = shown_rows(translation)
    counts = {kind: sum(1 for row in rows if row.kind == kind) for kind in HEADINGS}
    what = f"{file} is a configuration" if file else "A configuration"
    return (
        f"{what} of {translation.origin}. Keys translated: {counts['translated']}; the same here: {counts['same']}; without "
        f"effect here: {counts['no effect']}; set to {translation.origin}'s defaults: {counts['default']}."
    )


def short_lines(translation: Translation) -> list[str]:
    """The keys that are translated or get another default, one per line."""
    rows = shown_rows(translation)
    lines = [f"  {line}" for line in _lines(row for row in rows if row.kind == "translated")]
    defaults = [f"  {line}" for line in _lines(row for row in rows if row.kind == "default")]
    return [*lines, *([f"Not set there, so {translation.origin}'s defaults apply:", *defaults] if defaults else [])]


def full_table(translation: Translation, file: str | None) -> str:
    """Every key, and how it was translated."""
    return "\n".join([summary(translation, file), *_sections(translation), ""])


def _sections(translation: Translation) -> Iterator[str]:
    every = shown_rows(translation)
    for kind, heading in HEADINGS.items():
        if rows := [row for row in every if row.kind == kind]:
            yield from ("", heading, *(f"  {line}" for line in _lines(rows)))


def shown_rows(translation: Translation) -> list[TranslatedKey]:
    """Every key. Of a list of sections, each key inside it: datasets[0].path."""
    return [one for row in translation.rows for one in (row.outcome.parts or inside(row.key, row.value, row.outcome))]


def inside(key: str, value: Any, outcome: Outcome) -> list[TranslatedKey]:
    """Return the keys inside a list of sections, each with what became of the list. Other values are one key."""
    if isinstance(value, list) and any(isinstance(one, dict) and one for one in value):
        return [one for i, item in enumerate(value) for one in inside(f"{key}[{i}]", item, outcome)]
    if isinstance(value, dict) and value and key.endswith("]"):
        return [one for name, inner in value.items() for one in _fields(f"{key}.{name}", inner, outcome)]
    return [TranslatedKey(key, value, outcome)]


def _fields(key: str, value: Any, outcome: Outcome) -> list[TranslatedKey]:
    if isinstance(value, dict) and value:
        return [one for name, inner in value.items() for one in _fields(f"{key}.{name}", inner, outcome)]
    return inside(key, value, outcome)


def _lines(rows: Iterable[TranslatedKey]) -> Iterator[str]:
    """One line per key. A value that several keys are translated to together is shown once."""
    shown: set[str] = set()
    for row in rows:
        line = f"{row.key} = {_value(row.value)}"
        if row.kind == "translated":
            new = [f"{key} = {_value(value)}" for key, value in row.outcome.settings.items()]
            brief = [key if text in shown else text for key, text in zip(row.outcome.settings, new, strict=True)]
            brief += [f"{option} {value}" for option, value in row.outcome.options.items()]
            line = f"{line} -> {', '.join(brief)}"
            shown |= set(new)
        yield f"{line}  ({row.outcome.note})" if row.outcome.note else line


def _value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value
