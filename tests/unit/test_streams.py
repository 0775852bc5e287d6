"""Streams whose reader closes them."""

import errno
import io
import os
import sys

import pytest

from tandem.terminal.streams import ReaderGone, WatchedStream, continue_without_reader, watched_streams


@pytest.fixture
def broken():
    """A stream into a pipe whose other end is closed."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        yield stream


def test_writing_to_a_closed_pipe_ends_a_command(broken):
    stream = WatchedStream(broken, continues=False)
    stream.write("a")  # into the buffer
    with pytest.raises(ReaderGone):
        stream.flush()
    broken.flush()  # as the interpreter does at exit: goes to /dev/null


def test_a_run_continues_after_its_pipe_is_closed_and_prints_one_notice(broken, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", broken)
    with watched_streams():
        continue_without_reader("Nobody reads.")
        for _ in range(3):
            print("a", flush=True)
    assert capsys.readouterr().err == "Nobody reads.\n"


def test_a_short_command_exits_silently_with_141_when_its_pipe_is_closed(broken, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", broken)
    with pytest.raises(SystemExit) as ended, watched_streams():
        print("a")  # the buffer is written at the end
    assert ended.value.code == 141
    assert capsys.readouterr().err == ""
    assert sys.stdout is broken


def test_other_stream_errors_are_raised():
    class Full(io.StringIO):
        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left on device"):
        WatchedStream(Full(), continues=True).flush()
