"""A file that holds one JSON array in; its elements out, parsed one after another as the file is read."""

import codecs
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.data.read.limits import DEPTH, RECORD_BYTES, is_nested_too_deep
from tandem.errors import DataError

MAX_BYTES = RECORD_BYTES
NESTED = f"JSON nested over {DEPTH} levels deep"


def elements(file: io.BufferedReader, path: Path) -> Iterator[tuple[int, Any, int]]:
    """The elements of one JSON array, numbered from 1, parsed one after another as the file is read."""
    text = _ArrayText(file, path)
    text.skip("[")
    number = 0
    while text.next_sign() != "]":
        if number:
            text.skip(",")
        number += 1
        start = text.consumed
        yield number, text.value(number), text.consumed - start
    text.skip("]")
    text.expect_end()


class _ArrayText:
    """The text of a JSON array, read on as it is needed."""

    def __init__(self, file: io.BufferedReader, path: Path):
        self._file, self._path = file, path
        self._decode = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at, self._is_whole = "", 0, False
        self._line, self._column = 1, 1  # of the first character of _text
        self._bytes = 0  # read so far
        self.consumed = 0

    def next_sign(self) -> str:
        """The next character that is not white space, which is not taken; "" at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text) or self._is_whole:
                return self._text[self._at : self._at + 1]
            self._read_on(0)

    def skip(self, sign: str) -> None:
        found = self.next_sign()
        if found != sign:
            raise self._malformed("Expecting ',' delimiter" if sign == "," else f"Expecting '{sign}'", self._at)
        self._at += 1

    def expect_end(self) -> None:
        if self.next_sign():
            raise self._malformed("Extra data", self._at)

    def value(self, number: int) -> Any:
        """The value that begins at the next sign."""
        self.next_sign()
        while True:
            try:
                value, end = DECODER.raw_decode(self._text, self._at)
                # What touches the end of the text may go on behind it: 12 of 123.
                if (end < len(self._text) and not self._may_go_on(end)) or self._is_whole:
                    if end - self._at > MAX_BYTES:
                        raise DataError(f"{self._path}: element {number} is over 64 MB.")
                    refuse_depth(value, self._text, self._at, end)
                    self.consumed += end - self._at
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                if self._is_whole:
                    raise self._malformed(error.msg, error.pos) from None
                if error.pos - self._at > MAX_BYTES:
                    raise DataError(f"{self._path}: element {number} is over 64 MB.") from None
            except DuplicateKey as error:
                raise DataError(
                    f"{self._path}: element {number}: the key {error.args[0]!r} stands twice in one object. Remove one."
                ) from None
            except ValueError:  # Python's own limit on the digits of an integer
                raise DataError(f"{self._path}: a number with too many digits to be read.") from None
            except RecursionError:
                raise DataError(f"{self._path}: element {number}: {NESTED}, which no preference needs.") from None
            if len(self._text) - self._at > 2 * MAX_BYTES:
                raise DataError(f"{self._path}: element {number} is over 64 MB, or malformed.")
            self._read_on(len(self._text) - self._at)

    def _may_go_on(self, end: int) -> bool:
        """Whether a number was read whose rest may not be here yet: 1 of 1.5, when the text ends in 1."""
        return end + 2 >= len(self._text) and self._text[end] in ".eE"

    def _read_on(self, unread: int) -> None:
        """Forget what was taken; read as much again as is still unread, so that a long value is not parsed too often."""
        taken = self._text[: self._at]
        newlines = taken.count("\n")
        self._column = self._column + len(taken) if not newlines else len(taken) - taken.rfind("\n")
        self._line += newlines
        block = self._file.read(max(1 << 20, unread))
        undecoded = len(self._decode.getstate()[0])
        try:
            more = self._decode.decode(block, final=not block)
        except UnicodeDecodeError as error:
            # Where the byte-order mark stands in the same block, the decoder counts from behind it.
            mark = len(codecs.BOM_UTF8) if not self._bytes and block.startswith(codecs.BOM_UTF8) else 0
            at = self._bytes - undecoded + error.start + mark
            raise DataError(f"{self._path}: not UTF-8 at byte {at}. Save the file as UTF-8.") from None
        self._bytes += len(block)
        self._text, self._at, self._is_whole = self._text[self._at :] + more, 0, not block

    def _malformed(self, reason: str, at: int) -> DataError:
        before = self._text[:at]
        newlines = before.count("\n")
        column = at - before.rfind("\n") if newlines else self._column + at
        is_over = not self._text[at:].strip() or reason.startswith("Unterminated string")
        cut = " The file ends within it: was it cut off?" if self._is_whole and is_over else ""
        return DataError(f"{self._path}:{self._line + newlines}: column {column}: malformed JSON: {reason}.{cut}")


class DuplicateKey(Exception):
    """An object has a key twice; Python's parser would keep the last and say nothing."""


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        raise DuplicateKey(next(key for key, _ in pairs if key in seen or seen.add(key)))
    return value


DECODER = json.JSONDecoder(object_pairs_hook=no_duplicates)  # made once: `json.loads` makes one for every text


def decode(text: str) -> Any:
    """A text that is one JSON value; a key that stands twice in an object is an error, and so is nesting without end."""
    if text.startswith("\ufeff"):
        return json.loads(text)  # which says in its error that this is a byte-order mark
    value = DECODER.decode(text)
    refuse_depth(value, text, 0, len(text))
    return value


def refuse_depth(value: Any, text: str, start: int, end: int) -> None:
    """RecursionError, as of the parser, for a value that whatever walks through it later might not get out of."""
    num_brackets = text.count("[", start, end) + text.count("{", start, end)
    if num_brackets > DEPTH and is_nested_too_deep(value):  # few rows have so many
        raise RecursionError
