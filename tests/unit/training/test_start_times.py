"""The times of a run's start."""

import re

from running import SHORT, few_pairs

from tandem.config.load import load_config
from tandem.report.reporter import Reporter
from tandem.report.start_times import StartTimes, describe
from tandem.training.trainer import train


def test_phases_last_until_the_next_one_and_are_added_by_name():
    marks = [("imports", 10.0), ("data", 12.5), ("reference", 13.0), ("data", 13.0), ("step", 14.0), ("", 16.25)]
    # 2.5 + 0.5 + 0 + 1 + 2.25; data was begun twice, and the reference took no time
    assert describe(marks, "step 1") == "Until the end of step 1: 6.2 s (imports 2.5, data 1.5, step 2.2)"


def test_only_the_first_step_is_described():
    times = StartTimes(began=0.0)
    times.begin("weights")
    text = times.end("step 1")
    assert text is not None and text.startswith("Until the end of step 1: ")
    times.begin("weights")
    assert times.end("step 2") is None


def test_a_verbose_run_prints_the_times_of_its_start_once(tmp_path, capsys):
    """benchmarks/start.py reads this line. The times of the phases add up to the total, but for the shortest phases."""
    given = [*SHORT, few_pairs(tmp_path, 8), "dpo.max_num_steps=2", f"run.dir={tmp_path}/run"]
    train(load_config(None, given), Reporter("verbose"))
    out = " ".join(capsys.readouterr().out.split())
    [(total, phases)] = re.findall(r"Until the end of step 1: ([0-9.]+) s \(([^)]+)\)", out)
    seconds = {name: float(spent) for name, spent in re.findall(r"([a-z][a-z ]*) ([0-9.]+)", phases)}
    assert seconds  # phases that take next to no time are left out
    assert abs(sum(seconds.values()) - float(total)) < 0.1 * (len(seconds) + 5)
    assert out.index("step 1/2") < out.index("Until the end of step 1") < out.index("step 2/2")
