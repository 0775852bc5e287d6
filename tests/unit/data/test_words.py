"""Texts encoded by words have the backend's own ids; what is not known to come out the same is left to the backend."""

import os
import pickle
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from tandem.config.sections.datasets import DatasetFields
from tandem.config.sections.policy import Tokenizer as TokenizerConfig
from tandem.data.formats.formats import detect_format, read_preference
from tandem.data.formats.prompt_files import Wording
from tandem.data.read.sources import RowError, read_rows
from tandem.data.text import word_cache as words
from tandem.data.text.template import make_template
from tandem.data.text.tokenizer import load_tokenizer
from tandem.data.text.word_cache import WordEncoder

# Patterns as published.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")
GPT4 = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
START, CONTRACTION = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = (
    rf"{START}{UPPER}*{LOWER}+{CONTRACTION}|{START}{UPPER}+{LOWER}*{CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NEMO = GPT4O.replace(CONTRACTION, "").replace("{1,3}", "")
DEEPSEEK = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)

NFC = normalizers.NFC()
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def split(pattern: str, behavior: str = "isolated", *, invert: bool = False) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


# Normalizer and steps of the pre-tokenizer.
SHAPES: dict[str, tuple[Any, list[Any]]] = {
    "gpt2": (None, [GPT2]),
    "qwen2": (NFC, [split(QWEN2), BYTES]),
    "llama3": (None, [split(LLAMA3), BYTES]),
    "gpt4": (None, [split(GPT4), BYTES]),
    "gpt4o": (None, [split(GPT4O, "removed", invert=True), BYTES]),
    "nemo": (None, [split(NEMO), BYTES]),
    "deepseek": (
        normalizers.Sequence([]),
        [split(r"\p{N}{1,3}"), split("[一-龥\u3040-ゟ゠-ヿ]+"), split(DEEPSEEK), BYTES],
    ),
    "command_r": (normalizers.Sequence([NFC]), [pre_tokenizers.Digits(individual_digits=True), GPT2]),
}
ASCII = "".join(map(chr, range(128)))
SPACES = "  \t\n\r\x0b\x0c\x1c\x1f\x7f01\xa0\u2003\u200b\u180e\u3000"
LETTERS = "aZsStTmdlLrRvVeE'''  \n019./éÜ中”\u0301\u0308"
# One begins another, one ends another; one is not special, one not ASCII; one begins with a space, one is of spaces.
TOKENS = ["<|a|>", "<|a|><|b|>", "|><|b", "<tool>", "<｜end▁of▁turn｜>", "\n\n", " x>", "   "]


def untrained(normalizer: Any, steps: list[Any], model: Any = None) -> Tokenizer:
    backend = Tokenizer(model or models.BPE())
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizers.Sequence(steps)
    return backend


@cache
def trained() -> Any:
    """Merges learnt without a split into words, so that a word that begins or ends elsewhere has other ids."""
    backend, chance = untrained(None, [BYTES]), random.Random(0)
    soup = ["".join(chance.choices(alphabet, k=20_000)) for alphabet in (ASCII, SPACES, LETTERS)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2500, initial_alphabet=alphabet, show_progress=False, max_token_length=3)
    backend.train_from_iterator([text[i : i + 20] for text in soup for i in range(0, len(text), 20)], trainer)
    return backend.model


@cache
def backend_of(shape: str) -> Tokenizer:
    normalizer, steps = SHAPES[shape]
    backend = untrained(normalizer, steps, trained())
    backend.add_tokens([AddedToken(token, normalized=False, special=token != "<tool>") for token in TOKENS])
    return backend


encoder_of = cache(lambda shape: WordEncoder(backend_of(shape)))
each_shape = pytest.mark.parametrize("shape", SHAPES)

WORDS = [
    "Hello",
    "I'll",
    "WE'VE",
    "don't",
    "'S",
    "x'Re",
    "HTTPServer",
    "12345",
    "3.14",
    "http://x.org/y_z",
    "--",
    "naïve",
]
pieces = st.one_of(
    st.text(max_size=8),
    st.text(ASCII, max_size=8),
    st.text(SPACES, max_size=5),
    st.text(LETTERS, max_size=12),
    st.sampled_from([*WORDS, " ", "\r\n", "\n\n"]),
    st.sampled_from(TOKENS),
    st.sampled_from([token[:-1] for token in TOKENS] + [token[1:] for token in TOKENS]),
)
texts = st.lists(pieces, max_size=12).map("".join)


def own(backend: Tokenizer, text: str, *, parse_special: bool = True) -> list[int]:
    backend.encode_special_tokens = not parse_special
    return backend.encode(text, add_special_tokens=False).ids


def as_lists(encoded: list[Any]) -> list[list[int]]:
    return [ids.tolist() for ids in encoded]


@each_shape
def test_each_published_shape_is_cut(shape):
    assert encoder_of(shape).cuts


@each_shape
@given(several=st.lists(texts, max_size=4), parse_special=st.sampled_from([True, True, False]))
@example(several=["a  b \n c", "a b\u0301 c\u3000 d", "x x> y   z", " a", "a "], parse_special=True)
@settings(max_examples=150, deadline=None)
def test_texts_have_the_ids_of_the_backend(shape, several, parse_special):
    found = encoder_of(shape).encode(several, parse_special=parse_special)
    assert as_lists(found) == [own(backend_of(shape), text, parse_special=parse_special) for text in several]


def test_a_text_is_cut_before_a_space_that_follows_a_letter_a_digit_or_a_sign():
    cut = words.CUT.split("Yes, 12 of  them.\n And “so” on \n")
    assert cut == ["Yes,", "12", "of", " them.\n And", "“so” on", "\n"]


def with_token(content: str = "<x>", **flags: bool) -> Tokenizer:
    backend = untrained(None, [GPT2])
    backend.add_tokens([AddedToken(content, **{"normalized": False, **flags})])
    return backend


def with_limit(set_limit: Any) -> Tokenizer:
    backend = untrained(None, [GPT2])
    set_limit(backend)
    return backend


@pytest.mark.parametrize(
    "backend",
    {
        "prefix space": untrained(None, [pre_tokenizers.ByteLevel(add_prefix_space=True)]),
        "ByteLevel first": untrained(None, [BYTES, split(QWEN2)]),
        "another step": untrained(None, [pre_tokenizers.Punctuation(), GPT2]),
        "another pattern": untrained(None, [split(r"\w+ ?"), GPT2]),
        "nothing begins at a space": untrained(None, [split(r"\p{N}{1,3}"), BYTES]),
        "a string": untrained(None, [pre_tokenizers.Split(" ", "isolated"), GPT2]),
        "merged": untrained(None, [split(QWEN2, "merged_with_next"), BYTES]),
        "inverted": untrained(None, [split(QWEN2, "isolated", invert=True), BYTES]),
        "removed": untrained(None, [split(QWEN2, "removed"), BYTES]),
        "another normalizer": untrained(normalizers.Sequence([NFC, normalizers.Replace("a b", "c")]), [GPT2]),
        "no words": untrained(None, []),
        "not byte pairs": untrained(None, [GPT2], models.WordLevel({"a": 0}, unk_token="a")),
        "dropout": untrained(None, [GPT2], models.BPE(dropout=0.1)),
        "padding": with_limit(lambda backend: backend.enable_padding()),
        "truncation": with_limit(lambda backend: backend.enable_truncation(10_000)),
        "token that takes spaces": with_token(lstrip=True),
        "token that takes spaces after it": with_token(rstrip=True),
        "token that is a word": with_token(single_word=True),
        "token with a space": with_token("a b"),
    }.items(),
    ids=lambda named: named[0],
)
def test_another_pipeline_is_left_to_the_backend(backend):
    assert not WordEncoder(backend[1]).cuts


def test_each_unsupported_pipeline_is_refused_for_its_named_reason():
    assert WordEncoder(untrained(None, [GPT2])).cuts
    assert WordEncoder(with_token()).cuts
    assert WordEncoder(with_token(normalized=True)).cuts


def test_a_difference_in_the_probes_leaves_all_to_the_backend(monkeypatch):
    monkeypatch.setattr(words, "WITHOUT_SPACES", {r"\w+ \w+"})
    backend = untrained(None, [split(r"\w+ \w+"), GPT2], trained())
    encoder = WordEncoder(backend)
    assert not encoder.cuts
    assert as_lists(encoder.encode(["a b"])) == [own(backend, "a b")]


def test_words_kept_are_bounded(monkeypatch):
    monkeypatch.setattr(words, "MAX_CHARACTERS", 100)
    encoder, backend = WordEncoder(backend_of("qwen2")), backend_of("qwen2")
    for start in ("abcd", "efgh", "ijkl", "mnop"):
        text = " ".join(f"{a}{b} {a * 5}" for a in start for b in "xyz") + "<|a|>"
        assert as_lists(encoder.encode([text, start])) == [own(backend, text), own(backend, start)]
        held = sum(map(len, [*encoder._words, *encoder._starts]))
        assert held <= 100 + len(text)
    assert start in encoder._starts


def test_a_word_is_cached_without_the_token_after_it():
    encoder, text = WordEncoder(backend_of("qwen2")), "far is the moon?<|a|>\nNo"
    assert as_lists(encoder.encode([text])) == [own(backend_of("qwen2"), text)]
    assert {" moon?", "<|a|>", "\nNo"} <= encoder._starts.keys()
    assert not any("moon?<" in word for word in [*encoder._starts, *encoder._words])


def test_an_encoder_travels_to_another_process():
    copy = pickle.loads(pickle.dumps(encoder_of("qwen2")))
    text = "Hello, <|a|>WE'VE  12"
    assert copy.cuts
    assert as_lists(copy.encode([text])) == [own(backend_of("qwen2"), text)]


# Published tokenizers: TANDEM_TOKENIZERS names a folder with their folders in it.
FOLDER = Path(os.environ.get("TANDEM_TOKENIZERS", "no-tokenizers-here"))
CUT = ["command_r_plus", "deepseek_v3", "gpt2", "gpt4o", "llama3", "llama3_1", "llama3_2", "mistral_nemo"]
CUT += ["qwen2_5", "qwen3"]
LEFT = ["gemma2", "gemma3"]  # another normalizer
DATA = Path(__file__).parents[4] / "shared" / "data"


def published(name: str) -> Any:
    if not (FOLDER / name / "tokenizer.json").is_file():
        pytest.skip(f"TANDEM_TOKENIZERS: no {name} in {FOLDER}")
    return load_tokenizer(FOLDER / name)


@pytest.mark.slow
@pytest.mark.parametrize("name", CUT)
def test_a_published_tokenizer_gives_random_text_its_own_ids(name):
    backend = published(name).backend_tokenizer
    encoder, chance = WordEncoder(backend), random.Random(name)
    assert encoder.cuts
    tokens = [token.content for token in backend.get_added_tokens_decoder().values()][:40]
    any_character = [chr(code) for code in chance.sample(range(0x20, 0xD800), 2000)]
    alphabets = (
        list(ASCII),
        list(LETTERS + SPACES),
        [*WORDS, *" \n\t'"],
        [*WORDS, *" \n", *tokens],
        any_character + [" "] * 800,
    )
    for _ in range(40):
        several = ["".join(chance.choices(chance.choice(alphabets), k=chance.randint(0, 20))) for _ in range(1000)]
        assert as_lists(encoder.encode(several)) == [own(backend, text) for text in several]


@pytest.mark.slow
@pytest.mark.parametrize("name", LEFT)
def test_a_published_tokenizer_of_another_kind_is_left_to_its_backend(name):
    assert not WordEncoder(published(name).backend_tokenizer).cuts


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not here")
@pytest.mark.parametrize("name", CUT)
def test_a_published_tokenizer_gives_published_sets_its_own_ids(name):
    template = make_template(published(name), TokenizerConfig(chat_template="default"))
    backend, rendered = template.tokenizer.backend_tokenizer, []
    for file in sorted(file for file in DATA.iterdir() if file.suffix in (".json", ".jsonl", ".gz")):
        rows = [row for row in read_rows(file) if not isinstance(row, RowError)]
        format_name, _ = detect_format(rows[0], DatasetFields())
        for row in rows:
            try:
                preference = read_preference(row, DatasetFields(), format_name, Wording())
                rendered.append(template.render(preference))
            except RowError:
                continue
    prompts = [one.prompt for one in rendered]
    answers = [part.text for one in rendered for parts in one.completions for part in parts]
    for several, begins in ((prompts, True), (answers, False)):
        assert as_lists(template.encode(several, begins=begins)) == [own(backend, text) for text in several]
    assert len(rendered) > 1000
