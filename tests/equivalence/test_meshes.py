"""Two ranks that divide rows, keep gathered weights or hold a replica each train the same model as one rank."""

import pytest
from models import model_folder
from running import SHORT, assert_trained_alike, few_pairs, long_preferences, metrics_of, short_run
from several import FOUR_STEPS, STEPS, VALIDATED, run_dir, write_fours
from together import run_together

COMMON = [
    *SHORT,
    *FOUR_STEPS,
    *VALIDATED,
    "policy.packing.pack_length=512",
]
CONTEXT, KEPT = "policy.parallel.context=2", "policy.parallel.reshard_after_forward=false"
LIVE = "reference.mode=live"
# name: overrides, without those of the data
QUICK = {
    "context": [CONTEXT],
    "context, live reference": [CONTEXT, LIVE],
    "kept weights": [KEPT],
    "replicas": ["policy.parallel.replicate=2"],
    "states in host memory": ["policy.optimizer.offload=true"],
}
SLOW = {
    "context, over the batch": [CONTEXT, "dpo.preference_loss={aot: 1.0, dpo: 0.5}", "dpo.sft_loss_weight=0.3"],
    "context, adapters": [CONTEXT, "policy.lora.enabled=true"],
    "context, four completions": [CONTEXT, "data.pairing=all", "policy.train_global_batch_size=12"],
    "context, packed once": [
        *(CONTEXT, "policy.packing.mode=dataset", "policy.packing.pack_length=256", "policy.train_global_batch_size=8"),
    ],
    "context, two rows": [CONTEXT, "policy.packing.packs_per_micro_batch=2"],
    "context, recomputed": [CONTEXT, "policy.activation_checkpointing=full"],
    "context, compiled": [CONTEXT, "policy.compile=true"],
    "context, live reference, kept weights": [CONTEXT, LIVE, KEPT],
    "context, states in host memory": [CONTEXT, "policy.optimizer.offload=true"],
}
WITH_FOURS = ("context, four completions", "context, packed once")
OF_RANKS = ("policy.parallel.", "policy.optimizer.offload", "policy.activation_checkpointing", "policy.compile")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("meshes")
    write_fours(folder)
    few_pairs(folder)
    return folder


def settings(folder, name):
    rows = folder / ("fours.jsonl" if name in WITH_FOURS else "few.jsonl")
    return [
        *COMMON,
        *{**QUICK, **SLOW}[name],
        f"data.train.data_path={rows}",
        f"data.validation.data_path={rows}",
    ]


def train_on_two_ranks(folder, names):
    run_together(2, [[*settings(folder, name), f"run.dir={run_dir(folder, name)}"] for name in names], folder)


@pytest.fixture(scope="module")
def quick_runs(folder):
    return train_on_two_ranks(folder, QUICK)


@pytest.fixture(scope="module")
def slow_runs(folder):
    return train_on_two_ranks(folder, SLOW)


@pytest.fixture(scope="module")
def alone(folder):
    """Trains a case on one rank. Cases that differ only in how ranks work have the same run."""
    runs = {}

    def trained(name):
        own = tuple(one for one in settings(folder, name) if not one.startswith(OF_RANKS))
        if own not in runs:
            runs[own] = short_run(folder / f"alone-{len(runs)}", *own)
        return runs[own]

    return trained


@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_train_the_same_model_as_one(name, folder, quick_runs, alone):
    assert len(metrics_of(alone(name))) == STEPS
    assert_trained_alike(run_dir(folder, name), alone(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_two_ranks_with_these_settings_train_the_same_model_as_one(name, folder, slow_runs, alone):
    assert len(metrics_of(alone(name))) == STEPS
    assert_trained_alike(run_dir(folder, name), alone(name))


@pytest.mark.slow
def test_a_preference_of_8192_tokens_divided_among_two_ranks_trains_the_same_model(tmp_path):
    long_preferences(tmp_path / "long.jsonl", 5250)
    model = model_folder(tmp_path / "model", "llama", max_position_embeddings=8192, num_hidden_layers=1)
    given = [
        *(*SHORT, "dpo.max_num_steps=2", "dpo.max_num_epochs=4", "policy.train_global_batch_size=1"),
        *(f"policy.model_name={model}", f"data.train.data_path={tmp_path}/long.jsonl"),
        *("policy.max_total_sequence_length=8192", "policy.packing.pack_length=8192"),
    ]
    one = short_run(tmp_path / "one", *given)
    assert all(8000 < step["num_tokens"] <= 8192 for step in metrics_of(one))
    run_together(2, [[*given, CONTEXT, f"run.dir={tmp_path}/two"]], tmp_path)
    assert_trained_alike(tmp_path / "two", one)
