"""The HTML file around a page: head, security policy, style, script, data, and the header that every page has."""

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

from tandem import __version__
from tandem.page.html import Markup, json_for_script, tag, text
from tandem.runs import Status

GENERATOR = "tandem report"  # by which an earlier page is recognised
STYLES = ("style.css",)
SCRIPTS = ("draw.js", "charts.js", "page.js")


@cache
def _asset(names: Sequence[str]) -> str:
    folder = resources.files("tandem.page") / "assets"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def document(title: str, body: Markup, data: Any, *, live: bool = False) -> str:
    """A complete page. live: it is served by `tandem watch`, and follows the run."""
    style, script = _asset(STYLES), _asset(SCRIPTS)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="generator" content="{GENERATOR} {text(__version__)}">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(style, script, live=live)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<meta name="referrer" content="no-referrer">\n<title>{text(title)}</title>\n'
        f"<style>{style}</style>\n</head>\n<body{' data-live' if live else ''}>\n{body}\n"
        f'<script type="application/json" id="page-data">{json_for_script(data)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def policy(style: str, script: str, *, live: bool) -> str:
    """The Content-Security-Policy: nothing loads, and only this style and this script apply, by their hashes."""
    connects = " connect-src 'self';" if live else ""
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}';{connects} "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def header(title: str, headline: Markup, links: Sequence[tuple[str, str]], status: Status | None = None) -> Markup:
    """The bar that stays on top: name, status, headline result, the switch of colours; and links to the sections."""
    pill = None if status is None else tag("span", status, class_=f"pill {status}")
    bar = tag(
        "div",
        tag("span", "tandem", class_="brand"),
        tag("h1", title, title=title),
        pill,
        tag("span", headline, class_="headline"),
        tag("button", "Dark", type="button", id="theme", aria_pressed="false", title="Switch between light and dark"),
        class_="bar",
    )
    nav = tag("nav", *(tag("a", name, href=f"#{id}") for id, name in links), aria_label="Sections")
    return tag("header", bar, nav)


def section(id: str, title: str, *children: object, intro: str = "") -> Markup:
    """A section with a heading that links can lead to."""
    lead = tag("p", intro, class_="intro") if intro else None
    return tag("section", tag("h2", title), lead, *children, id=id)


def figure(chart: dict[str, Any], *callouts: object) -> Markup:
    """The place of a chart, which the script draws. Its callouts are inside, below the chart."""
    unit = tag("span", chart["unit"], class_="unit") if chart.get("unit") else None
    caption = tag("figcaption", tag("h3", chart["title"], " ", unit), tag("p", chart.get("help") or "", class_="help"))
    return tag(
        "figure",
        caption,
        tag("div", class_="plot"),
        *callouts,
        class_="chart",
        id=f"chart-{chart['id']}",
        data_chart=chart["id"],
    )


def callout(kind: str, title: str, body: object, link: tuple[str, str] | None = None) -> Markup:
    """A coloured note. kind: good, info, warn or bad. link: an anchor and its text."""
    more = None if link is None else tag("a", link[1], href=link[0])
    return tag("div", tag("strong", title), " ", body, " ", more, class_=f"callout {kind}", role="note")


def empty(*children: object) -> Markup:
    """What a section says if there is nothing to show."""
    return tag("p", *children, class_="empty")


def footer() -> Markup:
    return tag(
        "footer",
        f"Made by tandem {__version__}. This file is complete: it loads nothing and sends nothing.",
        tag("noscript", " The charts need JavaScript; the texts and tables do not."),
    )
