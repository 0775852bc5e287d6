"""Finds the licence of a model in its folder: the front matter of README.md, or a well-known LICENSE text."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tandem.config.source.yaml_text import YamlLimitError, check_yaml
from tandem.storage.cache import outside_of

MAX_CHARACTERS = 64 * 1024  # of a file; front matter is far shorter
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 .+_-]{0,79}")
LINK = re.compile(r"https?://[^\s<>\"']{1,200}|[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE")
# Words at the start of a licence's text, and the hub's name for it.
TEXTS = {
    "apache-2.0": re.compile(r"Apache License\W+Version 2\.0"),
    "mit": re.compile(r"MIT License|Permission is hereby granted, free of charge"),
    "gpl-3.0": re.compile(r"GNU GENERAL PUBLIC LICENSE\W+Version 3"),
    "cc-by-nc-4.0": re.compile(r"Attribution-NonCommercial 4\.0 International"),
    "cc-by-4.0": re.compile(r"Attribution 4\.0 International"),
    "bsd-3-clause": re.compile(r"BSD 3-Clause"),
}


@dataclass(frozen=True, slots=True)
class Licence:
    """A licence: its identifier on the hub. If the identifier is `other`, also a name, and perhaps a link."""

    identifier: str | None = None
    own_name: str | None = None
    link: str | None = None

    @property
    def name(self) -> str | None:
        return self.own_name or self.identifier

    def front_matter(self) -> dict[str, str]:
        given = {"license": self.identifier, "license_name": self.own_name, "license_link": self.link}
        return {key: value for key, value in given.items() if value is not None}


def licence_of(folder: Path) -> Licence:
    """Return the licence that is stated in a model's folder. If no licence is stated, all fields are None."""
    matter = _front_matter(_read(folder, "README.md"))
    identifier = _matching(NAME, matter.get("license"))
    if identifier is not None:
        own_name, link = _matching(NAME, matter.get("license_name")), _matching(LINK, matter.get("license_link"))
        return Licence(identifier.lower(), own_name, link)
    for file in FILES:
        if text := _read(folder, file):
            known = next((name for name, words in TEXTS.items() if words.search(text[:2000])), None)
            return Licence(known) if known else Licence("other", f"see {file} of the base model")
    return Licence()


def _read(folder: Path, name: str) -> str:
    file = folder / name
    if not file.is_file() or outside_of(folder, file):
        return ""
    with file.open(encoding="utf-8", errors="replace") as opened:
        return opened.read(MAX_CHARACTERS)


def _front_matter(text: str) -> dict[str, Any]:
    """Return the YAML mapping between the first two lines `---`. If it is missing or invalid, return an empty dict."""
    found = re.match(r"\ufeff?---[ \t]*\r?\n(.*?\n)---[ \t]*(\r?\n|\Z)", text, re.DOTALL)
    if found is None:
        return {}
    try:
        check_yaml(found[1])
        matter = yaml.safe_load(found[1])
    except (yaml.YAMLError, YamlLimitError, ValueError):
        return {}
    return matter if isinstance(matter, dict) else {}


def _matching(pattern: re.Pattern[str], value: Any) -> str | None:
    """Return the value if it is text that matches the pattern; otherwise None."""
    if isinstance(value, list) and len(value) == 1:  # `license: [mit]`
        (value,) = value
    return value if isinstance(value, str) and pattern.fullmatch(value) else None
