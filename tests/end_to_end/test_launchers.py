"""A run trains the same model whichever way its ranks are started: by tandem train, srun in a batch script, torchrun or Ray."""

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from listening import listening
from running import SHORT, metrics_of
from slurm_stub import JOB_ID, install

TANDEM = [sys.executable, "-P", "-m", "tandem"]
TORCHRUN = [sys.executable, "-P", "-m", "torch.distributed.run"]
MANIFEST = Path(__file__).parents[2] / "examples/kubernetes.yaml"
SETTINGS = [*SHORT, "dpo.max_num_steps=12", "checkpointing.save_period=2", "cluster.gpus_per_node=2", "run.dir=run"]
KILLED = (
    "tandem: error: rank 1 was killed by SIGKILL (kill -9, or the system ran out of memory), so the other ranks were stopped. "
    "Checkpoints saved before are intact; run the same command to resume from the newest.\n"
)


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return start_program(folder, [*TANDEM, *arguments], **environment)


def start_program(folder: Path, command: list[str], **environment: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    pipe = subprocess.PIPE
    given = {**os.environ, **environment}
    return subprocess.Popen(command, cwd=folder, env=given, stdout=pipe, stderr=pipe, text=True)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def start_agents(folder: Path, *settings: str) -> list[subprocess.Popen[str]]:
    """Start two torchrun agents with one rank each, with the options of the Kubernetes manifest."""
    job = list(yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")))[1]
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    split = command.index("tandem")
    of_torchrun = dict(one.split("=") for one in command[1:split] if "=" in one)
    of_torchrun |= {"--nproc-per-node": "1", "--master-addr": "127.0.0.1", "--master-port": str(free_port())}
    assert command[split - 1 : split + 2] == ["--no-python", "tandem", "train"]
    of_cluster = [one for one in command if one.startswith("cluster.") and "gpus" not in one]
    agents = []
    for number in range(2):
        options = [f"{name}={value}" for name, value in of_torchrun.items() if name != "--node-rank"]
        command = [*TORCHRUN, f"--node-rank={number}", *options, "--no-python", *TANDEM, "train"]
        agents.append(start_program(folder, [*command, *settings, *of_cluster, "cluster.gpus_per_node=1"]))
    return agents


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < until, f"{path} never came"
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def rank_of(number: int, folder: Path, program: bytes = b"tandem.launch.child") -> int:
    """The process id of a rank in this folder. `program`: what is in its command."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            variables = (place / "environ").read_bytes().split(b"\0")
            command = (place / "cmdline").read_bytes()
            is_here = (place / "cwd").readlink() == folder
        except OSError:
            continue
        if f"RANK={number}".encode() in variables and program in command and is_here:
            return int(place.name)
    raise AssertionError(f"no rank {number} in {folder}")


def shown(out: str) -> str:
    """What a run printed, without speeds, which vary, and the arguments of the command that it suggests."""
    return re.sub(r"(cluster\.[a-z_]+=\w+ ?)+", "", re.sub(r"[0-9.]+ pairs/s", "", out))


def layout(folder: Path) -> set[str]:
    """The files and folders of a run directory, without the numbers of steps: a run that was stopped saved others."""
    paths = {str(path.relative_to(folder)) for path in (folder / "run").rglob("*")}
    return {re.sub(r"step_[0-9]+", "step_N", path) for path in paths}


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
    assert out.count("step 12/12 ") == 1
    assert len(metrics_of(folder / "run")) == 12


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
    folder, printed = local
    assert metrics_of(tmp_path / "run") == metrics_of(folder / "run")
    assert layout(tmp_path) == layout(folder)
    beginning, _, end = shown(printed).partition("step 1/12")
    assert shown(log).startswith(beginning)
    assert shown(log).endswith(end.partition("step 12/12")[2])


@pytest.mark.slow
def test_torchrun_trains_the_same_model_and_prints_the_same(local, tmp_path):
    command = [*TORCHRUN, "--nproc-per-node", "2", "--master-port", str(free_port()), "--no-python", *TANDEM, "train"]
    process = start_program(tmp_path, [*command, *SETTINGS])
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    folder, printed = local
    assert shown(out) == shown(printed)
    assert metrics_of(tmp_path / "run") == metrics_of(folder / "run")
    assert layout(tmp_path) == layout(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "error"),
    [("cluster.gpus_per_node=3", "cluster.gpus_per_node = 3, but"), ("data.train=[no.jsonl]", "no.jsonl: no")],
)
def test_an_error_that_all_ranks_find_is_printed_once_under_torchrun(tmp_path, wrong, error):
    command = [*TORCHRUN, "--nproc-per-node", "2", "--master-port", str(free_port()), "--no-python", *TANDEM, "train"]
    process = start_program(tmp_path, [*command, wrong])
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1  # torchrun's own
    assert err.count(f"tandem: error: {error}") == err.count("tandem: ") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_two_agents_as_in_kubernetes_train_the_same_model_after_one_was_stopped_and_one_killed(local, tmp_path):
    """A pod that is evicted gets SIGTERM, and one whose machine fails is lost. New pods run the same command."""
    agents = start_agents(tmp_path, *SETTINGS)
    wait_for(tmp_path / "run/checkpoints/step_2", agents[0])
    agents[1].send_signal(signal.SIGTERM)
    out, err = agents[0].communicate(timeout=120)
    assert agents[0].returncode == 1, out + err
    assert agents[1].communicate(timeout=120) and agents[1].returncode != 0
    assert "tandem: stopped by SIGTERM" in err
    saved = max(int(place.name[5:]) for place in (tmp_path / "run/checkpoints").glob("step_*"))

    agents = start_agents(tmp_path, *SETTINGS)
    wait_for(tmp_path / f"run/checkpoints/step_{saved // 2 * 2 + 2}", agents[0])
    lost = rank_of(1, tmp_path, b"tandem")
    agents[1].kill()
    os.kill(lost, signal.SIGKILL)
    killed = time.monotonic()
    out, err = agents[0].communicate(timeout=120)
    assert agents[0].returncode == 1, out + err
    assert time.monotonic() - killed < 60
    agents[1].communicate(timeout=60)

    first, second = start_agents(tmp_path, *SETTINGS)
    out, err = first.communicate(timeout=300)
    assert first.returncode == 0, out + err
    assert (second.communicate(timeout=60)[0], second.returncode) == ("", 0)
    folder, printed = local
    assert "Run directory: run, resumed" in out
    assert metrics_of(tmp_path / "run") == metrics_of(folder / "run")
    assert layout(tmp_path) == layout(folder)
    assert shown(out).endswith(shown(printed).partition("step 12/12")[2])


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
    beginning, _, end = shown(printed).partition("\nstep 1/12")
    assert shown(out).startswith(beginning)  # the same output, whichever way
    assert shown(out).endswith(end.partition("step 12/12")[2])
    assert layout(tmp_path) == layout(folder)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
@pytest.mark.slow
def test_ctrl_c_under_ray_saves_and_stops_and_a_lost_worker_is_named(local, tmp_path):
    arguments = ["train", *SETTINGS, "cluster.launcher=ray"]
    process = start(tmp_path, *arguments)
    wait_for(tmp_path / "run/checkpoints/step_2", process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, out + err
    assert err == (
        "tandem: stopping after the current step is finished and saved. A second signal stops at once.\n"
        "tandem: stopped by SIGINT\n"
    )
    saved = max(int(place.name[5:]) for place in (tmp_path / "run/checkpoints").glob("step_*"))
    assert f"run/checkpoints/step_{saved} is saved; the same command resumes from it." in out

    process = start(tmp_path, *arguments)
    wait_for(tmp_path / f"run/checkpoints/step_{saved // 2 * 2 + 2}", process)
    status = Path(f"/proc/{rank_of(1, tmp_path)}/status").read_text()
    os.kill(int(status.partition("PPid:")[2].split()[0]), signal.SIGKILL)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, out + err
    assert err == "tandem: the Ray worker of rank 1 was lost. Ray Train starts all ranks again.\n"
    folder, _ = local
    assert metrics_of(tmp_path / "run") == metrics_of(folder / "run")
