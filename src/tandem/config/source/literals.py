"""Computes the literal values of a syntax tree: constants, lists and dicts, and names that are assigned one of them."""

import ast
from typing import Any

from tandem.errors import ConfigError

MAX_NESTING = 64
MAX_VALUES = 10_000
ENUMERATIONS = ("TaskType", "FDivergenceType", "SchedulerType", "IntervalStrategy", "SaveStrategy")
DATA_TYPES = ("bfloat16", "float16", "float32")


class NotLiteralError(Exception):
    """A value is not a literal one. The message says why."""


class Literals:
    """The values of a script that are known without running it."""

    def __init__(self, tree: ast.Module, source: str) -> None:
        self.source = source
        self.assigned: dict[str, list[ast.expr | None]] = {}  # None: a value that is not known
        self.changed: set[str] = set()  # names of which an item is assigned: a["train"] = ...
        self._num_values = 0
        for node in ast.walk(tree):
            self._collect(node)

    def _collect(self, node: ast.AST) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    if isinstance(target, ast.Name):
                        self._assign(target.id, value)
                    else:
                        self._assign_unknown(target)
            case ast.AnnAssign(target=ast.Name(id=name), value=value) if value is not None:
                self._assign(name, value)
            case ast.AugAssign(target=target) | ast.For(target=target) | ast.NamedExpr(target=target):
                self._assign_unknown(target)
            case ast.withitem(optional_vars=target) if target is not None:
                self._assign_unknown(target)
            case ast.arg(arg=name):
                self._assign(name, None)

    def _assign(self, name: str, value: ast.expr | None) -> None:
        self.assigned.setdefault(name, []).append(value)

    def _assign_unknown(self, target: ast.expr) -> None:
        """Names in a target such as `a, b`. An attribute or an item of a name leaves the name as it is."""
        if isinstance(target, ast.Name):
            self._assign(target.id, None)
        elif isinstance(target, ast.Tuple | ast.List):
            for one in target.elts:
                self._assign_unknown(one)
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            self.changed.add(target.value.id)

    def follow(self, node: ast.expr) -> ast.expr:
        """Return what a name is assigned, if it is assigned once; otherwise the node itself."""
        for _ in range(MAX_NESTING):
            values = self.assigned.get(node.id, []) if isinstance(node, ast.Name) else []
            if len(values) != 1 or values[0] is None:
                break
            node = values[0]
        return node

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """Return a literal value. Raise NotLiteralError if it is none."""
        self._num_values += 1
        if depth > MAX_NESTING or self._num_values > MAX_VALUES:
            raise ConfigError(
                f"line {node.lineno} of the script: the values are nested more than {MAX_NESTING} levels deep, or are more than "
                f"{MAX_VALUES:,}. Is it a training script?"
            )
        match node:
            case ast.Constant(value=str() | int() | float() | None as value):
                if isinstance(value, str) and "${" in value:
                    raise NotLiteralError("it contains ${, which tandem would replace")
                return value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return -value
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self.value(item, depth + 1) for item in items]
            case ast.Dict(keys=keys, values=values):
                return {self._key(key): self.value(one, depth + 1) for key, one in zip(keys, values, strict=True)}
            case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in DATA_TYPES:
                return name
            case ast.Attribute(value=ast.Name(id=name), attr=member) if name in ENUMERATIONS:
                return member if name == "TaskType" else member.lower()
            case ast.Name(id=name) if name in self.assigned:
                return self._assigned_value(name, depth)
        raise NotLiteralError("not a literal value")

    def _key(self, key: ast.expr | None) -> str:
        if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
            raise NotLiteralError("a key is not a text")
        return key.value

    def _assigned_value(self, name: str, depth: int) -> Any:
        values = self.assigned[name]
        if len(values) > 1:
            raise NotLiteralError(f"{name} is assigned several times")
        if values[0] is None:
            raise NotLiteralError(f"{name} is not assigned a literal value")
        return self.value(values[0], depth + 1)
