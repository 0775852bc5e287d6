"""Several ranks on GPUs train the same model as one, with FlexAttention and compiled layers.

Over NCCL where there are enough GPUs; otherwise all ranks share the first GPU.
"""

import math
import shutil
import signal
import sys
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from models import MODEL, as_policy, model_folder, tiny_model
from running import (
    SHORT,
    difference_to_movement,
    few_pairs,
    largest_difference,
    long_preferences,
    metrics_of,
    short_run,
    weights_of,
)
from several import (
    FOUR_STEPS,
    STEPS,
    ends,
    environments,
    lost,
    named,
    run_dir,
    run_together,
    start,
    wait_for,
    write_fours,
)

from tandem.config.sections.parallel import Parallel
from tandem.data.text.tokens import TokenizedPreference
from tandem.model.distributed.context import Context
from tandem.model.distributed.process_group import join_process_group, leave_process_group
from tandem.packing.layout import lay_out

pytestmark = pytest.mark.gpu

COMMON = [
    *SHORT,
    *FOUR_STEPS,
    "policy.train_global_batch_size=8",
    "policy.packing.pack_length=512",
    "policy.compile=false",
    "data.train.data_path=few.jsonl",  # the reference is computed for all pairs
    "data.validation=null",
]
EXACT = ["policy.precision=float32"]
LOW_PRECISION = ["policy.weights=bfloat16_stochastic", "policy.optimizer.state_dtype=int8"]
CONTEXT_2, CONTEXT_4 = "policy.parallel.context=2", "policy.parallel.context=4"
KEPT = "policy.parallel.reshard_after_forward=false"


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far a run on several ranks may be from one on one rank."""

    loss: float  # relative
    movement: float  # of the weights, relative to how far training moved them: a wrong run has 0.4 to 1
    weights: float = math.inf  # the largest difference


# On CPUs, the order of sums alone moves bfloat16 runs 0.035 apart (tests/equivalence/test_workers.py).
FLOAT32, COMPILED, LOW = Bounds(1e-4, 0.2, 2e-4), Bounds(5e-3, 0.3, 5e-3), Bounds(1e-2, 0.3, 0.02)
# name: (ranks, overrides, bounds)
CASES = {
    "shards": (2, EXACT, FLOAT32),
    "kept weights": (2, [*EXACT, KEPT], FLOAT32),
    "context": (2, [*EXACT, CONTEXT_2], FLOAT32),
    "live reference, context": (2, [*EXACT, CONTEXT_2, "reference.mode=live"], FLOAT32),
    "compiled": (2, ["policy.compile=true"], COMPILED),
    "compiled, kept weights": (2, ["policy.compile=true", KEPT], COMPILED),
    "compiled context": (2, ["policy.compile=true", CONTEXT_2], COMPILED),
    "low precision": (2, LOW_PRECISION, LOW),
    "states in host memory": (2, [*EXACT, "policy.optimizer.offload=true"], FLOAT32),
    "adapters and context": (2, [*EXACT, "policy.lora.enabled=true", CONTEXT_2], FLOAT32),
    "four completions": (2, [*EXACT, "data.pairing=all", "data.train.data_path=fours.jsonl"], FLOAT32),
    "one pair at a time": (2, [*EXACT, "policy.train_global_batch_size=1"], FLOAT32),
    "over the batch, context": (2, [*EXACT, "dpo.preference_loss={aot: 1.0, dpo: 0.5}", CONTEXT_2], FLOAT32),
    "recomputed, context": (2, [*EXACT, "policy.activation_checkpointing=selective", CONTEXT_2], FLOAT32),
    "fully recomputed": (2, [*EXACT, "policy.activation_checkpointing=full"], FLOAT32),
    "fully recomputed, context": (2, [*EXACT, "policy.activation_checkpointing=full", CONTEXT_2], FLOAT32),
    "two by two": (4, [*EXACT, CONTEXT_2], FLOAT32),
    "two replicas": (4, [*EXACT, "policy.parallel.replicate=2"], FLOAT32),
    "context of four": (4, [*EXACT, CONTEXT_4], FLOAT32),
}


def for_one_rank(overrides):
    return [one for one in overrides if not one.startswith("policy.parallel.")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    write_fours(folder)
    few_pairs(folder)
    return folder


def assert_alike(several, one, bounds, start=MODEL):
    for this, that in zip(metrics_of(several), metrics_of(one), strict=True):
        assert this["num_pairs"] == that["num_pairs"]
        assert this["loss"] == pytest.approx(that["loss"], rel=bounds.loss)
        assert this["grad_norm"] == pytest.approx(that["grad_norm"], rel=max(1e-3, 10 * bounds.loss))
    these, those = weights_of(several), weights_of(one)
    assert largest_difference(these, those) < bounds.weights
    assert difference_to_movement(these, those, start) < bounds.movement


def trained_alone(folder, overrides):
    plain = for_one_rank(overrides)
    alone = folder / f"one-{abs(hash(tuple(plain)))}"
    return alone if alone.exists() else short_run(alone, *COMMON, *plain)


@pytest.mark.parametrize("name", CASES)
def test_several_ranks_train_the_same_model_as_one(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    ranks, overrides, bounds = CASES[name]
    several = run_dir(folder, name)
    run_together(ranks, [[*COMMON, *overrides, f"run.dir={several}"]], folder)
    assert_alike(several, trained_alone(folder, overrides), bounds)


@pytest.mark.parametrize("name", ["shards", "compiled", "low precision"])
def test_a_run_with_another_seed_would_be_found(name, folder, monkeypatch):
    monkeypatch.chdir(folder)
    _, overrides, bounds = CASES[name]
    one, other = trained_alone(folder, overrides), trained_alone(folder, [*overrides, "run.seed=7"])
    assert difference_to_movement(weights_of(other), weights_of(one), MODEL) > bounds.movement


def test_a_run_saved_by_four_ranks_resumes_on_two_and_on_one(folder, monkeypatch):
    monkeypatch.chdir(folder)
    four = folder / "four"
    run_together(4, [[*COMMON, *EXACT, CONTEXT_2, f"run.dir={four}"]], folder)
    cuts = {}
    for count in (1, 2):
        cuts[count] = cut = folder / f"cut-{count}"
        shutil.copytree(four, cut, symlinks=True)
        shutil.rmtree(cut / "model")
        shutil.rmtree(cut / f"checkpoints/step_{STEPS}")
    short_run(cuts[1], *COMMON, *EXACT)
    said = run_together(2, [[*COMMON, *EXACT, f"run.dir={cuts[2]}"]], folder)
    assert f"Resuming from {cuts[2]}/checkpoints/step_2" in said[0]
    for cut in cuts.values():
        assert_alike(cut, four, FLOAT32)


def test_a_killed_and_a_hung_rank_are_named_and_the_run_resumes_to_the_same_end(folder):
    """After a rank was killed, and another hung, the same command ends with the weights of a run that was never disturbed."""
    timeout = 20
    steps = ["dpo.max_num_steps=24", "dpo.max_num_epochs=24", f"policy.parallel.timeout_seconds={timeout}"]
    common = [one for one in COMMON if not one.startswith("dpo.max_num_")]

    def started(name):
        return start(2, [sys.executable, "-m", "tandem", "train", *common, *EXACT, *steps, f"run.dir={name}"], folder)

    checkpoints = folder / "disturbed/checkpoints"
    ranks = started("disturbed")
    wait_for(checkpoints / "step_2", ranks)
    ranks[1].kill()
    assert ends(ranks)[0] == (lost(f"{named(1, ranks)} ended"), 1)

    ranks = started("disturbed")
    wait_for(checkpoints / f"step_{int((checkpoints / 'latest').resolve().name[5:]) + 2}", ranks)
    ranks[1].send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    assert ends(ranks[:1]) == [(lost(f"{named(1, ranks)} no longer answers"), 1)]
    assert time.monotonic() - stopped < timeout + 40, "it takes up to 20 seconds to find out which rank hangs"
    ranks[1].kill()

    assert [code for _, code in ends(started("disturbed"))] == [0, 0]
    assert [code for _, code in ends(started("undisturbed"))] == [0, 0]
    assert largest_difference(weights_of(folder / "disturbed"), weights_of(folder / "undisturbed")) < 1e-6


LONG = 131_072


def _long_row(number, given, path):
    """Compute a preference of 131,072 tokens with rows divided among two ranks, and alone."""
    import os

    os.environ.update(given[number])
    ranks = join_process_group(Parallel(context=2))
    assert ranks.context_group is not None
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 96, n).astype(np.int32) for n in (LONG - 600, 300, 300)]
    pack = lay_out([0], [TokenizedPreference(ids[0], (ids[1], ids[2]), ((0, 1),), "x")], length=LONG)
    sizes = {"hidden_size": 64, "head_dim": 16, "max_position_embeddings": LONG}

    def computed(context):
        policy = as_policy(tiny_model("llama", **sizes).to(ranks.device), head_chunk=256, attention="flex")
        policy.context = context
        inputs = policy.inputs(pack, ranks.device)
        out = policy(inputs)[: inputs.num_scored]
        out.sum().backward()
        return out.detach().cpu(), {name: p.grad for name, p in policy.named_parameters()}

    context = Context(ranks.context_group.group_name, dist.get_rank(ranks.context_group), 2)
    got, gradients = computed(context)
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    if number == 0:
        want, expected = computed(None)
        worst = max(float((gradients[name] - one).norm() / one.norm()) for name, one in expected.items())
        torch.save((float((got - want).abs().max()), worst), path)
    dist.barrier()
    leave_process_group()


def test_a_preference_of_131072_tokens_divided_among_two_ranks_equals_one(tmp_path):
    path = tmp_path / "found.pt"
    processes.start_processes(_long_row, (environments(2), path), nprocs=2, start_method="spawn")
    values, gradients = torch.load(path)
    assert values < 1e-3
    assert gradients < 1e-3


def test_a_step_on_a_preference_of_131072_tokens_divided_among_two_ranks_equals_one(tmp_path):
    """With the loss, sharded weights and the optimizer."""
    long_preferences(tmp_path / "long.jsonl", 87_000)
    sizes = {"hidden_size": 64, "head_dim": 16, "max_position_embeddings": LONG, "num_hidden_layers": 1}
    model = model_folder(tmp_path / "model", "llama", **sizes)
    given = [
        *(*COMMON, *EXACT, "dpo.max_num_steps=2", "policy.train_global_batch_size=1"),
        *(f"policy.model_name={model}", f"data.train.data_path={tmp_path}/long.jsonl"),
        *(f"policy.max_total_sequence_length={LONG}", f"policy.packing.pack_length={LONG}"),
    ]
    one = short_run(tmp_path / "one", *given)
    assert all(130_000 < step["num_tokens"] <= LONG for step in metrics_of(one))
    run_together(2, [[*given, CONTEXT_2, f"run.dir={tmp_path}/two"]], tmp_path)
    assert_alike(tmp_path / "two", one, FLOAT32, start=model)
