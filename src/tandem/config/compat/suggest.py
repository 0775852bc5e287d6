"""Suggests a key in place of an unknown one: the key for another trainer's option of that name, or a key spelled similarly."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources

from tandem.config.keys import key_names
from tandem.config.losses import join_names, without_reference
from tandem.config.source.yaml_text import load_own_yaml

TABLE = "other_names.yaml"
LONGEST_NAME = 80  # longer names are not compared with keys, which are all shorter


@dataclass(frozen=True, slots=True)
class Meaning:
    """What to use instead of an option of another trainer: a key of tandem, a note that explains what to do, or both."""

    key: str | None
    note: str | None

    def __str__(self) -> str:
        return " ".join(part for part in (f"Did you mean {self.key}?" if self.key else None, self.note) if part)


@cache
def other_names() -> dict[str, Meaning]:
    """Return a dict from options of other trainers, in lower case, to what to use instead."""
    text = resources.files("tandem.config.compat").joinpath(TABLE).read_text(encoding="utf-8")
    text = text.replace("{losses_without_reference}", join_names(without_reference(), "and"))
    return {name: _meaning(given) for name, given in load_own_yaml(text).items()}


def _meaning(given: str | list[str]) -> Meaning:
    if isinstance(given, list):
        key, note = given
        return Meaning(key, note)
    return Meaning(None, given) if " " in given else Meaning(given, None)


def describe_unknown_key(key: str) -> str:
    """Return the message about a key that is not in the schema, with a suggestion if there is one."""
    if key in key_names():
        return f"the key {key} is written with dots. In a file, write nested sections instead."
    hint = suggestion(key)
    return f"unknown key {key}.{f' {hint}' if hint else ''} `tandem config` lists all keys."


def suggestion(key: str) -> str | None:
    """Return a hint on what to write instead of an unknown key. None if no known key is similar: a wrong hint would mislead."""
    plain = key.lower().replace("-", "_")
    leaf = plain.rpartition(".")[2]
    names = other_names()
    if found := names.get(plain) or names.get(leaf):
        return str(found)
    if near := similar_key(plain) or _with_leaf(leaf):
        return f"Did you mean {near}?"
    leaves = {name.rpartition(".")[2] for name in key_names()}
    if near := closest(leaf, leaves):
        return f"Did you mean {same}?" if (same := _with_leaf(near)) else None
    near = closest(leaf, names)
    return str(names[near]) if near else None


def similar_key(key: str) -> str | None:
    """Return the key of the same section whose spelling is closest to `key`, or None if no spelling is close."""
    section, _, leaf = key.rpartition(".")
    of_one = re.sub(r"\.\d+$", "", section)  # data.train.0 is one of several training sets
    here = [name.rpartition(".")[2] for name in key_names() if name.rpartition(".")[0] == of_one]
    near = closest(leaf, here)
    return f"{section}.{near}".lstrip(".") if near else None


def _with_leaf(leaf: str) -> str | None:
    """Return the only key whose last part is `leaf`; None if there are several or none. Keys of data.default are ignored."""
    found = [name for name in key_names() if name.rpartition(".")[2] == leaf and not name.startswith("data.default.")]
    return found[0] if len(found) == 1 else None


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to `name`, or None if every known name is too different.

    A name may differ by one edit, or by two if `name` has at least eight letters.
    """
    if len(name) > LONGEST_NAME:
        return None
    most = 2 if len(name) >= 8 else 1
    letters = set(name)
    # An edit changes the length by one at most, and adds and removes one letter at most. Most names differ by more.
    similar = (
        other for other in known if abs(len(name) - len(other)) <= most and len(letters ^ set(other)) <= 2 * most
    )
    near = [(distance, other) for other in similar if (distance := edits(name, other)) <= most]
    return min(near)[1] if near else None


def edits(one: str, other: str) -> int:
    """Return the edit distance of two names: 1 for wieght and weight.

    An edit inserts, deletes or replaces a letter, or swaps it with its neighbour.
    """
    before: list[int] = []
    above = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        row = [i]
        for j, wanted in enumerate(other, 1):
            least = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                least = min(least, before[j - 2] + 1)
            row.append(least)
        before, above = above, row
    return above[-1]
