"""A rich console that escapes control characters in text, but keeps the colours and progress bars of rich."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.file_proxy import FileProxy
from rich.segment import Segment

from tandem.terminal.printable import escaped


class SafeConsole(Console):
    """A rich console that escapes control characters in text. It bypasses EscapedStream, which would also escape its colours."""

    def __init__(self, **settings: Any):
        # In a notebook, rich would print HTML, which needs packages that may be missing. Plain text is printed instead.
        plain = {"highlight": False, "soft_wrap": True, "markup": False, "emoji": False, "force_jupyter": False}
        super().__init__(**{**plain, **settings})

    def _stream(self) -> IO[str]:
        file = super().file
        return getattr(file, "unescaped", file)

    def _set_stream(self, file: IO[str]) -> None:
        self._file = file

    file = property(_stream, _set_stream)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escaped(segment.text), segment.style)


class EscapedProxy(FileProxy):
    """Writes escaped text above a progress bar.

    rich's FileProxy alone would turn escape sequences in text into styles and links.
    """

    def write(self, text: str) -> int:
        super().write(escaped(text))
        return len(text)


@contextmanager
def printing_above(console: Console) -> Iterator[None]:
    """Make text that is printed inside this context appear above the progress bar of `console`.

    If standard output or standard error is not a terminal, text is written to it as usual.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (
        cast(TextIO, EscapedProxy(console, stream)) if stream.isatty() else stream for stream in before
    )
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before
