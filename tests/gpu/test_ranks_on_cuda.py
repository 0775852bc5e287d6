"""Several ranks on GPUs train the same model as one. With fewer GPUs than ranks, all ranks share the first GPU.

With FlexAttention and compiled layers, over NCCL where there are enough GPUs.
"""

import json
import shutil

import numpy as np
import pytest
from running import SHORT, largest_difference, metrics_of, short_run, weights_of
from several import run_together

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("ranks")]

STEPS = 4
COMMON = [
    *SHORT,
    "dpo.max_num_epochs=4",
    f"dpo.max_num_steps={STEPS}",
    "policy.train_global_batch_size=8",
    "policy.optimizer.kwargs.lr=2e-4",
    "policy.packing.pack_length=512",
    "dpo.val_period=2",
    "dpo.val_batches=2",
    "checkpointing.save_period=2",
]
EXACT = ["policy.precision=float32"]
WORDS = ["the", "sky", "looks", "blue", "because", "air", "scatters", "short", "waves", "of", "sunlight", "again"]


def divided(name, size):
    return f"policy.parallel.{name}={size}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    rng = np.random.default_rng(1)

    def text():
        return " ".join(rng.choice(WORDS, rng.integers(2, 9)))

    fours = [
        {"context": text(), "completions": [{"rank": rank, "completion": text()} for rank in range(4)]}
        for _ in range(12)
    ]
    (folder / "fours.jsonl").write_text("".join(json.dumps(row) + "\n" for row in fours))
    return folder


@pytest.fixture(scope="module")
def cases(folder):
    """The overrides of each run, by name, with the tolerance of its losses and weights."""
    few = [f"data.train.data_path={folder}/fours.jsonl", f"data.validation.data_path={folder}/fours.jsonl"]
    return {
        "float32": (EXACT, 1e-4, 2e-4),
        "bfloat16": ([], 5e-3, 5e-3),
        "low precision": (
            ["policy.weights=bfloat16_stochastic", "policy.optimizer.state_dtype=int8"],
            0.02,
            0.02,
        ),
        "adapters": ([*EXACT, "policy.lora.enabled=true"], 1e-4, 2e-4),
        "four completions": ([*EXACT, *few, "data.pairing=all", "policy.train_global_batch_size=12"], 1e-4, 2e-4),
        "one pair at a time": ([*EXACT, "policy.train_global_batch_size=1", "dpo.val_period=0"], 1e-4, 2e-4),
        "over the batch": ([*EXACT, "dpo.preference_loss={aot: 1.0, dpo: 0.5}"], 1e-4, 2e-4),
        "recomputed": ([*EXACT, "policy.activation_checkpointing=selective"], 1e-4, 2e-4),
    }


# The meshes of two and of four ranks.
MESHES = {
    "2 shards": (2, []),
    "context 2": (2, [divided("context", 2)]),
    "2 shards, context 2": (4, [divided("context", 2)]),
    "2 replicas": (4, [divided("replicate", 2)]),
    "context 4": (4, [divided("context", 4)]),
}
CASES = ["float32", "bfloat16", "low precision", "adapters", "four completions", "one pair at a time", "over the batch"]
OF_FOUR = ["float32", "bfloat16", "one pair at a time"]
TRIED = [(mesh, case) for mesh, (count, _) in MESHES.items() for case in (CASES if count == 2 else OF_FOUR)]
TRIED.append(("context 2", "recomputed"))


def run_dir(folder, mesh, case):
    return folder / f"{mesh}-{case}".replace(" ", "_").replace(",", "")


@pytest.fixture(scope="module")
def runs(folder, cases):
    """All runs, those of one rank in this process. Runs with the same number of ranks share their processes."""
    for count in (2, 4):
        chosen = [(mesh, case) for mesh, case in TRIED if MESHES[mesh][0] == count]
        run_together(
            count,
            [
                [*COMMON, *cases[case][0], *MESHES[mesh][1], f"run.dir={run_dir(folder, mesh, case)}"]
                for mesh, case in chosen
            ],
            folder,
        )
    for case in {case for _, case in TRIED}:
        short_run(run_dir(folder, "one", case), *COMMON, *cases[case][0])
    return folder


def assert_alike(several, one, loss_tolerance, weight_tolerance):
    for split in ("train", "validation-default"):
        for this, that in zip(metrics_of(several, split), metrics_of(one, split), strict=True):
            assert this["num_pairs"] == that["num_pairs"]
            assert this["loss"] == pytest.approx(that["loss"], rel=loss_tolerance)
            assert this.get("grad_norm", 0) == pytest.approx(
                that.get("grad_norm", 0), rel=max(1e-3, 10 * loss_tolerance)
            )
    assert largest_difference(weights_of(several), weights_of(one)) < weight_tolerance


@pytest.mark.parametrize(("mesh", "case"), TRIED)
def test_several_ranks_train_the_same_model_as_one(mesh, case, runs, cases):
    _, loss_tolerance, weight_tolerance = cases[case]
    assert_alike(run_dir(runs, mesh, case), run_dir(runs, "one", case), loss_tolerance, weight_tolerance)


def test_a_run_saved_by_four_ranks_resumes_on_two_and_on_one(runs, cases):
    overrides, loss_tolerance, weight_tolerance = cases["float32"]
    cuts = {}
    for count in (1, 2):
        cuts[count] = cut = runs / f"cut-{count}"
        shutil.copytree(run_dir(runs, "2 shards, context 2", "float32"), cut, symlinks=True)
        shutil.rmtree(cut / "model")
        shutil.rmtree(cut / f"checkpoints/step_{STEPS}")
    short_run(cuts[1], *COMMON, *overrides)
    said = run_together(2, [[*COMMON, *overrides, f"run.dir={cuts[2]}"]], runs)
    assert f"Resuming from {cuts[2]}/checkpoints/step_2" in said[0]
    for cut in cuts.values():
        assert_alike(cut, run_dir(runs, "one", "float32"), loss_tolerance, weight_tolerance)
