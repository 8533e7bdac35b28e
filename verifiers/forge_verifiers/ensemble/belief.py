"""What an ensemble's combiner makes of the answers: posteriors, their noise, and pessimism about both.

In: scores [n, m] and who was asked. Out: rewards [n]. Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

import forge_verifiers.combiners as combiners
from forge_agents.errors import UnknownIdError, did_you_mean
from forge_verifiers.combiners import Combiner, CombinerReport, Prior
from forge_verifiers.combiners.base import Bools, Floats, logit, offset_to, sigmoid
from forge_verifiers.core.verifier import Verifier

_REFERENCE_ROWS = 1024
"""Newest rows that partial panels are levelled on; they decide one mean."""
_LEAST_EDGE = 0.1
"""TPR less FPR of a verifier that is believed better than chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftMinimum:
    """``-beta log E exp(-r / beta)`` over posteriors that leave out one source each.

    A source is a verifier, or all verifiers of one declared family. A response whose high posterior hinges on one
    source, as one that exploits a single verifier does, falls to what the others make of it; one on which they agree
    hardly moves. Between the mean (beta to infinity) and the worst case (beta to 0) of an ensemble of rewards, which
    mitigates hacking and does not remove it (Eisenstein et al., arXiv 2312.09244, section 5; there the members are
    reward models, here they are posteriors without one source each).
    """

    beta: float = 0.1
    """On the scale of probabilities, above 0."""

    def __post_init__(self) -> None:
        if not 0 < self.beta < np.inf:
            raise ValueError(f"beta={self.beta} must be positive and finite")

    def __call__(self, rewards: Floats) -> Floats:
        """float64 [n] of posteriors [sources, n]."""
        least = rewards.min(axis=0)  # taken out, so that no exponential overflows
        return np.asarray(least - self.beta * np.log(np.exp((least - rewards) / self.beta).mean(axis=0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerBound:
    """The posterior less some of its standard deviations, not below 0: what few rows have taught counts for less."""

    deviations: float = 1.0
    """Standard deviations, above 0. See `Combiner.uncertainty` for what they cover."""

    def __post_init__(self) -> None:
        if not 0 < self.deviations < np.inf:
            raise ValueError(f"deviations={self.deviations} must be positive and finite")

    def __call__(self, posterior: Floats, deviation: Floats) -> Floats:
        """float64 [n]; both arguments [n]."""
        return np.maximum(posterior - self.deviations * deviation, 0.0)


Pessimism: TypeAlias = SoftMinimum | LowerBound


def families_of(verifiers: Sequence[Verifier]) -> tuple[str | None, ...]:
    """The family of each verifier: the one it was given, else its likeness where another one has it, too."""
    given = [v.family for v in verifiers]
    alike = [getattr(v, "likeness", None) if own is None else None for own, v in zip(given, verifiers, strict=True)]
    return tuple(own or (like if alike.count(like) > 1 else None) for own, like in zip(given, alike, strict=True))


def combiner_for(
    verifiers: Sequence[Verifier],
    combine: str,
    *,
    families: Sequence[str | None],
    anchors: Sequence[str],
    priors: Mapping[str, Prior],
) -> Combiner:
    """A fresh combiner that knows the verifiers' families, anchors and priors.

    Raises:
        UnknownIdError: no combiner, or no verifier named as anchor or in `priors`.
        TypeError: a prior that is no `Prior`.
        ValueError: priors for a combiner that takes none.
    """
    names = [v.name for v in verifiers]
    for what, named in (("anchor", anchors), ("priors for", priors)):
        for name in named:
            if name not in names:
                raise UnknownIdError(f"{what} {name!r} is none of {', '.join(names)}.{did_you_mean(name, names)}")
    for name, prior in priors.items():
        if not isinstance(prior, Prior):
            raise TypeError(f"the prior of {name!r} is {prior!r}; give a Prior, such as Prior.of(0.8, strength=50)")
    combiner = combiners.get(
        combine,
        families=families if any(f is not None for f in families) else None,
        anchors=[names.index(a) for a in anchors] or None,
        priors={names.index(name): prior for name, prior in priors.items()} or None,
    )
    combiner.names = names
    return combiner


class Belief:
    """P(correct) by a combiner, of partial panels on a level with that of the whole one.

    Without its strictest verifier a panel finds everything better, and without its best one it is sure of things it
    should not be sure of: rows about which fewer were asked, as in a cascade or after a failure, would be paid for it.
    So they are shifted, in log-odds, by as much as gives rows that everybody judged the same mean with the same
    verifiers left out as with all of them.

    Args:
        combiner: Fitted.
        scores: [N, m] rows that hold what everybody said, where everybody was asked.
        groups: [N] their prompts.
        asked: [N, m] who was heard on them.
    """

    def __init__(self, combiner: Combiner, scores: NDArray[np.float32], groups: NDArray[np.int64], asked: Bools):
        self._combiner = combiner
        newest = slice(-_REFERENCE_ROWS, None)
        self._scores, self._groups, self._asked = scores[newest], groups[newest], asked[newest]
        self._shifts: dict[bytes, float] = {}

    def __call__(self, scores: ArrayLike, groups: ArrayLike, asked: Bools) -> Floats:
        """float64 [n] of scores [n, m], prompts [n] and who was heard [n, m]."""
        found = self._combiner.predict_proba(scores, groups, asked)
        partial = ~asked.all(axis=1)
        for panel in np.unique(asked[partial], axis=0):
            rows = (asked == panel).all(axis=1)
            found[rows] = sigmoid(logit(found[rows]) + self._shift(panel))
        return found

    def _shift(self, panel: Bools) -> float:
        """Log-odds that a panel bool [m] falls short of the whole one, by the mean."""
        key = panel.tobytes()
        if key in self._shifts:
            return self._shifts[key]
        heard = self._asked & panel
        rows = heard.any(axis=1)
        self._shifts[key] = 0.0
        if rows.any() and not (heard == self._asked).all():
            mean = self._combiner.predict_proba(self._scores, self._groups, self._asked)[rows].mean()
            part = logit(self._combiner.predict_proba(self._scores, self._groups, heard)[rows])
            self._shifts[key] = offset_to(float(mean), part)
        return self._shifts[key]


def rewards(
    combiner: Combiner,
    believe: Belief,
    scores: ArrayLike,
    groups: ArrayLike,
    asked: Bools,
    *,
    families: Sequence[str | None],
    pessimism: Pessimism | None,
) -> tuple[Floats, Floats | None]:
    """What each response earns, float64 [n], and the standard deviation [n] of its posterior where it is estimated."""
    posterior = believe(scores, groups, asked)
    noise = combiner.uncertainty(scores, groups, asked) if combiner.has_uncertainty else None
    if isinstance(pessimism, LowerBound) and noise is not None:
        return pessimism(posterior, noise), noise
    if isinstance(pessimism, SoftMinimum):
        without = [believe(scores, groups, asked & ~source) for source in _sources(families) if not source.all()]
        return pessimism(np.stack([posterior, *without])), noise
    return posterior, noise


def witnesses(fitted: CombinerReport, scores: NDArray[np.float32]) -> list[int]:
    """The verifier that agrees least with the others, of those believed better than chance; none where all are alike.

    Args:
        fitted: What the combiner believes.
        scores: [N, m] recent scores, NaN = abstained.
    """
    present = ~np.isnan(scores)
    count = np.maximum(present.sum(axis=0), 1)
    centred = np.where(present, scores - np.nansum(scores, axis=0) / count, 0.0).astype(np.float64)
    spread = np.sqrt((centred**2).sum(axis=0))
    good = (fitted.tpr - fitted.fpr >= _LEAST_EDGE) & (spread > 0)
    if good.sum() < 2:
        return []
    unit = centred / np.where(spread > 0, spread, 1.0)
    agreement = np.abs(unit.T @ unit).sum(axis=1)
    return [int(np.argmin(np.where(good, agreement, np.inf)))]


def _sources(families: Sequence[str | None]) -> list[Bools]:
    """The columns [m] of each source: one verifier, or one declared family."""
    keys = [("own", str(k)) if family is None else ("family", family) for k, family in enumerate(families)]
    return [np.array([key == source for key in keys]) for source in dict.fromkeys(keys)]
