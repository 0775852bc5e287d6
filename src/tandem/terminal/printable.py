"""What is shown to the user: text in; the same text out, without control characters, secrets or endless lists."""

import json
import re
from collections.abc import Collection, Iterable

# What a terminal obeys or reorders text by: C0 (but newline and tab) and C1 controls, bidirectional controls, line and
# paragraph separators; and halves of surrogate pairs, which stand for undecodable bytes of file names and cannot be encoded.
UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\N{ARABIC LETTER MARK}\N{LEFT-TO-RIGHT MARK}\N{RIGHT-TO-LEFT MARK}"
    "\N{LINE SEPARATOR}-\N{RIGHT-TO-LEFT OVERRIDE}\N{LEFT-TO-RIGHT ISOLATE}-\N{POP DIRECTIONAL ISOLATE}\ud800-\udfff]"
)
# The user and password of an address end at its last @: passwords hold @ and / too. sqlite:///path has none.
CREDENTIALS = re.compile(r"(?<=://)[^/\s]\S*@")
LISTED_ITEMS = 20
LISTED_CHARACTERS = 100  # of one item
LONGEST_MESSAGE = 8000  # characters
MESSAGE_END = 1000  # of these, the last ones: what to do about it
SHORTEST_SECRET = 4  # shorter values would be found in every other word
SHORTEST_PART = 6
SEPARATORS = re.compile(r"[\s:/@,;=_]+")
WINDOW = 8  # characters by which a part of a long value is recognised


def escaped(text: str) -> str:
    r"""Characters that a terminal obeys as \x1b or \u202e; all other text, in any script, as it is.

    From \x7f on they are written \u007f, as JSON and YAML do: a line of JSON is still JSON.
    """
    return UNSAFE.sub(lambda found: f"\\x{ord(found[0]):02x}" if found[0] < " " else f"\\u{ord(found[0]):04x}", text)


def listed(items: Iterable[object], *, most: int = LISTED_ITEMS) -> str:
    """a, b, c and 97 more"""
    shown = [text if len(text) <= LISTED_CHARACTERS else f"{text[:LISTED_CHARACTERS]}..." for text in map(str, items)]
    more = f" and {len(shown) - most:,} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more


def shortened(text: str) -> str:
    """A message of bearable length: the middle of a longer one is left out."""
    if len(text) <= LONGEST_MESSAGE:
        return text
    head = LONGEST_MESSAGE - MESSAGE_END
    return f"{text[:head]} ... ({len(text) - LONGEST_MESSAGE:,} characters left out) ... {text[-MESSAGE_END:]}"


def without_password(text: str) -> str:
    """http://me:secret@host/ -> http://host/"""
    return CREDENTIALS.sub("", text)


class Secrets:
    """Values taken from the environment by the configuration in force, which no message may show."""

    def __init__(self) -> None:
        self._whole: dict[str, str] = {}  # a value as a message may spell it: its variable
        self._windows: dict[str, str] = {}

    def clear(self) -> None:
        self._whole.clear()
        self._windows.clear()

    def add(self, name: str, value: str, words: Collection[str]) -> None:
        """words: of the configuration itself, which are no secrets (float32, accuracy)."""
        for one in _spellings(value):
            if len(one) >= SHORTEST_SECRET and one not in words:
                self._whole[one] = name
            if one.startswith("/"):  # other paths begin with the same folders
                continue
            for part in SEPARATORS.split(one):
                if len(part) >= SHORTEST_PART and part not in words:
                    self._whole[part] = name
            windows = [one[i : i + WINDOW] for i in range(min(len(one), LONGEST_MESSAGE) - WINDOW + 1)]
            self._windows |= {
                window: name for window in windows if "://" not in window and not any(window in word for word in words)
            }

    def scrub(self, text: str) -> str:
        """Each value, and each longer part of one, as $NAME."""
        if not self._whole:
            return text
        marks: list[str | None] = [None] * len(text)
        for value, name in self._whole.items():
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
    """Without values of the environment, and without passwords in addresses."""
    return without_password(SECRETS.scrub(text))


def _spellings(value: str) -> set[str]:
    """A value as messages may write it: as it is, quoted, on one line, or as a number."""
    spellings = {value, json.dumps(value)[1:-1], repr(value)[1:-1], " ".join(value.split()), value.lower()}
    try:
        number = float(value)
    except ValueError:
        return spellings
    return spellings | {str(number), f"{number:g}"}
