"""Mistakes that show only when a run starts: each is one message, before weights load, and nothing is left behind."""

import shutil

import pytest
from running import short_run

from tandem.config.load import load_config
from tandem.errors import ConfigError
from tandem.model.tiny import tiny_model
from tandem.train import trainer
from tandem.train.report import Reporter


def test_a_run_directory_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError) as refused:
        short_run(tmp_path / "taken")
    assert str(refused.value) == f"run.dir = {tmp_path}/taken: a file, not a directory. Choose another run.dir."


def test_a_run_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as refused:
        short_run(tmp_path / "file" / "run")
    assert str(refused.value) == (
        f"run.dir = {tmp_path}/file/run: cannot be written (Not a directory). Choose another run.dir."
    )


def test_a_directory_of_other_things_is_refused(tmp_path):
    (tmp_path / "photo").write_text("")
    with pytest.raises(ConfigError) as refused:
        short_run(tmp_path)
    assert str(refused.value) == f"run.dir = {tmp_path}: not empty and not a run. Choose another directory."


def test_a_cache_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError) as refused:
        short_run(tmp_path / "run")
    assert str(refused.value) == (
        f"the cache directory {tmp_path}/file/cache cannot be written (Not a directory). "
        "Set TANDEM_CACHE to one that can."
    )
    assert not (tmp_path / "run").exists()


def test_weights_that_are_cut_off_are_told_by_their_name(tmp_path):
    folder = shutil.copytree(tiny_model(), tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError) as refused:
        short_run(tmp_path / "run", f"policy.model_name={folder}", "policy.train_global_batch_size=8")
    message = str(refused.value)
    assert message.startswith(f"policy.model_name = {folder}: its weights are not readable as safetensors (")
    assert message.endswith("Is the download whole?")


def test_a_run_shorter_than_its_warm_up_is_warned_of(tmp_path, capsys):
    loaded = load_config(None, ["dpo.max_num_steps=3", f"run.dir={tmp_path}/run"])
    setup = trainer.set_up(loaded.config, trainer.start_workers().device)
    trainer._warn_of_short_run(setup, Reporter("quiet"))
    assert " ".join(capsys.readouterr().out.split()) == (
        "warning: in 3 steps the learning rate never rises above 0.00019 of 0.001. "
        "More epochs, a smaller batch, or another policy.scheduler (null: no warm-up)."
    )


def test_a_run_as_long_as_its_warm_up_is_not(tmp_path, capsys):
    setup = trainer.set_up(load_config(None, []).config, trainer.start_workers().device)
    assert setup.highest_rate == 1e-3
    trainer._warn_of_short_run(setup, Reporter("quiet"))
    assert capsys.readouterr().out == ""
