"""What a user knows of a verifier beforehand.

In: rates and how sure of them one is. Out: rows of each class that count as seen. Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from forge_verifiers.combiners.base import Floats
from forge_verifiers.combiners.latent import NUM_SYMBOLS

YES = 0.5
"""A score above it says yes."""


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


def told_rows(priors: Mapping[int, Prior], scores: Floats, codes: NDArray[np.int32]) -> Floats:
    """Rows [2, 2m, NUM_SYMBOLS] by class, wrong first, spread within yes and no as the scores [n, m] are."""
    rows, m = np.zeros((2, len(codes), NUM_SYMBOLS)), scores.shape[1]
    for k, prior in priors.items():
        if k not in range(m):
            raise ValueError(f"priors name verifier {k!r}; expected column numbers 0 to {m - 1}")
        symbols = codes[k] - k * NUM_SYMBOLS
        yes = np.bincount(symbols[scores[:, k] > YES], minlength=NUM_SYMBOLS)
        no = np.bincount(symbols[scores[:, k] <= YES], minlength=NUM_SYMBOLS)
        if yes.any() and no.any():  # a verifier that never varies says nothing, however good
            for y, rate in enumerate((prior.fpr, prior.tpr)):
                rows[y, k] = prior.strength * (rate * yes / yes.sum() + (1 - rate) * no / no.sum())
    return rows
