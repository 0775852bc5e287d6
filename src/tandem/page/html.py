"""Builds HTML. Every text is escaped here, so that text from the data or the model can never become markup."""

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from tandem.terminal.printable import escaped


class Markup(str):
    """HTML that is complete and safe. Any other str is text, and is escaped when it is inserted."""

    __slots__ = ()


def text(value: object) -> Markup:
    """Escape a text; Markup is returned unchanged. Control and bidirectional characters become visible escapes."""
    return value if isinstance(value, Markup) else Markup(escape(escaped(str(value))))


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """An element. class_ and for_ lose their underscore, data_x becomes data-x; None and False leave an attribute out."""
    parts = [name]
    for key, value in attributes.items():
        if value is not None and value is not False:
            spelled = key.rstrip("_").replace("_", "-")
            parts.append(spelled if value is True else f'{spelled}="{escape(escaped(str(value)))}"')
    inside = "".join(text(child) for child in children if child is not None)
    return Markup(f"<{' '.join(parts)}>{inside}</{name}>")


def joined(parts: Iterable[object]) -> Markup:
    return Markup("".join(text(part) for part in parts if part is not None))


def table(
    headings: Sequence[object], rows: Iterable[Sequence[object]], *, numeric: Sequence[int] = (), class_: str = ""
) -> Markup:
    """A table that scrolls sideways on a narrow screen. numeric: columns that are aligned to the right."""
    head = tag("tr", *(tag("th", one, scope="col", class_=_number(i, numeric)) for i, one in enumerate(headings)))
    body = [tag("tr", *(tag("td", cell, class_=_number(i, numeric)) for i, cell in enumerate(row))) for row in rows]
    inside = tag("table", tag("thead", head), tag("tbody", *body))
    return tag("div", inside, class_=f"scroll {class_}".strip(), tabindex="0", role="region", aria_label="Table")


def _number(i: int, numeric: Sequence[int]) -> str | None:
    return "number" if i in numeric else None


def json_for_script(value: Any) -> str:
    """JSON that can stand inside a script element: no text in it can end the element, or a line of JavaScript.

    Values that are not finite numbers become null, because JSON has none.
    """
    content = json.dumps(_finite(value), ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return content.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, dict):
        return {str(key): _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def percent(share: float, digits: int = 1) -> str:
    """0.8765 -> 87.7 %; 1 -> 100 %."""
    return "100 %" if share > 1 - 1e-9 else f"{100 * share:.{digits}f} %"


def number(value: float | None, digits: int = 4) -> str:
    """A number with this many significant digits, with thousands separated: 12345.6 -> 12,346; 0.00012345 -> 1.23e-4."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if size < -4:
        mantissa, _, power = f"{value:.{max(digits - 2, 1)}e}".partition("e")
        return f"{mantissa}e{int(power)}".replace("-", "−")
    decimals = max(0, digits - 1 - size)
    return f"{value:,.{min(decimals, digits + 2)}f}".replace("-", "−")


def duration(seconds: float) -> str:
    """4000 -> 1 h 7 min."""
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {int(seconds % 60)} s" if minutes else f"{seconds:.1f} s"
