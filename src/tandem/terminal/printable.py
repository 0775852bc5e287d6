"""Makes text safe to show: escapes control characters, hides secrets, and shortens long lists and messages."""

import json
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

# Characters that control a terminal or reorder text: C0 (except newline and tab) and C1 controls, bidirectional controls,
# line and paragraph separators; and lone surrogates, which represent undecodable bytes in file names and cannot be encoded.
UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\N{ARABIC LETTER MARK}\N{LEFT-TO-RIGHT MARK}\N{RIGHT-TO-LEFT MARK}"
    "\N{LINE SEPARATOR}-\N{RIGHT-TO-LEFT OVERRIDE}\N{LEFT-TO-RIGHT ISOLATE}-\N{POP DIRECTIONAL ISOLATE}\ud800-\udfff]"
)
# The user and password of a URL end at its last @, because passwords may contain @ and /. sqlite:///path has none.
CREDENTIALS = re.compile(r"(?<=://)[^/\s]\S*@")
LISTED_ITEMS = 20
LISTED_CHARACTERS = 100  # of one item
LONGEST_MESSAGE = 8000  # characters
MESSAGE_END = 1000  # characters kept at the end of a long message: the end says what to do
SHORTEST_SECRET = 4  # characters; shorter values would match inside ordinary words
SHORTEST_PART = 6  # characters; shorter parts of a secret are not hidden
SEPARATORS = re.compile(r"[\s:/@,;=_]+")
WINDOW = 8  # characters; any longer fragment of a secret is hidden


def escaped(text: str) -> str:
    r"""Replace characters that control a terminal by escapes such as \x1b or \u202e. Letters of all scripts are kept.

    Characters from \x7f on are written like \u007f, as in JSON and YAML, so a line of JSON remains valid JSON.
    """
    return UNSAFE.sub(lambda found: f"\\x{ord(found[0]):02x}" if found[0] < " " else f"\\u{ord(found[0]):04x}", text)


def byte_that_is_not_utf8(text: str) -> int | None:
    """Return the position, from 0, of the first byte that could not be decoded when `text` was read; None if there is none.

    Python replaces such bytes by lone surrogates in arguments, and in input that is read with errors="surrogateescape".
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return len(text[: error.start].encode("utf-8"))
    return None


def listed(items: Iterable[object], *, most: int = LISTED_ITEMS) -> str:
    """Join items for a message, showing at most `most` of them: "a, b, c and 97 more"."""
    shown = [text if len(text) <= LISTED_CHARACTERS else f"{text[:LISTED_CHARACTERS]}..." for text in map(str, items)]
    more = f" and {len(shown) - most:,} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more


def not_utf8(error: UnicodeDecodeError) -> str:
    """Return which byte of a file is not UTF-8 and what to do, as two sentences. The file was decoded as a whole."""
    line = error.object.count(b"\n", 0, error.start) + 1
    at = error.start - (error.object.rfind(b"\n", 0, error.start) + 1)
    return f"not UTF-8 at byte {at} of line {line}. Save the file as UTF-8."


def counted(num: int, noun: str) -> str:
    """Return "1 pair", "2 pairs" or "1,000 pairs"."""
    return f"{num:,} {noun}{'s' * (num != 1)}"


def shortened(text: str) -> str:
    """Return `text`. If it is longer than LONGEST_MESSAGE, its middle is left out."""
    if len(text) <= LONGEST_MESSAGE:
        return text
    head = LONGEST_MESSAGE - MESSAGE_END
    return f"{text[:head]} ... ({len(text) - LONGEST_MESSAGE:,} characters left out) ... {text[-MESSAGE_END:]}"


def without_password(text: str) -> str:
    """Remove user and password from URLs: http://me:secret@host/ becomes http://host/."""
    return CREDENTIALS.sub("", text)


class Secrets:
    """Values that the configuration takes from environment variables, to hide in all messages."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}  # spelling of a value, or a part of it -> name of its variable
        self._windows: dict[str, str] = {}  # fragment of WINDOW characters -> name of its variable

        self._held: list[Secrets] = []  # values of runs that are in progress

    def clear(self) -> None:
        """Forget all values, except those of runs that are in progress in this process."""
        self._values.clear()
        self._windows.clear()
        for other in self._held:
            self._include(other)

    def copy(self) -> "Secrets":
        copied = Secrets()
        copied._include(self)
        return copied

    @contextmanager
    def holding(self, others: "Secrets") -> Iterator[None]:
        """Hide the values of `others` too inside this context, whatever is cleared meanwhile."""
        self._held.append(others)
        self._include(others)
        try:
            yield
        finally:
            self._held.remove(others)

    def _include(self, others: "Secrets") -> None:
        self._values |= others._values
        self._windows |= others._windows

    def add(self, name: str, value: str, words: Collection[str]) -> None:
        """Hide `value`, the value of the environment variable `name`, in all later text.

        `words`: words of the schema, such as float32, which are never hidden.
        """
        for one in _spellings(value):
            if len(one) >= SHORTEST_SECRET and one not in words:
                self._values[one] = name
            if one.startswith("/"):  # other paths may start with the same folders
                continue
            for part in SEPARATORS.split(one):
                if len(part) >= SHORTEST_PART and part not in words:
                    self._values[part] = name
            windows = [one[i : i + WINDOW] for i in range(min(len(one), LONGEST_MESSAGE) - WINDOW + 1)]
            self._windows |= {
                window: name for window in windows if "://" not in window and not any(window in word for word in words)
            }

    def scrub(self, text: str) -> str:
        """Return `text` with every hidden value, and every long fragment of one, replaced by $NAME.

        NAME is the environment variable that has the value.
        """
        if not self._values:
            return text
        marks: list[str | None] = [None] * len(text)
        for value, name in self._values.items():
            start = text.find(value)
            while start >= 0:
                marks[start : start + len(value)] = [name] * len(value)
                start = text.find(value, start + len(value))
        for i in range(len(text) - WINDOW + 1):
            if name := self._windows.get(text[i : i + WINDOW]):
                marks[i : i + WINDOW] = [name] * WINDOW
        kept = []
        for i, (character, name) in enumerate(zip(text, marks, strict=True)):
            if name is None:
                kept.append(character)
            elif i == 0 or marks[i - 1] != name:
                kept.append(f"${name}")
        return "".join(kept)


SECRETS = Secrets()


def scrubbed(text: str) -> str:
    """Return `text` with values from the environment hidden, and with user and password removed from URLs."""
    return without_password(SECRETS.scrub(text))


def _spellings(value: str) -> set[str]:
    """Return the ways in which a message may write a value: unchanged, quoted, on one line, in lower case, or as a number."""
    spellings = {value, json.dumps(value)[1:-1], repr(value)[1:-1], " ".join(value.split()), value.lower()}
    try:
        number = float(value)
    except ValueError:
        return spellings
    return spellings | {str(number), f"{number:g}"}
