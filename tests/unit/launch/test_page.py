"""docs/cluster.md: its scripts and manifests are those that are written and tested, and its commands are accepted."""

import shlex
from pathlib import Path

import pytest
import yaml

from tandem.config.load import load_config
from tandem.launch import slurm_script
from tandem.launch.slurm_script import SlurmOptions, batch_script

REPOSITORY = Path(__file__).parents[3]
PAGE = (REPOSITORY / "docs/cluster.md").read_text(encoding="utf-8")
MANIFEST = REPOSITORY / "examples/kubernetes.yaml"


def blocks(language: str) -> list[str]:
    return [block.split("```")[0] for block in PAGE.split(f"```{language}\n")[1:]]


def commands() -> list[list[str]]:
    """The arguments of tandem in the commands of the page."""
    lines = [line for block in blocks("bash") for line in block.splitlines() if "tandem " in line]
    words = [[word for word in shlex.split(line) if word != "..."] for line in lines]
    return [one[one.index("tandem") + 1 :] for one in words]


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_the_commands_are_accepted(arguments):
    overrides = [one for one in arguments if "=" in one]
    assert load_config(None, overrides).config.cluster
    assert arguments[0] in ("train", "launch")


def test_the_batch_script_is_what_the_command_writes(monkeypatch):
    (command,) = [one for one in commands() if one[:2] == ["launch", "slurm"]]
    options = dict(zip(command[2:6:2], command[3:6:2], strict=True))
    assert options == {"--time": "04:00:00", "--partition": "gpu"}
    monkeypatch.setattr(slurm_script.sys, "executable", "/shared/venv/bin/python")
    written = batch_script(
        load_config(None, command[6:]),
        command[6:],
        SlurmOptions(job_name="first", time="04:00:00", partition="gpu"),
        Path("/shared/project"),
    )
    assert blocks("sh") == [written]


def test_the_kubernetes_manifest_starts_the_ranks_that_its_configuration_asks_for():
    text = MANIFEST.read_text(encoding="utf-8")
    assert blocks("yaml") == [text]
    service, job = yaml.safe_load_all(text)
    assert (service["kind"], job["kind"], job["spec"]["completionMode"]) == ("Service", "Job", "Indexed")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    command = container["command"]
    split = command.index("tandem")
    launcher = dict(one.removeprefix("--").split("=") for one in command[1:split] if "=" in one)
    assert (command[0], command[split - 1], command[split + 1]) == ("torchrun", "--no-python", "train")
    cluster = load_config(None, command[split + 2 :]).config.cluster
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(launcher["nnodes"]) == cluster.num_nodes
    limit = container["resources"]["limits"]["nvidia.com/gpu"]
    assert limit == int(launcher["nproc-per-node"]) == cluster.gpus_per_node
    # torchrun ends before Kubernetes kills it.
    variables = {one["name"]: one["value"] for one in container["env"]}
    assert int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    name = job["metadata"]["name"]
    assert launcher["master-addr"] == f"{name}-0.{service['metadata']['name']}"
    assert (
        service["spec"] == {"clusterIP": "None", "selector": {"job-name": name}} or service["spec"]["clusterIP"] is None
    )
    assert pod["subdomain"] == service["metadata"]["name"]
    assert {one["name"] for one in pod["volumes"]} == {one["name"] for one in container["volumeMounts"]}
