"""Turns prompts into token ids with a model's chat template, in a process with limits on time and memory."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from tandem.data.formats.preference import Completion, Message, Preference
from tandem.data.read.sources import RowError
from tandem.data.store.pool import Pool, RowMonitor, WorkerDied, WorkerStalled, bounded_memory
from tandem.data.store.processes import ROW_SECONDS
from tandem.data.text.template import PROBE, Template
from tandem.data.text.tokens import encode_prompt, tokenize
from tandem.errors import DataError
from tandem.generation.records import Prompt
from tandem.generation.target import FoundModel, about_own_argument
from tandem.terminal.arguments import option

CHUNK = 64  # prompts per message to the process
NO_LIMIT = 2**31 - 1
QUESTION = PROBE[0]["content"]
Rendered = list[tuple[int, ...] | RowError]


class Renderer:
    """Renders prompts in a separate process, which is kept until the renderer is closed."""

    def __init__(self, template: Template):
        self.template = template
        self._pool: Pool[Sequence[Prompt] | None, Any] = Pool(partial(_work, template), 1, ROW_SECONDS)

    def __enter__(self) -> "Renderer":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.stop()

    def ids(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
        """The token ids of each prompt, as in training. Raises a DataError that names the first prompt that fails."""
        chunks = [prompts[start : start + CHUNK] for start in range(0, len(prompts), CHUNK)]
        return [self._checked(ids) for rendered in self._map(chunks, prompts) for ids in rendered]

    def end_of_turn(self) -> int | None:
        """The token that ends a completion in training with this template; None if the template has no such token."""
        return next(iter(self._map([None], ())))

    def _map(self, items: Sequence[Any], prompts: Sequence[Prompt]) -> list[Any]:
        first = prompts[0].place if prompts else "the chat template"
        try:
            return list(self._pool.map(items))
        except WorkerStalled as stalled:
            place = next((prompt.place for prompt in prompts if prompt.index == stalled.row), first)
            raise DataError(
                f"{place}: the chat template does not come to an end: {ROW_SECONDS:g} seconds passed. Give another with "
                f"{option('chat_template', metavar='FILE.jinja')}."
            ) from None
        except WorkerDied:
            raise DataError(
                f"{first}: the process that ran the chat template was killed. Out of memory? Give another template with "
                f"{option('chat_template', metavar='FILE.jinja')}."
            ) from None

    @staticmethod
    def _checked(ids: tuple[int, ...] | RowError) -> tuple[int, ...]:
        if isinstance(ids, RowError):
            raise DataError(about_own_argument(str(ids)))
        return ids


def check_lengths(found: FoundModel, prompts: Sequence[Prompt], ids: Sequence[tuple[int, ...]]) -> None:
    """Refuse a prompt that leaves no position for an answer."""
    limit = found.max_tokens
    for prompt, own in zip(prompts, ids, strict=True):
        if not own:
            raise DataError(f"{prompt.place}: the prompt has no tokens. Give a text.")
        if limit is not None and len(own) >= limit:
            raise DataError(
                f"{prompt.place}: the prompt has {len(own):,} tokens, and {found.target.name} is made for at most {limit:,} with "
                "the answer. Shorten it."
            )


def _work(template: Template, prompts: Sequence[Prompt] | None, monitor: RowMonitor) -> Rendered | int | None:
    """In the separate process: the ids of prompts, or the end of turn."""
    if prompts is None:
        monitor.start_row(0)
        with bounded_memory():
            return _end_of_turn(template)
    rendered: Rendered = []
    for prompt in prompts:
        monitor.start_row(prompt.index)
        try:
            with bounded_memory():
                written = template.render_prompt(prompt.prompt, prompt.tools, prompt.place)
                rendered.append(tuple(encode_prompt(written, template).tolist()))
        except RowError as error:
            rendered.append(error)
        except MemoryError:
            rendered.append(RowError(prompt.place, "template fails", "the chat template takes too much memory."))
    return rendered


def _end_of_turn(template: Template) -> int | None:
    try:
        example = template.example()
    except RowError:
        return None
    prompt = tuple(Message(one["role"], one["content"]) for one in example) if example else QUESTION
    completions = (Completion("Far.", 0), Completion("Near.", 1))
    [found] = tokenize(
        [Preference(prompt, completions, "the chat template")], template, pairing="best_worst", max_length=NO_LIMIT
    )
    return None if isinstance(found, RowError) else int(found.completions[0][-1])
