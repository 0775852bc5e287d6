"""Text and tables at the width of a terminal: no word or number is broken."""

import pytest

from tandem.terminal.text import table, wrap

DATA = ["set", "rows", "accepted", "bad", "prompt tok", "compl. tok", "longest", "sharing can save"]
ROWS = [["validation-default", "1,234,567", "1,234,567", "0", "123,456,789", "123,456,789", "4,096", "37%"]]


def test_a_long_line_is_wrapped_at_spaces_with_a_hanging_indent():
    assert wrap("one two three\n  four five six", 9) == "one two\nthree\n  four\n    five\n    six"
    assert wrap("one two", 9, 0) == "one two"


def test_a_word_longer_than_a_line_is_not_broken():
    assert wrap("see /a/very/long/path now", 8) == "see\n/a/very/long/path\nnow"


def test_wide_characters_count_as_two_cells():
    assert wrap("東京 東京 東京", 9) == "東京 東京\n東京"  # 4 cells each


@pytest.mark.parametrize("text", ["", "\n", "  ", "a  b"])
def test_text_that_fits_is_unchanged_except_for_trailing_spaces(text):
    assert wrap(text, 80) == text.rstrip(" ")


def test_a_table_that_fits_has_one_heading_line():
    assert table(["set", "sharing can save"], [["train", "37%"]], 80) == [
        ("set    sharing can save", True),
        ("train               37%", False),
    ]


def test_a_table_that_is_too_wide_wraps_its_headings_first():
    assert table(["set", "sharing can save"], [["train", "37%"]], 20) == [
        ("       sharing", True),
        ("           can", True),
        ("set       save", True),
        ("train      37%", False),
    ]


def test_columns_that_still_do_not_fit_move_below_and_repeat_the_first_column():
    lines = [line for line, _ in table(DATA, ROWS, 80)]
    assert max(map(len, lines)) <= 80
    assert lines == [
        "set                      rows   accepted  bad   prompt tok   compl. tok  longest",
        "validation-default  1,234,567  1,234,567    0  123,456,789  123,456,789    4,096",
        "                    sharing",
        "                        can",
        "set                    save",
        "validation-default      37%",
    ]
    assert len(table(DATA, ROWS, None)) == 2
