"""Documents of tables, shown in a terminal, as Markdown, or as an HTML file without scripts and external resources.

Names, errors and arguments come from users, models and servers, so every text is escaped where it is shown.
"""

from __future__ import annotations

import html
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from forge_agents.bench.statistics import Interval
from forge_agents.display import printable, standalone_page

_WIDEST = 160
_STYLE = """
th, td { text-align: left; }
td:not([style]) { min-width: 6rem; max-width: 22rem; white-space: normal; overflow-wrap: break-word; }
li, .scroll + p { font-size: .86rem; }
blockquote { margin: 1rem 0 0; padding: .1rem .9rem; border-left: 4px solid #c2410c; background: #fff4ed; }
svg { display: block; width: 100%; max-width: 52rem; height: auto; margin: 1rem 0; }
svg text { font: 13px system-ui, "DejaVu Sans", sans-serif; fill: #1f2933; }
"""
_BAR = 26


@dataclass(frozen=True, slots=True)
class Section:
    """A table."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int
    """Number of first columns with names."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Content of a page."""

    title: str
    headline: str
    """A line of description."""
    warnings: Sequence[str]
    """Warnings about the numbers."""
    bars: Mapping[str, Interval]
    """Rates by name, drawn as bars on the page."""
    sections: Sequence[Section]
    facts: Sequence[str]
    """Provenance, one fact per line."""


def interval(estimate: Interval, *, digits: int = 3, sign: bool = False) -> str:
    """Format an estimate with its interval."""
    if math.isnan(estimate.value):
        return "\N{EN DASH}"
    value = f"{estimate.value:+.{digits}f}" if sign else f"{estimate.value:.{digits}f}"
    return value if math.isnan(estimate.low) else f"{value} [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"


# ---- in a terminal


def show(document: Document) -> str:
    """Print headline, warnings and tables, with colors in a terminal. Returns them as plain text."""
    from rich.console import Console

    screen = Console()
    console = screen if screen.is_terminal else Console(width=_WIDEST, color_system=None)
    console.print(*_renderables(document), sep="\n")
    return as_text(document)


def as_text(document: Document) -> str:
    """Return headline, warnings and tables as plain text."""
    from rich.console import Console

    plain = io.StringIO()
    Console(file=plain, width=_WIDEST, color_system=None).print(*_renderables(document), sep="\n")
    return "\n".join(line.rstrip() for line in plain.getvalue().splitlines())


def _renderables(document: Document) -> list[object]:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    def text(words: str, style: str = "") -> Text:  # unlike a str, it is not parsed as rich markup
        return Text(printable(words), style=style)

    parts: list[object] = [text(document.headline, "bold")]
    parts += [text(warning, "bold red") for warning in document.warnings]
    for section in document.sections:
        title = text(section.title)
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title, title_justify="left")
        for column, head in enumerate(section.heads):
            table.add_column(text(head), justify="left" if column < section.names else "right")
        for row in section.rows:
            table.add_row(*map(text, row))
        parts.append(table)
    return parts


# ---- as Markdown


def as_markdown(document: Document) -> str:
    """Return the document as Markdown."""
    lines = [f"# {_md(document.title)}", "", _md(document.headline) + "."]
    for warning in document.warnings:
        lines += ["", f"> **{_md(warning)}**"]
    for section in document.sections:
        lines += ["", f"## {_md(section.title)}", "", _md_row(section.heads)]
        lines.append("|" + "|".join(["---"] * section.names + ["---:"] * (len(section.heads) - section.names)) + "|")
        lines += [_md_row(row) for row in section.rows]
        lines += ["", _md(section.note, 2000)] if section.note else []
    if document.facts:
        lines += ["", "## Provenance", "", *(f"- {_md(fact)}" for fact in document.facts)]
    return "\n".join(lines) + "\n"


def _md_row(values: Iterable[str]) -> str:
    return "| " + " | ".join(map(_md, values)) + " |"


def _md(text: str, longest: int = 400) -> str:
    """Escape text for Markdown."""
    plain = printable(text, longest).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join(f"\\{c}" if c in "\\`*_[]{}|~#!" else c for c in plain)


# ---- as a page


def as_html(document: Document) -> str:
    """Return the document as one HTML file, with its rates as bars."""
    from markdown_it import MarkdownIt

    page = MarkdownIt("commonmark", {"html": False}).enable("table").render(as_markdown(document))
    page = page.replace("<table>", "<div class=scroll><table>").replace("</table>", "</table></div>")
    head, heading, tables = page.partition("<h2>")
    return standalone_page(_safe(document.title), f"{head}{_bars(document.bars)}\n{heading}{tables}", style=_STYLE)


def _bars(rates: Mapping[str, Interval]) -> str:
    rows = []
    for row, (name, rate) in enumerate(rates.items()):
        y, whisker = row * _BAR + 4, ""
        if not rate.n:
            continue
        if not math.isnan(rate.low):
            low, high = (180 + 500 * max(0.0, min(1.0, end)) for end in (rate.low, rate.high))
            whisker = f'<path d="M{low:.1f} {y + 8}H{high:.1f}" stroke="#1f2933" stroke-width="2"/>'
        rows.append(
            f'<text x="0" y="{y + 13}">{_safe(name[:24])}</text>'
            f'<rect x="180" y="{y}" width="{500 * rate.value:.1f}" height="16" fill="#7ba7d9"/>{whisker}'
            f'<text x="690" y="{y + 13}">{rate.value:.3f}</text>'
        )
    height = len(rates) * _BAR + 8
    return f'<svg viewBox="0 0 740 {height}" role="img" aria-label="success of every player">{"".join(rows)}</svg>'


def _safe(text: str) -> str:
    """Escape text for HTML, on one line and without unprintable characters."""
    return html.escape(printable(text, 600), quote=True)
