"""Dawid and Skene's EM on binary votes.

In: scores [n, m], cut into votes. Out: P(correct) [n]. Waits for nothing.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from forge_verifiers.combiners.base import Bools, Combiner, Floats, Ints, logit, sigmoid


class DawidSkene(Combiner):
    """Two-coin Dawid-Skene (1979) by EM from the majority vote; abstentions are ignored.

    Two-valued verifiers vote as they are, others at Otsu's cut. A prior of two right and one wrong answer per
    verifier and class keeps the labels from swapping. Labelled rows keep their label during EM.
    """

    name: ClassVar[str] = "dawid-skene"

    def _fit(self, scores: Floats, groups: Ints | None, labels: Floats | None, asked: Bools) -> dict[str, NDArray[Any]]:
        cuts = np.array([vote_cut(column[~np.isnan(column)]) for column in scores.T])
        yes, no = _votes(scores, cuts)
        count = yes.sum(axis=1) + no.sum(axis=1)
        q = np.where(count > 0, yes.sum(axis=1) / np.maximum(count, 1), 0.5)
        known = np.zeros(len(scores), bool) if labels is None else ~np.isnan(labels)
        tpr, fpr, pi = np.full(len(cuts), 0.7), np.full(len(cuts), 0.3), 0.5
        for _ in range(200):
            if labels is not None:
                q = np.where(known, labels, q)
            before = q
            pi = float(np.clip(q.mean(), 0.01, 0.99))
            tpr = (yes.T @ q + 2.0) / ((yes + no).T @ q + 3.0)
            fpr = (yes.T @ (1 - q) + 1.0) / ((yes + no).T @ (1 - q) + 3.0)
            q = naive_bayes(yes, no, tpr, fpr, pi)
            if np.abs(q - before)[~known].max(initial=0.0) < 1e-6:
                break
        return {"cuts": cuts, "tpr": tpr, "fpr": fpr, "class_balance": np.array(pi)}

    def _predict(self, scores: Floats, groups: Ints | None, asked: Bools) -> Floats:
        fitted = self._parameters()
        yes, no = _votes(scores, fitted["cuts"])
        return naive_bayes(yes, no, fitted["tpr"], fitted["fpr"], float(fitted["class_balance"]))


def naive_bayes(yes: Floats, no: Floats, tpr: Floats, fpr: Floats, pi: float) -> Floats:
    """P(Y=1 | votes) [n] under conditional independence; rates are kept 1e-3 away from 0 and 1."""
    tpr, fpr = np.clip(tpr, 1e-3, 1 - 1e-3), np.clip(fpr, 1e-3, 1 - 1e-3)
    return sigmoid(logit(pi) + yes @ np.log(tpr / fpr) + no @ np.log((1 - tpr) / (1 - fpr)))


def vote_cut(values: Floats) -> float:
    """Scores above the returned cut are yes votes. Two values: between them; more: Otsu's two-means cut.

    One value says yes where it exceeds 0.5. Winsorised at 2 and 98 % so that one outlier does not move the cut.
    """
    distinct = np.unique(values)
    if len(distinct) < 2:
        return 0.5
    if len(distinct) == 2:
        return float(distinct.mean())
    low, high = np.quantile(values, [0.02, 0.98])
    if high <= low:
        return float(values.mean())
    counts, edges = np.histogram(np.clip(values, low, high), 64)
    centres = (edges[:-1] + edges[1:]) / 2
    below, moment = np.cumsum(counts), np.cumsum(counts * centres)
    total, mean = below[-1], moment[-1]
    inner = below[:-1] < total
    gap = (mean * below[:-1] - moment[:-1] * total) ** 2
    between = np.where(inner, gap / np.maximum(below[:-1] * (total - below[:-1]), 1), -1.0)
    return float(edges[1 + int(np.argmax(between))])


def _votes(scores: Floats, cuts: Floats) -> tuple[Floats, Floats]:
    present = ~np.isnan(scores)
    above = scores > cuts
    return (present & above).astype(np.float64), (present & ~above).astype(np.float64)
