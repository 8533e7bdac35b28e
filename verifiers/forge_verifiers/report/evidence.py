"""What the score rows of an ensemble show: how verifiers correlate, how calibrated the posterior is.

In: the rows a combiner was fitted on and its parameters. Out: a correlation matrix [m, m], a calibration curve. Waits
for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from forge_verifiers import combiners

Floats = NDArray[np.float64]

_BINS = 10
_LEAST_LABELS = 20
_LEAST_SEPARATION = 0.05
_LEAST_SOURCES = 6
"""Each half needs three independent verifiers before a combiner can learn about them."""


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
        fitted = {key[9:]: value for key, value in state.items() if key.startswith("combiner/")}
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
