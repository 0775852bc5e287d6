"""Parts of an SVG plot, with a white background and dark text, so that it is readable on light and dark pages."""

from collections.abc import Sequence

INK, FAINT, PAPER = "#1f2328", "#d0d7de", "#ffffff"
COLOURS = ("#0b6e4f", "#b3541e", "#3b5b92", "#8a6d1b", "#7b3f61", "#5a5a5a", "#2f8f9d", "#c0392b")


def svg(width: int, height: int, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="{PAPER}"/>', *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{INK}" text-anchor="{anchor}" font-weight="{weight}">{words}</text>'


def rule(x: float, y: float, width: float) -> str:
    """A faint horizontal line."""
    return f'<path d="M{x:.1f} {y:.1f}h{width:.1f}" stroke="{FAINT}"/>'


def line(points: Sequence[tuple[float, float]], colour: str, dash: str = "") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"{dashed}/>'


def key(x: float, y: float, words: str, colour: str, dash: str = "") -> list[str]:
    """A legend entry: a short line and its label."""
    return [line([(x, y), (x + 24, y)], colour, dash), text(x + 32, y + 4, words)]
