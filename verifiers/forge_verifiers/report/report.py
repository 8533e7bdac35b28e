"""What an ensemble believes of its verifiers and what its score rows show: as data, as a table, as a page.

In: numbers, and the score rows a combiner was fitted on. Out: `EnsembleReport`, text, HTML. Waits for nothing.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

import forge_verifiers.combiners as combiners
from forge_agents.display import printable, standalone_page
from forge_agents.errors import RunFolderError
from forge_verifiers.combiners.base import rate_errors
from forge_verifiers.core.verifier import Cost, under
from forge_verifiers.report.pictures import accuracy_figure, calibration_figure, correlation_figure, drift_figure

if TYPE_CHECKING:
    import jinja2

Floats = NDArray[np.float64]

_BINS = 10
_LEAST_LABELS = 20
_LEAST_SEPARATION = 0.05
_LEAST_SOURCES = 6
"""Each half needs three independent verifiers before a combiner can learn about them."""


_WIDEST, _LONGEST = 200, 40
"""Characters of the table's lines and of a verifier's name."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Is P(correct) what it says? Rows in bins of equal size, by what was predicted."""

    source: Literal["labels", "halves", "none"]
    """What `observed` rests on: known labels; each half of the verifiers checked by the other half; or nothing."""
    predicted: Floats
    """[B] mean predicted P(correct)."""
    observed: Floats
    """[B] share of correct rows; all NaN where the source is "none"."""
    half_width: Floats
    """[B] half of the 95 % interval of `observed`, sampling error only."""
    count: NDArray[np.intp]
    """[B] rows."""

    @property
    def error(self) -> float:
        """Expected calibration error, the row-weighted mean of |observed - predicted|; NaN where nothing is known."""
        return float(np.average(np.abs(self.observed - self.predicted), weights=self.count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The window of score rows behind an ensemble's last fit."""

    scores: NDArray[np.float32]
    """[N, m], NaN where there is none."""
    asked: NDArray[np.bool_]
    """[N, m]; False where a verifier was not asked or its call failed."""
    groups: NDArray[np.int64]
    """[N] the prompt of each row."""
    labels: NDArray[np.float32]
    """[N] 0, 1 or NaN (unknown)."""
    families: Sequence[str | None]
    """[m]; None = unrelated to the others."""
    combiner: Mapping[str, NDArray[Any]]
    """The fitted combiner's `state_dict`."""

    @classmethod
    def from_state(cls, state: Mapping[str, NDArray[Any]], families: Sequence[str | None]) -> Evidence | None:
        """The evidence in an ensemble's `state_dict`; None before the first fit.

        Raises:
            ValueError: the state is not an ensemble's.
        """
        fitted = under("combiner/", state)
        try:
            window = {key: state[f"window/{key}"] for key in ("scores", "asked", "groups", "labels")}
        except KeyError as missing:
            raise ValueError(f"the state lacks {missing}; send what Ensemble.state_dict() returned") from None
        return cls(**window, families=families, combiner=fitted) if fitted else None

    def posterior(self) -> Floats:
        """P(correct) of every row, float64 [N]."""
        combiner = combiners.get(str(self.combiner["combiner"]))
        combiner.load_state_dict(self.combiner)
        return combiner.predict_proba(self.scores, self.groups, self.asked)

    def rate_errors(self, tpr: Floats, fpr: Floats) -> tuple[Floats, Floats]:
        """Standard errors [m] of rates [m] of a combiner that does not estimate them itself."""
        wrong, right = rate_errors(np.stack([fpr, tpr]), self.posterior(), ~np.isnan(self.scores))
        return right, wrong

    def balance_error(self) -> float:
        """Standard error of the share of correct rows; NaN for one prompt.

        That of the mean posterior, prompts as clusters (Liang and Zeger 1986), over the share of the variance of
        correctness that the posterior explains: a posterior that tells little knows little of the share.
        """
        posterior, place = self.posterior(), np.unique(self.groups, return_inverse=True)[1]
        mean = float(posterior.mean())
        deviations = np.bincount(place, posterior - mean)
        if (num := len(deviations)) < 2:
            return math.nan
        sampled = float(np.sqrt(num / (num - 1) * np.square(deviations).sum()) / len(posterior))
        known = float(posterior.var()) / max(mean * (1 - mean), 1e-9)
        return sampled / max(known, 1e-3)

    def correlation(self) -> Floats:
        """Pearson correlation [m, m] of scores over the rows where both spoke; NaN for a verifier without spread."""
        present = ~np.isnan(self.scores)
        x, seen = np.where(present, self.scores, 0.0).astype(np.float64), present.astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            n = seen.T @ seen
            mean = (x.T @ seen) / n  # of the first, where the second spoke
            covariance = (x.T @ x) / n - mean * mean.T
            variance = ((x * x).T @ seen) / n - mean**2
            spread = np.sqrt(np.where(variance > 1e-9, variance, np.nan))
            return np.asarray(np.clip(covariance / (spread * spread.T), -1.0, 1.0))

    def calibration(self) -> Calibration:
        """The curve against labels; without labels of the halves against each other; with too few verifiers neither."""
        known = ~np.isnan(self.labels)
        if known.sum() >= _LEAST_LABELS and len(np.unique(self.labels[known])) == 2:
            posterior, right = self.posterior()[known], self.labels[known].astype(np.float64)
            return _curve("labels", posterior, right)
        halves = self._halves()
        witnesses = [self._refitted("default", half) for half in halves[::-1]]
        if not halves or min(map(_separation, witnesses)) < _LEAST_SEPARATION:
            posterior = self.posterior()
            return _curve("none", posterior, np.full(len(posterior), np.nan))
        kind = str(self.combiner["combiner"])
        claims = [self._refitted(kind, half) for half in halves]
        return _curve("halves", np.concatenate(claims), np.concatenate([unblurred(w) for w in witnesses]))

    def _halves(self) -> list[list[int]]:
        """The verifiers that vary in two halves, families kept together; empty where they are too few."""
        spread = np.nanmax(self.scores, axis=0, initial=-1) - np.nanmin(self.scores, axis=0, initial=2)
        sources: dict[object, list[int]] = {}
        for k in np.flatnonzero(spread > 0).tolist():
            sources.setdefault(k if self.families[k] is None else ("family", self.families[k]), []).append(k)
        if len(sources) < _LEAST_SOURCES:
            return []
        columns = list(sources.values())
        return [[k for source in columns[half::2] for k in source] for half in (0, 1)]

    def _refitted(self, kind: str, columns: Sequence[int]) -> Floats:
        """P(correct) [N] from some verifiers alone. Prompts are left out, else both halves would share them."""
        families = [self.families[k] for k in columns]
        combiner = combiners.get(kind, families=families if any(f is not None for f in families) else None)
        return combiner.fit_predict(self.scores[:, columns], labels=self.labels, asked=self.asked[:, columns])


def unblurred(posterior: Floats) -> Floats:
    """An estimate [N] of correctness from a posterior: unbiased within any set of rows chosen without looking at it.

    A calibrated q has class means E[q | right] = E[q q] / E[q] and E[q | wrong] = E[q (1 - q)] / E[1 - q]; mapping
    these to 1 and 0 takes the blur out, as Rogan and Gladen (1978) do for a diagnostic test.
    """
    wrong = float(posterior @ (1 - posterior) / max((1 - posterior).sum(), 1e-9))
    return (posterior - wrong) / max(_separation(posterior), 1e-9)


def _separation(posterior: Floats) -> float:
    """E[q | right] - E[q | wrong] of a calibrated posterior q [N]."""
    right = posterior @ posterior / max(posterior.sum(), 1e-9)
    wrong = posterior @ (1 - posterior) / max((1 - posterior).sum(), 1e-9)
    return float(right - wrong)


def _curve(source: Literal["labels", "halves", "none"], predicted: Floats, right: Floats) -> Calibration:
    """Bins of equal size; 0 and 1 labels, or unbiased estimates of them, in `right` [N]."""
    order = np.argsort(predicted, kind="stable")
    parts = np.array_split(order, max(1, min(_BINS, len(order) // 10)))
    observed = np.array([right[part].mean() for part in parts])
    error = np.array([right[part].std() / np.sqrt(len(part)) for part in parts])
    return Calibration(
        source=source,
        predicted=np.array([predicted[part].mean() for part in parts]),
        observed=np.clip(observed, 0.0, 1.0),
        half_width=1.96 * error,
        count=np.array([len(part) for part in parts], np.intp),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierReport:
    """One verifier of an ensemble."""

    name: str
    family: str | None
    """The one it was given, or that the ensemble found by likeness; None = unrelated to the others."""
    cost: Cost
    accuracy: float
    """Estimated P(its verdict is right), in [0, 1]; NaN before the first fit or where the combiner estimates none."""
    tpr: float
    """Estimated P(says yes | correct)."""
    fpr: float
    """Estimated P(says yes | wrong). See `side` for whether it is above `tpr` beyond chance."""
    weight: float
    """Share of its own evidence that counts; NaN before the first fit."""
    accuracy_error: float = math.nan
    """Standard error of `accuracy`; NaN where the combiner estimates none, as for the errors below."""
    tpr_error: float = math.nan
    fpr_error: float = math.nan
    weight_error: float = math.nan
    rows: int = 0
    """Score rows that the estimates rest on: those of the window on which it gave a score."""
    scored: int
    """Trajectories it gave a score."""
    abstained: int
    """Trajectories of which it said that it cannot tell."""
    errors: int
    """Calls that raised."""
    timeouts: int
    """Calls that outlived the deadline, and calls left out because an earlier one still hangs."""
    last_error: str
    """The last failure in words; empty where there was none."""
    failed: int = 0
    """Trajectories without a score because a question or the whole call failed, which says nothing of them."""
    cached: int = 0
    """Trajectories whose score was remembered or given to an equal one, so that nobody was asked."""
    skipped: int = 0
    """Trajectories about which it was not asked because cheaper verifiers had decided them."""
    note: str = ""
    """Why it abstains, where it counts that: gold answers that it cannot read; empty where there are none."""
    reason: str = ""
    """Why it counts for little or nothing; empty where it counts."""

    def estimates(self) -> tuple[tuple[float, float], ...]:
        """Accuracy, TPR, FPR and weight, each with its standard error."""
        errors = (self.accuracy_error, self.tpr_error, self.fpr_error, self.weight_error)
        return tuple(zip((self.accuracy, self.tpr, self.fpr, self.weight), errors, strict=True))

    @property
    def edge_error(self) -> float:
        """Standard error of TPR less FPR."""
        return math.hypot(self.tpr_error, self.fpr_error)

    @property
    def side(self) -> int:
        """1 where TPR exceeds FPR by 1.96 standard errors, -1 where FPR exceeds TPR by as much, else 0: not known."""
        edge = self.tpr - self.fpr
        return int(math.copysign(1, edge)) if abs(edge) > 1.96 * self.edge_error else 0  # NaN compares as False


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleReport:
    """All verifiers of an ensemble, and what holds for them together."""

    name: str
    combiner: str
    version: int
    """How often the combiner was fitted."""
    window_rows: int
    """Trajectories the next fit would learn from, new ones aside."""
    class_balance: float
    """Estimated share of correct trajectories, in [0, 1]."""
    effective_number: float
    """How many independent verifiers the ensemble is worth."""
    verifiers: tuple[VerifierReport, ...]
    alarms: Sequence[str] = ()
    """Suspicions of reward hacking so far, with their evidence."""
    notes: Sequence[str] = ()
    """What the combiner found besides the numbers, such as two camps of verifiers that disagree."""
    evidence: Evidence | None = field(default=None, compare=False, repr=False)
    """The score rows of the last fit; None before it, and where only the numbers were kept."""

    @property
    def balance_error(self) -> float:
        """Standard error of `class_balance`, see `Evidence.balance_error`; NaN without `evidence`.

        Infinite where errors are estimated and no verifier is known to be better or worse than chance: then nothing is
        known of the balance.
        """
        if self.evidence is None:
            return math.nan
        estimated = [v for v in self.verifiers if not math.isnan(v.edge_error)]
        return math.inf if estimated and not any(v.side for v in estimated) else self.evidence.balance_error()

    @property
    def effective(self) -> str:
        """`effective_number` with its 95 % interval, where the combiner knows the errors of the weights."""
        errors = [v.weight_error for v in self.verifiers if not math.isnan(v.weight_error)]
        if not errors or math.isnan(self.effective_number):
            return number(self.effective_number, 2)
        width = 1.96 * math.hypot(*errors)
        ends = (max(1.0, self.effective_number - width), min(len(self.verifiers), self.effective_number + width))
        return f"{self.effective_number:.2f} [{ends[0]:.1f}, {ends[1]:.1f}]"

    @property
    def spared(self) -> float:
        """Share of verdicts, in [0, 1], that nobody had to be asked for: skipped by a cascade, or remembered."""
        spared = sum(v.cached + v.skipped for v in self.verifiers)
        return spared / max(sum(v.scored + v.abstained + v.failed + v.skipped for v in self.verifiers), 1)

    def rows(self) -> list[dict[str, Any]]:
        """One plain dictionary per verifier, ready for a data frame or JSON."""
        return [dataclasses.asdict(verifier) for verifier in self.verifiers]

    def row(self) -> dict[str, Any]:
        """All numbers without the score rows, JSON-safe: NaN is None. A run's ``verifiers.jsonl`` holds one by step."""
        own = dataclasses.asdict(dataclasses.replace(self, evidence=None))
        del own["evidence"]
        return {**_null(own), "verifiers": [_null(row) for row in own["verifiers"]]}

    @classmethod
    def from_row(cls, row: Mapping[str, Any], evidence: Evidence | None = None) -> Self:
        """The report that `row` was made of; keys that it does not know are left out.

        Raises:
            ValueError: a key is missing.
        """
        try:
            verifiers = tuple(_build(VerifierReport, verifier) for verifier in row["verifiers"])
            report: Self = _build(cls, {**row, "verifiers": verifiers, "evidence": evidence})
        except (KeyError, TypeError) as cause:
            raise ValueError(f"incomplete report ({cause}); send what EnsembleReport.row() returned") from cause
        return report

    def table(self) -> str:
        """The report as text, one verifier per line."""
        return _as_text(self)

    def html(self, path: str | os.PathLike[str], history: Sequence[Snapshot] = ()) -> Path:
        """Write the report as one HTML file that needs nothing else: tables, plots and what they mean.

        Args:
            path: The file; folders on the way are made.
            history: Reports of this ensemble by step, for the plots of drift; fewer than two show none.

        Raises:
            RunFolderError: The file cannot be written.
        """
        target, text = Path(path), page(self, history)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        except OSError as cause:
            raise RunFolderError(f"the report cannot be written to {target} ({cause}); choose another file") from cause
        return target


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """An ensemble at one step of a run."""

    step: int
    report: EnsembleReport
    reward: float = math.nan
    """Mean reward of the step; NaN where it is not known."""


def _null(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def _build(kind: Any, row: Mapping[str, Any]) -> Any:
    """An instance of dataclass `kind` from a row; None where a float belongs is NaN, lists are tuples."""
    known = {f.name: f.type for f in dataclasses.fields(kind)}
    values = {k: math.nan if v is None and known[k] == "float" else v for k, v in row.items() if k in known}
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def number(value: float, digits: int = 3) -> str:
    """A number to `digits` places; a dash where it is not known."""
    return "\N{EN DASH}" if math.isnan(value) else f"{value:.{digits}f}"


def interval(value: float, error: float, *, low: float = 0.0, high: float = 1.0) -> str:
    """An estimate with its 95 % interval, 1.96 standard errors each way, within [low, high]; dashes if unknown."""
    if math.isnan(error):
        return number(value)
    ends = (max(low, value - 1.96 * error), min(high, value + 1.96 * error))
    return f"{value:.3f} [{ends[0]:.2f}, {ends[1]:.2f}]"


def _as_text(report: EnsembleReport) -> str:
    """The report as fixed-width text: one verifier per line, then the whole, then failures and notes."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("verifier")
    table.add_column("family")
    for title in ("accuracy", "TPR", "FPR", "weight", "rows", "scored", "abstained", "failed", "errors", "timeouts"):
        table.add_column(title, justify="right")
    for v in report.verifiers:
        rates = [interval(*estimate) for estimate in v.estimates()]
        counts = [str(x) for x in (v.rows, v.scored, v.abstained, v.failed, v.errors, v.timeouts)]
        names = [Text(printable(v.name, _LONGEST)), Text(printable(v.family or "", 20))]  # Text: no markup in names
        table.add_row(*names, *rates, *counts)
    out = io.StringIO()
    Console(file=out, width=_WIDEST, color_system=None).print(table)
    failures = [
        f"last failure of {printable(v.name, _LONGEST)}: {printable(v.last_error)}"
        for v in report.verifiers
        if v.last_error
    ]
    said = [(v.name, text) for v in report.verifiers for text in (v.reason, v.note) if text]
    failures += [f"{printable(name, _LONGEST)}: {printable(text)}" for name, text in said]
    lines = [line.rstrip() for line in out.getvalue().rstrip().splitlines()]
    alarms = [f"the reward may be hacked: {printable(alarm)}" for alarm in report.alarms]
    notes = [printable(note) for note in report.notes]
    saved = f"{report.spared:.0%} of scores not computed (cascade or cache), " if report.spared else ""
    whole = (
        f"{printable(report.name, _LONGEST)}: combiner {report.combiner} version {report.version}, "
        f"{report.window_rows} rows, class balance {interval(report.class_balance, report.balance_error)}, "
        f"effective number {report.effective} of {len(report.verifiers)}, "
        f"{saved}brackets hold 95 % intervals"
    )
    return "\n".join([*lines, "", whole, *notes, *alarms, *failures])


def page(report: EnsembleReport, history: Sequence[Snapshot] = ()) -> str:
    """The report as HTML that loads nothing from elsewhere and runs no script.

    Names and failures are written by users, models and servers: the template's environment escapes every text and makes
    it printable, and pictures are embedded as images, in which nothing runs.
    """
    rows, evidence = report.verifiers, report.evidence
    names, numbers = [v.name for v in rows], ("weight", "accuracy", "tpr", "fpr")
    rates = {key: np.array([getattr(v, key) for v in rows]) for key in numbers}
    shown: dict[str, Any] = {"report": report, "history": history}
    if not np.isnan(rates["tpr"]).all():
        errors = {key: np.array([getattr(v, f"{key}_error") for v in rows]) for key in ("tpr", "fpr")}
        reverse = np.array([v.side < 0 for v in rows])
        shown["accuracy"] = _image(
            accuracy_figure(names, rates["tpr"], rates["fpr"], rates["weight"], errors=errors, reverse=reverse)
        )
    if evidence is not None:
        curve, posterior = evidence.calibration(), evidence.posterior()
        shown |= {"curve": curve, "sure": (abs(posterior - 0.5) + 0.5).mean()}
        picture = calibration_figure(curve.predicted, curve.observed, curve.half_width, posterior)
        shown["calibration"] = _image(picture)
        shown["correlation"] = _image(correlation_figure(names, [v.family for v in rows], evidence.correlation()))
    if len(history) > 1:
        reports = [snapshot.report for snapshot in history]
        by_name = [{v.name: v for v in each.verifiers} for each in reports]
        now = [v.name for v in reports[-1].verifiers]
        series = {
            key: np.array([[getattr(known.get(name), key, math.nan) for known in by_name] for name in now])
            for key in numbers
        }
        shown["drift"] = _image(
            drift_figure(
                [snapshot.step for snapshot in history],
                now,
                series,
                effective_number=[each.effective_number for each in reports],
                reward=[snapshot.reward for snapshot in history],
                share_correct=[each.class_balance for each in reports],
            )
        )
    template = _templates().get_template("page.html")
    title = _templates().from_string("Verifiers of {{ name }}").render(name=report.name)
    return standalone_page(title, template.render(shown), style=_STYLE)


@cache
def _templates() -> jinja2.Environment:
    import jinja2
    from markupsafe import Markup

    def plain(value: object) -> object:
        return value if isinstance(value, Markup) else printable(str(value))

    # `finalize` sees all that a template writes, before it is escaped: no name can be forgotten.
    loader = jinja2.PackageLoader("forge_verifiers.report", "")
    made = jinja2.Environment(
        loader=loader, autoescape=True, finalize=plain, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    made.filters["number"] = number
    made.globals["interval"] = interval
    return made


def _image(svg: bytes) -> Any:
    from markupsafe import Markup

    return Markup(f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}")  # noqa: S704  # base64 holds no markup
