"""Turns an ensemble's scores into rewards: P(correct), its noise, and lower bounds of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

import forge_verifiers.combiners as combiners
from forge_agents.errors import UnknownIdError, did_you_mean
from forge_verifiers.combiners import Combiner, CombinerReport, Prior
from forge_verifiers.combiners.base import Bools, Floats, logit, offset_to, sigmoid
from forge_verifiers.core.verifier import Scores, Verifier

_REFERENCE_ROWS = 1024
"""Number of newest rows on which `Posterior` calibrates partially scored rows."""
Scale: TypeAlias = Literal["probability", "log_odds"]
"""The scale of an ensemble's score."""
_MAX_LOG_ODDS = 8.0
_MIN_DIFFERENCE = 0.1
"""TPR minus FPR from which a verifier counts as better than chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftMinimum:
    """Soft minimum ``-beta log E exp(-r / beta)`` over P(correct) and P(correct) without each source.

    A source is a verifier or a declared family. If a high P(correct) depends on one source, as for a response that
    exploits a single verifier, the reward falls to the estimate of the others. Between the mean (beta to infinity) and
    the minimum (beta to 0) of reward ensembles, which mitigate reward hacking but do not remove it (Eisenstein et al.,
    arXiv 2312.09244, section 5. Their members are reward models).
    """

    beta: float = 0.1
    """Temperature on the scale of probabilities, above 0."""

    def __post_init__(self) -> None:
        if not 0 < self.beta < np.inf:
            raise ValueError(f"beta={self.beta} must be positive and finite")

    def __call__(self, rewards: Floats) -> Floats:
        """float64 [n] from posteriors [sources, n]."""
        lowest = rewards.min(axis=0)  # subtracted so that no exponential overflows
        return np.asarray(lowest - self.beta * np.log(np.exp((lowest - rewards) / self.beta).mean(axis=0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerConfidenceBound:
    """P(correct) minus a number of its standard deviations, at least 0. The bound discounts estimates from few rows."""

    deviations: float = 1.0
    """Number of standard deviations, above 0. `Combiner.predict` says what they cover."""

    def __post_init__(self) -> None:
        if not 0 < self.deviations < np.inf:
            raise ValueError(f"deviations={self.deviations} must be positive and finite")

    def __call__(self, posterior: Floats, deviation: Floats) -> Floats:
        """float64 [n]. Both arguments [n]."""
        return np.maximum(posterior - self.deviations * deviation, 0.0)


LowerBound: TypeAlias = SoftMinimum | LowerConfidenceBound


def families_of(verifiers: Sequence[Verifier]) -> tuple[str | None, ...]:
    """The family of each verifier. Without one, its `default_family` if another verifier has the same."""
    families = [v.family for v in verifiers]
    defaults = [
        getattr(v, "default_family", None) if family is None else None
        for family, v in zip(families, verifiers, strict=True)
    ]
    shared = [default if defaults.count(default) > 1 else None for default in defaults]
    return tuple(family or default for family, default in zip(families, shared, strict=True))


def combiner_for(
    verifiers: Sequence[Verifier],
    combine: str,
    *,
    families: Sequence[str | None],
    anchors: Sequence[str],
    priors: Mapping[str, Prior],
) -> Combiner:
    """Create a combiner with the verifiers' families, anchors and priors. Raises UnknownIdError for unknown names."""
    names = [v.name for v in verifiers]
    for label, selected in (("anchor", anchors), ("priors for", priors)):
        for name in selected:
            if name not in names:
                raise UnknownIdError(f"{label} {name!r} is none of {', '.join(names)}.{did_you_mean(name, names)}")
    for name, prior in priors.items():
        if not isinstance(prior, Prior):
            raise TypeError(f"the prior of {name!r} is {prior!r}. Pass a Prior, such as Prior.of(0.8, strength=50)")
    combiner = combiners.get(
        combine,
        families=families if any(f is not None for f in families) else None,
        anchors=[names.index(a) for a in anchors] or None,
        priors={names.index(name): prior for name, prior in priors.items()} or None,
    )
    combiner.names = names
    return combiner


class Posterior:
    """P(correct) by a combiner, calibrated so that rows with fewer verifiers are comparable.

    Without its strictest verifier, an ensemble rates all responses higher, and rows that were scored by fewer verifiers
    (in a cascade, or after a failure) would earn more. Their log-odds are therefore shifted. The shift is the one that
    gives fully scored rows the same mean probability with the same verifiers left out as with all verifiers. Reference
    rows determine the shift: `scores` [N, m], their prompts `groups` [N], and the mask `queried` [N, m].
    """

    def __init__(self, combiner: Combiner, scores: NDArray[np.float32], groups: NDArray[np.int64], queried: Bools):
        self._combiner = combiner
        newest = slice(-_REFERENCE_ROWS, None)
        self._scores, self._groups, self._queried = scores[newest], groups[newest], queried[newest]
        self._shifts: dict[bytes, float] = {}

    def __call__(self, scores: ArrayLike, queried: Bools, *, groups: ArrayLike) -> Floats:
        """float64 [n] from scores [n, m], the mask [n, m] of queried verifiers, and prompts [n]."""
        return self.with_deviation(scores, queried, groups=groups)[0]

    def with_deviation(self, scores: ArrayLike, queried: Bools, *, groups: ArrayLike) -> tuple[Floats, Floats | None]:
        """The result of a call, and the combiner's uncertainty [n] if it has one."""
        posterior, deviation = self._combiner.predict(scores, groups, queried)
        partial = ~queried.all(axis=1)
        for subset in np.unique(queried[partial], axis=0):
            rows = (queried == subset).all(axis=1)
            posterior[rows] = sigmoid(logit(posterior[rows]) + self._shift(subset))
        return posterior, deviation

    def _shift(self, subset: Bools) -> float:
        """Log-odds to add for a subset of the verifiers, bool [m]."""
        key = subset.tobytes()
        if key in self._shifts:
            return self._shifts[key]
        queried = self._queried & subset
        rows = queried.any(axis=1)
        self._shifts[key] = 0.0
        if rows.any() and not (queried == self._queried).all():
            mean = self._combiner.predict_proba(self._scores, self._groups, self._queried)[rows].mean()
            partial = logit(self._combiner.predict_proba(self._scores, self._groups, queried)[rows])
            self._shifts[key] = offset_to(float(mean), partial)
        return self._shifts[key]


def rewards(
    posterior_of: Posterior,
    scores: ArrayLike,
    groups: ArrayLike,
    queried: Bools,
    *,
    families: Sequence[str | None],
    lower_bound: LowerBound | None,
) -> tuple[Floats, Floats | None]:
    """The reward of each response, float64 [n], and the standard deviation [n] of its posterior if available."""
    posterior, noise = posterior_of.with_deviation(scores, queried, groups=groups)
    if isinstance(lower_bound, LowerConfidenceBound) and noise is not None:
        return lower_bound(posterior, noise), noise
    if isinstance(lower_bound, SoftMinimum):
        sources = [source for source in _sources(families) if not source.all()]
        without = [posterior_of(scores, queried & ~source, groups=groups) for source in sources]
        return lower_bound(np.stack([posterior, *without])), noise
    return posterior, noise


def on_log_odds_scale(probability: Scores, deviation: Scores | None) -> tuple[Scores, Scores | None]:
    """Map log-odds between -8 and 8 linearly to [0, 1].

    The standard deviation is half the distance between the scores one deviation above and below, so at most 0.5.

    Args:
        probability: float32 [n], NaN where all verifiers abstained.
        deviation: Standard deviation of `probability`, float32 [n], or None.
    """
    center = probability.astype(np.float64)
    if deviation is None:
        return _log_odds_score(center), None
    low, high = (_log_odds_score(np.clip(center + side * deviation, 0.0, 1.0)) for side in (-1, 1))
    return _log_odds_score(center), (high - low) / np.float32(2)


def _log_odds_score(probability: Floats) -> Scores:
    odds = np.clip(logit(probability), -_MAX_LOG_ODDS, _MAX_LOG_ODDS)
    return (0.5 + odds / (2 * _MAX_LOG_ODDS)).astype(np.float32)


def witnesses(fitted: CombinerReport, scores: NDArray[np.float32]) -> list[int]:
    """The verifier whose `scores` [N, m] correlate least with the others', if at least two are better than chance."""
    present = ~np.isnan(scores)
    count = np.maximum(present.sum(axis=0), 1)
    centered = np.where(present, scores - np.nansum(scores, axis=0) / count, 0.0).astype(np.float64)
    norm = np.sqrt((centered**2).sum(axis=0))
    good = (fitted.tpr - fitted.fpr >= _MIN_DIFFERENCE) & (norm > 0)
    if good.sum() < 2:
        return []
    unit = centered / np.where(norm > 0, norm, 1.0)
    agreement = np.abs(unit.T @ unit).sum(axis=1)
    return [int(np.argmin(np.where(good, agreement, np.inf)))]


def _sources(families: Sequence[str | None]) -> list[Bools]:
    """The columns [m] of each source: one verifier, or one family."""
    keys = [("single", str(k)) if family is None else ("family", family) for k, family in enumerate(families)]
    return [np.array([key == source for key in keys]) for source in dict.fromkeys(keys)]
