"""Optimizer states in host memory: the same weights and states, bit for bit, however parameters are divided into buckets."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from running import few_pairs, killed_after, largest_difference, metrics_of, short_run, weights_of

from tandem.config.load import load_config
from tandem.errors import MachineError
from tandem.training import adamw, offload
from tandem.training.adamw import LocalAdamW, RoundedAdamW, Rule
from tandem.training.checkpoint.parts import part_of
from tandem.training.offload import BUCKET_BYTES, NUM_BUCKETS, HostStates, bytes_on_device
from tandem.training.start import machine
from tandem.training.start.setup import set_up

SHAPES = ((64, 512), (512,), (1000, 24), (3, 8, 16))
OFFLOADED = "policy.optimizer.offload=true"


def trained(
    make: Any, weights: torch.dtype, *, steps: int = 5
) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Weights and states after some steps. One step is skipped, and one parameter has no gradient in another."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(weights)) for shape in SHAPES]
    optimizer = make(parameters)
    for step in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(weights)
        if step == 2:
            parameters[1].grad = None
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(float(step == 3))
        optimizer.step()
    states = [{name: part_of(one).tensor for name, one in optimizer.state[p].items()} for p in parameters]
    return [parameter.detach() for parameter in parameters], states


@pytest.mark.parametrize("bucket_bytes", [4096, 100_000, BUCKET_BYTES], ids=["pieces", "both", "one bucket"])
@pytest.mark.parametrize("kept", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=["float32 weights", "bfloat16 weights"])
def test_weights_and_states_are_those_of_states_on_the_device(weights, kept, bucket_bytes, monkeypatch):
    assert_as_on_the_device(weights, kept, bucket_bytes, monkeypatch)


@pytest.mark.parametrize("kept", ["bfloat16", "int8"])
def test_a_compiled_update_takes_states_that_share_memory(kept, monkeypatch):
    compiled = torch.compile(adamw._update, dynamic=True, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(adamw, "_update", compiled)
    assert_as_on_the_device(torch.bfloat16, kept, 100_000, monkeypatch)


def assert_as_on_the_device(weights: torch.dtype, kept: Any, bucket_bytes: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(offload, "BUCKET_BYTES", bucket_bytes)
    rule = Rule(0.9, 0.98, 1e-8, 0.1, True, kept)

    def make(parameters: Any, is_offloaded: bool) -> Any:
        if weights == torch.float32 and kept == "float32":
            return LocalAdamW(parameters, lr=1e-3, betas=(0.9, 0.98), offload=is_offloaded)
        return RoundedAdamW(parameters, rule, lr=1e-3, seed=3, offload=is_offloaded)

    on_device, in_host = (trained(lambda p, way=way: make(p, way), weights) for way in (False, True))
    for one, other in zip(on_device[0], in_host[0], strict=True):
        assert torch.equal(one, other)
    for one, other in zip(on_device[1], in_host[1], strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_buckets_hold_pieces_of_parameters_up_to_their_size(monkeypatch):
    monkeypatch.setattr(offload, "BUCKET_BYTES", 100)
    parameters = [torch.nn.Parameter(torch.zeros(rows, 5)) for rows in (3, 8, 0)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    # One state of 20 bytes per row.
    states = HostStates({p: {"mean": torch.empty(p.shape, device="meta")} for p in parameters})
    pieces = [[(len(piece.weight), piece.first) for piece in bucket] for bucket in states.buckets(parameters)]
    assert pieces == [[(3, 0)], [(5, 0)], [(3, 25)]]
    of_second = [[(len(piece.weight), piece.first) for piece in bucket] for bucket in states.buckets(parameters[1:])]
    assert of_second == [[(5, 0)], [(3, 25)]]


def test_memory_on_the_device_is_that_of_the_buckets():
    assert bytes_on_device(8e9, offload=False) == 8e9
    assert bytes_on_device(8e9, offload=True) == NUM_BUCKETS * BUCKET_BYTES
    assert bytes_on_device(1000, offload=True) == 1000


def test_states_cannot_leave_a_device_where_there_is_none():
    with pytest.raises(MachineError) as refused:
        set_up(load_config(None, [OFFLOADED]).config, torch.device("cpu"))
    assert str(refused.value) == (
        "policy.optimizer.offload = true: optimizer states leave the memory of a CUDA device, and this machine has none, so "
        "they are in host memory already. Leave it out."
    )


@pytest.mark.parametrize(
    "more",
    [
        pytest.param([], id="weights"),
        pytest.param(
            ["policy.lora.enabled=true", "policy.optimizer.state_dtype=int8"], id="adapters", marks=pytest.mark.slow
        ),
    ],
)
def test_a_run_resumes_with_states_elsewhere_bit_for_bit(more, tmp_path):
    settings = [*more, few_pairs(tmp_path, 12), "checkpointing.save_period=1", "dpo.max_num_steps=3"]
    whole = short_run(tmp_path / "whole", *settings)
    with patch.object(machine, "_check_offload"), patch.object(offload, "BUCKET_BYTES", 20_000):
        for name, first, then in (("out", [OFFLOADED], []), ("in", [], [OFFLOADED])):
            with killed_after(2):
                short_run(tmp_path / name, *settings, *first)
            run = short_run(tmp_path / name, *settings, *then)
            assert metrics_of(run) == metrics_of(whole)
            assert largest_difference(weights_of(run), weights_of(whole)) == 0.0
