"""Lines of metrics.jsonl in; the records in them out. Whatever else is in a line, it is not a record."""

import json
from typing import Any

Record = dict[str, Any]
MAX_NUMBER = 1 << 63  # larger integers do not fit into a float or a tracker


def records_in(content: bytes) -> list[Record | None]:
    """The record of each line; None of one that is damaged, or that tandem did not write."""
    return [_record(line) for line in content.splitlines()]


def _record(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("split"), str):
        return None
    step = record.get("step")
    is_step = type(step) is int and 0 <= step < MAX_NUMBER
    is_set = isinstance(record.get("data", ""), str)
    numbers = (value for name, value in record.items() if name not in ("step", "split", "data"))
    return record if is_step and is_set and all(map(_is_number, numbers)) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < MAX_NUMBER)
