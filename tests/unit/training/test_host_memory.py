"""Optimizer states in host memory: what a machine needs, a run that it does not hold, and where they are suggested."""

from types import SimpleNamespace

import pytest
import torch

from tandem.config.load import load_config
from tandem.config.schema import Config
from tandem.config.sections.policy import Policy
from tandem.errors import MachineError
from tandem.model.distributed.machines import num_ranks_here
from tandem.model.distributed.mesh import MeshShape
from tandem.training import host_memory, trainer
from tandem.training.host_memory import HostNeed, host_need, offload_advice, refuse_full_host
from tandem.training.memory import FixedMemory, MemoryEstimate, suggest_less_memory
from tandem.training.start.setup import set_up

GIB = 2**30
CUDA = torch.device("cuda")
OFFLOADED = "policy.optimizer.offload=true"


def need_of(weights: int, states: int) -> MemoryEstimate:
    """Of a rank with so many GiB of weights and of states."""
    parts = FixedMemory(weights * GIB, weights * GIB, states=0, copy=0, all_states=states * GIB)
    return MemoryEstimate(num_weights=GIB, parts=parts, per_token=1.0)


@pytest.mark.parametrize(
    ("settings", "mesh", "ranks_here", "states", "copies"),
    [
        ({}, MeshShape(), 1, 6, 6 + 3),
        ({}, MeshShape(shard=8), 4, 4 * 6, 4 * 9),
        ({}, MeshShape(replicate=4, shard=2), 8, 8 * 6, 2 * 9),  # of equal replicas only the first is saved
        ({"save_optimizer": False}, MeshShape(shard=8), 8, 8 * 6, 8 * 3),
        ({"enabled": False}, MeshShape(shard=8), 8, 8 * 6, 0),
    ],
)
def test_a_machine_holds_the_states_of_its_ranks_and_what_a_checkpoint_copies(
    settings, mesh, ranks_here, states, copies
):
    config = Config.model_validate({"checkpointing": settings})
    found = host_need(need_of(weights=3, states=6), config, lora=None, mesh=mesh, ranks_here=ranks_here)
    assert found == HostNeed(states * GIB, copies * GIB)


def test_with_adapters_a_checkpoint_has_only_their_weights():
    lora = SimpleNamespace(num_trained=GIB)
    found = host_need(need_of(3, 8), Config(), lora=lora, mesh=MeshShape(shard=2), ranks_here=1)
    assert found == HostNeed(8 * GIB, (8 + 2) * GIB)


def test_a_run_whose_states_the_host_does_not_hold_is_refused():
    need = HostNeed(48 * GIB, 72 * GIB)
    refuse_full_host(need, 8, available=120 * GIB)
    with pytest.raises(MachineError) as refused:
        refuse_full_host(need, 8, available=119 * GIB)
    assert str(refused.value) == (
        "policy.optimizer.offload = true: the optimizer states of 8 ranks need 48.0 GiB (120.0 with the copies that a checkpoint "
        "is written from) of this machine's memory, which has 119.0 GiB. Use policy.optimizer.state_dtype=int8 or more machines, "
        "or leave it out."
    )


def test_it_is_refused_before_weights_load(monkeypatch):
    monkeypatch.setattr(host_memory, "host_memory", lambda: 2**20)
    given = {"memory": 80 * GIB, "ranks_here": 2, "mesh": MeshShape(shard=2)}
    with pytest.raises(
        MachineError, match=r"^policy\.optimizer\.offload = true: the optimizer states of 2 ranks need "
    ):
        set_up(load_config(None, [OFFLOADED]).config, CUDA, **given)
    set_up(load_config(None, []).config, CUDA, **given)


def test_the_states_are_suggested_where_they_help_and_the_host_holds_them(monkeypatch):
    monkeypatch.setattr(host_memory, "host_memory", lambda: 100 * GIB)
    need, host = need_of(3, 6), HostNeed(6 * GIB, 9 * GIB)
    assert offload_advice(need, host, Config(), CUDA) == f"{OFFLOADED} (6.0 GiB of host memory)"
    assert offload_advice(need, host, Config(), torch.device("cpu")) == ""
    assert offload_advice(need_of(3, 0), host, Config(), CUDA) == ""  # nothing to move, as with adapters
    assert offload_advice(need, HostNeed(60 * GIB, 90 * GIB), Config(), CUDA) == ""
    in_use = Config.model_validate({"policy": {"optimizer": {"offload": True}}})
    assert offload_advice(need, host, in_use, CUDA) == ""


def test_messages_on_memory_suggest_it_after_smaller_states():
    said = suggest_less_memory(8192, Policy(), False, f"{OFFLOADED} (6.0 GiB of host memory)")
    assert said.startswith(
        "To use less memory, try policy.optimizer.state_dtype=int8; then policy.optimizer.offload=true (6.0 GiB of host memory), "
        "policy.weights=bfloat16_stochastic, "
    )


def test_a_run_out_of_memory_suggests_what_its_setup_found(monkeypatch, tmp_path):
    from running import short_run

    from tandem.errors import OutOfMemoryError
    from tandem.training.start import setup

    def fails(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(trainer, "build", fails)
    monkeypatch.setattr(setup, "offload_advice", lambda *_: "less of it")
    with pytest.raises(OutOfMemoryError, match=r"policy\.optimizer\.state_dtype=int8, less of it, policy\.weights"):
        short_run(tmp_path / "run")


@pytest.mark.parametrize(("number", "found"), [(0, 4), (3, 4), (4, 2), (5, 2), (6, 1)])
def test_the_ranks_of_a_machine_are_counted(number, found):
    firsts = [True, False, False, False, True, False, True]
    assert num_ranks_here(SimpleNamespace(number=number, is_first_here=None, gather=lambda _: firsts)) == found
