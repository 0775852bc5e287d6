"""`tandem launch slurm`: the batch script, its time limits, and values that a shell or sbatch could misread."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_stub import JOB_ID, directives, install

from tandem.cli import main as cli
from tandem.config.load import load_config
from tandem.errors import ConfigError
from tandem.launch.slurm_script import SlurmOptions, batch_script, lead_seconds, parse_extra, time_limit

BASE = ["cluster.gpus_per_node=2"]


def script(*overrides: str, folder: Path = Path("/work dir"), **options) -> str:
    given = [*BASE, *overrides]
    return batch_script(load_config(None, given), given, SlurmOptions(**{"job_name": "tandem", **options}), folder)


@pytest.fixture
def launch(monkeypatch, capsys, tmp_path):
    """Runs `tandem launch slurm` in an empty folder. Returns the exit code, standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tandem", "launch", "slurm", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    monkeypatch.chdir(tmp_path)
    return run


def test_the_script_asks_for_nodes_gpus_and_time():
    found = directives(script("cluster.num_nodes=4", time="1-00:00:00", partition="a100", account="lab"))
    assert found == {
        "job-name": "tandem",
        "partition": "a100",
        "account": "lab",
        "nodes": "4",
        "ntasks-per-node": "2",
        "gpus-per-node": "2",
        "time": "1-00:00:00",
        "signal": "USR1@600",
        "output": "slurm-%j.log",
        "open-mode": "append",
        "requeue": "",
    }


def test_the_run_saves_before_the_signal_which_comes_before_the_time_limit():
    """4 hours: the signal comes 10 minutes before the end, and the run stops by its own clock 20 minutes before."""
    assert "checkpointing.checkpoint_must_save_by=00:03:40:00" in script(time="04:00:00")
    assert "checkpointing.checkpoint_must_save_by" not in script()
    assert "signal" not in directives(script())
    assert [lead_seconds(seconds) for seconds in (300, 3600, 7200, 86400)] == [60, 180, 360, 600]
    for seconds in range(300, 90000, 77):
        assert 0 < 2 * lead_seconds(seconds) < seconds


def test_a_limit_of_the_users_is_kept_if_it_fits():
    kept = script("checkpointing.checkpoint_must_save_by=01:00:00", time="04:00:00")
    assert kept.count("checkpoint_must_save_by=") == 1
    with pytest.raises(ConfigError) as refused:
        script("checkpointing.checkpoint_must_save_by=04:00:00", time="04:00:00")
    assert str(refused.value) == (
        "checkpointing.checkpoint_must_save_by = 04:00:00 is not below --time 04:00:00: the job would end before the run saves. "
        "Lower it, or leave it out: it is then derived from --time."
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("90:30", 5430), ("04:00:00", 14400), ("1-12", 129600), ("1-12:30", 131400), ("2-00:00:01", 172801)],
)
def test_time_limits_are_read_as_sbatch_reads_them(text, seconds):
    assert time_limit(text) == seconds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "four hours",
            "--time 'four hours': not a time limit. Write minutes, HH:MM:SS or D-HH:MM:SS, such as 04:00:00.",
        ),
        ("1:2:3:4", "--time '1:2:3:4': not a time limit. Write minutes, HH:MM:SS or D-HH:MM:SS, such as 04:00:00."),
        ("2", "--time 2: 120 seconds. A run needs time to load its model and to save: give at least 5 minutes."),
    ],
)
def test_other_time_limits_are_refused(text, message):
    with pytest.raises(ConfigError) as refused:
        time_limit(text)
    assert str(refused.value) == message


def test_other_options_of_sbatch_are_added_and_the_log_may_be_elsewhere():
    extra = parse_extra(["--qos=high", "exclusive", "output=my log-%j.txt"])
    written = script(extra=extra)
    assert '#SBATCH --output="my log-%j.txt"' in written
    found = directives(written)
    assert (found["qos"], found["exclusive"], found["gpus-per-node"]) == ("high", "", "2")
    assert written.count("--requeue") == written.count('--output="my') == 1


@pytest.mark.parametrize(
    ("given", "of_node"),
    [("gpu:a100:2", None), ("gpu:2", None), ("gpu:a100:1,gpu:b200:1,nvme:4", None), ("nvme:4", "2")],
)
def test_gres_may_name_the_type_of_the_gpus(given, of_node):
    found = directives(script(extra=parse_extra([f"gres={given}"])))
    assert (found["gres"], found.get("gpus-per-node")) == (given, of_node)


@pytest.mark.parametrize(("given", "number"), [("gpu:a100:8", "8 GPUs"), ("gpu", "1 GPU"), ("gpu:a100", "1 GPU")])
def test_gres_with_another_number_of_gpus_is_refused(given, number):
    with pytest.raises(ConfigError) as refused:
        script(extra=parse_extra([f"gres={given}"]))
    assert str(refused.value) == (
        f"--sbatch gres asks for {number} per node, but cluster.gpus_per_node = 2. Give both the same number."
    )


TASKS = "the script starts one task per GPU. Set cluster.num_nodes and cluster.gpus_per_node instead."
LIMIT = "the run must know its time limit to save before it. Use --time LIMIT instead."


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nodes=4", "the script asks for as many nodes as the run uses. Set cluster.num_nodes instead."),
        ("ntasks-per-node=1", TASKS),
        ("ntasks=1", TASKS),
        ("gpus=4", TASKS),
        (
            "gpus-per-node=4",
            "the script asks for as many GPUs as the run uses. Set cluster.gpus_per_node instead; to name a type of GPU, use "
            "--sbatch gres=gpu:TYPE:N.",
        ),
        ("--time=01:00:00", LIMIT),
        ("time-min=60", LIMIT),
        ("signal=TERM@60", "the script asks for a signal before the time limit. Use --time LIMIT instead."),
        ("requeue", "the script contains it already. Leave it out."),
        (
            "no-requeue",
            "the script requeues a job that has saved and stopped. Leave it out, and end the job with scancel.",
        ),
        ("job-name=x", "it has its own option. Use --job-name NAME instead."),
        ("partition=x", "it has its own option. Use --partition NAME instead."),
        ("account=x", "it has its own option. Use --account NAME instead."),
    ],
)
def test_an_option_that_the_script_sets_is_refused_before_a_file_is_written(launch, tmp_path, given, message):
    name = given.removeprefix("--").partition("=")[0]
    assert launch(*BASE, "--sbatch", given) == (2, "", f"tandem: error: --sbatch {name}: {message}\n")
    assert list(tmp_path.iterdir()) == []


def test_an_option_that_is_given_twice_is_refused():
    with pytest.raises(ConfigError) as refused:
        parse_extra(["qos=high", "--qos=low"])
    assert str(refused.value) == "--sbatch qos is given twice. Leave out one of them."


def test_a_mesh_that_the_ranks_cannot_form_is_refused_as_in_training(launch, tmp_path):
    code, out, err = launch("cluster.num_nodes=2", *BASE, "policy.parallel.shard=3")
    assert (code, out) == (2, "")
    assert err == (
        "tandem: error: policy.parallel: replicate 1 x shard 3 x context 1 needs 3 ranks, and this run has 4. Change "
        "policy.parallel, or start another number of ranks.\n"
    )
    assert list(tmp_path.iterdir()) == []
    assert launch("cluster.num_nodes=2", *BASE, "policy.parallel.shard=4")[0] == 0


def test_torch_is_not_imported(tmp_path):
    code = "import sys\nfrom tandem.cli.main import main\ntry: main()\nfinally: print('torch' in sys.modules, file=sys.stderr)"
    command = [sys.executable, "-c", code, "launch", "slurm", *BASE]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=dict(os.environ), timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "False\n")


def test_the_script_is_not_written_into_another_folder_by_mistake(launch, tmp_path):
    assert launch(*BASE, "--job-name", "a/b") == (
        2,
        "",
        "tandem: error: --job-name 'a/b': a name, not a path. Leave out the slash; --out FILE says where the script is "
        "written.\n",
    )
    assert launch(*BASE, "--out", "missing/x.sbatch") == (
        2,
        "",
        "tandem: error: --out missing/x.sbatch: there is no folder missing. Create it first.\n",
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given", ["a b=1", "=x", "Q$(x)=1", "x\ny=1", ""])
def test_a_name_that_is_not_an_option_of_sbatch_is_refused(given):
    with pytest.raises(ConfigError, match="not an option of sbatch"):
        parse_extra([given])


@pytest.mark.parametrize("value", ["a\n#SBATCH --account=other", "it's", 'a"b', "a\\b", "\x1b[0m"])
def test_a_value_that_sbatch_would_misread_is_refused(value):
    for options in ({"partition": value}, {"job_name": value}, {"extra": {"comment": value}}):
        with pytest.raises(ConfigError, match="sbatch cannot read"):
            script(**options)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["cluster.gpus_per_node=all"],
            "cluster.gpus_per_node = all: a batch script must name the number of GPUs per node, which this machine cannot know. "
            "Set cluster.gpus_per_node=N.",
        ),
        (
            ["cluster.launcher=ray"],
            "cluster.launcher = ray, but srun starts the ranks of a Slurm job. Leave out the key.",
        ),
    ],
)
def test_a_configuration_that_slurm_cannot_run_is_refused(overrides, message):
    with pytest.raises(ConfigError) as refused:
        script(*overrides)
    assert str(refused.value) == message


HOSTILE = [
    "run.dir='a b/$(touch HACKED)'",
    "run.name=x",
    "policy.tokenizer.chat_template='`touch HACKED` \"$HOME\" \\n ; # !'",
    "reference.cache_dir='first line\nsecond $(touch HACKED)'",
]


def test_every_value_reaches_the_ranks_as_given(launch, tmp_path, monkeypatch):
    """The script runs in bash, with Slurm's programs replaced by stubs and Python by a program that ends at once."""
    folder = tmp_path / "it's a $(touch HACKED) folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{install(tmp_path / 'bin')}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", shutil.which("true"))
    code, out, err = launch("--submit", "--time", "30", *BASE, *HOSTILE)
    assert (code, out, err) == (0, f"x.sbatch is written\nSubmitted batch job {JOB_ID}\n", "")
    assert [path.name for path in folder.rglob("*HACKED*")] == []
    (step,) = [json.loads(line) for line in (folder / "srun.jsonl").read_text().splitlines()]
    limit = "checkpointing.checkpoint_must_save_by=00:00:27:00"
    assert step["command"] == [shutil.which("true"), "-P", "-m", "tandem", "train", *BASE, *HOSTILE, limit]
    assert step["codes"] == [0, 0]
    assert {path.name for path in (folder / f"slurm-{JOB_ID}").iterdir()} == {"rank-0.log", "rank-1.log"}


# Ends at once if the job was requeued; otherwise it waits for SIGTERM, saves and stops.
TASK = """#!/bin/sh
[ "$SLURM_RESTART_COUNT" = 0 ] || exit 0
trap 'exit 143' TERM
touch "started-$SLURM_PROCID"
while :; do sleep 0.02; done
"""


@pytest.mark.parametrize(
    ("variable", "codes"),
    [("PREEMPT_WHEN", [[143, 143], [0, 0]]), ("CANCEL_WHEN", [[143, 143]])],
    ids=["preempted", "cancelled"],
)
def test_a_preempted_job_is_requeued_and_a_cancelled_one_is_not(launch, tmp_path, monkeypatch, variable, codes):
    """Preemption sends SIGTERM to the ranks; scancel also to the script."""
    monkeypatch.setenv("PATH", f"{install(tmp_path / 'bin')}:{os.environ['PATH']}")
    monkeypatch.setenv(variable, "started-1")
    task = tmp_path / "task"
    task.write_text(TASK)
    task.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(task))
    assert launch("--submit", *BASE, "run.name=x")[0] == 0
    steps = [json.loads(line) for line in (tmp_path / "srun.jsonl").read_text().splitlines()]
    assert [step["codes"] for step in steps] == codes


SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("overrides", [[], HOSTILE], ids=["plain", "hostile"])
def test_shellcheck_finds_nothing(tmp_path, overrides):
    place = tmp_path / "job.sbatch"
    place.write_text(script(*overrides, folder=tmp_path / "a b's", time="04:00:00"))
    done = subprocess.run([SHELLCHECK, str(place)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_script_is_written_next_to_nothing_else(launch, tmp_path):
    assert launch(*BASE, "run.name=mine") == (0, "mine.sbatch trains the run: submit it with sbatch mine.sbatch\n", "")
    assert launch(*BASE, "run.name=mine", "--time", "60")[0] == 0  # its own script is replaced
    assert "#SBATCH --time=60" in (tmp_path / "mine.sbatch").read_text()
    (tmp_path / "notes.txt").write_text("mine")
    assert launch(*BASE, "--out", "notes.txt") == (
        2,
        "",
        "tandem: error: --out notes.txt: it exists, and tandem did not write it. Choose another file.\n",
    )


def test_a_full_disk_has_its_own_exit_code(launch, tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert launch(*BASE, "--out", "mine.sbatch") == (
        7,
        "",
        "tandem: error: the disk is full: [Errno 28] No space left on device: 'mine.sbatch'. Free some space and run the "
        "command again.\n",
    )
    assert list(tmp_path.iterdir()) == []


def test_errors_are_reported_before_the_job_waits_in_a_queue(launch, tmp_path):
    code, _, err = launch(*BASE, "data.train.data_path=missing.jsonl")
    assert (code, "missing.jsonl" in err) == (3, True)
    code, _, err = launch(*BASE, "cluster.num_node=2")
    assert (code, "Did you mean cluster.num_nodes?" in err) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_sbatch_is_needed_to_submit(launch, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch(*BASE, "run.name=tandem", "--submit") == (
        2,
        "tandem.sbatch is written\n",
        "tandem: error: sbatch is not on the PATH, so tandem.sbatch was not submitted. Submit it where Slurm is installed.\n",
    )
    refusing = tmp_path / "sbatch"
    refusing.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: x' >&2\nexit 1\n")
    refusing.chmod(0o755)
    code, _, err = launch(*BASE, "run.name=tandem", "--submit")
    assert (code, err) == (
        1,
        "tandem: error: sbatch refused tandem.sbatch: sbatch: error: invalid partition specified: x. Correct the options.\n",
    )
