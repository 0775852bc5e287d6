"""Two processes on one directory: the second is refused, naming the first; a dead one holds nothing."""

import os
import signal
import time

from killing import assert_same


def test_a_second_process_is_refused_and_the_first_finishes(small, whole, tmp_path):
    run, cache = tmp_path / "run", tmp_path / "cache"
    first = small.start(run, cache)
    until = time.monotonic() + 300
    while not (run / "checkpoints").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(first.process.pid, signal.SIGSTOP)
    try:
        before = (run / "metrics.jsonl").read_bytes()
        second = small.run(run, cache)
        assert (second.code, second.err) == (
            4,
            f"tandem: error: {run} is in use by process {first.process.pid}. Wait for it, or choose another run.dir.\n",
        )
        assert (run / "metrics.jsonl").read_bytes() == before
    finally:
        os.kill(first.process.pid, signal.SIGCONT)
    assert first.ended().code == 0
    assert_same(run, whole)


def test_a_separate_checkpoint_directory_is_locked_too(small, tmp_path):
    elsewhere = f"checkpointing.checkpoint_dir={tmp_path}/elsewhere"
    first = small.start(tmp_path / "run", tmp_path / "cache", elsewhere)
    until = time.monotonic() + 300
    while not list((tmp_path / "elsewhere").glob("step_*")):
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(first.process.pid, signal.SIGSTOP)
    try:
        second = small.run(tmp_path / "other/run", tmp_path / "cache", elsewhere)
    finally:
        os.kill(first.process.pid, signal.SIGCONT)
    assert second.code == 4
    assert f"{tmp_path}/elsewhere is in use by process {first.process.pid}." in second.err
    assert first.ended().code == 0


def test_a_dead_process_holds_no_lock(small, whole, tmp_path):
    run, cache = tmp_path / "run", tmp_path / "cache"
    small.killed(run, cache, at="step.done:2")
    dead = (run / "lock").read_text()
    assert dead.isdigit()
    assert small.run(run, cache).code == 0
    assert (run / "lock").read_text() != dead
    assert_same(run, whole)
