"""Finds which assignment of a script gives a name its value, where a name is assigned several times in a row."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
Position = tuple[int, int]  # line and column


@dataclass(frozen=True, slots=True)
class Assignment:
    """One assignment of a name, and the list of statements that it is in. Branches of an `if` are other lists."""

    value: ast.expr
    block: list[ast.stmt]


class Statements:
    """The assignments of a script by name, in the order of their lines."""

    def __init__(self, tree: ast.Module) -> None:
        self._assigned: dict[str, list[Assignment]] = {}
        self._num_bindings: dict[str, int] = {}  # of any kind: targets of loops and arguments too
        self._functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
        for block in _blocks(tree):
            for statement in block:
                match statement:
                    case ast.Assign(targets=[ast.Name(id=name)], value=value):
                        self._assigned.setdefault(name, []).append(Assignment(value, block))
                    case ast.AnnAssign(target=ast.Name(id=name), value=value) if value is not None:
                        self._assigned.setdefault(name, []).append(Assignment(value, block))
        for node in ast.walk(tree):
            match node:
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                    self._num_bindings[name] = self._num_bindings.get(name, 0) + 1

    def value_of(self, use: ast.Name) -> ast.expr | None:
        """Return the value that a name has where it is used. None if that depends on what the script does.

        A name that is assigned once has this value. Of several assignments, which must follow each other in one list of
        statements, the last one before the use counts.
        """
        found = self._assigned.get(use.id, [])
        if not found or len(found) != self._num_bindings[use.id]:
            return None
        if len(found) == 1:
            return found[0].value
        block = found[0].block
        if any(one.block is not block for one in found) or not self._runs_in(block, use):
            return None
        before = [one for one in found if _end(one.value) <= _start(use)]
        return max(before, key=lambda one: _end(one.value)).value if before else None

    def _runs_in(self, block: list[ast.stmt], use: ast.Name) -> bool:
        """Whether a name is used inside a list of statements, and not in a function that is defined there."""
        start, end, place = _start(block[0]), _end(block[-1]), _start(use)
        return start <= place <= end and not any(
            start <= _start(one) <= place <= _end(one) <= end for one in self._functions
        )


def _blocks(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield value


def _start(node: ast.expr | ast.stmt) -> Position:
    return node.lineno, node.col_offset


def _end(node: ast.expr | ast.stmt) -> Position:
    return node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
