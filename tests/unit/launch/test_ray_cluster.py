"""The connection to a Ray cluster. Where Ray would wait for minutes, one message ends the command. Ray is replaced."""

import os
import signal
import socket
import subprocess
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest

from tandem.errors import MachineError, Terminated
from tandem.launch.ray_cluster import check_address, connect


@pytest.mark.parametrize(
    "address", ["foo", "http://127.0.0.1:8265", "127.0.0.1", "127.0.0.1:ray", ":6379", "host:99999"]
)
def test_what_is_not_an_address_is_refused(address):
    with pytest.raises(MachineError) as refused:
        check_address(address)
    assert str(refused.value) == (
        f"RAY_ADDRESS = {address}: not the address of a Ray cluster. Give HOST:PORT as ray start prints it (port 6379 by "
        "default), or unset the variable."
    )


def test_an_address_where_nothing_listens_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
        check_address(f"127.0.0.1:{port}")
        check_address(f"ray://127.0.0.1:{port}")
        check_address(f"localhost:{port}", this_machine="127.0.0.1")
    with pytest.raises(MachineError) as refused:
        check_address(f"127.0.0.1:{port}")
    assert refused.value.exit_code == 2
    assert str(refused.value) == (
        f"RAY_ADDRESS = 127.0.0.1:{port}: no Ray cluster answers there (connection refused). Start it with ray start --head, "
        "correct the address, or unset the variable."
    )


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8 on its loopback interface")
def test_a_cluster_that_listens_only_in_the_network_is_found_by_the_loopback_address():
    with socket.create_server(("127.0.0.2", 0)) as one:
        check_address(f"127.0.0.1:{one.getsockname()[1]}", this_machine="127.0.0.2")


@pytest.fixture
def fake_ray(monkeypatch):
    """Ray without a running cluster. Returns the addresses that it was started with."""
    addresses = []

    def init(address, **_):
        addresses.append(address)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
        if address == "auto":
            raise ConnectionError("Could not find any running Ray instance.")

    ray, util = ModuleType("ray"), ModuleType("ray.util")
    ray.__dict__.update(init=init, util=util)
    util.__dict__.update(get_node_ip_address=lambda: "127.0.0.1")
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.util", util)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")  # so that what connect sets is restored
    return SimpleNamespace(addresses=addresses, module=ray)


@pytest.mark.parametrize(
    ("given", "expected"), [(None, ["auto", "local"]), ("", ["auto", "local"]), ("local", ["local"])]
)
def test_without_a_cluster_one_is_started_on_this_machine(fake_ray, monkeypatch, given, expected):
    if given is None:
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
    else:
        monkeypatch.setenv("RAY_ADDRESS", given)
    connect()
    assert fake_ray.addresses == expected
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


def test_no_cluster_is_started_instead_of_the_one_of_the_address(fake_ray, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as one:
        monkeypatch.setenv("RAY_ADDRESS", address := f"127.0.0.1:{one.getsockname()[1]}")
        with pytest.raises(
            MachineError, match=f"^RAY_ADDRESS = {address}: no Ray cluster answers there. Start it with"
        ):
            connect()
    assert fake_ray.addresses == ["auto"]


def test_an_address_is_checked_before_ray_waits_for_it(fake_ray, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    with pytest.raises(MachineError, match="not the address of a Ray cluster"):
        connect()
    assert fake_ray.addresses == []


def test_sigterm_is_reported_although_ray_replaces_its_handler(fake_ray, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    before = signal.getsignal(signal.SIGTERM)
    connect()
    assert signal.getsignal(signal.SIGTERM) is before

    init = fake_ray.module.init

    def terminated(**options):
        init(**options)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr(fake_ray.module, "init", terminated)
    with pytest.raises(Terminated):
        connect()
    assert signal.getsignal(signal.SIGTERM) is before


WAITING = """
import time
from tandem.launch import ray_cluster
ray_cluster.ANSWER_SECONDS = 0.5
with ray_cluster._limited("{address}"):
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (
            "127.0.0.1:8265",
            "RAY_ADDRESS = 127.0.0.1:8265: no Ray cluster answers there, although something listens: Ray waited 0.5 seconds. "
            "Start it with ray start --head, correct the address, or unset the variable.",
        ),
        (
            "",
            "a Ray cluster was started on this machine, but it has not answered for 0.5 seconds. Run ray stop, then start the "
            "cluster again, or set RAY_ADDRESS.",
        ),
    ],
)
def test_a_cluster_that_does_not_answer_ends_the_command(address, expected):
    command = [sys.executable, "-c", WAITING.format(address=address)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"tandem: error: {expected}\n")
