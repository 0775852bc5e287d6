"""The directory of a run, and the checkpoints that it may and may not resume from."""

import json
import shutil

import pytest
import yaml
from running import SHORT, few_pairs, killed_after, metrics_of, short_run

from tandem.config.load import load_config
from tandem.errors import CheckpointError, ConfigError
from tandem.report.reporter import Reporter
from tandem.terminal.commands import tandem_command
from tandem.training.checkpoint.checkpoints import checkpoints, step_of
from tandem.training.run.lock import locked
from tandem.training.trainer import train

pytestmark = pytest.mark.usefixtures("of_a_command")

SAVING = ["checkpointing.save_period=2", "dpo.max_num_steps=6"]


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


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*overrides, fresh=False):
    return train(load_config(None, [*SHORT, *SAVING, *overrides]), Reporter("quiet"), fresh=fresh)


def test_a_new_run_does_not_resume_from_checkpoints_of_another_run(tmp_path):
    elsewhere = f"checkpointing.checkpoint_dir={tmp_path}/elsewhere"
    short_run(tmp_path / "one", *SAVING, elsewhere)
    for fresh in (False, True):
        with pytest.raises(CheckpointError) as caught:
            short_run(tmp_path / "two", *SAVING, elsewhere, "dpo.reference_policy_kl_penalty=0.2", fresh=fresh)
        name = "two-1" if fresh else "two"
        assert str(caught.value) == (
            f"checkpointing.checkpoint_dir = {tmp_path}/elsewhere: it contains checkpoints of another run, and {tmp_path}/{name} "
            "is a new one. Choose another checkpointing.checkpoint_dir, or leave it out."
        )


def test_a_refused_run_leaves_no_folder_behind(here):
    (here / "taken").touch()
    (here / "mine").mkdir()
    elsewhere = "checkpointing.checkpoint_dir=taken/checkpoints"
    for run_dir in ("runs/a", "mine"):
        with pytest.raises(ConfigError) as caught:
            run(f"run.dir={run_dir}", elsewhere)
        assert str(caught.value) == (
            "checkpointing.checkpoint_dir = taken/checkpoints: cannot be written (Not a directory). Choose another "
            "checkpointing.checkpoint_dir."
        )
    assert sorted(path.name for path in here.iterdir()) == ["mine", "taken"]  # a folder of the user's is kept


def test_a_folder_is_kept_once_something_is_written_to_it(here):
    with pytest.raises(KeyboardInterrupt), locked(here / "runs/a"):
        (here / "runs/a/config.yaml").touch()
        raise KeyboardInterrupt
    assert sorted(path.name for path in (here / "runs/a").iterdir()) == ["config.yaml", "lock"]


def test_a_run_resumes_from_its_checkpoints_in_another_directory(tmp_path):
    elsewhere = f"checkpointing.checkpoint_dir={tmp_path}/elsewhere"
    with killed_after(3):
        short_run(tmp_path / "one", *SAVING, elsewhere)
    cut = short_run(tmp_path / "one", *SAVING, elsewhere)
    assert metrics_of(cut) == metrics_of(short_run(tmp_path / "whole", *SAVING))


def test_the_checkpoints_of_a_run_are_looked_for_where_they_are(tmp_path):
    run, elsewhere = tmp_path / "run", f"checkpointing.checkpoint_dir={tmp_path}/elsewhere"
    short_run(run, *SAVING)
    for steps in ((), ("dpo.max_num_steps=8",)):
        with pytest.raises(CheckpointError) as caught:
            short_run(run, *SAVING, *steps, elsewhere)
        assert str(caught.value) == (
            f"checkpointing.checkpoint_dir = {tmp_path}/elsewhere: the checkpoints of {run} are in {run}/checkpoints. Restore "
            f"checkpointing.checkpoint_dir, or first move them to {tmp_path}/elsewhere."
        )
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    short_run(run, *SAVING, *steps, elsewhere)
    with pytest.raises(
        CheckpointError, match=f"^checkpointing.checkpoint_dir = null: the checkpoints of {run} are in "
    ):
        short_run(run, *SAVING, *steps)


def test_checkpoint_dir_without_run_dir_is_the_run_directory(here):
    with killed_after(3):
        run("checkpointing.checkpoint_dir=results")
    assert {step_of(place) for place in checkpoints(here / "results/checkpoints")} == {2}
    assert str(run("checkpointing.checkpoint_dir=results")) == "results"
    assert len(metrics_of(here / "results")) == 6
    assert str(run("checkpointing.checkpoint_dir=results", fresh=True)) == "results-1"
    assert {step_of(place) for place in checkpoints(here / "results-1/checkpoints")} == {2, 4, 6}


@pytest.mark.parametrize(
    "change",
    [
        "policy.activation_checkpointing=full",
        "policy.packing.pack_length=1024",
        "policy.packing.packs_per_micro_batch=2",
        "policy.packing.share_prompts=false",
        "policy.head_chunk_tokens=64",
        "reference.mode=live",
        "dpo.max_num_epochs=3",
        "export.dtype=bfloat16",
    ],
)
def test_settings_that_do_not_affect_the_weights_may_change_on_resume(tmp_path, whole, change, died):
    died(3, tmp_path / "cut")
    cut = short_run(tmp_path / "cut", *SAVING, change)
    losses = [[line["loss"] for line in metrics_of(one)] for one in (cut, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_row_length_of_a_set_packed_once_may_not_change(tmp_path):
    packed = [*SAVING, "policy.packing.mode=dataset", "policy.packing.pack_length=256"]
    with killed_after(3):
        short_run(tmp_path / "cut", *packed)
    with pytest.raises(CheckpointError, match=r"policy\.packing\.pack_length: 256 there, 1024 now"):
        short_run(tmp_path / "cut", *packed, "policy.packing.pack_length=1024")


def test_an_unfinished_run_that_could_be_resumed_is_reported(here, capsys):
    with killed_after(3):
        run()
    assert str(run("logger.num_val_samples_to_print=1", "checkpointing.keep_top_k=2")) == "runs/tandem-2"
    assert (
        "warning: runs/tandem-1 is unfinished and differs only in checkpointing.keep_top_k=2, "
        "logger.num_val_samples_to_print=1. A run may be resumed with such a change. To resume it: "
        + tandem_command(
            "train", "--resume", "runs/tandem-1", "checkpointing.keep_top_k=2", "logger.num_val_samples_to_print=1"
        )
    ) in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("place", [[], ["run.dir=runs/tandem-1"]])
def test_a_finished_run_that_could_be_extended_is_reported(here, capsys, place):
    run("dpo.max_num_steps=4", *place)
    assert str(run()) == "runs/tandem-2"
    assert (
        "warning: runs/tandem-1 is finished and differs only in having fewer steps. To extend it: "
        + tandem_command("train", "--resume", "runs/tandem-1", "dpo.max_num_steps=6")
    ) in " ".join(capsys.readouterr().out.split())
    run("dpo.max_num_steps=3")
    assert "To extend it" not in capsys.readouterr().out


def test_the_same_command_resumes_its_own_run_after_other_runs(here):
    with killed_after(3):
        run()
    assert str(run("run.seed=1")) == "runs/tandem-2"
    assert str(run()) == "runs/tandem-1"
    assert str(run()) == "runs/tandem-3"


def test_a_changed_validation_set_is_reported(tmp_path, capsys):
    rows = [{"prompt": f"q{i}", "chosen": "yes", "rejected": "no"} for i in range(5)]
    held_out = tmp_path / "held-out.jsonl"
    settings = [*SAVING, "data.train=embedded", f"data.validation={held_out}", "dpo.val_period=1"]
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with killed_after(3):
        short_run(tmp_path / "cut", *settings)
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    short_run(tmp_path / "cut", *settings)
    assert (
        "warning: the pairs of validation-default have changed since step 2. Earlier results are not comparable, and are not "
        "used to rank checkpoints once the new pairs are measured."
    ) in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("others", [["run.seed=1"], ["run.dir=mine"]])
def test_no_earlier_run_is_suggested_if_it_differs_or_was_resumed(here, capsys, others):
    with killed_after(3):
        run()
    run(*others)
    assert "unfinished" not in capsys.readouterr().out


def test_a_metric_that_is_never_measured_is_refused():
    with pytest.raises(ConfigError) as caught:
        run("checkpointing.metric_name=val_loss")
    assert str(caught.value) == (
        "checkpointing.metric_name = val_loss: no validation is configured, so this metric would never be measured. "
        "Set dpo.val_period, dpo.val_at_start or dpo.val_at_end, or track train:loss."
    )


def test_more_steps_than_the_epochs_have_cause_a_warning(tmp_path, capsys):
    short_run(
        tmp_path / "run",
        "dpo.max_num_steps=500",
        "dpo.max_num_epochs=1",
        "policy.train_global_batch_size=16",
        "data.drop_last=false",
        few_pairs(tmp_path),
    )
    assert (
        "warning: dpo.max_num_steps = 500, but 1 epoch has only 3 steps. Raise dpo.max_num_epochs for more."
        in " ".join(capsys.readouterr().out.split())
    )


def from_environment(folder, **values):
    """A run that reads its loss, learning rate and data from environment variables."""
    file = folder / "env.yaml"
    file.write_text(
        "dpo: {preference_loss: '${oc.env:LOSS}'}\n"
        "policy: {optimizer: {kwargs: {lr: '${oc.decode:${oc.env:RATE}}'}}}\n"
        "data: {train: {data_path: '${oc.env:PAIRS}'}}\n"
        "logger: {wandb_enabled: false, wandb: {project: '${oc.env:PROJECT}'}}\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"LOSS": "dpo", "RATE": "1e-3", "PAIRS": "embedded", "PROJECT": "one", **values}.items():
            patch.setenv(name, value)
        own = [one for one in SHORT if not one.startswith(("data.", "policy.optimizer.kwargs.lr"))]
        loaded = load_config(str(file), [*own, *SAVING, f"run.dir={folder}/run"])
        return train(loaded, Reporter("quiet"))


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [("LOSS", "ipo", "dpo.preference_loss"), ("RATE", "1e-2", "policy.optimizer.kwargs.lr")],
)
def test_a_run_does_not_resume_with_another_value_of_an_environment_variable(tmp_path, name, value, key):
    with killed_after(3):
        from_environment(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        from_environment(tmp_path, **{name: value})
    assert str(caught.value) == (
        f"{tmp_path}/run/checkpoints/step_2: the value of {key}, which is taken from the environment, changed since this "
        "checkpoint was saved, so the run cannot resume from it. Undo the change, or start again with --fresh."
    )


def test_environment_values_that_do_not_affect_the_weights_may_change_on_resume(tmp_path):
    with killed_after(3):
        from_environment(tmp_path)
    assert len(metrics_of(from_environment(tmp_path, PROJECT="two"))) == 6


def without(tree, *path):
    inner = tree
    for part in path[:-1]:
        inner = inner[part]
    del inner[path[-1]]


def test_keys_that_an_earlier_version_did_not_write_have_their_defaults(tmp_path, died):
    died(3, tmp_path / "run")
    file = tmp_path / "run/config.yaml"
    stored = yaml.safe_load(file.read_text())
    for path in (("data", "duplicates"), ("dpo", "early_stopping_patience"), ("data", "train", "weight"), ("export",)):
        without(stored, *path)
    file.write_text(yaml.safe_dump(stored))
    assert len(metrics_of(short_run(tmp_path / "run", *SAVING))) == 6


def test_a_key_missing_in_the_saved_configuration_must_have_its_default(tmp_path, died):
    died(3, tmp_path / "run")
    file = tmp_path / "run/config.yaml"
    stored = yaml.safe_load(file.read_text())
    without(stored, "data", "duplicates")
    file.write_text(yaml.safe_dump(stored))
    with pytest.raises(CheckpointError, match="'keep' there, 'drop' now"):
        short_run(tmp_path / "run", *SAVING, "data.duplicates=drop")
