"""Limits on the decompressed size of data files, and on the size of their rows.

A file may expand to a fixed size, or to a configurable multiple of its own size if that is more. Text usually expands 3
to 10 times, and tables with repeated values more. Archives made to exhaust a machine expand ten thousand times or more.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import DataError

# A file may always expand to this size.
ALLOWED_EXPANDED_BYTES = 256 * 1024**2
# Reading a table may always take this much memory. Arrow's allocator alone reserves a GiB.
ALLOWED_MEMORY_BYTES = 2 * 1024**3
MAX_RECORD_BYTES = 64 * 1024**2  # one line, element or row
MAX_COLUMNS = 10_000
MAX_DEPTH = 100  # nesting of lists and objects
MESSAGE_CHARACTERS = 1_000  # the error message of one row
# rejects.jsonl may always be this large. It may also be as large as the files that were read.
REJECTS_BYTES = 16 * 1024**2


@dataclass(slots=True)
class Expansion:
    """Counts the bytes read from a file after decompression, and raises an error if they exceed a limit."""

    path: Path
    size: int  # of the file, in bytes
    ratio: float  # data.max_expansion
    expanded: int = 0  # bytes read so far

    def add(self, num_bytes: int) -> None:
        """Add to the number of bytes read so far. Raise a DataError if the total is over the limit."""
        self.expanded += num_bytes
        if self.expanded > (limit := self._limit(ALLOWED_EXPANDED_BYTES)):
            raise DataError(
                f"{self.path}: the file of {format_bytes(self.size)} expands to over {format_bytes(limit)}. {self._remedy()}"
            )

    @property
    def memory(self) -> int:
        """The maximum memory in bytes that reading a part of the file may take."""
        return self._limit(ALLOWED_MEMORY_BYTES)

    def out_of_memory(self) -> DataError:
        taken = format_bytes(self.memory)
        return DataError(
            f"{self.path}: the file of {format_bytes(self.size)} takes over {taken} of memory to read. {self._remedy()}"
        )

    def _limit(self, least: int) -> int:
        return max(least, int(self.ratio * self.size))

    def _remedy(self) -> str:
        return (
            "Such a file can fill the memory or the disk. If you trust it, raise data.max_expansion (now "
            f"{self.ratio:g} times the file's size)."
        )


def format_bytes(num_bytes: int) -> str:
    """Format a size with a unit: 328000 is returned as "328 kB"."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes} bytes"


def is_nested_too_deep(value: Any) -> bool:
    """Whether lists and objects are nested more than MAX_DEPTH levels deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        inside = (item.values() if isinstance(item, dict) else item for item in level)
        level = [inner for items in inside for inner in items if isinstance(inner, dict | list)]
    return bool(level)
