"""A run on local files makes no network connections. Every attempt of its processes to reach a host is recorded."""

import ipaddress
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from running import SHORT, few_pairs

from tandem.isolation import NO_TELEMETRY

# Imported by every Python process that finds it: each reports what it looks up and connects to.
RECORDER = """
import os, sys

EVENTS = {"socket.connect": 1, "socket.sendto": 1, "socket.sendmsg": 1, "socket.getaddrinfo": 0, "socket.gethostbyname": 0}

def _record(event, arguments):
    if event in EVENTS:
        target = arguments[EVENTS[event]]
        host = target[0] if isinstance(target, tuple) else target
        host = host.decode(errors="replace") if isinstance(host, bytes) else host
        line = f"{event} {host if isinstance(host, str) else None}\\n"
        file = os.open(os.environ["RECORDED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, line.encode())
        os.close(file)

sys.addaudithook(_record)
"""
# A short run may end before its trackers are open, on a busy machine.
PATIENT = "from tandem.report.trackers import tracking; tracking.CLOSE_SECONDS = 240.0\nfrom tandem.cli.main import main\nmain()"
ALL_THREE = [
    *(f"logger.{name}_enabled=true" for name in ("tensorboard", "wandb", "mlflow")),
    "logger.wandb.mode=offline",
]
# Packages that see one of these assume that they run in a test, or should not connect.
TESTED = ("PYTEST_CURRENT_TEST", "CI", "GITHUB_ACTIONS", "HF_HUB_OFFLINE", "WANDB_MODE", "NO_PROXY", "no_proxy")


def is_local(line: str) -> bool:
    """Whether a recorded line names this machine."""
    host = line.split(" ", 1)[1]
    if host in ("None", "localhost", "") or host.startswith(("/", "\0")):  # the last two: sockets of one machine
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


@contextmanager
def proxy() -> Iterator[tuple[str, list[bytes]]]:
    """A proxy that forwards nothing: its address, and the requests it received. It also sees programs other than Python."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):  # closed
                while True:
                    with server.accept()[0] as caller:
                        asked.append(caller.recv(200))

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", asked
        server.shutdown(socket.SHUT_RDWR)


def attempts(folder, *overrides: str) -> tuple[list[str], list[bytes]]:
    """The hosts that a run with these settings tried to reach, from the recorder and from the proxy."""
    (folder / "recorder").mkdir()
    (folder / "recorder/sitecustomize.py").write_text(RECORDER)
    recorded = folder / "recorded"
    recorded.touch()
    kept = {name: value for name, value in os.environ.items() if name not in (*TESTED, *NO_TELEMETRY)}
    with proxy() as (address, asked):
        proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), address)
        environment = {
            **kept,
            **proxies,
            "HOME": str(folder),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(folder / "recorder"), os.environ.get("PYTHONPATH")])),
            "RECORDED": str(recorded),
        }
        command = [sys.executable, "-P", "-c", PATIENT, "train", *SHORT, few_pairs(folder), "run.dir=run", *overrides]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "did not reach" not in done.stdout + done.stderr
    assert "switched off" not in done.stdout + done.stderr
    return [line for line in recorded.read_text().splitlines() if not is_local(line)], asked


def test_a_run_without_hub_and_trackers_makes_no_connections(tmp_path):
    assert attempts(tmp_path) == ([], [])


@pytest.mark.slow
def test_trackers_that_write_to_disk_make_no_connections(tmp_path):
    assert attempts(tmp_path, *ALL_THREE) == ([], [])
    assert (tmp_path / "run/logs/mlflow.db").exists()


def test_the_recorder_sees_what_a_process_and_its_children_try_to_reach(tmp_path):
    """Without this, the tests above would pass even if the recorder missed connections."""
    (tmp_path / "sitecustomize.py").write_text(RECORDER)
    look_up = "import socket\ntry: socket.create_connection(('nobody.invalid', 1))\nexcept OSError: pass\n"
    send = "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('192.0.2.1', 9))\n"
    code = f"{look_up}{send}import subprocess, sys\nsubprocess.run([sys.executable, '-c', {look_up!r}])"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "RECORDED": str(tmp_path / "recorded")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert [line for line in (tmp_path / "recorded").read_text().splitlines() if not is_local(line)] == [
        "socket.getaddrinfo nobody.invalid",
        "socket.connect 192.0.2.1",
        "socket.getaddrinfo nobody.invalid",
    ]
