"""`tandem report`, `runs` and `watch` from the command line: output, exit codes, and no import of torch."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from run_directories import make_run, record

from tandem.cli import main as cli
from tandem.page.comparison import comparison
from tandem.page.listing import COLUMNS, changed_keys, list_row, shortened_settings
from tandem.runs import open_run

CODE = """
import sys
from tandem.cli.main import main
try:
    main()
finally:
    assert "torch" not in sys.modules and "transformers" not in sys.modules
"""


def tandem(*arguments: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CODE, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, timeout=120, check=False, env={**os.environ, **environment}
    )


def test_one_run(tmp_path):
    run = make_run(tmp_path / "run")
    done = tandem("report", run)
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        f"{run}/report.html is written: open it in a browser.\n",
        "",
    )
    assert tandem("report", run).stdout == (
        f"{run}/report.html is written and replaces the earlier page: open it in a browser.\n"
    )
    assert tandem("report", run, "-q").stdout == ""


def test_a_damaged_run_is_reported_on_the_terminal(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text("")
    (run / "config.yaml").write_text("{")
    problems = [
        "metrics.jsonl: 10 steps are missing, though the run is finished.",
        "config.yaml is damaged, so no settings are shown.",
    ]
    assert tandem("report", "run", cwd=tmp_path).stdout.splitlines() == [
        "run/report.html is written: open it in a browser.",
        *(f"Not everything could be read: run: {problem}" for problem in sorted(problems)),
    ]
    assert tandem("runs", "run", cwd=tmp_path).stdout.splitlines()[-3:] == [
        "Not everything could be read",
        *(f"  run: {problem}" for problem in sorted(problems)),
    ]


def test_several_runs_as_json(tmp_path):
    runs = [make_run(tmp_path / name, accuracy=accuracy) for name, accuracy in (("a", 0.6), ("b", 0.9))]
    done = tandem("report", *runs, "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert (found["page"], found["has_replaced"], found["best"]) == ("comparison.html", False, str(runs[1]))
    assert [run["validation"]["validation-default"]["last"]["accuracy"] for run in found["runs"]] == [0.6, 0.9]
    assert found["runs"][0]["changed"] == {"dpo.val_period": 5}
    assert (tmp_path / "comparison.html").is_file()
    assert tandem("report", *runs, cwd=tmp_path).stdout == (
        "comparison.html is written and replaces the earlier page: open it in a browser.\n"
        "Best accuracy: b. The intervals of all other finished runs are below it.\n"
    )


def test_runs_that_cannot_be_compared_have_no_best(tmp_path):
    runs = [make_run(tmp_path / name, data=name) for name in ("a", "b")]
    assert tandem("report", *runs, cwd=tmp_path).stdout == (
        "comparison.html is written: open it in a browser.\n"
        "No run is marked as the best: it takes two or more finished runs, all validated on the same pairs.\n"
    )


def test_a_run_is_listed_without_keys_of_a_set_that_it_does_not_have(tmp_path):
    with_set = "data:\n  validation: {data_path: held_out.jsonl, prompt_key: question}\n"
    make_run(tmp_path / "runs/a-1", config=with_set)
    make_run(tmp_path / "runs/a-2", config="dpo:\n  val_period: 5\n")
    lines = tandem("runs", cwd=tmp_path).stdout.splitlines()[-2:]
    assert "data.validation.prompt_key=question" in lines[0]
    assert "data.validation.prompt_key" not in lines[1]


def test_what_is_not_a_run_is_refused(tmp_path):
    done = tandem("report", tmp_path / "none")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"tandem: error: {tmp_path}/none: there is no such directory. `tandem runs FOLDER` lists the runs in a folder.\n"
    )
    make_run(tmp_path / "run")
    (tmp_path / "notes.html").write_text("mine")
    done = tandem("report", tmp_path / "run", "--out", tmp_path / "notes.html")
    assert (done.returncode, (tmp_path / "notes.html").read_text()) == (2, "mine")


def test_several_paths_without_a_run_are_left_out(tmp_path):
    runs = [make_run(tmp_path / "runs" / name) for name in ("a", "b")]
    (tmp_path / "runs/refused").mkdir()
    (tmp_path / "runs/refused/lock").touch()
    (tmp_path / "runs/notes.txt").touch()
    (tmp_path / "runs/swept").mkdir()
    (tmp_path / "runs/swept/sweep.json").touch()
    paths = sorted((tmp_path / "runs").iterdir())
    done = tandem("report", *(path.relative_to(tmp_path) for path in paths), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[:4] == [
        "runs/notes.txt is left out: a file, not a run's directory.",
        "runs/refused is left out: it has no config.yaml, so it is not a run.",
        "runs/swept is left out: none of its runs has written results.",
        "comparison.html is written: open it in a browser.",
    ]
    found = json.loads(tandem("report", *paths, "--json", cwd=tmp_path).stdout)
    assert ([run["path"] for run in found["runs"]], len(found["left_out"])) == (list(map(str, runs)), 3)
    for alone in (["runs/refused"], ["runs/refused", "runs/notes.txt"]):
        done = tandem("report", *alone, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (
            2,
            "tandem: error: runs/refused: it has no config.yaml, so it is not a run.\n",
        )
    done = tandem("report", "runs/a", "runs/none", cwd=tmp_path)
    assert (done.returncode, done.stderr.startswith("tandem: error: runs/none: there is no such directory.")) == (
        2,
        True,
    )


def test_a_run_that_is_named_twice_is_shown_once(tmp_path):
    run = make_run(tmp_path / "runs/a")
    done = tandem("report", "runs/a", "runs/a/", run, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (
        0,
        "runs/a is named twice, and shown once.\n"
        f"{run} is the same run as runs/a, and shown once.\n"
        "runs/a/report.html is written: open it in a browser.\n",
    )


def test_the_comparison_of_a_sweep_is_in_its_folder(tmp_path):
    for name in ("a", "b"):
        make_run(tmp_path / "runs/swept" / name)
    (tmp_path / "runs/swept/sweep.json").touch()
    done = tandem("report", "runs/swept", cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[0]) == (
        0,
        "runs/swept/comparison.html is written: open it in a browser.",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_sweep_whose_runs_wrote_nothing_names_their_logs(tmp_path):
    (tmp_path / "swept/logs").mkdir(parents=True)
    (tmp_path / "swept/sweep.json").touch()
    for given in (["swept"], ["swept/logs", "swept/sweep.json"]):
        done = tandem("report", *given, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (
            2,
            "tandem: error: swept: none of its runs has written results; swept/logs has what they printed.\n",
        )


def test_a_full_disk_has_its_own_exit_code(tmp_path, monkeypatch, capsys):
    def full(_):
        raise OSError(28, "No space left on device")

    make_run(tmp_path / "run")
    monkeypatch.setattr("os.fsync", full)
    monkeypatch.setattr(sys, "argv", ["tandem", "report", str(tmp_path / "run"), "--out", str(tmp_path / "a.html")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, capsys.readouterr().err) == (
        7,
        f"tandem: error: the disk is full: [Errno 28] No space left on device: '{tmp_path}/a.html'. Free some space and run "
        "the command again.\n",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_list_of_runs(tmp_path):
    for number, beta in ((1, 0.1), (2, 0.3)):
        config = f"dpo:\n  reference_policy_kl_penalty: {beta}\n"
        make_run(tmp_path / f"runs/beta-{number}", config=config, finished=number == 1)
    done = tandem("runs", cwd=tmp_path)
    assert done.stderr == ""
    assert done.stdout == (
        "run     status    steps  !  at  accuracy     95 % interval    loss  margin\n"
        "beta-1  finished     10  1  10    90.0 %  82.6 % to 94.5 %  0.6500  0.3000\n"
        "beta-2  stopped      10  1  10    90.0 %  82.6 % to 94.5 %  0.6500  0.3000\n"
        "!: how many verdicts are warnings; at: the step of the results (of the exported model, if there is one); "
        "-: not measured\n"
        "\n"
        "Settings in which they differ\n"
        "  beta-1: dpo.reference_policy_kl_penalty=0.1\n"
        "  beta-2: dpo.reference_policy_kl_penalty=0.3\n"
    )
    assert [run["name"] for run in json.loads(tandem("runs", "--json", cwd=tmp_path).stdout)] == ["beta-1", "beta-2"]
    make_run(tmp_path / "runs/sweep 1/beta-1")
    (tmp_path / "runs/sweep 1/sweep.json").write_text("{}")
    assert tandem("runs", cwd=tmp_path).stdout.endswith("\nSweep: `tandem runs 'runs/sweep 1'` lists its runs.\n")
    (tmp_path / "empty").mkdir()
    assert tandem("runs", tmp_path / "empty").stdout == f"{tmp_path}/empty: no runs. `tandem train` starts one.\n"
    assert tandem("runs", tmp_path / "other").returncode == 2


def test_hostile_names_are_escaped_on_the_terminal(tmp_path):
    make_run(tmp_path / "runs/a\x1b[2Jb")
    assert "a\\x1b[2Jb" in tandem("runs", cwd=tmp_path).stdout


def test_watching_until_ctrl_c(tmp_path):
    run = make_run(tmp_path / "run", finished=False)
    command = [sys.executable, "-c", CODE, "watch", str(run)]
    # Tests that run in the background of a shell inherit an ignored SIGINT.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = re.fullmatch(rf"Watching {run} at (http://127\.0\.0\.1:\d+/) until Ctrl-C\n", line)
        assert url is not None, line
        with urllib.request.urlopen(url[1], timeout=30) as answer:
            assert b"data-live" in answer.read()
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")


def test_a_list_of_runs_shows_the_step_of_an_exported_checkpoint_and_counts_warnings(tmp_path):
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record(5, "exported-default")) + "\n")
    names = ("stopped_early", "sound", "accuracy_flat", "diverged")
    verdicts = [{"name": name, "split": "validation-default", "text": "..."} for name in names]
    (run / "verdicts.json").write_text(json.dumps(verdicts))
    cells = dict(zip(COLUMNS, list_row(open_run(run)), strict=True))
    assert (cells["steps"], cells["at"], cells["!"]) == ("10", "5", "2")
    (run / "verdicts.json").unlink()
    assert list_row(open_run(run))[COLUMNS.index("!")] == "-"


def test_a_long_mapping_is_shortened_in_the_list_of_settings(tmp_path):
    steps = ", ".join(str(step) for step in range(100, 130))
    run = open_run(make_run(tmp_path / "run", config=f"dpo:\n  val_period: 5\npolicy:\n  scheduler: [{steps}]\n"))
    [keys] = changed_keys([run])
    [scheduler] = [key for key in keys if key.startswith("policy.scheduler=")]
    assert len(scheduler) == len("policy.scheduler=") + 60
    assert scheduler.endswith("…")


def test_the_list_of_runs_says_where_a_shortened_value_is_complete(tmp_path):
    for number in (1, 2):
        steps = ", ".join(str(number + step) for step in range(100, 130))
        make_run(tmp_path / f"runs/a-{number}", config=f"policy:\n  scheduler: [{steps}]\n")
    shown = tandem("runs", cwd=tmp_path).stdout.splitlines()
    assert shown[-2].endswith("…")
    assert shown[-1] == "--json lists every changed setting with its complete value."


DEFAULTS = "run: {seed: 42}\n"


def settings_of(folder: Path, *configs: str) -> list[list[str]]:
    """The listed settings of runs with these configurations."""
    runs = [make_run(folder / f"run-{number}", config=config) for number, config in enumerate(configs)]
    return changed_keys([open_run(run) for run in runs])


def test_settings_that_the_fewest_runs_share_come_first(tmp_path):
    dpo = "dpo: {max_num_epochs: %d, reference_policy_kl_penalty: %g}\n"
    assert settings_of(tmp_path, dpo % (2, 0.1), dpo % (1, 0.1), dpo % (1, 0.3), dpo % (1, 0.1)) == [
        ["dpo.max_num_epochs=2", "dpo.reference_policy_kl_penalty=0.1"],
        ["dpo.max_num_epochs=1", "dpo.reference_policy_kl_penalty=0.1"],
        ["dpo.reference_policy_kl_penalty=0.3", "dpo.max_num_epochs=1"],
        ["dpo.max_num_epochs=1", "dpo.reference_policy_kl_penalty=0.1"],
    ]


def test_the_hash_of_code_is_listed_short_and_only_if_the_code_differs(tmp_path):
    named = "dpo: {preference_loss: my.py:flat, val_period: %d}\nrun: {code: {'my.py:flat': %s}}\n"
    assert settings_of(tmp_path / "one", named % (25, "a" * 64)) == [
        ["data.train.data_path=embedded", "dpo.preference_loss=my.py:flat"]
    ]
    assert settings_of(tmp_path / "same", named % (5, "a" * 64), named % (6, "a" * 64), DEFAULTS) == [
        ["dpo.val_period=5", "dpo.preference_loss=my.py:flat"],
        ["dpo.val_period=6", "dpo.preference_loss=my.py:flat"],
        ["dpo.preference_loss=dpo", "dpo.val_period=25"],
    ]
    assert settings_of(tmp_path / "two", named % (5, "a" * 64), named % (5, "b" * 64)) == [
        [f"code of my.py:flat=SHA-256 {letter * 12}"] for letter in "ab"
    ]


def test_a_run_with_a_validation_file_lists_no_held_out_share(tmp_path):
    held_out, given = "data: {validation_share: 0.1}\n", "data: {validation: {data_path: a.jsonl}}\n"
    assert settings_of(tmp_path, held_out, given) == [
        ["data.validation_share=0.1"],
        ["data.validation.data_path=a.jsonl"],
    ]


def test_the_data_of_a_run_on_the_bundled_pairs_is_listed(tmp_path):
    several = "data: {train: [{data_path: a.jsonl}, {data_path: b.jsonl, weight: 2}]}\n"
    assert settings_of(tmp_path / "one", "dpo: {val_period: 5}\n") == [
        ["data.train.data_path=embedded", "dpo.val_period=5"]
    ]
    assert settings_of(tmp_path / "two", DEFAULTS, several) == [
        ["data.train.data_path=embedded"],
        ['data.train=["a.jsonl", {"data_path": "b.jsonl", "weight": 2.0}]'],
    ]


def test_a_run_without_validation_has_no_accuracy_in_the_list(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text("".join(json.dumps(record(step)) + "\n" for step in range(1, 11)))
    cells = dict(zip(COLUMNS, list_row(open_run(run)), strict=True))
    assert cells["steps"] == "10"
    assert [cells[name] for name in ("at", "accuracy", "95 % interval", "loss", "margin")] == ["-"] * 5
    validated = make_run(tmp_path / "other")
    assert "90.0 %" in comparison([open_run(validated), open_run(validated)])
    assert "90.0 %" not in comparison([open_run(run), open_run(run)])


def test_settings_are_shortened_to_the_width():
    settings = ["dpo.a=1", "dpo.b=2", "dpo.c=3"]
    assert shortened_settings(settings, 24) == "dpo.a=1 (+2 more)"
    assert shortened_settings([*settings, "dpo.d=4"], 30) == "dpo.a=1, dpo.b=2 (+2 more)"
    assert shortened_settings(["dpo.a=123456789", "dpo.b=2"], 20) == "dpo.a=123… (+1 more)"
    assert shortened_settings(["dpo.a=123456789"], 10) == "dpo.a=123…"


def test_a_terminal_shows_a_line_of_settings_per_run_and_a_file_all_of_them(tmp_path):
    for number in (1, 2):
        values = "".join(
            f"  {key}: 0.{number}\n" for key in ("label_smoothing", "sft_loss_weight", "preference_loss_weight")
        )
        make_run(tmp_path / f"runs/a-{number}", config=f"dpo:\n{values}")
    on_terminal = tandem("runs", cwd=tmp_path, CI="", FORCE_COLOR="1", COLUMNS="80").stdout
    assert "\n  a-1: dpo.preference_loss_weight=0.1, dpo.sft_loss_weight=0.1 (+1 more)\n" in on_terminal
    assert on_terminal.endswith("\n--json lists every changed setting with its complete value.\n")
    in_file = tandem("runs", cwd=tmp_path).stdout
    assert in_file.endswith(
        "\n  a-2: dpo.preference_loss_weight=0.2, dpo.sft_loss_weight=0.2, dpo.label_smoothing=0.2\n"
    )
    [run, _] = json.loads(tandem("runs", "--json", cwd=tmp_path).stdout)
    assert len(run["changed"]) == 3
