"""A tokenizer's Rust backend in; token ids of texts out: the backend's own, sooner where words come up again.

The backend splits a text by a regular expression that knows all of Unicode, and most of its time goes there. In the
patterns listed here a space that follows a letter, a digit or a sign begins a match, whatever follows it, and no match goes
on past it: cut before such spaces, the pieces of a text have the ids that they have in the text. Most pieces are words
that were seen before.
"""

import re
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.data.text.tokenizer import component_state

IntArray = NDArray[np.int32]
MAX_CHARACTERS = 200_000  # of words kept in each process; then all are forgotten

# A space that follows a letter, a digit or an ASCII sign: characters that no tokenizer takes for white space.
CUT = re.compile(r" (?<=[!-~\w] )")

# In each of these a space is matched as the first character of a word, of signs, or of white space, and nowhere else;
# the last alternative takes any white space, so that there is always a match that begins with it.
WHITE_SPACE = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LETTERS, OTHERS = r"[^\r\n\p{L}\p{N}]?", r"| ?[^\s\p{L}\p{N}]+"
CASED = f"{LETTERS}{UPPER}*{LOWER}+%s|{LETTERS}{UPPER}+{LOWER}*%s"
COVERING = {
    # GPT-2, and what ByteLevel does by itself
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    # Llama 3, Qwen 2
    *(
        rf"{CONTRACTIONS}|{LETTERS}\p{{L}}+|{digits}{OTHERS}[\r\n]*{WHITE_SPACE}"
        for digits in (r"\p{N}{1,3}", r"\p{N}")
    ),
    # GPT-4
    rf"'(?i:[sdmt]|ll|ve|re)|{LETTERS}+\p{{L}}+|\p{{N}}{{1,3}}{OTHERS}+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    # GPT-4o, Mistral Nemo
    rf"{CASED % (f'{CONTRACTIONS}?', f'{CONTRACTIONS}?')}|\p{{N}}{{1,3}}{OTHERS}[\r\n/]*{WHITE_SPACE}",
    rf"{CASED % ('', '')}|\p{{N}}{OTHERS}[\r\n/]*{WHITE_SPACE}",
    # DeepSeek V3, where line ends stand in the pattern as such
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
}
# These match no space at all.
HARMLESS = {r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+"}
KEEPING = {("Isolated", False), ("Removed", True)}  # a Split's behaviour, inverted or not, that makes words of matches

# Encoded both ways when a tokenizer is loaded, and so is every added token.
PROBES = (
    "".join(map(chr, range(128))),
    "I'll say: WE'VE  got   12345 words'd\r\n\r\n\tx2 (a)--b... \n  http://x.org/y_z?q=1\n \n'S 't HTTPServer's end  ",
    "Ein Übel \u0301 naïve\u0301 “quoted” — yes… 中文 字 123 \u00a0 \u2003x \u200b y",
)


class WordEncoder:
    """A backend, and the ids of words it was asked for, as bytes: they are put together without looking at any id."""

    def __init__(self, backend: Any):
        self._backend = backend
        self._starts: dict[str, bytes] = {}  # what a text begins with
        self._words: dict[str, bytes] = {}  # what stands behind a space
        self._held = 0  # characters of both
        self._token = _any_token(backend)
        self.cuts = _can_be_cut(backend) and self._agrees()

    def __reduce__(self) -> tuple[Any, ...]:
        return WordEncoder, (self._backend,)

    def encode(self, texts: Sequence[str], *, parse_special: bool = True) -> list[IntArray]:
        """Token ids of each text, nothing added; special tokens in it are meant, or only spelled."""
        if not self.cuts or not parse_special:
            encoded = self._asked(texts, parse_special=parse_special)
        else:
            encoded = self._encode_words(texts)
        return [np.frombuffer(ids, np.int32) for ids in encoded]

    def _encode_words(self, texts: Sequence[str]) -> list[bytes]:
        if self._held > MAX_CHARACTERS:
            self._starts.clear()
            self._words.clear()
            self._held = 0
        several = [CUT.split(text) for text in texts]
        starts = [words.pop(0) for words in several]
        once = [
            (self._starts, self._learn(set(starts), self._starts, behind="")),
            (self._words, self._learn(set(chain.from_iterable(several)), self._words, behind=" ")),
        ]
        ids_of = self._words.__getitem__
        encoded = [
            b"".join((self._starts[start], *map(ids_of, words))) for start, words in zip(starts, several, strict=True)
        ]
        for known, words in once:
            for word in words:
                del known[word]
        return encoded

    def _learn(self, words: set[str], known: dict[str, bytes], *, behind: str) -> Iterable[str]:
        """Learn the new words; those returned are not worth keeping.

        The last word of a turn and what the template writes behind it rarely come up together again: they are learnt
        apart. "moon?<|im_end|>" -> " moon?" and <|im_end|>, which is a token wherever it stands.
        """
        new = words.difference(known)
        apart = {word: self._token.split(behind + word) for word in new if self._token.search(word)}
        self._ask_for(new.difference(apart), known, behind)
        self._ask_for(set(chain.from_iterable(apart.values())).difference(self._starts), self._starts, "")
        known.update((word, b"".join(map(self._starts.__getitem__, parts))) for word, parts in apart.items())
        return apart

    def _ask_for(self, new: set[str], known: dict[str, bytes], behind: str) -> None:
        in_order = list(new)
        encoded = self._asked([behind + word for word in in_order], parse_special=True)
        known.update(zip(in_order, encoded, strict=True))
        self._held += sum(map(len, new))

    def _asked(self, texts: Sequence[str], *, parse_special: bool) -> list[bytes]:
        if not texts:
            return []
        self._backend.encode_special_tokens = not parse_special
        encoded = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [array("i", one.ids).tobytes() for one in encoded]

    def _agrees(self) -> bool:
        tokens = [token.content for token in self._backend.get_added_tokens_decoder().values()]
        texts = [*PROBES, "".join(f"{token} a{token} " for token in tokens)]
        return self._encode_words(texts) == self._asked(texts, parse_special=True)


def _any_token(backend: Any) -> re.Pattern[str]:
    """Finds added tokens where the backend does: the first, and of those that begin there the longest."""
    added = backend.get_added_tokens_decoder().values()
    tokens = sorted((token.content for token in added if not token.normalized), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, tokens)) or '(?!)'})")


def _can_be_cut(backend: Any) -> bool:
    """Whether every part of the backend is known to leave the pieces of a text as they are in the text."""
    from tokenizers.models import BPE

    steps = _steps(backend.pre_tokenizer)
    tokens = backend.get_added_tokens_decoder().values()
    return (
        isinstance(backend.model, BPE)
        and not backend.model.dropout
        and backend.truncation is None
        and backend.padding is None
        # Nothing is composed with a space, or across it.
        and all(step["type"] in ("NFC", "NFD", "NFKC", "NFKD") for step in _steps(backend.normalizer))
        and not any(token.lstrip or token.rstrip or token.single_word or CUT.search(token.content) for token in tokens)
        and all(_is_known(step) for step in steps)
        and any(_covers(step) for step in steps)
        # After ByteLevel a space is a space no more.
        and all(step["type"] != "ByteLevel" for step in steps[:-1])
    )


def _is_known(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "Digits"}:
            return True
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return True
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": inverted}:
            return (behavior, inverted) in KEEPING and (pattern in COVERING or pattern in HARMLESS)
    return False


def _covers(step: dict[str, Any]) -> bool:
    return step.get("use_regex") is True or step.get("pattern", {}).get("Regex") in COVERING


def _steps(component: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, as JSON."""
    state = component_state(component)
    if state is None:
        return []
    return state.get("pretokenizers", state.get("normalizers")) if state["type"] == "Sequence" else [state]
