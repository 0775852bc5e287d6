"""Escape sequences and bidirectional controls in keys, names, data and errors never reach the terminal."""

import io
import re
import sys

import pytest

from tandem.cli import main as cli
from tandem.errors import DataError
from tandem.report.reporter import Reporter
from tandem.terminal.console import SafeConsole
from tandem.terminal.printable import SECRETS, UNSAFE
from tandem.terminal.streams import print_traceback, watched_streams

ATTACK = "a\x1b]0;t\x07\x9b31m\u202eb\rc"
SHOWN = r"a\x1b]0;t\x07\u009b31m\u202eb\x0dc"
# What rich itself draws: colours, the cursor, the line of a bar.
DRAWN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


def command(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["tandem", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    assert not UNSAFE.search(said.out + said.err)
    return int(ended.value.code or 0), said.out, said.err


def test_a_key_of_a_file(monkeypatch, capsys, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text('"a\\e]0;t\\a\\x9B31m\\u202Eb\\rc": 1\n', encoding="utf-8")
    assert command(monkeypatch, capsys, "config", "-c", str(file)) == (
        2,
        "",
        f"tandem: error: {file}: unknown key {SHOWN}. `tandem config` lists all keys.\n",
    )


def test_a_file_name(monkeypatch, capsys, tmp_path):
    name = f"{tmp_path}/{ATTACK}.yaml"
    assert command(monkeypatch, capsys, "config", "-c", name) == (
        2,
        "",
        f"tandem: error: {tmp_path}/{SHOWN}.yaml: no such configuration file.\n",
    )


def test_an_argument_that_is_not_utf_8(monkeypatch, capsys):
    for argument in ("ä\udcff", "--out=ä\udcff"):
        at = len(argument)  # ä has two bytes
        assert command(monkeypatch, capsys, "export", "run", argument) == (
            2,
            "",
            f"tandem: error: {argument[:-1]}\\udcff: not UTF-8 at byte {at}, and tokenizers and many file formats take only "
            "UTF-8. Write this argument in UTF-8; if it names a file or folder, rename that.\n",
        )


def test_an_option_and_an_override(monkeypatch, capsys):
    said = command(monkeypatch, capsys, "config", "--a\x1b]0;t\x07")[2]
    assert said.endswith("Error: No such option: --a\\x1b]0;t\\x07\n")
    assert "override 'a\\x1b" in command(monkeypatch, capsys, "config", f"{ATTACK}=1")[2]


def test_an_error_of_data(monkeypatch, capsys):
    def fails(**_):
        raise DataError(f"pairs.jsonl:1: {ATTACK} 中文 العربية 🙂")

    monkeypatch.setattr(cli, "app", fails)
    assert command(monkeypatch, capsys) == (3, "", f"tandem: error: pairs.jsonl:1: {SHOWN} 中文 العربية 🙂\n")


def test_a_very_long_message_is_cut(monkeypatch, capsys):
    def fails(**_):
        raise DataError("a" * 10**6)

    monkeypatch.setattr(cli, "app", fails)
    assert len(command(monkeypatch, capsys)[2]) < 8100


def test_a_configuration_is_printed_escaped_and_is_the_same_when_read_back(monkeypatch, capsys, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text('data: {default: {prompt_key: "\\u202Ea\\x9B 中文"}}\n', encoding="utf-8")
    code, out, err = command(monkeypatch, capsys, "config", "-c", str(file))
    assert (code, err) == (0, "")
    assert '    prompt_key: "\\u202ea\\x9B 中文"\n' in out
    file.write_text(out, encoding="utf-8")
    assert command(monkeypatch, capsys, "config", "-c", str(file))[1] == out


def test_anything_printed_is_escaped(capsys):
    with watched_streams():
        print(ATTACK, "中文 🙂\tok")
        sys.stderr.write(ATTACK)
        assert not hasattr(sys.stdout, "buffer")
    assert capsys.readouterr() == (f"{SHOWN} 中文 🙂\tok\n", SHOWN)


def test_a_traceback_is_escaped_and_shows_no_variable(capsys):
    SECRETS.add("HUSH", "s3cret-value", ())
    try:
        error = ValueError(f"{ATTACK} s3cret-value")
        print_traceback(ValueError, error, None)
    finally:
        SECRETS.clear()
    assert capsys.readouterr().err == f"ValueError: {SHOWN} $HUSH\n"


def reported(*, terminal: bool) -> tuple[io.StringIO, Reporter]:
    file = io.StringIO()
    return file, Reporter("verbose", console=SafeConsole(file=file, force_terminal=terminal, width=60))


@pytest.mark.parametrize("terminal", [False, True])
def test_what_a_run_reports(terminal):
    file, reporter = reported(terminal=terminal)
    reporter.say(ATTACK)
    reporter.detail(ATTACK)
    reporter.warn(ATTACK, command=ATTACK)
    reporter.command(ATTACK)
    reporter.choices([("model", ATTACK)])
    reporter.table(["set", "n"], [[ATTACK, "1"]])
    shown = DRAWN.sub("", file.getvalue())
    assert not UNSAFE.search(shown)
    assert shown == (
        f"{SHOWN}\n{SHOWN}\nwarning: {SHOWN}\n  {SHOWN}\n  {SHOWN}\n\nSettings that affect the result\n  model  {SHOWN}\n"
        f"set{' ' * (len(SHOWN) - 3)}  n\n{SHOWN}  1\n"
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_and_text_printed_above_it(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    with watched_streams():
        reporter = Reporter(console=SafeConsole(force_terminal=True, width=100))
        with reporter.progress(f"Reference, [red]{ATTACK}", 2) as bar:
            print("\x1b]8;;http://evil.example\x1b\\a link\x1b]8;;\x1b\\ [b]")
            print(ATTACK, file=sys.stderr)
            bar(1, [f"loss {ATTACK}"])
    drawn = screen.getvalue()
    assert "\x1b[" in drawn  # the bar is drawn, not escaped
    shown = DRAWN.sub("", drawn)
    assert not UNSAFE.search(shown)
    assert "\\x1b]8;;http://evil.example\\x1b\\a link\\x1b]8;;\\x1b\\ [b]\n" in shown
    assert f"{SHOWN}\n" in shown
    assert r"Reference, [red]a\x1b]0;t" in shown
