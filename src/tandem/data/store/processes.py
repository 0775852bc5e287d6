"""Tokenises chunks of rows in worker processes, with limits on time and memory."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from tandem.data.read.sources import Chunk, RowError
from tandem.data.store.pool import Pool, RowMonitor, WorkerDied, WorkerStalled, bounded_memory
from tandem.data.store.writer import ENCODE_BYTES, ChunkResult, Recipe, row_range
from tandem.data.text.template import ANOTHER_TEMPLATE, Template
from tandem.errors import ConfigError, DataError

# Time limit of a chat template for one row. A normal one takes about a millisecond.
ROW_SECONDS = 30.0
# After a set with more chunks, new processes are started: the memory of the old ones has grown, and the start is cheap
# compared with the work.
MAX_REUSED_CHUNKS = 100
OTHER_TOKENIZER_HINT = "Use another tokenizer with policy.tokenizer.name, or another model."


class Processes:
    """Worker processes that render and encode texts with one template.

    After a small set, the processes are kept for the next set, so that they do not have to fill their cache of words again.
    """

    def __init__(self, template: Template):
        self.template = template
        self._pool: Pool[tuple[Recipe, Chunk] | None, Any] = Pool(partial(_work, template), 1, ROW_SECONDS)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.stop()

    def probe(self) -> str:
        """Render a fixed conversation in a worker, and return the text. A template may write the date into the text."""
        if self.template.source is None:
            return ""
        try:
            return next(self._pool.map([None]))
        except WorkerStalled:
            raise ConfigError(
                f"the chat template did not finish within {ROW_SECONDS:g} seconds. {ANOTHER_TEMPLATE}."
            ) from None
        except WorkerDied:
            raise ConfigError(
                f"the process that rendered the chat template was killed, probably out of memory. {ANOTHER_TEMPLATE}."
            ) from None

    def tokenize(self, recipe: Recipe, chunks: Iterable[Chunk], num_workers: int) -> Iterator[ChunkResult]:
        """Tokenise each chunk in a worker, and yield the results in order.

        A worker is used even for a single chunk, because a worker that hangs can be killed.
        """
        num_chunks, is_done = 0, False
        try:
            for result in self._pool.map(((recipe, chunk) for chunk in chunks), max(1, num_workers)):
                num_chunks += 1
                yield result
            is_done = True
        except WorkerStalled as stalled:
            if stalled.extra_seconds:  # only the tokenizer gets extra time
                raise DataError(
                    f"{row_range(stalled.item[1])}: the tokenizer did not finish within {stalled.seconds:.0f} seconds. "
                    f"{OTHER_TOKENIZER_HINT}"
                ) from None
            raise DataError(
                f"{stalled.item[1].file}:{stalled.row}: the chat template did not finish within {ROW_SECONDS:g} seconds. "
                f"{ANOTHER_TEMPLATE}."
            ) from None
        except WorkerDied as died:
            if died.aborted:
                raise _out_of_memory(died.item[1]) from None
            raise DataError(
                f"{row_range(died.item[1])}: the process that tokenised these rows was killed, probably out of memory. Try "
                "data.num_workers=1."
            ) from None
        finally:
            if not is_done or num_chunks > MAX_REUSED_CHUNKS:  # if not done, workers are busy with this set
                self._pool.stop()


def _out_of_memory(chunk: Chunk) -> DataError:
    return DataError(
        f"{row_range(chunk)}: the tokenizer needs more than {ENCODE_BYTES // 2**30} GiB of memory for these rows, far more than "
        f"their texts explain. {OTHER_TOKENIZER_HINT}"
    )


def _work(template: Template, task: tuple[Recipe, Chunk] | None, monitor: RowMonitor) -> ChunkResult | str:
    """Tokenise a chunk of rows. If `task` is None, render a fixed conversation instead. Runs in a worker."""
    if task is not None:
        recipe, chunk = task
        try:
            return recipe(template, chunk, monitor)
        except MemoryError:
            raise _out_of_memory(chunk) from None
    monitor.start_row(0)
    try:
        with bounded_memory():
            return template.probe()
    except RowError as error:
        raise ConfigError(f"{error.message}") from None
