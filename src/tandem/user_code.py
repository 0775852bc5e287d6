"""Functions of the user's that a configuration names: `FILE.py:FUNCTION`, or `python:FUNCTION` if it was defined interactively.

The caller must have checked that the code may be run (config/code.py): loading a function runs its file.
"""

import ast
import hashlib
import inspect
import io
import os
import re
import sys
import tokenize
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError, one_line

FUNCTION_NAME = re.compile(r"(?P<file>[^\n]*\.py):(?P<function>[^\W\d]\w*)|python:(?P<given>[^\W\d]\w*)")
MAX_FILE_BYTES = 4 * 1024**2
SHOWN_FUNCTIONS = 8


class RefusedCodeError(ConfigError):
    """A file names code of the user's, and the user has not allowed to run it."""


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A function of the user's, its name in the configuration, and the SHA-256 of its file or, without a file, its source.

    Comments and blank lines of a file are not hashed.
    """

    name: str
    function: Callable[..., Any]
    digest: str
    is_given: bool = False  # this process passed the function as an object


_known: dict[str, UserFunction] = {}  # by name; a file that has changed is loaded again
_loading: list[Path] = []  # files that are being run


def is_user_function(name: object) -> bool:
    """Whether a name in the configuration names a function of the user's."""
    return isinstance(name, str) and FUNCTION_NAME.fullmatch(name) is not None


def known_function(name: str) -> UserFunction:
    """Return a function that was loaded before. In a new worker process, load it again."""
    return _known[name] if name in _known else load_function(name, name)


def was_given(name: str) -> bool:
    """Whether this process passed the function that `name` names as an object, and its file has not changed since.

    `load_function` then returns that function, and runs no file.
    """
    known, found = _known.get(name), FUNCTION_NAME.fullmatch(name)
    if known is None or found is None or not known.is_given:
        return False
    if found["given"]:
        return True
    path = Path(os.path.expanduser(found["file"]))  # noqa: PTH111
    return path.is_file() and _code_digest(_read(name, path)) == known.digest


def load_function(key: str, name: str) -> UserFunction:
    """Return the function that `name` names. Its file is run, unless that was done before and the file has not changed.

    `key`: the configuration key that names it, for messages.
    """
    found = FUNCTION_NAME.fullmatch(name)
    assert found is not None, name
    where = f"{key} = {name}" if key != name else name
    if found["given"]:
        if name not in _known:
            raise ConfigError(
                f"{where}: this function was defined in Python, not in a file, and this process does not have it. Start the run "
                f"from Python again with {found['given']}, or put the function into a file."
            )
        return _known[name]
    path = Path(os.path.expanduser(found["file"]))  # noqa: PTH111
    content = _read(where, path)
    digest = _code_digest(content)
    if name not in _known or _known[name].digest != digest:
        function = _function_in(where, _run(where, path, content), found["function"])
        _known[name] = UserFunction(name, function, digest)
    return _known[name]


def name_function(what: str, function: object) -> str:
    """Return a name for a function object, by which a configuration can name it.

    `what`: the argument that gave the function, for messages. A run compares the code of its functions when it resumes, so only
    functions whose code is all there is to compare are accepted.
    """
    shown = getattr(function, "__qualname__", None) or repr(function)
    plain = inspect.unwrap(function) if callable(function) else None
    if not isinstance(plain, types.FunctionType):
        raise ConfigError(f"{what} = {shown}: not a Python function. Define one with def.")
    if plain.__closure__ or "<" in plain.__qualname__ or "." in plain.__qualname__:
        raise ConfigError(
            f"{what} = {shown}: not a function at the top level of a module or notebook, so other processes cannot import it, "
            "and a resumed run could not notice that it has changed. Define it there with def."
        )
    module = sys.modules.get(plain.__module__)
    file = getattr(module, "__file__", None)
    if file is not None and file.endswith(".py") and Path(file).is_file():
        content = _read(f"{what} = {shown}", Path(file))
        if not _is_compiled_from(plain, content, file):
            raise ConfigError(
                f"{what} = {shown}: {file} has changed since the function was imported. Import it again, or restart Python."
            )
        _warn_of_calls_on_import(file, content)
        name, digest = f"{_shortest(file)}:{plain.__name__}", _code_digest(content)
    else:
        name, digest = f"python:{plain.__name__}", hashlib.sha256(_source_of(plain).encode()).hexdigest()
    _known[name] = UserFunction(name, function, digest, is_given=True)  # pyright: ignore[reportArgumentType]
    return name


def _warn_of_calls_on_import(file: str, content: bytes) -> None:
    """Warn if the current call comes from a line that is run whenever `file` is imported, as other commands do."""
    frame = sys._getframe()
    while frame.f_back is not None and (frame.f_code.co_name, frame.f_code.co_filename) != ("<module>", file):
        frame = frame.f_back
    if (frame.f_code.co_name, frame.f_code.co_filename) != ("<module>", file):
        return
    line = frame.f_lineno
    for statement in ast.parse(content).body:
        is_called_there = statement.lineno <= line <= (statement.end_lineno or line)
        if is_called_there and not (isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)):
            text = (
                f"{_shortest(file)} calls tandem while it is imported, so `tandem eval` and `tandem export` cannot import its "
                "functions. Put the call below `if __name__ == '__main__':` now, since a run does not accept changed code."
            )
            warnings.warn_explicit(text, UserWarning, file, line)


def refuse_while_loading(function: str) -> None:
    """Raise ConfigError if a file that is being loaded calls `function`, which would load the file again."""
    if _loading:
        raise ConfigError(
            f"{_loading[-1]} calls {function} while it is imported. Put the call below `if __name__ == '__main__':`."
        )


def function_missing(name: object) -> str | None:
    """Return what to write instead of a file alone, such as my_losses.py; None for any other name. The file is not run."""
    if not isinstance(name, str) or not name.endswith(".py"):
        return None
    path, own = Path(os.path.expanduser(name)), []  # noqa: PTH111
    try:
        if path.is_file() and path.stat().st_size <= MAX_FILE_BYTES:
            tree = ast.parse(path.read_bytes())
            own = [one.name for one in tree.body if isinstance(one, ast.FunctionDef) and one.name[0] != "_"]
            own = own[:SHOWN_FUNCTIONS]
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    return f"a Python file without the name of a function. Write {' or '.join(f'{name}:{one}' for one in own or ['FUNCTION'])}"


def _read(where: str, path: Path) -> bytes:
    if not path.is_file():
        what = "a folder, not a file" if path.is_dir() else f"there is no file {path}"
        raise ConfigError(f"{where}: {what}. Give the path of a Python file, from the working directory.")
    try:
        content = path.read_bytes()[: MAX_FILE_BYTES + 1]
    except OSError as error:
        raise ConfigError(f"{where}: {path} cannot be read ({error.strerror}). Check its permissions.") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{where}: {path} has over {MAX_FILE_BYTES:,} bytes. Is it a Python file?")
    return content


def _code_digest(content: bytes) -> str:
    """Return the SHA-256 of a file without its comments, blank lines and spaces at the ends of lines, which change nothing."""
    try:
        tokens = list(tokenize.tokenize(io.BytesIO(content).readline))
        lines = content.decode(tokens[0].string).split("\n")
    except (SyntaxError, ValueError, LookupError, tokenize.TokenError):
        return hashlib.sha256(content).hexdigest()  # running the file reports what is wrong with it
    # The lines of a string that continues on the next line, where blank lines and spaces count.
    in_text = {row for one in tokens for row in range(one.start[0], one.end[0])}
    for one in tokens:
        if one.type == tokenize.COMMENT:
            row, column = one.start
            lines[row - 1] = lines[row - 1][:column]
    kept = [line if row in in_text else line.rstrip() for row, line in enumerate(lines, 1)]
    code = "\n".join(line for row, line in enumerate(kept, 1) if line or row in in_text)
    return hashlib.sha256(code.encode("utf-8", "surrogatepass")).hexdigest()


def _run(where: str, path: Path, content: bytes) -> types.ModuleType:
    """Run the content of a file as a new module. It is the content that was hashed, whatever happens to the file meanwhile."""
    module = types.ModuleType(f"tandem_user_code_{hashlib.sha256(content).hexdigest()[:16]}")
    module.__file__ = str(path.resolve())
    sys.modules[module.__name__] = module  # dataclasses and pickle look it up
    with _noted(path):
        try:
            exec(compile(content, str(path), "exec"), module.__dict__)
        except (Exception, SystemExit) as error:
            del sys.modules[module.__name__]
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
            line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
            at = f":{line}" if line else ""
            raise ConfigError(
                f"{where}: {path}{at} fails when it is imported, with {type(error).__name__}: {one_line(error)}. Fix the file."
            ) from error
    return module


@contextmanager
def _noted(path: Path) -> Iterator[None]:
    _loading.append(path)
    try:
        yield
    finally:
        _loading.pop()


def _function_in(where: str, module: types.ModuleType, name: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if callable(function) and not isinstance(function, type):
        return function
    own = [key for key, one in vars(module).items() if isinstance(one, types.FunctionType) and key[0] != "_"]
    listed = f"Its functions are {', '.join(own[:SHOWN_FUNCTIONS])}" if own else "It has none"
    what = "is not a function there" if function is not None else "is not in the file"
    raise ConfigError(f"{where}: the function {name} {what}. {listed}.")


def _is_compiled_from(function: types.FunctionType, content: bytes, file: str) -> bool:
    """Whether a function has the code that its file has now."""
    try:
        compiled = compile(content, file, "exec")
    except (SyntaxError, ValueError):
        return False
    bodies = [one for one in compiled.co_consts if isinstance(one, types.CodeType) and one.co_name == function.__name__]
    return function.__code__ in bodies


def _shortest(file: str) -> str:
    """Return the path from the working directory if the file is below it, otherwise the absolute path."""
    path, here = Path(file).resolve(), Path.cwd().resolve()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _source_of(function: types.FunctionType) -> str:
    """Return the source of a function; without one, as after python -c, its compiled form."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return repr((_compiled(function.__code__), function.__defaults__, function.__kwdefaults__))


def _compiled(code: types.CodeType) -> tuple[Any, ...]:
    constants = [_compiled(one) if isinstance(one, types.CodeType) else one for one in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, constants
