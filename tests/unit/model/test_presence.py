"""Which rank a message names once the store of their signs of life is lost."""

import json
import os
import socket
import subprocess
import sys
import threading

import pytest
import torch.distributed as dist

from tandem.model.distributed import presence as presence_module
from tandem.model.distributed.presence import Presence


@pytest.fixture(autouse=True)
def watches_briefly(monkeypatch):
    monkeypatch.setattr(presence_module, "SECONDS_TO_WATCH", 0.2)


class LostStore:
    def check(self, keys):
        raise dist.DistNetworkError("connection reset by peer")


class HungStore:
    def check(self, keys):
        threading.Event().wait()


def lost_by_rank_1(first_pid, lost_store=LostStore):
    """What rank 1 says once it cannot read the store, if rank 0 was this process."""
    store = dist.HashStore()
    if first_pid is not None:
        sign = {"count": 1, "waits": 0, "exchanges": 0, "host": socket.gethostname(), "pid": first_pid}
        dist.PrefixStore("presence", store).set("0", json.dumps(sign))
    second = Presence(store, 1, 2)
    second.end()
    vars(second)["_store"] = lost_store()
    return second.describe_missing()


def test_rank_0_is_named_after_it_ended_with_the_store():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert lost_by_rank_1(ended.pid) == f"rank 0 (process {ended.pid} on {socket.gethostname()}) ended"


@pytest.mark.parametrize("store", [LostStore, HungStore])
def test_rank_0_that_hangs_is_named(store):
    assert (
        lost_by_rank_1(os.getpid(), store)
        == f"rank 0 (process {os.getpid()} on {socket.gethostname()}) no longer answers"
    )


def test_the_launcher_may_have_ended_if_it_serves_the_store(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert lost_by_rank_1(os.getpid()) == (
        f"rank 0 (process {os.getpid()} on {socket.gethostname()}), or the launcher that ranks find each other through, ended"
    )


def test_a_rank_0_that_never_gave_a_sign_is_named_without_its_process():
    assert lost_by_rank_1(None) == "rank 0, or the launcher that ranks find each other through, ended"
