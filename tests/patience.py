"""A bound on how long a test may wait, where a mistake would make it wait for ever."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """TimeoutError in what has not come to its end by then."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"not done within {seconds} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
