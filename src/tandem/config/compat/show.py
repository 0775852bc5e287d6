"""Shows what became of the keys of another trainer's configuration."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from tandem.config.compat.records import TranslatedKey, Translation

HEADINGS = {
    "translated": "Translated",
    "default": "Not set, so the other trainer's default applies",
    "same": "The same here",
    "no effect": "Without effect here",
}


def summary(translation: Translation, file: str | None) -> str:
    """One sentence with the number of keys of each kind."""
    counts = {
        kind: sum(1 for _ in translation.of_kind(kind)) for kind in ("same", "translated", "no effect", "default")
    }
    what = f"{file} is a configuration" if file else "A configuration"
    return (
        f"{what} of {translation.origin}. Keys translated: {counts['translated']}; the same here: {counts['same']}; without "
        f"effect here: {counts['no effect']}; set to {translation.origin}'s defaults: {counts['default']}."
    )


def short_lines(translation: Translation) -> list[str]:
    """The keys that are translated or get another default, one per line."""
    lines = [f"  {line}" for line in _lines(translation.of_kind("translated"))]
    defaults = [f"  {line}" for line in _lines(translation.of_kind("default"))]
    return [*lines, *([f"Not set there, so {translation.origin}'s defaults apply:", *defaults] if defaults else [])]


def full_table(translation: Translation, file: str | None) -> str:
    """Every key with what became of it."""
    return "\n".join([summary(translation, file), *_sections(translation), ""])


def _sections(translation: Translation) -> Iterator[str]:
    for kind, heading in HEADINGS.items():
        rows = list(translation.of_kind(kind))  # type: ignore[arg-type]
        if rows:
            yield from ("", heading, *(f"  {line}" for line in _lines(rows)))


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
