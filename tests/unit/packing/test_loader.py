"""Batches with their packs: in order, one ahead of the one in use, and no thread left behind."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from patience import within

from tandem.packing import batches as loader
from tandem.packing.batches import GlobalBatch, LoadedBatch, load_ahead


class Layer:
    """Stands in for a packer: lays a batch out as one word for each of its preferences."""

    def __init__(self, before: Callable[[int], Any] = lambda number: None):
        self.before = before  # called with the first preference of a batch, where it is laid out
        self.threads: list[threading.Thread] = []
        self.bounds: list[Any] = []

    def micro_batches(self, preferences, bounds=None) -> Iterator[str]:
        self.threads.append(threading.current_thread())
        self.bounds.append(bounds)
        self.before(int(preferences[0]))
        for preference in preferences.tolist():
            yield f"pack {preference}"


def batches(num: int) -> list[GlobalBatch]:
    """Batch n holds the preferences 10 n and 10 n + 1."""
    return [GlobalBatch(0, np.array([10 * n, 10 * n + 1]), 2) for n in range(num)]


def load(given, layer: Layer) -> Iterator[LoadedBatch]:
    return load_ahead(given, layer)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def nobody_left_behind():
    """Every test ends in time and with the threads it began with."""
    before = set(threading.enumerate())
    with within(120):
        yield
    assert set(threading.enumerate()) <= before


def alive(layer: Layer) -> list[bool]:
    return sorted({thread.is_alive() for thread in layer.threads})


# What comes out


@pytest.mark.parametrize("num", [0, 1, 2, 7])
def test_every_batch_comes_in_order_with_its_own_packs(num):
    given = batches(num)
    found = list(load(iter(given), Layer()))
    assert [id(loaded.batch) for loaded in found] == [id(batch) for batch in given]
    assert [loaded.packs for loaded in found] == [[f"pack {10 * n}", f"pack {10 * n + 1}"] for n in range(num)]


def test_packs_settled_before_are_handed_on():
    settled = np.array([0, 1, 2])
    given = [GlobalBatch(0, np.array([0, 1]), 2, settled), GlobalBatch(0, np.array([2, 3]), 2)]
    layer = Layer()
    list(load(given, layer))
    assert layer.bounds[0] is settled
    assert layer.bounds[1] is None


def test_waiting_is_what_passes_until_packs_are_there(monkeypatch):
    clock = iter([3.0, 5.0, 100.0, 100.5])
    monkeypatch.setattr(loader.time, "perf_counter", lambda: next(clock))
    assert [loaded.wait_seconds for loaded in load(batches(2), Layer())] == [2.0, 0.5]


# Ahead


def test_the_next_batch_is_laid_out_while_one_is_in_use():
    """The loop, holding a batch, and the thread, laying out the next, meet: neither passes without the other."""
    meeting = threading.Barrier(2)
    layer = Layer(lambda first: meeting.wait(60) if first else None)
    for number, _ in enumerate(load(batches(5), layer)):
        if number < 4:
            meeting.wait(60)
    assert meeting.n_waiting == 0 and not meeting.broken


def test_no_more_than_one_batch_is_taken_ahead():
    taken: list[int] = []

    def counted():
        for number, batch in enumerate(batches(6)):
            taken.append(number)
            yield batch

    ahead = [len(taken) - number for number, _ in enumerate(load(counted(), Layer()), start=1)]
    assert ahead == [1, 1, 1, 1, 1, 0]


def test_laying_out_happens_in_one_thread_beside_the_loop():
    layer = Layer()
    list(load(batches(4), layer))
    assert len(set(layer.threads)) == 1
    assert layer.threads[0] is not threading.current_thread()


# Errors


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_an_error_in_laying_out_is_raised_where_its_batch_would_come(bad):
    error = ValueError("no such preference")

    def fail(first):
        if first == 10 * bad:
            raise error

    layer, seen = Layer(fail), []
    with pytest.raises(ValueError) as caught:
        for loaded in load(batches(4), layer):
            seen.append(loaded.packs[0])
    assert caught.value is error
    assert seen == [f"pack {10 * n}" for n in range(bad)]
    assert alive(layer) == [False]


def test_an_error_in_the_batches_themselves_is_raised_in_the_loop():
    def breaking():
        yield from batches(2)
        raise KeyError("no third")

    layer = Layer()
    with pytest.raises(KeyError, match="no third"):
        list(load(breaking(), layer))
    assert alive(layer) == [False]


# The thread


def test_the_thread_is_gone_after_the_last_batch():
    layer = Layer()
    during = [alive(layer) for _ in load(batches(3), layer)]
    assert during == [[True]] * 3
    assert alive(layer) == [False]


@pytest.mark.parametrize("used", [1, 2])
def test_the_thread_is_gone_when_the_loop_stops_early(used):
    layer = Layer()
    loading = load(batches(5), layer)
    for _ in range(used):
        next(loading)
    assert alive(layer) == [True]
    loading.close()
    assert alive(layer) == [False]
    assert len(layer.threads) <= used + 1  # what was begun is ended, nothing more is begun
    assert list(loading) == []


def test_closing_waits_for_the_batch_that_is_being_laid_out():
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(first):
        if first == 10:
            begun.set()
            may_end.wait(60)
            ended.set()

    loading = load(batches(5), Layer(slow))
    next(loading)
    assert begun.wait(60)
    release = threading.Timer(0.05, may_end.set)
    release.start()
    loading.close()
    assert ended.is_set()
    release.join()


def test_the_thread_is_gone_when_the_loop_fails():
    layer = Layer()

    def fails_in_its_second_step():
        for number, _ in enumerate(load(batches(5), layer)):
            if number == 1:
                raise RuntimeError("step 2")

    with pytest.raises(RuntimeError, match="step 2") as caught:
        fails_in_its_second_step()
    del caught  # its traceback held the loop
    assert alive(layer) == [False]


def test_a_loader_that_was_never_asked_takes_nothing():
    taken = iter(batches(2))
    load(taken, Layer())
    assert len(list(taken)) == 2
