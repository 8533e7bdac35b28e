"""Logistic regression on the verifiers' scores: the supervised baseline.

In: scores [n, m] and labels of some rows. Out: P(correct) [n]. Waits for nothing.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from forge_verifiers.combiners.base import Bools, Combiner, Floats, Ints, sigmoid
from forge_verifiers.combiners.mean import min_max, score_range


class Logistic(Combiner):
    """Ridge logistic regression on min-max scores and abstention flags, by Newton's method.

    The penalty is one half of the squared weight per feature and none on the intercept (scikit-learn's C = 1).
    """

    name: ClassVar[str] = "logistic"

    def _fit(self, scores: Floats, groups: Ints | None, labels: Floats | None, asked: Bools) -> dict[str, NDArray[Any]]:
        known = np.zeros(len(scores), bool) if labels is None else ~np.isnan(labels)
        if labels is None or len(np.unique(labels[known])) < 2:
            raise ValueError(
                f"'logistic' learns from labels and got {int(known.sum())}, not both classes; "
                "send labels=[n] with some 0 and some 1, or take the 'default' combiner, which needs none"
            )
        low, high = score_range(scores)
        features = _features(scores[known], low, high)
        beta = _newton(features, labels[known])
        m = scores.shape[1]
        fitted = {"low": low, "high": high, "beta": beta, "weight": np.abs(beta[:m])}
        fitted["class_balance"] = np.array(sigmoid(_features(scores, low, high) @ beta).mean())
        return fitted

    def _predict(self, scores: Floats, groups: Ints | None, asked: Bools) -> Floats:
        fitted = self._parameters()
        return sigmoid(_features(scores, fitted["low"], fitted["high"]) @ fitted["beta"])


def _features(scores: Floats, low: Floats, high: Floats) -> Floats:
    absent = np.isnan(scores)
    scaled = np.where(absent, 0.5, min_max(scores, low, high)) - 0.5
    return np.hstack([scaled, absent.astype(np.float64), np.ones((len(scores), 1))])


def _newton(features: Floats, labels: Floats, *, steps: int = 50, tolerance: float = 1e-9) -> Floats:
    penalty = np.ones(features.shape[1])
    penalty[-1] = 1e-6  # keeps the system regular; the intercept itself is free
    beta = np.zeros(features.shape[1])
    for _ in range(steps):
        p = sigmoid(features @ beta)
        gradient = features.T @ (p - labels) + penalty * beta
        hessian = (features.T * (p * (1 - p))) @ features + np.diag(penalty)
        change = np.linalg.solve(hessian, gradient)
        beta = beta - change
        if np.abs(change).max() < tolerance:
            break
    return beta
