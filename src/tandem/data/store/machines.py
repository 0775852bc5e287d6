"""The machines of a run tokenise a set together: each tokenises a share of the rows and receives the shares of the others.

One process of each machine takes part. All of them read the file, in the same chunks, and write the results in the order of the
file, so that the store has the bytes that one machine alone would write. Nothing but the finished store is stored.

The processes keep in step by exchanges, in which all take part. A process that fails says so in its next exchange.
"""

import pickle
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from tandem.data.read.sources import Chunk
from tandem.data.store.writer import ChunkResult
from tandem.errors import AlreadyReportedError, ConfigError, DataError, TandemError, exit_code_of
from tandem.storage.ownership import temporary_folder

# In each round, every machine tokenises this many chunks per worker. With more, the last round would be less even.
CHUNKS_PER_WORKER = 4
CHUNKS_PER_ROUND = 512  # at most, of all machines; about 64 MB of text. The results of a round are in memory at once
SECONDS_TO_APPEAR = 60.0  # network file systems may show a new folder to other machines late

Exchange = Callable[[Any], list[Any]]
Tokenize = Callable[[Iterable[Chunk]], Iterator[ChunkResult]]


@dataclass(frozen=True, slots=True)
class _Failed:
    """Sent in place of a value: this machine failed. `error`: what all machines raise; None: only this one reports it."""

    exit_code: int
    error: DataError | ConfigError | None


@dataclass(frozen=True, slots=True)
class _Left:
    """Sent in place of a value: this machine takes part no longer. `exit_code`: of its error; None: it has all of its sets."""

    exit_code: int | None


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a machine knows about a set before it is tokenised."""

    name: str  # the fingerprint of the store
    is_missing: bool
    num_workers: int


@dataclass(frozen=True, slots=True)
class _Part:
    """The results of one machine in one round, pickled, and their digest."""

    results: bytes
    digest: bytes
    is_last: bool  # the rows ended in the share of this machine, or before it


class Machines:
    """The machines that tokenise together, as seen by the process of one of them. The default is this machine alone."""

    def __init__(self, number: int = 0, names: Sequence[str] = ("",), exchange: Exchange | None = None):
        """`names`: the machines, as messages name them. `exchange`: sends a value, and returns those of all, in order."""
        self._number, self._names, self._send = number, names, exchange
        self._sees: list[list[bool]] | None = None  # whether a machine sees the cache of another one

    @property
    def is_alone(self) -> bool:
        return self._send is None

    def exchange(self, message: Any) -> list[Any]:
        assert self._send is not None
        try:
            found = self._send(message)
        except BaseException:
            self._send = None
            raise
        if any(isinstance(one, _Left) for one in found):
            self._send = None
        return found

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Take part in the exchanges of the other machines inside this context. Every machine must enter it."""
        exit_code = None
        try:
            yield
        except Exception as error:
            exit_code = exit_code_of(error)
            raise
        except BaseException:  # this process is about to end
            self._send = None
            raise
        finally:
            if not self.is_alone:
                self.exchange(_Left(exit_code))

    @contextmanager
    def section(self) -> Iterator["Section"]:
        """Open a set together. An error of one machine inside this context ends the context on all machines."""
        section = Section(self, self._number, self._names)
        try:
            yield section
        except Exception as error:
            section.fail(error)
            raise

    def sees(self, folder: Path) -> list[list[bool]]:
        """Return which machine sees the cache of which other one. Found out once, with temporary folders next to `folder`."""
        if self._sees is None:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with temporary_folder(folder) as aside:
                probe = f"{aside.name}/{secrets.token_hex(8)}"
                (folder.parent / probe).touch()
                probes = self.gather(probe)
                self._sees = self.gather([(folder.parent / one).exists() for one in probes])
        return self._sees

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all machines. Raise the error of a machine that failed. No machine may have left."""
        found = self.exchange(value)
        _raise_failure(found)
        assert not self.is_alone
        return found


class _Heard(Exception):
    """Raised by an exchange in which another machine said that it failed."""

    def __init__(self, error: TandemError):
        self.error = error


def _raise_failure(messages: list[Any]) -> None:
    """Raise the error of the first machine that failed, if one did."""
    failed = [one for one in messages if isinstance(one, _Failed | _Left) and one.exit_code is not None]
    if failed:
        errors = [one.error for one in failed if isinstance(one, _Failed) and one.error is not None]
        raise _Heard(errors[0] if errors else AlreadyReportedError(failed[0].exit_code or 1))


ALONE = Machines()


class Section:
    """One set that the machines open together. It is over when the machines have agreed that nothing is left to do together."""

    def __init__(self, machines: Machines, number: int, names: Sequence[str]):
        self._machines, self._number, self._names = machines, number, names
        self._is_open = not machines.is_alone
        self._shares: list[int] = []  # chunks of each machine in a round
        self._reading_error: Exception | None = None

    def fail(self, error: Exception) -> None:
        """Let the other machines know of an error of this one. If it is theirs, raise it in place of the internal one."""
        if isinstance(error, _Heard):
            self._is_open = False
            raise error.error from None
        if self._is_open and not self._machines.is_alone:
            shared = None  # an error of this machine alone, such as a full disk
            if isinstance(error, ConfigError | DataError):
                shared = (DataError if isinstance(error, DataError) else ConfigError)(str(error))
            self._machines.exchange(_Failed(exit_code_of(error), shared))
        self._is_open = False

    def divides(self, name: str, *, is_missing: bool, num_workers: int) -> bool:
        """Agree whether the machines tokenise a set together: if it is the same set on all, and missing on at least one."""
        if not self._is_open:
            return False
        found = self._machines.exchange(_Offer(name, is_missing, num_workers))
        _raise_failure(found)
        offers = [one for one in found if isinstance(one, _Offer)]
        is_same = len(offers) == len(found) and len({one.name for one in offers}) == 1
        self._is_open = is_same and any(one.is_missing for one in offers)
        shares = [CHUNKS_PER_WORKER * one.num_workers for one in offers]
        scale = min(1.0, CHUNKS_PER_ROUND / max(1, sum(shares)))
        self._shares = [max(1, int(share * scale)) for share in shares]
        return self._is_open

    def is_writer(self, folder: Path, *, is_missing: bool) -> bool:
        """Whether this machine writes the store: of those that share a cache, the first one does."""
        sees = self._machines.sees(folder)[self._number]
        return is_missing and not any(sees[: self._number])

    def results(self, chunks: Iterable[Chunk], tokenize: Tokenize) -> Iterator[ChunkResult]:
        """Yield the results of all chunks, in order. `tokenize` is called with the share of this machine."""
        own = tokenize(self._own(iter(chunks)))
        is_last = False
        while not is_last:
            parts = self._machines.gather(self._part(own))
            for number, part in enumerate(parts):
                yield from self._unpacked(part, number)
                is_last = is_last or part.is_last
        next(own, None)  # the share of this machine may have ended with a full round

    def _own(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Yield the chunks of this machine.

        With shares of 2 and 3, the first machine has chunks 0 and 1 of a round, the second 2, 3 and 4: 0 1 | 2 3 4 || 5 6 | 7 8 9
        """
        before, own = sum(self._shares[: self._number]), self._shares[self._number]
        try:
            while True:
                read = sum(1 for _ in islice(chunks, before))
                for chunk in islice(chunks, own):
                    read += 1
                    yield chunk
                read += sum(1 for _ in islice(chunks, sum(self._shares) - before - own))
                if read < sum(self._shares):
                    return
        except Exception as error:
            self._reading_error = error
            raise

    def _part(self, own: Iterator[ChunkResult]) -> _Part:
        try:
            results = list(islice(own, self._shares[self._number]))
        except DataError as error:
            if error is self._reading_error:  # all machines read the same file
                raise
            raise DataError(f"{self._names[self._number]}: {error}") from None
        packed = pickle.dumps(results)
        return _Part(packed, blake2b(packed).digest(), len(results) < self._shares[self._number])

    def _unpacked(self, part: _Part, number: int) -> list[ChunkResult]:
        if blake2b(part.results).digest() != part.digest:
            raise TandemError(
                f"the rows that {self._names[number]} tokenised arrived damaged on {self._names[self._number]}. Nothing was "
                "stored. Start again; if this happens again, check the memory and the network of both machines."
            )
        return pickle.loads(part.results)

    def end(self, folder: Path) -> None:
        """Wait until every machine has the store. `folder`: where it is."""
        self._machines.gather(None)
        self._is_open = False
        until = time.monotonic() + SECONDS_TO_APPEAR
        while not folder.is_dir():
            if time.monotonic() > until:
                raise DataError(
                    f"{folder} was written by another machine, which shares this cache, but it is not visible on "
                    f"{self._names[self._number]} after {SECONDS_TO_APPEAR:g} seconds. Check the shared disk, or set "
                    "TANDEM_CACHE to a directory of this machine."
                )
            list(folder.parent.iterdir())  # makes NFS look again
            time.sleep(0.1)
