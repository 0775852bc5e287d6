"""PairTables in; a JSONL file out, one pair a line: those that the policy orders most against the data come first."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from tandem.config.losses import needs_reference, scope_of
from tandem.config.sections.dpo import Dpo
from tandem.data.store.selection import Preferences
from tandem.errors import ConfigError
from tandem.storage.cache import replacing

if TYPE_CHECKING:
    from tandem.train.metrics import PairTable

NUMBERS = (
    "reward_chosen",
    "reward_rejected",
    "logp_chosen",
    "logp_rejected",
    "reference_chosen",
    "reference_rejected",
    "tokens_chosen",
    "tokens_rejected",
    "score_chosen",
    "score_rejected",
)


class PerPairFile:
    """Written under another name; it gets its own when it is whole."""

    def __init__(self, path: Path, dpo: Dpo):
        self.path = path
        # Without a reference there is nothing to compare with; sorted over the batch, a loss stands in no pair's place.
        absent = {"reference_chosen", "reference_rejected"} if not needs_reference(dpo.preference_loss) else set()
        own_loss = ("loss",) if scope_of(dpo.preference_loss) == "pair" else ()
        self._names = tuple(name for name in (*own_loss, *NUMBERS) if name not in absent)

    def write(self, tables: Iterator[tuple[str, "PairTable", Preferences]]) -> None:
        """Every pair of every split, the least margin first within each."""
        with replacing(self.path, "per_pair") as out:
            for split, table, store in tables:
                self._add(out, split, table, store)

    def _add(self, out: IO[str], split: str, table: "PairTable", store: Preferences) -> None:
        columns = {name: table[name] for name in self._names}
        for pair in np.argsort(table.margin, kind="stable"):
            line = {
                "split": split,
                "place": store.place(int(table.preference[pair])),
                "chosen": int(table.winner[pair]),
                "rejected": int(table.loser[pair]),
                "margin": float(table.margin[pair]),
                **{name: _number(name, column[pair]) for name, column in columns.items()},
            }
            out.write(json.dumps(line) + "\n")


def check_per_pair(path: Path) -> None:
    """Refuse, before any work, a file that could not be written in the end."""
    if path.is_dir():
        raise ConfigError(f"--per-pair {path}: a directory. Give the name of a file.")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--per-pair {path}: {path.parent} is no directory that can be written to. Make it first.")


def _number(name: str, value: Any) -> float | int | None:
    if np.isnan(value):
        return None
    return int(value) if name.startswith("tokens_") else float(value)
