"""A sweep with a stub in place of training: what is started, skipped, resumed and reported."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from run_directories import make_run

import tandem
from tandem.api.values import texts_of
from tandem.cli import main as cli
from tandem.errors import CheckpointError, ConfigError, DataError, StoppedError
from tandem.page.comparison import how_clear
from tandem.page.write import run_page, write_report
from tandem.report.reporter import Reporter
from tandem.run_numbers import Interval
from tandem.storage.cache import is_export
from tandem.sweeping import children, parallel
from tandem.sweeping.plan import Reading, make_plan
from tandem.sweeping.records import SweepResult, SweepRun, Tracked
from tandem.sweeping.show import show_result
from tandem.sweeping.sweep import sweep
from tandem.training.run.lock import locked

pytestmark = pytest.mark.usefixtures("of_a_command")

STUB = Path(__file__).parents[2] / "training_stub.py"
NO_MATCH = "it takes two or more finished runs, all validated on the same pairs."


@pytest.fixture(autouse=True)
def stubbed(tmp_path, monkeypatch):
    monkeypatch.setattr(children, "COMMAND", (sys.executable, str(STUB)))
    monkeypatch.setattr(children, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(parallel, "visible_gpus", lambda: None)  # a CPU, without importing torch
    monkeypatch.setattr("tandem.sweeping.sweep._check_data", lambda *_: None)  # see test_data_check.py
    monkeypatch.setenv("STUB_NOTES", str(tmp_path / "notes.jsonl"))
    monkeypatch.chdir(tmp_path)


def started(folder: Path) -> list[str]:
    """The runs that were started, in order."""
    notes = folder / "notes.jsonl"
    return [json.loads(line)["run"] for line in notes.read_text().splitlines()] if notes.exists() else []


def command(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["tandem", "sweep", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    code = ended.value.code
    assert code is None or isinstance(code, int)
    return code or 0, said.out, said.err


def test_python_gets_the_same_sweep_as_the_command(tmp_path):
    planned = tandem.sweep(["run.seed=1,2", "dpo.max_num_steps=5"], out="swept", dry_run=True)
    assert [(run.name, run.status) for run in planned.runs] == [("seed-1", "planned"), ("seed-2", "planned")]
    assert not Path("swept").exists()
    done = tandem.sweep(["run.seed=1,2", "dpo.max_num_steps=5"], out=Path("swept"))
    assert [run.status for run in done.runs] == ["finished", "finished"]
    assert started(tmp_path) == ["seed-1", "seed-2"]
    assert done.page == Path("swept/comparison.html")


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ({"run.seed": [1, 2], "dpo": {"max_num_steps": 50}}, ["run.seed=1,2", "dpo.max_num_steps=50"]),
        ({"run.seed": range(2), "data.train": "a,b.jsonl"}, ["run.seed=0,1", "data.train='a,b.jsonl'"]),
        ({"policy.optimizer.kwargs.lr": np.array([1e-6, 3e-6])}, ["policy.optimizer.kwargs.lr=1e-06,3e-06"]),
        (
            {"run.seed": [1], "policy.lora.enabled": [False, True]},
            ["run.seed=choice(1)", "policy.lora.enabled=false,true"],
        ),
        ({"policy.lora.target_modules": [["q"], ["q", "v"]]}, ["policy.lora.target_modules=[q],[q,v]"]),
        (["run.seed=1,2", {"dpo.val_period": None}], ["run.seed=1,2", "dpo.val_period=null"]),
    ],
)
def test_a_list_in_a_dict_holds_the_values_to_try(given, texts):
    assert texts_of(given) == texts


def test_a_dict_and_texts_plan_the_same_runs():
    runs = [
        [(run.name, run.values) for run in tandem.sweep(given, out="swept", dry_run=True).runs]
        for given in ({"run.seed": [1, 2], "dpo.max_num_steps": 5}, ["run.seed=1,2", "dpo.max_num_steps=5"])
    ]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"run.seed": []}, "run.seed = []: no values to try. Give one or more; an empty list as a value is [[]]."),
        (
            {"run.seed": {1, 2}},
            "run.seed: a value of type set. Give a number, a text, true or false, or a list of them.",
        ),
    ],
)
def test_values_of_a_dict_that_cannot_be_tried(given, message):
    with pytest.raises(ConfigError) as error:
        tandem.sweep(given, dry_run=True)
    assert str(error.value) == message


def test_a_function_without_a_file_cannot_be_swept():
    namespace = {"__name__": "no_such_module"}
    exec("def mine(pairs, *, beta): return beta * pairs.ratios.margin", namespace)
    with pytest.raises(ConfigError) as error:
        tandem.sweep({"dpo.preference_loss": namespace["mine"], "run.seed": [1, 2]}, dry_run=True)
    assert str(error.value) == (
        "dpo.preference_loss = mine: this function has no file, and the runs of a sweep are trained by other processes. Put it "
        "into a file, and give FILE.py:mine."
    )


def test_the_table_has_no_results_of_a_run_that_failed(tmp_path, capsys):
    """A run that failed in its first step may have been validated before."""
    accuracy, tracked = Interval(0.5, 0.4, 0.6), Tracked("validation-default_loss", 0.6931, 0)
    ended = SweepRun(
        name="a", path=tmp_path, values=(), status="finished", log=tmp_path, accuracy=accuracy, tracked=tracked
    )
    runs = (ended, replace(ended, name="b", status="failed"))
    show_result(SweepResult(folder=tmp_path, swept=("run.seed",), runs=runs, best=ended), Reporter("normal"))
    out = capsys.readouterr().out
    assert "same accuracy" not in out
    rows = [line.split() for line in out.splitlines()]
    assert ["*", "a", "50.0", "%", "40.0", "%", "to", "60.0", "%", "0.6931", "0"] in rows
    assert ["b", "failed", "-", "-", "-"] in rows


def test_runs_that_are_equally_good_are_said_to_be():
    assert how_clear(is_clear=False, num_equal=1) == (
        "1 other run has the same accuracy; the run with the largest margin before scaling by beta is marked."
    )
    assert how_clear(is_clear=False, num_equal=2) == (
        "2 other runs have the same accuracy; the run with the largest margin before scaling by beta is marked."
    )


def test_a_sweep_trains_every_run_and_ends_with_a_table_and_a_page(tmp_path, monkeypatch, capsys):
    code, out, err = command(monkeypatch, capsys, "run.seed=1,2", "dpo.max_num_steps=4")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "Sweep of 2 runs in runs/sweep-1"
    assert [line.split(" in ")[0] for line in lines[1:5]] == [
        *("seed-1: started", "seed-1: finished"),
        *("seed-2: started", "seed-2: finished"),
    ]
    assert lines[5:] == [
        "",
        "Swept: run.seed",
        "run       accuracy     95 % interval  validation-default loss  at step",
        "  seed-1    51.0 %  41.3 % to 60.6 %                   0.6800        4",
        "* seed-2    52.0 %  42.3 % to 61.5 %                   0.6800        4",
        "* best accuracy: 52.0 %. Its interval overlaps with that of another run: the difference may be chance.",
        "",
        "runs/sweep-1/comparison.html compares the runs: open it in a browser.",
    ]
    assert sorted(path.name for path in (tmp_path / "runs/sweep-1").iterdir()) == [
        *("comparison.html", "lock", "logs", "seed-1", "seed-2", "sweep.json")
    ]
    assert "seed-2" in (tmp_path / "runs/sweep-1/comparison.html").read_text()
    assert (tmp_path / "runs/sweep-1/logs/seed-1.log").read_text().endswith("step 4/4  loss 0.5\nDone.\n")


def test_json_holds_the_result_and_nothing_else_is_on_standard_output(monkeypatch, capsys):
    code, out, err = command(monkeypatch, capsys, "run.seed=1,2", "--json")
    found = json.loads(out)
    assert (code, found["best"], found["swept"]) == (0, "seed-2", ["run.seed"])
    assert found["runs"][0]["tracked"] == {"metric": "validation-default_loss", "value": pytest.approx(0.68), "step": 4}
    assert found["runs"][1]["values"] == ["run.seed=2"]
    assert "seed-1: started" in err


def test_a_finished_sweep_trains_nothing_and_shows_its_result_again(tmp_path, monkeypatch, capsys):
    command(monkeypatch, capsys, "run.seed=1,2")
    code, out, _ = command(monkeypatch, capsys, "run.seed=1,2")
    assert (code, out.splitlines()[0]) == (0, "Sweep of 2 runs in runs/sweep-1, of which 2 are finished")
    assert "* seed-2" in out
    assert started(tmp_path) == ["seed-1", "seed-2"]


def test_another_sweep_gets_the_next_directory(tmp_path):
    assert sweep(["run.seed=1,2"]).folder == Path("runs/sweep-1")
    assert sweep(["run.seed=1,3"]).folder == Path("runs/sweep-2")
    assert sweep(["run.seed=1,2"]).folder == Path("runs/sweep-1")
    assert started(tmp_path) == ["seed-1", "seed-2", "seed-1", "seed-3"]


def test_quiet_prints_the_result_only(monkeypatch, capsys):
    code, out, err = command(monkeypatch, capsys, "run.seed=1,2", "--quiet")
    assert (code, out.splitlines()[:2], err) == (0, ["", "Swept: run.seed"], "")


def test_a_dry_run_checks_parallel_runs_and_trains_none(tmp_path, monkeypatch, capsys):
    code, out, _ = command(monkeypatch, capsys, "run.seed=1,2", "dpo.max_num_steps=3", "--dry-run", "--parallel", "2")
    assert (code, out.splitlines()[0]) == (0, "--parallel 2 has no effect on a dry run, which trains nothing.")
    several = ("run.seed=1,2", "cluster.gpus_per_node=2", "--dry-run", "--parallel", "2")
    code, _, err = command(monkeypatch, capsys, *several)
    assert (code, err) == (
        2,
        "tandem: error: --parallel 2: a run with cluster.gpus_per_node above 1 is trained alone. Leave out one of them.\n",
    )
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_lists_the_runs_and_writes_nothing(tmp_path, monkeypatch, capsys):
    code, out, _ = command(monkeypatch, capsys, "run.seed=1,2", "dpo.max_num_steps=3", "--dry-run")
    assert code == 0
    assert out.splitlines() == [
        "2 runs in runs/sweep-1, of which 0 are finished. Nothing is trained.",
        "",
        "run     settings",
        "seed-1  run.seed=1",
        "seed-2  run.seed=2",
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_or_crashes_is_reported_and_the_others_are_trained(tmp_path, monkeypatch, capsys):
    code, out, err = command(monkeypatch, capsys, "run.seed=13,14,3", "--out", "s")
    assert code == 1
    assert (
        "warning: seed-13 failed: step 2: the loss is not finite.\nIts log is s/logs/seed-13.log. The sweep continues."
    ) in out
    assert "warning: seed-14 failed: killed by SIGKILL; the last line of its log: Segmentation fault\n" in out
    assert "  seed-13    failed" in out
    assert NO_MATCH in out
    assert err == (
        "tandem: error: 2 of 3 runs failed: seed-13, seed-14. Their logs are in s/logs. The same command retries them. "
        "Before that, fix what is reported for seed-13.\n"
    )
    assert is_export(tmp_path / "s/seed-3/model")
    command(monkeypatch, capsys, "run.seed=13,14,3", "--out", "s")
    assert started(tmp_path) == ["seed-13", "seed-14", "seed-3", "seed-13", "seed-14"]


def test_a_run_that_would_fail_again_is_not_said_to_be_retried(monkeypatch, capsys):
    code, _, err = command(monkeypatch, capsys, "run.seed=12,3", "--out", "s")
    assert (code, err) == (
        1,
        "tandem: error: 1 of 2 runs failed: seed-12. Their logs are in s/logs. The same command would fail in the same way: fix "
        "what the messages report first.\n",
    )
    _, _, err = command(monkeypatch, capsys, "run.seed=14,3", "--out", "t")
    assert err.endswith("1 of 2 runs failed: seed-14. Their logs are in t/logs. The same command retries them.\n")


def test_without_any_result_there_is_no_page(tmp_path):
    result = sweep(["run.seed=12,13,14"], out=tmp_path / "s")
    assert (result.page, result.best, [run.status for run in result.runs]) == (None, None, ["failed"] * 3)
    assert [run.exit_code for run in result.runs] == [3, 5, -signal.SIGKILL]


def listed(monkeypatch, capsys, folder: str) -> list[str]:
    monkeypatch.setattr(sys, "argv", ["tandem", "runs", folder])
    with pytest.raises(SystemExit):
        cli.main()
    return capsys.readouterr().out.splitlines()


def test_the_list_of_runs_says_what_happened_to_those_that_wrote_nothing(tmp_path, monkeypatch, capsys):
    failed = [
        "seed-12: failed: pairs.jsonl has no rows. Its log is s/logs/seed-12.log.",
        "seed-13: failed: step 2: the loss is not finite. Its log is s/logs/seed-13.log.",
        "seed-14: failed: killed by SIGKILL; the last line of its log: Segmentation fault. Its log is s/logs/seed-14.log.",
    ]
    sweep(["run.seed=12,13,14"], out="s")
    capsys.readouterr()
    assert listed(monkeypatch, capsys, "s") == failed
    (tmp_path / "s/logs/seed-14.log").unlink()
    assert listed(monkeypatch, capsys, "s")[2] == "seed-14: not started."
    (tmp_path / "s/logs/seed-13.log").unlink()
    (tmp_path / "s/logs/seed-13.log").symlink_to(tmp_path / "s/logs/seed-12.log")
    assert listed(monkeypatch, capsys, "s")[1] == "seed-13: not started."
    with locked(tmp_path / "s"):
        (tmp_path / "s/logs/seed-14.log").touch()
        assert listed(monkeypatch, capsys, "s")[2] == "seed-14: no results yet. Its log is s/logs/seed-14.log."
    (tmp_path / "s/sweep.json").write_text(json.dumps({"runs": [{"name": n} for n in ("../a", "b\0", "c" * 999, 4)]}))
    assert listed(monkeypatch, capsys, "s") == ["s: no runs. `tandem train` starts one."]
    sweep(["run.seed=12,3"], out="t")
    capsys.readouterr()
    lines = listed(monkeypatch, capsys, "t")
    assert lines[1].startswith("seed-3  finished")
    assert lines[-2:] == [
        "Runs of this sweep without results",
        "  seed-12: failed: pairs.jsonl has no rows. Its log is t/logs/seed-12.log.",
    ]


def test_a_run_that_failed_after_it_wrote_results_is_shown_as_failed_until_it_is_continued(
    tmp_path, monkeypatch, capsys
):
    for seed in (13, 14):
        make_run(tmp_path / f"s/.seed-{seed}", finished=False)  # moved in place when the sweep has its directory
    sweep(["run.seed=13,14,3"], out="s")
    for seed in (13, 14):
        (tmp_path / f"s/.seed-{seed}").rename(tmp_path / f"s/seed-{seed}")
    capsys.readouterr()
    lines = listed(monkeypatch, capsys, "s")
    assert [line.split()[:2] for line in lines[1:4]] == [
        ["seed-3", "finished"],
        ["seed-13", "failed"],
        ["seed-14", "failed"],
    ]
    assert lines[-3:] == [
        "Runs that failed",
        "  seed-13: failed: step 2: the loss is not finite. Its log is s/logs/seed-13.log.",
        "  seed-14: failed: killed by SIGKILL; the last line of its log: Segmentation fault. Its log is s/logs/seed-14.log.",
    ]
    found = tandem.open_run("s/seed-14")
    assert (found.status, found.error) == (
        "failed",
        "killed by SIGKILL; the last line of its log: Segmentation fault",
    )
    assert "This run failed</strong> at step 10 of 10: killed by SIGKILL" in run_page(found)
    with (tmp_path / "s/logs/seed-14.log").open("a") as log:  # the next attempt
        log.write("step 3/4\n")
    assert (tandem.open_run("s/seed-14").status, tandem.open_run("s/seed-14").error) == ("stopped", None)


# Signals


def is_training(log: Path) -> bool:
    return log.exists() and "step 2/4" in log.read_text()


def send(pid: int, number: int) -> bool:
    os.kill(pid, number)
    return True


@pytest.fixture
def at_step_2(monkeypatch):
    """Call a function when the newest step of a run is 2, until the function returns a true value."""

    def register(act) -> None:
        done = []

        def progress(step) -> str:
            if step == (2, 4) and not any(done):
                done.append(act())
            return ""

        monkeypatch.setattr("tandem.sweeping.sweep._progress", progress)

    return register


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal_stops_the_run_and_the_command_that_continues_is_printed(
    tmp_path, monkeypatch, capfd, at_step_2, number, code
):
    monkeypatch.setattr(sys, "argv", ["tandem", "sweep", "run.seed=1,99,2", "--out", "s"])
    monkeypatch.setenv("STUB_SECONDS", "0.05")
    at_step_2(lambda: is_training(tmp_path / "s/logs/seed-99.log") and send(os.getpid(), number))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    assert (tmp_path / "s/logs/seed-99.log").read_text().endswith("saved\n")
    said = capfd.readouterr()
    lines = said.out.splitlines()
    assert lines[-2] == "1 of 3 runs is finished. The same command continues the sweep:"
    assert lines[-1].endswith(" sweep --out s run.seed=1,99,2")
    assert said.err.splitlines() == [
        "tandem: stopping after the current step is finished and saved. A second signal stops at once.",
        f"tandem: stopped by {number.name}",
    ]
    assert started(tmp_path) == ["seed-1", "seed-99"]


CODE = """
import sys
from tandem.cli.main import main
from tandem.sweeping import children, parallel, sweep
children.COMMAND, children.POLL_SECONDS = (sys.executable, {stub!r}), 0.01
parallel.visible_gpus = lambda: None
sweep._check_data = lambda *_: None
main()
"""


def start_command(*arguments: str) -> subprocess.Popen[str]:
    """Start `tandem sweep` in a process of its own, which can be killed."""
    command = [sys.executable, "-c", CODE.format(stub=str(STUB)), "sweep", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))


def wait_for(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "still waiting"
        time.sleep(0.01)


def test_the_run_stops_when_the_sweep_is_killed_and_the_same_command_continues(tmp_path, at_step_2):
    process = start_command("run.seed=1,99", "--out", "s")
    log = tmp_path / "s/logs/seed-99.log"
    wait_for(lambda: is_training(log))
    process.kill()
    process.communicate(timeout=60)
    wait_for(lambda: log.read_text().endswith("saved\n"))
    at_step_2(lambda: send(os.getpid(), signal.SIGINT))
    with pytest.raises(StoppedError):
        sweep(["run.seed=1,99"], out="s")
    assert started(tmp_path) == ["seed-1", "seed-99", "seed-99"]


def test_a_run_whose_process_is_still_saving_is_waited_for(tmp_path, monkeypatch):
    looked = []

    def status(run: Path) -> str:
        looked.append(run.name)
        return "running" if len(looked) < 4 else "stopped"

    monkeypatch.setattr(children, "status_of", status)
    assert not sweep(["run.seed=1,2"], out="s").failed
    assert looked == ["seed-1"] * 4 + ["seed-2"]


def test_a_run_that_stays_in_use_is_refused(monkeypatch):
    monkeypatch.setattr(children, "status_of", lambda run: "running")
    monkeypatch.setattr(children, "MAX_WAIT_SECONDS", 0.05)
    assert refusal(CheckpointError, "run.seed=1,2", out="s") == (
        "s/seed-1 is in use by another process. Wait for it, then repeat the same command."
    )


def test_a_run_that_is_stopped_from_outside_stops_the_sweep(tmp_path, at_step_2):
    at_step_2(lambda: send(json.loads((tmp_path / "notes.jsonl").read_text())["pid"], signal.SIGTERM))
    with pytest.raises(StoppedError, match="stopped by a signal to the process of seed-99"):
        sweep(["run.seed=99,2"], out="s")
    assert started(tmp_path) == ["seed-99"]


def test_several_at_a_time_start_one_after_another(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("STUB_SECONDS", "0.5")
    code, out, _ = command(monkeypatch, capsys, "run.seed=1,2,3", "--out", "s", "--parallel", "3")
    assert code == 0
    notes = [json.loads(line) for line in (tmp_path / "notes.jsonl").read_text().splitlines()]
    # Each begins after the first step of the one before, and they overlap.
    assert all(later["time"] - earlier["time"] >= 0.5 for earlier, later in pairwise(notes))
    assert out.index("seed-2: started") < out.index("seed-1: finished")


# What is refused before anything is trained


def refusal(kind: type[Exception], *overrides: str, **options) -> str:
    with pytest.raises(kind) as refused:
        sweep(overrides, **options)
    return str(refused.value)


def test_every_configuration_is_checked_before_the_first_run(tmp_path):
    message = refusal(ConfigError, "run.seed=1,2", "dpo.max_num_steps=5,-3", out="s")
    assert message.startswith("run 2 of 4, run.seed=1 dpo.max_num_steps=-3: command line: dpo.max_num_steps = -3: ")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_names_the_run(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    assert refusal(DataError, "data.train=a.jsonl,b.jsonl") == (
        "run 2 of 2, data.train=b.jsonl: b.jsonl: no such file or folder, and not the name of a hub dataset (org/name)."
    )


def test_two_runs_with_the_same_settings_are_refused():
    assert refusal(ConfigError, "policy.optimizer.kwargs.lr=1e-4,0.0001") == (
        "policy.optimizer.kwargs.lr=0.0001 and policy.optimizer.kwargs.lr=0.0001 are the same configuration. Leave out one of "
        "them."
    )


@pytest.mark.parametrize("text", ["run.dir=x", "checkpointing.checkpoint_dir=x"])
def test_a_directory_for_all_runs_is_refused(text):
    assert refusal(ConfigError, "run.seed=1,2", text).startswith(f"override '{text}': each run ")


def test_the_directory_of_a_file_is_replaced_by_that_of_the_sweep(tmp_path):
    (tmp_path / "run.yaml").write_text("run:\n  dir: elsewhere\ndata:\n  train: embedded\n")
    result = sweep(["run.seed=1,2"], config="run.yaml", dry_run=True)
    assert result.runs[0].path == Path("runs/sweep-1/seed-1")


def test_settings_of_a_file_that_hold_for_one_run_are_refused(tmp_path):
    text = "checkpointing:\n  checkpoint_must_save_by: 01:00:00\ndata:\n  train: embedded\n"
    (tmp_path / "run.yaml").write_text(text)
    assert refusal(ConfigError, "run.seed=1,2", config="run.yaml") == (
        "checkpointing.checkpoint_must_save_by = 01:00:00: this limit is of a single run; a signal, "
        "such as SIGTERM, stops a sweep. Set checkpointing.checkpoint_must_save_by=null."
    )


def test_an_error_of_the_command_does_not_name_a_run(tmp_path):
    missing = refusal(ConfigError, "run.seed=1,2", config=str(tmp_path / "no.yaml"))
    assert missing == f"{tmp_path}/no.yaml: no such configuration file."
    assert refusal(ConfigError, "run.seed=1,2", "dpo.max_num_steps=x").startswith("command line: dpo.max_num_steps = ")
    assert refusal(DataError, "run.seed=1,2", "data.train=no.jsonl").startswith("no.jsonl: no such file")
    assert refusal(DataError, "data.train=no.jsonl,embedded").startswith(
        "run 1 of 2, data.train=no.jsonl: no.jsonl: no "
    )
    assert refusal(ConfigError, "run.seed=1,x").startswith("run 2 of 2, run.seed=x: ")


def test_a_directory_with_another_sweep_is_refused(monkeypatch, capsys):
    command(monkeypatch, capsys, "run.seed=1,2", "--out", "s")
    code, out, err = command(monkeypatch, capsys, "run.seed=1,2,3", "--out", "s")
    assert (code, out) == (4, "")
    first, second = err.splitlines()
    assert first == (
        "tandem: error: s holds another sweep. Choose another directory with --out DIR, or continue that sweep with its command:"
    )
    assert second.endswith(" sweep --out s run.seed=1,2")


def test_directories_with_something_else_are_refused(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s/notes.txt").touch()
    assert refusal(ConfigError, "run.seed=1,2", out="s") == (
        "--out s: not empty, and not a sweep. Choose another directory."
    )
    assert refusal(ConfigError, "run.seed=1,2", out="s/notes.txt") == (
        "--out s/notes.txt: a file, not a directory. Choose another directory."
    )
    (tmp_path / "s/sweep.json").write_text("{")
    assert refusal(CheckpointError, "run.seed=1,2", out="s") == (
        "s/sweep.json: damaged. Move it elsewhere, or choose another directory with --out DIR."
    )
    (tmp_path / "s/sweep.json").unlink()
    (tmp_path / "s/sweep.json").symlink_to("notes.txt")
    assert refusal(CheckpointError, "run.seed=1,2", out="s").startswith("s/sweep.json: a symbolic link, ")


def test_a_sweep_that_is_running_is_not_started_twice(tmp_path):
    with locked(tmp_path / "s"):
        assert refusal(CheckpointError, "run.seed=1,2", out="s") == (
            f"s is in use by process {os.getpid()}. Wait for it, or choose another --out."
        )


@pytest.mark.parametrize(("override", "launcher"), [("run.name=x", "sweep"), ("cluster.gpus_per_node=2", None)])
def test_a_run_uses_one_gpu_unless_asked_for_more(tmp_path, override, launcher):
    """A process that a launcher started does not start ranks itself. Without the variable, a run starts what it asks for."""
    sweep(["run.seed=1,2", override])
    notes = [json.loads(line) for line in (tmp_path / "notes.jsonl").read_text().splitlines()]
    assert [note["launcher"] for note in notes] == [launcher] * 2


@pytest.mark.parametrize(
    ("override", "shown"),
    [("cluster.num_nodes=2", "2, cluster.launcher = auto"), ("cluster.launcher=ray", "1, cluster.launcher = ray")],
)
def test_a_sweep_trains_on_this_machine(override, shown):
    with pytest.raises(ConfigError) as refused:
        sweep(["run.seed=1,2", override])
    assert str(refused.value) == (
        f"cluster.num_nodes = {shown}: a sweep trains its runs on this machine. Set cluster.num_nodes=1 "
        "cluster.launcher=auto."
    )


def test_torchrun_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(cli, "is_distributed", lambda: False)  # or the process would end without cleaning up
    assert command(monkeypatch, capsys, "run.seed=1,2") == (
        *(2, ""),
        "tandem: error: tandem sweep starts the processes of its runs itself. Start it without torchrun.\n",
    )


@pytest.mark.parametrize("arguments", [["run.seed=1"], ["run.seed=1,2", "--parallel", "0"]])
def test_bad_arguments_end_with_exit_code_2(monkeypatch, capsys, arguments):
    assert command(monkeypatch, capsys, *arguments)[0] == 2


def test_report_reads_the_runs_of_a_sweep(tmp_path):
    sweep(["run.seed=1,2"], out="s")
    for given in (["s"], [str(path) for path in sorted(Path("s").iterdir())]):
        written = write_report(given, tmp_path / "page.html")
        assert [run.name for run in written.runs] == ["seed-1", "seed-2"]
    with pytest.raises(ConfigError) as refused:
        write_report(["s/sweep.json", "s/logs"])
    assert str(refused.value) == "s/sweep.json: a file, not a run's directory."
    with pytest.raises(ConfigError):
        write_report(["s/seed-9"])


LOSS = "def flat(pairs, *, beta):\n    return -beta * pairs.ratios.margin\n"


def test_what_a_file_may_do_and_was_written_for_reaches_every_run(tmp_path):
    (tmp_path / "mine.py").write_text(LOSS)
    path = tmp_path / "theirs.yaml"
    path.write_text(f"dpo: {{preference_loss: {tmp_path}/mine.py:flat, val_micro_batch_size: 1, max_num_steps: 1}}\n")
    with pytest.raises(ConfigError, match="--allow-code"):
        sweep(["dpo.seed=1,2"], config=str(path), dry_run=True)
    reading = Reading(allow_env=("A",), allow_code=True, from_format="nemo-rl")
    plan = make_plan(["dpo.seed=1,2"], str(path), reading, Reporter("quiet").progress)
    assert [run.loaded.config.run.seed for run in plan.runs] == [1, 2]
    options = ["--config", str(path), "--from-format", "nemo-rl", "--allow-code", "--allow-env", "A"]
    assert plan.train_arguments(plan.runs[0], tmp_path)[: len(options) + 2] == ["train", *options, "dpo.seed=1"]
