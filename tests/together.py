"""Runs of two ranks that may be killed. They are forked from the server of `killing`, on one machine or as if on two."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from killing import Child, Ended, Small
from killing import start as start_process
from several import environments

COUNT = 2
# One rank per machine: each is the first rank of its machine.
AS_MACHINES = {"LOCAL_RANK": "0"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run of two ranks writes: the run directory, which they share, and the cache of each."""

    run: Path
    caches: tuple[Path, Path]
    machines: bool = False  # whether each rank is on a machine of its own

    @classmethod
    def one_machine(cls, folder: Path) -> "Place":
        return cls(folder / "run", (folder / "cache", folder / "cache"))

    @classmethod
    def shared_cache(cls, folder: Path) -> "Place":
        return cls(folder / "run", (folder / "cache", folder / "cache"), machines=True)

    @classmethod
    def separate_caches(cls, folder: Path) -> "Place":
        return cls(folder / "run", (folder / "cache-0", folder / "cache-1"), machines=True)

    @property
    def folders(self) -> list[Path]:
        """Where folders get their names last."""
        kinds = ("tokens", "packs", "reference")
        return [self.run / "checkpoints", *(cache / kind for cache in self.caches for kind in kinds)]


def start_ranks(
    output: Path,
    arguments: list[str],
    place: Place,
    fail_at: Mapping[int, str] | None = None,
    of_rank: Mapping[int, list[str]] | None = None,
    only: int | None = None,
) -> list[Child]:
    """Start two ranks of `tandem`, or only one of them. `fail_at`: TANDEM_FAIL_AT of a rank, by its number.

    `of_rank`: arguments that only one rank gets.
    """
    place.run.parent.mkdir(parents=True, exist_ok=True)
    started = []
    for number, given in enumerate(environments(COUNT)):
        environment = {**given, **(AS_MACHINES if place.machines else {}), "TANDEM_CACHE": str(place.caches[number])}
        environment["TANDEM_FAIL_AT"] = (fail_at or {}).get(number, "")
        if only in (None, number):
            started.append(start_process(output, [*arguments, *(of_rank or {}).get(number, [])], **environment))
    return started


def start_training(
    small: Small,
    place: Place,
    *more: str,
    fail_at: Mapping[int, str] | None = None,
    of_rank: Mapping[int, list[str]] | None = None,
    only: int | None = None,
) -> list[Child]:
    given = [f"--per-pair={place.run.with_name('pairs.jsonl')}", "--quiet", *small.overrides(place.run, *more)]
    return start_ranks(small.folder / "output", ["train", *given], place, fail_at, of_rank, only)


def train(small: Small, place: Place, *more: str, fail_at: Mapping[int, str] | None = None) -> list[Ended]:
    return [rank.ended() for rank in start_training(small, place, *more, fail_at=fail_at)]


def named(number: int, ranks: list[Child]) -> str:
    """How messages name a rank."""
    return f"rank {number} (process {ranks[number].process.pid} on {socket.gethostname()})"
