"""The variables that srun sets for a task become those that torchrun sets for a rank."""

import pytest

from tandem.errors import ConfigError
from tandem.isolation import GPU_INDEX, LAUNCHER
from tandem.launch.srun import adopt_srun_variables, hosts_of, is_in_step, tasks_per_node

TASK = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "gpu[08-10]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


@pytest.mark.parametrize(
    ("written", "hosts"),
    [
        ("node7", ["node7"]),
        ("node07,node09", ["node07", "node09"]),
        ("node[01-03,07]", ["node01", "node02", "node03", "node07"]),
        ("node[1,3-4]", ["node1", "node3", "node4"]),
        ("node[8-11]", ["node8", "node9", "node10", "node11"]),
        ("node[08-11]", ["node08", "node09", "node10", "node11"]),
        ("a[1-2],b[3],c", ["a1", "a2", "b3", "c"]),
        ("rack[1-2]n[01-02]", ["rack1n01", "rack1n02", "rack2n01", "rack2n02"]),
        ("n[1-2].example.org", ["n1.example.org", "n2.example.org"]),
        ("ip-10-0-0-1,ip-10-0-0-2", ["ip-10-0-0-1", "ip-10-0-0-2"]),
        ("queue1-dy-p5-[1-2]", ["queue1-dy-p5-1", "queue1-dy-p5-2"]),
    ],
)
def test_a_node_list_is_expanded(written, hosts):
    assert hosts_of(written) == hosts


@pytest.mark.parametrize(
    "written", ["", "node[", "node[a-b]", "node[1-2", "node]1[", ",a", "a,,b", "node[1--2]", "node[]"]
)
def test_a_text_that_is_not_a_node_list_is_refused(written):
    with pytest.raises(ConfigError, match="Set MASTER_ADDR"):
        hosts_of(written)


def test_counts_of_tasks_per_node():
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert tasks_per_node("8") == [8]
    with pytest.raises(ConfigError, match="not a list of counts"):
        tasks_per_node("2(x3")


def test_a_task_becomes_a_rank():
    environment = dict(TASK)
    adopt_srun_variables(environment)
    assert environment == TASK | {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "gpu08",
        "MASTER_PORT": str(20000 + (1234567 * 7) % 10000),
        LAUNCHER: "slurm",
    }


def test_tasks_of_one_machine_meet_on_the_loopback_address():
    environment = TASK | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    adopt_srun_variables(environment)
    assert environment["MASTER_ADDR"] == "127.0.0.1"


def test_steps_of_a_job_use_different_ports():
    ports = set()
    for step in ("0", "1"):
        environment = TASK | {"SLURM_STEP_ID": step}
        adopt_srun_variables(environment)
        ports.add(environment["MASTER_PORT"])
    assert len(ports) == 2


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {name: value for name, value in TASK.items() if "STEP" not in name} | {"SLURM_NTASKS": "6"},
        TASK | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0"},
        TASK | {"RANK": "0", "WORLD_SIZE": "4"},
    ],
    ids=["no Slurm", "the batch script of a job", "a single task", "torchrun in a task"],
)
def test_nothing_is_changed_otherwise(environment):
    before = dict(environment)
    adopt_srun_variables(environment)
    assert environment == before
    assert is_in_step(TASK)
    assert not is_in_step({})


def test_the_address_and_port_of_the_user_count():
    environment = TASK | {"MASTER_ADDR": "10.0.0.8", "MASTER_PORT": "29500"}
    adopt_srun_variables(environment)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.0.0.8", "29500")


def test_a_task_that_sees_only_its_own_gpu_uses_it():
    """With srun --gpus-per-task=1, or --gpu-bind."""
    environment = TASK | {"CUDA_VISIBLE_DEVICES": "1", "SLURM_GPUS_ON_NODE": "2"}
    adopt_srun_variables(environment)
    assert environment[GPU_INDEX] == "0"
    shared = TASK | {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "2"}
    adopt_srun_variables(shared)
    assert GPU_INDEX not in shared


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "1"},
            "srun started 2 tasks on this machine, where the job has 1 GPU. Start one task per GPU (--ntasks-per-node).",
        ),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID = 'x': not a number. Start tandem train with srun."),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
            "Slurm's variables disagree: 6 tasks, on nodes with 2, 2, and this is node 1. Start tandem train with srun, in its "
            "own step.",
        ),
        (
            {"SLURM_LOCALID": ""},
            "srun started this process, but SLURM_LOCALID is not set. Start tandem train with srun, and keep the variables that "
            "srun sets.",
        ),
    ],
)
def test_variables_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ConfigError) as refused:
        adopt_srun_variables(TASK | changes)
    assert str(refused.value) == message
