"""What an ensemble's combiner makes of the answers: posteriors, their noise, and pessimism about both.

In: scores [n, m] and who was asked. Out: rewards [n]. Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forge_agents.errors import UnknownIdError, did_you_mean
from forge_verifiers import combiners
from forge_verifiers.combiners import Combiner, CombinerReport, Prior, Symbolic
from forge_verifiers.pessimism import LowerBound, Pessimism, SoftMinimum
from forge_verifiers.verifier import Verifier

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
_LEAST_EDGE = 0.1
"""TPR less FPR of a verifier that is believed better than chance."""


def combiner_for(
    verifiers: Sequence[Verifier], combine: str, *, anchors: Sequence[str], priors: Mapping[str, Prior]
) -> Combiner:
    """A fresh combiner that knows the verifiers' families, anchors and priors.

    Raises:
        UnknownIdError: no combiner, or no verifier named as anchor or in `priors`.
        ValueError: priors for a combiner that takes none.
    """
    names = [v.name for v in verifiers]
    for what, named in (("anchor", anchors), ("priors for", priors)):
        for name in named:
            if name not in names:
                raise UnknownIdError(f"{what} {name!r} is none of {', '.join(names)}.{did_you_mean(name, names)}")
    families = [v.family for v in verifiers]
    return combiners.get(
        combine,
        families=families if any(f is not None for f in families) else None,
        anchors=[names.index(a) for a in anchors] or None,
        priors={names.index(name): prior for name, prior in priors.items()} or None,
    )


def rewards(
    combiner: Combiner,
    scores: ArrayLike,
    groups: ArrayLike,
    asked: Bools,
    *,
    families: Sequence[str | None],
    pessimism: Pessimism | None,
) -> tuple[Floats, Floats | None]:
    """What each response earns, float64 [n], and the standard deviation [n] of its posterior where it is estimated."""
    posterior = combiner.predict_proba(scores, groups, asked)
    noise = combiner.uncertainty(scores, groups, asked) if isinstance(combiner, Symbolic) else None
    if isinstance(pessimism, LowerBound) and noise is not None:
        return pessimism(posterior, noise), noise
    if isinstance(pessimism, SoftMinimum):
        without = [
            combiner.predict_proba(scores, groups, asked & ~source) for source in _sources(families) if not source.all()
        ]
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
