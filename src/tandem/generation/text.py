"""The tokens that end a completion, and generated ids as text: a whole completion, or piece by piece while it is generated."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def completion_text(tokenizer: Any, ids: Sequence[int], stops: Collection[int]) -> str:
    """The text of a completion without the token that ended it."""
    return tokenizer.decode(list(ids[:-1] if ids and ids[-1] in stops else ids))


def stop_ids(tokenizer: Any, end_of_turn: int | None, own: Any = None) -> tuple[int, ...]:
    """The tokens that end an answer: the template's end of turn, EOS, and those that the model's folder lists."""
    listed = getattr(own, "eos_token_id", None)
    several = listed if isinstance(listed, list | tuple) else [listed]
    return tuple(dict.fromkeys(id for id in (end_of_turn, tokenizer.eos_token_id, *several) if id is not None))


class TextStream:
    """Passes text on as soon as its characters are complete. A streamer for transformers' `generate`."""

    def __init__(self, tokenizer: Any, stops: Collection[int], write: Callable[[str], None]):
        self._tokenizer, self._stops, self._write = tokenizer, stops, write
        self._ids: list[int] = []
        self._num_written = 0
        self._is_prompt = True

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self._ids)

    def put(self, value: Any) -> None:
        if self._is_prompt:  # transformers passes the prompt first
            self._is_prompt = False
            return
        self.add(int(value.reshape(-1)[0]))

    def add(self, id: int) -> None:
        self._ids.append(id)
        text = completion_text(self._tokenizer, self._ids, self._stops)
        # A character of several tokens is incomplete until its last one. 東 is two tokens: "", "東"
        if not text.endswith(INCOMPLETE):
            self._write_up_to(text)

    def end(self) -> None:
        self._write_up_to(completion_text(self._tokenizer, self._ids, self._stops))

    def _write_up_to(self, text: str) -> None:
        if len(text) > self._num_written:
            self._write(text[self._num_written :])
            self._num_written = len(text)
