"""What a run prints on a terminal, in CI, when quiet, and as JSON."""

import io
import json
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from tandem.report.reporter import Reporter
from tandem.training.samples import Sample
from tandem.training.validation import ValidationReport

RECORD = {
    "step": 3,
    "split": "train",
    "loss": 0.61234,
    "accuracy": 0.75,
    "rewards_margin_mean": -0.0001,
    "grad_norm": 1.5,
    "lr": 1e-4,
    "pairs_per_second": 12.34,
}
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
LINE = "step 3/9  loss 0.6123  accuracy 0.750  margin 0.000  grad 1.50  lr 1.00e-04  12.3 pairs/s\n"


def a_step(reporter: Reporter) -> None:
    with reporter.progress("Training", 9, done=2) as bar:
        reporter.step(RECORD, 9)
        bar(1, reporter.numbers(RECORD))


def a_terminal(width: int) -> tuple[io.StringIO, Reporter]:
    file = io.StringIO()
    return file, Reporter(console=Console(file=file, force_terminal=True, width=width, color_system=None))


def test_a_terminal_shows_a_bar_with_metrics_and_remaining_time_and_steps_above_it():
    file, reporter = a_terminal(140)
    a_step(reporter)
    shown = file.getvalue()
    assert "Training" in shown
    assert "3/9 -:--:-- loss 0.6123 accuracy 0.750 margin 0.000 12.3 pairs/s" in shown
    assert LINE in shown


def test_at_80_columns_the_last_metrics_are_left_out_and_the_bar_stays():
    file, reporter = a_terminal(80)
    a_step(reporter)
    shown = file.getvalue()
    assert "step 3/9  loss 0.6123  accuracy 0.750  margin 0.000  grad 1.50  lr 1.00e-04\n" in shown
    [bar] = {line for line in re.split(r"[\r\n]+", CONTROL.sub("", shown)) if "3/9 -:--:-- loss" in line}
    assert bar.rstrip().endswith("3/9 -:--:-- loss 0.6123 accuracy 0.750")
    assert bar.index(" 3/9") - len("Training ") >= 20
    assert cell_len(bar) <= 80


@pytest.mark.parametrize(
    ("total", "steps"),
    [(9, 9), (50, 50), (51, 27), (100, 51), (101, 22), (1000, 51), (10_001, 22)],  # the first and the last among them
)
def test_a_terminal_keeps_every_step_of_a_short_run_and_about_fifty_of_a_long_one(total, steps):
    file, reporter = a_terminal(80)
    for step in range(1, total + 1):
        reporter.step(RECORD | {"step": step}, total)
    lines = file.getvalue().splitlines()
    assert len(lines) == steps
    assert (lines[0].split()[1], lines[-1].split()[1]) == (f"1/{total}", f"{total}/{total}")


def test_without_a_terminal_there_is_one_line_per_step_and_no_bar(capsys):
    a_step(Reporter())
    assert capsys.readouterr().out == LINE


def test_with_an_sft_term_the_parts_of_the_loss_are_shown_too(capsys):
    parts = {"preference_loss": 0.6931, "sft_loss": 431.5}
    reporter = Reporter()
    reporter.shows_parts = True
    reporter.step(RECORD | parts | {"loss": 43.8431}, 9)
    assert capsys.readouterr().out.startswith(
        "step 3/9  loss 43.8431  preference 0.6931  sft 431.5000  accuracy 0.750  margin"
    )
    shown = ["loss 0.6123", "preference 0.6931", "sft 431.5000", "accuracy 0.750"]
    assert reporter.numbers(RECORD | parts)[:4] == shown
    metrics = dict.fromkeys(("accuracy", "rewards_margin_mean", "rewards_chosen_mean", "rewards_rejected_mean"), 0.5)
    report = ValidationReport("validation-default", {"loss": 43.8431, **parts, **metrics}, 9, "")
    reporter.validations("", [report])
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert shown[0][:8] == ["set", "pairs", "loss", "preference", "loss", "sft", "loss", "accuracy"]
    assert shown[1][:6] == ["validation-default", "9", "43.8431", "0.6931", "431.5000", "0.5000"]
    reporter.change("", ("before", "after"), [report], [report])
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["validation-default", "sft", "loss", "431.5000", "431.5000"] in shown


@pytest.mark.parametrize(("ci", "is_terminal"), [("true", False), ("1", False), ("", True), ("false", True)])
def test_ci_has_plain_lines_even_if_it_reports_a_terminal(monkeypatch, ci, is_terminal):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("FORCE_COLOR", "1")  # what makes rich take any output for a terminal
    assert Reporter().console.is_terminal is is_terminal


def test_a_quiet_run_prints_only_warnings_and_the_result(capsys):
    reporter = Reporter("quiet")
    reporter.say("hello")
    a_step(reporter)
    reporter.record(RECORD)
    reporter.warn("careful")
    reporter.end("Done.")
    assert capsys.readouterr().out == "warning: careful\nDone.\n"


def test_with_json_records_and_the_result_go_to_stdout_and_warnings_to_stderr(capsys, tmp_path):
    last = RECORD | {"step": 4}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(RECORD) + "\n" + json.dumps(last) + "\n")
    reporter = Reporter("quiet", as_json=True)
    a_step(reporter)
    reporter.record(RECORD)
    reporter.warn("careful")
    reporter.end("Done.")
    reporter.result(tmp_path)
    said = capsys.readouterr()
    assert [json.loads(line) for line in said.out.splitlines()] == [
        RECORD,
        {"run_dir": str(tmp_path), "final": {"train": last}},
    ]
    assert said.err == "warning: careful\n"


def test_no_number_in_a_table_is_cut_on_a_narrow_terminal():
    file, reporter = a_terminal(20)
    reporter.table(["set", "loss", "accuracy"], [["validation-default", "0.6931", "0.5000"], ["v", "0.7", "0.25"]])
    assert file.getvalue() == (
        "set                   loss\nvalidation-default  0.6931\nv                      0.7\n"
        "set                 accuracy\nvalidation-default    0.5000\nv                       0.25\n"
    )


def test_at_80_columns_a_warning_is_wrapped_at_words_and_a_path_is_not_broken():
    file, reporter = a_terminal(80)
    path = "/home/someone/" + "very-long/" * 9 + "run-1"
    reporter.warn(
        f"{path} is unfinished and differs in logger.wandb_enabled=true alone, which changes nothing that is learned.",
        command=f"tandem train --resume {path} logger.wandb_enabled=true",
    )
    assert file.getvalue().splitlines() == [
        "warning:",
        path,
        "is unfinished and differs in logger.wandb_enabled=true alone, which changes",
        "nothing that is learned.",
        f"  tandem train --resume {path} logger.wandb_enabled=true",
    ]


def test_at_80_columns_a_long_setting_continues_below_its_value():
    file, reporter = a_terminal(80)
    reporter.choices([("log-probabilities", "summed in the preference loss, per token in the SFT loss, as asked")])
    assert file.getvalue().splitlines()[2:] == [
        "  log-probabilities  summed in the preference loss, per token in the SFT loss,",
        "                     as asked",
    ]


def test_without_a_terminal_nothing_is_wrapped(capsys):
    Reporter().warn("word " * 60)
    assert capsys.readouterr().out == "warning: " + "word " * 60 + "\n"


def test_an_answer_of_white_space_is_quoted(capsys):
    Reporter().samples(1, [Sample("pairs.jsonl:1", "Hi", policy="\n" * 30, reference="  ")])
    shown = capsys.readouterr().out
    assert "    reference: '  ' (2 characters of white space)\n" in shown
    assert shown.endswith(" (30 characters of white space)\n")


def test_a_share_of_the_work_is_shown_as_a_percentage():
    file, reporter = a_terminal(100)
    with reporter.progress("Tokenising train", 100, unit="%") as advance:
        advance(37)
    shown = CONTROL.sub("", file.getvalue())
    assert " 37 % " in shown
    assert "/100" not in shown
