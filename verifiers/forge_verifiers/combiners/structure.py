"""What correlations alone tell about verifiers: accuracy, dependence and class balance, before any label.

In: standardised scores [n, m] or their correlations [m, m]. Out: parameters [m]. Waits for nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forge_verifiers.combiners.base import Floats, Ints

Bools = NDArray[np.bool_]

_CAP = 0.75
"""Weak verifiers do not correlate more than this with the truth; agreement beyond it is dependence."""


def correlations(values: Floats, present: Bools) -> Floats:
    """Correlations [m, m] of centred `values` [n, m] (0 where absent) over the rows where both verifiers spoke.

    Shrunk by c / (c + 5) for c common rows; a verifier without spread correlates with none.
    """
    seen = present.astype(np.float32)
    x = values.astype(np.float32)
    common = (seen.T @ seen).astype(np.float64)
    power = ((x * x).T @ seen).astype(np.float64)
    product = (x.T @ x).astype(np.float64)
    return np.asarray(product / np.sqrt(np.maximum(power * power.T, 1e-9)) * common / (common + 5.0))


def truth_loadings(correlation: Floats, n: int, family: Ints | None = None, *, rounds: int = 25) -> Floats:
    """Correlation a [m] of each verifier with the hidden truth, from C_ij = a_i a_j where i and j are independent.

    Robust rank-one fit: pairs that agree more than their loadings explain are dependent and lose their weight
    (a redescending loss, wide at first), and pairs of one declared family never count. Signs come from the leading
    eigenvector, oriented so that most verifiers are better than chance.
    """
    m = len(correlation)
    admitted = ~np.eye(m, dtype=bool) if family is None else family[:, None] != family[None, :]
    if not admitted.any():
        return np.full(m, 0.3)
    crowd = 1.0 / np.where(admitted, correlation**2, 1.0).sum(axis=1)
    # Capped, so that a block of near copies cannot own the eigenvector.
    kernel = np.where(admitted, np.clip(correlation, -0.3, 0.3), 0.0) * np.sqrt(np.outer(crowd, crowd))
    vector = np.linalg.eigh(kernel)[1][:, -1]
    if (vector * np.sqrt(crowd)).sum() < 0:
        vector = -vector
    sign = np.where(vector < -0.02, -1.0, 1.0)
    agreement = correlation * np.outer(sign, sign)
    shown = np.where(admitted, agreement, np.nan)
    usual = np.sqrt(max(float(np.nanmedian(shown)), 1e-4))
    rows = np.array([np.median(row[use]) if use.any() else 0.0 for row, use in zip(agreement, admitted, strict=True)])
    a = np.clip(rows / max(usual, 0.05), 0.05, 0.9)
    noise = 1.0 / n
    narrow = max(2.5 * np.sqrt(noise), 0.03)
    for step in range(rounds):
        width = max(narrow, 0.3 * 0.8**step)
        weight = admitted / (1.0 + ((agreement - np.outer(a, a)) / width) ** 2) ** 2
        pull = 2.0 * noise
        target = ((weight * agreement) @ a + pull * np.median(a)) / (weight @ a**2 + pull)
        a = 0.5 * a + 0.5 * np.clip(target, -0.3, 0.97)
    return np.asarray(np.clip(sign * a, -_CAP, _CAP))


def excess_dependence(correlation: Floats, loading: Floats, n: int, family: Ints | None = None) -> Floats:
    """Correlation of errors [m, m] in [0, 1] beyond what the truth explains and chance allows; 1 within a family."""
    spread = np.sqrt(np.maximum(1.0 - loading**2, 0.05))
    residual = (correlation - np.outer(loading, loading)) * np.sign(np.outer(loading, loading) + 1e-300)
    return dependence(residual / np.outer(spread, spread), n, family)


def dependence(error_correlation: Floats, n: int, family: Ints | None = None) -> Floats:
    """Error correlations [m, m] in [0, 1] less two standard errors and a margin for few rows; 1 within a family."""
    kept = np.clip(error_correlation - 2.0 / np.sqrt(n) - 8.0 / n, 0.0, 1.0)
    np.fill_diagonal(kept, 1.0)
    return kept if family is None else np.where(family[:, None] == family[None, :], 1.0, kept)


def evidence_weights(kinship: Floats, scale: Floats, own: Floats) -> tuple[Floats, Floats]:
    """Two answers to "how much of each verifier's evidence counts", both [m] in [0, 1].

    The first, 1 / (sum of error correlations), never favours a member of a block. The second is the discriminant
    w = argmin w'Kw / 2 - w'diag(K), 0 <= w <= 1, with K the evidence's error covariance, which prefers the better
    ones; one sweep of coordinate descent from `own`. Log-likelihood ratios that are right on their own have a mean
    difference equal to their variance, hence the linear term.
    """
    ratio = kinship * (scale[None, :] / np.maximum(scale[:, None], 1e-9))
    np.fill_diagonal(ratio, 0.0)
    w = own.copy()
    for k in range(len(w)):
        w[k] = min(max(1.0 - float(ratio[k] @ w), 0.0), 1.0)
    return 1.0 / kinship.sum(axis=1), w


def balance_from_sum(parts: Floats, strength: Floats) -> float:
    """P(Y = 1) from second and third moments of a weighted sum of conditionally independent parts.

    Over distinct verifiers E[e2] = pi (1 - pi) e2(d) and E[e3] = pi (1 - pi)(1 - 2 pi) e3(d), with e2 and e3 the
    elementary symmetric polynomials (after Jaffe, Nadler and Kluger 2015); their ratio gives (1 - 2 pi) /
    sqrt(pi (1 - pi)). Shrunk to one half by 100 rows' worth.

    Args:
        parts: centred, signed, weighted scores [n, m].
        strength: each part's separation of the classes, up to a common factor [m].
    """
    n, m = parts.shape
    if m < 3:
        return 0.5
    squares = parts * parts
    p1, p2, p3 = parts.sum(axis=1), squares.sum(axis=1), (squares * parts).sum(axis=1)
    second = float(((p1**2 - p2) / 2).mean())
    third = float(((p1 * p1 * p1 - 3 * p1 * p2 + 2 * p3) / 6).mean())
    d1, d2, d3 = float(strength.sum()), float((strength**2).sum()), float((strength**3).sum())
    model_second, model_third = (d1**2 - d2) / 2, (d1**3 - 3 * d1 * d2 + 2 * d3) / 6
    if second <= 1e-9 or model_second <= 1e-12 or model_third <= 1e-12:
        return 0.5
    skew = third / second**1.5 * model_second**1.5 / model_third
    pi = float(np.clip((1.0 - skew / np.sqrt(4.0 + skew**2)) / 2.0, 0.05, 0.95))
    return float(0.5 + (pi - 0.5) * n / (n + 100.0))


def class_balance_from_moments(votes: Floats) -> float:
    """P(Y = 1) from third moments of binary votes [n, m]; 0.5 with fewer than three verifiers that vary."""
    centred = votes - votes.mean(axis=0)
    spread = centred.std(axis=0)
    if np.count_nonzero(spread > 1e-6) < 3:
        return 0.5
    centred = centred[:, spread > 1e-6] / spread[spread > 1e-6]
    loading = truth_loadings(correlations(centred, np.ones(centred.shape, bool)), len(votes))
    weight = loading / (1.0 - loading**2)
    return balance_from_sum(centred * weight, np.abs(loading * weight))
