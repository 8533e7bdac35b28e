"""Reports of an ensemble: estimates of its verifiers and checks on its score rows, as data, text table or HTML page."""

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
from forge_agents.display import PAGE_MARK, decimals, printable, standalone_page
from forge_agents.errors import RunFolderError
from forge_agents.files import write_atomic
from forge_verifiers.combiners.base import rate_errors
from forge_verifiers.core.verifier import Cost, state_under
from forge_verifiers.report.pictures import MAX_SHOWN, calibration_figure, correlation_figure

if TYPE_CHECKING:
    import jinja2

Floats = NDArray[np.float64]

_BINS = 10
_MIN_LABELS = 20
_MIN_SEPARATION = 0.05
_MIN_SOURCES = 6
"""A combiner needs three independent verifiers in each half."""
_MAX_SOURCES = 100
_MAX_LINE, _MAX_NAME = 200, 40
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
    """Calibration of P(correct): predicted and observed correctness in bins of equal size."""

    source: Literal["labels", "halves", "none"]
    """Source of `observed`: known labels, a comparison of two halves of the verifiers, or none."""
    predicted: Floats
    """[B] mean predicted P(correct)."""
    observed: Floats
    """[B] fraction of correct rows. All NaN if the source is "none"."""
    half_width: Floats
    """[B] half of the 95 % interval of `observed`. Sampling error only."""
    count: NDArray[np.intp]
    """[B] rows."""

    @property
    def error(self) -> float:
        """Expected calibration error, the row-weighted mean of |observed - predicted|, or NaN if unknown."""
        return float(np.average(np.abs(self.observed - self.predicted), weights=self.count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The score rows of an ensemble's last fit."""

    scores: NDArray[np.float32]
    """[N, m], NaN where missing."""
    queried: NDArray[np.bool_]
    """[N, m]. False where a verifier was not called or failed."""
    groups: NDArray[np.int64]
    """[N] prompt of each row."""
    labels: NDArray[np.float32]
    """[N] 0, 1 or NaN (unknown)."""
    families: Sequence[str | None]
    """[m], or None for verifiers unrelated to the others."""
    combiner: Mapping[str, NDArray[Any]]
    """The fitted combiner's `state_dict`."""

    @classmethod
    def from_state(cls, state: Mapping[str, NDArray[Any]], families: Sequence[str | None]) -> Evidence | None:
        """Evidence from an ensemble's `state_dict`, None before the first fit. Raises ValueError for other states."""
        fitted = state_under("combiner/", state)
        try:
            window = {key: state[f"window/{key}"] for key in ("scores", "queried", "groups", "labels")}
        except KeyError as missing:
            raise ValueError(f"the state lacks {missing}. Pass the result of Ensemble.state_dict()") from None
        return cls(**window, families=families, combiner=fitted) if fitted else None

    def posterior(self) -> Floats:
        """P(correct) of every row, float64 [N]."""
        combiner = combiners.get(str(self.combiner["combiner"]))
        combiner.load_state_dict(self.combiner)
        return combiner.predict_proba(self.scores, self.groups, self.queried)

    def rate_errors(self, tpr: Floats, fpr: Floats) -> tuple[Floats, Floats]:
        """Standard errors [m] of rates [m], for combiners that do not estimate them."""
        wrong, right = rate_errors(np.stack([fpr, tpr]), self.posterior(), ~np.isnan(self.scores))
        return right, wrong

    def balance_error(self) -> float:
        """Standard error of the fraction of correct rows, or NaN for one prompt.

        Computed as the error of the mean posterior, clustered by prompt (Liang and Zeger 1986), divided by the fraction
        of the variance of correctness that the posterior explains. Infinite if the posterior is constant.
        """
        posterior, prompt = self.posterior(), np.unique(self.groups, return_inverse=True)[1]
        mean = float(posterior.mean())
        deviations = np.bincount(prompt, posterior - mean)
        if (num := len(deviations)) < 2:
            return math.nan
        if np.ptp(posterior) < 1e-9:
            return math.inf
        sampled = float(np.sqrt(num / (num - 1) * np.square(deviations).sum()) / len(posterior))
        explained = float(posterior.var()) / max(mean * (1 - mean), 1e-9)
        return sampled / max(explained, 1e-3)

    def correlation(self, first: int | None = None) -> Floats:
        """Pearson correlation [m, m] over the rows that both verifiers scored, or NaN for constant verifiers.

        `first` is the number m of verifiers, by default all.
        """
        scores = self.scores[:, :first]
        present = ~np.isnan(scores)
        x, mask = np.where(present, scores, 0.0).astype(np.float64), present.astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            n = mask.T @ mask
            mean = (x.T @ mask) / n  # mean of the first verifier over the rows of the second
            covariance = (x.T @ x) / n - mean * mean.T
            variance = ((x * x).T @ mask) / n - mean**2
            spread = np.sqrt(np.where(variance > 1e-13, variance, np.nan))
            return np.asarray(np.clip(covariance / (spread * spread.T), -1.0, 1.0))

    def calibration(self) -> Calibration:
        """Calibration against labels. Without labels, of two halves of the verifiers against each other."""
        labeled = ~np.isnan(self.labels)
        if labeled.sum() >= _MIN_LABELS and len(np.unique(self.labels[labeled])) == 2:
            posterior, right = self.posterior()[labeled], self.labels[labeled].astype(np.float64)
            return _curve("labels", posterior, right)
        halves = self._halves()
        references = [self._refitted("default", half) for half in halves[::-1]]
        if not halves or min(map(_separation, references)) < _MIN_SEPARATION:
            posterior = self.posterior()
            return _curve("none", posterior, np.full(len(posterior), np.nan))
        kind = str(self.combiner["combiner"])
        predicted = [self._refitted(kind, half) for half in halves]
        return _curve("halves", np.concatenate(predicted), np.concatenate([deblurred(r) for r in references]))

    def _halves(self) -> list[list[int]]:
        """Two halves of the verifiers that vary, without splitting families, or empty if there are too few.

        Above `_MAX_SOURCES`, fits for a page would take minutes to hours: their tests of copies compare all pairs.
        """
        spread = np.nanmax(self.scores, axis=0, initial=-1) - np.nanmin(self.scores, axis=0, initial=2)
        sources: dict[object, list[int]] = {}
        for k in np.flatnonzero(spread > 0).tolist():
            sources.setdefault(k if self.families[k] is None else ("family", self.families[k]), []).append(k)
        if not _MIN_SOURCES <= len(sources) <= _MAX_SOURCES:
            return []
        columns = list(sources.values())
        return [[k for source in columns[half::2] for k in source] for half in (0, 1)]

    def _refitted(self, kind: str, columns: Sequence[int]) -> Floats:
        """P(correct) [N] from a subset of the verifiers, without prompts, because both halves would share them."""
        families = [self.families[k] for k in columns]
        combiner = combiners.get(kind, families=families if any(f is not None for f in families) else None)
        return combiner.fit_predict(self.scores[:, columns], labels=self.labels, queried=self.queried[:, columns])


def deblurred(posterior: Floats) -> Floats:
    """An unbiased estimate [N] of correctness, for any set of rows that was chosen independently of the posterior.

    A calibrated q has class means E[q | right] = E[q q] / E[q] and E[q | wrong] = E[q (1 - q)] / E[1 - q]. Mapping
    these to 1 and 0 corrects for the uncertainty, as Rogan and Gladen (1978) do for a diagnostic test.
    """
    wrong = float(posterior @ (1 - posterior) / max((1 - posterior).sum(), 1e-9))
    return (posterior - wrong) / max(_separation(posterior), 1e-9)


def _separation(posterior: Floats) -> float:
    """E[q | right] - E[q | wrong] of a calibrated posterior q [N]."""
    right = posterior @ posterior / max(posterior.sum(), 1e-9)
    wrong = posterior @ (1 - posterior) / max((1 - posterior).sum(), 1e-9)
    return float(right - wrong)


def _curve(source: Literal["labels", "halves", "none"], predicted: Floats, right: Floats) -> Calibration:
    """Bins of equal size from labels 0 and 1, or unbiased estimates of them, in `right` [N]."""
    order = np.argsort(predicted, kind="stable")
    parts = np.array_split(order, max(1, min(_BINS, len(order) // 10)))
    observed = np.array([right[part].mean() for part in parts])
    half_width = np.array([1.96 * right[part].std() / np.sqrt(len(part)) for part in parts])
    if source == "labels":
        from forge_agents.bench.statistics import wilson  # loads all of forge_agents.bench

        # the farther end, because the normal interval of a rate of 0 or 1 has no width
        ends = np.array([wilson(right[part].sum(), len(part)) for part in parts])
        half_width = np.abs(ends - observed[:, None]).max(axis=1)
    return Calibration(
        source=source,
        predicted=np.array([predicted[part].mean() for part in parts]),
        observed=np.clip(observed, 0.0, 1.0),
        half_width=half_width,
        count=np.array([len(part) for part in parts], np.intp),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierReport:
    """Estimates and counters of one verifier of an ensemble."""

    name: str
    family: str | None
    """Declared or default family, or None if unrelated to the others."""
    cost: Cost
    accuracy: float
    """Estimated accuracy in [0, 1], or NaN before the first fit, or if the combiner does not estimate it."""
    tpr: float
    """Estimated P(says yes | correct)."""
    fpr: float
    """Estimated P(says yes | wrong). `side` compares it with `tpr`."""
    weight: float
    """Fraction of its own evidence that counts, or NaN before the first fit."""
    accuracy_error: float = math.nan
    """Standard error of `accuracy`, or NaN if not estimated, as for the errors below."""
    tpr_error: float = math.nan
    fpr_error: float = math.nan
    weight_error: float = math.nan
    rows: int = 0
    """Number of score rows behind the estimates: the rows of the window that it scored."""
    scored: int
    """Number of trajectories with a score."""
    abstained: int
    """Number of trajectories on which it abstained."""
    errors: int
    """Number of calls that raised."""
    timeouts: int
    """Number of calls that timed out, or were skipped because an earlier call still hangs."""
    last_error: str
    """Last error message, or empty without failures."""
    failed: int = 0
    """Number of trajectories without a score because a question or the whole call failed."""
    cached: int = 0
    """Number of trajectories whose score came from the cache or from an equal trajectory."""
    skipped: int = 0
    """Number of trajectories that a cascade decided by cheaper verifiers."""
    note: str = ""
    """Gold answers that it cannot read, or empty if there are none."""
    reason: str = ""
    """Explanation of a low weight, or empty otherwise."""

    def estimates(self) -> tuple[tuple[float, float], ...]:
        """Accuracy, TPR, FPR and weight with their standard errors."""
        errors = (self.accuracy_error, self.tpr_error, self.fpr_error, self.weight_error)
        return tuple(zip((self.accuracy, self.tpr, self.fpr, self.weight), errors, strict=True))

    @property
    def difference_error(self) -> float:
        """Standard error of TPR - FPR."""
        return math.hypot(self.tpr_error, self.fpr_error)

    @property
    def side(self) -> int:
        """1 if TPR exceeds FPR by 1.96 standard errors, -1 if FPR exceeds TPR by as much, 0 if undetermined."""
        difference = self.tpr - self.fpr
        significant = abs(difference) > 1.96 * self.difference_error  # False for NaN
        return int(math.copysign(1, difference)) if significant else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleReport:
    """Report of an ensemble and its verifiers."""

    name: str
    combiner: str
    version: int
    """Number of fits."""
    window_rows: int
    """Number of trajectories in the window."""
    class_balance: float
    """Estimated fraction of correct trajectories, in [0, 1]."""
    effective_number: float
    """Number of independent verifiers with the same information."""
    verifiers: tuple[VerifierReport, ...]
    alarms: Sequence[str] = ()
    """Evidence of the suspicions of reward hacking so far."""
    notes: Sequence[str] = ()
    """Further findings, such as two clusters of verifiers that disagree."""
    evidence: Evidence | None = field(default=None, compare=False, repr=False)
    """Score rows of the last fit, or None before it, or if only the numbers were stored."""

    @property
    def balance_error(self) -> float:
        """Standard error of `class_balance`, see `Evidence.balance_error`, or NaN without `evidence`.

        Infinite if errors are estimated and no verifier is known to be better or worse than chance.
        """
        if self.evidence is None:
            return math.nan
        estimated = [v for v in self.verifiers if not math.isnan(v.difference_error)]
        return math.inf if estimated and not any(v.side for v in estimated) else self.evidence.balance_error()

    @property
    def effective(self) -> str:
        """`effective_number` as text, with its 95 % interval if the errors of the weights are known."""
        width = 1.96 * math.hypot(*(v.weight_error for v in self.verifiers if v.weight_error > 0))
        if not width or math.isnan(self.effective_number):
            return decimals(self.effective_number, 2)
        ends = (max(1.0, self.effective_number - width), min(len(self.verifiers), self.effective_number + width))
        return f"{self.effective_number:.2f} [{ends[0]:.1f}, {ends[1]:.1f}]"

    @property
    def skipped_fraction(self) -> float:
        """Fraction of scores that were not computed, in [0, 1]: skipped by a cascade, or cached."""
        skipped = sum(v.cached + v.skipped for v in self.verifiers)
        return skipped / max(sum(v.scored + v.abstained + v.failed + v.skipped for v in self.verifiers), 1)

    def row(self) -> dict[str, Any]:
        """All numbers without the score rows, for JSON: NaN is None. A run's ``verifiers.jsonl`` has one per step."""
        values = dataclasses.asdict(dataclasses.replace(self, evidence=None))
        del values["evidence"]
        return {**_null(values), "verifiers": [_null(row) for row in values["verifiers"]]}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """Restore a report from `row`. Unknown keys are ignored. Raises ValueError for a missing key."""
        try:
            verifiers = tuple(_build(VerifierReport, verifier) for verifier in row["verifiers"])
            report: Self = _build(cls, {**row, "verifiers": verifiers, "evidence": None})
        except (KeyError, TypeError, OverflowError) as cause:
            raise ValueError(f"incomplete report ({cause}). Pass the result of EnsembleReport.row()") from cause
        return report

    def table(self) -> str:
        """The report as fixed-width text with one verifier per line."""
        return _as_text(self)

    def html(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as one self-contained HTML file with tables, plots and explanations.

        Missing folders are created. Raises RunFolderError if the file cannot be written or is of another program.
        """
        text = page(self)
        try:
            return write_atomic(path, text, replaces=PAGE_MARK)
        except OSError as cause:
            raise RunFolderError(f"the report cannot be written to {path} ({cause}). Choose another file") from cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The report of an ensemble at one step of a run."""

    step: int
    report: EnsembleReport
    reward: float = math.nan
    """Mean reward of the step, or NaN if unknown."""


def _null(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def _build(kind: Any, row: Mapping[str, Any]) -> Any:
    """An instance of dataclass `kind` from a row. Floats that are None become NaN, lists become tuples.

    Raises TypeError for a value of another type: a stranger's file may hold text in place of a number.
    """
    types = {f.name: str(f.type) for f in dataclasses.fields(kind)}
    values = {k: math.nan if v is None and types[k] == "float" else v for k, v in row.items() if k in types}
    expected = {"float": float | int, "int": int, "str": str, "str | None": str | None}
    for name, value in values.items():
        if types[name] in expected and not isinstance(value, expected[types[name]]):
            raise TypeError(f"{name} is {printable(repr(value), 60)}, and {types[name]} is expected")
        if types[name] == "float":
            values[name] = float(value)
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def interval(value: float, error: float, *, low: float = 0.0, high: float = 1.0) -> str:
    """An estimate with its 95 % interval, clipped to [low, high]. No interval if the error is unknown: NaN or 0."""
    if not error > 0:
        return decimals(value)
    ends = (max(low, value - 1.96 * error), min(high, value + 1.96 * error))
    return f"{value:.3f} [{ends[0]:.2f}, {ends[1]:.2f}]"


def _as_text(report: EnsembleReport) -> str:
    """The table, then a line about the ensemble, notes, alarms and failures."""
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
        names = [Text(printable(v.name, _MAX_NAME)), Text(printable(v.family or "", 20))]  # Text has no markup
        table.add_row(*names, *rates, *counts)
    out = io.StringIO()
    Console(file=out, width=_MAX_LINE, color_system=None).print(table)
    failures = [
        f"last failure of {printable(v.name, _MAX_NAME)}: {printable(v.last_error)}"
        for v in report.verifiers
        if v.last_error
    ]
    remarks = [(v.name, text) for v in report.verifiers for text in (v.reason, v.note) if text]
    failures += [f"{printable(name, _MAX_NAME)}: {printable(text)}" for name, text in remarks]
    lines = [line.rstrip() for line in out.getvalue().rstrip().splitlines()]
    alarms = [f"the reward may be hacked: {printable(alarm)}" for alarm in report.alarms]
    notes = [printable(note) for note in report.notes]
    skipped = f"{report.skipped_fraction:.0%} of scores not computed (cascade or cache), "
    whole = (
        f"{printable(report.name, _MAX_NAME)}: combiner {printable(report.combiner, _MAX_NAME)} "
        f"version {report.version}, {report.window_rows} rows, "
        f"class balance {interval(report.class_balance, report.balance_error)}, "
        f"effective number {report.effective} of {len(report.verifiers)}, "
        f"{skipped if report.skipped_fraction else ''}brackets are 95 % intervals"
    )
    return "\n".join([*lines, "", whole, *notes, *alarms, *failures])


def page(report: EnsembleReport) -> str:
    """The report as self-contained HTML without scripts.

    Names and error messages come from users, models and servers. The template's environment therefore escapes every
    text, and figures are embedded as images, because images cannot run code.
    """
    evidence = report.evidence
    context: dict[str, Any] = {"report": report, "most": MAX_SHOWN}
    if evidence is not None:
        names, families = [v.name for v in report.verifiers], [v.family for v in report.verifiers]
        curve, posterior = evidence.calibration(), evidence.posterior()
        context |= {"curve": curve, "sure": (abs(posterior - 0.5) + 0.5).mean()}
        picture = calibration_figure(curve.predicted, curve.observed, curve.half_width, posterior)
        context["calibration"] = _image(picture)
        context["correlation"] = _image(correlation_figure(names, families, evidence.correlation(MAX_SHOWN)))
    template = _templates().get_template("page.html")
    title = _templates().from_string("Verifiers of {{ name }}").render(name=report.name)
    return standalone_page(title, template.render(context), style=_STYLE)


@cache
def _templates() -> jinja2.Environment:
    import jinja2
    from markupsafe import Markup

    def plain(value: object) -> object:
        return value if isinstance(value, Markup) else printable(str(value))

    # `finalize` is applied to every value in a template before it is escaped.
    loader = jinja2.PackageLoader("forge_verifiers.report", "")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, finalize=plain, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters["number"] = decimals
    environment.globals["interval"] = interval
    return environment


def _image(svg: bytes) -> Any:
    from markupsafe import Markup

    return Markup(f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}")  # noqa: S704  # base64 contains no markup
