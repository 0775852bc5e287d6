"""The environment variables that tell a process which rank it is, as torchrun sets them. Any program may set them."""

import os

from tandem.errors import ConfigError

NEEDED = ("RANK", "MASTER_ADDR", "MASTER_PORT")
LARGEST_PORT = 2**16 - 1


def is_distributed() -> bool:
    """Whether this process is one of several ranks that a launcher started."""
    size = os.environ.get("WORLD_SIZE", "1")
    return size.isdecimal() and int(size) > 1


def check_rank_variables() -> None:
    """Raise ConfigError if the variables do not describe one of several ranks, or a process alone. Does not import torch."""
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    given = {name: _number(name) for name in names if name in os.environ}
    if not is_distributed():
        return
    size = given["WORLD_SIZE"]
    if missing := next((name for name in NEEDED if not os.environ.get(name)), None):
        raise ConfigError(
            f"WORLD_SIZE = {size}, but {missing} is not set. Each of several ranks needs RANK, LOCAL_RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT, which torchrun sets (docs/workers.md). To train with one rank, unset WORLD_SIZE."
        )
    if given["RANK"] >= size:
        raise ConfigError(
            f"RANK = {given['RANK']} and WORLD_SIZE = {size}: the ranks have the numbers 0 to {size - 1}."
        )
    if not 0 < given["MASTER_PORT"] <= LARGEST_PORT:
        raise ConfigError(
            f"MASTER_PORT = {given['MASTER_PORT']}: not a port. Choose a number from 1 to {LARGEST_PORT}."
        )


def _number(name: str) -> int:
    text = os.environ[name]
    if not (text.isascii() and text.isdecimal()) or len(text) > 12:
        raise ConfigError(f"{name} = {text!r}: not a number. Set it as torchrun does (docs/workers.md), or unset it.")
    return int(text)
