"""Finds out which rank ended or does not answer, after a rank that waited for it failed.

A thread of every rank writes a sign of life to the store through which the ranks found each other. It is read only after a
failure.
"""

import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

SECONDS_BETWEEN_SIGNS = 1.0
SECONDS_TO_WATCH = 5.0  # for how long the signs of other ranks are watched after a failure


@dataclass(frozen=True, slots=True)
class Sign:
    """A sign of life of one rank."""

    number: int
    count: int  # of the signs so far
    waits: int  # how many times it has waited for all other ranks
    exchanges: int  # since then, how many times it has waited for the first ranks of the other machines
    host: str
    pid: int


class Presence:
    """Writes this rank's signs of life, and reads those of the others."""

    def __init__(self, store: Any, number: int, num_ranks: int):
        self._store = dist.PrefixStore("presence", store.clone())
        self._store.set_timeout(timedelta(seconds=SECONDS_TO_WATCH))
        self._number, self._num_ranks, self._waits, self._exchanges, self._count = number, num_ranks, 0, 0, 0
        self._ends = threading.Event()
        self._write()
        self._first = None if number == 0 else self._first_sign()
        threading.Thread(target=self._write_signs, name="presence", daemon=True).start()

    def waits(self) -> None:
        """Note that this rank is about to wait for all others."""
        self._waits, self._exchanges = self._waits + 1, 0

    def exchanges(self) -> None:
        """Note that this rank is about to wait for the first ranks of the other machines."""
        self._exchanges += 1

    def end(self) -> None:
        self._ends.set()

    def _write_signs(self) -> None:
        with suppress(Exception):  # the store ended: so will the run
            while not self._ends.wait(SECONDS_BETWEEN_SIGNS):
                self._write()

    def _write(self) -> None:
        self._count += 1
        waits = {"waits": self._waits, "exchanges": self._exchanges}
        sign = {"count": self._count, **waits, "host": socket.gethostname(), "pid": os.getpid()}
        self._store.set(str(self._number), json.dumps(sign))

    def _read(self) -> dict[int, Sign]:
        others = [number for number in range(self._num_ranks) if number != self._number]
        return {number: self._sign_of(number) for number in others if self._store.check([str(number)])}

    def _sign_of(self, number: int) -> Sign:
        return Sign(number, **json.loads(self._store.get(str(number))))

    def _first_sign(self) -> Sign | None:
        """Wait for a sign of rank 0. It is kept: rank 0 often serves the store, which cannot be read after it ended."""
        with suppress(Exception):  # rank 0 has already ended
            return self._sign_of(0)

    def _read_twice(self, signs: list[dict[int, Sign]]) -> None:
        with suppress(Exception):  # the store ended
            signs.append(self._read())
            time.sleep(SECONDS_TO_WATCH)
            signs.append(self._read())

    def _describe_lost_store(self) -> str:
        """Describe why the store cannot be read. It is served by rank 0, or by its launcher, such as torchrun."""
        launcher = ", or the launcher that ranks find each other through, ended"
        if self._first is None:
            return f"rank 0{launcher}"
        if _ends_soon(self._first):
            return f"{_named([self._first])} ended"
        return f"{_named([self._first])}{launcher if is_served_by_launcher() else ' no longer answers'}"

    def describe_missing(self) -> str | None:
        """Describe the ranks that ended, do not answer, or have not arrived, in one sentence. Return None if there are none."""
        signs: list[dict[int, Sign]] = []
        # In a thread: while the rank that serves the store hangs, reading from it never returns.
        watching = threading.Thread(target=self._read_twice, args=(signs,), daemon=True)
        watching.start()
        watching.join(3 * SECONDS_TO_WATCH)
        if len(signs) < 2:
            return self._describe_lost_store()
        before, now = signs
        silent = [sign for number, sign in now.items() if before.get(number, sign).count == sign.count]
        if silent:
            return f"{_named(silent)} {'ended' if all(_is_gone(sign) for sign in silent) else 'no longer answers'}"
        # While the first ranks of all machines wait for each other, the other ranks already wait for these.
        late = [one for one in now.values() if (one.waits, one.exchanges) < (self._waits, self._exchanges)]
        return f"{_named(late)} is running, but the others waited for it in vain" if late else None


def _named(signs: list[Sign]) -> str:
    """Return the ranks in words, such as "rank 3 (process 71 on gpu-7)"."""
    return " and ".join(f"rank {sign.number} (process {sign.pid} on {sign.host})" for sign in signs)


def _is_gone(sign: Sign) -> bool:
    """Whether the process of a rank certainly ended. That of a rank on another machine may also be cut off from the network."""
    if sign.host != socket.gethostname():
        return False
    status = Path(f"/proc/{sign.pid}/stat")
    return not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def _ends_soon(sign: Sign) -> bool:
    """Whether the process of a rank certainly ended. Its connections are closed a moment before it has ended."""
    until = time.monotonic() + SECONDS_TO_WATCH
    while sign.host == socket.gethostname() and not _is_gone(sign) and time.monotonic() < until:
        time.sleep(0.1)
    return _is_gone(sign)


def is_served_by_launcher() -> bool:
    """Whether the launcher serves the store through which ranks find each other, as torchrun does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


_presence: Presence | None = None


def start_signs(number: int, num_ranks: int) -> None:
    """Start to write signs of life, if there are several ranks."""
    global _presence
    if num_ranks > 1 and _presence is None:
        _presence = Presence(dist.distributed_c10d._get_default_store(), number, num_ranks)


def end_signs() -> None:
    global _presence
    if _presence is not None:
        _presence.end()
        _presence = None


def note_wait() -> None:
    """Note that this rank is about to wait for all others."""
    if _presence is not None:
        _presence.waits()


def note_exchange() -> None:
    """Note that this rank is about to wait for the first ranks of the other machines."""
    if _presence is not None:
        _presence.exchanges()


def describe_missing() -> str | None:
    """Describe the ranks that ended, do not answer, or have not arrived. Takes a few seconds. Return None if unknown."""
    return None if _presence is None else _presence.describe_missing()
