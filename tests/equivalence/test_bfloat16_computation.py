"""Computation in bfloat16 with float32 weights learns what float32 learns, and exports the weights that it computes with."""

import pytest
import torch
from models import bfloat16_start
from running import few_pairs, killed_after, largest_difference, metrics_of, short_run, weights_of
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tandem.config.load import load_config
from tandem.model.distributed.process_group import join_process_group
from tandem.model.precision import working_copy
from tandem.model.precision.rounding import ShardCasts, salt_of
from tandem.training.start.references import load_sharded
from tandem.training.start.setup import set_up
from tandem.training.step import grad_norm

pytestmark = pytest.mark.bfloat16

# DPO's own learning rate: a weight changes by less than half a step of bfloat16.
GENTLE = [
    "policy.optimizer.kwargs.lr=2e-6",
    "policy.optimizer.kwargs.weight_decay=0",
    "dpo.max_num_steps=12",
    "dpo.val_at_end=true",
    "dpo.val_batches=2",
    "policy.max_total_sequence_length=512",
    "data.train.data_path=embedded",
    "checkpointing.enabled=false",
]
BFLOAT16 = "policy.precision=bfloat16"


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return bfloat16_start(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def stochastic_run(tmp_path_factory, start):
    from bfloat16_products import with_bfloat16_products

    with with_bfloat16_products():
        return short_run(tmp_path_factory.mktemp("chance") / "run", *GENTLE, BFLOAT16, f"policy.model_name={start}")


def margin(run, split="validation-default"):
    return metrics_of(run, split)[-1]["rewards_margin_mean"]


@pytest.mark.slow
def test_small_updates_of_published_weights_affect_the_computation(tmp_path, start, stochastic_run, monkeypatch):
    exactly = short_run(tmp_path / "float32", *GENTLE, f"policy.model_name={start}")
    monkeypatch.setattr(working_copy, "round_to_bfloat16", lambda weight, start: weight.bfloat16())
    to_the_nearest = short_run(tmp_path / "nearest", *GENTLE, BFLOAT16, f"policy.model_name={start}")
    assert margin(exactly) > 0
    assert margin(stochastic_run) == pytest.approx(margin(exactly), rel=0.3)
    assert margin(to_the_nearest) < 0.6 * margin(exactly)


def test_the_first_step_computes_with_the_published_weights(stochastic_run):
    assert metrics_of(stochastic_run)[0]["loss"] == pytest.approx(0.693147, abs=1e-3)


def test_weights_exported_in_bfloat16_are_those_used_in_computation(stochastic_run):
    measured, exported = (
        metrics_of(stochastic_run, "validation-default")[-1],
        metrics_of(stochastic_run, "exported-default")[-1],
    )
    assert next(iter(weights_of(stochastic_run).values())).dtype == torch.bfloat16
    assert {**measured, "split": ""} == {**exported, "split": ""}


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path, start):
    saving = [BFLOAT16, f"policy.model_name={start}", "checkpointing.save_period=2", few_pairs(tmp_path)]
    whole = short_run(tmp_path / "whole", *saving)
    with killed_after(3):
        short_run(tmp_path / "cut", *saving)
    cut = short_run(tmp_path / "cut", *saving)
    assert metrics_of(cut) == metrics_of(whole)
    assert largest_difference(weights_of(cut), weights_of(whole)) == 0.0


def test_stochastically_rounded_weights_are_right_on_average():
    """Also for weights that bfloat16 cannot represent: float16 has eight values for each of bfloat16."""
    ranks = join_process_group()
    linear = torch.nn.Linear(300, 1000, bias=False)
    published = (torch.rand(1000, 300) + 1).half()
    with torch.no_grad():
        linear.weight.copy_(published)
    fully_shard(linear, mesh=ranks.weights_mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    ShardCasts().add(linear.weight, salt_of("weight"))
    change = 2**-12  # a thirty-second of a step
    computed = []
    for _ in range(2):
        linear.unshard()
        computed.append(linear.weight.detach().float().clone())
        assert linear.weight.dtype == torch.bfloat16
        linear.reshard()
        with torch.no_grad():
            linear.weight += change
    before, after = computed
    assert (before - published.float()).abs().max() < 2**-7
    assert (before - published.float()).mean().item() == pytest.approx(0, abs=2e-5)
    assert (after - before).mean().item() == pytest.approx(change, rel=0.05)
    # only weights close to a rounding threshold change
    assert (after != before).float().mean().item() == pytest.approx(1 / 32, rel=0.05)


def test_a_frozen_weight_under_an_adapter_is_used_in_the_same_precision_as_the_model():
    """Both use the same cached reference."""
    ranks = join_process_group()

    def computed(*overrides):
        setup = set_up(load_config(None, [BFLOAT16, *overrides]).config, ranks.device)
        policy = load_sharded(setup, setup.source, ranks, setup.lora)
        with policy.computing():
            return {
                name.replace(".base_layer.", "."): parameter.detach().clone()
                for name, parameter in policy.named_parameters()
                if "lora_" not in name
            }

    whole, frozen = computed(), computed("policy.lora.enabled=true")
    assert whole.keys() == frozen.keys()
    assert all(
        parameter.dtype == torch.bfloat16 and torch.equal(parameter, frozen[name]) for name, parameter in whole.items()
    )


def test_bfloat16_and_float32_weights_do_not_share_a_cached_reference(tmp_path):
    """The embedded model is float32. Loading it in bfloat16 rounds differently from casting it."""
    few = [BFLOAT16, "dpo.max_num_steps=1", "checkpointing.enabled=false", few_pairs(tmp_path)]
    for weights in ("bfloat16_stochastic", "float32"):
        cache = f"reference.cache_dir={tmp_path / 'cache'}"
        run = short_run(tmp_path / weights, *few, cache, f"policy.weights={weights}", "dpo.val_at_end=false")
        assert metrics_of(run)[0]["loss"] == pytest.approx(0.693147, abs=1e-4)


def test_gradients_of_bfloat16_weights_add_up_over_packs_in_float32():
    """A sum over 16 packs in bfloat16 would be 0.5 % off, and the gradient norm would be rounded too."""
    ranks = join_process_group()
    overrides = [BFLOAT16, "policy.weights=bfloat16_stochastic", "policy.train_global_batch_size=32"]
    setup = set_up(load_config(None, [*overrides, "policy.packing.pack_length=384"]).config, ranks.device)
    policy = load_sharded(setup, setup.source, ranks)
    packs = list(setup.plan.train.micro_batches(setup.plan.batches.epoch(0)[0].preferences))[:10]
    assert len(packs) == 10

    def backward(pack):
        policy(policy.inputs(pack, ranks.device)).sum().backward()

    each = {name: torch.zeros(parameter.shape, dtype=torch.float64) for name, parameter in policy.trained()}
    for pack in packs:
        with policy.computing():
            backward(pack)
        for name, parameter in policy.trained():
            each[name] += parameter.grad
        policy.zero_grad()
    with policy.computing():
        for pack in packs[:4]:
            backward(pack)
    with policy.computing():  # adds to the existing sums
        for pack in packs[4:]:
            backward(pack)
            assert all(parameter.grad is None for _, parameter in policy.trained())
    for name, parameter in policy.trained():
        assert (parameter.dtype, parameter.grad.dtype) == (torch.bfloat16, torch.float32)
        assert ((parameter.grad - each[name]).norm() / each[name].norm()).item() < 1e-6
    exact = torch.cat([gradient.flatten() for gradient in each.values()]).norm()
    assert grad_norm(policy).item() == pytest.approx(exact.item(), rel=1e-6)
