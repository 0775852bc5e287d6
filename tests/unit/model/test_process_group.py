"""Ranks listen only on the loopback address if all of them are on one machine."""

import os
import socket
import sys
from datetime import timedelta

import pytest
from listening import listening

from tandem.errors import MachineError
from tandem.model.distributed.process_group import _first_rank_listens, loopback_store, stay_on_loopback

NAMES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.fixture
def given(monkeypatch):
    """Sets exactly the environment variables that a launcher gives a rank."""

    def give(**variables: str) -> None:
        for name in (*NAMES, "GLOO_SOCKET_IFNAME"):
            monkeypatch.setenv(name, "")  # so that it is restored after the test, whoever sets it
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return give


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@pytest.mark.parametrize(
    ("variables", "interface"),
    [
        ({}, LOOPBACK),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node7"}, LOOPBACK),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, LOOPBACK),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "::1"}, LOOPBACK),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node7"}, None),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.1"}, None),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "eth7"}, "eth7"),
    ],
    ids=["alone", "torchrun", "localhost", "IPv6", "two machines", "another address", "the user's choice"],
)
def test_gloo_uses_the_loopback_interface_if_all_ranks_are_on_this_machine(given, variables, interface):
    given(**variables)
    stay_on_loopback()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_store_of_the_first_rank_listens_only_on_the_loopback_address(given):
    given(WORLD_SIZE="2", RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    store = loopback_store(timedelta(seconds=30))
    assert store is not None
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert listening(os.getpid()) == {"127.0.0.1"}


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"},
        {
            "WORLD_SIZE": "2",
            "RANK": "0",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        },
    ],
    ids=["alone", "two machines", "torchrun's store"],
)
def test_torch_provides_the_store_if_it_is_not_needed_or_not_on_loopback(given, variables):
    given(**variables)
    assert loopback_store(timedelta(seconds=30)) is None


def test_a_port_in_use_is_refused_with_advice(given):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        given(WORLD_SIZE="2", RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        with pytest.raises(MachineError) as refused:
            loopback_store(timedelta(seconds=30))
    assert str(refused.value) == (
        f"MASTER_ADDR = 127.0.0.1, MASTER_PORT = {port}: the first rank cannot listen there (Address already in use). "
        "Choose another port."
    )


@pytest.mark.parametrize("address", ["127.0.0.1", "no.such.host.invalid"])
def test_a_rank_waits_for_the_first_one_only_as_long_as_configured(given, address):
    given(RANK="1", WORLD_SIZE="2", MASTER_ADDR=address, MASTER_PORT=str(free_port()))
    assert not _first_rank_listens(0.5)


def test_a_rank_continues_once_the_first_one_listens(given):
    with socket.create_server(("127.0.0.1", 0)) as store:
        given(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.getsockname()[1]))
        assert _first_rank_listens(30)
