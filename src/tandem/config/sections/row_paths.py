"""Paths to values inside a row, for data.train.columns: dotted keys and list indexing, such as conversation[0].value.

conversation[-1]   the last element        answers[*].text   the text of every element
messages[:-1]      all but the last        ["a.b"].c         a key that has a dot
"""

import re
from dataclasses import dataclass

MAX_CHARACTERS = 500
MAX_STEPS = 32
KEY = re.compile(r"[^.\[\]]+")
BRACKETS = re.compile(
    r"""\[(?:(?P<every>\*)|(?P<index>-?\d{1,9})|(?P<start>-?\d{1,9})?:(?P<stop>-?\d{1,9})?|(?P<quote>['"])(?P<key>.+?)(?P=quote))\]"""
)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a path: a key of an object, an index or a slice of a list, or every element of a list."""

    text: str  # as written, for error messages
    take: str | int | slice | None  # None: every element


def parse_path(path: str) -> tuple[Step, ...]:
    """Return the steps of a path. Raise a ValueError, with the reason, if it cannot be read."""
    if len(path) > MAX_CHARACTERS:
        raise ValueError(f"the path has {len(path):,} characters, more than {MAX_CHARACTERS}")
    steps: list[Step] = []
    at = 0
    while at < len(path) or not steps:
        dotted = bool(steps) and path[at : at + 1] == "."
        at += dotted
        found = (BRACKETS if path[at : at + 1] == "[" and not dotted else KEY).match(path, at)
        is_bare = found is not None and found.re is KEY and bool(steps) and not dotted
        if found is None or is_bare:
            what = f"at {path[at:][:20]!r}" if path[at:] else "at its end"
            raise ValueError(f"a key, [0] or [*] is expected {what}")
        steps.append(_step(found))
        at = found.end()
    if len(steps) > MAX_STEPS:
        raise ValueError(f"the path has {len(steps)} steps, more than {MAX_STEPS}")
    return tuple(steps)


def _step(found: re.Match[str]) -> Step:
    if found.re is KEY:
        return Step(found[0], found[0])
    parts = found.groupdict()
    if parts["every"]:
        return Step(found[0], None)
    if parts["quote"]:
        return Step(found[0], parts["key"])
    if parts["index"]:
        return Step(found[0], int(parts["index"]))
    start, stop = (None if parts[name] is None else int(parts[name]) for name in ("start", "stop"))
    return Step(found[0], slice(start, stop))
