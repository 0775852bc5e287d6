"""What becomes of the keys of another trainer's configuration."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tandem.errors import ConfigError

Kind = Literal["same", "translated", "no effect", "refused", "default"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What becomes of one key: the keys that it sets here, or the reason why it sets none."""

    kind: Kind
    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)  # of the command, such as --pack-sizes
    parts: tuple["TranslatedKey", ...] = ()  # of a list of sections: each key inside it, and what became of it


def translated(settings: Mapping[str, Any], note: str | None = None) -> Outcome:
    return Outcome("translated", settings, note)


def no_effect(note: str) -> Outcome:
    return Outcome("no effect", note=note)


def refused(note: str) -> Outcome:
    return Outcome("refused", note=note)


@dataclass(frozen=True, slots=True)
class TranslatedKey:
    """One key of the other trainer's configuration. If `kind` is default, it was not given, and its default there applies."""

    key: str
    value: Any
    outcome: Outcome

    @property
    def kind(self) -> Kind:
        return self.outcome.kind


@dataclass(frozen=True, slots=True)
class Given:
    """A configuration of another trainer: nested dicts, its keys with dots, and where each was set."""

    tree: Mapping[str, Any]
    values: Mapping[str, Any]
    origins: Mapping[str, str]

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or of a section as nested dicts."""
        node: Any = self.tree
        for part in key.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return default
            node = node[part]
        return node

    def __contains__(self, key: str) -> bool:
        return self.get(key, self) is not self


@dataclass(frozen=True, slots=True)
class Translation:
    """A configuration of another trainer as one of tandem's: every key of theirs, and the values of ours."""

    origin: str  # NeMo RL
    rows: tuple[TranslatedKey, ...]
    tree: dict[str, Any]
    origins: dict[str, str]  # where each of our keys was set

    @property
    def options(self) -> dict[str, str]:
        """The options of the command that keys were translated to."""
        return {option: value for row in self.rows for option, value in row.outcome.options.items()}

    def of_kind(self, kind: Kind) -> Iterator[TranslatedKey]:
        return (row for row in self.rows if row.kind == kind)


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys with dots as nested dicts: {'a.b': 1} is returned as {'a': {'b': 1}}."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        node = tree
        *above, last = key.split(".")
        for part in above:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{key}: a part of its name is set to a value already. Remove one of the two.")
        node[last] = dict(value) if isinstance(value, dict) else value  # keys below it may be set next
    return tree
