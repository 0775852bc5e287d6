"""YAML read under limits of nesting, references and size, which no configuration needs more of; and written with escapes."""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from tandem.errors import ConfigError
from tandem.terminal.printable import escaped

MAX_CHARACTERS = 4 * 1024 * 1024
MAX_NESTING = 64
MAX_VALUES = 100_000  # once every reference (*name) is replaced by what it refers to
MAX_DIGITS = 1000
NUMBER = re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|[0-9][0-9_:]*)")  # 59:59 is a number of YAML 1.1, to the base 60


class YamlLimitError(ConfigError):
    """What a file has too much of, as the end of a sentence that begins with its name."""


def file_named(path: Path, by: Path | None) -> Path:
    """The real path of a configuration file. by: the file whose `defaults:` name it; none for one that the user gives.

    The user may give a pipe. A file that names one would have its reader wait for whoever writes to it.
    """
    asked = f", named by {by}" if by else ""
    try:
        path = path.resolve()
        is_file = by is None or not path.exists() or path.is_file()
    except (OSError, ValueError, RuntimeError):  # of too many characters, of impossible ones, of links in a circle
        is_file = False
    if not is_file:
        raise ConfigError(f"{path}: not a configuration file{asked}.")
    return path


def read_yaml_text(path: Path) -> str:
    """The text of a file that `check_yaml` has nothing against; never more of it than that takes."""
    with path.open(encoding="utf-8") as file:
        text = file.read(MAX_CHARACTERS + 1)
    check_yaml(text)
    return text


def check_yaml(text: str) -> None:
    """Refuse what takes far more memory than the text, or more nested calls than Python has. The parser itself takes neither.

    a: &a [x, x]; b: &b [*a, *a]; c: [*b, *b] -> a has 3 values, b 1 + 2 * 3 = 7, c 1 + 2 * 7 = 15.
    """
    if len(text) > MAX_CHARACTERS:
        raise YamlLimitError(f"it has more than {MAX_CHARACTERS:,} characters.")
    known: dict[str, tuple[int, int]] = {}  # values and levels of what has a name
    names: list[str | None] = []  # of each list or mapping that is not closed
    values, levels = [0], [0]  # inside each of them; the first is the file
    for event in _events(text):
        name, inside = getattr(event, "anchor", None), (1, 0)
        if isinstance(event, yaml.CollectionStartEvent):
            names.append(name)
            values.append(1)
            levels.append(0)
            inside = (0, 0)
        elif isinstance(event, yaml.CollectionEndEvent):
            name, inside = names.pop(), (values.pop(), levels.pop() + 1)
        elif isinstance(event, yaml.AliasEvent):
            if name in names:
                raise YamlLimitError(f"&{name} refers to itself, without end.")
            inside = known.get(event.anchor, (1, 0))
        elif isinstance(event, yaml.ScalarEvent):
            _refuse_long_number(event)
        else:
            continue
        if name and not isinstance(event, yaml.AliasEvent):
            known[name] = inside
        values[-1] += inside[0]
        levels[-1] = max(levels[-1], inside[1])
        if len(names) + levels[-1] > MAX_NESTING:
            raise YamlLimitError(f"it is nested more than {MAX_NESTING} levels deep.")
        if values[-1] > MAX_VALUES:
            raise YamlLimitError(
                f"it has more than {MAX_VALUES:,} values once its references (*name) are replaced by what they refer to."
            )


def _refuse_long_number(event: yaml.ScalarEvent) -> None:
    """Python computes with a number of any length, but does not print one of thousands of digits."""
    is_number = NUMBER.fullmatch(event.value) and (event.implicit[0] or event.tag == "tag:yaml.org,2002:int")
    if is_number and len(event.value) > MAX_DIGITS:
        raise YamlLimitError(f"it has a number of more than {MAX_DIGITS:,} digits.")


def is_one_text(text: str) -> bool:
    """Whether a file is a single text, number or date instead of a mapping or a list. One that says nothing is neither."""
    root = next((event for event in _events(text) if isinstance(event, yaml.NodeEvent)), None)
    return isinstance(root, yaml.ScalarEvent) and yaml.safe_load(text) is not None


def _events(text: str) -> Iterator[yaml.Event]:
    """What the parser finds, up to where the text is no YAML: that is left to whoever reads it."""
    with suppress(yaml.YAMLError):
        yield from yaml.parse(text, Loader=yaml.SafeLoader)


def to_yaml(tree: dict[str, Any]) -> str:
    """A tree as text without control characters: inside double quotes the escapes are YAML's own."""
    return escaped(yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


class _Dumper(yaml.SafeDumper):
    """Puts texts that need escapes into double quotes."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = '"' if escaped(text) != text else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)
