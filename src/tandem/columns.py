"""Data columns: numbers that a row may give in addition to texts. Each is declared here once, and reaches the loss by name.

TokenizedPreference -> tokens.arrow -> Pack -> PackInputs (on the device) -> Completions, the record that losses read.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A number in the data, one per completion or one per preference."""

    name: str
    per: Literal["completion", "preference"]
    default: float  # used if the data gives no value; NaN: no value
    key: str | None = None  # the data set's key that names the field in rows; None: the data format defines it
    least: float = -math.inf  # smallest allowed value
    dtype: Literal["float32"] = "float32"

    @property
    def stored_as(self) -> str:
        """Name of the field in tokens.arrow: `scores` is a list per preference, `weight` is a number."""
        return f"{self.name}s" if self.per == "completion" else self.name

    def count(self, num_completions: int) -> int:
        """Return how many values a preference has."""
        return num_completions if self.per == "completion" else 1


COLUMNS = {
    column.name: column
    for column in (
        Column(name="score", per="completion", default=math.nan),
        Column(name="weight", per="preference", default=1.0, key="weight_key", least=0.0),
        Column(name="margin", per="preference", default=0.0, key="margin_key"),
    )
}
# Present only if a key of the data set names their field.
OPTIONAL_COLUMNS = tuple(column for column in COLUMNS.values() if column.key is not None)


def columns_in_use(given: Iterable[str]) -> list[Column]:
    """Return all columns except the optional ones that are not `given`, in the order of declaration."""
    names = set(given)
    return [column for column in COLUMNS.values() if column.key is None or column.name in names]
