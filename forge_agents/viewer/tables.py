"""League tables and benchmark reports as tables of texts.

In: ``league.json``, a report that a benchmark saved. Out: tables for the page. Waits for the disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_agents.bench.report import Report, ReportError
from forge_agents.viewer.digest import number

_LEAGUE = (
    "Ratings are OpenSkill's mean and standard deviation. Win rate is the learning policy's against that opponent; "
    "chance is how likely the opponent is to be drawn next."
)


def board_tables(file: Path) -> list[dict[str, Any]]:
    """The tables of a saved benchmark; where it cannot be read, one that says why."""
    try:
        report = Report.load(file)
    except ReportError as cause:
        return [_table(file.name, (), (), note=str(cause))]
    shown = report.document()
    head = _table(f"Benchmark {report.settings['suite']}", (), (), note=" ".join([shown.headline, *shown.warnings]))
    return [head, *(_table(s.title, s.heads, s.rows, note=s.note, names=s.names) for s in shown.sections)]


def league_tables(league: Any) -> list[dict[str, Any]]:
    """The policy of a league and its opponents, by falling rating."""
    if not isinstance(league, Mapping) or not isinstance(league.get("opponents"), list):
        return [_table("League", (), (), note="league.json is no league's table; another version may have written it")]
    own = {"name": league.get("policy"), "kind": "learns"} | {
        name: league[name] for name in ("rating", "rating_sigma") if name in league
    }
    rows = [own, *(row for row in league["opponents"] if isinstance(row, Mapping))]
    rows.sort(key=lambda row: -(number(row.get("rating")) or 0.0))
    heads = tuple(dict.fromkeys(str(name) for row in rows for name in row))
    return [_table("League", heads, tuple(tuple(_text(row.get(head)) for head in heads) for row in rows), note=_LEAGUE)]


def _table(
    title: str, heads: tuple[str, ...], rows: tuple[tuple[str, ...], ...], *, note: str = "", names: int = 1
) -> dict[str, Any]:
    return {"title": title, "heads": heads, "rows": rows, "note": note, "names": names}


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
