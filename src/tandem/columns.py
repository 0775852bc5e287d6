"""Data columns: numbers that a row of the data may give in addition to its texts. COLUMNS declares every column once.

The values of a column pass through these records until a loss reads them by the column's name:
TokenizedPreference -> tokens.arrow -> Pack -> PackInputs (on the device) -> Completions.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A data column: one number per completion, or one number per preference."""

    name: str
    per: Literal["completion", "preference"]
    default: float  # used if the data gives no value; NaN: no value
    key: str | None = None  # the data set's key that names the field in rows; None: the data format defines it
    least: float = -math.inf  # smallest allowed value
    dtype: Literal["float32"] = "float32"

    @property
    def stored_as(self) -> str:
        """Return the name of the column's field in tokens.arrow: `scores` (a list per preference) or `weight` (a number)."""
        return f"{self.name}s" if self.per == "completion" else self.name

    def count(self, num_completions: int) -> int:
        """Return how many values of this column a preference with `num_completions` completions has."""
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
    """Return the columns to store, in the order of declaration. An optional column is included only if its name is in `given`."""
    names = set(given)
    return [column for column in COLUMNS.values() if column.key is None or column.name in names]
