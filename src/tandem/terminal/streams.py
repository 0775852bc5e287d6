"""Standard output and error, whose reader may go away: a short command then ends, a run continues in silence."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, TextIO, cast

from tandem.terminal.printable import escaped, scrubbed, shortened

# 128 + SIGPIPE: what a shell reports of a process that wrote to a closed pipe.
EXIT_CODE = 141
GONE = (errno.EPIPE, errno.EIO)  # a closed pipe, a closed terminal


class ReaderGone(BaseException):
    """Nobody reads standard output. Not an Exception, so that nothing that handles errors handles it."""


class WatchedStream:
    """A text stream. Once its reader is gone, what is written is dropped, or ReaderGone ends the command."""

    def __init__(self, stream: TextIO, *, continues: bool):
        self._stream = stream
        self.continues = continues
        self.notice = ""  # for standard error, when the reader is gone

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._close(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._close(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _close(self, error: OSError) -> None:
        if error.errno not in GONE:
            raise error
        # What is still in buffers goes there too, so that closing them at the end does not fail again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        if not self.continues:
            raise ReaderGone
        if self.notice:
            print(self.notice, file=sys.stderr)


class EscapedStream:
    """A text stream. Whatever is written, by whomever, a terminal obeys none of it; on standard error no secret is shown."""

    def __init__(self, stream: WatchedStream, *, scrubs: bool = False):
        self.unescaped = stream  # for those who draw and have escaped their text (console.py)
        self._scrubs = scrubs

    def write(self, text: str) -> int:
        self.unescaped.write(escaped(scrubbed(text) if self._scrubs else text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # what is written there would not be escaped
            raise AttributeError(name)
        return getattr(self.unescaped, name)


def continue_without_reader(notice: str) -> None:
    """From here on a closed standard output does not end the command; `notice` then goes to standard error."""
    if isinstance(sys.stdout, EscapedStream):
        sys.stdout.unescaped.continues, sys.stdout.unescaped.notice = True, notice


def print_error(text: str) -> None:
    """On standard error, its middle left out if it is very long; on a terminal its lines are broken at words."""
    text = shortened(escaped(scrubbed(text)))
    if sys.stderr.isatty():
        from tandem.terminal.text import wrap

        with suppress(OSError):  # some terminals do not tell their width
            text = wrap(text, os.get_terminal_size(sys.stderr.fileno()).columns)
    print(text, file=sys.stderr)


@contextmanager
def watched_streams() -> Iterator[None]:
    """Exit with code 141, without a message, when standard output is closed; standard error may be closed at any time."""
    before = sys.stdout, sys.stderr
    out, err = WatchedStream(sys.stdout, continues=False), WatchedStream(sys.stderr, continues=True)
    sys.stdout = cast(TextIO, EscapedStream(out))
    sys.stderr = cast(TextIO, EscapedStream(err, scrubs=True))
    try:
        try:
            yield
        finally:
            out.flush()
    except ReaderGone:
        sys.exit(EXIT_CODE)
    finally:
        sys.stdout, sys.stderr = before


def print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What Python prints of an error that nothing handled, escaped: for sys.excepthook."""
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    import traceback

    sys.stderr.write(escaped(scrubbed("".join(traceback.format_exception(kind, error, trace)))))
