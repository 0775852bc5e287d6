"""Resolves the interpolations of another trainer's configuration, whose keys tandem does not have."""

import operator
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tandem.config.environment import interpolations, limited_resolution
from tandem.errors import ConfigError, one_line

ENVIRONMENT = re.compile(r"\$\{oc\.env:[^${}]*\}")
ARITHMETIC = {"add": operator.add, "mul": operator.mul, "div": operator.truediv, "max": max, "min": min}


def resolved(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree with its interpolations resolved, except those that read the environment, which stay as written.

    What is read from the environment must not be shown, and a key that is sent to a server may need permission to read it.
    """
    everything: Any = OmegaConf.create(tree)
    try:
        with _arithmetic(), limited_resolution():
            found = interpolations(tree, everything)
            values: Any = OmegaConf.to_container(everything, resolve=True)
    except (OmegaConfBaseException, ValueError, TypeError, RecursionError, ZeroDivisionError) as error:
        raise ConfigError(f"configuration: {one_line(error)}") from None
    for one in found:
        if not one.variables:
            continue
        if "${" in ENVIRONMENT.sub("", one.written):
            raise ConfigError(
                f"{one.key}: it combines the environment with other keys, which cannot be translated. Write its value, or "
                "${oc.env:NAME} alone."
            )
        node = values
        for part in one.place[:-1]:
            node = node[part]
        node[one.place[-1]] = one.written
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
