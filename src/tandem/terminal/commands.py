"""Commands to print for the user, quoted so that they run as printed. -P: nothing is imported from the working directory."""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Read as this very text by the parser of overrides: no number, no constant, nothing that it takes apart.
PLAIN_TEXT = re.compile(r"(?!(true|false|null|nan|inf)\Z)[A-Za-z_/][\w/.:-]*", re.IGNORECASE | re.ASCII)
QUOTE_OR_END = re.compile(r"(\\*)('|\Z)")


def tandem_command(*arguments: str) -> str:
    """A command line of tandem: by its name where the shell finds this one, else by this Python."""
    found = shutil.which("tandem")
    mine = (Path(sys.argv[0]).resolve(), Path(sys.executable).parent / "tandem")
    named = found is not None and Path(found).resolve() in (mine[0], mine[1].resolve())
    return shlex.join([*(["tandem"] if named else [sys.executable, "-P", "-m", "tandem"]), *arguments])


def python_command(code: str) -> str:
    """A command line that runs code, by a Python that has what this one has."""
    found = shutil.which("python")
    here = Path(sys.executable).parent
    named = found is not None and Path(found).parent.resolve() == here.resolve()
    return shlex.join(["python" if named else sys.executable, "-P", "-c", code])


def override(key: str, value: Any) -> str:
    """`key=value` as the configuration reads it back, whatever the value holds. a b -> key='a b'"""
    return f"{key}={_written(value)}"


def changed(overrides: Sequence[str], key: str, value: Any) -> list[str]:
    """Overrides with one more, in the place of those of the same key."""
    kept = [one for one in overrides if key_of(one) != key]
    return [*kept, override(key, value)]


def key_of(text: str) -> str:
    """dpo.wpo=true, +dpo.wpo=true, ~dpo.wpo -> dpo.wpo"""
    return text.lstrip("+~").partition("=")[0]


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_written, value)) + "]"
    if not isinstance(value, str):
        return json.dumps(value)
    if PLAIN_TEXT.fullmatch(value):
        return value
    # Backslashes are text except before a quote or the end: there each needs another one.
    return "'" + QUOTE_OR_END.sub(lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value) + "'"
