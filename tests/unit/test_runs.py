"""Reading a run's directory: complete, live, damaged and hostile ones."""

import fcntl
import json
import os
from pathlib import Path

import pytest
from run_directories import make_run, record

from tandem.config.load import load_config
from tandem.errors import ConfigError
from tandem.run_numbers import wilson
from tandem.runs import list_runs, list_sweeps, open_run
from tandem.terminal.arguments import command_words
from tandem.terminal.commands import tandem_command
from tandem.training.run.other_folders import why_not_a_run


def test_everything_a_finished_run_holds(tmp_path):
    run = open_run(make_run(tmp_path / "sweep-1", config="dpo:\n  val_period: 5\nrun:\n  name: sweep\n"))
    assert (run.name, run.status, run.step, run.num_steps, run.seconds) == ("sweep-1", "finished", 10, 10, 20.0)
    assert dict(run.changed) == {"dpo.val_period": (5, 25)}
    assert (list(run.checkpoints), run.best, run.latest) == ([5, 10], 5, 10)
    assert run.model == tmp_path / "sweep-1/model"
    assert [one.name for one in run.verdicts] == ["length_learnt"]
    assert run.rejects == {("train", "empty completion"): 1}
    assert {step: answers[0]["policy"] for step, answers in run.samples.items()} == {0: "Um.", 10: "Why?"}
    assert run.problems == ()
    (result,) = run.results
    assert (result.split, result.accuracy_before, result.last["step"], result.best["step"]) == (
        *("validation-default", 0.5),
        *(10, 10),
    )


def test_the_interval_of_an_accuracy_is_wilsons():
    found = wilson(0.9, 10)
    assert (round(found.low, 3), round(found.high, 3)) == (0.596, 0.982)
    assert wilson(1.0, 70).high == 1.0
    assert wilson(0.0, 70).low == 0.0


def test_results_on_other_pairs_than_the_last_ones_are_not_compared(tmp_path):
    run = open_run(make_run(tmp_path / "run", data="other pairs"))
    assert run.results[0].before is None


def test_half_a_last_line_is_a_line_that_is_being_written(tmp_path):
    folder = make_run(tmp_path / "run", finished=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "split": "tr')
    run = open_run(folder)
    assert (run.step, run.problems) == (10, ())


@pytest.mark.parametrize(
    ("kept", "problem"),
    [
        (range(0), "10 steps are missing"),
        (range(1, 8), "3 steps are missing"),  # the newest checkpoint is of step 10
        ([1, 2, 3, 5, 6, 7, 8, 9, 10], "1 step is missing"),
        (range(4, 11), None),  # the steps before are of another run, whose checkpoint this one resumed from
    ],
)
def test_steps_that_a_finished_run_must_have_are_missed(tmp_path, kept, problem):
    folder = make_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record(step)) + "\n" for step in kept))
    (folder / "setup.json").write_text(json.dumps({"num_steps": 12}))  # it ended early
    expected = () if problem is None else (f"metrics.jsonl: {problem}, though the run is finished.",)
    assert open_run(folder).problems == expected
    for file in (folder / "model").iterdir():  # a run that is not finished may write them yet
        file.unlink()
    assert open_run(folder).problems == ()


def test_damaged_lines_are_left_out_and_reported(tmp_path):
    folder = make_run(tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[3] = lines[3][:40]
    lines[4] = '{"step": "four", "split": "train"}'
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "verdicts.json").write_text("[")
    (folder / "setup.json").write_text("[" * 100_000)
    run = open_run(folder)
    assert len(run.steps) == 8
    assert run.problems == (
        "metrics.jsonl: 2 lines are damaged and left out.",
        "setup.json is damaged.",
        "verdicts.json is damaged.",
    )


def test_a_process_that_holds_the_lock_means_running(tmp_path):
    folder = make_run(tmp_path / "run", finished=False)
    assert open_run(folder).status == "stopped"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert open_run(folder).status == "running"
    assert open_run(folder).status == "stopped"


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "verdicts.json", "setup.json", "samples/step_10.jsonl", "config.yaml"]
)
def test_links_are_not_followed(tmp_path, name):
    folder, secret = make_run(tmp_path / "run"), tmp_path / "secret"
    secret.write_text((folder / name).read_text())
    (folder / name).unlink()
    (folder / name).symlink_to(secret)
    run = open_run(folder)
    assert f"{name} is not read: a symbolic link." in run.problems


def test_pipes_and_large_files_are_not_read(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "run")
    (folder / "verdicts.json").unlink()
    os.mkfifo(folder / "verdicts.json")
    monkeypatch.setattr("tandem.runs.MAX_JSON_BYTES", 1000)
    monkeypatch.setattr("tandem.runs.MAX_METRICS_BYTES", 2000)
    run = open_run(folder)
    size, pairs = (folder / "metrics.jsonl").stat().st_size, (folder / "pairs.json").stat().st_size
    assert (
        run.problems[0]
        == f"metrics.jsonl has {size:,} bytes, over the limit of 2,000: only its first 2,000 bytes are read."
    )
    assert "verdicts.json is not read: not a plain file." in run.problems
    assert f"pairs.json has {pairs:,} bytes, over the limit of 1,000: it is not read." in run.problems
    assert len(run.steps) < 10


def test_numbers_that_are_not_finite_are_not_results(tmp_path):
    run = open_run(make_run(tmp_path / "run", accuracy=float("nan"), loss=float("inf")))
    assert run.results[0].accuracy is None


@pytest.mark.usefixtures("of_a_command")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: None, "{0}: there is no such directory. `tandem runs FOLDER` lists the runs in a folder."),
        (lambda f: f.mkdir(), "{0}: it has no config.yaml, so it is not a run."),
        (lambda f: f.write_text("x"), "{0}: a file, not a run's directory."),
    ],
)
def test_what_is_not_a_run_is_refused(tmp_path, make, message):
    make(tmp_path / "it")
    with pytest.raises(ConfigError) as error:  # exit code 2, as of `tandem eval` and `tandem generate`
        open_run(tmp_path / "it")
    assert str(error.value) == message.format(tmp_path / "it")


def test_a_folder_inside_a_run_is_refused_with_a_hint(tmp_path):
    folder = make_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"it holds a model of the run .*/run, not a run\. Did you mean .*/run\?"):
        open_run(folder / "model")


def test_a_folder_of_runs_is_not_taken_for_a_run(tmp_path):
    make_run(tmp_path / "runs/a-1")
    with pytest.raises(ConfigError) as error:
        open_run(tmp_path / "runs")
    assert str(error.value) == f"{tmp_path}/runs: it holds runs: name one of its runs, such as {tmp_path}/runs/a-1."


def test_a_folder_of_checkpoints_names_its_run_and_the_command_with_it(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "run") / "checkpoints"
    for step in (5, 10):
        (folder / f"step_{step}/tensors").mkdir()
        (folder / f"step_{step}/state.json").touch()
        (folder / f"step_{step}/config.yaml").touch()
    begin = f"{folder}: it holds the checkpoints of {tmp_path}/run."
    monkeypatch.setattr("sys.argv", ["tandem", "report", "--json", f"{folder}/"])
    for call in (open_run, list_runs):
        with pytest.raises(ConfigError) as error:
            call(folder)
        assert str(error.value) == f"{begin} Did you mean {tmp_path}/run?"
        with command_words(), pytest.raises(ConfigError) as error:
            call(folder)
        command = tandem_command("report", "--json", f"{tmp_path}/run")
        assert str(error.value) == f"{begin} The command is then: {command}"
    monkeypatch.chdir(tmp_path / "run")
    assert why_not_a_run(Path("checkpoints")) == f"it holds the checkpoints of {tmp_path}/run"
    (tmp_path / "run/config.yaml").unlink()
    assert why_not_a_run(folder) == f"it holds checkpoints, such as {folder}/best"


@pytest.mark.usefixtures("of_a_command")
def test_the_command_with_the_run_around_a_folder_has_the_path_as_it_was_given(tmp_path, monkeypatch):
    step = make_run(tmp_path / "runs/a") / "checkpoints/step_10"
    for name in ("state.json", "config.yaml"):
        (step / name).touch()
    (step / "tensors").mkdir()
    (tmp_path / "link").symlink_to(step.parents[1] / "model")
    monkeypatch.chdir(tmp_path)
    full = f"{tmp_path}/runs/a"
    for inside, right, what in (
        ("runs/a/model", "runs/a", "it holds a model of the run runs/a, not a run"),
        ("runs/a/checkpoints/step_10", "runs/a", "a checkpoint, not a run"),
        ("runs/a/checkpoints/../model", full, f"it holds a model of the run {full}, not a run"),
        ("link", full, f"it holds a model of the run {full}, not a run"),
    ):
        monkeypatch.setattr("sys.argv", ["tandem", "report", inside])
        with pytest.raises(ConfigError) as error:
            open_run(inside)
        assert str(error.value) == f"{inside}: {what}. The command is then: {tandem_command('report', right)}"


def test_calls_from_python_name_functions_and_not_commands(tmp_path):
    for call, expected in (
        (open_run, "tandem.list_runs(FOLDER) lists the runs in a folder."),
        (list_runs, "tandem.train() starts a run in runs; tandem.list_runs(FOLDER) lists the runs of another folder."),
    ):
        with pytest.raises(ConfigError) as error:
            call(tmp_path / "gone")
        assert str(error.value).endswith(expected)


def test_runs_are_listed_in_the_order_of_their_numbers(tmp_path):
    ordered = ["a-2", "a-10", "b", "beta-0.05", "beta-0.1", "beta-0.3", "lr-5e-07", "lr-1e-06"]
    for name in sorted(ordered):
        make_run(tmp_path / name)
    (tmp_path / "notes").mkdir()
    (tmp_path / ".hidden").mkdir()
    assert [run.name for run in list_runs(tmp_path)] == ordered
    assert [run.name for run in list_runs(tmp_path / "b")] == ["b"]
    with pytest.raises(ConfigError, match="there is no such folder"):
        list_runs(tmp_path / "other")


def test_a_sweep_is_listed_and_not_taken_for_a_run(tmp_path):
    make_run(tmp_path / "sweep-1/beta-0.1")
    (tmp_path / "sweep-1/sweep.json").write_text("{}")
    assert list_sweeps(tmp_path) == [tmp_path / "sweep-1"]
    with pytest.raises(ConfigError) as refused:
        open_run(tmp_path / "sweep-1")
    assert str(refused.value) == (
        f"{tmp_path}/sweep-1: it is a sweep: name one of its runs, such as {tmp_path}/sweep-1/beta-0.1."
    )


def test_defaults_of_validation_sets_are_no_changed_keys(tmp_path):
    sets = "validation: {data_path: a.jsonl}, val_data_paths: {more: {data_path: b.jsonl, prompt_key: q}}"
    folder = make_run(tmp_path / "run", config=f"data: {{{sets}}}\n")
    config = load_config(str(folder / "config.yaml"), ["data.train=c.jsonl"])
    (folder / "config.yaml").write_text(config.as_yaml())
    run = open_run(folder)
    assert run.config["data.validation.chosen_key"] == run.config["data.val_data_paths.more.chosen_key"] == "chosen"
    assert dict(run.changed) == {
        "data.train.data_path": ("c.jsonl", "embedded"),
        "data.validation.data_path": ("a.jsonl", None),
        "data.val_data_paths.more.data_path": ("b.jsonl", None),
        "data.val_data_paths.more.prompt_key": ("q", "prompt"),
    }


def test_an_interpolated_value_is_shown_as_it_is_stored(tmp_path):
    folder = make_run(tmp_path / "run", config="policy:\n  model_name: ${oc.env:MODEL}\n")
    assert open_run(folder).changed["policy.model_name"][0] == "${oc.env:MODEL}"


def test_reading_does_not_change_a_run(tmp_path):
    folder = make_run(tmp_path / "run", finished=False)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    open_run(folder)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_run_that_was_resumed_has_each_step_once(tmp_path):
    folder = make_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record(11)) + "\n")
    assert [one["step"] for one in open_run(folder).steps] == list(range(1, 12))
