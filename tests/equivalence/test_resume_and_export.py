"""A resumed run equals an uninterrupted one bit for bit. The exported model equals the one in memory, up to its dtype."""

import json
import shutil

import pytest
import torch
from models import bfloat16_start
from running import few_pairs, killed_after, largest_difference, metrics_of, short_run, weights_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.errors import CheckpointError
from tandem.exporting.weights import round_stochastically
from tandem.storage.cache import write_manifest
from tandem.storage.ownership import GREATEST_PID, MARKER
from tandem.terminal.commands import tandem_command
from tandem.training.checkpoint import checkpoints as checkpoint

pytestmark = pytest.mark.usefixtures("of_a_command")

# Two schedulers with a milestone before the place the run is cut at: both must be where they were.
SCHEDULE = (
    "policy.scheduler=[{name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.5, total_iters: 3}},"
    "{name: torch.optim.lr_scheduler.MultiStepLR, kwargs: {milestones: [1, 2], gamma: 0.5}}, {milestones: [3]}]"
)
SAVING = ["checkpointing.save_period=2", "dpo.max_num_steps=6", SCHEDULE]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return short_run(tmp_path_factory.mktemp("whole") / "run", *SAVING)


@pytest.fixture(scope="module")
def died(tmp_path_factory):
    """Makes a copy of a run that died after a step, which is trained once."""
    originals = {}

    def copy(step, to):
        if step not in originals:
            originals[step] = tmp_path_factory.mktemp("died") / "run"
            with killed_after(step):
                short_run(originals[step], *SAVING)
        return shutil.copytree(originals[step], to, symlinks=True)

    return copy


FEW_BITS = ["policy.weights=bfloat16_stochastic", "policy.precision=bfloat16", "policy.optimizer.state_dtype=int8"]


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param([], id="float32"),
        pytest.param(FEW_BITS, id="few bits", marks=pytest.mark.bfloat16),
    ],
)
def test_resumed_equals_uninterrupted_bit_for_bit(kept, tmp_path):
    kept = [*kept, few_pairs(tmp_path)]
    whole = short_run(tmp_path / "whole", *SAVING, *kept)
    for step in (3, 5):
        with killed_after(step):
            short_run(tmp_path / "cut", *SAVING, *kept)
    cut = short_run(tmp_path / "cut", *SAVING, *kept)
    assert metrics_of(cut) == metrics_of(whole)
    assert [line["step"] for line in metrics_of(cut)] == [1, 2, 3, 4, 5, 6]
    assert largest_difference(weights_of(cut), weights_of(whole)) == 0.0


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(whole, tmp_path, capsys, died):
    died(5, tmp_path / "cut")
    tensors = next((tmp_path / "cut/checkpoints/step_4/tensors").glob("*.safetensors"))
    tensors.write_bytes(tensors.read_bytes()[:-100])
    cut = short_run(tmp_path / "cut", *SAVING)
    assert "Falling back to an earlier checkpoint" in capsys.readouterr().out
    assert largest_difference(weights_of(cut), weights_of(whole)) == 0.0


@pytest.mark.parametrize(
    "damaged",
    [
        lambda whole: whole[:1000],  # in the middle of a line
        lambda whole: whole[:300] + bytes([whole[300] ^ 0x80]) + whole[301:],
    ],
    ids=["cut", "a flipped bit"],
)
def test_damaged_metrics_are_reported_and_the_run_resumes(whole, tmp_path, capsys, damaged, died):
    died(5, tmp_path / "cut")
    metrics = tmp_path / "cut/metrics.jsonl"
    metrics.write_bytes(damaged(metrics.read_bytes()))
    cut = short_run(tmp_path / "cut", *SAVING, "checkpointing.keep_top_k=1")
    assert sorted(path.name for path in (cut / "checkpoints").glob("step_*")) == ["step_2", "step_4", "step_6"]
    assert (
        f"warning: {metrics} changed since step 4 was saved: some lines are lost, so earlier checkpoints can no longer be "
        "ranked and are all kept. Training is not affected."
    ) in " ".join(capsys.readouterr().out.split())
    lines = [line for line in metrics.read_text(errors="replace").splitlines() if '"split": "train"' in line]
    assert [json.loads(line)["step"] for line in lines[-2:]] == [5, 6]
    assert largest_difference(weights_of(cut), weights_of(whole)) == 0.0


def test_temporary_files_of_a_killed_process_are_removed(tmp_path, died):
    died(3, tmp_path / "cut")
    half = tmp_path / f"cut/checkpoints/.step_4.{GREATEST_PID - 1}"  # of a process that is not there
    half.mkdir()
    (half / MARKER).write_text('{"becomes": "step_4"}')
    (half / "tensors").write_bytes(b"half")
    cut = short_run(tmp_path / "cut", *SAVING)
    assert not half.exists()
    assert [line["step"] for line in metrics_of(cut)] == [1, 2, 3, 4, 5, 6]


def test_a_run_without_an_intact_checkpoint_is_refused_and_never_starts_from_scratch(tmp_path, died):
    died(3, tmp_path / "cut")
    (tmp_path / "cut/checkpoints/step_2/state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="all checkpoints of this run are damaged"):
        short_run(tmp_path / "cut", *SAVING)


def test_another_configuration_in_the_same_directory_is_refused_with_the_difference(tmp_path, died):
    died(3, tmp_path / "cut")
    with pytest.raises(CheckpointError) as refused:
        short_run(tmp_path / "cut", *SAVING, "dpo.reference_policy_kl_penalty=0.2")
    assert str(refused.value) == (
        f"{tmp_path}/cut contains a run with another configuration:\n"
        "  dpo.reference_policy_kl_penalty: 0.1 there, 0.2 now\n"
        "Restore the old values, or train a new run: "
        + tandem_command(
            "train", "--config", f"{tmp_path}/cut/config.yaml", "dpo.reference_policy_kl_penalty=0.2", "--fresh"
        )
    )
    with pytest.raises(CheckpointError, match=r"run\.seed: 42 there, 43 now"):
        short_run(tmp_path / "cut", *SAVING, "run.seed=43")


def test_a_finished_run_is_reported_and_not_trained_again(tmp_path, capsys):
    run = short_run(tmp_path / "run")
    before = (run / "metrics.jsonl").read_bytes()
    short_run(tmp_path / "run")
    assert (run / "metrics.jsonl").read_bytes() == before


def test_kept_checkpoints_are_the_best_and_the_latest(tmp_path):
    run = short_run(
        tmp_path / "run",
        "checkpointing.save_period=1",
        "checkpointing.keep_top_k=1",
        "dpo.val_period=1",
        "dpo.val_at_end=true",
    )
    folder = run / "checkpoints"
    assert (folder / "latest").resolve().name == "step_4"
    losses = {line["step"]: line["loss"] for line in metrics_of(run, "validation-default")}
    best = min(losses, key=losses.__getitem__)
    assert (folder / "best").resolve().name == f"step_{best}"
    kept = {path.name for path in folder.glob("step_*")}
    assert kept == {"step_4", f"step_{best}"}


def test_exported_model_loads_in_transformers_and_equals_the_one_in_memory(tmp_path):
    run = short_run(tmp_path / "run", "dpo.val_at_end=true")
    memory, exported = metrics_of(run, "validation-default")[-1], metrics_of(run, "exported-default")[-1]
    assert {k: v for k, v in memory.items() if k != "split"} == {k: v for k, v in exported.items() if k != "split"}
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(ids) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert model.generate(torch.tensor([ids]), max_new_tokens=3).shape[1] == len(ids) + 3
    # whoever may read one file may read all
    assert len({file.stat().st_mode for file in (run / "model").iterdir()}) == 1


def margin(run, split):
    return metrics_of(run, split)[-1]["rewards_margin_mean"]


@pytest.mark.slow
def test_nearest_rounding_loses_updates_that_stochastic_rounding_keeps(tmp_path):
    """At the learning rates of DPO, a weight changes by less than half a unit in the last place of bfloat16."""
    gentle = ["policy.optimizer.kwargs.lr=2e-6", "policy.optimizer.kwargs.weight_decay=0", "dpo.max_num_steps=10"]
    common = [*gentle, "dpo.val_at_end=true", "export.dtype=bfloat16", "checkpointing.enabled=false"]
    start = bfloat16_start(tmp_path / "start")
    kept = short_run(
        tmp_path / "stochastic",
        *common,
        f"policy.model_name={start}",
        "data.train.data_path=embedded",
        "policy.max_total_sequence_length=512",
    )
    lost = short_run(
        tmp_path / "nearest",
        *common,
        f"policy.model_name={start}",
        "data.train.data_path=embedded",
        "policy.max_total_sequence_length=512",
        "export.rounding=nearest",
    )
    learned = margin(kept, "validation-default")
    assert margin(lost, "validation-default") == learned
    assert learned > 0
    assert margin(kept, "exported-default") == pytest.approx(learned, rel=0.25)
    assert margin(lost, "exported-default") < 0.5 * learned


def test_stochastic_rounding_is_right_in_expectation_and_keeps_exact_values():
    value = torch.tensor([1.0 + 2**-10])  # bfloat16 knows 1 and 1 + 2^-7: an eighth of the way up
    rounded = round_stochastically(value.expand(80_000).contiguous(), torch.bfloat16, 0).float()
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    assert rounded.mean().item() == pytest.approx(1.0 + 2**-10, abs=1e-4)
    exact = torch.tensor([0.0, -0.0, 1.5, -3.0, float("inf"), float("-inf"), 2.0**-120])
    assert torch.equal(round_stochastically(exact, torch.bfloat16, 0).float(), exact)
    assert torch.isnan(round_stochastically(torch.tensor([float("nan")]), torch.bfloat16, 0)).all()


def test_stochastic_rounding_to_float16_is_right_in_expectation():
    value = torch.full((80_000,), -(1.0 + 2**-12))  # float16 knows 1 and 1 + 2^-10: a quarter of the way
    rounded = round_stochastically(value, torch.float16, 0).float()
    assert set(rounded.tolist()) == {-1.0, -(1.0 + 2**-10)}
    assert rounded.mean().item() == pytest.approx(-(1.0 + 2**-12), abs=1e-5)


@pytest.mark.parametrize(
    ("name", "higher", "split", "metric"),
    [
        ("validation-default_rewards_margin_mean", True, "validation-default", "rewards_margin_mean"),
        ("train:logps_chosen_mean", False, "train", "logps_chosen_mean"),
    ],
)
@pytest.mark.slow
def test_the_tracked_metric_ranks_checkpoints(tmp_path, name, higher, split, metric):
    run = short_run(
        tmp_path / "run",
        f"checkpointing.checkpoint_dir={tmp_path}/elsewhere",
        "checkpointing.save_period=1",
        "checkpointing.keep_top_k=2",
        f"checkpointing.metric_name={name}",
        f"checkpointing.higher_is_better={str(higher).lower()}",
        "dpo.val_period=1",
        "dpo.val_at_end=true",
    )
    values = {line["step"]: line[metric] for line in metrics_of(run, split) if line["step"] > 0}
    order = sorted(values, key=values.__getitem__, reverse=higher)
    assert not (run / "checkpoints").exists()
    assert (tmp_path / "elsewhere/best").resolve().name == f"step_{order[0]}"
    kept = {path.name for path in (tmp_path / "elsewhere").glob("step_*")}
    assert kept == {f"step_{step}" for step in (*order[:2], 4)}


def test_a_checkpoint_without_optimizer_states_cannot_be_resumed(tmp_path):
    settings = [*SAVING, "checkpointing.save_optimizer=false"]
    with killed_after(3):
        short_run(tmp_path / "cut", *settings)
    with pytest.raises(CheckpointError) as refused:
        short_run(tmp_path / "cut", *settings)
    assert str(refused.value) == (
        f"{tmp_path}/cut/checkpoints/step_2: saved without optimizer states (checkpointing.save_optimizer=false), so no "
        "run can resume from it. Start again with --fresh."
    )


def test_a_checkpoint_with_another_format_number_is_refused(tmp_path, died):
    died(3, tmp_path / "cut")
    write_manifest(tmp_path / "cut/checkpoints/step_2", format_version=7)
    with pytest.raises(CheckpointError, match=r"step_2: written in format 7; this tandem reads format 5\."):
        short_run(tmp_path / "cut", *SAVING)


def test_a_disk_that_fills_during_a_background_save_stops_the_run(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_manifest", full)
    with pytest.raises(OSError, match="No space left"):
        short_run(tmp_path / "run", *SAVING)
    assert not list((tmp_path / "run/checkpoints").glob("*step_*"))
