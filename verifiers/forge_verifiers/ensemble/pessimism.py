"""Rewards that doubt themselves: what a policy finds first is where a verifier is wrong.

In: posteriors and how sure they are. Out: lower ones. Waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


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
        least = rewards.min(axis=0)
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
