"""A configuration of TRL, translated: the losses of 20 steps equal those that TRL recorded for the same file."""

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CASES = ("defaults", "higher rate", "accumulation, cosine, ipo", "two losses", "plain text")


@pytest.fixture
def recording(monkeypatch):
    """The benchmark that recorded the losses, and what it recorded."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("trl_trajectory")
    return module, json.loads(module.RESULT.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_translated_configuration_has_the_losses_of_trl(recording, tmp_path, case):
    module, recorded = recording
    assert tuple(module.CASES) == tuple(recorded["losses"]) == CASES
    run = tmp_path / "run"
    file = module.write_config(case, module.write_inputs(tmp_path), run)
    theirs = recorded["losses"][case]
    ours = module.losses_of_tandem(file, run)
    assert module.largest_difference(ours, theirs) < 1e-4
    if case != "defaults":  # at the default rate, 20 steps hardly change a loss
        assert abs(theirs[-1] - theirs[0]) > 0.05 * theirs[0]
    else:
        changes = [one - theirs[0] for one in theirs]
        assert max(abs((one - ours[0]) - change) for one, change in zip(ours, changes, strict=True)) < 1e-5
    assert " is a configuration of TRL. " in (run / "translation.txt").read_text()
