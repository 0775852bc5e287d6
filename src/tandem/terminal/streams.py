"""Standard output and error that survive a closed pipe or terminal: a short command then exits, a run continues silently."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, TextIO, cast

from tandem.terminal.printable import escaped, scrubbed, shortened

# 128 + SIGPIPE: what a shell reports for a process that wrote to a closed pipe.
CLOSED_PIPE_EXIT_CODE = 141
CLOSED_ERRNOS = (errno.EPIPE, errno.EIO)  # a closed pipe, a closed terminal


class ReaderGone(BaseException):
    """Standard output was closed by its reader. Not an Exception, so that error handlers do not catch it."""


class WatchedStream:
    """A text stream that drops what is written after its reader closed it, or raises ReaderGone to end the command."""

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
        # Buffered text goes to /dev/null too, so that flushing it at exit does not fail again.
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, self._stream.fileno())
        os.close(null_device)
        if not self.continues:
            raise ReaderGone
        if self.notice:
            print(self.notice, file=sys.stderr)


class EscapedStream:
    """A text stream that escapes control characters in everything written to it. scrubs: hides secrets too."""

    def __init__(self, stream: WatchedStream, *, scrubs: bool = False):
        self.unescaped = stream  # for consoles that escape the text they draw (console.py)
        self._scrubs = scrubs

    def write(self, text: str) -> int:
        self.unescaped.write(escaped(scrubbed(text) if self._scrubs else text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # bytes written there would not be escaped
            raise AttributeError(name)
        return getattr(self.unescaped, name)


def continue_without_reader(notice: str) -> None:
    """Do not end the command when standard output is closed; print `notice` to standard error instead."""
    if isinstance(sys.stdout, EscapedStream):
        sys.stdout.unescaped.continues, sys.stdout.unescaped.notice = True, notice


def print_error(text: str) -> None:
    """Print to standard error: shortened if very long, and wrapped at words on a terminal."""
    text = shortened(escaped(scrubbed(text)))
    if sys.stderr.isatty():
        from tandem.terminal.text import wrap

        with suppress(OSError):  # some terminals do not report their width
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
        sys.exit(CLOSED_PIPE_EXIT_CODE)
    finally:
        sys.stdout, sys.stderr = before


def print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an unhandled error, escaped and without secrets. For sys.excepthook."""
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    import traceback

    sys.stderr.write(escaped(scrubbed("".join(traceback.format_exception(kind, error, trace)))))
