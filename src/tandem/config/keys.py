"""Lists every key of the schema: for docs/keys.md, for suggestions and for tests.

python -m tandem.config.keys                 # print the table
python -m tandem.config.keys --write         # write the table into docs/keys.md; run it in the root of a checkout
"""

import json
import sys
import types
import typing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from tandem.config.schema import Config
from tandem.config.sections.scheduler import NAMED
from tandem.config.sections.section import UserFunctionName


@dataclass(frozen=True, slots=True)
class Key:
    """One key: its dotted name, type, default (as in YAML) and description."""

    name: str
    type: str
    default: str
    meaning: str


def all_keys(model: type[BaseModel] = Config, prefix: str = "") -> list[Key]:
    keys = []
    for name, field in model.model_fields.items():
        if isinstance(field.default, BaseModel):
            if typing.get_origin(field.annotation) is not None:  # a union with a section: the key itself can be set too
                keys.append(Key(prefix + name, _spell(field.annotation), "see below", field.description or ""))
            keys += all_keys(type(field.default), f"{prefix}{name}.")
        else:
            keys.append(Key(prefix + name, _spell(field.annotation), _default(field), field.description or ""))
    return keys


@cache
def key_names() -> frozenset[str]:
    """Return the names of all keys, of all sections, and of the settings of named schedules."""
    names = {key.name for key in all_keys()}
    names |= {f"policy.scheduler.{name}" for schedule in NAMED.values() for name in schedule.model_fields}
    return frozenset(names) | {name.rsplit(".", i)[0] for name in names for i in range(1, name.count(".") + 1)}


def as_markdown() -> str:
    """Return the table in docs/keys.md, with one row per key."""
    rows = [f"| `{k.name}` | {k.type} | {k.default} | {k.meaning} |" for k in all_keys()]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows])


def with_table(page: str, name: str, table: str) -> str:
    """Return `page` with `table` inserted between the markers `<!-- NAME:begin -->` and `<!-- NAME:end -->`."""
    begin, end = f"<!-- {name}:begin -->\n", f"\n<!-- {name}:end -->"
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"the page needs the markers {begin.strip()} and {end.strip()}, once each and in this order")
    before, _, rest = page.partition(begin)
    return f"{before}{begin}{table}{end}{rest.partition(end)[2]}"


def _section(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _spell(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if annotation == UserFunctionName:
        return "FILE.py:FUNCTION"
    if origin is typing.Annotated:
        return _spell(typing.get_args(annotation)[0])
    if origin is Literal:
        return ", ".join(str(choice) for choice in typing.get_args(annotation))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(dict.fromkeys(_spell(part) for part in typing.get_args(annotation)))
    if origin is list:
        return f"list of {_spell(typing.get_args(annotation)[0])}"
    if origin is dict:
        return f"map to {_spell(typing.get_args(annotation)[1])}"
    if annotation is type(None):
        return "null"
    if annotation is Any:
        return "any"
    if section := _section(annotation):
        if section in NAMED.values():
            return "schedule"
        return {"DatasetFields": "dataset"}.get(section.__name__, section.__name__.lower())
    return annotation.__name__


def _default(field: Any) -> str:
    if field.default is PydanticUndefined:
        return "(depends)"
    if isinstance(field.default, list) and field.default and isinstance(field.default[0], BaseModel):
        return "warm-up over 20 steps, then constant"
    return json.dumps(field.default)


def main(arguments: list[str]) -> None:
    if arguments not in ([], ["--write"]):
        sys.exit("usage: python -m tandem.config.keys [--write]")
    if not arguments:
        print(as_markdown())
        return
    page = Path("docs/keys.md")
    if not page.is_file():
        sys.exit(f"{page}: no such file. Run this command in the root of a checkout.")
    page.write_text(with_table(page.read_text(encoding="utf-8"), "keys", as_markdown()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
