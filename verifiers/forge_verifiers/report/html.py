"""An ensemble's report as one HTML file.

In: a report and its history. Out: a page that loads nothing from elsewhere and runs no script. Waits for nothing.

Names and failures are written by users, models and servers: every text goes through `_safe`, pictures are embedded as
images, in which nothing runs, and the page's own policy forbids scripts and requests.
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from forge_agents.page import standalone_page
from forge_verifiers.report.plots import accuracy_figure, calibration_figure, correlation_figure, drift_figure
from forge_verifiers.report.table import number, printable, share_silent

if TYPE_CHECKING:
    from forge_verifiers.report.data import EnsembleReport, Snapshot, VerifierReport
    from forge_verifiers.report.evidence import Calibration, Evidence

_STYLE = """
body { max-width: 62rem; }
dl { display: flex; flex-wrap: wrap; gap: .7rem; margin: 0; }
dl div { flex: 1 1 7rem; padding: .6rem .9rem; border-radius: .5rem; background: #f2f5f8; }
dt { font-size: .8rem; color: #52606d; }
dd { margin: 0; font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums; }
td.name { min-width: 9rem; font-weight: 600; white-space: normal; overflow-wrap: anywhere; }
td.bad { color: #c2410c; font-weight: 600; }
figure { margin: 1rem 0 0; }
figure img { display: block; width: 100%; max-height: 60rem; }
section.alarm ul { margin: .3rem 0 0; padding-left: 1.2rem; }
"""
_COLUMNS = ("accuracy", "TPR", "FPR", "weight", "scored", "abstained", "failed", "errors", "timeouts")
_SOURCES = {
    "labels": "Observed: the known labels of these trajectories. The combiner has learned from the same labels, so the "
    "curve flatters it somewhat. Bars are 95 % intervals.",
    "halves": "No labels are known, so this is a check of self-consistency, not of the truth: the verifiers are split "
    "in two halves, families kept together; the combiner is fitted on each half alone, and the other half says, its "
    "own blur taken out, how often it was right. It cannot see errors that both halves share. Bars are 95 % intervals "
    "of sampling alone.",
    "none": "No labels are known and there are too few independent verifiers (fewer than six) to check one half "
    "against the other, or they are too weak: whether these probabilities are right is unknown. Label a few dozen "
    "trajectories (Ensemble(label=...)) to find out.",
}


def page(report: EnsembleReport, history: Sequence[Snapshot] = ()) -> str:
    """The report as HTML."""
    parts = [_head(report), _table(report), _accuracy(report)]
    if report.evidence is None:
        parts.append(
            "<h2>Calibration and correlation</h2><p class=note>There are no score rows to draw them from: nothing was "
            "fitted yet, or the run has no checkpoint of its reward.</p>"
        )
    else:
        parts += [_calibration(report.evidence), _correlation(report, report.evidence)]
    parts.append(_drift(history))
    return standalone_page(_safe(f"Verifiers of {report.name}"), "\n".join(parts), style=_STYLE)


def _head(report: EnsembleReport) -> str:
    facts = {
        "combiner": report.combiner,
        "fits so far": str(report.version),
        "score rows held": f"{report.window_rows:,}",
        "share correct": number(report.class_balance),
        "effective verifiers": f"{number(report.effective_number, 2)} of {len(report.verifiers)}",
        "verdicts spared": f"{report.spared:.0%}",
    }
    notes = "".join(f"<p class=note>{_safe(note)}</p>" for note in report.notes)
    cards = "".join(f"<div><dt>{_safe(name)}</dt><dd>{_safe(value)}</dd></div>" for name, value in facts.items())
    return (
        f"<h1>{_safe(f'Verifiers of {report.name}')}</h1>\n"
        "<p class=lead>What the ensemble has learned about whom to trust.</p>\n"
        f"<dl>{cards}</dl>{notes}{_alarms(report)}"
    )


def _alarms(report: EnsembleReport) -> str:
    if not report.alarms:
        return ""
    items = "".join(f"<li>{_safe(alarm)}</li>" for alarm in report.alarms)
    return f"\n<section class=alarm><b>The reward may be hacked</b><ul>{items}</ul></section>"


def _table(report: EnsembleReport) -> str:
    heads = "".join(f"<th>{title}</th>" for title in _COLUMNS)
    rows = "\n".join(_row(k, verifier) for k, verifier in enumerate(report.verifiers, 1))
    failures = "".join(
        f"<li><b>{_safe(v.name)}</b>: {_safe(text)}</li>"
        for v in report.verifiers
        for text in (v.last_error, v.note)
        if text
    )
    return (
        "<h2>Verifiers</h2>\n<div class=scroll><table><thead><tr><th></th><th class=text>verifier</th>"
        f"<th class=text>family</th><th class=text>cost</th>{heads}</tr></thead>\n<tbody>{rows}</tbody></table></div>\n"
        "<p class=note>Accuracy, TPR = P(says yes | correct) and FPR = P(says yes | wrong) are estimates"
        " of the combiner, at each verifier's most telling cut; a verifier whose FPR lies above its TPR is upside down"
        " and marked. Weight is the share of its own evidence that counts: copies share one weight. A dash: this"
        " combiner does not estimate it. Scored, abstained and failed count trajectories, errors and timeouts calls."
        " Verdicts are spared where an equal trajectory was judged before or a cascade had no need of them.</p>"
        + (f"\n<p>Last failures, and why verifiers abstain</p><ul>{failures}</ul>" if failures else "")
    )


def _row(place: int, v: VerifierReport) -> str:
    inverted = not math.isnan(v.tpr) and v.tpr < v.fpr
    rates = [number(x) for x in (v.accuracy, v.tpr, v.fpr, v.weight)]
    silent = share_silent(v.scored, v.abstained)
    counts = [f"{v.scored:,}", "0" if not v.abstained else f"{v.abstained:,} ({silent:.0%})"]
    cells = "".join(
        f"<td{' class=bad' if inverted and title in ('accuracy', 'TPR', 'FPR') else ''}>{_safe(text)}</td>"
        for title, text in zip(_COLUMNS, rates + counts, strict=False)
    )
    failed = "".join(f"<td{' class=bad' if count else ''}>{count:,}</td>" for count in (v.failed, v.errors, v.timeouts))
    return (
        f"<tr><td>{place}</td><td class='text name'>{_safe(v.name)}</td><td class=text>{_safe(v.family or '')}</td>"
        f"<td class=text>{_safe(v.cost)}</td>{cells}{failed}</tr>"
    )


def _accuracy(report: EnsembleReport) -> str:
    if all(math.isnan(v.tpr) for v in report.verifiers):
        return ""
    caption = (
        "The longer the bar between the two points, the more a verifier tells; a red bar is upside down. Numbers are"
        " those of the table."
    )
    return _picture(accuracy_figure(report), "true and false positive rate and weight of every verifier", caption)


def _calibration(evidence: Evidence) -> str:
    curve: Calibration = evidence.calibration()
    posterior = evidence.posterior()
    error = f" Expected calibration error {number(curve.error)} over {curve.count.sum():,} predictions."
    claim = f" The ensemble itself expects to be right on {(abs(posterior - 0.5) + 0.5).mean():.1%} of its verdicts."
    text = _SOURCES[curve.source] + ("" if curve.source == "none" else error) + claim
    return "<h2>Calibration</h2>" + _picture(calibration_figure(curve, posterior), "calibration curve", text)


def _correlation(report: EnsembleReport, evidence: Evidence) -> str:
    caption = (
        "Correlation of scores over the trajectories on which both spoke; families lie side by side. Some correlation"
        " is good: all look for the same truth. Verifiers that correlate far more with each other than with the rest"
        " share a cause of error: give them one family. An empty row: the verifier never varied."
    )
    picture = correlation_figure(report, evidence.correlation())
    return "<h2>Correlation</h2>" + _picture(picture, "correlation of the verifiers' scores", caption)


def _drift(history: Sequence[Snapshot]) -> str:
    if len(history) < 2:
        return "<h2>Drift</h2><p class=note>Fewer than two steps are known, so there is no drift to show.</p>"
    first, last = history[0], history[-1]
    caption = (
        f"Steps {first.step} to {last.step}, fits {first.report.version} to {last.report.version}. Beware of reward"
        " that rises while the effective number falls or while a verifier that knows better gives less: the policy may"
        " be learning to please the others."
    )
    return "<h2>Drift</h2>" + _picture(drift_figure(history), "weights, rates and reward by step", caption)


def _picture(svg: bytes, what: str, caption: str) -> str:
    data = base64.b64encode(svg).decode()
    return (
        f'<figure><img src="data:image/svg+xml;base64,{data}" alt="{_safe(what)}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


def _safe(text: str) -> str:
    """Any text as text: one line, nothing unprintable, no markup."""
    return html.escape(printable(text), quote=True)
