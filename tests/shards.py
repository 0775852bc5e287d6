"""Selects a share of the tests, so that several machines or short runs together make up one long run."""

import re
from collections.abc import Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")


def shard_of(items: Sequence[T], shard: str) -> tuple[list[T], list[T]]:
    """Return the items of a shard, and the others. Of a b c d, shard 1/3 has a and d."""
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", shard)
    if not found or int(found[1]) > int(found[2]):
        raise pytest.UsageError(f"--shard={shard}: write NUMBER/COUNT, such as 1/3, 2/3 and 3/3 for three shards.")
    first, count = int(found[1]) - 1, int(found[2])
    return list(items[first::count]), [item for index, item in enumerate(items) if index % count != first]
