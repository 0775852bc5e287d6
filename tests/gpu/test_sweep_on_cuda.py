"""A sweep on a GPU: the runs of a tiny model fit together, and are trained at the same time."""

import pytest

from tandem.config.load import load_config
from tandem.sweeping.parallel import choose_environments
from tandem.sweeping.sweep import sweep

pytestmark = pytest.mark.gpu


def test_runs_of_a_tiny_model_are_trained_together(tmp_path):
    overrides = ["run.seed=1,2", "dpo.max_num_steps=2", "policy.packing.pack_length=2048"]
    config = load_config(None, ["policy.packing.pack_length=2048"]).config
    assert len(choose_environments([config] * 2, None)) >= 2
    result = sweep(overrides, out=tmp_path / "sweep")
    assert [run.status for run in result.runs] == ["finished", "finished"]
