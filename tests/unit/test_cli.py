"""The command: what it prints, what it ends with, and what it does not import on the way."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from letters import letter_tokenizer

from tandem import __version__, cli
from tandem.errors import AuditError, DiskError, OutOfMemoryError, TandemError

# Runs the command, then says on the last line of standard error whether torch was imported.
WATCHED = """
import sys
from tandem.cli import main
try:
    main()
finally:
    heavy = sorted({"torch", "transformers", "numpy"} & set(sys.modules))
    print("imported:", ", ".join(heavy), file=sys.stderr)
"""


def tandem(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WATCHED, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300, env=dict(os.environ))


def run_here(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """The command in this process: exit code, standard output, standard error."""
    monkeypatch.setattr(sys, "argv", ["tandem", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    code = ended.value.code
    assert code is None or isinstance(code, int)
    return code or 0, said.out, said.err


# Nothing heavy is imported before it is needed


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["config"], ["config", "--schema"]])
def test_what_needs_no_model_imports_nothing_heavy(arguments):
    ended = tandem(*arguments)
    assert (ended.returncode, ended.stderr) == (0, "imported: \n")
    assert ended.stdout


@pytest.mark.parametrize("command", ["train", "config"])
def test_a_configuration_error_is_one_message_and_code_2_before_anything_heavy_is_imported(command):
    ended = tandem(command, "dpo.beta=0.1")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "tandem: error: command line: unknown key dpo.beta. Did you mean dpo.reference_policy_kl_penalty? "
        "`tandem config` lists all keys.\nimported: \n"
    )


@pytest.mark.parametrize("command", ["train", "prepare"])
def test_a_model_without_a_training_set_is_refused_before_anything_heavy_is_imported(command):
    ended = tandem(command, "policy.model_name=m")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "tandem: error: policy.model_name = m, but no training set is given: the bundled pairs would be trained on. Set "
        "data.train.data_path=FILE, or data.train.data_path=embedded for the bundled pairs.\nimported: \n"
    )


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        (["train", "--config=~/no.yaml"], "no.yaml"),
        (["train", "--resume=~/no"], "no"),
        (["train", "--per-pair=~/no/x"], "no/x"),
        (["inspect", "~/no.jsonl"], "no.jsonl"),
        (["prepare", "--from-nemo=~/no.npy", "--output-dir=~/out"], "no.npy"),
        (["prepare", "--output-dir=~/taken"], "taken"),
        (["prepare", "--to-nemo=~/taken"], "taken"),
    ],
)
def test_a_tilde_is_the_home_directory_in_options(arguments, path, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TANDEM_CACHE", "~/cache")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()
    code, _, err = run_here(monkeypatch, capsys, *arguments)
    assert code in (2, 3, 4)
    assert f" {tmp_path}/{path}: " in err
    assert not (tmp_path / "~").exists()


def test_a_missing_data_file_is_one_message_and_code_3_and_leaves_no_run(tmp_path):
    # A model as far as anything is read of it before the data: no weights load.
    model = tmp_path / "model"
    letter_tokenizer().save_pretrained(str(model))
    (model / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    (model / "model.safetensors").touch()
    ended = tandem("train", "data.train.data_path=no.jsonl", f"policy.model_name={model}", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (3, "")
    assert ended.stderr.splitlines()[:-1] == [
        "tandem: error: no.jsonl: no such file or folder, and not the name of a hub dataset (org/name)."
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# In this process


def test_the_version_is_printed(monkeypatch, capsys):
    assert run_here(monkeypatch, capsys, "--version") == (0, f"tandem {__version__}\n", "")


def test_the_schema_is_json_that_knows_every_section(monkeypatch, capsys):
    code, out, _ = run_here(monkeypatch, capsys, "config", "--schema")
    schema = json.loads(out)
    assert code == 0
    assert {"run", "dpo", "policy", "reference", "data"} <= set(schema["properties"])
    assert schema["additionalProperties"] is False


def test_the_configuration_in_force_is_printed_as_yaml(monkeypatch, capsys, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("run: {seed: 1, name: mine}", encoding="utf-8")
    code, out, err = run_here(monkeypatch, capsys, "config", "-c", str(file), "run.seed=2")
    assert (code, err) == (0, "")
    assert yaml.safe_load(out)["run"] == {"name": "mine", "dir": None, "seed": 2, "deterministic": False}


def test_a_missing_configuration_file_ends_with_code_2(monkeypatch, capsys, tmp_path):
    assert run_here(monkeypatch, capsys, "config", "--config", f"{tmp_path}/no.yaml") == (
        2,
        "",
        f"tandem: error: {tmp_path}/no.yaml: no such configuration file.\n",
    )


def test_an_unknown_option_ends_with_code_2(monkeypatch, capsys):
    code, out, err = run_here(monkeypatch, capsys, "train", "--nosuch")
    assert (code, out) == (2, "")
    assert "No such option: --nosuch" in err


def test_resume_refuses_a_folder_that_is_no_run(monkeypatch, capsys, tmp_path):
    assert run_here(monkeypatch, capsys, "train", "--resume", str(tmp_path)) == (
        4,
        "",
        f"tandem: error: --resume {tmp_path}: it holds no config.yaml, so it is no run.\n",
    )


def test_resume_says_that_a_directory_is_not_there(monkeypatch, capsys, tmp_path):
    assert run_here(monkeypatch, capsys, "train", "--resume", f"{tmp_path}/nosuch") == (
        4,
        "",
        f"tandem: error: --resume {tmp_path}/nosuch: there is no such directory.\n",
    )


@pytest.mark.parametrize("inside", ["checkpoints", "model"])
def test_resume_refuses_what_is_inside_a_run_and_names_the_run(monkeypatch, capsys, tmp_path, inside):
    (tmp_path / "config.yaml").touch()
    (tmp_path / inside).mkdir()
    assert run_here(monkeypatch, capsys, "train", "--resume", f"{tmp_path}/{inside}") == (
        4,
        "",
        f"tandem: error: --resume {tmp_path}/{inside}: it holds no config.yaml, so it is no run. Is --resume {tmp_path} meant?\n",
    )


def test_resume_refuses_a_checkpoint_and_names_its_run(monkeypatch, capsys, tmp_path):
    place = tmp_path / "run/checkpoints/step_2"
    (place / "tensors").mkdir(parents=True)
    for name in ("state.json", "config.yaml"):
        (place / name).write_text("{}")
    assert run_here(monkeypatch, capsys, "train", "--resume", str(place)) == (
        4,
        "",
        f"tandem: error: --resume {place}: a checkpoint, not a run. A run goes on from its newest whole one: --resume "
        f"{tmp_path}/run\n",
    )


@pytest.mark.parametrize("other", [["--fresh"], ["--config", "a.yaml"]])
def test_resume_takes_no_other_configuration(monkeypatch, capsys, tmp_path, other):
    assert run_here(monkeypatch, capsys, "train", "--resume", str(tmp_path), *other) == (
        2,
        "",
        "tandem: error: --resume takes its configuration from DIR: leave out --config and --fresh.\n",
    )


# How a failure inside a command ends


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        (AuditError("packed is not plain."), 1, "tandem: error: packed is not plain.\n"),
        (DiskError("full"), 7, "tandem: error: full\n"),
        (KeyboardInterrupt(), 130, "tandem: interrupted\n"),
        (
            OSError(28, "No space left on device"),
            7,
            "tandem: error: the disk is full: [Errno 28] No space left on device. "
            "Checkpoints already there are whole.\n",
        ),
        (OutOfMemoryError("no room"), 6, "tandem: error: no room\n"),
    ],
    ids=["audit", "disk", "interrupt", "disk full", "out of memory"],
)
def test_a_failure_ends_in_its_code_and_one_message(monkeypatch, capsys, failure, code, message):
    def fails(**_):
        raise failure

    monkeypatch.setattr(cli, "app", fails)
    assert run_here(monkeypatch, capsys) == (code, "", message)


@pytest.mark.parametrize("failure", [RuntimeError("ours"), OSError(13, "Permission denied"), ValueError("ours")])
def test_our_own_mistakes_keep_their_traceback(monkeypatch, failure):
    def fails(**_):
        raise failure

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(type(failure)) as caught:
        cli.main()
    assert caught.value is failure


def test_every_kind_of_error_has_a_code_of_its_own_but_for_internal_ones():
    kinds = [kind for kind in TandemError.__subclasses__() if kind.exit_code != 1]
    assert sorted(kind.exit_code for kind in kinds) == [2, 3, 4, 5, 6, 7, 143]
