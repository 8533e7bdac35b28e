"""Combiners kept as published, to compare with: mean, majority, logistic regression, Dawid-Skene, Weaver.

In: scores [n, m], NaN = abstained; labels of some rows for logistic regression. Out: P(correct) [n]. Waits for nothing.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from forge_verifiers.combiners.base import (
    Bools,
    Combiner,
    Floats,
    Ints,
    anchor_mask,
    family_index,
    logit,
    min_max,
    opposites,
    rate_errors,
    score_range,
    sigmoid,
)

ANCHOR_WEIGHT = 3.0
_MIDDLE = (0.2, 0.8)


class Mean(Combiner):
    """Mean of min-max normalised scores; abstentions are left out; 0.5 where all abstain.

    Declared families weigh as much as one verifier each; an anchor weighs three times. One that was not asked
    counts with its usual score, so that leaving out a strict verifier raises nothing. One that gives one score or
    abstains counts as 1 where that score is above 0.5, else as 0.
    """

    name: ClassVar[str] = "mean"

    def _fit(self, scores: Floats, groups: Ints | None, labels: Floats | None, asked: Bools) -> dict[str, NDArray[Any]]:
        m = scores.shape[1]
        family = family_index(self.families, m)
        weight = np.ones(m) if family is None else 1.0 / np.bincount(family)[family]
        weight = np.where(anchor_mask(self.anchors, m), ANCHOR_WEIGHT * weight, weight)
        # A verifier that gives one score or abstains has no range; its silence stands for the other end of it.
        low, high = score_range(np.where(np.isnan(scores) & asked, opposites(scores, asked), scores))
        fitted = {"low": low, "high": high, "weight": weight}
        fitted["effective_number"] = np.array(weight.sum() ** 2 / (weight**2).sum())
        read = self._read(scores, low, high)
        fitted["class_balance"] = np.array(_weighted_mean(read, weight).mean())
        spoken = ~np.isnan(read)
        fitted["level"] = np.where(spoken, read, 0.0).sum(axis=0) / np.maximum(spoken.sum(axis=0), 1)
        fitted["level"] = np.where(spoken.any(axis=0), fitted["level"], float(fitted["class_balance"]))
        return fitted

    def _predict(self, scores: Floats, groups: Ints | None, asked: Bools) -> Floats:
        fitted = self._parameters()
        read = self._read(scores, fitted["low"], fitted["high"])
        return _weighted_mean(np.where(asked, read, fitted["level"]), fitted["weight"])

    def _read(self, scores: Floats, low: Floats, high: Floats) -> Floats:
        return min_max(scores, low, high)


class Majority(Mean):
    """Share of verifiers whose min-max normalised score is at least one half; abstentions are left out."""

    name: ClassVar[str] = "majority"

    def _read(self, scores: Floats, low: Floats, high: Floats) -> Floats:
        scaled = min_max(scores, low, high)
        votes = np.where(np.isnan(scaled), np.nan, (scaled >= 0.5).astype(np.float64))
        return np.where((high > low) | np.isnan(scores), votes, 0.5)


def _weighted_mean(values: Floats, weight: Floats) -> Floats:
    present = ~np.isnan(values)
    mass = present @ weight
    return np.where(mass > 0, np.where(present, values, 0.0) @ weight / np.where(mass > 0, mass, 1.0), 0.5)


class Logistic(Combiner):
    """Ridge logistic regression on min-max scores and abstention flags: scikit-learn's, C = 1."""

    name: ClassVar[str] = "logistic"
    fills_silence: ClassVar[bool] = True

    def _fit(self, scores: Floats, groups: Ints | None, labels: Floats | None, asked: Bools) -> dict[str, NDArray[Any]]:
        known = np.zeros(len(scores), bool) if labels is None else ~np.isnan(labels)
        if labels is None or len(np.unique(labels[known])) < 2:
            raise ValueError(
                f"'logistic' learns from labels and got {int(known.sum())}, not both classes; "
                "send labels=[n] with some 0 and some 1, or take the 'default' combiner, which needs none"
            )
        from sklearn.linear_model import LogisticRegression

        low, high = score_range(scores)
        m, used = scores.shape[1], np.ones(2 * scores.shape[1], bool)
        while True:  # a one-class verifier with a negative weight is left out
            model = LogisticRegression(solver="newton-cholesky", tol=1e-9).fit(
                _features(scores[known], low, high) * used, labels[known]
            )
            beta = np.append(model.coef_[0] * used, model.intercept_)
            wrong_way = self._upright & (beta[:m] < 0)
            if not wrong_way.any():
                break
            used[:m] &= ~wrong_way
        fitted = {"low": low, "high": high, "beta": beta, "weight": np.abs(beta[:m])}
        fitted["class_balance"] = np.array(sigmoid(_features(scores, low, high) @ beta[:-1] + beta[-1]).mean())
        return fitted

    def _predict(self, scores: Floats, groups: Ints | None, asked: Bools) -> Floats:
        fitted = self._parameters()
        *weights, intercept = fitted["beta"]
        return sigmoid(_features(scores, fitted["low"], fitted["high"]) @ weights + intercept)


def _features(scores: Floats, low: Floats, high: Floats) -> Floats:
    absent = np.isnan(scores)
    scaled = np.where(absent, 0.5, min_max(scores, low, high)) - 0.5
    return np.hstack([scaled, absent.astype(np.float64)])


class DawidSkene(Combiner):
    """Two-coin Dawid-Skene (1979) by EM from the majority vote; abstentions are ignored.

    Two-valued verifiers vote as they are, others at Otsu's cut. A prior of two right and one wrong answer per
    verifier and class keeps the labels from swapping. Labelled rows keep their label during EM.
    """

    name: ClassVar[str] = "dawid-skene"
    fills_silence: ClassVar[bool] = True

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
            # M-step, Dawid and Skene 1979, eqs. 2.3 and 2.4, with the prior answers added; then the E-step, eq. 2.5.
            pi = float(np.clip(q.mean(), 0.01, 0.99))
            tpr = (yes.T @ q + 2.0) / ((yes + no).T @ q + 3.0)
            fpr = (yes.T @ (1 - q) + 1.0) / ((yes + no).T @ (1 - q) + 3.0)
            pooled = (yes.sum(axis=0) + 3.0) / ((yes + no).sum(axis=0) + 6.0)
            wrong_way = self._upright & (tpr < fpr)
            tpr, fpr = np.where(wrong_way, pooled, tpr), np.where(wrong_way, pooled, fpr)
            q = naive_bayes(yes, no, tpr, fpr, pi)
            if np.abs(q - before)[~known].max(initial=0.0) < 1e-6:
                break
        low, high = score_range(scores)
        settled = float((high > low).sum() > 1 or known.any())  # no other verifier says anything of a lone one
        error = rate_errors(np.stack([fpr, tpr]), q, ~np.isnan(scores), settled)
        rates = {"tpr": tpr, "fpr": fpr, "tpr_error": error[1], "fpr_error": error[0]}
        return {"cuts": cuts, **rates, "class_balance": np.array(pi)}

    def _predict(self, scores: Floats, groups: Ints | None, asked: Bools) -> Floats:
        fitted = self._parameters()
        yes, no = _votes(scores, fitted["cuts"])
        return naive_bayes(yes, no, fitted["tpr"], fitted["fpr"], float(fitted["class_balance"]))


def naive_bayes(yes: Floats, no: Floats, tpr: Floats, fpr: Floats, pi: float) -> Floats:
    """P(Y=1 | votes) [n] under conditional independence; rates are kept 1e-3 away from 0 and 1."""
    tpr, fpr = np.clip(tpr, 1e-3, 1 - 1e-3), np.clip(fpr, 1e-3, 1 - 1e-3)
    # logit P(Y=1|S) = logit pi + sum of S log(TPR/FPR) + (1 - S) log((1 - TPR)/(1 - FPR)), as in arXiv 2506.18203.
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
    # Otsu 1979: the cut of greatest variance between the two sides, w0 w1 (mu0 - mu1)^2.
    gap = (mean * below[:-1] - moment[:-1] * total) ** 2
    between = np.where(inner, gap / np.maximum(below[:-1] * (total - below[:-1]), 1), -1.0)
    return float(edges[1 + int(np.argmax(between))])


def _votes(scores: Floats, cuts: Floats) -> tuple[Floats, Floats]:
    present = ~np.isnan(scores)
    above = scores > cuts
    return (present & above).astype(np.float64), (present & ~above).astype(np.float64)


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
    fills_silence: ClassVar[bool] = True

    def _fit(self, scores: Floats, groups: Ints | None, labels: Floats | None, asked: Bools) -> dict[str, NDArray[Any]]:
        low, high = score_range(scores)
        graded = np.array([len(np.unique(column[~np.isnan(column)])) > 2 for column in scores.T])
        unit = np.nan_to_num(min_max(scores, low, high), nan=0.0)
        threshold = _threshold(unit, graded, labels)
        votes = _binarise(unit, graded, threshold)
        known = None if labels is None else labels[~np.isnan(labels)]
        pi = class_balance_from_moments(votes) if known is None else (known.sum() + 1.0) / (len(known) + 2.0)
        rate = votes.mean(axis=0)
        kept = _filter(rate, pi, self._upright)
        difference = np.zeros(len(rate))
        difference[kept] = match_second_moments(votes[:, kept], pi)
        difference = np.where(self._upright, np.maximum(difference, 0.0), difference)
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
            rest = d @ d - d[k] ** 2  # C_ij = pi (1 - pi) d_i d_j off the diagonal: least squares in d_k alone
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


def _filter(rate: Floats, pi: float, one_class: Bools) -> Bools:
    """Which verifiers are kept, bool [m]; the yes-rate of a one-class verifier says how often it speaks."""
    everyone = (rate > 0) & (rate < 1)
    if not _MIDDLE[0] <= pi <= _MIDDLE[1]:
        return everyone
    kept = everyone & (((rate >= _MIDDLE[0]) & (rate <= _MIDDLE[1])) | one_class)
    return kept if kept.sum() >= 3 else everyone
