"""Messages of other libraries as tandem quotes them."""

import pytest

from tandem.errors import one_line


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("no such\n  file.", "no such file"),
        ("x" * 600, "x" * 500),
        ("x" * 499 + "." + "y", "x" * 499),
        ("", "ValueError"),
        ("...", "ValueError"),
    ],
)
def test_an_error_is_quoted_on_one_line_without_its_final_period(message, line):
    assert one_line(ValueError(message)) == line
