"""Work in processes: results in order, memory bounded, and nobody left behind, however it ends."""

import itertools
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from patience import within

from tandem.data.store.pool import METHOD, Pool, WorkerDied, WorkerStalled, bounded_memory
from tandem.errors import DataError

# The work of these tests is written inside them, where only a forked process finds it.
pytestmark = pytest.mark.skipif(METHOD != "fork", reason="workers are not forked on this system")

LONG = 60.0  # seconds; no test waits so long


@pytest.fixture(autouse=True)
def impatient():
    with within(120):
        yield


def done(work, items, *, num_workers=2, row_seconds=LONG) -> list:
    with Pool(work, num_workers, row_seconds=row_seconds) as workers:
        return list(workers.map(items))


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# Results


def test_results_come_in_the_order_of_the_items_though_later_ones_end_first():
    def work(item, monitor):
        time.sleep(1 if item == 0 else 0)
        return item, time.monotonic()

    results = done(work, range(6))
    assert [item for item, _ in results] == [0, 1, 2, 3, 4, 5]
    ended = [when for _, when in results]
    assert max(ended[1:4]) < ended[0]


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("num_items", [0, 1, 7])
def test_every_item_is_worked_on_once(num_workers, num_items):
    assert done(lambda item, monitor: -item, range(num_items), num_workers=num_workers) == [
        -i for i in range(num_items)
    ]


def test_a_pool_takes_more_work_after_it_was_done():
    with Pool(lambda item, monitor: 2 * item, 2, row_seconds=LONG) as workers:
        assert list(workers.map([1, 2, 3])) == [2, 4, 6]
        assert list(workers.map([4])) == [8]


def test_work_is_done_in_as_many_processes_as_asked_and_not_in_this_one():
    def work(item, monitor):
        time.sleep(0.05)  # long enough that no other takes its turn
        return os.getpid()

    pids = set(done(work, range(6), num_workers=3))
    assert len(pids) == 3
    assert os.getpid() not in pids


@pytest.mark.parametrize("num_workers", [1, 3])
def test_two_items_a_worker_are_taken_ahead_and_never_more(num_workers):
    taken = []
    items = (taken.append(i) or i for i in range(20))
    ahead = []
    with Pool(lambda item, monitor: item, num_workers, row_seconds=LONG) as workers:
        for number, result in enumerate(workers.map(items)):
            assert result == number
            ahead.append(len(taken) - number)  # of those not yielded before this one
    assert ahead[0] == max(ahead) == 2 * num_workers
    assert len(taken) == 20


def test_items_and_results_of_eight_megabytes_pass_both_ways():
    num_bytes = 8 * 1024 * 1024
    results = done(lambda item, monitor: item[::-1], (bytes([i]) + bytes(num_bytes - 1) for i in range(6)))
    assert [(result[-1], len(result)) for result in results] == [(i, num_bytes) for i in range(6)]


# Errors


def test_a_users_mistake_is_raised_as_it_was():
    def work(item, monitor):
        if item == 2:
            raise DataError("pairs.jsonl:3: no key prompt.")
        return item

    results = []
    with Pool(work, 2, row_seconds=LONG) as workers, pytest.raises(DataError) as caught:
        for result in workers.map(range(6)):
            results.append(result)
    assert str(caught.value) == "pairs.jsonl:3: no key prompt."
    assert results == [0, 1]  # what comes before it in the order is not lost


def test_our_own_mistake_carries_the_workers_traceback():
    def divide_by_nothing(item, monitor):
        return item / 0

    with pytest.raises(RuntimeError) as caught:
        done(divide_by_nothing, [1])
    first, *traceback, last = str(caught.value).splitlines()
    assert (first, last) == ("in a worker process:", "ZeroDivisionError: division by zero")
    assert any(line.endswith("in divide_by_nothing") for line in traceback)
    assert "    return item / 0" in traceback


@pytest.mark.parametrize("end", [lambda: os._exit(0), lambda: os.kill(os.getpid(), signal.SIGKILL)])
def test_a_worker_that_dies_is_told_with_its_item(end):
    def work(item, monitor):
        if item == "c":
            end()
        return item

    with pytest.raises(WorkerDied) as caught:
        done(work, ["a", "b", "c", "d"])
    assert caught.value.item == "c"


def test_a_worker_that_dies_half_way_through_its_answer_is_told_with_its_item():
    def work(item, monitor):
        if item == 0:
            return 0
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return bytes(8 * 1024 * 1024)  # more than the pipe holds: it waits for us to read

    with Pool(work, 2, row_seconds=LONG) as workers, pytest.raises(WorkerDied) as caught:
        for _ in workers.map([0, 1]):
            time.sleep(0.5)
    assert caught.value.item == 1


# Rows without end


def test_a_worker_that_stays_at_one_row_is_told_with_item_and_row():
    def work(item, monitor):
        monitor.start_row(6)
        if item == "b":
            monitor.start_row(7)
            time.sleep(LONG)
        return item

    started = time.monotonic()
    with pytest.raises(WorkerStalled) as caught:
        done(work, ["a", "b", "c"], row_seconds=0.3)
    assert (caught.value.item, caught.value.row) == ("b", 7)
    assert time.monotonic() - started > 0.3


def test_slow_work_with_the_watch_off_is_no_stall():
    def work(item, monitor):
        monitor.start_row(7)
        monitor.end_row()
        time.sleep(0.7)
        return item

    assert done(work, [1], num_workers=1, row_seconds=0.3) == [1]


def test_many_rows_that_each_come_to_an_end_are_no_stall():
    def work(item, monitor):
        for row in range(6):
            monitor.start_row(row)
            time.sleep(0.3)
        return item

    assert done(work, [1], num_workers=1, row_seconds=1.5) == [1]


def test_the_last_row_of_an_item_is_not_watched_any_more_when_the_item_is_done():
    def work(item, monitor):
        if item == 0:
            monitor.start_row(7)
        else:
            time.sleep(0.7)
        return item

    assert done(work, [0, 1], num_workers=1, row_seconds=0.3) == [0, 1]


def test_the_same_row_number_of_a_later_item_is_another_row():
    # Rows 1 of two files, each slow enough to be looked at (every quarter of a second); those between are too quick for that.
    def work(item, monitor):
        monitor.start_row(1 if item in (0, 11) else 2)
        time.sleep(0.3 if item in (0, 11) else 0.1)
        return item

    assert done(work, range(12), num_workers=1, row_seconds=1.0) == list(range(12))


# Afterwards


def test_no_process_is_left_when_the_work_is_done():
    pids = done(lambda item, monitor: os.getpid(), range(8), num_workers=3)
    assert not any(is_there(pid) for pid in pids)


@pytest.mark.parametrize("stop", ["an error", "a death", "a stall", "the reader"])
def test_no_process_is_left_when_work_is_broken_off(stop):
    def work(item, monitor):
        if item > 0:
            time.sleep(LONG)
        if stop == "an error":
            raise DataError("no")
        if stop == "a death":
            os._exit(1)
        if stop == "a stall":
            monitor.start_row(1)
            time.sleep(LONG)
        return item

    class ReaderStops(Exception):
        pass

    children = set()

    def items():
        for item in itertools.count():
            children.update(child.pid for child in multiprocessing.active_children())
            yield item

    with pytest.raises((DataError, WorkerDied, WorkerStalled, ReaderStops)):
        with Pool(work, 3, row_seconds=0.3) as workers:
            for _ in workers.map(items()):
                raise ReaderStops
    assert len(children) == 3
    assert not any(is_there(pid) for pid in children)


def test_no_more_processes_are_started_than_there_are_items():
    with Pool(lambda item, monitor: item, 3, row_seconds=LONG) as workers:
        assert list(workers.map([7])) == [7]
        assert len(multiprocessing.active_children()) == 1


# Prints the processes of its two workers, then goes on or waits.
PARENT = """
import itertools, os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored where the tests run in the background
from tandem.data.store.pool import Pool

def work(item, watch):
    time.sleep(0.02)
    return os.getpid()

with Pool(work, 2, row_seconds=60) as workers:
    seen = set()
    for pid in workers.map(itertools.count()):
        if pid not in seen:
            seen.add(pid)
            print(pid, flush=True)
        if len(seen) == 2 and sys.argv[1] == "idle":
            time.sleep(60)
"""


def started(mode: str) -> tuple[subprocess.Popen, list[int]]:
    """A process with two workers, in a group of its own as on a terminal, and the workers' numbers."""
    command = [sys.executable, "-c", PARENT, mode]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(2)]
    assert all(is_there(pid) for pid in pids)
    return process, pids


@pytest.mark.parametrize("mode", ["idle", "busy"])
def test_workers_end_when_their_parent_is_killed(mode):
    process, _ = started(mode)
    process.kill()
    # The workers hold its standard output too: it is at its end when the last of them is gone.
    process.communicate(timeout=50)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("mode", ["idle", "busy"])
def test_ctrl_c_ends_parent_and_workers_and_the_workers_say_nothing(mode):
    process, pids = started(mode)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=50)
    assert process.returncode == -signal.SIGINT
    assert said.count("Traceback") == said.count("KeyboardInterrupt") == 1
    assert not any(is_there(pid) for pid in pids)


# Memory


def test_memory_is_bounded_within_and_not_after(monkeypatch):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr("tandem.data.store.pool.TEMPLATE_BYTES", 64 * 1024 * 1024)
    before = resource.getrlimit(resource.RLIMIT_AS)
    more = 256 * 1024 * 1024  # A new map each time: `bytes` may be given memory that an earlier test has freed.
    with pytest.raises(OSError, match="Cannot allocate memory"), bounded_memory():
        mmap.mmap(-1, more)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    mmap.mmap(-1, more).close()


def test_what_fits_within_the_bound_is_given(monkeypatch):
    monkeypatch.setattr("tandem.data.store.pool.TEMPLATE_BYTES", 256 * 1024 * 1024)
    with bounded_memory():
        assert len(bytes(64 * 1024 * 1024)) == 64 * 1024 * 1024
