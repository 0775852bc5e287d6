"""Formats commands for the user to copy, quoted so that they run as printed.

Python is called with -P, so that nothing is imported from the working directory.
"""

import json
import math
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from tandem.terminal.arguments import given_words, in_command, option

# Text that needs no quotes in an override: not a number or a constant, and without special characters.
PLAIN_TEXT = re.compile(r"(?!(true|false|null|nan|inf)\Z)[A-Za-z_/][\w/.:-]*", re.IGNORECASE | re.ASCII)
QUOTE_OR_END = re.compile(r"(\\*)('|\Z)")


def tandem_command(*arguments: str) -> str:
    """Return a tandem command line: `tandem ...` if the shell finds this installation, otherwise `PYTHON -P -m tandem ...`."""
    found = shutil.which("tandem")
    own_scripts = (Path(sys.argv[0]).resolve(), (Path(sys.executable).parent / "tandem").resolve())
    is_on_path = found is not None and Path(found).resolve() in own_scripts
    return shlex.join([*(["tandem"] if is_on_path else [sys.executable, "-P", "-m", "tandem"]), *arguments])


def with_other_path(given: Path, right: Path) -> str:
    """Return a sentence with the command that the user gave, but another path in place of `given`; in a call, the path."""
    words = [str(right) if Path(word) == given else word for word in sys.argv[1:]]
    if in_command() and words != sys.argv[1:]:
        return f"The command is then: {tandem_command(*words)}"
    return f"Did you mean {right}?"


def advice_to_allow_code() -> str:
    """Return a sentence that says how to let a file run the code that it names, in a command with the complete command."""
    words = given_words()
    advice = f"If you trust it, add {option('allow_code', True)}"
    if not words:
        return f"{advice}."
    end = words.index("--") if "--" in words else len(words)
    return f"{advice}: {tandem_command(*words[:end], '--allow-code', *words[end:])}"


def resume_call(run: str) -> str:
    """Return what resumes a run: a command, or a call from Python."""
    if in_command():
        return tandem_command("train", "--resume", run)
    return f"tandem.train(tandem.load_config({f'{run}/config.yaml'!r}, {[override('run.dir', run)]}))"


def finish_or_use_checkpoint(run: str, process: str | None) -> str:
    """Return what to do with a run that has no model yet, in a sentence or two. `process`: the id of its process, or None."""
    newest = Path(run) / "checkpoints" / "latest"
    finish = f"Finish it with {resume_call(run)}" if process is None else "Wait until it is finished"
    training = "" if process is None else f"It is being trained by process {process}. "
    return f"{training}{finish}{f', or use its newest checkpoint, {newest}' if newest.is_dir() else ''}."


def export_call(run: str, form: Literal["adapter"] | None = None) -> str:
    """Return what exports a run or a checkpoint: a command, or a call from Python."""
    asked = [] if form is None else [option("form", form)]
    return tandem_command("export", run, *asked) if in_command() else f"tandem.export({', '.join([repr(run), *asked])})"


def python_command(code: str) -> str:
    """Return a command line that runs `code` with this Python installation."""
    found = shutil.which("python")
    here = Path(sys.executable).parent
    is_on_path = found is not None and Path(found).parent.resolve() == here.resolve()
    return shlex.join(["python" if is_on_path else sys.executable, "-P", "-c", code])


def install_command(extra: str) -> str:
    """Return the command that installs an extra of tandem. The user must run it in a checkout, because tandem is not on PyPI."""
    return f"pip install '.[{extra}]'"


def override(key: str, value: Any) -> str:
    """Return the override key=value, with quotes if the value needs them, as in key='a b'."""
    return f"{key}={_quote(value)}"


def with_override(overrides: Sequence[str], key: str, value: Any) -> list[str]:
    """Return the overrides with `key` set to `value`. Earlier overrides of that key are removed."""
    kept = [one for one in overrides if key_of(one) != key]
    return [*kept, override(key, value)]


def key_of(text: str) -> str:
    """Return the key of an override: dpo.wpo for each of dpo.wpo=true, +dpo.wpo=true and ~dpo.wpo."""
    return text.lstrip("+~").partition("=")[0]


def _quote(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_quote(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_quote, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # inf, -inf or nan; JSON has other names for them
    if not isinstance(value, str):
        return json.dumps(value)
    if PLAIN_TEXT.fullmatch(value):
        return value
    # A backslash is literal, except before a quote or the end of the text, where it must be doubled.
    return "'" + QUOTE_OR_END.sub(lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value) + "'"
