"""Resolves the interpolations of another trainer's configuration, whose keys tandem does not have."""

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tandem.config.environment import interpolations, limited_resolution
from tandem.errors import ConfigError, one_line

ENVIRONMENT = re.compile(r"\$\{oc\.env:[^${}]*\}")
MISSING = object()
ARITHMETIC = {
    "add": operator.add,
    "mul": operator.mul,
    "multiply": operator.mul,
    "div": operator.truediv,
    "int_div": operator.floordiv,
    "max": max,
    "min": min,
}


def resolved(tree: dict[str, Any], absent: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return the tree with its interpolations resolved, except those that read the environment, which stay as written.

    `absent`: keys that others may refer to although no file sets them, and their values.

    What is read from the environment must not be shown, and a key that is sent to a server may need permission to read it.
    """
    everything: Any = OmegaConf.create(tree)
    try:
        added = [key for key in absent if OmegaConf.select(everything, key, default=MISSING) is MISSING]
        for key in added:
            OmegaConf.update(everything, key, absent[key])
        with _arithmetic(), limited_resolution():
            found = interpolations(tree, everything)
            values: Any = OmegaConf.to_container(everything, resolve=True)
    except (OmegaConfBaseException, ValueError, TypeError, RecursionError, ZeroDivisionError) as error:
        raise ConfigError(f"configuration: {one_line(error)}") from None
    for key in added:
        _remove(values, key.split("."))
    for one in found:
        if not one.variables:
            continue
        if "${" in ENVIRONMENT.sub("", one.written):
            raise ConfigError(
                f"{one.key}: it combines the environment with other keys, which cannot be translated. Write its value, or "
                "${oc.env:NAME} alone."
            )
        _section(values, one.place)[one.place[-1]] = one.written
    return values


def _remove(values: Any, path: Sequence[str]) -> None:
    """Remove a key, and the sections that are empty without it."""
    _section(values, path).pop(path[-1])
    if len(path) > 1 and not _section(values, path):
        _remove(values, path[:-1])


def _section(values: Any, path: Sequence[Any]) -> Any:
    for part in path[:-1]:
        values = values[part]
    return values


@contextmanager
def _arithmetic() -> Iterator[None]:
    """Inside this context, configurations may compute: ${mul:${a},2}."""
    for name, function in ARITHMETIC.items():
        OmegaConf.register_new_resolver(name, function, replace=True)
    try:
        yield
    finally:
        for name in ARITHMETIC:
            OmegaConf.clear_resolver(name)
