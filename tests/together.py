"""Runs of several ranks, forked from the server of `killing`. Runs of two may be killed, on one machine or as if on two."""

import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from bfloat16_products import with_bfloat16_products
from killing import SERVER, Child, Ended, Small, redirect_output
from killing import start as start_process
from several import environments

from tandem.config.load import load_config
from tandem.model.distributed.process_group import leave_process_group
from tandem.report.reporter import Reporter
from tandem.training import trainer
from tandem.training.start import machine

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


def run_forked(count: int, folder: Path, target: Callable[..., None], *arguments: object) -> list[Ended]:
    """Run a function of this module in each of `count` ranks, in a folder."""
    ranks = []
    for environment in environments(count):
        process = SERVER.Process(target=_in_rank, args=(folder, environment, target, arguments))
        process.start()
        ranks.append(Child(process, folder))
    return [rank.ended(600) for rank in ranks]


def _in_rank(
    folder: Path, environment: dict[str, str], target: Callable[..., None], arguments: tuple[object, ...]
) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    redirect_output(folder)
    target(*arguments)


def run_tandem(code: str, *arguments: str) -> None:
    """Run `tandem` with these arguments, after some code that changes what this rank sees."""
    from tandem.cli import main as cli

    sys.argv = ["tandem", *arguments]
    exec(code)
    cli.main()


def train_runs(runs: list[list[str]]) -> None:
    """Train several runs, given by their overrides, one after another."""
    for overrides in runs:
        with ExitStack() as on_cpus:
            if "policy.precision=bfloat16" in overrides:
                on_cpus.enter_context(with_bfloat16_products())
            if "policy.optimizer.offload=true" in overrides:  # refused without a GPU, since nothing would be gained
                on_cpus.enter_context(mock.patch.object(machine, "_check_offload"))
            trainer.train(load_config(None, overrides), Reporter())
    leave_process_group()


def run_together(count: int, runs: list[list[str]], folder: Path) -> list[str]:
    """Train several runs on `count` ranks, without the seconds that `several.run_together` needs to import torch in each.

    Return what each rank printed.
    """
    ended = run_forked(count, folder, train_runs, runs)
    assert [rank.code for rank in ended] == [0] * count, ended
    return [rank.out for rank in ended]
