"""An ensemble's report as text for a terminal.

In: an `EnsembleReport`. Out: fixed-width text. Waits for nothing.
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_verifiers.report.data import EnsembleReport

_WIDEST = 200
_LONGEST = 40


def printable(text: str, longest: int = 400) -> str:
    """A text on one line: control and direction characters replaced, the middle of a long one left out."""
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(text.split()))
    half = longest // 2 - 1
    return text if len(text) <= longest else f"{text[:half]} \N{HORIZONTAL ELLIPSIS} {text[-half:]}"


def number(value: float, digits: int = 3) -> str:
    """A number to `digits` places; a dash where it is not known."""
    return "\N{EN DASH}" if math.isnan(value) else f"{value:.{digits}f}"


def share_silent(scored: int, abstained: int) -> float:
    """Share of trajectories without a score; NaN where none was asked about."""
    return abstained / (scored + abstained) if scored + abstained else math.nan


def summary(report: EnsembleReport) -> str:
    """What holds for all verifiers together, in one line."""
    return (
        f"{printable(report.name, _LONGEST)}: combiner {report.combiner} version {report.version}, "
        f"{report.window_rows} rows, class balance {number(report.class_balance)}, "
        f"effective number {number(report.effective_number, 2)} of {len(report.verifiers)}, "
        f"{report.spared:.0%} of verdicts spared"
    )


def as_text(report: EnsembleReport) -> str:
    """The report as fixed-width text: one verifier per line, then the whole, then failures and notes."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("verifier")
    table.add_column("family")
    for title in ("accuracy", "TPR", "FPR", "weight", "scored", "abstained", "failed", "errors", "timeouts"):
        table.add_column(title, justify="right")
    for v in report.verifiers:
        rates = [number(x) for x in (v.accuracy, v.tpr, v.fpr, v.weight)]
        counts = [str(x) for x in (v.scored, v.abstained, v.failed, v.errors, v.timeouts)]
        names = [Text(printable(v.name, _LONGEST)), Text(printable(v.family or "", 20))]  # Text: no markup in names
        table.add_row(*names, *rates, *counts)
    out = io.StringIO()
    Console(file=out, width=_WIDEST, color_system=None).print(table)
    failures = [
        f"last failure of {printable(v.name, _LONGEST)}: {printable(v.last_error)}"
        for v in report.verifiers
        if v.last_error
    ]
    failures += [f"{printable(v.name, _LONGEST)}: {printable(v.note)}" for v in report.verifiers if v.note]
    lines = [line.rstrip() for line in out.getvalue().rstrip().splitlines()]
    alarms = [f"the reward may be hacked: {printable(alarm)}" for alarm in report.alarms]
    notes = [printable(note) for note in report.notes]
    return "\n".join([*lines, "", summary(report), *notes, *alarms, *failures])
