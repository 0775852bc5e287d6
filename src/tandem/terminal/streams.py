"""Wraps standard output and error: escapes control characters, and handles pipes and terminals that are closed early."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, TextIO, cast

from tandem.terminal.printable import escaped, scrubbed, shortened

# 128 + SIGPIPE, which shells report for a process that wrote to a closed pipe.
CLOSED_PIPE_EXIT_CODE = 141
CLOSED_ERRNOS = (errno.EPIPE, errno.EIO)  # a closed pipe, a closed terminal


class ReaderGone(BaseException):
    """Standard output was closed by the process that reads it. Not an Exception, so that `except Exception` does not catch it."""


class WatchedStream:
    """A text stream that may be closed by its reader.

    If `continues`, writes after that are discarded. Otherwise they raise ReaderGone.
    """

    def __init__(self, stream: TextIO, *, continues: bool):
        self._stream = stream
        self.continues = continues
        self.notice = ""  # printed to standard error when the reader is gone

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
        if error.errno not in CLOSED_ERRNOS:
            raise error
        # Send buffered text to /dev/null too, so that flushing it at exit does not fail again.
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, self._stream.fileno())
        os.close(null_device)
        if not self.continues:
            raise ReaderGone
        if self.notice:
            print(self.notice, file=sys.stderr)


class EscapedStream:
    """A text stream that escapes control characters in text. If `scrubs`, it also hides secrets."""

    def __init__(self, stream: WatchedStream, *, scrubs: bool = False):
        self.unescaped = stream  # for SafeConsole, which escapes the text itself
        self._scrubs = scrubs

    def write(self, text: str) -> int:
        self.unescaped.write(escaped(scrubbed(text) if self._scrubs else text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # bytes written to the buffer would not be escaped
            raise AttributeError(name)
        return getattr(self.unescaped, name)


def continue_without_reader(notice: str) -> None:
    """If standard output is closed, keep the command running and print `notice` to standard error."""
    if isinstance(sys.stdout, EscapedStream):
        sys.stdout.unescaped.continues, sys.stdout.unescaped.notice = True, notice


def print_error(text: str) -> None:
    """Print an error message to standard error. Shortens very long messages, and wraps lines on a terminal."""
    text = shortened(escaped(scrubbed(text)))
    if sys.stderr.isatty():
        from tandem.terminal.text import wrap

        with suppress(OSError):  # some terminals do not report their width
            text = wrap(text, os.get_terminal_size(sys.stderr.fileno()).columns)
    print(text, file=sys.stderr)


@contextmanager
def watched_streams() -> Iterator[None]:
    """Wrap standard output and standard error inside this context.

    If standard output is closed, the process exits with code 141. If standard error is closed, the process continues.
    """
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
        sys.exit(CLOSED_PIPE_EXIT_CODE)
    finally:
        sys.stdout, sys.stderr = before


def print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an unhandled error, escaped and without secrets. Used as sys.excepthook."""
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    import traceback

    sys.stderr.write(escaped(scrubbed("".join(traceback.format_exception(kind, error, trace)))))
