"""A JSON array read in blocks: the block size changes no element, line or column."""

import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.data.read import json_array
from tandem.data.read.json_array import elements
from tandem.errors import DataError

FILE = Path("pairs.json")
BLOCKS = [1, 2, 3, 7, 10**6]


class InBlocks(io.BytesIO):
    """A file of which a read gives so many bytes at most."""

    def __init__(self, content: bytes, block: int):
        super().__init__(content)
        self.block = block

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(self.block)


def read(content: str | bytes, block: int = 3) -> list:
    content = content if isinstance(content, bytes) else content.encode("utf-8")
    return [value for _, value, _ in elements(InBlocks(content, block), FILE)]  # type: ignore[arg-type]


def refusal(content: str | bytes, block: int = 3) -> str:
    with pytest.raises(DataError) as caught:
        read(content, block)
    return str(caught.value)


# Elements


@pytest.mark.parametrize("block", BLOCKS)
def test_elements_are_the_same_wherever_blocks_end(block):
    text = '[ {"a": "ä€😀\\u00e4\\ud83d\\ude00"},\r\n\t{"b": [1, {"c": null}]} ,[], "x]y,", true , null ]\n '
    assert read(text, block) == json.loads(text)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("blanks", ["", " ", "\n\n"])
def test_an_empty_array_has_no_elements(block, blanks):
    assert read(f"{blanks}[{blanks}]{blanks}", block) == []


@pytest.mark.parametrize("block", BLOCKS)
def test_elements_are_numbered_from_one_with_their_size(block):
    found = list(elements(InBlocks(b'[ {"a": 1}, 12345 ]', block), FILE))  # type: ignore[arg-type]
    assert found == [(1, {"a": 1}, 8), (2, 12345, 5)]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("number", ["123456", "-1", "0", "true", "null", "NaN", "-Infinity"])
def test_a_value_at_the_end_of_a_block_may_continue_in_the_next(block, number):
    assert str(read(f"[{number},{number}]", block)) == str([json.loads(number)] * 2)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("number", ["1.5", "12e3", "1.25e-2", "-0.5E+1"])
def test_a_number_inside_an_object_may_be_cut_anywhere(block, number):
    assert read('[{"a": ' + number + "}]", block) == [{"a": float(number)}]


@pytest.mark.parametrize("number", ["1.5", "12e3", "1.25e-2", "-0.5E+1"])
def test_a_bare_number_may_be_cut_anywhere(number):
    for block in BLOCKS:
        assert read(f"[{number}]", block) == [float(number)]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.lists(VALUES, max_size=5), st.integers(1, 40), st.sampled_from([None, 1]), st.booleans())
def test_any_array_is_read_the_same_in_blocks_as_at_once(values, block, indent, ascii_only):
    text = json.dumps(values, indent=indent, ensure_ascii=ascii_only)
    assert read(text, block) == values


def test_an_element_is_yielded_before_the_next_block_is_read():
    file = InBlocks(b'[{"a": 1}, {"b": 2}, ' + b" " * 1000 + b"]", 12)
    stream = elements(file, FILE)  # type: ignore[arg-type]
    assert next(stream)[1] == {"a": 1}
    assert file.tell() == 12


# Byte-order mark and encoding


@pytest.mark.parametrize("block", BLOCKS)
def test_a_byte_order_mark_before_the_array_is_left_out(block):
    assert read(b'\xef\xbb\xbf[{"a": 1}]', block) == [{"a": 1}]


@pytest.mark.parametrize("block", BLOCKS)
def test_bytes_that_are_not_utf8_are_reported_with_their_offset(block):
    # "ä" takes two bytes: 0 is [, 1 the quotation mark, 2 and 3 the letter.
    assert refusal('["ä'.encode() + b'\xff"]', block) == "pairs.json: not UTF-8 at byte 4. Save the file as UTF-8."


@pytest.mark.parametrize("block", BLOCKS)
def test_a_character_that_was_cut_off_is_reported_with_its_first_byte(block):
    assert refusal('["a€'.encode()[:-1], block) == "pairs.json: not UTF-8 at byte 3. Save the file as UTF-8."


def test_offsets_of_bytes_that_are_not_utf8_include_the_byte_order_mark():
    for block in BLOCKS:
        said = refusal(b'\xef\xbb\xbf["a\xff"]', block)
        assert said == "pairs.json: not UTF-8 at byte 6. Save the file as UTF-8."


# What is malformed

CUT = " The file ends here: was it cut off?"
# Line 1 holds [{"a": 1}, from column 1 to 10; line 2 begins with two blanks.
MALFORMED = {
    '[{"a": 1},\n  {"b" 2}]': "2: column 8: malformed JSON: Expecting ':' delimiter.",
    '[{"a": 1},\n  {"b": 2} {"c": 3}]': "2: column 12: malformed JSON: Expecting ',' delimiter.",
    '[{"a": 1},\n  {"b": 2}\n\n': f"4: column 1: malformed JSON: Expecting ',' delimiter.{CUT}",
    '[{"a": 1},\n  {"b": 2},': f"2: column 12: malformed JSON: Expecting value.{CUT}",
    '[{"a": 1},\n  {"b": 2},\n]': "3: column 1: malformed JSON: Expecting value.",
    '[{"a": 1},\n  {"b": 2}]\n [': "3: column 2: malformed JSON: Extra data.",
    '[{"a": 1},\n  {"b": "x': f"2: column 9: malformed JSON: Unterminated string starting at.{CUT}",
    '[{"a": 1},\n  {"b": "ä\n"}]': "2: column 11: malformed JSON: Invalid control character at.",
    '{"a": 1}': "1: column 1: malformed JSON: Expecting '['.",
    "": f"1: column 1: malformed JSON: Expecting '['.{CUT}",
    "[": f"1: column 2: malformed JSON: Expecting value.{CUT}",
}


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("content", MALFORMED)
def test_malformed_json_is_reported_with_line_and_column_for_any_block_size(content, block):
    assert refusal(content, block) == f"pairs.json:{MALFORMED[content]}"


@pytest.mark.parametrize("block", BLOCKS)
def test_columns_are_counted_without_the_byte_order_mark(block):
    assert refusal("\ufeff[1 2]", block) == "pairs.json:1: column 4: malformed JSON: Expecting ',' delimiter."


def test_elements_before_a_malformed_one_are_yielded():
    stream = elements(InBlocks(b'[{"a": 1}, {]', 4), FILE)  # type: ignore[arg-type]
    assert next(stream)[1] == {"a": 1}
    with pytest.raises(DataError):
        next(stream)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_duplicate_key_is_reported_with_the_number_of_its_element(block):
    assert refusal('[{"a": 1}, {"b": {"c": 1, "c": 2}}]', block) == (
        "pairs.json: element 2: the key 'c' appears twice in one object. Remove one."
    )


def test_a_number_with_absurdly_many_digits_is_refused():
    assert (
        refusal(f"[{'1' * 5000}]", 10**6)
        == "pairs.json: element 1 has a number with too many digits. Shorten the number."
    )


def test_absurd_nesting_is_refused():
    assert (
        refusal("[" * 100_000, 10**6)
        == "pairs.json: element 1: JSON nested over 100 levels deep. Flatten it or remove it."
    )


# The limit of one element


def test_an_element_over_the_limit_is_refused_without_reading_the_file_to_its_end(monkeypatch):
    monkeypatch.setattr(json_array, "MAX_RECORD_BYTES", 50)
    file = InBlocks(b'[{"a": 1}, {"b": "' + b"x" * 1000 + b'"}]', 10)
    stream = elements(file, FILE)  # type: ignore[arg-type]
    assert next(stream)[1] == {"a": 1}
    with pytest.raises(DataError) as caught:
        next(stream)
    assert str(caught.value) == "pairs.json: element 2 is over 64 MB, or malformed. Remove it or fix it."
    assert file.tell() == 120  # one block more than twice 50 characters from the element's start, at 11


def test_the_limit_applies_to_each_element_not_to_their_sum(monkeypatch):
    monkeypatch.setattr(json_array, "MAX_RECORD_BYTES", 50)
    values = [{"a": "x" * 30}] * 20
    assert read(json.dumps(values), 10) == values


def test_an_element_below_the_limit_is_read_whatever_follows_it(monkeypatch):
    monkeypatch.setattr(json_array, "MAX_RECORD_BYTES", 3 * 2**20)
    values = ["x" * (5 * 2**19), "y" * 2**21]  # 2.5 and 2 MB; reads are of 1, 1, then 2 MB
    file = io.BytesIO(json.dumps(values).encode())
    assert [value for _, value, _ in elements(file, FILE)] == values  # type: ignore[arg-type]
