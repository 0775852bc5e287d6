"""Callbacks: objects of the user's that receive what a run records, and may ask it to stop."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tandem.errors import CallbackError, ConfigError, one_line
from tandem.training.run.stopping import CALLBACK, CALLBACK_FAILED, Stopping

if TYPE_CHECKING:
    from tandem.api.result import TrainResult

T = TypeVar("T")


class Callback(Protocol):
    """What a callback may have: any of these methods. They are called in the process of the first rank.

    Each of the first three may return True to ask the run to stop: it stops after the next step at the latest, saves a
    checkpoint, and can be resumed. An exception ends the run in the same way, with CallbackError.
    """

    def on_step(self, record: dict[str, Any]) -> bool | None:
        """Called after each step with its line of metrics.jsonl. `record["step"]` counts from 1."""

    def on_validation(self, record: dict[str, Any]) -> bool | None:
        """Called after each validation, once for each set, with its line of metrics.jsonl."""

    def on_checkpoint(self, path: Path, step: int) -> bool | None:
        """Called when a checkpoint is complete on the disk."""

    def on_end(self, result: "TrainResult") -> None:
        """Called with the result before `train` returns it."""


METHODS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Raise ConfigError for an object that has none of the methods, because it would never be called."""
    for number, one in enumerate(callbacks):
        if isinstance(one, type) or not any(callable(getattr(one, name, None)) for name in METHODS):
            shown = one.__name__ if isinstance(one, type) else type(one).__name__
            what = f"the class {shown}, not an object of it" if isinstance(one, type) else f"of type {shown}"
            raise ConfigError(f"callbacks[{number}] is {what}. Give an object with one of {', '.join(METHODS)}.")


class Callbacks:
    """The callbacks of a run. After the first exception, none is called any more."""

    def __init__(self, callbacks: Sequence[Any] = ()):
        self._callbacks = callbacks
        self._stopping = Stopping()
        self._failure: tuple[str, Exception] | None = None
        self.run: Path | None = None  # the directory of the run, when it is known
        self.last_step = 0  # of the run; a request to stop after it has no effect

    def start(self, run: Path, stopping: Stopping, *, is_first: bool) -> None:
        """Note the run that the callbacks belong to. Only the first rank calls them."""
        self.run, self._stopping = run, stopping
        self._callbacks = self._callbacks if is_first else ()

    def record(self, record: dict[str, Any]) -> None:
        """Pass on a line of metrics.jsonl."""
        split, step = record["split"], record["step"]
        if split == "train" and step > 0:
            self._call("on_step", step, lambda method: method(dict(record)))
        elif split.startswith("validation-"):
            self._call("on_validation", step, lambda method: method(dict(record)))

    def saved(self, place: Path, step: int) -> None:
        self._call("on_checkpoint", step, lambda method: method(place, step))

    def end(self, result: "TrainResult") -> None:
        self._call("on_end", result.last_step, lambda method: method(result))
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise CallbackError if a callback failed."""
        if self._failure is not None:
            where, error = self._failure
            raise CallbackError(f"{where} failed with {type(error).__name__}: {one_line(error)}.") from error

    def _call(self, name: str, step: int, call: Callable[[Callable[..., T]], T]) -> None:
        for number, one in enumerate(self._callbacks if self._failure is None else ()):
            method = getattr(one, name, None)
            if method is None:
                continue
            try:
                wants_stop = call(method)
            except Exception as error:
                self._failure = (f"callbacks[{number}].{name} at step {step}", error)
                self._stopping.request(*CALLBACK_FAILED)
                return
            if wants_stop is True and step < self.last_step:
                self._stopping.request(*CALLBACK)
