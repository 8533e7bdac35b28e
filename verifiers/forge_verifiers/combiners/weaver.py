"""Weaver as published: binarise, filter, match second moments, combine as naive Bayes.

In: scores [n, m], a few labels where they exist. Out: P(correct) [n]. Waits for nothing.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from forge_verifiers.combiners.base import Bools, Combiner, Floats, Ints
from forge_verifiers.combiners.dawid_skene import naive_bayes
from forge_verifiers.combiners.mean import min_max, score_range

_MIDDLE = (0.2, 0.8)


class Weaver(Combiner):
    """Weak supervision by moment matching (Weaver, arXiv 2506.18203).

    1. min-max per verifier; NaN becomes 0, that is "incorrect", as in the authors' code.
    2. One global threshold for verifiers with more than two values: the most accurate on the labels, else 0.5.
    3. Class balance from the labels; without labels from third moments (Jaffe, Nadler and Kluger 2015).
    4. Where it lies in [0.2, 0.8], verifiers whose yes-rate lies outside are dropped, as long as three remain.
    5. Minimises sum over i < j of (Pr(S_i, S_j) - sum over y of pi_y Pr(S_i|y) Pr(S_j|y))^2. With the yes-rates p_i
       matched on the diagonal, all four cells of a pair miss by C_ij - pi (1 - pi) d_i d_j, d = TPR - FPR, so
       alternating least squares on d replaces gradient descent; TPR = p + (1 - pi) d, FPR = p - pi d.
    6. logit P(Y=1|S) = logit pi + sum of S log(TPR/FPR) + (1 - S) log((1 - TPR)/(1 - FPR)).

    Departures: a closed-form solver, and no extra verifier from the group's majority answer, since answers do not
    reach a combiner (add it as a column).
    """

    name: ClassVar[str] = "weaver"

    def _fit(self, scores: Floats, groups: Ints | None, labels: Floats | None, asked: Bools) -> dict[str, NDArray[Any]]:
        low, high = score_range(scores)
        graded = np.array([len(np.unique(column[~np.isnan(column)])) > 2 for column in scores.T])
        unit = np.nan_to_num(min_max(scores, low, high), nan=0.0)
        threshold = _threshold(unit, graded, labels)
        votes = _binarise(unit, graded, threshold)
        known = None if labels is None else labels[~np.isnan(labels)]
        pi = class_balance_from_moments(votes) if known is None else (known.sum() + 1.0) / (len(known) + 2.0)
        rate = votes.mean(axis=0)
        kept = _filter(rate, pi)
        difference = np.zeros(len(rate))
        difference[kept] = match_second_moments(votes[:, kept], pi)
        tpr = np.clip(rate + (1 - pi) * difference, 0.01, 0.99)
        fpr = np.clip(rate - pi * difference, 0.01, 0.99)
        fitted = {"low": low, "high": high, "graded": graded, "threshold": np.array(threshold)}
        fitted |= {"tpr": tpr, "fpr": fpr, "weight": kept.astype(np.float64), "class_balance": np.array(pi)}
        return fitted

    def _predict(self, scores: Floats, groups: Ints | None, asked: Bools) -> Floats:
        fitted = self._parameters()
        unit = np.nan_to_num(min_max(scores, fitted["low"], fitted["high"]), nan=0.0)
        votes = _binarise(unit, fitted["graded"], float(fitted["threshold"]))
        kept = fitted["weight"] > 0
        votes = votes[:, kept]
        return naive_bayes(votes, 1.0 - votes, fitted["tpr"][kept], fitted["fpr"][kept], float(fitted["class_balance"]))


def match_second_moments(votes: Floats, pi: float, *, sweeps: int = 500, tolerance: float = 1e-10) -> Floats:
    """Differences d = TPR - FPR [m] that minimise the pairwise mismatch of second moments, given `pi`.

    Source: arXiv 2506.18203. The sign is the one under which the verifiers are better than chance on average. With
    fewer than three verifiers the moments fix no solution; equal d is then assumed.
    """
    covariance = np.atleast_2d(np.cov(votes.T, bias=True)) / (pi * (1 - pi))
    m = len(covariance)
    if m < 3:
        shared = float(np.sqrt(max(covariance[0, -1], 0.0))) if m == 2 else 0.5
        return np.full(m, shared)
    off = covariance - np.diag(np.diag(covariance))
    values, vectors = np.linalg.eigh(off)
    d = vectors[:, -1] * np.sqrt(max(values[-1], 1e-12))
    for _ in range(sweeps):
        before = d.copy()
        for k in range(m):
            rest = d @ d - d[k] ** 2
            d[k] = off[k] @ d / max(rest, 1e-12)
        if np.abs(d - before).max() < tolerance:
            break
    return np.asarray(-d if d.sum() < 0 else d)


def class_balance_from_moments(votes: Floats) -> float:
    """P(Y = 1) from third moments of binary votes [n, m]; 0.5 with fewer than three verifiers that vary.

    Over distinct verifiers E[e2] = pi (1 - pi) e2(d) and E[e3] = pi (1 - pi)(1 - 2 pi) e3(d), with e2 and e3 the
    elementary symmetric polynomials of the centred votes and of d (after Jaffe, Nadler and Kluger 2015); their ratio
    gives (1 - 2 pi) / sqrt(pi (1 - pi)). Shrunk to one half by 100 rows' worth.
    """
    parts = votes[:, votes.std(axis=0) > 1e-6] - votes.mean(axis=0)[votes.std(axis=0) > 1e-6]
    n, m = parts.shape
    if m < 3:
        return 0.5
    seen, model = _second_and_third(parts).mean(axis=1), _second_and_third(match_second_moments(parts, 0.5)[None])[:, 0]
    if seen[0] <= 1e-9 or min(model) <= 1e-12:
        return 0.5
    skew = seen[1] / seen[0] ** 1.5 * model[0] ** 1.5 / model[1]
    pi = float(np.clip((1.0 - skew / np.sqrt(4.0 + skew**2)) / 2.0, 0.05, 0.95))
    return float(0.5 + (pi - 0.5) * n / (n + 100.0))


def _second_and_third(parts: Floats) -> Floats:
    """Elementary symmetric polynomials e2 and e3, [2, n], of the rows of `parts` [n, m], by Newton's identities."""
    p1, p2, p3 = ((parts**k).sum(axis=1) for k in (1, 2, 3))
    return np.stack([(p1**2 - p2) / 2, (p1**3 - 3 * p1 * p2 + 2 * p3) / 6])


def _threshold(unit: Floats, graded: NDArray[np.bool_], labels: Floats | None) -> float:
    if labels is None or not graded.any():
        return 0.5
    known = ~np.isnan(labels)
    grid = np.linspace(0.05, 0.95, 19)
    right = [float(((unit[known][:, graded] >= t) == (labels[known, None] == 1)).mean()) for t in grid]
    best = np.flatnonzero(np.array(right) == max(right))
    return float(grid[best[np.argmin(np.abs(grid[best] - 0.5))]])


def _binarise(unit: Floats, graded: NDArray[np.bool_], threshold: float) -> Floats:
    return np.where(graded, unit >= threshold, unit > 0.5).astype(np.float64)


def _filter(rate: Floats, pi: float) -> NDArray[np.bool_]:
    everyone = (rate > 0) & (rate < 1)
    if not _MIDDLE[0] <= pi <= _MIDDLE[1]:
        return everyone
    kept = everyone & (rate >= _MIDDLE[0]) & (rate <= _MIDDLE[1])
    return kept if kept.sum() >= 3 else everyone
