"""A benchmark's report as one HTML file.

In: a `Report`. Out: a page that loads nothing from elsewhere and runs no script. Waits for nothing.

Names, errors and arguments are written by users, models and servers: every text goes through `_safe`, and the page's
own policy forbids scripts and requests.
"""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from forge_agents.bench.text import Section, headline, origins, printable, sections, warnings

if TYPE_CHECKING:
    from forge_agents.bench.report import Report

_STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 76rem; padding: 2rem 1.25rem 4rem; background: #fff; color: #1f2933;
  font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { margin: 0; font-size: 1.7rem; overflow-wrap: anywhere; }
h2 { margin: 2.6rem 0 .4rem; padding-top: 1rem; border-top: 1px solid #e4e7eb; font-size: 1.2rem; }
p.lead { margin: .2rem 0 1.4rem; color: #52606d; }
.scroll { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
th { padding: .45rem .55rem; border-bottom: 2px solid #cbd2d9; color: #52606d; font-weight: 600; text-align: right;
  vertical-align: bottom; }
td { padding: .45rem .55rem; border-bottom: 1px solid #e4e7eb; text-align: right; white-space: nowrap; }
th.text, td.text { text-align: left; }
td.text { min-width: 6rem; white-space: normal; overflow-wrap: anywhere; }
p.note { max-width: 52rem; margin-top: .5rem; font-size: .86rem; color: #52606d; }
li { overflow-wrap: anywhere; font-size: .86rem; }
section.alarm { margin-top: 1rem; padding: .6rem .9rem; border-left: 4px solid #c2410c; background: #fff4ed; }
svg { display: block; width: 100%; max-width: 52rem; height: auto; margin: 1rem 0; }
svg text { font: 13px system-ui, "DejaVu Sans", sans-serif; fill: #1f2933; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_BAR = 26


def page(report: Report) -> str:
    """The report as HTML."""
    title = _safe(f"Benchmark: {report.settings['suite']}")
    alarms = "".join(f"<section class=alarm>{_safe(warning)}</section>" for warning in warnings(report))
    tables = "\n".join(map(_table, sections(report)))
    facts = "".join(f"<li>{_safe(fact)}</li>" for fact in origins(report))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f"<body>\n<h1>{title}</h1>\n<p class=lead>{_safe(headline(report))}</p>\n{alarms}\n{_bars(report)}\n{tables}\n"
        f"<h2>Where it comes from</h2>\n<ul>{facts}</ul>\n</body></html>\n"
    )


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
