"""Files and functions stay short enough to read, and a unit is defined once."""

import ast
from pathlib import Path

SOURCES = sorted((Path(__file__).parents[2] / "src").rglob("*.py"))
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 400, 60


def parsed(file):
    return ast.parse(file.read_text(encoding="utf-8"))


def is_command(function):
    """Whether a function is a command of the terminal. Its signature is the list of its options, with their help."""
    return any(".command(" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_no_file_is_too_long():
    assert [file.name for file in SOURCES if len(file.read_text(encoding="utf-8").splitlines()) > MOST_LINES] == []


def test_no_function_is_too_long():
    long = []
    for function in (node for file in SOURCES for node in ast.walk(parsed(file)) if isinstance(node, ast.FunctionDef)):
        first = function.body[0].lineno if is_command(function) else function.lineno
        if (function.end_lineno or 0) - first + 1 > MOST_LINES_OF_A_FUNCTION:
            long.append(function.name)
    assert long == []


def test_the_bytes_of_a_gib_are_defined_once():
    homes = [
        file.name
        for file in SOURCES
        for node in parsed(file).body
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "GIB" for t in node.targets)
    ]
    assert homes == ["cache.py"]
