"""Wraps text and formats tables to fit the width of a terminal. Lines break at spaces only."""

import re
from collections.abc import Sequence

from rich.cells import cell_len

from tandem.terminal.printable import escaped

GAP = 2  # cells between two columns
LEFT_ALIGNED = ("set", "metric", "of", "run", "status", "settings")  # columns of names; all others hold numbers


def wrap(text: str, width: int, hang: int | None = None) -> str:
    """Break lines at spaces so that they have at most `width` cells.

    Words longer than `width` stay intact, so they can be copied. `hang`: indentation of continuation lines. By default, the
    line's own indentation plus two, or 0 if the line is not indented.
    """
    return "\n".join(_wrap_line(line, width, hang) for line in escaped(text).split("\n"))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> list[tuple[str, bool]]:
    """Return the lines of a table, each with a flag that is True for headings. `width`: maximum line width, or None for no limit.

    If the table is too wide, headings are wrapped. If it is still too wide, it is split into several tables below each other.
    Each of them has the first column and some of the other columns.
    """
    columns, rows = list(map(escaped, columns)), [list(map(escaped, row)) for row in rows]
    wide = [max(cell_len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    if width is None or _total(wide) <= width:
        return _lines(list(columns), rows, wide)
    narrow = [
        max(*(cell_len(word) for word in name.split()), *(cell_len(row[i]) for row in rows))
        for i, name in enumerate(columns)
    ]
    lines: list[tuple[str, bool]] = []
    for block in _column_blocks(narrow, width):
        lines += _lines(
            [columns[i] for i in block], [[row[i] for i in block] for row in rows], [narrow[i] for i in block]
        )
    return lines


def _column_blocks(widths: Sequence[int], width: int) -> list[list[int]]:
    """Split the columns of a table into blocks of column numbers.

    Each block has the first column and as many other columns as fit, but at least one.
    """
    blocks = [[0]]
    for number in range(1, len(widths)):
        if len(blocks[-1]) > 1 and _total([widths[i] for i in (*blocks[-1], number)]) > width:
            blocks.append([0])
        blocks[-1].append(number)
    return blocks


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _lines(columns: list[str], rows: Sequence[Sequence[str]], widths: Sequence[int]) -> list[tuple[str, bool]]:
    stacked = [wrap(name, width, 0).split("\n") for name, width in zip(columns, widths, strict=True)]
    height = max(map(len, stacked))
    headings = zip(*([""] * (height - len(parts)) + parts for parts in stacked), strict=True)
    headed = [(list(cells), True) for cells in headings] + [(list(cells), False) for cells in rows]
    return [(_padded(columns, cells, widths), is_heading) for cells, is_heading in headed]


def _padded(columns: list[str], cells: list[str], widths: Sequence[int]) -> str:
    spaces = [" " * (width - cell_len(cell)) for cell, width in zip(cells, widths, strict=True)]
    padded = [
        cell + space if name in LEFT_ALIGNED else space + cell
        for name, cell, space in zip(columns, cells, spaces, strict=True)
    ]
    return (" " * GAP).join(padded).rstrip()


def _wrap_line(line: str, width: int, hang: int | None) -> str:
    indent = len(line) - len(line.lstrip(" "))
    if hang is None:
        hang = indent + 2 if indent else 0
    lines, now = [], ""
    for gap, word in re.findall(r"( *)([^ ]+)", line):
        if now.strip() and cell_len(now + gap + word) > width:
            lines.append(now)
            now = " " * hang + word
        else:
            now += gap + word
    return "\n".join([*lines, now])
