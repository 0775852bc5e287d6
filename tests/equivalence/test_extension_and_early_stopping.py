"""An extended run equals one of that length from the start. A run that stops early exports its best step."""

import json
import shutil
from unittest import mock

import pytest
from killing import assert_intact
from running import SHORT, few_pairs, killed_after, largest_difference, metrics_of, short_run, weights_of
from safetensors.torch import load_file
from together import run_together

from tandem.config.load import load_config
from tandem.errors import CheckpointError, ConfigError
from tandem.report.reporter import Reporter
from tandem.storage.cache import read_manifest
from tandem.terminal.commands import tandem_command
from tandem.training.checkpoint import ranking
from tandem.training.checkpoint.checkpoints import checkpoints, step_of
from tandem.training.run import extension
from tandem.training.start import build as build_module
from tandem.training.trainer import train

pytestmark = pytest.mark.usefixtures("of_a_command")

SAVING = ["checkpointing.save_period=2", "dpo.val_period=2", "dpo.val_at_end=true", "dpo.val_batches=2"]
FOUR, EIGHT = "dpo.max_num_steps=4", "dpo.max_num_steps=8"


class Killed(Exception):
    pass


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A file with so few pairs that eight steps are two epochs."""
    folder = tmp_path_factory.mktemp("data")
    return [*SAVING, few_pairs(folder, 20), "data.validation_share=0.2", "dpo.max_num_epochs=3"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data):
    return short_run(tmp_path_factory.mktemp("whole") / "run", *data, EIGHT)


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory, data):
    return short_run(tmp_path_factory.mktemp("four") / "run", *data, FOUR)


@pytest.fixture
def finished(tmp_path, four_steps):
    """A copy of a finished run of four steps."""
    return shutil.copytree(four_steps, tmp_path / "run", symlinks=True)


def assert_same(run, whole):
    for split in ("train", "validation-default", "exported-default"):
        assert metrics_of(run, split) == metrics_of(whole, split)
    assert largest_difference(weights_of(run), weights_of(whole)) == 0.0
    assert json.loads((run / "verdicts.json").read_text()) == json.loads((whole / "verdicts.json").read_text())


def test_extended_equals_trained_at_once_bit_for_bit_and_the_old_export_is_kept(finished, whole, data, capsys):
    old, metrics = weights_of(finished), (finished / "metrics.jsonl").read_bytes()
    short_run(finished, *data, EIGHT)
    assert_same(finished, whole)
    kept = finished / "model.step_4/model.safetensors"
    assert kept.is_file()
    assert largest_difference(load_file(kept), old) == 0.0
    assert (finished / "metrics.step_4.jsonl").read_bytes() == metrics
    assert "max_num_steps: 8" in (finished / "config.yaml").read_text()
    assert_intact(finished / "checkpoints")


@pytest.mark.slow
def test_more_epochs_extend_a_run_too_and_again(tmp_path, data):
    run = short_run(tmp_path / "run", *data, "dpo.max_num_epochs=1", "dpo.max_num_steps=null")
    first = len(metrics_of(run))
    for epochs in (2, 3):
        short_run(run, *data, f"dpo.max_num_epochs={epochs}", "dpo.max_num_steps=null")
    assert len(metrics_of(run)) == 3 * first
    assert sorted(path.name for path in run.glob("model*")) == [
        "model",
        f"model.step_{first}",
        f"model.step_{2 * first}",
    ]
    at_once = short_run(tmp_path / "at-once", *data, "dpo.max_num_epochs=3", "dpo.max_num_steps=null")
    assert metrics_of(run) == metrics_of(at_once)
    assert largest_difference(weights_of(run), weights_of(at_once)) == 0.0


@pytest.mark.parametrize("step", [5, 7])
def test_a_run_killed_in_the_extension_resumes_to_the_same_end(finished, whole, data, step):
    with killed_after(step):
        short_run(finished, *data, EIGHT)
    assert not (finished / "model").exists()
    assert (finished / "model.step_4").is_dir()
    short_run(finished, *data, EIGHT)
    assert_same(finished, whole)


@pytest.mark.parametrize(
    ("dies_in", "name", "is_finished"),
    [
        ("before the metrics are copied", "_copy", True),
        ("before the rename", "free_path", True),
        ("after the rename", "sync_file", False),
        ("before the configuration is written", "write_atomically", False),
    ],
)
def test_a_run_killed_as_the_extension_begins_resumes_to_the_same_end(
    finished, whole, data, dies_in, name, is_finished
):
    real, calls = getattr(extension, name), []

    def dying(*given):
        calls.append(given)
        if (name == "sync_file" and given[0] != finished) or (name == "free_path" and len(calls) == 1):
            return real(*given)
        raise Killed

    with mock.patch.object(extension, name, dying), pytest.raises(Killed):
        short_run(finished, *data, EIGHT)
    assert (finished / "model").is_dir() == is_finished
    assert "max_num_steps: 4" in (finished / "config.yaml").read_text()
    short_run(finished, *data, EIGHT)
    assert_same(finished, whole)
    assert len(list(finished.glob("model.step_4*"))) == 1


def test_the_old_command_after_a_kill_in_the_extension_exports_the_old_model_again(finished, whole, data):
    """After another extension, neither of the two exports is overwritten."""
    old = weights_of(finished)
    with mock.patch.object(extension, "write_atomically", side_effect=Killed), pytest.raises(Killed):
        short_run(finished, *data, EIGHT)
    short_run(finished, *data, FOUR)
    assert largest_difference(weights_of(finished), old) == 0.0
    short_run(finished, *data, EIGHT)
    assert_same(finished, whole)
    assert {path.name for path in finished.glob("model*")} == {"model", "model.step_4", "model.step_4.2"}


def refused(run, *overrides):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"}
    with pytest.raises(CheckpointError) as error:
        short_run(run, *overrides)
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"}
    assert before == after
    return str(error.value)


def new_run(run, *keys):
    """The advice to train a new run: the configuration of the old one, with other keys."""
    return f"Train a new run: {tandem_command('train', '--config', f'{run}/config.yaml', *keys, '--fresh')}"


def test_a_run_without_its_last_checkpoint_is_not_extended(finished, data):
    place = finished / "checkpoints/step_4"
    place.rename(finished / "elsewhere")
    assert refused(finished, *data, EIGHT) == (
        f"{finished} is finished, but the checkpoint of its last step, {place}, is missing, so it cannot be extended from 4 to 8 "
        f"steps. {new_run(finished, EIGHT)}"
    )


def test_a_run_whose_last_checkpoint_is_damaged_is_not_extended(finished, data):
    (finished / "checkpoints/step_4/config.yaml").write_text("damaged")
    with pytest.raises(CheckpointError) as error:
        short_run(finished, *data, EIGHT)
    assert str(error.value) == (
        f"{finished} is finished, but the checkpoint of its last step, 4, is damaged, so it cannot be extended. "
        f"{new_run(finished, EIGHT)}"
    )
    assert (finished / "model").is_dir()
    assert "max_num_steps: 4" in (finished / "config.yaml").read_text()


@pytest.mark.parametrize("lost", ["cut off", "gone"])
def test_a_run_whose_last_checkpoint_cannot_be_read_is_not_extended(finished, data, lost):
    tensors = finished / "checkpoints/step_4/tensors/rank_0.safetensors"
    tensors.write_bytes(b"") if lost == "cut off" else tensors.unlink()
    assert refused(finished, *data, EIGHT) == (
        f"{finished} is finished, but the checkpoint of its last step, 4, is damaged, so it cannot be extended. "
        f"{new_run(finished, EIGHT)}"
    )


def test_a_run_without_optimizer_states_is_not_extended(tmp_path, data):
    run = short_run(tmp_path / "run", *data, FOUR, "checkpointing.save_optimizer=false")
    assert refused(run, *data, EIGHT) == (
        f"{run}/checkpoints/step_4: saved without optimizer states (checkpointing.save_optimizer=false), so the run cannot "
        "be extended from 4 to 8 steps. "
        f"{new_run(run, EIGHT, 'checkpointing.save_optimizer=true')}"
    )


def test_a_finished_run_is_not_shortened_and_the_same_length_does_nothing(finished, data):
    assert refused(finished, *data, "dpo.max_num_steps=2") == (
        f"{finished} is finished, with 4 steps; it can be extended, but not shortened to 2. "
        f"{new_run(finished, 'dpo.max_num_steps=2')}"
    )
    before = (finished / "metrics.jsonl").read_bytes()
    short_run(finished, *data, FOUR, "dpo.max_num_epochs=7")  # four steps end it first
    assert (finished / "metrics.jsonl").read_bytes() == before
    assert not list(finished.glob("model.step_*"))


def test_an_unfinished_run_may_end_at_its_current_step_but_not_before(tmp_path, data):
    run = tmp_path / "run"
    with killed_after(5):
        short_run(run, *data, EIGHT)
    assert refused(run, *data, "dpo.max_num_steps=3") == (
        f"{run} has already trained 4 steps, so it cannot be shortened to 3. Set dpo.max_num_steps and dpo.max_num_epochs to "
        f"4 steps or more. {new_run(run, 'dpo.max_num_steps=3')}"
    )
    short_run(run, *data, FOUR)
    assert [record["step"] for record in metrics_of(run)] == [1, 2, 3, 4]


def test_a_run_with_a_schedule_over_its_length_is_not_extended(tmp_path, data):
    by_share = [*data, "policy.scheduler={name: cosine, warmup_ratio: 0.1}"]
    run = short_run(tmp_path / "run", *by_share, FOUR)
    message = (
        f"{run} contains a run with another configuration:\n"
        "  dpo.max_num_steps: 4 there, 8 now\n"
        "policy.scheduler spans the run, so its length determines the learning rate of every step.\n"
        f"Restore the old values, or {new_run(run, EIGHT).replace('Train', 'train', 1)}"
    )
    assert refused(run, *by_share, EIGHT) == message


# --- early stopping ---

LOSSES = {1: 0.9, 2: 0.5, 3: 0.6, 4: 0.5, 5: 0.4, 6: 0.3, 7: 0.2, 8: 0.1}  # of equal values the first is the best
EARLY = ["dpo.val_period=1", "dpo.early_stopping_patience=2", "checkpointing.save_period=100", EIGHT]


@pytest.fixture
def measured(monkeypatch):
    """Replaces validation losses by those in LOSSES, so that the best step is known."""
    real = build_module.validate

    def reported(policy, validation, check=lambda: None):
        report = real(policy, validation, check)
        step = reported.step()
        report.metrics["loss"] = LOSSES.get(step, report.metrics["loss"])
        return report

    progress = {}
    validate = build_module.Training.validate

    def noting(self):
        progress["step"] = self.progress.step
        return validate(self)

    reported.step = lambda: progress["step"]
    monkeypatch.setattr(build_module, "validate", reported)
    monkeypatch.setattr(build_module.Training, "validate", noting)


def test_a_run_without_improvement_stops_and_exports_its_best_step(tmp_path, data, measured, capsys):
    run = short_run(tmp_path / "run", *data, *EARLY)
    assert [line["step"] for line in metrics_of(run)] == [1, 2, 3, 4]
    two = short_run(tmp_path / "two", *data, "dpo.val_period=1", "dpo.max_num_steps=2")
    assert largest_difference(weights_of(run), weights_of(two)) == 0.0
    first = json.loads((run / "verdicts.json").read_text())[0]
    assert first == {
        "name": "stopped_early",
        "split": "validation-default",
        "text": "stopped early at step 4 of 8: the last 2 validations were no better than that of step 2 by loss (0.5000). Step "
        "2 is exported.",
    }
    assert metrics_of(run, "exported-default")[-1]["step"] == 2
    assert {step_of(place) for place in checkpoints(run / "checkpoints")} == {1, 2, 4}
    read_manifest(run / "checkpoints/step_4")


def test_an_early_stop_reports_that_no_step_was_as_good_as_the_start(tmp_path, data, measured, capsys, monkeypatch):
    monkeypatch.setitem(LOSSES, 0, 0.1)
    loaded = load_config(None, [*SHORT, *data, *EARLY, "dpo.val_at_start=true", f"run.dir={tmp_path}/run"])
    run = train(loaded, Reporter("normal"))
    stopped, hurt = (
        next(one["text"] for one in json.loads((run / "verdicts.json").read_text()) if one["name"] == name)
        for name in ("stopped_early", "only_hurt")
    )
    assert stopped.endswith("Step 2 is exported. No step was as good as the model before training (0.1000).")
    assert hurt.startswith("training made the loss worse: it was 0.1000 before the first step and is 0.5000 at step 2.")
    assert "step 2, the best checkpoint, but worse than the model before training" in capsys.readouterr().out


def test_a_run_that_exports_its_best_checkpoint_trains_to_the_end(tmp_path, data, measured, capsys):
    best = ["dpo.val_period=1", "checkpointing.save_period=100", "dpo.max_num_steps=3", "export.checkpoint=best"]
    loaded = load_config(None, [*SHORT, *data, *best, f"run.dir={tmp_path}/run"])
    run = train(loaded, Reporter("normal"))
    assert [line["step"] for line in metrics_of(run)] == [1, 2, 3]
    two = short_run(tmp_path / "two", *data, "dpo.val_period=1", "dpo.max_num_steps=2")
    assert largest_difference(weights_of(run), weights_of(two)) == 0.0
    first = json.loads((run / "verdicts.json").read_text())[0]
    assert first == {
        "name": "exported_best",
        "split": "validation-default",
        "text": "step 2 of 3 is exported, the best by loss (0.5000; step 3: 0.6000).",
    }
    said = capsys.readouterr().out
    assert (
        f"{run}/model  the aligned model (float32), in the Hugging Face layout: step 2, the best checkpoint\n" in said
    )
    assert "is better by" not in said
    assert "# tandem, step 2\n" in (run / "model/README.md").read_text()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["dpo.val_period=0", "dpo.val_at_end=false"], "validation-default_loss is never measured. Set dpo.val_period"),
        (["checkpointing.enabled=false"], "no checkpoints are saved. Set checkpointing.enabled=true"),
    ],
)
def test_a_best_checkpoint_that_cannot_be_known_is_refused(tmp_path, data, settings, problem):
    with pytest.raises(ConfigError) as refused:
        short_run(tmp_path / "run", *data, "export.checkpoint=best", *settings)
    assert str(refused.value) == (
        f"export.checkpoint = best: {problem}, or export the last step with export.checkpoint=latest."
    )


@pytest.mark.parametrize("step", [2, 3, 4])
@pytest.mark.slow
def test_a_killed_and_resumed_run_stops_early_at_the_same_step(tmp_path, data, measured, step):
    whole = short_run(tmp_path / "whole", *data, *EARLY)
    with killed_after(step):
        short_run(tmp_path / "cut", *data, *EARLY)
    cut = short_run(tmp_path / "cut", *data, *EARLY)
    assert_same(cut, whole)


def test_a_run_killed_while_exporting_its_best_step_does_not_train_further(tmp_path, data, measured):
    whole = short_run(tmp_path / "whole", *data, *EARLY)
    with mock.patch("tandem.training.run.finish._export", side_effect=Killed), pytest.raises(Killed):
        short_run(tmp_path / "cut", *data, *EARLY)
    cut = short_run(tmp_path / "cut", *data, *EARLY)
    assert_same(cut, whole)


def test_a_run_that_stopped_early_resumes_if_only_patience_is_raised(tmp_path, data, measured):
    run = short_run(tmp_path / "run", *data, *EARLY)
    assert refused(run, *data, *EARLY, "dpo.max_num_steps=9") == (
        f"{run} stopped early, 2 validations after its best at step 2, and under dpo.early_stopping_patience = 2 it would stop "
        "again at once. To extend it, set dpo.early_stopping_patience to null or to more than 2."
    )
    short_run(run, *data, *EARLY, "dpo.early_stopping_patience=3")
    whole = short_run(tmp_path / "whole", *data, *EARLY, "dpo.early_stopping_patience=3")
    assert_same(run, whole)
    assert len(metrics_of(run)) == 8
    assert (run / "model.step_2").is_dir()  # what was exported at step 4
    assert (run / "metrics.step_4.jsonl").is_file()


def test_per_pair_metrics_after_an_early_stop_are_of_the_exported_step(tmp_path, data, measured):
    pairs = [tmp_path / "while.jsonl", tmp_path / "after.jsonl", tmp_path / "two.jsonl"]
    short_run(tmp_path / "run", *data, *EARLY, per_pair=pairs[0])
    short_run(tmp_path / "run", *data, *EARLY, per_pair=pairs[1])
    short_run(tmp_path / "two", *data, "dpo.val_period=1", "dpo.max_num_steps=2", per_pair=pairs[2])
    assert pairs[0].read_bytes() == pairs[1].read_bytes() == pairs[2].read_bytes()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # the last step was exported, and by what is set now an earlier one would have been
        ("dpo.early_stopping_patience=null", "dpo.early_stopping_patience=1"),
        # an earlier one was exported
        ("dpo.early_stopping_patience=2", "dpo.early_stopping_patience=null"),
        ("dpo.early_stopping_patience=2", "checkpointing.metric_name=val_sft_loss"),
    ],
)
def test_per_pair_metrics_of_a_finished_run_are_of_the_exported_step_despite_changed_settings(
    tmp_path, data, measured, before, after
):
    four = [*data, *EARLY, "dpo.max_num_steps=4", "checkpointing.save_period=1", "checkpointing.keep_top_k=9"]
    pairs = [tmp_path / "while.jsonl", tmp_path / "after.jsonl"]
    short_run(tmp_path / "run", *four, before, per_pair=pairs[0])
    short_run(tmp_path / "run", *four, before, after, per_pair=pairs[1])
    assert pairs[0].read_bytes() == pairs[1].read_bytes()


def test_per_pair_metrics_need_the_checkpoint_of_the_exported_step(tmp_path, data, measured):
    run = short_run(tmp_path / "run", *data, *EARLY)
    shutil.rmtree(run / "checkpoints/step_2")
    with pytest.raises(CheckpointError) as error:
        short_run(run, *data, *EARLY, per_pair=tmp_path / "pairs")
    assert str(error.value) == (
        f"--per-pair {tmp_path}/pairs: {run} is finished, but the checkpoint of step 2, which it exported, is missing or "
        "damaged, so there is nothing to measure. Train again with --fresh."
    )


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["dpo.val_period=0"], "no validation runs during training (dpo.val_period = 0). Set dpo.val_period"),
        (
            ["checkpointing.metric_name=train:loss"],
            "checkpointing.metric_name = train:loss is not measured by validation. Use val_loss",
        ),
        (
            ["checkpointing.enabled=false"],
            "no checkpoints are saved, so the best one could not be exported. Set checkpointing.enabled=true",
        ),
        (["data.validation=null", "data.validation_share=0"], "no validation set is given. Set data.validation"),
    ],
)
def test_patience_that_can_never_run_out_is_refused(tmp_path, data, overrides, reason):
    with pytest.raises(ConfigError) as error:
        short_run(tmp_path / "run", *data, *EARLY, *overrides)
    assert str(error.value) == (f"dpo.early_stopping_patience = 2: {reason}, or leave out dpo.early_stopping_patience.")


def test_patience_counts_validations_since_the_best():
    found = ranking.Ranking(
        ranking.TrackedMetric("validation-default", "loss"),
        higher_is_better=False,
        records=[{"step": 0, "split": "validation-default", "loss": 0.1}],
    )
    assert (found.best_step(), found.num_since_best()) == (None, 0)
    for step, (loss, best, since) in enumerate(
        [(0.9, 1, 0), (0.9, 1, 1), (float("nan"), 1, 2), (0.8, 4, 0), (0.85, 4, 1)], start=1
    ):
        found.note({"step": step, "split": "validation-default", "loss": loss})
        assert (found.best_step(), found.num_since_best()) == (best, since)
    found.note({"step": 6, "split": "validation-default", "loss": 0.99, "data": "other pairs"})
    assert (found.best_step(), found.num_since_best(), found.best_value()) == (6, 0, 0.99)


@pytest.mark.slow
def test_several_ranks_extend_a_run_and_stop_early_together(tmp_path, data):
    """The tracked metric is a token count, which never changes, so nothing improves after the first validation."""
    never = ["checkpointing.metric_name=val_tokens_chosen_mean", *EARLY]
    runs = {"long": [*data, FOUR], "./long": [*data, EIGHT], "early": [*data, *never]}
    said = run_together(2, [[*SHORT, *own, f"run.dir={name}"] for name, own in runs.items()], tmp_path)
    assert "Extended from 4 to 8 steps" in said[0]
    assert (tmp_path / "long/model.step_4").is_dir()
    at_once = short_run(tmp_path / "at-once", *data, EIGHT)
    losses = [[line["loss"] for line in metrics_of(run)] for run in (tmp_path / "long", at_once)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    early = tmp_path / "early"
    assert len(metrics_of(early)) == 3
    one = short_run(tmp_path / "one", *data, "dpo.max_num_steps=1")
    assert largest_difference(weights_of(early), weights_of(one)) < 5e-6


def test_more_steps_than_the_epochs_have_do_not_extend_a_run_and_the_reason_is_printed(tmp_path, data, capfd):
    one_epoch = [*data, "dpo.max_num_epochs=1"]
    run = short_run(tmp_path / "run", *one_epoch, "dpo.max_num_steps=null")
    steps = extension.last_step(run)
    before = (run / "metrics.jsonl").read_bytes()
    capfd.readouterr()
    short_run(run, *one_epoch, "dpo.max_num_steps=99")
    assert (run / "metrics.jsonl").read_bytes() == before
    printed = "".join(capfd.readouterr())
    assert (
        f"warning: dpo.max_num_steps = 99 is not reached: dpo.max_num_epochs = 1 ends the run at step {steps}. "
        "Raise dpo.max_num_epochs to extend it." in printed
    )


def test_no_limit_is_named_if_both_end_the_run_at_the_same_step(tmp_path, data, capfd):
    run = short_run(tmp_path / "run", *data, "dpo.max_num_epochs=1", "dpo.max_num_steps=null")
    steps = extension.last_step(run)
    capfd.readouterr()
    short_run(run, *data, "dpo.max_num_epochs=1", f"dpo.max_num_steps={steps}")
    assert "is not reached" not in "".join(capfd.readouterr())


def test_more_epochs_without_more_steps_do_not_extend_a_run_and_the_reason_is_printed(tmp_path, data, capfd):
    run = short_run(tmp_path / "run", *data, "dpo.max_num_epochs=1", "dpo.max_num_steps=1")
    before = (run / "metrics.jsonl").read_bytes()
    capfd.readouterr()
    short_run(run, *data, "dpo.max_num_epochs=2", "dpo.max_num_steps=1")
    assert (run / "metrics.jsonl").read_bytes() == before
    assert (
        "warning: dpo.max_num_epochs = 2 is not reached: dpo.max_num_steps = 1 ends the run. Raise dpo.max_num_steps to extend "
        "it, or set it to null." in "".join(capfd.readouterr())
    )
