"""kill -9 at random times, as often as asked: every run that comes to its end is the one nothing interrupted."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass

import pytest
from killing import assert_same, outcome


@dataclass(frozen=True)
class Plan:
    """How often a run of so many steps is killed, within which share of the time it takes."""

    times: int
    steps: int
    share: float

    @property
    def settings(self):
        return [f"dpo.max_num_steps={self.steps}", f"dpo.max_num_epochs={self.steps // 4}"]


# Lives as long as a run pass through all of it, and some come to an end; short ones carry one run on and on.
LONG_LIVES, SHORT_LIVES = Plan(25, 12, 1.0), Plan(25, 60, 0.2)
PLANS = [Plan(4, 12, 1.0), *(pytest.param(plan, marks=pytest.mark.slow) for plan in (LONG_LIVES, SHORT_LIVES))]


def uninterrupted(small, plan):
    """The run that nothing interrupted, and the seconds it took when everything was imported."""
    folder = small.folder / f"steps-{plan.steps}"
    assert small.run(folder / "warm/run", folder / "warm/cache").code == 0
    started = time.monotonic()
    assert small.run(folder / "run", folder / "cache", *plan.settings).code == 0
    seconds = time.monotonic() - started
    # every step, validations before, every second step, and after, and that of the export
    assert len(outcome(folder / "run")["metrics"]) == plan.steps + 1 + plan.steps // 2 + 1
    return folder / "run", seconds


def place_of(run):
    """Where a process was killed, detected from the files that it left."""
    if (run / "model").is_dir():
        return "after the export"
    if list(run.glob(".model.*")):
        return "in the export"
    if (run / "verdicts.json").exists():
        return "at the end"
    if list(run.glob("checkpoints/.step_*")):
        return "in a save"
    if list(run.glob("checkpoints/step_*")):
        return "in set-up again, steps and validations"
    if (run / "config.yaml").exists():
        return "in the reference pass, the audit and the first step"
    return "in the first set-up"


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.slow
def test_a_run_killed_at_random_times_ends_with_identical_weights(small, tmp_path, plan):
    whole, seconds = uninterrupted(small, plan)
    draw = random.Random(plan.times)
    places, finished = Counter(), 0
    while places.total() < plan.times:
        run, cache = tmp_path / f"{finished}/run", tmp_path / f"{finished}/cache"
        child = small.start(run, cache, *plan.settings)
        child.process.join(draw.uniform(0, plan.share * seconds))
        child.process.kill()
        ended = child.ended()
        if ended.code == -signal.SIGKILL:
            places[place_of(run)] += 1
        else:  # it finished before the kill, which does not count; the next run starts from the beginning
            assert ended.code == 0, ended
            assert_same(run, whole)
            finished += 1
    run, cache = tmp_path / f"{finished}/run", tmp_path / f"{finished}/cache"
    ended = small.run(run, cache, *plan.settings)
    assert ended.code == 0, ended
    assert_same(run, whole)
    print(f"{plan}: {plan.times} kills over {finished + 1} runs: {dict(places)}")
    assert plan is not LONG_LIVES or len(places) >= 3


@pytest.mark.slow
def test_the_default_run_killed_25_times_ends_with_identical_weights(tmp_path):
    """`tandem train` as a user runs it, on the embedded default; killed while it starts, trains, validates and saves."""

    def started(name):
        (tmp_path / name / "runs").mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "TANDEM_CACHE": str(tmp_path / f"{name}-cache")}
        return subprocess.Popen(
            [sys.executable, "-m", "tandem", "train", "--per-pair", "runs/pairs.jsonl"],
            cwd=tmp_path / name,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    began = time.monotonic()
    whole = started("whole")
    printed, _ = whole.communicate(timeout=600)
    assert whole.returncode == 0, printed
    seconds, draw = time.monotonic() - began, random.Random(25)
    kills = finished = 0
    while kills < 25 or not finished:
        run = started(f"killed-{finished}")
        try:
            printed, _ = run.communicate(timeout=draw.uniform(0.1, 0.4) * seconds if kills < 25 else 600)
        except subprocess.TimeoutExpired:
            run.kill()
            run.communicate()
            kills += 1
            continue
        assert run.returncode == 0, printed
        assert_same(tmp_path / f"killed-{finished}/runs/default-1", tmp_path / "whole/runs/default-1")
        finished += 1
    print(f"{kills} kills over {finished} runs of {seconds:.0f} seconds")
