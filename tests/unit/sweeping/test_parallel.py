"""How many runs of a sweep are trained at a time: one on a CPU, and on GPUs as many as the estimates allow."""

import json
import sys
from pathlib import Path

import pytest

from tandem.config.load import load_config
from tandem.errors import ConfigError, OutOfMemoryError
from tandem.sweeping import children, parallel
from tandem.sweeping.parallel import PROCESS_BYTES, Gpus, choose_environments, needed_bytes
from tandem.sweeping.sweep import sweep
from tandem.training.memory import GIB

pytestmark = pytest.mark.usefixtures("of_a_command")

CONFIGS = [load_config(None, []).config] * 6


@pytest.fixture
def gpus(monkeypatch):
    """Set the GPUs of this machine, and the memory that each run needs, in GiB."""

    def set_gpus(names: tuple[str, ...], memory: float, needs: list[float]) -> list:
        monkeypatch.setattr(parallel, "visible_gpus", lambda: Gpus(names, int(memory * GIB)))
        monkeypatch.setattr(parallel, "needed_bytes", lambda config, gpus: config * GIB)
        return needs  # in place of configurations

    return set_gpus


def test_on_a_cpu_runs_are_trained_one_at_a_time_unless_asked(monkeypatch):
    monkeypatch.setattr(parallel, "visible_gpus", lambda: None)
    assert choose_environments(CONFIGS, None) == [{}]
    assert choose_environments(CONFIGS, 3) == [{}] * 3
    assert choose_environments(CONFIGS[:2], 3) == [{}] * 2


def test_a_single_run_is_not_estimated(monkeypatch):
    monkeypatch.setattr(parallel, "visible_gpus", lambda: pytest.fail("not needed"))
    assert choose_environments(CONFIGS[:1], None) == [{}]
    assert choose_environments(CONFIGS, 1) == [{}]
    assert choose_environments([], None) == [{}]


def test_as_many_as_fit_on_one_gpu_by_the_sum_of_the_largest(gpus):
    # 85 % of 100 GiB: 30 + 30 fit, 30 + 30 + 30 do not.
    assert choose_environments(gpus(("0",), 100, [10, 30, 30, 30]), None) == [{"CUDA_VISIBLE_DEVICES": "0"}] * 2
    assert choose_environments(gpus(("0",), 100, [1] * 9), None) == [{"CUDA_VISIBLE_DEVICES": "0"}] * 4
    assert choose_environments(gpus(("0",), 100, [90] * 3), None) == [{"CUDA_VISIBLE_DEVICES": "0"}]  # the run decides


def test_several_gpus_are_used_in_turn(gpus):
    found = choose_environments(gpus(("4", "6"), 100, [40] * 9), None)
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["4", "6", "4", "6"]
    found = choose_environments(gpus(("4", "6"), 100, [80] * 3), None)
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["4", "6"]


def test_more_than_fit_are_refused(gpus):
    with pytest.raises(OutOfMemoryError) as refused:
        choose_environments(gpus(("0",), 100, [30] * 4), 3)
    assert str(refused.value) == (
        "--parallel 3: 3 runs on one GPU are expected to need 90 GiB together, and the GPU has 100. Lower --parallel, or leave "
        "it out to train as many at a time as fit."
    )
    assert len(choose_environments(gpus(("0",), 100, [30] * 4), 2)) == 2


def test_less_than_one_at_a_time_is_refused():
    with pytest.raises(ConfigError) as refused:
        choose_environments(CONFIGS, 0)
    assert str(refused.value) == "--parallel 0: at least one run is trained at a time. Write 1 or more."


def test_the_estimate_grows_with_rows_and_with_a_live_reference():
    def needed(*overrides: str) -> float:
        return needed_bytes(load_config(None, overrides).config, Gpus(("0",), 80 * GIB))

    short, long = needed("policy.packing.pack_length=2048"), needed("policy.packing.pack_length=8192")
    assert PROCESS_BYTES < short < long < 80 * GIB
    assert needed("policy.packing.pack_length=2048", "reference.mode=live") > short
    assert needed() >= short  # the longest rows that fit


def test_the_gpu_of_a_slot_is_the_only_one_that_its_run_sees(tmp_path, monkeypatch):
    monkeypatch.setattr(children, "COMMAND", (sys.executable, str(Path(__file__).parents[2] / "training_stub.py")))
    monkeypatch.setattr(parallel, "visible_gpus", lambda: Gpus(("4", "6"), 2**40))
    monkeypatch.setattr(parallel, "needed_bytes", lambda config, gpus: 2**39)
    monkeypatch.setenv("STUB_NOTES", str(tmp_path / "notes.jsonl"))
    monkeypatch.setenv("STUB_SECONDS", "0.1")
    sweep(["run.seed=1,2"], out=tmp_path / "s")
    assert [json.loads(line)["gpu"] for line in (tmp_path / "notes.jsonl").read_text().splitlines()] == ["4", "6"]


def test_a_run_on_several_gpus_is_trained_alone():
    several = load_config(None, ["cluster.gpus_per_node=2"]).config
    assert [parallel.uses_several_gpus(config) for config in (CONFIGS[0], several)] == [False, True]
    parallel.refuse_parallel([several], 1)
    parallel.refuse_parallel(CONFIGS, 4)
    with pytest.raises(ConfigError) as refused:
        parallel.refuse_parallel([*CONFIGS, several], 2)
    assert str(refused.value) == (
        "--parallel 2: a run with cluster.gpus_per_node above 1 is trained alone. Leave out one of them."
    )
