"""A pool of worker processes that returns results in order and kills workers that run too long or take too much memory."""

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

# A forked process shares the loaded tokenizer. Forking is only safe on Linux.
METHOD = "fork" if sys.platform == "linux" else "spawn"
# New objects between garbage collections. Rows create many objects but no cycles, so Python's 700 would waste time.
GC_THRESHOLD = 200_000
PR_SET_PDEATHSIG = 1  # from linux/prctl.h
# Memory that a template may take in addition to what the process has already.
TEMPLATE_BYTES = 4 * 1024**3
EXIT_SECONDS = 5.0  # time that a process may take to exit once its pipe is closed


class WorkerStalled(Exception):
    """Raised when a worker was killed because it spent more than `seconds` on row `row` of `item`.

    `extra_seconds`: the part of `seconds` that was added to the usual limit for this row.
    """

    def __init__(self, item: Any, row: int, seconds: float = 0.0, extra_seconds: float = 0.0):
        self.item, self.row, self.seconds, self.extra_seconds = item, row, seconds, extra_seconds


class WorkerDied(Exception):
    """Raised when a worker exited without a result for `item`. Most likely the system killed it because memory ran out.

    `aborted`: whether the worker exited with SIGABRT. Some libraries abort if tandem's memory limit stops an allocation.
    """

    def __init__(self, item: Any, *, aborted: bool = False):
        self.item, self.aborted = item, aborted


class RowMonitor:
    """Shared memory in which a worker records its current row, so that the parent process can limit the time per row."""

    def __init__(self) -> None:
        self._row = multiprocessing.RawValue("q", -1)
        self._extra_seconds = multiprocessing.RawValue("d", 0.0)

    @property
    def row(self) -> int:
        return self._row.value

    @property
    def extra_seconds(self) -> float:
        return self._extra_seconds.value

    def start_row(self, row: int, extra_seconds: float = 0.0) -> None:
        """Record that work on a row starts. `extra_seconds`: time added to the usual limit, for a row that needs more work."""
        self._extra_seconds.value = extra_seconds
        self._row.value = row

    def end_row(self) -> None:
        self._row.value = -1


def default_workers() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Pool(Generic[T, R]):
    """A pool of up to `num_workers` processes. They are reused by later calls of `map`, and stopped when the `with` block ends.

    At most two items per worker are in progress, so memory stays bounded.
    """

    def __init__(self, work: Callable[[T, RowMonitor], R], num_workers: int, row_seconds: float):
        self._work, self._num_workers, self._row_seconds = work, num_workers, row_seconds
        self._workers: list[_Worker] = []

    def __enter__(self) -> "Pool[T, R]":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def map(self, items: Iterable[T], num_workers: int | None = None) -> Iterator[R]:
        """Yield the result of every item, in order. An error raised in a worker is raised here.

        `num_workers`: a new maximum number of workers; None keeps the current one.
        """
        self._num_workers = num_workers or self._num_workers
        in_progress: deque[_Task] = deque()  # in the order of the items
        unassigned: deque[_Task] = deque()
        stream = iter(items)
        while True:
            self._assign(unassigned)
            for item in islice(stream, 2 * self._num_workers - len(in_progress)):
                in_progress.append(_Task(item))
                unassigned.append(in_progress[-1])
                self._assign(unassigned)
            if not in_progress:
                return
            if not in_progress[0].is_done:
                self._collect()
            while in_progress and in_progress[0].is_done:
                yield in_progress.popleft().result()

    def _assign(self, tasks: "deque[_Task]") -> None:
        """Send tasks to idle workers only. If parent and worker both wrote to a full pipe, they would deadlock."""
        while tasks and (worker := self._idle()):
            worker.assign(tasks.popleft())

    def _idle(self) -> "_Worker | None":
        """Return an idle worker. If all workers are busy, start a new worker. At the maximum number of workers, return None."""
        idle = next((worker for worker in self._workers if worker.task is None), None)
        if idle is None and len(self._workers) < self._num_workers:
            # A forked worker inherits the parent's ends of earlier workers' pipes. It closes them: otherwise they would
            # stay open after the parent has exited.
            earlier_pipes = [worker.pipe for worker in self._workers]
            gc.freeze()  # otherwise a worker's garbage collector would write to, and so copy, all of the parent's pages
            idle = _Worker(multiprocessing.get_context(METHOD), self._work, earlier_pipes)
            gc.unfreeze()
            self._workers.append(idle)
        return idle

    def _collect(self) -> None:
        """Wait up to a second for results, and store those that arrive.

        If a worker exceeds its time limit, kill it and raise WorkerStalled.
        """
        busy = [worker for worker in self._workers if worker.task]
        ready = wait([worker.pipe for worker in busy], timeout=min(1.0, self._row_seconds / 4))
        for worker in busy:
            if worker.pipe in ready:
                worker.receive()
            elif worker.seconds_on_row() > (limit := self._row_seconds + worker.monitor.extra_seconds):
                worker.kill()
                item = worker.task.item if worker.task else None
                raise WorkerStalled(item, worker.monitor.row, seconds=limit, extra_seconds=worker.monitor.extra_seconds)

    def stop(self) -> None:
        for worker in self._workers:  # kill all before waiting, because exiting takes a while
            worker.kill()
        for worker in self._workers:
            worker.wait()
        self._workers = []


class _Task:
    """An item to process. When it is done, the task also holds the result, or the error that was raised."""

    def __init__(self, item: Any):
        self.item = item
        self.is_done = False
        self._outcome: Any = None

    def set_outcome(self, outcome: Any) -> None:
        self.is_done, self._outcome = True, outcome

    def result(self) -> Any:
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome


class _Worker:
    """A worker process, the pipe to it, its unfinished task, and the monitor of its current row."""

    def __init__(self, context: Any, work: Callable[..., Any], earlier_pipes: list[Connection]):
        self.pipe, child_pipe = context.Pipe()
        self.task: _Task | None = None
        self.monitor = RowMonitor()
        self._seen = (-1, 0.0, time.monotonic())
        inherited = [*earlier_pipes, self.pipe] if METHOD == "fork" else []
        self._process = context.Process(target=_serve, args=(child_pipe, work, self.monitor, inherited), daemon=True)
        self._process.start()
        child_pipe.close()

    def assign(self, task: _Task) -> None:
        self.task, self._seen = task, (-1, 0.0, time.monotonic())
        with suppress(BrokenPipeError):  # it died, which `receive` will report
            self.pipe.send(task.item)

    def receive(self) -> None:
        assert self.task is not None
        task, self.task = self.task, None
        try:
            task.set_outcome(self.pipe.recv())
        except (EOFError, OSError):  # the result is missing or incomplete
            self._process.join(EXIT_SECONDS)
            raise WorkerDied(task.item, aborted=self._process.exitcode == -signal.SIGABRT) from None

    def seconds_on_row(self) -> float:
        """Return the seconds since the worker was first seen at its current row, or 0 if it has no current row."""
        now, current = time.monotonic(), (self.monitor.row, self.monitor.extra_seconds)
        if current[0] == -1 or current != self._seen[:2]:
            self._seen = (*current, now)
        return now - self._seen[2]

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()
        self.pipe.close()


def _serve(pipe: Connection, work: Callable[..., Any], monitor: RowMonitor, inherited: list[Connection]) -> None:
    """Run a worker: receive items and send back results until the parent closes the pipe."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.set_threshold(GC_THRESHOLD)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent decides what it means
    _die_with_parent()
    _die_quietly()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the worker processes already use all cores
    for other in inherited:
        other.close()
    while True:
        try:
            item = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            outcome = work(item, monitor)
        except TandemError as error:
            outcome = error
        except Exception:
            outcome = RuntimeError(f"in a worker process:\n{traceback.format_exc()}")
        monitor.end_row()
        pipe.send(outcome)


def _die_with_parent() -> None:
    """Make Linux kill this process when its parent exits. A worker that hangs would not notice that the pipe is closed."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _die_quietly() -> None:
    """Disable core files and output to stderr, because a library may abort this process when it reaches the memory limit."""
    faulthandler.disable()
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        os.close(null)


def run_in_process(work: Callable[[], R], seconds: float, num_bytes: int) -> R:
    """Call `work` in a separate process with limits on time and memory, and return its result.

    `num_bytes`: the memory that `work` may take in addition to the memory of this process. Raises WorkerStalled,
    WorkerDied or MemoryError if a limit is exceeded. On systems other than Linux, `work` is called in this process
    without limits.
    """
    if METHOD != "fork":
        return work()

    def limited(_: None, monitor: RowMonitor) -> R | MemoryError:
        monitor.start_row(0)
        try:
            with bounded_memory(num_bytes):
                return work()
        except MemoryError:
            return MemoryError()

    with Pool(limited, 1, seconds) as pool:
        result = next(pool.map([None]))
    if isinstance(result, MemoryError):
        raise result
    return result


@contextmanager
def bounded_memory(num_bytes: int | None = None) -> Iterator[None]:
    """Limit the memory of this process inside the block, so that excessive allocations raise MemoryError.

    `num_bytes`: the limit in addition to the memory in use; the default is TEMPLATE_BYTES. A library that is not written
    in Python may abort the process instead of raising MemoryError, so call such libraries in a worker.
    """
    num_bytes = TEMPLATE_BYTES if num_bytes is None else num_bytes
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + num_bytes, before[1]))
    except (ImportError, OSError, ValueError):  # this system does not support the limit
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
