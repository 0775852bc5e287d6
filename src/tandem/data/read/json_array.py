"""Reads the elements of a JSON array from a file one by one, without loading the whole file."""

import codecs
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.data.read.limits import MAX_DEPTH, MAX_RECORD_BYTES, is_nested_too_deep
from tandem.errors import DataError

NESTED_TOO_DEEPLY = f"JSON nested over {MAX_DEPTH} levels deep"


def elements(file: io.BufferedReader, path: Path) -> Iterator[tuple[int, Any, int]]:
    """Yield a tuple for each element of the array: its number, counted from 1, its value, and its length in characters."""
    text = _ArrayText(file, path)
    text.skip("[")
    number = 0
    while text.peek() != "]":
        if number:
            text.skip(",")
        number += 1
        start = text.consumed
        yield number, text.parse_value(number), text.consumed - start
    text.skip("]")
    text.expect_end()


class _ArrayText:
    """The text of a JSON array, read from the file in blocks."""

    def __init__(self, file: io.BufferedReader, path: Path):
        self._file, self._path = file, path
        self._decode = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at, self._at_end = "", 0, False
        self._line, self._column = 1, 1  # of the first character of _text
        self._bytes = 0  # read so far
        self.consumed = 0

    def peek(self) -> str:
        """Return the next character that is not white space, without consuming it. Return "" at the end of the file."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text) or self._at_end:
                return self._text[self._at : self._at + 1]
            self._read_more(0)

    def skip(self, sign: str) -> None:
        found = self.peek()
        if found != sign:
            raise self._malformed("Expecting ',' delimiter" if sign == "," else f"Expecting '{sign}'", self._at)
        self._at += 1

    def expect_end(self) -> None:
        if self.peek():
            raise self._malformed("Extra data", self._at)

    def parse_value(self, number: int) -> Any:
        """Parse and consume the next value. `number`: the number of the array element, for error messages."""
        self.peek()
        while True:
            try:
                value, end = DECODER.raw_decode(self._text, self._at)
                # A number at the end of the text may be incomplete: 12, if 3 is the first character of the next block.
                if (end < len(self._text) and not self._may_continue(end)) or self._at_end:
                    if end - self._at > MAX_RECORD_BYTES:
                        raise DataError(f"{self._path}: element {number} is over 64 MB. Remove it or shorten it.")
                    refuse_depth(value, self._text, self._at, end)
                    self.consumed += end - self._at
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                if self._at_end:
                    raise self._malformed(error.msg, error.pos) from None
                if error.pos - self._at > MAX_RECORD_BYTES:
                    raise DataError(f"{self._path}: element {number} is over 64 MB. Remove it or shorten it.") from None
            except DuplicateKey as error:
                raise DataError(
                    f"{self._path}: element {number}: the key {error.args[0]!r} appears twice in one object. Remove one."
                ) from None
            except ValueError:  # Python limits the number of digits of an integer
                raise DataError(
                    f"{self._path}: element {number} has a number with too many digits. Shorten the number."
                ) from None
            except RecursionError:
                raise DataError(
                    f"{self._path}: element {number}: {NESTED_TOO_DEEPLY}. Flatten it or remove it."
                ) from None
            if len(self._text) - self._at > 2 * MAX_RECORD_BYTES:
                raise DataError(f"{self._path}: element {number} is over 64 MB, or malformed. Remove it or fix it.")
            self._read_more(len(self._text) - self._at)

    def _may_continue(self, end: int) -> bool:
        """Whether a number may continue in the next block. For example, a text that ends in "1." may continue as 1.5."""
        return end + 2 >= len(self._text) and self._text[end] in ".eE"

    def _read_more(self, unread: int) -> None:
        """Drop the consumed text, and read at least `unread` more bytes.

        A value that is not complete in the text read so far is parsed again from its start after more text is read. The
        text doubles every time, so a value is parsed only a few times.
        """
        taken = self._text[: self._at]
        newlines = taken.count("\n")
        self._column = self._column + len(taken) if not newlines else len(taken) - taken.rfind("\n")
        self._line += newlines
        block = self._file.read(max(1 << 20, unread))
        undecoded = len(self._decode.getstate()[0])
        try:
            more = self._decode.decode(block, final=not block)
        except UnicodeDecodeError as error:
            # In a block that starts with the byte-order mark, the decoder does not count the mark.
            mark = len(codecs.BOM_UTF8) if not self._bytes and block.startswith(codecs.BOM_UTF8) else 0
            at = self._bytes - undecoded + error.start + mark
            raise DataError(f"{self._path}: not UTF-8 at byte {at}. Save the file as UTF-8.") from None
        self._bytes += len(block)
        self._text, self._at, self._at_end = self._text[self._at :] + more, 0, not block

    def _malformed(self, reason: str, at: int) -> DataError:
        before = self._text[:at]
        newlines = before.count("\n")
        column = at - before.rfind("\n") if newlines else self._column + at
        is_over = not self._text[at:].strip() or reason.startswith("Unterminated string")
        cut = " The file ends here: was it cut off?" if self._at_end and is_over else ""
        return DataError(f"{self._path}:{self._line + newlines}: column {column}: malformed JSON: {reason}.{cut}")


class DuplicateKey(Exception):
    """Raised if a key appears twice in a JSON object. Python's parser would silently keep the last value."""


def dict_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        raise DuplicateKey(next(key for key, _ in pairs if key in seen or seen.add(key)))
    return value


# Created once: json.loads with a hook creates a decoder for every text.
DECODER = json.JSONDecoder(object_pairs_hook=dict_without_duplicates)


def decode(text: str) -> Any:
    """Parse one JSON value. Raise DuplicateKey for a repeated key, and RecursionError for nesting over the limit."""
    if text.startswith("\ufeff"):
        return json.loads(text)  # its error names the byte-order mark
    value = DECODER.decode(text)
    refuse_depth(value, text, 0, len(text))
    return value


def refuse_depth(value: Any, text: str, start: int, end: int) -> None:
    """Raise RecursionError, as Python's JSON parser does, if a value is nested more than MAX_DEPTH levels deep."""
    num_brackets = text.count("[", start, end) + text.count("{", start, end)
    if num_brackets > MAX_DEPTH and is_nested_too_deep(value):  # counting brackets is fast, and rarely finds so many
        raise RecursionError
