"""Numbers that rows of a data set may give besides texts. Each is declared here, once, and carried by name to the loss.

TokenizedPreference -> tokens.arrow -> Pack -> PackInputs (on the device) -> Completions, the record that losses read.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A number per completion or per preference."""

    name: str
    per: Literal["completion", "preference"]
    default: float  # where the data gives none; NaN: there is no value
    key: str | None = None  # the key of a data set that names its field in the rows; None: formats find it themselves
    least: float = -math.inf
    dtype: Literal["float32"] = "float32"

    @property
    def stored_as(self) -> str:
        """Its field in tokens.arrow, where a row is a preference: scores, a list; weight, a number."""
        return f"{self.name}s" if self.per == "completion" else self.name

    def count(self, num_completions: int) -> int:
        """How many values a preference has."""
        return num_completions if self.per == "completion" else 1


COLUMNS = {
    column.name: column
    for column in (
        Column(name="score", per="completion", default=math.nan),
        Column(name="weight", per="preference", default=1.0, key="weight_key", least=0.0),
        Column(name="margin", per="preference", default=0.0, key="margin_key"),
    )
}
NAMED = tuple(column for column in COLUMNS.values() if column.key is not None)


def in_use(given: Iterable[str]) -> list[Column]:
    """The columns that formats read, and those of the rest that are given, in the order of their declaration."""
    names = set(given)
    return [column for column in COLUMNS.values() if column.key is None or column.name in names]
