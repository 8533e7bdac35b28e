"""What a user knows of a verifier beforehand.

In: rates and how sure of them one is. Out: pseudo-counts of symbols per class [m, NUM_SYMBOLS]. Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from forge_verifiers.combiners.base import Floats
from forge_verifiers.combiners.symbols import MAX_BINS, NUM_SYMBOLS, count

YES = 0.5
"""A score above it says yes."""
_HALF_TRUST = 30.0
"""Rows at which a told loading counts as much as the seen one: correlations alone mislead where verifiers depend on
each other, so that they count for little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """How good one verifier is, known before it is heard. A score above 0.5 counts as "yes"."""

    tpr: float
    """P(says yes | correct), in (0, 1)."""
    fpr: float
    """P(says yes | wrong), in (0, 1)."""
    strength: float
    """Responses of each class that the rates count for, above 0. As many as the ensemble's window holds rows make the
    prior weigh as much as everything seen."""

    def __post_init__(self) -> None:
        for name in ("tpr", "fpr"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} of a Prior must lie strictly between 0 and 1")
        if not 0 < self.strength < np.inf:
            raise ValueError(f"strength={self.strength} of a Prior must be positive and finite")

    @classmethod
    def of(cls, accuracy: float, *, strength: float) -> Self:
        """A verifier that is right with probability `accuracy` on correct and on wrong responses alike."""
        return cls(tpr=accuracy, fpr=1.0 - accuracy, strength=strength)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Priors in the language of EM. m verifiers."""

    right: Floats
    """[m, NUM_SYMBOLS] pseudo-counts given Y = 1; rows without a prior are 0."""
    wrong: Floats
    """Likewise given Y = 0."""
    loading: Floats
    """[m] correlation with the truth at even odds; 0 without a prior."""
    trust: Floats
    """[m] in [0, 1): how far the told loading replaces the seen one at the start."""

    def added_to(self, right: Floats, wrong: Floats) -> tuple[Floats, Floats]:
        """Other pseudo-counts [m, NUM_SYMBOLS] per class and these."""
        return right + self.right, wrong + self.wrong

    def blended(self, loading: Floats) -> Floats:
        """Loadings [m] in which told ones replace seen ones as far as they are trusted."""
        return np.where(self.trust > 0, self.trust * self.loading + (1 - self.trust) * loading, loading)


def told(priors: Mapping[int, Prior], scores: Floats, codes: NDArray[np.int32]) -> Told | None:
    """Priors as pseudo-counts, spread within yes and no as the verifier's scores [n, m] are; None without any."""
    if not priors:
        return None
    m, counts = len(codes), count(codes)
    right, wrong = np.zeros((m, NUM_SYMBOLS)), np.zeros((m, NUM_SYMBOLS))
    loading, trust = np.zeros(m), np.zeros(m)
    for k, prior in priors.items():
        saying_yes = codes[k][scores[:, k] > YES] - k * NUM_SYMBOLS
        yes = np.bincount(saying_yes, minlength=NUM_SYMBOLS).astype(np.float64)
        no = counts[k] - yes
        no[MAX_BINS] = 0.0
        if not (yes.sum() and no.sum()):
            continue  # a verifier that never varies says nothing, however good
        right[k] = prior.strength * (prior.tpr * yes / yes.sum() + (1 - prior.tpr) * no / no.sum())
        wrong[k] = prior.strength * (prior.fpr * yes / yes.sum() + (1 - prior.fpr) * no / no.sum())
        rate = (prior.tpr + prior.fpr) / 2
        loading[k] = (prior.tpr - prior.fpr) / 2 / np.sqrt(rate * (1 - rate))
        trust[k] = prior.strength / (prior.strength + _HALF_TRUST)
    return Told(right=right, wrong=wrong, loading=loading, trust=trust)
