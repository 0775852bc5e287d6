"""Streams whose reader goes away."""

import errno
import io
import os
import sys

import pytest

from tandem.terminal.streams import ReaderGone, WatchedStream, continue_without_reader, watched_streams


@pytest.fixture
def broken():
    """A stream into a pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        yield stream


def test_what_is_written_for_nobody_ends_a_command(broken):
    stream = WatchedStream(broken, continues=False)
    stream.write("a")  # into the buffer
    with pytest.raises(ReaderGone):
        stream.flush()
    broken.flush()  # as the interpreter does in the end: it goes nowhere


def test_a_run_continues_and_says_so_once(broken, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", broken)
    with watched_streams():
        continue_without_reader("Nobody reads.")
        for _ in range(3):
            print("a", flush=True)
    assert capsys.readouterr().err == "Nobody reads.\n"


def test_a_short_command_ends_with_141_in_silence(broken, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", broken)
    with pytest.raises(SystemExit) as ended, watched_streams():
        print("a")  # the buffer is written at the end
    assert ended.value.code == 141
    assert capsys.readouterr().err == ""
    assert sys.stdout is broken


def test_other_errors_of_a_stream_are_not_hidden():
    class Full(io.StringIO):
        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left on device"):
        WatchedStream(Full(), continues=True).flush()
