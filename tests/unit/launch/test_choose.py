"""What starts the ranks of a run, how many there are, and what is refused before any weights load."""

import os
import sys

import pytest

from tandem.config.load import load_config
from tandem.errors import ConfigError, MachineError
from tandem.isolation import LAUNCHER
from tandem.launch import choose
from tandem.launch.choose import check_python_call, choose_launcher, num_local_ranks, num_ray_ranks

pytestmark = pytest.mark.usefixtures("of_a_command")

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_STEP_ID", "SLURM_PROCID", LAUNCHER)
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
SRUN = TORCHRUN | {LAUNCHER: "slurm", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}
ONE_TASK = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}


@pytest.fixture
def given(monkeypatch):
    """Sets exactly these variables, and returns the configuration with these overrides."""

    def give(environment: dict[str, str], *overrides: str):
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return load_config(None, [*overrides])

    return give


@pytest.mark.parametrize(
    ("environment", "overrides", "expected"),
    [
        ({}, [], "local"),
        ({}, ["cluster.launcher=local"], "local"),
        (TORCHRUN, [], None),
        (TORCHRUN, ["cluster.launcher=torchrun", "cluster.gpus_per_node=2", "cluster.num_nodes=2"], None),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            ["cluster.gpus_per_node=2"],
            None,
        ),  # the number on this machine is not known
        (SRUN, [], None),
        (SRUN, ["cluster.launcher=slurm"], None),
        (ONE_TASK, [], "local"),  # srun started one task, which may see several GPUs
        (ONE_TASK, ["cluster.launcher=slurm"], None),
        ({LAUNCHER: "local", "RANK": "0", "WORLD_SIZE": "2"}, ["cluster.launcher=local"], None),
        ({LAUNCHER: "ray", "RANK": "0", "WORLD_SIZE": "2"}, ["cluster.launcher=ray"], None),
        ({LAUNCHER: "sweep"}, [], None),
    ],
)
def test_what_starts_the_ranks(given, environment, overrides, expected):
    assert choose_launcher(given(environment, *overrides).config.cluster) == expected


@pytest.mark.parametrize(
    ("environment", "overrides", "message"),
    [
        (
            {},
            ["cluster.num_nodes=2"],
            "cluster.num_nodes = 2, but tandem train was started on this machine alone. Start it on every machine with tandem "
            "launch slurm, torchrun or cluster.launcher=ray (docs/cluster.md), or set cluster.num_nodes=1.",
        ),
        (
            {},
            ["cluster.launcher=torchrun"],
            "cluster.launcher=torchrun, but torchrun did not start this process: RANK and WORLD_SIZE are not set. Start it with "
            "torchrun --nproc-per-node N --no-python tandem train, or leave out the key.",
        ),
        (
            {},
            ["cluster.launcher=slurm"],
            "cluster.launcher=slurm, but srun did not start this process: SLURM_STEP_ID is not set. Write a batch script with "
            "tandem launch slurm, or leave out the key.",
        ),
        (
            TORCHRUN,
            ["cluster.launcher=local"],
            "cluster.launcher=local starts the ranks of the run, but torchrun has started this process as rank 1 of 4. Leave out "
            "the key, or start tandem train alone.",
        ),
        (
            SRUN,
            ["cluster.launcher=ray"],
            "cluster.launcher=ray starts the ranks of the run, but srun has started this process as rank 1 of 4. Leave out the "
            "key, or start tandem train alone.",
        ),
        (
            TORCHRUN,
            ["cluster.gpus_per_node=8"],
            "cluster.gpus_per_node = 8, but torchrun started 2 ranks on this machine. Start as many, or set "
            "cluster.gpus_per_node=all.",
        ),
        (
            SRUN,
            ["cluster.num_nodes=4"],
            "cluster.num_nodes = 4, but srun started 4 ranks, of which 2 are on this machine. Start as many nodes, or set "
            "cluster.num_nodes=1.",
        ),
        (
            ONE_TASK,
            ["cluster.launcher=slurm", "cluster.gpus_per_node=2"],
            "cluster.gpus_per_node = 2, but srun started 1 rank on this machine. Start as many, or set "
            "cluster.gpus_per_node=all.",
        ),
    ],
)
def test_a_launcher_or_number_that_does_not_agree_is_refused(given, environment, overrides, message):
    with pytest.raises(ConfigError) as refused:
        choose_launcher(given(environment, *overrides).config.cluster)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        (["cluster.gpus_per_node=4"], "cluster.gpus_per_node = 4"),
        (["cluster.num_nodes=2"], "cluster.num_nodes = 2"),
        (["cluster.launcher=ray"], "cluster.launcher = ray"),
    ],
)
def test_a_call_from_python_is_one_rank(given, overrides, setting):
    check_python_call(given({}, "cluster.gpus_per_node=1").config.cluster)
    check_python_call(given(TORCHRUN, "cluster.gpus_per_node=2").config.cluster)
    with pytest.raises(ConfigError) as refused:
        check_python_call(given({}, *overrides).config.cluster)
    assert str(refused.value) == (
        f"{setting}, but a call from Python is one process. Start the script with torchrun or srun, use the command tandem "
        "train, or leave out the key."
    )


def test_ray_must_be_installed(given, monkeypatch):
    monkeypatch.setattr(choose, "find_spec", lambda name: None)
    with pytest.raises(MachineError) as refused:
        choose_launcher(given({}, "cluster.launcher=ray").config.cluster)
    assert str(refused.value) == (
        "cluster.launcher=ray needs the package ray. Install it: pip install '.[ray]', or leave out the key."
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "cluster.gpus_per_node=0",
            "command line: cluster.gpus_per_node = 0: input should be greater than 0, or input should be 'all'.",
        ),
        (
            "cluster.gpus_per_node=some",
            "command line: cluster.gpus_per_node = \"some\": input should be a valid integer, or input should be 'all'.",
        ),
        ("cluster.num_nodes=0", "command line: cluster.num_nodes = 0: input should be greater than 0."),
        (
            "cluster={num_nodes: 2, launcher: local}",
            "command line: cluster.launcher=local starts ranks on this machine only, but cluster.num_nodes = 2. Set "
            "cluster.num_nodes=1, or use another launcher (docs/cluster.md).",
        ),
    ],
)
def test_values_without_a_meaning_are_refused(override, message):
    with pytest.raises(ConfigError) as refused:
        load_config(None, [override])
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("gpus", "overrides", "expected"),
    [
        (0, [], 1),
        (0, ["cluster.gpus_per_node=2"], 2),  # on the CPU
        (1, [], 1),
        (8, [], 8),
        (8, ["cluster.gpus_per_node=3"], 3),
        (8, ["cluster.gpus_per_node=1"], 1),
    ],
)
def test_a_rank_for_every_gpu_or_as_many_as_asked_for(given, monkeypatch, gpus, overrides, expected):
    monkeypatch.setattr(choose, "_num_gpus", lambda: gpus)
    assert num_local_ranks(given({}, *overrides)) == expected


def test_more_ranks_than_gpus_are_refused(given, monkeypatch):
    monkeypatch.setattr(choose, "_num_gpus", lambda: 2)
    with pytest.raises(MachineError) as refused:
        num_local_ranks(given({}, "cluster.gpus_per_node=9"))
    assert str(refused.value) == (
        "cluster.gpus_per_node = 9, but this machine has 2 GPUs. Set cluster.gpus_per_node=2 or all."
    )


def test_a_machine_without_gpus_does_not_start_hundreds_of_processes(given, monkeypatch):
    monkeypatch.setattr(choose, "_num_gpus", lambda: 0)
    monkeypatch.setattr(choose.os, "cpu_count", lambda: 2)
    assert num_local_ranks(given({}, "cluster.gpus_per_node=16")) == 16
    with pytest.raises(MachineError) as refused:
        num_local_ranks(given({}, "cluster.gpus_per_node=17"))
    assert str(refused.value) == (
        "cluster.gpus_per_node = 17: this machine has no GPU, and would start as many processes on its CPU. Set at most 16, or "
        "leave it out for one."
    )
    monkeypatch.setattr(choose.os, "cpu_count", lambda: 64)
    assert num_local_ranks(given({}, "cluster.gpus_per_node=64")) == 64


@pytest.mark.parametrize(
    ("gpus", "overrides", "expected"), [(0, [], 1), (0, ["cluster.gpus_per_node=2"], 2), (8, [], 8)]
)
def test_the_gpus_of_another_trainers_file_are_not_cpu_ranks(given, monkeypatch, tmp_path, gpus, overrides, expected):
    file = tmp_path / "nemo.yaml"
    file.write_text(
        "policy: {dtensor_cfg: {enabled: true}, model_name: m}\ncluster: {gpus_per_node: 8, num_nodes: 1}\n"
    )
    given({})
    monkeypatch.setattr(choose, "_num_gpus", lambda: gpus)
    loaded = load_config(file, overrides)
    assert loaded.config.cluster.gpus_per_node == (2 if overrides else 8)
    assert num_local_ranks(loaded) == expected


def test_a_machine_without_gpus_is_detected_without_torch(monkeypatch):
    if any(os.path.exists(f"/dev/{name}") for name in ("nvidia0", "dxg", "kfd")):  # noqa: PTH110
        pytest.skip("this machine has a GPU")
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "torch")
    assert choose._num_gpus() == 0
    assert "torch" not in sys.modules


@pytest.mark.parametrize(
    ("overrides", "nodes", "expected"),
    [
        (["cluster.gpus_per_node=2"], [{"CPU": 4.0}], (2, False)),
        ([], [{"CPU": 4.0}], (1, False)),
        ([], [{"CPU": 4.0}, {"CPU": 64.0, "GPU": 8.0}], (8, True)),
        (
            ["cluster.num_nodes=2"],
            [{"GPU": 8.0}, {"GPU": 4.0}, {"GPU": 2.0}],
            (8, True),
        ),  # 4 on each of the two largest
        (["cluster.num_nodes=2", "cluster.gpus_per_node=3"], [{"GPU": 8.0}, {"GPU": 4.0}], (6, True)),
    ],
)
def test_the_ranks_of_a_ray_cluster(overrides, nodes, expected):
    assert num_ray_ranks(load_config(None, overrides).config.cluster, nodes) == expected


@pytest.mark.parametrize(
    ("overrides", "nodes", "found"),
    [
        (["cluster.num_nodes=2", "cluster.gpus_per_node=8"], [{"GPU": 8.0}], "1 node with 8 GPUs"),
        (["cluster.num_nodes=1", "cluster.gpus_per_node=8"], [{"GPU": 4.0}, {"GPU": 4.0}], "2 nodes with 4, 4 GPUs"),
        (["cluster.num_nodes=1", "cluster.gpus_per_node=3"], [{"CPU": 2.0}], "1 node with 2 CPUs"),
    ],
)
def test_a_ray_cluster_that_is_too_small_is_refused(overrides, nodes, found):
    cluster = load_config(None, overrides).config.cluster
    with pytest.raises(MachineError) as refused:
        num_ray_ranks(cluster, nodes)
    assert str(refused.value) == (
        f"cluster.num_nodes = {cluster.num_nodes}, cluster.gpus_per_node = {cluster.gpus_per_node}: the Ray cluster has {found}. "
        "Add nodes, or lower the numbers."
    )
