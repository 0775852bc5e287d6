"""The times of a run's start."""

from tandem.report.start_times import StartTimes, describe


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
