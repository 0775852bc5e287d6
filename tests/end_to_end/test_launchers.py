"""A run trains the same model whichever way its ranks are started: by tandem train, by srun in a batch script, or by Ray."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from listening import listening
from running import SHORT, metrics_of
from slurm_stub import JOB_ID, install

TANDEM = [sys.executable, "-P", "-m", "tandem"]
SETTINGS = [*SHORT, "dpo.max_num_steps=6", "checkpointing.save_period=2", "cluster.gpus_per_node=2", "run.dir=run"]
KILLED = (
    "tandem: error: rank 1 was killed by SIGKILL (kill -9, or the system ran out of memory), so the other ranks were stopped. "
    "Checkpoints saved before are intact; run the same command to resume from the newest.\n"
)


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    pipe = subprocess.PIPE
    given = {**os.environ, **environment}
    return subprocess.Popen([*TANDEM, *arguments], cwd=folder, env=given, stdout=pipe, stderr=pipe, text=True)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < until, f"{path} never came"
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def rank_of(number: int, folder: Path) -> int:
    """The process id of a rank that tandem started in this folder."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            variables = (place / "environ").read_bytes().split(b"\0")
            command = (place / "cmdline").read_bytes()
            is_here = (place / "cwd").readlink() == folder
        except OSError:
            continue
        if f"RANK={number}".encode() in variables and b"tandem.launch.child" in command and is_here:
            return int(place.name)
    raise AssertionError(f"no rank {number} in {folder}")


def shown(out: str) -> str:
    """What a run printed, without speeds, which vary."""
    return re.sub(r"[0-9.]+ pairs/s", "", out)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A run on two ranks that tandem train started: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("local")
    out, err = (process := start(folder, "train", *SETTINGS)).communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    return folder, out


def test_tandem_train_starts_its_own_ranks(local):
    folder, out = local
    assert out.startswith("Loading torch and transformers (a few seconds)\nRun directory: run\nRanks: 2 (2 shards)\n")
    assert out.count("step 6/6 ") == 1
    assert len(metrics_of(folder / "run")) == 6


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_signals_and_kills_end_all_ranks_and_the_run_resumes_to_the_same_end(local, tmp_path):
    process = start(tmp_path, "train", *SETTINGS)
    wait_for(tmp_path / "run/checkpoints/step_2", process)
    assert listening(process.pid, rank_of(0, tmp_path), rank_of(1, tmp_path)) == {"127.0.0.1"}
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, "Traceback" in out + err) == (130, False)
    assert err == (
        "tandem: stopping after the current step is finished and saved. A second signal stops at once.\n"
        "tandem: stopped by SIGINT\n"
    )
    saved = max(int(place.name[5:]) for place in (tmp_path / "run/checkpoints").glob("step_*"))

    process = start(tmp_path, "train", *SETTINGS)
    wait_for(tmp_path / f"run/checkpoints/step_{saved // 2 * 2 + 2}", process)
    os.kill(rank_of(1, tmp_path), signal.SIGKILL)
    killed = time.monotonic()
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (1, KILLED)
    assert time.monotonic() - killed < 15

    process = start(tmp_path, "train", *SETTINGS)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    folder, _ = local
    assert metrics_of(tmp_path / "run") == metrics_of(folder / "run")


@pytest.mark.slow  # exit codes of ranks: tests/unit/launch/test_local.py, tests/faults/test_workers.py
def test_an_error_before_training_has_its_own_exit_code(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": 1}\n')
    process = start(tmp_path, "train", "cluster.gpus_per_node=2", "data.train.data_path=bad.jsonl")
    _, err = process.communicate(timeout=300)
    assert err.startswith("tandem: error: bad.jsonl: none of 1 rows can be read:")
    assert (process.returncode, err.count("tandem: error")) == (3, 1)


@pytest.mark.slow
def test_a_slurm_job_is_requeued_before_its_time_limit_and_trains_the_same_model(local, tmp_path):
    """sbatch, srun and scontrol are stubs that set the variables of Slurm; the two tasks really train."""
    path = f"{install(tmp_path / 'bin')}:{os.environ['PATH']}"
    given = {"PATH": path, "SIGNAL_WHEN": "run/checkpoints/step_2"}
    process = start(tmp_path, "launch", "slurm", "--submit", "--time", "30", *SETTINGS, **given)
    out, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (0, ""), out
    assert out.endswith(f"Submitted batch job {JOB_ID}\n")
    first, second = (tmp_path / f"slurm-{JOB_ID}" / f"rank-{number}.log" for number in (0, 1))
    log = first.read_text()
    assert "tandem: stopped by SIGUSR1" in log
    assert log.count("Run directory: run") == 2  # it was requeued, and resumed
    assert "Run directory: run, resumed" in log
    assert second.read_text() == ""
    folder, _ = local
    assert metrics_of(tmp_path / "run") == metrics_of(folder / "run")


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
@pytest.mark.slow
def test_ray_starts_the_ranks_again_after_one_was_killed(local, tmp_path):
    arguments = ["train", *SETTINGS, "cluster.launcher=ray"]
    process = start(tmp_path, *arguments)
    wait_for(tmp_path / "run/checkpoints/step_2", process)
    os.kill(rank_of(1, tmp_path), signal.SIGKILL)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, out + err
    assert err == "tandem: rank 1 was killed by SIGKILL. Ray Train starts all ranks again.\n"
    assert "Run directory: run, resumed" in out
    folder, printed = local
    assert metrics_of(tmp_path / "run") == metrics_of(folder / "run")
    assert shown(out).startswith(shown(printed).partition("\nstep 1/6")[0])  # the same output, whichever way
