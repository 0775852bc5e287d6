"""Encodes texts with a tokenizer's Rust backend, and caches the ids of words. The ids are exactly those of the backend.

The backend spends most of its time on splitting a text with a Unicode regular expression. With the patterns listed here,
a space after a letter, a digit or an ASCII sign always begins a new match. So a text can be cut before such spaces, and
encoding the pieces separately gives the same ids. Most pieces are words that are already in the cache.
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
MAX_CHARACTERS = 200_000  # characters of cached words per process; beyond that, the cache is cleared

# A space after a letter, a digit or an ASCII sign, which no tokenizer treats as white space.
CUT = re.compile(r" (?<=[!-~\w] )")

# In each of these a space only matches as the first character of a word, of signs, or of white space. The last
# alternative matches any white space, so there is always a match that begins with the space.
WHITE_SPACE = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LETTERS, OTHERS = r"[^\r\n\p{L}\p{N}]?", r"| ?[^\s\p{L}\p{N}]+"
CASED = f"{LETTERS}{UPPER}*{LOWER}+%s|{LETTERS}{UPPER}+{LOWER}*%s"
SPLITTING_AT_SPACES = {
    # GPT-2, and the default of ByteLevel
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
    # DeepSeek V3, with literal line ends in the pattern
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
}
# These never match a space.
WITHOUT_SPACES = {r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+"}
# (behavior, invert) of a Split that keeps each match as a word
KEEPS_MATCHES = {("Isolated", False), ("Removed", True)}

# When a tokenizer is loaded, these texts and all added tokens are encoded with and without cuts, to check that the ids agree.
PROBES = (
    "".join(map(chr, range(128))),
    "I'll say: WE'VE  got   12345 words'd\r\n\r\n\tx2 (a)--b... \n  http://x.org/y_z?q=1\n \n'S 't HTTPServer's end  ",
    "Ein Übel \u0301 naïve\u0301 “quoted” — yes… 中文 字 123 \u00a0 \u2003x \u200b y",
)


class WordEncoder:
    """Encodes texts with a backend and a cache of words. The cache holds ids as bytes, which are fast to join."""

    def __init__(self, backend: Any):
        self._backend = backend
        self._starts: dict[str, bytes] = {}  # first words of texts
        self._words: dict[str, bytes] = {}  # words after a space
        self._num_characters = 0  # number of characters in both
        self._token = _any_token(backend)
        self.cuts = _can_be_cut(backend) and self._agrees_with_backend()

    def __reduce__(self) -> tuple[Any, ...]:
        return WordEncoder, (self._backend,)

    def encode(self, texts: Sequence[str], *, parse_special: bool = True) -> list[IntArray]:
        """Return the token ids of each text, without BOS or EOS.

        `parse_special`: whether special tokens in a text get their own ids. Otherwise they are encoded as plain text.
        """
        if not self.cuts or not parse_special:
            encoded = self._backend_ids(texts, parse_special=parse_special)
        else:
            encoded = self._encode_words(texts)
        return [np.frombuffer(ids, np.int32) for ids in encoded]

    def _encode_words(self, texts: Sequence[str]) -> list[bytes]:
        if self._num_characters > MAX_CHARACTERS:
            self._starts.clear()
            self._words.clear()
            self._num_characters = 0
        texts_words = [CUT.split(text) for text in texts]
        starts = [words.pop(0) for words in texts_words]
        once = [
            (self._starts, self._add_new(set(starts), self._starts, prefix="")),
            (self._words, self._add_new(set(chain.from_iterable(texts_words)), self._words, prefix=" ")),
        ]
        ids_of = self._words.__getitem__
        encoded = [
            b"".join((self._starts[start], *map(ids_of, words)))
            for start, words in zip(starts, texts_words, strict=True)
        ]
        for known, words in once:
            for word in words:
                del known[word]
        return encoded

    def _add_new(self, words: set[str], known: dict[str, bytes], *, prefix: str) -> Iterable[str]:
        """Add new words to the cache. Return the words that contain an added token.

        The caller deletes the returned words from the cache after use.

        The last word of a turn is followed by the template's end-of-turn token. The combination rarely occurs again, so
        its parts are cached separately: "moon?<|im_end|>" is cached as " moon?" and "<|im_end|>".
        """
        new = words.difference(known)
        split_words = {word: self._token.split(prefix + word) for word in new if self._token.search(word)}
        self._add_words(new.difference(split_words), known, prefix)
        self._add_words(set(chain.from_iterable(split_words.values())).difference(self._starts), self._starts, "")
        known.update((word, b"".join(map(self._starts.__getitem__, parts))) for word, parts in split_words.items())
        return split_words

    def _add_words(self, new: set[str], known: dict[str, bytes], prefix: str) -> None:
        in_order = list(new)
        encoded = self._backend_ids([prefix + word for word in in_order], parse_special=True)
        known.update(zip(in_order, encoded, strict=True))
        self._num_characters += sum(map(len, new))

    def _backend_ids(self, texts: Sequence[str], *, parse_special: bool) -> list[bytes]:
        if not texts:
            return []
        self._backend.encode_special_tokens = not parse_special
        encoded = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [array("i", one.ids).tobytes() for one in encoded]

    def _agrees_with_backend(self) -> bool:
        tokens = [token.content for token in self._backend.get_added_tokens_decoder().values()]
        texts = [*PROBES, "".join(f"{token} a{token} " for token in tokens)]
        return self._encode_words(texts) == self._backend_ids(texts, parse_special=True)


def _any_token(backend: Any) -> re.Pattern[str]:
    """Return a pattern that finds added tokens as the backend does: of the tokens that begin at a position, the longest."""
    added = backend.get_added_tokens_decoder().values()
    tokens = sorted((token.content for token in added if not token.normalized), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, tokens)) or '(?!)'})")


def _can_be_cut(backend: Any) -> bool:
    """Whether the backend is known to give the same ids if a text is cut at spaces and the pieces are encoded separately."""
    from tokenizers.models import BPE

    steps = _steps(backend.pre_tokenizer)
    tokens = backend.get_added_tokens_decoder().values()
    return (
        isinstance(backend.model, BPE)
        and not backend.model.dropout
        and backend.truncation is None
        and backend.padding is None
        # No normalisation form composes characters with or across a space.
        and all(step["type"] in ("NFC", "NFD", "NFKC", "NFKD") for step in _steps(backend.normalizer))
        and not any(token.lstrip or token.rstrip or token.single_word or CUT.search(token.content) for token in tokens)
        and all(_is_known(step) for step in steps)
        and any(_covers(step) for step in steps)
        # ByteLevel replaces spaces, so it must come last.
        and all(step["type"] != "ByteLevel" for step in steps[:-1])
    )


def _is_known(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "Digits"}:
            return True
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return True
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": inverted}:
            return (behavior, inverted) in KEEPS_MATCHES and (
                pattern in SPLITTING_AT_SPACES or pattern in WITHOUT_SPACES
            )
    return False


def _covers(step: dict[str, Any]) -> bool:
    return step.get("use_regex") is True or step.get("pattern", {}).get("Regex") in SPLITTING_AT_SPACES


def _steps(component: Any) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, each as JSON."""
    state = component_state(component)
    if state is None:
        return []
    return state.get("pretokenizers", state.get("normalizers")) if state["type"] == "Sequence" else [state]
