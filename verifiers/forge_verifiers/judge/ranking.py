"""From comparisons of two to a grade for each.

In: who won how often against whom. Out: grades in [0, 1]. Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from forge_verifiers.judge.answers import Ranking

_ROUNDS = 1000
_CLOSE = 1e-9


def pairings(n: int, opponents: int | None) -> Iterator[tuple[int, int]]:
    """Who meets whom among `n`: all, or the nearest `opponents` on a ring in this order; each pair once."""
    reach = n - 1 if opponents is None else min(opponents // 2, n - 1)
    for first in range(n):
        for second in range(first + 1, n):
            distance = second - first
            if min(distance, n - distance) <= reach:
                yield first, second


def rank(wins: NDArray[np.float64], ranking: Ranking) -> NDArray[np.float32]:
    """Grades of n texts from their comparisons.

    ``"win_rate"``: wins plus half the ties, over the comparisons made. Copeland's score, on [0, 1], is the same number,
    because every pair has one outcome. ``"bradley_terry"``: strengths p that maximise the likelihood of the outcomes
    under P(i beats j) = p_i / (p_i + p_j), by Hunter's iteration (2004, Annals of Statistics 32, eq. 3); the grade is
    the mean probability of beating another. Departure: everyone also ties once with an invented opponent of strength
    1, which keeps the strengths finite. Prefer it where texts met different opponents.

    Args:
        wins: float64 [n, n]; how often row beat column, a tie is 0.5 for both, 0 where they did not meet.
        ranking: See above.

    Returns:
        float32 [n] in [0, 1]; NaN for a text that met nobody.
    """
    met = wins + wins.T
    alone = met.sum(axis=1) == 0
    if ranking == "win_rate":
        grades = wins.sum(axis=1) / np.where(alone, 1.0, met.sum(axis=1))
    else:
        strength = _strengths(wins, met)
        beats = strength[:, None] / (strength[:, None] + strength[None, :])
        others = ~alone[None, :] & ~np.eye(len(wins), dtype=bool)
        grades = (beats * others).sum(axis=1) / np.maximum(others.sum(axis=1), 1)
    return np.where(alone, np.nan, grades).astype(np.float32)


def _strengths(wins: NDArray[np.float64], met: NDArray[np.float64]) -> NDArray[np.float64]:
    strength = np.ones(len(wins))
    won = wins.sum(axis=1) + 0.5
    for _ in range(_ROUNDS):
        before = strength
        strength = won / ((met / (before[:, None] + before[None, :])).sum(axis=1) + 1.0 / (before + 1.0))
        if np.max(np.abs(strength - before) / strength) < _CLOSE:
            break
    return strength
