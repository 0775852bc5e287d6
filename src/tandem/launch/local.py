"""Starts the ranks of a run as child processes of this one, forwards signals to them, and turns their ends into one."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tandem.errors import LOST_RANK_EXIT_CODE, AlreadyReportedError, StoppedError, TandemError
from tandem.isolation import LAUNCHER, STORE_FD, isolated_environment
from tandem.training.run.stopping import SIGNALS

COMMAND = (sys.executable, "-P", "-m", "tandem.launch.child")
POLL_SECONDS = 0.05
# How long the other ranks may run after one has failed. A rank whose peers are lost may wait for them in a collective.
FAILURE_SECONDS = 10.0
# After a rank has stopped as asked to, the first rank may still close trackers.
STOP_SECONDS = 120.0
RESUME = "Checkpoints saved before are intact; run the same command to resume from the newest."


def train_on_ranks(arguments: Sequence[str], num_ranks: int) -> None:
    """Run `tandem` with these arguments on several ranks of this machine, and wait for their end.

    Raise StoppedError after a signal, AlreadyReportedError if a rank has reported an error, and TandemError if a rank was killed.
    """
    ranks = _start(arguments, num_ranks)
    forwarding = _Forwarding(ranks)
    try:
        with forwarding.installed():
            failures = _wait(ranks)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
            assert rank.stdin is not None
            rank.stdin.close()
    raise_outcome([rank.returncode for rank in ranks], failures, forwarding.first)


def rank_environment(number: int, num_ranks: int, port: int) -> dict[str, str]:
    """Return the variables of a rank on this machine, as torchrun would set them. The store listens on the loopback address."""
    return {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks))),
        LAUNCHER: "local",
    }


def _start(arguments: Sequence[str], num_ranks: int) -> list[subprocess.Popen[bytes]]:
    """Start the ranks. The first one gets a socket that listens already, so that no other process can take its port."""
    ranks: list[subprocess.Popen[bytes]] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port, descriptor = listening.getsockname()[1], listening.fileno()
        for number in range(num_ranks):
            own = {STORE_FD: str(descriptor)} if number == 0 else {}
            ranks.append(
                subprocess.Popen(
                    [*COMMAND, *arguments],
                    stdin=subprocess.PIPE,  # never written to: it closes when this process ends, and the ranks then stop
                    env={**isolated_environment(), **rank_environment(number, num_ranks, port), **own},
                    pass_fds=(descriptor,) if number == 0 else (),
                    start_new_session=True,  # Ctrl-C reaches this process alone, which then stops the ranks
                )
            )
    return ranks


class _Forwarding:
    """Forwards signals to all ranks. The second signal kills them."""

    def __init__(self, ranks: Sequence[subprocess.Popen[bytes]]):
        self._ranks = ranks
        self.first: signal.Signals | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        # Under nohup, SIGHUP is ignored, and stays so.
        handled = [one for one in SIGNALS if signal.getsignal(one) is not signal.SIG_IGN]
        before = {one: signal.signal(one, self._handle) for one in handled}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def _handle(self, number: int, _: Any) -> None:
        is_first, self.first = self.first is None, self.first or signal.Signals(number)
        for rank in self._ranks:
            if rank.poll() is None:
                rank.send_signal(number if is_first else signal.SIGKILL)


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> dict[int, int]:
    """Wait until all ranks have ended. Return the exit codes of those that failed, in the order in which they did.

    Ranks that still run some time after another one has failed are killed, and are not in the result.
    """
    failures: dict[int, int] = {}
    end = float("inf")
    while any(rank.poll() is None for rank in ranks):
        codes = {number: code for number, rank in enumerate(ranks) if (code := rank.poll())}
        if time.monotonic() < end:
            for number in sorted(codes.keys() - failures.keys(), key=lambda number: is_consequence(codes[number])):
                failures[number] = codes[number]
                allowed = STOP_SECONDS if codes[number] in SIGNALS.values() else FAILURE_SECONDS
                end = min(end, time.monotonic() + allowed)
        else:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
        time.sleep(POLL_SECONDS)
    if time.monotonic() < end:
        last = {number: rank.returncode for number, rank in enumerate(ranks) if rank.returncode}
        failures |= {number: code for number, code in last.items() if number not in failures}
    return failures


def is_consequence(exit_code: int) -> bool:
    """Whether a rank may have ended with this code because another one did: gloo's threads abort the process."""
    return exit_code in (LOST_RANK_EXIT_CODE, -signal.SIGABRT)


def raise_outcome(codes: Sequence[int], failures: dict[int, int], forwarded: signal.Signals | None) -> None:
    """Raise the error that the ends of the ranks amount to. Return if all have finished.

    `failures`: the exit codes of ranks that failed, the first failure first. `forwarded`: the signal that was sent to all.
    """
    if not any(codes):
        return
    causes = {number: code for number, code in failures.items() if not is_consequence(code)} or failures
    number, code = next(iter(causes.items()))
    if forwarded is not None and (code < 0 or code in (LOST_RANK_EXIT_CODE, *SIGNALS.values())):
        if codes[0] in SIGNALS.values():  # the first rank has reported the stop
            raise AlreadyReportedError(codes[0])
        raise StoppedError(forwarded.name, SIGNALS[forwarded])
    if code < 0:
        raise TandemError(killed_message(number, -code))
    if code == LOST_RANK_EXIT_CODE:
        hung = [number for number in range(len(codes)) if number not in failures and codes[number]]
        who = f"rank {hung[0]} did not answer the others and was stopped" if hung else "the ranks lost each other"
        raise TandemError(f"{who}. {RESUME}")
    raise AlreadyReportedError(code)


def killed_message(number: int, signal_number: int) -> str:
    """Return the message about a rank that a signal has ended."""
    name = signal.Signals(signal_number).name
    why = " (kill -9, or the system ran out of memory)" if name == "SIGKILL" else ""
    return f"rank {number} was killed by {name}{why}, so the other ranks were stopped. {RESUME}"
