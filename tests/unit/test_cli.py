"""The command `tandem`: what it prints, its exit codes, and what it does not import."""

import json
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch  # noqa: F401  `tandem inspect` keeps a process without torch, if it has not been imported yet
import yaml
from letters import letter_tokenizer

from tandem import __version__
from tandem.cli import main as cli
from tandem.config.load import load_config
from tandem.errors import AlreadyReportedError, AuditError, DiskError, OutOfMemoryError, TandemError

NO_RUN = "it has no config.yaml, so it is not a run"
NO_FILE = "no such file or folder, and not the name of a hub dataset (org/name)."

# Runs the command, then prints which heavy modules were imported, on the last line of standard error.
WATCHED = """
import sys
from tandem.cli.main import main
try:
    main()
finally:
    heavy = sorted(name for name in ("torch", "transformers", "numpy") if sys.modules.get(name))
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


# Heavy modules are imported only when needed


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["config"], ["config", "--schema"]])
def test_commands_without_a_model_do_not_import_heavy_modules(arguments):
    ended = tandem(*arguments)
    assert (ended.returncode, ended.stderr) == (0, "imported: \n")
    assert ended.stdout


@pytest.mark.parametrize("command", ["train", "config"])
def test_a_configuration_error_is_reported_with_exit_code_2_before_heavy_imports(command):
    ended = tandem(command, "dpo.beta=0.1")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "tandem: error: command line: unknown key dpo.beta. Did you mean dpo.reference_policy_kl_penalty? "
        "`tandem config` lists all keys.\nimported: \n"
    )


@pytest.mark.parametrize("command", ["train", "prepare"])
def test_a_model_without_a_training_set_is_refused_before_heavy_imports(command):
    ended = tandem(command, "policy.model_name=m")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "tandem: error: policy.model_name = m, but no training set is given, so the run would use the bundled pairs. Set "
        "data.train.data_path=FILE, or data.train.data_path=embedded if you want the bundled pairs.\nimported: \n"
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
def test_a_tilde_in_an_option_is_expanded_to_the_home_directory(arguments, path, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TANDEM_CACHE", "~/cache")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()
    code, _, err = run_here(monkeypatch, capsys, *arguments)
    assert code in (2, 3, 4)
    assert f" {tmp_path}/{path}: " in err
    assert not (tmp_path / "~").exists()


def test_a_missing_data_file_is_reported_with_exit_code_3_and_no_run_is_created(tmp_path):
    # Enough of a model for what is read before the data; no weights are loaded.
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


MODEL = ["policy.model_name=./no", "data.train=embedded"]
FOLDER = ["policy.model_name=.", "data.train=embedded"]
ADAPTER = ["policy.lora.enabled=true", "policy.lora.adapter=./no"]
GENERATE = ["generate", "embedded", "--prompt", "Hi"]
TWO_SETS = ["data.train=no.jsonl", "data.validation=no2.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train", *MODEL], 2, "policy.model_name = ./no: no such directory. Check the path."),
        (["prepare", *MODEL], 2, "policy.model_name = ./no: no such directory. Check the path."),
        (
            ["train", *FOLDER],
            2,
            "policy.model_name = .: {here} holds no config.json, so it is not a model. "
            "Give a model folder, a hub name, or a run directory.",
        ),
        (["train", "reference.model=./no"], 2, "reference.model = ./no: no such directory. Check the path."),
        (
            ["train", "policy.tokenizer.name=./no"],
            2,
            "policy.tokenizer.name = ./no: no such directory. Check the path.",
        ),
        (["train", *ADAPTER], 2, "policy.lora.adapter = ./no: no such directory. Check the path."),
        (["train", *TWO_SETS], 3, f"train: no.jsonl: {NO_FILE}\n\nvalidation-default: no2.jsonl: {NO_FILE}"),
        (["prepare", "data.train=no.jsonl"], 3, f"no.jsonl: {NO_FILE}"),
        (["train", "data.train=[no*.jsonl,embedded]"], 3, "no*.jsonl: no file matches this pattern."),
        (["train", "--config", "no.yaml"], 2, "{here}/no.yaml: no such configuration file."),
        (
            [*GENERATE, "--chat-template", "no.jinja"],
            2,
            "--chat-template no.jinja: there is no such file. Check the path.",
        ),
        (
            [*GENERATE, "--chat-template", "no"],
            2,
            "--chat-template no: not a file that ends in .jinja. Give one, or none for plain text.",
        ),
        (
            [*GENERATE, "--out", "{here}"],
            2,
            "--out {here}: a folder. Give the name of a file, such as {here}/completions.jsonl.",
        ),
        (
            [*GENERATE, "--out", "no/o.jsonl"],
            2,
            "--out no/o.jsonl: no does not exist. Create this folder, or choose another file.",
        ),
        (
            [*GENERATE, "--out", "o.csv"],
            2,
            "--out o.csv: JSON lines are written, which a .csv file does not hold. Give a name that ends in .jsonl, such as "
            "o.jsonl.",
        ),
    ],
)
def test_a_wrong_path_is_reported_before_heavy_imports(tmp_path, arguments, code, message):
    ended = tandem(*(one.format(here=tmp_path) for one in arguments), cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert ended.stderr == f"tandem: error: {message.format(here=tmp_path)}\nimported: \n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "code", "message"),
    [
        (["run.dir=taken"], 2, "run.dir = taken: a file, not a directory. Choose another run.dir."),
        (["run.dir=full"], 2, f"run.dir = full: not empty, and {NO_RUN}. Choose another directory."),
        (["--resume", "full"], 4, f"--resume full: {NO_RUN}."),
        (
            ["--resume", "run", "run.dir=other"],
            2,
            "--resume run and run.dir=other set the same key. Leave out one of them.",
        ),
    ],
)
def test_an_unusable_run_directory_is_refused_before_heavy_imports(tmp_path, given, code, message):
    (tmp_path / "taken").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    ended = tandem("train", *given, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert ended.stderr == f"tandem: error: {message}\nimported: \n"


def test_resuming_a_finished_run_does_not_need_its_data(tmp_path, monkeypatch, capsys):
    done = tmp_path / "done"
    (done / "model").mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (done / "model" / name).touch()
    (done / "config.yaml").write_text(load_config(None, ["data.train=gone.jsonl", f"run.dir={done}"]).as_yaml())
    code, out, err = run_here(monkeypatch, capsys, "train", "--resume", str(done))
    assert (code, err) == (0, "")
    assert out == f"Loading torch and transformers (a few seconds)\n{done} is finished: its model is in {done}/model.\n"


# Runs the command up to its import of torch.
UP_TO_TORCH = """
import sys
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("torch", flush=True)
            raise SystemExit(0)
sys.meta_path.insert(0, Refused())
from tandem.cli.main import main
main()
"""


@pytest.mark.parametrize(
    ("arguments", "out"),
    [
        (["train"], "Loading torch and transformers (a few seconds)\ntorch\n"),
        (["prepare"], "Loading torch and transformers (a few seconds)\ntorch\n"),
        (["train", "--quiet"], "torch\n"),
        (["train", "--json"], "torch\n"),
    ],
)
def test_a_message_is_printed_before_torch_is_imported(tmp_path, arguments, out):
    command = [sys.executable, "-c", UP_TO_TORCH, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert (ended.returncode, ended.stdout) == (0, out), ended.stderr


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["eval", "no-such-model", "embedded"], "MODEL"),
        (["eval", "embedded", "embedded", "--against", "no-such-model"], "--against"),
        (["generate", "no-such-model", "--prompt", "Hi"], "MODEL"),
        (["train", "policy.model_name=no-such-model", "data.train.data_path=embedded"], "policy.model_name ="),
    ],
)
def test_an_unknown_model_is_reported_before_torch_is_imported(tmp_path, arguments, key):
    command = [sys.executable, "-c", UP_TO_TORCH, *arguments]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (
        2,
        "",
        f"tandem: error: {key} no-such-model: there is no such folder here, the hub cannot be reached, and the cache holds no "
        "copy from an earlier download. Check the path or the name. Without a connection, give the folder of a model.\n",
    )


def test_inspect_does_not_import_torch_and_shows_the_same_tokens(tmp_path, monkeypatch, capsys):
    ended = tandem("inspect", "embedded", "--json", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "imported: numpy, transformers\n")

    code, out, _ = run_here(monkeypatch, capsys, "inspect", "embedded", "--json")
    assert (code, out) == (0, ended.stdout)


def test_fail_points_is_hidden_from_help_and_can_be_run(monkeypatch, capsys):
    assert "fail-points" not in run_here(monkeypatch, capsys, "--help")[1]
    code, out, _ = run_here(monkeypatch, capsys, "fail-points")
    assert (code, "metrics.write" in out) == (0, True)


# Closed output


def closed_pipe() -> int:
    """The end of a pipe to write to, whose other end is closed."""
    read, write = os.pipe()
    os.close(read)
    return write


@pytest.mark.parametrize("arguments", [["--help"], ["config"], ["config", "--schema"], ["inspect", "embedded"]])
def test_a_short_command_exits_with_141_when_its_output_is_closed(arguments):
    command = [sys.executable, "-m", "tandem", *arguments]
    ended = subprocess.run(command, stdout=closed_pipe(), stderr=subprocess.PIPE, text=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_an_error_keeps_its_exit_code_when_standard_error_is_closed():
    command = [sys.executable, "-m", "tandem", "config", "dpo.beta=1"]
    assert subprocess.run(command, stdout=closed_pipe(), stderr=closed_pipe(), timeout=300).returncode == 2


@pytest.mark.slow
def test_a_run_continues_when_its_output_is_closed(tmp_path):
    command = [sys.executable, "-m", "tandem", "train", "dpo.max_num_steps=1", "dpo.val_at_start=false"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(300) == 0
    assert process.stderr.read() == "tandem: standard output was closed. The run continues without it.\n"
    assert (tmp_path / "runs/default-1/model/config.json").is_file()


def test_an_error_is_wrapped_at_words_on_a_terminal(tmp_path):
    read, write = pty.openpty()
    termios.tcsetwinsize(write, (24, 80))
    command = [sys.executable, "-m", "tandem", "config", "dpo.beta=1"]
    assert subprocess.run(command, stdout=subprocess.PIPE, stderr=write, timeout=300).returncode == 2
    assert os.read(read, 10_000).decode().splitlines() == [
        "tandem: error: command line: unknown key dpo.beta. Did you mean",
        "dpo.reference_policy_kl_penalty? `tandem config` lists all keys.",
    ]


# In this process


def test_the_version_is_printed(monkeypatch, capsys):
    assert run_here(monkeypatch, capsys, "--version") == (0, f"tandem {__version__}\n", "")


def test_the_json_schema_lists_every_section(monkeypatch, capsys):
    code, out, _ = run_here(monkeypatch, capsys, "config", "--schema")
    schema = json.loads(out)
    assert code == 0
    assert {"run", "dpo", "policy", "reference", "data"} <= set(schema["properties"])
    assert schema["additionalProperties"] is False


def test_the_resolved_configuration_is_printed_as_yaml(monkeypatch, capsys, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("run: {seed: 1, name: mine}", encoding="utf-8")
    code, out, err = run_here(monkeypatch, capsys, "config", "-c", str(file), "run.seed=2")
    assert (code, err) == (0, "")
    assert yaml.safe_load(out)["run"] == {"name": "mine", "dir": None, "seed": 2, "deterministic": False, "code": {}}


def test_a_missing_configuration_file_is_reported_with_exit_code_2(monkeypatch, capsys, tmp_path):
    assert run_here(monkeypatch, capsys, "config", "--config", f"{tmp_path}/no.yaml") == (
        2,
        "",
        f"tandem: error: {tmp_path}/no.yaml: no such configuration file.\n",
    )


def test_an_unknown_option_is_reported_with_exit_code_2(monkeypatch, capsys):
    code, out, err = run_here(monkeypatch, capsys, "train", "--nosuch")
    assert (code, out) == (2, "")
    assert "No such option: --nosuch" in err


def test_resume_refuses_a_folder_that_is_not_a_run(monkeypatch, capsys, tmp_path):
    assert run_here(monkeypatch, capsys, "train", "--resume", str(tmp_path)) == (
        4,
        "",
        f"tandem: error: --resume {tmp_path}: {NO_RUN}.\n",
    )


def test_resume_refuses_a_missing_directory(monkeypatch, capsys, tmp_path):
    assert run_here(monkeypatch, capsys, "train", "--resume", f"{tmp_path}/nosuch") == (
        2,
        "",
        f"tandem: error: --resume {tmp_path}/nosuch: there is no such directory.\n",
    )


@pytest.mark.parametrize("command", ["runs", "watch", "report", "export", "eval", "generate", "chat"])
def test_every_command_ends_with_the_same_code_if_a_directory_does_not_exist(monkeypatch, capsys, tmp_path, command):
    more = {"eval": ["embedded"], "generate": ["--prompt", "Hi"]}.get(command, [])
    code, _, error = run_here(monkeypatch, capsys, command, f"{tmp_path}/runs/nothing", *more)
    assert code == 2
    assert "no such" in error


@pytest.mark.parametrize("inside", ["checkpoints", "model"])
def test_resume_refuses_a_folder_inside_a_run_and_suggests_the_run(monkeypatch, capsys, tmp_path, inside):
    (tmp_path / "config.yaml").touch()
    (tmp_path / inside).mkdir()
    assert run_here(monkeypatch, capsys, "train", "--resume", f"{tmp_path}/{inside}") == (
        4,
        "",
        f"tandem: error: --resume {tmp_path}/{inside}: {NO_RUN}. Did you mean --resume {tmp_path}?\n",
    )


def test_resume_refuses_a_checkpoint_and_suggests_its_run(monkeypatch, capsys, tmp_path):
    place = tmp_path / "run/checkpoints/step_2"
    (place / "tensors").mkdir(parents=True)
    for name in ("state.json", "config.yaml"):
        (place / name).write_text("{}")
    assert run_here(monkeypatch, capsys, "train", "--resume", str(place)) == (
        4,
        "",
        f"tandem: error: --resume {place}: a checkpoint, not a run. Give the run directory, and it resumes from its newest "
        "intact checkpoint: --resume "
        f"{tmp_path}/run\n",
    )


@pytest.mark.parametrize("other", [["--fresh"], ["--config", "a.yaml"]])
def test_resume_refuses_another_configuration(monkeypatch, capsys, tmp_path, other):
    assert run_here(monkeypatch, capsys, "train", "--resume", str(tmp_path), *other) == (
        2,
        "",
        "tandem: error: --resume uses the configuration saved in DIR. Leave out --config and --fresh.\n",
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
            "Free some space and run the command again.\n",
        ),
        (OutOfMemoryError("no room"), 6, "tandem: error: no room\n"),
    ],
    ids=["audit", "disk", "interrupt", "disk full", "out of memory"],
)
def test_a_failure_ends_in_one_message_and_its_exit_code(monkeypatch, capsys, failure, code, message):
    def fails(**_):
        raise failure

    monkeypatch.setattr(cli, "app", fails)
    assert run_here(monkeypatch, capsys) == (code, "", message)


@pytest.mark.parametrize(
    ("command", "trains"), [("train", True), ("sweep", True), ("export", False), ("report", False), ("inspect", False)]
)
def test_a_full_disk_speaks_of_checkpoints_only_where_a_command_trains(monkeypatch, capsys, command, trains):
    def fails(**_):
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr(cli, "app", fails)
    kept = "Checkpoints saved before are intact. " if trains else ""
    assert run_here(monkeypatch, capsys, command) == (
        7,
        "",
        f"tandem: error: the disk is full: [Errno 28] No space left on device: 'x'. {kept}Free some space and run the command "
        "again.\n",
    )


@pytest.mark.parametrize(("launcher", "waits"), [({"TORCHELASTIC_RUN_ID": "1"}, [cli.REPORT_SECONDS]), ({}, [])])
def test_a_silent_rank_of_torchrun_lets_the_rank_that_reports_end_first(monkeypatch, capsys, launcher, waits):
    """torchrun stops all ranks as soon as one has ended."""

    def fails(**_):
        raise AlreadyReportedError(3)

    waited: list[float] = []
    monkeypatch.setattr(cli, "app", fails)
    monkeypatch.setattr(cli.time, "sleep", waited.append)
    monkeypatch.setattr(cli, "_exit", sys.exit)
    for name, value in ({"WORLD_SIZE": "2", "RANK": "1"} | launcher).items():
        monkeypatch.setenv(name, value)
    assert run_here(monkeypatch, capsys, "train") == (3, "", "")
    assert waited == waits


def test_a_mesh_for_another_number_of_ranks_is_refused_once_before_heavy_imports():
    ended = tandem("train", "cluster.gpus_per_node=2", "policy.parallel.shard=3")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "tandem: error: policy.parallel: replicate 1 x shard 3 x context 1 needs 3 ranks, and this run has 2. Change "
        "policy.parallel, or start another number of ranks.\nimported: \n"
    )


@pytest.mark.parametrize("failure", [RuntimeError("ours"), OSError(13, "Permission denied"), ValueError("ours")])
def test_internal_errors_keep_their_traceback(monkeypatch, failure):
    def fails(**_):
        raise failure

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(type(failure)) as caught:
        cli.main()
    assert caught.value is failure


def test_every_kind_of_error_has_a_different_exit_code_except_internal_ones():
    kinds = [kind for kind in TandemError.__subclasses__() if kind.exit_code != 1]
    assert sorted(kind.exit_code for kind in kinds) == [2, 3, 4, 5, 6, 7, 143]
