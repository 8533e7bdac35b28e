"""A benchmark's report as one HTML file.

In: a `Report`. Out: a page that loads nothing from elsewhere and runs no script. Waits for nothing.

Names, errors and arguments are written by users, models and servers: every text goes through `_safe`.
"""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from forge_agents.bench.text import Section, headline, origins, printable, sections, warnings
from forge_agents.page import standalone_page

if TYPE_CHECKING:
    from forge_agents.bench.report import Report

_STYLE = """
td.text { min-width: 6rem; max-width: 22rem; white-space: normal; overflow-wrap: break-word; }
li { font-size: .86rem; }
svg { display: block; width: 100%; max-width: 52rem; height: auto; margin: 1rem 0; }
svg text { font: 13px system-ui, "DejaVu Sans", sans-serif; fill: #1f2933; }
"""
_BAR = 26


def page(report: Report) -> str:
    """The report as HTML."""
    title = _safe(f"Benchmark: {report.settings['suite']}")
    alarms = "".join(f"<section class=alarm>{_safe(warning)}</section>" for warning in warnings(report))
    tables = "\n".join(map(_table, sections(report)))
    facts = "".join(f"<li>{_safe(fact)}</li>" for fact in origins(report))
    body = (
        f"<h1>{title}</h1>\n<p class=lead>{_safe(headline(report))}</p>\n{alarms}\n{_bars(report)}\n{tables}\n"
        f"<h2>Where it comes from</h2>\n<ul>{facts}</ul>"
    )
    return standalone_page(title, body, style=_STYLE)


def _table(section: Section) -> str:
    def row(tag: str, values: tuple[str, ...]) -> str:
        cells = (
            f"<{tag}{' class=text' if place < section.names else ''}>{_safe(value)}</{tag}>"
            for place, value in enumerate(values)
        )
        return f"<tr>{''.join(cells)}</tr>"

    body = "\n".join(row("td", values) for values in section.rows)
    note = f"\n<p class=note>{_safe(section.note)}</p>" if section.note else ""
    return (
        f"<h2>{_safe(section.title)}</h2>\n<div class=scroll><table><thead>{row('th', section.heads)}</thead>\n"
        f"<tbody>{body}</tbody></table></div>{note}"
    )


def _bars(report: Report) -> str:
    """Success of every player with its interval, drawn."""
    rows = []
    for place, (name, found) in enumerate(report.summary.overall.items()):
        y = place * _BAR + 4
        if not found.n:
            continue
        width = 500 * found.value
        whisker = ""
        if found.low == found.low:  # known
            low, high = (180 + 500 * max(0.0, min(1.0, end)) for end in (found.low, found.high))
            whisker = f'<path d="M{low:.1f} {y + 8}H{high:.1f}" stroke="#1f2933" stroke-width="2"/>'
        rows.append(
            f'<text x="0" y="{y + 13}">{_safe(name[:24])}</text>'
            f'<rect x="180" y="{y}" width="{width:.1f}" height="16" fill="#7ba7d9"/>{whisker}'
            f'<text x="690" y="{y + 13}">{found.value:.3f}</text>'
        )
    height = len(report.summary.overall) * _BAR + 8
    return f'<svg viewBox="0 0 740 {height}" role="img" aria-label="success of every player">{"".join(rows)}</svg>'


def _safe(text: str) -> str:
    """Any text as text: one line, nothing unprintable, no markup."""
    return html.escape(printable(text, 600), quote=True)
