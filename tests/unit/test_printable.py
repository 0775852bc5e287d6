"""What is shown to the user: no control characters, no secrets, no endless lists."""

import json
import unicodedata

import pytest
import yaml

from tandem.errors import DataError
from tandem.terminal.printable import SECRETS, Secrets, counted, escaped, listed, scrubbed, shortened, without_password


def test_one_thing_is_written_in_the_singular():
    assert [counted(num, "pair") for num in (0, 1, 2, 1000)] == ["0 pairs", "1 pair", "2 pairs", "1,000 pairs"]


# Escaping


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("over\rwritten\x08", r"over\x0dwritten\x08"),
        ("\x9b31m\x7f\x85", r"\u009b31m\u007f\u0085"),
        ("a\u202eb\u2066c\u2069d\u200fe\u061cf", r"a\u202eb\u2066c\u2069d\u200fe\u061cf"),
        ("a\u2028b\u2029c", r"a\u2028b\u2029c"),
        ("undecodable \udcff", r"undecodable \udcff"),
    ],
)
def test_terminal_control_characters_are_shown_as_escapes(text, shown):
    assert escaped(text) == shown
    assert escaped(shown) == shown


@pytest.mark.parametrize(
    "text", ["a\tb\nc", "中文 العربية עברית ü", "👩\u200d👩\u200d👧 🏴\U000e0067\U000e007f", "\\x1b"]
)
def test_text_in_any_script_is_unchanged(text):
    assert escaped(text) == text


def test_every_control_character_is_escaped():
    left = set(escaped("".join(map(chr, range(0x110000)))))
    assert {c for c in left if unicodedata.category(c) in ("Cc", "Zl", "Zp", "Cs")} == {"\n", "\t"}
    bidirectional = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    assert not {c for c in left if unicodedata.bidirectional(c) in bidirectional}


def test_escaped_json_is_still_the_same_json():
    text = "".join(map(chr, range(0x2070)))
    assert json.loads(escaped(json.dumps(text, ensure_ascii=False))) == text


# Length


def test_a_long_list_is_capped():
    assert listed(range(3)) == "0, 1, 2"
    assert listed(range(1000), most=3) == "0, 1, 2 and 997 more"
    assert listed(["a" * 1000]) == f"{'a' * 100}..."


def test_the_middle_of_a_long_message_is_left_out():
    assert shortened("a" * 8000) == "a" * 8000
    assert shortened("a" * 10_000 + "b" * 1000) == (f"{'a' * 7000} ... (3,000 characters left out) ... {'b' * 1000}")


# Passwords


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("to http://me:secret@host/a and sqlite:///a", "to http://host/a and sqlite:///a"),
        ("http://me:se@cret@host/a", "http://host/a"),
        ("http://me:se/cr/et@host/a.", "http://host/a."),
        ("postgresql://me:a:/@b@host:5432/db", "postgresql://host:5432/db"),
        ("http://token@host", "http://host"),
        ("sqlite:////home/me@work/mlflow.db", "sqlite:////home/me@work/mlflow.db"),
        ("/data//me@work/pairs.jsonl", "/data//me@work/pairs.jsonl"),
        ("mail to me@work", "mail to me@work"),
    ],
)
def test_passwords_in_addresses_are_left_out(text, shown):
    assert without_password(text) == shown


# Values of the environment


def secrets(value: str, *words: str) -> Secrets:
    found = Secrets()
    found.add("HUSH", value, words)
    return found


@pytest.mark.parametrize(
    ("value", "message", "shown"),
    [
        ("s3cret", "at http://host/s3cret!", "at http://host/$HUSH!"),
        ("s3cret", "s3cret and s3cret", "$HUSH and $HUSH"),
        ('a"b\\c', json.dumps('a"b\\c'), '"$HUSH"'),
        ("a'b\nc\"", repr("a'b\nc\""), "'$HUSH'"),
        ("two   words", "two words", "$HUSH"),
        ("0.0012340", "is 0.001234", "is $HUSH"),
        ("train:s3cret", "no metric 's3cret'", "no metric '$HUSH'"),
        ("0123456789abcdef", "cut to 0123456789a", "cut to $HUSH"),
        ("0123456789abcdef", "the end of it: 89abcdef.", "the end of it: $HUSH."),
        ("/scratch/me", "/scratch/you and /scratch/me/a", "/scratch/you and $HUSH/a"),
        ("https://one.test", "https://other.example", "https://other.example"),
        ("abc", "abcdef", "abcdef"),
        ("", "a", "a"),
    ],
)
def test_a_secret_value_is_replaced_by_its_variable_in_every_spelling(value, message, shown):
    assert secrets(value).scrub(message) == shown


def test_words_of_the_configuration_are_not_secrets():
    assert secrets("bfloat16", "bfloat16").scrub("weights in bfloat16") == "weights in bfloat16"


def test_every_error_is_scrubbed():
    SECRETS.add("HUSH", "s3cret", ())
    try:
        assert str(DataError("s3cret at http://me:pass@host")) == "$HUSH at http://host"
        assert scrubbed("s3cret") == "$HUSH"
    finally:
        SECRETS.clear()
    assert str(DataError("s3cret")) == "s3cret"


def test_escapes_are_valid_yaml_in_double_quotes():
    text = "".join(map(chr, range(0x2070)))
    assert yaml.safe_load(escaped(yaml.safe_dump(text, default_style='"', allow_unicode=True))) == text
