"""Messages of other libraries as tandem quotes them."""

import errno

import pytest

from tandem.errors import full_disk, one_line


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


def test_of_several_errors_of_a_full_disk_the_one_that_names_a_path_is_shown():
    named = OSError(errno.ENOSPC, "No space left on device", "a.txt")
    closing = OSError(errno.ENOSPC, "No space left on device")
    closing.__context__ = named
    assert full_disk(closing) is named
    named.__cause__ = closing  # also where both are in the chain
    assert full_disk(named) is named
    alone = RuntimeError("I/O error: No space left on device (os error 28)")
    assert full_disk(alone).errno == errno.ENOSPC
    alone.__context__ = named
    assert full_disk(alone) is named
    assert full_disk(ValueError("no space left")) is None
