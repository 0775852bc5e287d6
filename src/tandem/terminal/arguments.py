"""How messages name an argument: `--temperature 0.8` while a command runs, `temperature=0.8` in a call from Python.

    f"{option('temperature', value)}: give 0 (greedy) or a positive number, such as 0.8."

Messages are written with the names of Python's arguments. An option has the same name with hyphens, except for those below.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

OPTIONS = {
    "model": "MODEL",
    "data": "DATA",
    "num_samples": "-n",
    "timeout_seconds": "--timeout",
}
FLAGS = {
    ("form", "adapter"): "--adapter",
    ("form", "merged"): "--merged",
    ("measured", False): "--no-measure",
}
REPEATED = ("allow_env",)  # options that take one value each; others separate values with commas

_in_command = False  # of this process: a command runs alone in its process
_given_words: tuple[str, ...] = ()  # of this command, after `tandem`


@contextmanager
def command_words(given: Sequence[str] = ()) -> Iterator[None]:
    """Inside this context, messages name options of the command line. `given`: the command that runs, after `tandem`."""
    global _in_command, _given_words
    before = _in_command, _given_words
    _in_command, _given_words = True, tuple(given)
    try:
        yield
    finally:
        _in_command, _given_words = before


def in_command() -> bool:
    """Whether messages are for a user of the command line."""
    return _in_command


def given_words() -> tuple[str, ...]:
    """Return the words of the command that runs, after `tandem`. Empty in a call from Python."""
    return _given_words


def same_call() -> str:
    """Return what to repeat: "the same command" or, in a call from Python, "the same call"."""
    return "the same command" if _in_command else "the same call"


def option(name: str, value: Any = None, *, metavar: str | None = None) -> str:
    """Return an argument as the user writes it, with its value; with `metavar`, such as FILE; or its name alone.

    option("fresh", True)             --fresh             fresh=True
    option("out", metavar="DIR")      --out DIR           out=DIR
    option("form", "merged")          --merged            form="merged"
    option("beta")                    --beta              beta
    """
    shown = [metavar] if metavar is not None else _shown(value, name in REPEATED)
    if not _in_command:
        text = metavar if metavar is not None else _literal(value)
        return name if text is None else f"{name}={text}"
    if isinstance(value, str | bool) and (name, value) in FLAGS:
        return FLAGS[name, value]
    flag = OPTIONS.get(name, f"--{name.replace('_', '-')}")
    return " ".join(f"{flag} {one}" for one in shown) if shown else flag


def setting(key: str, value: Any) -> str:
    """Return what the user set: an argument, as `option` writes it, or a key of the configuration: `run.dir = runs/x`."""
    return option(key, value) if key.isidentifier() else f"{key} = {value}"


def _shown(value: Any, is_repeated: bool) -> list[str]:
    if value is None or value is True:
        return []
    if isinstance(value, list | tuple):
        return [str(one) for one in value] if is_repeated else [",".join(map(str, value))]
    return [str(value)]


def _literal(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return f"[{', '.join(str(_literal(one)) for one in value)}]"
    return repr(value) if isinstance(value, bool | int | float) else json.dumps(str(value), ensure_ascii=False)
