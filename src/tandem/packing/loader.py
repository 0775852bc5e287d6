"""Batches in; the same with their packs laid out, one batch ahead of the one that is being computed."""

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tandem.packing.layout import Pack
from tandem.packing.packer import Packer
from tandem.packing.schedule import GlobalBatch


@dataclass(frozen=True, slots=True)
class LoadedBatch:
    """A batch, its packs, and how long the loop had to wait for them."""

    batch: GlobalBatch
    packs: list[Pack]
    wait_seconds: float


def load_ahead(batches: Iterable[GlobalBatch], packer: Packer) -> Iterator[LoadedBatch]:
    """Every batch in order; while one is in use, a thread lays out the next."""

    def lay_out(batch: GlobalBatch) -> tuple[GlobalBatch, list[Pack]]:
        return batch, list(packer.micro_batches(batch.preferences, batch.bounds))

    stream = iter(batches)
    with ThreadPoolExecutor(1, thread_name_prefix="loader") as thread:
        first = next(stream, None)
        ahead = thread.submit(lay_out, first) if first else None
        while ahead is not None:
            start = time.perf_counter()
            batch, packs = ahead.result()
            waited = time.perf_counter() - start
            following = next(stream, None)
            ahead = thread.submit(lay_out, following) if following else None
            yield LoadedBatch(batch, packs, waited)
