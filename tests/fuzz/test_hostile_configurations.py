"""Mutated configurations are read, or refused with a message. Reading never crashes, hangs or prints a secret."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hostile import CANARY, try_all
from hostile_inputs import mutated_configuration

from tandem.config.load import load_config
from tandem.paths import check_run

pytestmark = pytest.mark.slow

NUMBER = 4000


@pytest.mark.parametrize("part", range(4))
def test_mutated_configurations_are_read_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    monkeypatch.setenv("TANDEM_CANARY", CANARY)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file.txt").write_text("run: {name: victim}\n")
    usual = yaml.safe_load(load_config(None, []).as_yaml())
    file = tmp_path / "given" / "config.yaml"
    file.parent.mkdir()

    def make(rng: random.Random) -> Callable[[], Any]:
        file.write_bytes(mutated_configuration(rng, usual))
        return lambda: _read(file)

    tried = try_all("configuration", range(part * NUMBER // 4, (part + 1) * NUMBER // 4), make, victim)
    assert not tried.problems, str(tried)
    assert min(tried.counts["read"], tried.counts["refused"]) > NUMBER // 100


def _read(file: Path) -> None:
    loaded = load_config(str(file), [])
    loaded.as_yaml()
    check_run(loaded, fresh=False, per_pair=None)
