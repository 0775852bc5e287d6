"""Ranks that sum gradients once per step train the same model as ranks that sum them after every pack."""

import pytest
from models import bfloat16_start
from running import SHORT, few_pairs, largest_difference, metrics_of, weights_of
from together import run_together

pytestmark = pytest.mark.slow  # the gradient itself: tests/unit/planning/test_traffic.py

ONCE = "policy.parallel.reduce_once_per_step"
REPLICAS = ["policy.parallel.replicate=-1", "policy.parallel.shard=1"]
SETTINGS = [*SHORT, "dpo.max_num_steps=3", "policy.optimizer.kwargs.lr=2e-4", "policy.train_global_batch_size=12"]
SHORT_PACKS = "policy.packing.pack_length=256"  # four or more packs per rank and step


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("once")


@pytest.fixture(scope="module")
def cases(folder):
    """The overrides of each case, by name."""
    pairs = few_pairs(folder)
    return {
        "packs": [SHORT_PACKS, pairs],
        "replicas": [*REPLICAS, SHORT_PACKS, pairs],
        "kept weights and recomputed activations": [
            *("policy.parallel.reshard_after_forward=false", "policy.activation_checkpointing=full", SHORT_PACKS, pairs)
        ],
        # five pairs: in the last round, ranks have a pack of filler
        "unequal ranks": ["policy.train_global_batch_size=5", SHORT_PACKS, pairs],
        "one pair": ["policy.train_global_batch_size=1", pairs],
        "over the batch": ["dpo.preference_loss={aot: 1.0, dpo: 0.5}", "dpo.sft_loss_weight=0.3", SHORT_PACKS, pairs],
        "clipped": ["policy.max_grad_norm=0.1", SHORT_PACKS, pairs],
        "adapters": ["policy.lora.enabled=true", SHORT_PACKS, pairs],
        "bfloat16 computation": [
            *("policy.precision=bfloat16", f"policy.model_name={bfloat16_start(folder / 'start')}", SHORT_PACKS, pairs)
        ],
        "bfloat16 weights": [
            *("policy.weights=bfloat16_stochastic", "policy.precision=bfloat16", SHORT_PACKS, pairs),
        ],
    }


EXACT = ["packs", "replicas", "kept weights and recomputed activations", "unequal ranks", "one pair"]
EXACT += ["over the batch", "clipped", "adapters"]
ROUNDED = ["bfloat16 computation", "bfloat16 weights"]


@pytest.fixture(scope="module", params=[2, 4])
def runs(request, folder, cases):
    """Do all runs with and without the key. Returns a function from the name and the key's value to the run."""
    count = request.param

    def run(name, once):
        return folder / f"{name.replace(' ', '_')}-{once}-{count}"

    both = [(name, once) for name in cases for once in ("true", "false")]
    given = [[*SETTINGS, *cases[name], f"{ONCE}={once}", f"run.dir={run(name, once)}"] for name, once in both]
    run_together(count, given, folder)
    return run


@pytest.mark.parametrize("name", EXACT)
def test_gradients_summed_once_are_those_summed_after_every_pack(runs, name):
    once, each = runs(name, "true"), runs(name, "false")
    assert len(metrics_of(once)) == 3
    for this, that in zip(metrics_of(once), metrics_of(each), strict=True):
        assert this["num_pairs"] == that["num_pairs"]
        assert this["loss"] == pytest.approx(that["loss"], rel=1e-5)
        assert this["grad_norm"] == pytest.approx(that["grad_norm"], rel=1e-4)
    assert largest_difference(weights_of(once), weights_of(each)) < 5e-6


@pytest.mark.bfloat16
@pytest.mark.parametrize("name", ROUNDED)
def test_gradients_of_bfloat16_computation_are_summed_in_float32(runs, name):
    """The first step starts from equal weights: its gradient differs in the order of sums, and where they are rounded."""
    once, each = (metrics_of(runs(name, value)) for value in ("true", "false"))
    assert once[0]["loss"] == pytest.approx(each[0]["loss"], rel=1e-6)
    assert once[0]["grad_norm"] == pytest.approx(each[0]["grad_norm"], rel=1e-3)
    assert once[-1]["loss"] == pytest.approx(each[-1]["loss"], rel=0.02)
