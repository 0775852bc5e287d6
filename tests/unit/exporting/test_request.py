"""What `tandem export` is asked for: messages about folders that are not runs, and about checkpoints that do not exist."""

import pytest
from run_directories import make_run

from tandem.errors import CheckpointError, ConfigError
from tandem.exporting.request import request_export
from tandem.terminal.commands import tandem_command

pytestmark = pytest.mark.usefixtures("of_a_command")


def refused(*given, **options) -> str:
    with pytest.raises((CheckpointError, ConfigError)) as error:
        request_export(*given, **options)
    return str(error.value)


@pytest.mark.parametrize("name", ["model", "exports/step_5"])
def test_a_model_of_a_run_names_the_run_and_the_command_that_exports_it(tmp_path, monkeypatch, name):
    run = make_run(tmp_path / "run")
    folder = run / name
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("config.json", "model.safetensors"):
        (folder / file).touch()
    monkeypatch.setattr("sys.argv", ["tandem", "export", str(folder), "--dtype", "bfloat16"])
    command = tandem_command("export", str(run), "--dtype", "bfloat16")
    assert refused(folder) == f"{folder}: it holds a model of the run {run}, not a run. The command is then: {command}"


def test_a_model_of_no_run_and_an_empty_folder_are_not_runs(tmp_path):
    give = "Give the directory of a run, or one of its checkpoints."
    assert refused(tmp_path) == f"{tmp_path}: it has no config.yaml, so it is not a run. {give}"
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).touch()
    assert refused(tmp_path) == f"{tmp_path}: it holds a model, not a run. {give}"


def test_a_sweep_names_one_of_its_runs_once(tmp_path):
    run = make_run(tmp_path / "sweep/seed-1")
    (tmp_path / "sweep/sweep.json").write_text("{}")
    assert refused(tmp_path / "sweep") == f"{tmp_path}/sweep: it is a sweep: name one of its runs, such as {run}."


@pytest.mark.parametrize(
    ("settings", "asked", "why"),
    [
        ("{save_period: 2, keep_top_k: 2}", "step_4", "the 2 best (checkpointing.keep_top_k=2)"),
        ("{save_period: 0.5, keep_top_k: 1}", "step_4", "the best (checkpointing.keep_top_k=1)"),
        ("{save_period: 2, keep_top_k: 2}", "step_3", None),  # was not due
        ("{save_period: 2, keep_top_k: 3}", "step_4", None),  # only 2 checkpoints: nothing was removed
        ("{save_period: 2, keep_top_k: 2}", "step_12", None),  # later than the newest
        ("{save_period: 2, keep_top_k: 2}", "first", None),
    ],
)
def test_a_checkpoint_that_was_removed_is_named_as_such(tmp_path, settings, asked, why):
    run = make_run(tmp_path / "run", config=f"checkpointing: {settings}\n")
    reason = "" if why is None else f". The run keeps the latest and {why}, and removes the others"
    assert refused(run, checkpoint=asked) == (
        f"--checkpoint {asked}: {run}/checkpoints has no such checkpoint{reason}. Use best, latest, or one of these: step_5, "
        "step_10."
    )


def test_only_a_measured_export_needs_the_code_of_the_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise AssertionError('must not be run')")
    run = make_run(tmp_path / "run", config="data: {train: {data_path: a.jsonl, dataset_name: 'mine.py:mine'}}\n")
    assert "names Python code, which would be run" in refused(run)
    assert request_export(run, measured=False).checkpoint.step == 10
