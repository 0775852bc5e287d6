"""Mutated run directories are resumed and finished, or refused with a message."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile import copy_of, try_all
from hostile_inputs import mutated_run
from running import saving_settings, short_run, unfinished_run

pytestmark = pytest.mark.slow

NUMBER = 1000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    return unfinished_run(folder, saving_settings(folder))


@pytest.mark.parametrize("part", range(4))
def test_mutated_run_directories_are_resumed_or_refused(tmp_path: Path, run: Path, part: int) -> None:
    victim = tmp_path / "victim"
    copy_of(run, victim)
    (victim / "file.txt").write_text("{}")
    settings = saving_settings(run.parent)

    def make(rng: random.Random) -> Callable[[], Any]:
        given = mutated_run(rng, run, tmp_path / "given", victim)
        return lambda: short_run(given, *settings)

    tried = try_all("run", range(part * NUMBER // 4, (part + 1) * NUMBER // 4), make, victim)
    assert not tried.problems, str(tried)
    assert min(tried.counts["read"], tried.counts["refused"]) > NUMBER // 100
