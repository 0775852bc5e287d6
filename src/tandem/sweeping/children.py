"""Trains the runs of a sweep in child processes, one or several at a time, and follows their logs."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tandem.errors import CheckpointError
from tandem.isolation import LAUNCHER, isolated_environment
from tandem.runs import status_of
from tandem.storage.ownership import open_own
from tandem.terminal.arguments import same_call
from tandem.training.run.stopping import SIGNALS, Stopping

COMMAND = (sys.executable, "-P", "-m", "tandem.launch.child")
POLL_SECONDS = 0.1
# Of a run that was asked to stop; negative before it handles signals.
STOPPED_EXIT_CODES = (*SIGNALS.values(), *(-one for one in SIGNALS))
STEP = re.compile(rb"^step (\d+)/(\d+) ", re.MULTILINE)
ERROR = "tandem: error: "
MAX_ERROR_BYTES = 64 * 1024  # read from the end of a log
# How long the process of a killed sweep may take to save its checkpoint, before its run counts as in use.
MAX_WAIT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Task:
    """A run to train: the arguments of `tandem`, the directory that they name, and a log."""

    name: str
    arguments: Sequence[str]
    run: Path
    log: Path
    on_one_gpu: bool = True  # otherwise the run starts ranks on as many GPUs as its configuration asks for


@dataclass(frozen=True, slots=True)
class Ended:
    """How the process of a run ended."""

    exit_code: int  # negative: the signal that killed it
    is_stopped: bool  # whether it was asked to stop, and can be resumed
    error: str | None  # the message of a run that failed
    seconds: float


@dataclass(slots=True)
class _Child:
    task: Task
    slot: int
    process: subprocess.Popen[bytes]
    log: IO[bytes]  # opened for reading at the place where this process begins to write
    started: float
    begin: int
    unread: bytes = b""
    step: tuple[int, int] | None = None  # the newest step, and the last one of the run
    asked_to_stop: bool = False

    def follow(self) -> None:
        """Read what the process has printed since the last call."""
        self.unread += self.log.read()
        complete, _, self.unread = self.unread.rpartition(b"\n")
        if found := STEP.findall(complete):
            self.step = int(found[-1][0]), int(found[-1][1])

    def ended(self) -> Ended:
        code, seconds = self.process.returncode, time.monotonic() - self.started
        is_stopped = code != 0 and (self.asked_to_stop or code in STOPPED_EXIT_CODES)
        error = None if code == 0 or is_stopped else _error_in(self.task.log, self.begin, code)
        return Ended(code, is_stopped, error, seconds)


Follower = Callable[[Mapping[str, tuple[int, int] | None]], None]


def train_all(
    tasks: Sequence[Task],
    environments: Sequence[Mapping[str, str]],
    stopping: Stopping,
    *,
    started: Callable[[Task], None],
    ended: Callable[[Task, Ended], None],
    following: Follower = lambda steps: None,
) -> None:
    """Train every task, as many at a time as there are environments. A run that fails does not stop the others.

    `environments`: for each process, the environment variables that select its device.
    Only one run at a time is before its first step, so that tokens and the reference are computed once and then shared.
    If a stop is requested, or a run was stopped by a signal, the processes stop after saving and no other run starts.
    """
    waiting, running = list(tasks), list[_Child]()
    is_stopping = False
    try:
        while running or (waiting and not is_stopping):
            is_stopping = is_stopping or stopping.is_wanted()
            is_starting = any(child.step is None for child in running)
            if waiting and not is_stopping and not is_starting and len(running) < len(environments):
                free = set(range(len(environments))) - {child.slot for child in running}
                running.append(_start(task := waiting.pop(0), min(free), environments, stopping))
                started(task)
            for child in list(running):
                if is_stopping and not child.asked_to_stop:
                    _send(child, signal.SIGINT)
                    child.asked_to_stop = True
                is_over = child.process.poll() is not None
                child.follow()
                if is_over:
                    running.remove(child)
                    outcome = _closed(child)
                    is_stopping = is_stopping or outcome.is_stopped
                    ended(child.task, outcome)
            following({child.task.name: child.step for child in running})
            time.sleep(POLL_SECONDS if running else 0)
    finally:
        for child in running:  # an error in this process: their input closes, and they stop as after SIGTERM
            _closed(child)


def _start(task: Task, slot: int, environments: Sequence[Mapping[str, str]], stopping: Stopping) -> _Child:
    _wait_until_free(task.run, stopping)
    task.log.parent.mkdir(exist_ok=True)
    alone = {LAUNCHER: "sweep"} if task.on_one_gpu else {}
    environment = {**isolated_environment(), "PYTHONUNBUFFERED": "1", **environments[slot], **alone}
    with open_own(task.log, "ab") as log:
        begin = log.tell()
        process = subprocess.Popen(
            [*COMMAND, *task.arguments],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the sweep alone, which then stops its processes
        )
    reading = task.log.open("rb")
    reading.seek(begin)
    return _Child(task=task, slot=slot, process=process, log=reading, started=time.monotonic(), begin=begin)


def _wait_until_free(run: Path, stopping: Stopping) -> None:
    """Wait for the process of a killed sweep, which saves its checkpoint before it ends."""
    end = time.monotonic() + MAX_WAIT_SECONDS
    while status_of(run) == "running" and not stopping.is_wanted():
        if time.monotonic() > end:
            raise CheckpointError(f"{run} is in use by another process. Wait for it, then repeat {same_call()}.")
        time.sleep(POLL_SECONDS)


def _closed(child: _Child) -> Ended:
    """Close the input of a process, wait for its end, and return how it ended."""
    assert child.process.stdin is not None
    child.process.stdin.close()
    child.process.wait()
    child.log.close()
    return child.ended()


def _send(child: _Child, number: int) -> None:
    if child.process.poll() is None:
        child.process.send_signal(number)


def message_in(lines: Sequence[str]) -> str | None:
    """Return the last error message of `tandem` in these lines; None if there is none."""
    errors = [place for place, line in enumerate(lines) if line.startswith(ERROR)]
    return "\n".join(lines[errors[-1] :]).removeprefix(ERROR).strip() if errors else None


def _error_in(log: Path, begin: int, exit_code: int) -> str:
    """Return the message of a failed run: what it printed as an error, else the last line of its log from `begin` on."""
    how = f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
    with log.open("rb") as file:
        file.seek(max(begin, os.fstat(file.fileno()).st_size - MAX_ERROR_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    if message := message_in(lines):
        return message
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{how}; the last line of its log: {said}" if said else f"{how}, without a message"
