"""Limits on what a small file may become: a ratio to its size, and an absolute amount below which the ratio is not applied.

Text compresses 3 to 10 times, and tables that repeat their values more; archives made to exhaust a machine expand ten
thousand times and more.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import DataError

# A file may always expand to so much.
EXPANDED_BYTES = 256 * 1024**2
# Reading a table may always take so much memory. Arrow's allocator alone reserves a GiB.
MEMORY_BYTES = 2 * 1024**3
RECORD_BYTES = 64 * 1024**2  # of one line, element or row
COLUMNS = 10_000
DEPTH = 100  # of lists and objects within each other
MESSAGE_CHARACTERS = 1_000  # of one row's error
# rejects.jsonl may always be so large, and as large as the files that were read.
REJECTS_BYTES = 16 * 1024**2


@dataclass(slots=True)
class Expansion:
    """How much was read out of a file, and how much may be."""

    path: Path
    size: int  # of the file, in bytes
    ratio: float  # data.max_expansion
    expanded: int = 0

    def add(self, num_bytes: int) -> None:
        """Count what was read; DataError where it is too much."""
        self.expanded += num_bytes
        if self.expanded > (limit := self._limit(EXPANDED_BYTES)):
            raise DataError(
                f"{self.path}: {in_words(self.size)} that expand to over {in_words(limit)}. {self._remedy()}"
            )

    @property
    def memory(self) -> int:
        """Bytes that reading a part of the file may take."""
        return self._limit(MEMORY_BYTES)

    def out_of_memory(self) -> DataError:
        taken = in_words(self.memory)
        return DataError(
            f"{self.path}: {in_words(self.size)} that take over {taken} of memory to read. {self._remedy()}"
        )

    def _limit(self, least: int) -> int:
        return max(least, int(self.ratio * self.size))

    def _remedy(self) -> str:
        return (
            f"Such a file can fill the memory or the disk. If you trust it, raise data.max_expansion={self.ratio:g}, the "
            "number of times its size."
        )


def in_words(num_bytes: int) -> str:
    """328000 -> 328 kB"""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes} bytes"


def is_nested_too_deep(value: Any) -> bool:
    """Whether lists and objects stand within each other more than DEPTH levels deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEPTH):
        inside = (item.values() if isinstance(item, dict) else item for item in level)
        level = [inner for items in inside for inner in items if isinstance(inner, dict | list)]
    return bool(level)
