"""Reads YAML files within limits on nesting, references and size. Writes YAML without control characters."""

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
MAX_VALUES = 100_000  # once every reference (*name) is expanded
MAX_DIGITS = 1000
NUMBER = re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|[0-9][0-9_:]*)")  # in YAML 1.1, 59:59 is a number in base 60
# libyaml is ten times faster, where PyYAML has it.
_OwnLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_OwnDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class YamlLimitError(ConfigError):
    """A YAML file exceeds a limit. The message does not name the file; the caller adds its name."""


def listed_in(by: Path | None) -> str:
    """Return the end of a message about a wrong path: the file whose `defaults:` lists the path.

    Empty if the user gave the path.
    """
    return f", listed in `defaults:` of {by}. Correct the path" if by else ""


def resolve_config_path(path: Path, by: Path | None) -> Path:
    """Resolve the path of a configuration file.

    `by`: the file whose `defaults:` lists the path; None if the user gave the path. The user may give a pipe. A pipe in
    `defaults:` is refused, because reading it could block forever.
    """
    try:
        path = path.resolve()
        is_file = by is None or not path.exists() or path.is_file()
    except (OSError, ValueError, RuntimeError):  # the name is too long or invalid, or links are circular
        is_file = False
    if not is_file:
        raise ConfigError(f"{path}: not a configuration file{listed_in(by)}.")
    return path


def read_yaml_text(path: Path) -> str:
    """Return the text of a YAML file. Raise YamlLimitError if it exceeds a limit. Stops reading at the size limit."""
    text = read_limited(path, MAX_CHARACTERS)
    check_yaml(text)
    return text


def read_own_yaml(path: Path) -> Any:
    """Return the content of a YAML file that tandem wrote, such as config.yaml of a run. It may have been replaced."""
    text = read_limited(path, MAX_CHARACTERS)
    check_yaml(text, _OwnLoader)
    return load_own_yaml(text)


def read_limited(path: Path, max_characters: int) -> str:
    """Return the text of a file. If it has more than `max_characters`, only its beginning, which is longer than that too."""
    with path.open("rb") as file:
        content = file.read(4 * max_characters + 1)  # of UTF-8, whose characters have at most 4 bytes
    return content.decode("utf-8", errors="strict" if len(content) <= 4 * max_characters else "replace")


def load_own_yaml(text: str) -> Any:
    """Return the content of YAML that comes with tandem. Files of users are read with PyYAML's own parser, for its messages."""
    return yaml.load(text, Loader=_OwnLoader)


def check_yaml(text: str, loader: Any = yaml.SafeLoader) -> None:
    """Raise YamlLimitError if YAML would expand to far more memory than its text, or is nested deeper than Python can recurse.

    Counts parser events, so nothing is expanded. With a: &a [x, x], b: &b [*a, *a] and c: [*b, *b], the list a has 3 values (the
    list and 2 items), b has 1 + 2 * 3 = 7, and c has 1 + 2 * 7 = 15. `loader`: with whose parser the text will be loaded.
    """
    if len(text) > MAX_CHARACTERS:
        raise YamlLimitError(f"the YAML has more than {MAX_CHARACTERS:,} characters.")
    known: dict[str, tuple[int, int]] = {}  # anchor -> number of values and levels
    names: list[str | None] = []  # anchors of the open lists and mappings
    values, levels = [0], [0]  # inside each open list or mapping; the first entry is for the file
    for event in _events(text, loader):
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
                raise YamlLimitError(f"the anchor &{name} refers to itself.")
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
            raise YamlLimitError(f"the YAML is nested more than {MAX_NESTING} levels deep.")
        if values[-1] > MAX_VALUES:
            raise YamlLimitError(
                f"the YAML has more than {MAX_VALUES:,} values once its references (*name) are expanded."
            )


def _refuse_long_number(event: yaml.ScalarEvent) -> None:
    """Raise YamlLimitError for an integer with so many digits that Python raises an error when it prints the number."""
    is_number = NUMBER.fullmatch(event.value) and (event.implicit[0] or event.tag == "tag:yaml.org,2002:int")
    if is_number and len(event.value) > MAX_DIGITS:
        raise YamlLimitError(f"the YAML has a number of more than {MAX_DIGITS:,} digits.")


def is_scalar(text: str) -> bool:
    """Whether a YAML document is a single string, number or date. False for an empty document."""
    root = next((event for event in _events(text) if isinstance(event, yaml.NodeEvent)), None)
    return isinstance(root, yaml.ScalarEvent) and yaml.safe_load(text) is not None


def _events(text: str, loader: Any = yaml.SafeLoader) -> Iterator[yaml.Event]:
    """Yield parser events up to the first syntax error. The error is reported later, when the file is loaded."""
    with suppress(yaml.YAMLError):
        yield from yaml.parse(text, Loader=loader)


def to_yaml(tree: dict[str, Any]) -> str:
    """Return nested dicts as YAML. Text with control characters is written in double quotes, with YAML escapes."""
    text = _dumped(tree, _FastDumper)
    return escaped(_dumped(tree, _Dumper) if "\\U" in text else text)  # libyaml escapes an emoji: \U0001F600


def _dumped(tree: dict[str, Any], dumper: Any) -> str:
    return yaml.dump(tree, Dumper=dumper, sort_keys=False, allow_unicode=True)


def _represent_text(dumper: Any, text: str) -> yaml.ScalarNode:
    """Write text in double quotes if it needs escapes."""
    style = '"' if escaped(text) != text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


class _Dumper(yaml.SafeDumper):
    """PyYAML's dumper in Python."""


class _FastDumper(_OwnDumper):
    """The same with libyaml, where PyYAML has it."""


for _one in (_Dumper, _FastDumper):
    _one.add_representer(str, _represent_text)
