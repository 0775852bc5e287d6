"""`tandem doctor`: every finding with its fix, without secrets, and also with a broken torch."""

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tandem.cli import main as cli
from tandem.diagnosis import children, doctor, network, places, versions
from tandem.diagnosis.finding import Finding, finding, hide_secrets
from tandem.terminal.printable import SECRETS

GIB = 2**30
PROBED: dict[str, Any] = {
    "torch": "2.11.0",
    "cuda": "13.0",
    "transformers": "5.17.0",
    "attention": "FlexAttention",
    "memory": 64 * GIB,
    "driver": "580.1",
    "devices": [{"name": "NVIDIA H200", "capability": [9, 0], "free": 139 * GIB, "total": 140 * GIB}],
    "triton": "3.5.0",
}
OFFLINE = "local models and data files work; models and datasets of the hub work only if they are in its cache"


@pytest.fixture(autouse=True)
def no_secrets_afterwards() -> Iterator[None]:
    yield
    SECRETS.clear()


def run_here(monkeypatch, capsys, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["tandem", "doctor", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    code = ended.value.code
    assert code is None or isinstance(code, int)
    return code or 0, capsys.readouterr().out


# The command


def test_problems_give_exit_code_1_and_their_fixes_are_printed(monkeypatch, capsys):
    found = [
        Finding("torch", "ok", "fine"),
        Finding("cache", "problem", "cannot be written", fix="Set TANDEM_CACHE."),
        Finding("packages", "warning", "old", command="pip install new"),
    ]
    monkeypatch.setattr(doctor, "doctor", lambda **_: found)
    assert run_here(monkeypatch, capsys) == (
        1,
        "ok       torch            fine\n"
        "problem  cache            cannot be written\n"
        "                          Set TANDEM_CACHE.\n"
        "warning  packages         old\n"
        "  pip install new\n"
        "\n"
        "1 problem, 1 warning.\n",
    )
    code, said = run_here(monkeypatch, capsys, "--quiet")
    assert (code, "torch" in said, said.splitlines()[-1]) == (1, False, "  pip install new")


def test_without_problems_the_exit_code_is_0(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "doctor", lambda **_: [Finding("network", "note", "offline")])
    assert run_here(monkeypatch, capsys) == (0, "note     network          offline\n\nNo problems.\n")
    code, said = run_here(monkeypatch, capsys, "--json")
    assert (code, json.loads(said)) == (
        0,
        [{"name": "network", "status": "note", "text": "offline", "fix": "", "command": ""}],
    )


def broken(folder: Path, text: str) -> dict[str, str]:
    """An environment in which `import torch` runs this text."""
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").write_text(text, encoding="utf-8")
    paths = [str(folder), *(path for path in sys.path if path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_TOKEN": "hf_veryverysecret"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise ImportError('libcudart.so.13: no such file')", "ImportError: libcudart.so.13: no such file"),
        ("import os; os.kill(os.getpid(), 11)", "killed by signal 11"),
        ("import os; raise RuntimeError(os.environ['HF_TOKEN'])", "RuntimeError: $HF_TOKEN"),
    ],
)
def test_a_broken_torch_is_a_finding_without_a_traceback(text, reason, tmp_path):
    command = [sys.executable, "-m", "tandem", "doctor", "--no-network", "--json"]
    environment = broken(tmp_path, text)
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=240)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr and "verysecret" not in ended.stdout + ended.stderr
    found = {one["name"]: one for one in json.loads(ended.stdout)}
    assert found["torch"] == {
        "name": "torch",
        "status": "problem",
        "text": f"torch and transformers cannot be imported: {reason}",
        "fix": "Install them again in this environment.",
        "command": "pip install --force-reinstall 'torch>=2.11' 'transformers>=5.17,<6'",
    }
    assert found["GPU"]["text"] == "not checked, because torch cannot be imported"
    assert "self-test" not in found


@pytest.mark.slow
def test_this_machine_trains_a_step():
    found = {one.name: one for one in doctor.doctor(network=False)}
    assert found["self-test"].status == "ok"
    assert found["torch"].status == "ok"


def test_a_failed_step_is_a_problem_with_the_command_that_repeats_it(monkeypatch):
    monkeypatch.setattr(children, "_run", lambda *_, **__: (6, "", "noise\ntandem: error: out of memory.\n"))
    found = children.train_one_step()
    assert (found.status, found.text) == ("problem", "one step of training failed: out of memory")
    assert " train --fresh run.dir=doctor-run reference.mode=live dpo.max_num_steps=1 " in found.command


# GPUs


def device(**changes: Any) -> dict[str, Any]:
    return {**PROBED, "devices": [{**PROBED["devices"][0], **changes}]}


def test_a_gpu_is_described(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.delenv("CC", raising=False)
    assert children.device_findings(PROBED) == [
        Finding("GPU", "ok", "0: NVIDIA H200, 139 of 140 GiB free, compute capability 9.0, driver 580.1"),
        Finding("attention", "ok", "FlexAttention"),
        Finding("compilation", "ok", "triton 3.5.0, /usr/bin/cc"),
    ]


def test_problems_of_a_gpu(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    old, _, compiler = children.device_findings(device(capability=[7, 5]))
    assert (old.status, old.fix) == ("warning", "Train with policy.precision=float32.")
    assert old.text.endswith("compute capability 7.5, driver 580.1: it does not compute in bfloat16")
    assert (compiler.status, compiler.text) == (
        "problem",
        "no C compiler (cc, gcc, clang), which Triton needs to launch kernels",
    )
    busy, *_ = children.device_findings(device(free=10 * GIB))
    assert (busy.status, busy.text.endswith(": other processes use its memory")) == ("warning", True)
    *_, missing = children.device_findings({**PROBED, "triton": None})
    assert (missing.status, missing.command) == ("problem", "pip install triton")


def test_a_gpu_that_torch_does_not_see():
    build, *_ = children.device_findings({**PROBED, "devices": [], "cuda": None})
    assert (build.status, build.text) == (
        "problem",
        "the NVIDIA driver 580.1 is installed, but torch is a build for CPUs",
    )
    hidden, *_ = children.device_findings({**PROBED, "devices": []})
    assert hidden.status == "problem" and hidden.fix.startswith("Check CUDA_VISIBLE_DEVICES")
    none, *_ = children.device_findings({**PROBED, "devices": [], "driver": None, "cuda": None})
    assert none == Finding("GPU", "note", "none; training uses the CPU, with 64 GiB of memory")


# Folders


def place(folder: Path) -> places.Place:
    return places.Place("cache", folder, 5, 0.1, "Set TANDEM_CACHE to a directory on another disk.")


@pytest.mark.parametrize(
    ("free", "status", "text"),
    [
        (50 * GIB, "ok", "50 GiB free"),
        (2 * GIB, "warning", "2 GiB free, which may be too little"),
        (0, "problem", "0 GiB free: the disk is full"),
    ],
)
def test_free_space_of_a_folder(free, status, text, tmp_path, monkeypatch):
    monkeypatch.setattr(places, "free_bytes", lambda folder: free)
    found = places.check_place(place(tmp_path / "new/cache"))
    assert (found.status, found.text) == (status, f"{tmp_path}/new/cache: {text}")
    assert not (tmp_path / "new").exists() and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_folder_that_cannot_be_written(reason, tmp_path, monkeypatch):
    def refuse(**_):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    assert places.check_place(place(tmp_path)) == Finding(
        "cache",
        "problem",
        f"{tmp_path} cannot be written ({os.strerror(reason)})",
        fix="Set TANDEM_CACHE to a directory on another disk.",
    )


def test_a_file_in_the_place_of_a_folder(tmp_path):
    (tmp_path / "cache").touch()
    found = places.check_place(place(tmp_path / "cache/inside"))
    assert (found.status, found.text) == ("problem", f"{tmp_path}/cache is not a directory")


def test_every_folder_that_training_writes_to_is_checked(monkeypatch, tmp_path):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    names = [one.name for one in places.place_findings(has_gpu=True)]
    assert names[:4] == ["cache", "models", "runs", "temporary files"]
    assert names[-2:] == ["Triton's cache", "compile cache"]


def test_the_compile_caches_are_those_of_training_with_their_size(monkeypatch, tmp_path):
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    monkeypatch.setattr(places, "free_bytes", lambda folder: 50 * GIB)
    folder = tmp_path / f"compile-{os.getuid()}"
    (folder / "triton").mkdir(parents=True)
    with (folder / "triton/kernel").open("wb") as file:
        file.truncate(GIB)
    with (folder / "graph").open("wb") as file:
        file.truncate(GIB // 2)
    triton, inductor = places.place_findings(has_gpu=True)[-2:]
    assert triton.text == f"{folder}/triton: 1 GiB used, 50 GiB free"
    assert inductor.text == f"{folder}: 1.5 GiB used, 50 GiB free"


# The network


@contextmanager
def hub(status: int = 200) -> Iterator[tuple[str, list[tuple[str, dict[str, str]]]]]:
    """A server on this machine: its address, and the requests that it received."""
    asked: list[tuple[str, dict[str, str]]] = []

    class Answer(BaseHTTPRequestHandler):
        def answer(self) -> None:
            asked.append((f"{self.command} {self.path}", dict(self.headers)))
            self.send_response(status)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        do_HEAD = do_GET = do_POST = answer

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def online(monkeypatch):
    for name in (*network.OFFLINE_VARIABLES, "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("status", [200, 302, 403])
def test_one_head_request_is_sent_without_credentials(status, monkeypatch, online):
    monkeypatch.setenv("HF_TOKEN", "hf_veryverysecret")
    with hub(status) as (address, asked):
        monkeypatch.setenv("HF_ENDPOINT", f"http://me:password@{address}/secret/path")
        reached, token = network.network_findings(enabled=True)
    assert reached == Finding("network", "ok", f"http://{address}/ can be reached")
    ((request, headers),) = asked
    assert request == "HEAD /"
    assert set(headers) <= {"Accept-Encoding", "Host", "User-Agent", "Connection"}
    assert token.text == "HF_TOKEN is set"


def test_a_hub_that_cannot_be_reached_is_a_note(monkeypatch, online):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    found, _ = network.network_findings(enabled=True)
    assert found.status == "note"
    assert found.text.startswith("http://127.0.0.1:9/ cannot be reached (") and found.text.endswith(f"); {OFFLINE}")


def test_nothing_is_sent_offline_or_without_the_network(monkeypatch, online):
    with hub() as (address, asked):
        monkeypatch.setenv("HF_ENDPOINT", f"http://{address}")
        assert network.network_findings(enabled=False)[0].text == "not checked (--no-network)"
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        found, _ = network.network_findings(enabled=True)
    assert found == Finding("network", "note", f"not checked: HF_HUB_OFFLINE is set, so {OFFLINE}")
    assert asked == []


@pytest.mark.parametrize("endpoint", ["file:///etc", "ftp://host", "nonsense"])
def test_an_endpoint_that_is_not_a_web_address(endpoint, monkeypatch, online):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    found, _ = network.network_findings(enabled=True)
    assert found == Finding(
        "network", "warning", f"HF_ENDPOINT = {endpoint} is not a web address", fix="Unset HF_ENDPOINT."
    )


# Versions and secrets


def test_a_package_that_is_missing_or_too_old_is_a_problem(monkeypatch):
    wanted = ["torch>=2.11", "rich>=13", "absent-package>=1", "wandb>=1; extra == 'wandb'"]
    monkeypatch.setattr(versions.metadata, "requires", lambda name: wanted)
    real = versions.metadata.version
    monkeypatch.setattr(versions.metadata, "version", lambda name: "2.0.1" if name == "torch" else real(name))
    found = versions.version_findings()[1:-1]
    assert [(one.status, one.text, one.command) for one in found] == [
        ("problem", "torch 2.0.1 is installed, but tandem needs torch>=2.11", "pip install 'torch>=2.11'"),
        ("problem", "absent-package is missing", "pip install 'absent-package>=1'"),
    ]


def test_secrets_are_hidden_in_every_part_of_a_finding(monkeypatch):
    values = {"HF_TOKEN": "hf_qwertzuiop", "WANDB_API_KEY": "0a1b2c3d4e5f", "AWS_SECRET_ACCESS_KEY": "MNBVCXYLKJ"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    hide_secrets()
    token, key, _ = values.values()
    made = finding("x", "ok", " ".join(values.values()), fix=token, command=f"curl http://me:pw@host/{key}")
    assert made == Finding(
        "x",
        "ok",
        "$HF_TOKEN $WANDB_API_KEY $AWS_SECRET_ACCESS_KEY",
        fix="$HF_TOKEN",
        command="curl http://host/$WANDB_API_KEY",
    )
