"""An unknown key in; what to write instead out: a name known from another trainer, or a key that is spelled almost like it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources

import yaml

from tandem.config.keys import key_names
from tandem.config.losses import listed, without_reference

TABLE = "other_names.yaml"
LONGEST_NAME = 80  # no key, here or elsewhere, is spelled almost like a longer one


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a name from elsewhere is here: a key, a note, or both."""

    key: str | None
    note: str | None

    def __str__(self) -> str:
        return " ".join(part for part in (f"Did you mean {self.key}?" if self.key else None, self.note) if part)


@cache
def other_names() -> dict[str, Meaning]:
    """Names from other trainers, in lower case."""
    text = resources.files("tandem.config.compat").joinpath(TABLE).read_text(encoding="utf-8")
    text = text.replace("{losses_without_reference}", listed(without_reference(), "and"))
    return {name: _meaning(given) for name, given in yaml.safe_load(text).items()}


def _meaning(given: str | list[str]) -> Meaning:
    if isinstance(given, list):
        key, note = given
        return Meaning(key, note)
    return Meaning(None, given) if " " in given else Meaning(given, None)


def unknown(key: str) -> str:
    """What to say of a key that the schema does not know."""
    if key in key_names():
        return f"the key {key} is written with dots. In a file, write it as sections, one inside the other."
    hint = suggestion(key)
    return f"unknown key {key}.{f' {hint}' if hint else ''} `tandem config` lists all keys."


def suggestion(key: str) -> str | None:
    """None where nothing is close enough: a wrong suggestion is worse than none."""
    plain = key.lower().replace("-", "_")
    leaf = plain.rpartition(".")[2]
    names = other_names()
    if found := names.get(plain) or names.get(leaf):
        return str(found)
    if near := misspelt(plain) or _with_leaf(leaf):
        return f"Did you mean {near}?"
    leaves = {name.rpartition(".")[2] for name in key_names()}
    if near := _closest(leaf, leaves):
        return f"Did you mean {same}?" if (same := _with_leaf(near)) else None
    near = _closest(leaf, names)
    return str(names[near]) if near else None


def misspelt(key: str) -> str | None:
    """The key of the same section that is spelled almost like it, in the place where it was written."""
    section, _, leaf = key.rpartition(".")
    of_one = re.sub(r"\.\d+$", "", section)  # data.train.0 is one of several training sets
    here = [name.rpartition(".")[2] for name in key_names() if name.rpartition(".")[0] == of_one]
    near = _closest(leaf, here)
    return f"{section}.{near}".lstrip(".") if near else None


def _with_leaf(leaf: str) -> str | None:
    """The key that ends so, of datasets the training set's; None where several do."""
    found = [name for name in key_names() if name.rpartition(".")[2] == leaf and not name.startswith("data.default.")]
    return found[0] if len(found) == 1 else None


def _closest(name: str, known: Iterable[str]) -> str | None:
    """One edit away, or two for a name of eight letters and more."""
    if len(name) > LONGEST_NAME:
        return None
    most = 2 if len(name) >= 8 else 1
    near = [(distance, other) for other in sorted(known) if (distance := edits(name, other)) <= most]
    return min(near)[1] if near else None


def edits(one: str, other: str) -> int:
    """Letters inserted, left out, changed, or exchanged with their neighbour: wieght -> weight is 1."""
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
