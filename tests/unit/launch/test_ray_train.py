"""What ranks on Ray's workers print, and which worker was lost. Whole runs: tests/end_to_end/test_launchers.py."""

import io

import pytest

pytestmark = pytest.mark.slow  # `make test` does not install ray


@pytest.fixture(scope="module")
def ray_train():
    pytest.importorskip("ray")
    from tandem.launch import ray_train

    return ray_train


@pytest.fixture
def relay(ray_train):
    return ray_train._Relay({})


def forward(ray_train, relay, monkeypatch, text: str) -> None:
    """Send what a rank prints on standard error, as its worker does. Calls of the relay are direct."""

    class Direct:
        class write:
            remote = staticmethod(relay.write)

    monkeypatch.setattr(ray_train.ray, "get", lambda value: value)
    ray_train._forward(io.BytesIO(text.encode()), 2, Direct)


def printed(relay) -> str:
    return b"".join(text for _, text in relay.read()).decode()


def test_an_error_that_all_ranks_find_is_printed_once(ray_train, relay, monkeypatch):
    forward(ray_train, relay, monkeypatch, "tandem: error: rank 1 on vm: no such file.\n  a.jsonl\n")
    forward(ray_train, relay, monkeypatch, "warning: slow\ntandem: error: no such file.\n  a.jsonl\n")
    forward(ray_train, relay, monkeypatch, "tandem: error: rank 2 on vm: the disk is full.\n")
    assert printed(relay) == (
        "tandem: error: rank 1 on vm: no such file.\n  a.jsonl\nwarning: slow\n"
        "tandem: error: rank 2 on vm: the disk is full.\n"
    )


def test_ranks_that_were_started_again_print_an_error_again(ray_train, relay, monkeypatch):
    relay.started(0)
    forward(ray_train, relay, monkeypatch, "tandem: error: no such file.\n")
    relay.started(0)
    forward(ray_train, relay, monkeypatch, "tandem: error: no such file.\n")
    assert printed(relay).count("tandem: error: no such file.\n") == 2


def test_a_lost_worker_is_named(ray_train, monkeypatch):
    reported = []

    class Relay:
        class lost:
            remote = staticmethod(reported.append)

    died = ray_train.ray.exceptions.RayActorError()
    wrapped = RuntimeError("the health check of a worker failed")
    wrapped.__dict__["health_check_failure"] = died  # as Ray Train wraps it
    losses = ray_train._LostWorkers(Relay)
    losses.after_exception(run_context=None, worker_exceptions={0: RuntimeError("lost another rank"), 1: wrapped})
    losses.after_exception(run_context=None, worker_exceptions={9: died, 8: died})
    losses.after_exception(run_context=None, worker_exceptions={0: RuntimeError("rank 0 was killed")})
    assert reported == ["the Ray worker of rank 1 was lost", "the Ray workers of ranks 8, 9 were lost"]


def test_the_restart_names_what_was_lost(relay):
    relay.started(0)
    relay.lost("the Ray worker of rank 1 was lost")
    relay.started(0)
    assert printed(relay) == "tandem: the Ray worker of rank 1 was lost. Ray Train starts all ranks again.\n"
