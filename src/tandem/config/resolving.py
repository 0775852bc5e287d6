"""Interpolations of a configuration resolved under a limit: forty short lines may stand for a billion values."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from omegaconf import Node, OmegaConf
from omegaconf.base import Container

from tandem.config.yaml_text import MAX_CHARACTERS, MAX_VALUES
from tandem.errors import ConfigError

MAX_RESOLVED = 2_000  # counted each time that one is resolved, which takes about half a millisecond


@dataclass(slots=True)
class _Spent:
    """What interpolations took so far: how many were resolved, and the values and characters that they became."""

    resolved: int = 0
    values: int = 0
    characters: int = 0

    def is_too_much(self) -> bool:
        return self.resolved > MAX_RESOLVED or self.values > MAX_VALUES or self.characters > MAX_CHARACTERS

    def add(self, found: Any) -> None:
        if OmegaConf.is_config(found):
            found = OmegaConf.to_container(found, resolve=False)
        elif isinstance(found, Node):
            found = found._value()
        self._measure(found)
        self.check()

    def check(self) -> None:
        if self.is_too_much():
            raise ValueError("too much")

    def _measure(self, value: Any) -> None:
        self.values += 1
        self.characters += len(value) if isinstance(value, str) else 0
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            self._measure(inner)


@contextmanager
def limited_resolution() -> Iterator[None]:
    """Whatever OmegaConf resolves inside is counted; more than any configuration needs is refused.

    a: ${b}${b}, b: ${c}${c}, c: x -> a resolves b twice and c four times: OmegaConf remembers nothing.
    """
    resolve, spent = Container.resolve_parse_tree, _Spent()

    def counted(self: Container, *given: Any, **named: Any) -> Any:
        spent.resolved += 1
        spent.check()
        found = resolve(self, *given, **named)
        spent.add(found)
        return found

    Container.resolve_parse_tree = counted  # type: ignore[method-assign]
    try:
        yield
    except Exception:
        if spent.is_too_much():
            raise ConfigError(
                f"configuration: its interpolations (${{key}}) refer to one another too often: more than {MAX_RESOLVED:,} are to "
                f"be resolved, or they become more than {MAX_VALUES:,} values or {MAX_CHARACTERS:,} characters. Use fewer."
            ) from None
        raise
    finally:
        Container.resolve_parse_tree = resolve  # type: ignore[method-assign]
