"""MODEL|RUN: a model, a hub name, or a run, which stands for its model and its template settings."""

import json
import os

import pytest

from tandem.config.sections.policy import Tokenizer
from tandem.errors import CheckpointError, ConfigError
from tandem.generation.target import find_target
from tandem.terminal.commands import tandem_command
from tandem.training.run.lock import locked

pytestmark = pytest.mark.usefixtures("of_a_command")


@pytest.fixture
def run(tmp_path):
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "rejects.jsonl").touch()
    (run / "config.yaml").write_text("policy: {tokenizer: {chat_template: null}}\n")
    (run / "model" / "config.json").write_text("{}")
    (run / "model" / "model.safetensors").touch()
    return run


def test_a_run_stands_for_its_model_and_keeps_raw_text(run):
    target = find_target("model", str(run))
    assert (target.name, target.model, target.adapter) == (str(run), str(run / "model"), None)
    assert target.tokenizer.chat_template is None


def test_a_template_file_of_a_run_is_the_one_in_its_model_and_keeps_its_arguments(run):
    (run / "config.yaml").write_text(
        "policy: {tokenizer: {chat_template: gone.jinja, chat_template_kwargs: {enable_thinking: false}}}\n"
    )
    assert find_target("model", str(run)).tokenizer == Tokenizer(chat_template_kwargs={"enable_thinking": False})


def test_a_run_with_an_adapter_names_its_base_model(run):
    (run / "model" / "config.json").unlink()
    (run / "model" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    target = find_target("model", str(run))
    assert (target.model, target.adapter) == ("org/base", run / "model")


@pytest.mark.parametrize("name", ["embedded", "org/name"])
def test_the_embedded_model_and_hub_names_are_kept(name):
    assert find_target("model", name).model == name


def message(name, kind=ConfigError):
    with pytest.raises(kind) as error:
        find_target("model", str(name))
    return str(error.value)


def test_a_run_without_a_model_is_refused_with_the_commands_that_make_one(run):
    (run / "model" / "model.safetensors").unlink()
    assert message(run, CheckpointError) == (
        f"MODEL {run}: a run that has no model yet: {run}/model is written when the run is finished. Finish it with "
        f"{tandem_command('train', '--resume', str(run))}."
    )


def test_a_run_that_is_being_trained_names_its_process(run):
    (run / "model" / "model.safetensors").unlink()
    without = f"MODEL {run}: a run that has no model yet: {run}/model is written when the run is finished."
    with locked(run):
        training = f"It is being trained by process {os.getpid()}. Wait until it is finished"
        assert message(run, CheckpointError) == f"{without} {training}."
        (run / "checkpoints/step_2").mkdir(parents=True)
        (run / "checkpoints/latest").symlink_to("step_2")
        assert (
            message(run, CheckpointError)
            == f"{without} {training}, or use its newest checkpoint, {run}/checkpoints/latest."
        )
    assert message(run, CheckpointError).endswith(f"{run!s}, or use its newest checkpoint, {run}/checkpoints/latest.")


def test_a_folder_that_is_neither_a_model_nor_a_run_is_refused(tmp_path):
    assert message(tmp_path) == (
        f"MODEL {tmp_path}: neither a model (it has no config.json) nor a run (it has no config.yaml). Give a model folder, "
        "a hub name, or a run directory."
    )


def test_a_folder_of_runs_names_one_of_them(run, tmp_path):
    assert message(tmp_path) == f"MODEL {tmp_path}: it holds runs: name one of its runs, such as {run}."


def test_a_folder_of_checkpoints_names_its_run(run):
    folder = run / "checkpoints"
    (folder / "step_2/tensors").mkdir(parents=True)
    (folder / "step_2/state.json").touch()
    assert message(folder) == (
        f"MODEL {folder}: it holds the checkpoints of {run}: name that run, or one of them, such as {folder}/step_2. Did you "
        f"mean {run}?"
    )


def test_a_missing_folder_and_a_file_are_refused(tmp_path, monkeypatch):
    assert message("/no/model") == (
        "MODEL /no/model: no such directory. Give a model folder, a hub name, or a run directory."
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert message("runs/dpo-1") == (
        "MODEL runs/dpo-1: no such directory. Give a model folder, a hub name, or a run directory."
    )
    (tmp_path / "file").touch()
    assert message("file") == "MODEL file: a file, not a folder. Give a model folder, a hub name, or a run directory."


def test_a_checkpoint_is_a_target_and_a_damaged_one_is_refused(tmp_path):
    (tmp_path / "tensors").mkdir()
    (tmp_path / "state.json").touch()
    assert message(tmp_path) == (
        f"MODEL {tmp_path}: a damaged checkpoint: its manifest.json is missing. Give another checkpoint."
    )
    (tmp_path / "manifest.json").touch()
    assert find_target("model", str(tmp_path)).model == str(tmp_path)
