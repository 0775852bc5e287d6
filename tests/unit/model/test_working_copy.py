"""Training on a single rank with bfloat16 copies of float32 weights."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from running import SHORT
from torch import nn
from torch.distributed.tensor import DTensor

from tandem.config.load import load_config
from tandem.model.distributed.layers import freeze, shard
from tandem.model.distributed.process_group import join_process_group
from tandem.model.load import load_policy
from tandem.model.precision import rounding, working_copy
from tandem.model.precision.working_copy import WorkingCopy
from tandem.training.start.setup import set_up

pytestmark = pytest.mark.bfloat16


@pytest.fixture(scope="module")
def ranks():
    return join_process_group()


@pytest.fixture(scope="module")
def setup(ranks):
    return set_up(load_config(None, SHORT).config, ranks.device)


@pytest.fixture
def packs(setup):
    packs = list(setup.plan.train.micro_batches(setup.plan.batches.epoch(0)[0].preferences))
    assert len(packs) > 1
    return packs


@pytest.fixture
def policy(setup, ranks):
    return shard(load_policy(setup.source, setup.config.policy, ranks.device), ranks, bfloat16=True)


def run(policy, packs, device):
    """Return the log-probabilities of packs and the sum of their gradients."""
    logps = []
    with policy.computing():
        for pack in packs:
            values = policy(policy.inputs(pack, device))
            values.sum().backward()
            logps.append(values.detach())
    gradients = (parameter.grad for parameter in policy.parameters())
    return logps, [one.full_tensor() if isinstance(one, DTensor) else one for one in gradients]


@pytest.mark.parametrize("max_pending", [1, 20_000, working_copy.MAX_PENDING_GRADIENTS])
def test_a_single_rank_computes_the_same_bits_as_each_of_several(setup, ranks, packs, policy, monkeypatch, max_pending):
    monkeypatch.setattr(working_copy, "MAX_PENDING_GRADIENTS", max_pending)
    # sharded over a mesh of one, so that there is nothing to add up
    several = SimpleNamespace(count=2, weights_mesh=ranks.weights_mesh, context_group=None, device=ranks.device)
    other = load_policy(setup.source, setup.config.policy, ranks.device)
    other = shard(other, several, bfloat16=True)  # type: ignore[arg-type]
    assert all(isinstance(parameter, DTensor) for parameter in other.parameters())
    (own, own_gradients), (logps, gradients) = (run(one, packs, ranks.device) for one in (policy, other))
    assert all(map(torch.equal, own, logps))
    assert len(own_gradients) == len(gradients)
    for one, two in zip(own_gradients, gradients, strict=True):
        assert one.dtype == two.dtype == torch.float32
        assert torch.equal(one, two)


def test_copies_follow_the_weights(policy, packs, ranks):
    inputs = policy.inputs(packs[0], ranks.device)
    with torch.no_grad():
        before, again = policy(inputs), policy(inputs)
        for parameter in policy.parameters():
            parameter.mul_(1.5)
        after = policy(inputs)
    assert torch.equal(before, again)
    assert not torch.allclose(before, after)


def test_a_nested_computing_context_keeps_the_same_copies(policy, packs, ranks):
    with torch.no_grad(), policy.computing():
        outer = [parameter.data_ptr() for parameter in policy.parameters()]
        policy.plain_logps(torch.tensor([5, 6]), torch.tensor([7]))
        with policy.computing():
            policy(policy.inputs(packs[0], ranks.device))
        assert [parameter.data_ptr() for parameter in policy.parameters()] == outer
        assert all(parameter.dtype == torch.bfloat16 for parameter in policy.parameters())
    assert all(parameter.dtype == torch.float32 for parameter in policy.parameters())


def test_the_weights_are_restored_if_computing_fails(policy):
    with pytest.raises(ZeroDivisionError), policy.computing():
        _ = 1 / 0
    assert all(parameter.dtype == torch.float32 for parameter in policy.parameters())


def test_a_forward_with_gradients_outside_computing_is_refused(policy, packs, ranks):
    with pytest.raises(RuntimeError, match="must both run inside the same `computing` context"):
        policy(policy.inputs(packs[0], ranks.device))


def test_a_frozen_policy_keeps_only_its_copies(policy, packs, ranks):
    inputs = policy.inputs(packs[0], ranks.device)
    with torch.no_grad():
        before = policy(inputs)
    weights = [weakref.ref(parameter) for parameter in policy.parameters()]
    kept = freeze(policy)
    gc.collect()
    assert not any(weight() is not None for weight in weights)
    assert kept.working_copy is None
    assert all(p.dtype == torch.bfloat16 and not p.requires_grad for p in kept.parameters())
    assert torch.equal(kept(inputs), before)


def test_there_are_no_copies_if_nothing_is_cast(setup, ranks):
    for dtype, bfloat16 in ((torch.float32, False), (torch.bfloat16, True)):
        loaded = load_policy(setup.source, setup.config.policy, ranks.device, dtype=dtype)
        assert shard(loaded, ranks, bfloat16=bfloat16).working_copy is None


def test_tied_weights_have_one_copy_and_add_their_gradients():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.second.weight = self.first.weight
            self.kept = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

    tied = Tied()
    copy = WorkingCopy(tied)
    assert len(copy.copies) == 1
    with copy.held():
        assert tied.first.weight is tied.second.weight
        x = torch.ones(1, 3, dtype=torch.bfloat16)
        for _ in range(2):
            (tied.first(x) * tied.kept + tied.second(x)).sum().backward()
    assert tied.first.weight is tied.second.weight
    assert torch.equal(tied.first.weight.grad, torch.full((3, 3), 4.0))


def test_a_failed_backward_leaves_no_gradients():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    copy = WorkingCopy(model)
    x = torch.ones(1, 2, dtype=torch.bfloat16)

    def fail(_):
        raise ZeroDivisionError

    def forward(failing):
        between = model[0](x)
        if failing:
            between.register_hook(fail)
        return model[1](between).sum()

    with pytest.raises(ZeroDivisionError), copy.held():
        forward(failing=True).backward()
    assert all(one.copy.grad is None and one.weight.grad is None for one in copy.copies)
    with pytest.raises(AssertionError, match="a backward did not finish"), copy.held():
        with pytest.raises(ZeroDivisionError):
            forward(failing=True).backward()
        forward(failing=False).backward()
    model.zero_grad()
    with copy.held():
        forward(failing=False).backward()
    with copy.held():
        hidden = model[0](x)
    assert torch.equal(model[1].weight.grad, hidden.float().detach().expand(2, 2))


def test_a_frozen_weight_gets_no_gradient():
    linear = nn.Linear(2, 2, bias=False).requires_grad_(False)
    copy = WorkingCopy(linear)
    x = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    with copy.held():
        linear(x).sum().backward()
    assert linear.weight.grad is None


def test_a_sharded_policy_casts_each_weight_once_a_step_and_again_after_an_update(setup, ranks, packs, monkeypatch):
    cast = []

    def counted(values, start):
        cast.append(start)
        return rounding_of(values, start)

    rounding_of = rounding.round_to_bfloat16
    monkeypatch.setattr(rounding, "round_to_bfloat16", counted)
    loaded = load_policy(setup.source, setup.config.policy, ranks.device)
    policy = shard(loaded, ranks, bfloat16=True, even_alone=True)
    first = run(policy, packs, ranks.device)
    assert len(cast) == len(list(policy.parameters()))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.01
    policy.zero_grad()
    second = run(policy, packs, ranks.device)
    assert len(cast) == 2 * len(list(policy.parameters()))
    assert not torch.equal(first[0][0], second[0][0])
