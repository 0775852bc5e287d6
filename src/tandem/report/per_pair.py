"""Writes the metrics of every pair to a JSONL file: one line per pair, the smallest margin first."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from tandem.config.losses import needs_reference, scope_of
from tandem.config.sections.dpo import Dpo
from tandem.data.store.selection import Preferences
from tandem.errors import ConfigError
from tandem.storage.cache import check_writable, real_path, refuse_other_suffix, replacing
from tandem.terminal.arguments import option

if TYPE_CHECKING:
    from tandem.training.metrics import PairTable

METRIC_COLUMNS = (
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


MAX_LINE_BYTES = 64 * 1024  # of a line that is read to recognise a file


class PerPairFile:
    """The file with the metrics of every pair. The file has a temporary name until it is complete."""

    def __init__(self, path: Path, dpo: Dpo):
        self.path = path
        # A loss without a reference has no reference columns; a loss that sorts the batch has no loss per pair.
        absent = {"reference_chosen", "reference_rejected"} if not needs_reference(dpo.preference_loss) else set()
        own_loss = ("loss",) if scope_of(dpo.preference_loss) == "pair" else ()
        self._names = tuple(name for name in (*own_loss, *METRIC_COLUMNS) if name not in absent)

    def write(self, tables: Iterator[tuple[str, "PairTable", Preferences]]) -> None:
        """Write every pair of every split. Within a split, the pair with the smallest margin comes first."""
        with replacing(real_path(self.path) if self.path.is_symlink() else self.path, "per_pair") as out:
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


def described(*, has_replaced: bool) -> str:
    """Return what the output of a command says about the file that it has written, after the file's name."""
    return (
        f"every pair, those the model disagrees with most first{'; replaces the earlier file' if has_replaced else ''}"
    )


def check_per_pair(path: Path) -> None:
    """Raise ConfigError, before training starts, if the file cannot be written."""
    if path.is_dir():
        raise ConfigError(f"{option('per_pair', path)}: a directory. Give the name of a file.")
    if path.exists() and not path.is_file():  # such as /dev/null, which must not be replaced
        raise ConfigError(f"{option('per_pair', path)}: not a plain file. Give the name of a file.")
    refuse_other_suffix(option("per_pair", path), path)
    if not path.parent.is_dir():
        problem = (
            f"{path.parent} is a file, not a folder. Choose another file."
            if path.parent.exists()
            else f"there is no folder {path.parent}. Create it first."
        )
        raise ConfigError(f"{option('per_pair', path)}: {problem}")
    check_writable(path.parent, f"{option('per_pair', path)}: the folder {path.parent}", "Choose a file elsewhere.")
    if path.is_file() and path.stat().st_size > 0 and not _is_per_pair(path):
        raise ConfigError(
            f"{option('per_pair', path)}: this file exists and does not hold the numbers of pairs, so it is kept. Choose another "
            "file."
        )


def _is_per_pair(path: Path) -> bool:
    """Whether a file is one that `PerPairFile` wrote, judged by its first line."""
    with path.open("rb") as file:
        start = file.readline(MAX_LINE_BYTES)
    try:
        line = json.loads(start)
    except ValueError:
        return False
    return isinstance(line, dict) and {"split", "place", "margin", "tokens_chosen"} <= line.keys()


def _number(name: str, value: Any) -> float | int | None:
    if np.isnan(value):
        return None
    return int(value) if name.startswith("tokens_") else float(value)
