"""Work spread over processes that can be killed: items in; their results, in the order of the items, out."""

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Generic, TypeVar

from tandem.errors import TandemError

T = TypeVar("T")
R = TypeVar("R")

# A forked process has the tokenizer at once; elsewhere than on Linux forking is not safe.
METHOD = "fork" if sys.platform == "linux" else "spawn"
COLLECT_AFTER = 200_000  # new objects. Rows make many and no circles: looking every 700 is in vain
PR_SET_PDEATHSIG = 1
# Memory that a template may take in addition to what the process has already.
TEMPLATE_BYTES = 4 * 1024**3
ENDING_SECONDS = 5.0  # that a process may take to end once its pipe is closed


class Stalled(Exception):
    """A worker was busy with one row for too long and was killed. `item` is what it worked on, `row` which of its rows.

    `seconds` is the limit; `more_seconds` what the row was given of it beyond the usual.
    """

    def __init__(self, item: Any, row: int, seconds: float = 0.0, more_seconds: float = 0.0):
        self.item, self.row, self.seconds, self.more_seconds = item, row, seconds, more_seconds


class Died(Exception):
    """A worker ended without an answer: killed by the system, most likely for its memory.

    A library in which memory cannot be had ends the process itself (`aborted`): a limit of ours was met.
    """

    def __init__(self, item: Any, *, aborted: bool = False):
        self.item, self.aborted = item, aborted


class Watch:
    """Where a worker reports which row it is at, while it does what may never end."""

    def __init__(self) -> None:
        self._row = multiprocessing.RawValue("q", -1)
        self._more_seconds = multiprocessing.RawValue("d", 0.0)

    @property
    def row(self) -> int:
        return self._row.value

    @property
    def more_seconds(self) -> float:
        return self._more_seconds.value

    def at(self, row: int, more_seconds: float = 0.0) -> None:
        """`more_seconds`: time allowed beyond the limit of a row, for a row that takes much work."""
        self._more_seconds.value = more_seconds
        self._row.value = row

    def off(self) -> None:
        self._row.value = -1


def default_workers() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Pool(Generic[T, R]):
    """Up to a number of processes, kept from one `map` to the next; all are gone when the block is left, however it is left.

    At most two items for each are under way, so that memory stays bounded.
    """

    def __init__(self, work: Callable[[T, Watch], R], num_workers: int, row_seconds: float):
        self._work, self._num_workers, self._row_seconds = work, num_workers, row_seconds
        self._workers: list[_Worker] = []

    def __enter__(self) -> "Pool[T, R]":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def map(self, items: Iterable[T], num_workers: int | None = None) -> Iterator[R]:
        """The result of every item, in order; an error raised by the work is raised here.

        num_workers: how many may work from now on.
        """
        self._num_workers = num_workers or self._num_workers
        under_way: deque[_Task] = deque()  # in the order of the items
        not_given: deque[_Task] = deque()
        stream = iter(items)
        while True:
            self._give(not_given)
            for item in islice(stream, 2 * self._num_workers - len(under_way)):
                under_way.append(_Task(item))
                not_given.append(under_way[-1])
                self._give(not_given)
            if not under_way:
                return
            if not under_way[0].is_done:
                self._collect()
            while under_way and under_way[0].is_done:
                yield under_way.popleft().answer()

    def _give(self, tasks: "deque[_Task]") -> None:
        """Only to idle workers: two sides that both write and neither reads would wait for ever."""
        while tasks and (worker := self._idle()):
            worker.give(tasks.popleft())

    def _idle(self) -> "_Worker | None":
        """A worker that has nothing to do. They are started as they are needed: a small file needs one."""
        idle = next((worker for worker in self._workers if worker.task is None), None)
        if idle is None and len(self._workers) < self._num_workers:
            # A forked process inherits our ends of its elders' pipes: kept open there, they would outlive us.
            elders = [worker.pipe for worker in self._workers]
            gc.freeze()  # else a worker's collector would touch, and so copy, every page of ours
            idle = _Worker(multiprocessing.get_context(METHOD), self._work, elders)
            gc.unfreeze()
            self._workers.append(idle)
        return idle

    def _collect(self) -> None:
        """Wait until some worker answers; kill and report one that stalls."""
        busy = [worker for worker in self._workers if worker.task]
        ready = wait([worker.pipe for worker in busy], timeout=min(1.0, self._row_seconds / 4))
        for worker in busy:
            if worker.pipe in ready:
                worker.take()
            elif worker.seconds_on_row() > (limit := self._row_seconds + worker.watch.more_seconds):
                worker.kill()
                more = worker.watch.more_seconds
                raise Stalled(worker.task.item if worker.task else None, worker.watch.row, limit, more)

    def stop(self) -> None:
        for worker in self._workers:  # all at once: an end takes a while
            worker.kill()
        for worker in self._workers:
            worker.wait()
        self._workers = []


class _Task:
    """An item and, when it is done, what came of it."""

    def __init__(self, item: Any):
        self.item = item
        self.is_done = False
        self._result: Any = None

    def done(self, result: Any) -> None:
        self.is_done, self._result = True, result

    def answer(self) -> Any:
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result


class _Worker:
    """A process, its pipe, the task it was given and has not answered, and its watch."""

    def __init__(self, context: Any, work: Callable[..., Any], elders: list[Connection]):
        self.pipe, theirs = context.Pipe()
        self.task: _Task | None = None
        self.watch = Watch()
        self._seen = (-1, 0.0, time.monotonic())
        inherited = [*elders, self.pipe] if METHOD == "fork" else []
        self._process = context.Process(target=_serve, args=(theirs, work, self.watch, inherited), daemon=True)
        self._process.start()
        theirs.close()

    def give(self, task: _Task) -> None:
        self.task, self._seen = task, (-1, 0.0, time.monotonic())
        with suppress(BrokenPipeError):  # it died; reading from it will say so
            self.pipe.send(task.item)

    def take(self) -> None:
        assert self.task is not None
        task, self.task = self.task, None
        try:
            task.done(self.pipe.recv())
        except (EOFError, OSError):  # nothing came, or half an answer
            self._process.join(ENDING_SECONDS)
            raise Died(task.item, aborted=self._process.exitcode == -signal.SIGABRT) from None

    def seconds_on_row(self) -> float:
        now, at = time.monotonic(), (self.watch.row, self.watch.more_seconds)
        if at[0] == -1 or at != self._seen[:2]:
            self._seen = (*at, now)
        return now - self._seen[2]

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()
        self.pipe.close()


def _serve(pipe: Connection, work: Callable[..., Any], watch: Watch, inherited: list[Connection]) -> None:
    """The life of a worker: take an item, answer, until the other side is gone."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.set_threshold(COLLECT_AFTER)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent decides what it means
    _die_with_parent()
    _end_quietly()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    for other in inherited:
        other.close()
    while True:
        try:
            item = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = work(item, watch)
        except TandemError as error:
            answer = error
        except Exception:
            answer = RuntimeError(f"in a worker process:\n{traceback.format_exc()}")
        watch.off()
        pipe.send(answer)


def _die_with_parent() -> None:
    """A worker in an endless row hears of nothing: have the system end it when the parent is gone."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_quietly() -> None:
    """Of a process that a memory limit ends: no core file of gigabytes, and no text of a library on the terminal."""
    faulthandler.disable()
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)


def in_a_process(work: Callable[[], R], seconds: float, num_bytes: int) -> R:
    """What work returns, done in a process with a limit on its seconds and on the bytes it takes beyond this one's.

    Raises Stalled, Died or MemoryError where that is not enough. Where processes are not forked, it is done in this one.
    """
    if METHOD != "fork":
        return work()

    def within(_: None, watch: Watch) -> R | MemoryError:
        watch.at(0)
        try:
            with bounded_memory(num_bytes):
                return work()
        except MemoryError:
            return MemoryError()

    with Pool(within, 1, seconds) as pool:
        answer = next(pool.map([None]))
    if isinstance(answer, MemoryError):
        raise answer
    return answer


@contextmanager
def bounded_memory(num_bytes: int | None = None) -> Iterator[None]:
    """Within: MemoryError, not a machine brought down, where a template writes without end.

    A library not written in Python ends the process: use a worker for what calls one. `num_bytes`: in addition to what the
    process has; None: what a template may take.
    """
    num_bytes = TEMPLATE_BYTES if num_bytes is None else num_bytes
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + num_bytes, before[1]))
    except (ImportError, OSError, ValueError):  # no such limits on this system
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
