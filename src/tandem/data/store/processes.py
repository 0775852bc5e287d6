"""Chunks of rows in; what a recipe makes of them, in separate processes, out."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from tandem.data.read.sources import Chunk, RowError
from tandem.data.store.pool import Died, Pool, Stalled, Watch, bounded_memory
from tandem.data.store.writer import ENCODE_BYTES, Prepared, Recipe
from tandem.data.text.template import Template
from tandem.errors import ConfigError, DataError

# What a chat template may take for one row. A sound one takes a thousandth of a second.
ROW_SECONDS = 30.0
# Chunks of a set after which processes are not kept: they have grown, and starting others takes little in comparison.
KEPT_AFTER = 100
ANOTHER_TOKENIZER = "Give another by policy.tokenizer.name, or another model."


class Processes:
    """Processes that render and encode by one template, under bounds.

    They are kept from one small set to the next, so that each learns the words once.
    """

    def __init__(self, template: Template):
        self.template = template
        self._pool: Pool[tuple[Recipe, Chunk] | None, Any] = Pool(partial(_work, template), 1, ROW_SECONDS)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.stop()

    def probe(self) -> str:
        """A fixed conversation as the template writes it today, under the same bounds as the rows of a set."""
        if self.template.source is None:
            return ""
        try:
            return next(self._pool.map([None]))
        except Stalled:
            raise ConfigError(f"the chat template does not come to an end: {ROW_SECONDS:g} seconds passed.") from None
        except Died:
            raise ConfigError("the chat template ended the process that ran it. Out of memory?") from None

    def prepared(self, recipe: Recipe, chunks: Iterable[Chunk], num_workers: int) -> Iterator[Prepared]:
        """What becomes of each chunk, in order. Never in this process: what does not end there cannot be ended."""
        try:
            done = 0
            for prepared in self._pool.map(((recipe, chunk) for chunk in chunks), max(1, num_workers)):
                done += 1
                yield prepared
            if done > KEPT_AFTER:
                self._pool.stop()
        except Stalled as stalled:
            if stalled.more_seconds:  # only encoding is given more
                raise DataError(
                    f"{_rows(stalled.item[1])}: the tokenizer does not come to an end: {stalled.seconds:.0f} seconds passed. "
                    f"{ANOTHER_TOKENIZER}"
                ) from None
            raise DataError(
                f"{stalled.item[1].file}:{stalled.row}: the chat template does not come to an end: {ROW_SECONDS:g} seconds "
                "passed. Give another, by policy.tokenizer.chat_template=FILE.jinja."
            ) from None
        except Died as died:
            if died.aborted:
                raise _out_of_memory(died.item[1]) from None
            raise DataError(
                f"{_rows(died.item[1])}: the process that tokenised these rows was killed. Out of memory? Try data.num_workers=1."
            ) from None


def _rows(chunk: Chunk) -> str:
    return f"{chunk.file}:{chunk.numbers[0]}-{chunk.numbers[-1]}"


def _out_of_memory(chunk: Chunk) -> DataError:
    return DataError(
        f"{_rows(chunk)}: the tokenizer needs more than {ENCODE_BYTES // 2**30} GiB of memory for these rows, so it makes far "
        f"more of a text than there is. {ANOTHER_TOKENIZER}"
    )


def _work(template: Template, asked: tuple[Recipe, Chunk] | None, watch: Watch) -> Prepared | str:
    """In a separate process: a chunk by its recipe, or the probe."""
    if asked is not None:
        recipe, chunk = asked
        try:
            return recipe(template, chunk, watch)
        except MemoryError:
            raise _out_of_memory(chunk) from None
    watch.at(0)
    try:
        with bounded_memory():
            return template.probe()
    except RowError as error:
        raise ConfigError(f"{error.message}") from None
