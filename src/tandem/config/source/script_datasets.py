"""Follows the datasets of a script to their load_dataset(...) call, through train_test_split, shuffle and select."""

import ast
from dataclasses import dataclass, replace

from tandem.config.source.literals import MAX_NESTING, Literals, NotLiteralError
from tandem.config.source.statements import Statements

PARTS = ("train", "test")  # of train_test_split
INSTEAD = "data.validation_share holds out pairs, and data.train.max_rows reads the first rows"


class UnreadableDatasetError(Exception):
    """A dataset is made by code that is not understood. The message says by what."""

    def __init__(self, node: ast.expr, message: str) -> None:
        super().__init__(message)
        self.node = node


@dataclass(frozen=True, slots=True)
class ScriptDataset:
    """A dataset of a script: the call that loads it, and what the script does to the rows after it."""

    load: ast.Call
    split: ast.expr | None = None  # d["train"] of a dataset with splits
    rows: ast.expr | None = None  # N of select(range(N))
    shuffle: ast.Call | None = None
    held_out: ast.Call | None = None  # train_test_split(...)
    part: str | None = None  # train or test, of train_test_split

    def is_other_part_of(self, other: "ScriptDataset | None") -> bool:
        """Whether both are parts of one train_test_split(...), this one the test part, and the other the training part."""
        if other is None or self.held_out is None or other.held_out is None:
            return False
        return (self.part, other.part) == ("test", "train") and ast.dump(self.held_out) == ast.dump(other.held_out)


def dataset_of(node: ast.expr, literals: Literals, statements: Statements) -> ScriptDataset:
    """Return the dataset that an expression stands for. Raise UnreadableDatasetError if code makes it that is not understood."""
    steps: list[ast.Call | ast.Subscript] = []  # the last one first
    for _ in range(MAX_NESTING):
        match node:
            case ast.Name(id=name) if name in literals.changed:
                raise UnreadableDatasetError(node, f"{name}[...] is assigned, and the assignment is not run")
            case ast.Name(id=name):
                value = statements.value_of(node)
                if value is None and len(literals.assigned.get(name, [])) > 1:
                    raise UnreadableDatasetError(
                        node, f"{name} is assigned several times, in branches, loops or functions. Assign it once"
                    )
                if value is None:
                    break
                node = value
            case ast.Call(func=ast.Attribute(attr=method, value=owner)) if method != "load_dataset":
                steps.append(node)
                node = owner
            case ast.Subscript(value=owner):
                steps.append(node)
                node = owner
            case _:
                break
    if not isinstance(node, ast.Call) or _called(node) != "load_dataset":
        # Of a chain that starts elsewhere, the last call says most: d.map(...) of an unknown d.
        last = next((step for step in steps if isinstance(step, ast.Call)), None)
        if last is not None and _called(last) not in ("train_test_split", "shuffle", "select"):
            raise _not_run(last)
        raise UnreadableDatasetError(node, "it is not load_dataset(...) with literal values")
    found = ScriptDataset(node)
    for step in reversed(steps):
        found = _after_call(found, step, literals) if isinstance(step, ast.Call) else _part(found, step, literals)
    if found.held_out is not None and found.part is None:
        raise UnreadableDatasetError(found.held_out, 'it is both parts of train_test_split(...). Take ["train"]')
    return found


def _called(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _not_run(call: ast.Call) -> UnreadableDatasetError:
    return UnreadableDatasetError(
        call, f".{_called(call)}(...) is not run. Write the rows to a file, and load that file"
    )


def _part(found: ScriptDataset, step: ast.Subscript, literals: Literals) -> ScriptDataset:
    """An item: a part of train_test_split, or otherwise a split of the dataset."""
    if found.held_out is None:
        if found.split is not None or found.rows is not None:
            raise UnreadableDatasetError(step, "an item of a split is not a dataset")
        return replace(found, split=step.slice)
    try:
        part = literals.value(step.slice)
    except NotLiteralError:
        part = None
    if part not in PARTS or found.part is not None:
        raise UnreadableDatasetError(step, f"the parts of train_test_split(...) are {' and '.join(PARTS)}")
    return replace(found, part=part)


def _after_call(found: ScriptDataset, call: ast.Call, literals: Literals) -> ScriptDataset:
    match _called(call):
        case "train_test_split":
            if found.held_out is not None:
                raise UnreadableDatasetError(call, f".train_test_split(...) is called twice. Call it once; {INSTEAD}")
            return replace(found, held_out=call)
        case "shuffle":
            return replace(found, shuffle=call)  # pairs are shuffled anyway
        case "select":
            if found.held_out is not None or found.shuffle is not None or found.rows is not None:
                after = next(
                    name
                    for name, one in (("train_test_split", found.held_out), ("shuffle", found.shuffle), ("select", 1))
                    if one is not None
                )
                raise UnreadableDatasetError(
                    call, f".select(...) after .{after}(...) takes other rows than the first. Remove it; {INSTEAD}"
                )
            return replace(found, rows=_first_rows(call))
    raise _not_run(call)


def _first_rows(call: ast.Call) -> ast.expr:
    """N of select(range(N)) and select(range(0, N))."""
    match call:
        case ast.Call(args=[ast.Call(func=ast.Name(id="range"), args=[rows])], keywords=[]):
            return rows
        case ast.Call(args=[ast.Call(func=ast.Name(id="range"), args=[ast.Constant(value=0), rows])], keywords=[]):
            return rows
    raise UnreadableDatasetError(call, f".select(...) takes other rows than range(N). Remove it; {INSTEAD}")
