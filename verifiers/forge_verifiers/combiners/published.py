"""Baseline combiners as published: mean, majority, logistic regression, Dawid-Skene, Weaver."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from forge_verifiers.combiners.base import (
    Bools,
    Combiner,
    Floats,
    Ints,
    Parameters,
    abstention_values,
    anchor_mask,
    family_index,
    logit,
    min_max,
    rate_errors,
    score_range,
    sigmoid,
)

ANCHOR_WEIGHT = 3.0
_MIDDLE = (0.2, 0.8)


class Mean(Combiner):
    """Mean of min-max normalized scores without abstentions. 0.5 where all verifiers abstain.

    A declared family weighs as much as one verifier, an anchor three times as much. A verifier that was not queried
    counts with its mean score, so that skipping a strict verifier does not raise the result. A verifier that gives one
    score or abstains counts as 1 if that score is above 0.5, else as 0.
    """

    name: ClassVar[str] = "mean"

    def _fit(self, scores: Floats, groups: Ints | None, labels: Floats | None, queried: Bools) -> Parameters:
        m = scores.shape[1]
        family = family_index(self.families, m)
        weight = np.ones(m) if family is None else 1.0 / np.bincount(family)[family]
        weight = np.where(anchor_mask(self.anchors, m), ANCHOR_WEIGHT * weight, weight)
        # A verifier that gives one score or abstains has no range: its abstention stands for the other end.
        low, high = score_range(np.where(np.isnan(scores) & queried, abstention_values(scores, queried), scores))
        fitted = {"low": low, "high": high, "weight": weight}
        fitted["effective_number"] = np.array(weight.sum() ** 2 / (weight**2).sum())
        scaled = self._scaled(scores, low, high)
        fitted["class_balance"] = np.array(_weighted_mean(scaled, weight).mean())
        present = ~np.isnan(scaled)
        fitted["level"] = np.where(present, scaled, 0.0).sum(axis=0) / np.maximum(present.sum(axis=0), 1)
        fitted["level"] = np.where(present.any(axis=0), fitted["level"], float(fitted["class_balance"]))
        return fitted

    def _predict(self, scores: Floats, groups: Ints | None, queried: Bools) -> Floats:
        fitted = self._parameters()
        scaled = self._scaled(scores, fitted["low"], fitted["high"])
        return _weighted_mean(np.where(queried, scaled, fitted["level"]), fitted["weight"])

    def _scaled(self, scores: Floats, low: Floats, high: Floats) -> Floats:
        return min_max(scores, low, high)


class Majority(Mean):
    """Fraction of verifiers with a min-max normalized score of at least 0.5, without abstentions."""

    name: ClassVar[str] = "majority"

    def _scaled(self, scores: Floats, low: Floats, high: Floats) -> Floats:
        scaled = min_max(scores, low, high)
        votes = np.where(np.isnan(scaled), np.nan, (scaled >= 0.5).astype(np.float64))
        return np.where((high > low) | np.isnan(scores), votes, 0.5)


def _weighted_mean(values: Floats, weight: Floats) -> Floats:
    present = ~np.isnan(values)
    mass = present @ weight
    return np.where(mass > 0, np.where(present, values, 0.0) @ weight / np.where(mass > 0, mass, 1.0), 0.5)


class Logistic(Combiner):
    """Ridge logistic regression of scikit-learn (C = 1) on min-max scores and abstention flags. Needs labels."""

    name: ClassVar[str] = "logistic"
    fills_abstentions: ClassVar[bool] = True

    def _fit(self, scores: Floats, groups: Ints | None, labels: Floats | None, queried: Bools) -> Parameters:
        labeled = np.zeros(len(scores), bool) if labels is None else ~np.isnan(labels)
        if labels is None or len(np.unique(labels[labeled])) < 2:
            raise ValueError(
                f"'logistic' needs labels of both classes and got {int(labeled.sum())} labels. "
                "Pass labels=[n] with some 0 and some 1, or use the 'default' combiner, which needs none"
            )
        from sklearn.linear_model import LogisticRegression

        low, high = score_range(scores)
        m, used = scores.shape[1], np.ones(2 * scores.shape[1], bool)
        while True:  # drop one-score verifiers with a negative weight
            model = LogisticRegression(solver="newton-cholesky", tol=1e-9).fit(
                _features(scores[labeled], low, high) * used, labels[labeled]
            )
            beta = np.append(model.coef_[0] * used, model.intercept_)
            wrong_way = self._monotone & (beta[:m] < 0)
            if not wrong_way.any():
                break
            used[:m] &= ~wrong_way
        fitted = {"low": low, "high": high, "beta": beta, "weight": np.abs(beta[:m])}
        fitted["class_balance"] = np.array(sigmoid(_features(scores, low, high) @ beta[:-1] + beta[-1]).mean())
        return fitted

    def _predict(self, scores: Floats, groups: Ints | None, queried: Bools) -> Floats:
        fitted = self._parameters()
        *weights, intercept = fitted["beta"]
        return sigmoid(_features(scores, fitted["low"], fitted["high"]) @ weights + intercept)


def _features(scores: Floats, low: Floats, high: Floats) -> Floats:
    absent = np.isnan(scores)
    scaled = np.where(absent, 0.5, min_max(scores, low, high)) - 0.5
    return np.hstack([scaled, absent.astype(np.float64)])


class DawidSkene(Combiner):
    """Two-coin Dawid-Skene (1979) by EM from the majority vote. Abstentions are ignored.

    Verifiers with two values vote directly, and others at Otsu's threshold. A prior of two right answers and one wrong
    answer per verifier and class prevents label switching. Labeled rows keep their label during EM.
    """

    name: ClassVar[str] = "dawid-skene"
    fills_abstentions: ClassVar[bool] = True

    def _fit(self, scores: Floats, groups: Ints | None, labels: Floats | None, queried: Bools) -> Parameters:
        cuts = np.array([vote_cut(column[~np.isnan(column)]) for column in scores.T])
        yes, no = _votes(scores, cuts)
        votes = yes + no
        count = votes.sum(axis=1)
        q = np.where(count > 0, yes.sum(axis=1) / np.maximum(count, 1), 0.5)
        pooled = (yes.sum(axis=0) + 3.0) / (votes.sum(axis=0) + 6.0)
        labeled = np.zeros(len(scores), bool) if labels is None else ~np.isnan(labels)
        tpr, fpr, pi = np.full(len(cuts), 0.7), np.full(len(cuts), 0.3), 0.5
        for _ in range(200):
            if labels is not None:
                q = np.where(labeled, labels, q)
            before = q
            # M-step, Dawid and Skene 1979, eqs. 2.3 and 2.4, with the prior answers added; then the E-step, eq. 2.5.
            pi = min(max(float(q.mean()), 0.01), 0.99)
            tpr = (yes.T @ q + 2.0) / (votes.T @ q + 3.0)
            fpr = (yes.T @ (1 - q) + 1.0) / (votes.T @ (1 - q) + 3.0)
            wrong_way = self._monotone & (tpr < fpr)
            tpr, fpr = np.where(wrong_way, pooled, tpr), np.where(wrong_way, pooled, fpr)
            q = naive_bayes(yes, no, tpr, fpr, pi)
            if np.abs(q - before)[~labeled].max(initial=0.0) < 1e-6:
                break
        low, high = score_range(scores)
        learned = float((high > low).sum() > 1 or labeled.any())  # one verifier alone cannot be estimated
        error = rate_errors(np.stack([fpr, tpr]), q, ~np.isnan(scores), learned)
        rates = {"tpr": tpr, "fpr": fpr, "tpr_error": error[1], "fpr_error": error[0]}
        return {"cuts": cuts, **rates, "class_balance": np.array(pi)}

    def _predict(self, scores: Floats, groups: Ints | None, queried: Bools) -> Floats:
        fitted = self._parameters()
        yes, no = _votes(scores, fitted["cuts"])
        return naive_bayes(yes, no, fitted["tpr"], fitted["fpr"], float(fitted["class_balance"]))


def naive_bayes(yes: Floats, no: Floats, tpr: Floats, fpr: Floats, pi: float) -> Floats:
    """P(Y=1 | votes) [n] under conditional independence. Rates are clipped to [1e-3, 1 - 1e-3]."""
    tpr, fpr = np.clip(tpr, 1e-3, 1 - 1e-3), np.clip(fpr, 1e-3, 1 - 1e-3)
    # logit P(Y=1|S) = logit pi + sum of S log(TPR/FPR) + (1 - S) log((1 - TPR)/(1 - FPR)), as in arXiv 2506.18203.
    return sigmoid(logit(pi) + yes @ np.log(tpr / fpr) + no @ np.log((1 - tpr) / (1 - fpr)))


def vote_cut(values: Floats) -> float:
    """Threshold above which scores are yes votes: between two values, or Otsu's threshold for more.

    For a single value the threshold is 0.5. Scores are winsorized at 2 and 98 %, so that an outlier has no effect.
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
    centers = (edges[:-1] + edges[1:]) / 2
    below, moment = np.cumsum(counts), np.cumsum(counts * centers)
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

    1. Min-max per verifier. NaN becomes 0 ("incorrect"), as in the authors' code.
    2. One global threshold for verifiers with more than two values: the most accurate on the labels, else 0.5.
    3. Class balance from the labels; without labels from third moments (Jaffe, Nadler and Kluger 2015).
    4. If it lies in [0.2, 0.8], verifiers with a yes-rate outside are dropped, as long as three remain.
    5. Minimizes sum over i < j of (Pr(S_i, S_j) - sum over y of pi_y Pr(S_i|y) Pr(S_j|y))^2. With the yes-rates p_i
       matched on the diagonal, all four cells of a pair miss by C_ij - pi (1 - pi) d_i d_j, d = TPR - FPR, so
       alternating least squares on d replaces gradient descent; TPR = p + (1 - pi) d, FPR = p - pi d.
    6. logit P(Y=1|S) = logit pi + sum of S log(TPR/FPR) + (1 - S) log((1 - TPR)/(1 - FPR)).

    Differences: a closed-form solver, and no extra verifier for the group's majority answer, because combiners do not
    receive answers (add it as a column).
    """

    name: ClassVar[str] = "weaver"
    fills_abstentions: ClassVar[bool] = True

    def _fit(self, scores: Floats, groups: Ints | None, labels: Floats | None, queried: Bools) -> Parameters:
        low, high = score_range(scores)
        graded = np.array([len(np.unique(column[~np.isnan(column)])) > 2 for column in scores.T])
        unit = np.nan_to_num(min_max(scores, low, high), nan=0.0)
        threshold = _threshold(unit, graded, labels)
        votes = _binarize(unit, graded, threshold)
        labels = None if labels is None else labels[~np.isnan(labels)]
        pi = class_balance_from_moments(votes) if labels is None else (labels.sum() + 1.0) / (len(labels) + 2.0)
        rate = votes.mean(axis=0)
        used = _filter(rate, pi, self._monotone)
        difference = np.zeros(len(rate))
        difference[used] = match_second_moments(votes[:, used], pi)
        difference = np.where(self._monotone, np.maximum(difference, 0.0), difference)
        tpr = np.clip(rate + (1 - pi) * difference, 0.01, 0.99)
        fpr = np.clip(rate - pi * difference, 0.01, 0.99)
        fitted = {"low": low, "high": high, "graded": graded, "threshold": np.array(threshold)}
        fitted |= {"tpr": tpr, "fpr": fpr, "weight": used.astype(np.float64), "class_balance": np.array(pi)}
        return fitted

    def _predict(self, scores: Floats, groups: Ints | None, queried: Bools) -> Floats:
        fitted = self._parameters()
        unit = np.nan_to_num(min_max(scores, fitted["low"], fitted["high"]), nan=0.0)
        votes = _binarize(unit, fitted["graded"], float(fitted["threshold"]))
        used = fitted["weight"] > 0
        votes = votes[:, used]
        return naive_bayes(votes, 1.0 - votes, fitted["tpr"][used], fitted["fpr"][used], float(fitted["class_balance"]))


def match_second_moments(votes: Floats, pi: float) -> Floats:
    """Differences d = TPR - FPR [m] that minimize the pairwise mismatch of second moments, given `pi`.

    Source: arXiv 2506.18203. The sign is chosen so that the verifiers are better than chance on average. Fewer than
    three verifiers do not determine a solution. Equal d is then assumed.
    """
    covariance = np.atleast_2d(np.cov(votes.T, bias=True)) / (pi * (1 - pi))
    m = len(covariance)
    if m < 3:
        shared = float(np.sqrt(max(covariance[0, -1], 0.0))) if m == 2 else 0.5
        return np.full(m, shared)
    off = covariance - np.diag(np.diag(covariance))
    values, vectors = np.linalg.eigh(off)
    d = vectors[:, -1] * np.sqrt(max(values[-1], 1e-12))
    for _ in range(500):
        before = d.copy()
        for k in range(m):
            rest = d @ d - d[k] ** 2  # C_ij = pi (1 - pi) d_i d_j off the diagonal: least squares in d_k alone
            d[k] = off[k] @ d / max(rest, 1e-12)
        if np.abs(d - before).max() < 1e-10:
            break
    return np.asarray(-d if d.sum() < 0 else d)


def class_balance_from_moments(votes: Floats) -> float:
    """P(Y = 1) from third moments of binary votes [n, m]. 0.5 with fewer than three verifiers that vary.

    Over distinct verifiers E[e2] = pi (1 - pi) e2(d) and E[e3] = pi (1 - pi)(1 - 2 pi) e3(d), with e2 and e3 the
    elementary symmetric polynomials of the centered votes and of d (after Jaffe, Nadler and Kluger 2015). Their ratio
    gives (1 - 2 pi) / sqrt(pi (1 - pi)). Shrunk towards 0.5 with a weight of 100 rows.
    """
    parts = votes[:, votes.std(axis=0) > 1e-6] - votes.mean(axis=0)[votes.std(axis=0) > 1e-6]
    n, m = parts.shape
    if m < 3:
        return 0.5
    moments = _second_and_third(parts).mean(axis=1)
    model = _second_and_third(match_second_moments(parts, 0.5)[None])[:, 0]
    if moments[0] <= 1e-9 or min(model) <= 1e-12:
        return 0.5
    skew = moments[1] / moments[0] ** 1.5 * model[0] ** 1.5 / model[1]
    pi = float(np.clip((1.0 - skew / np.sqrt(4.0 + skew**2)) / 2.0, 0.05, 0.95))
    return float(0.5 + (pi - 0.5) * n / (n + 100.0))


def _second_and_third(parts: Floats) -> Floats:
    """Elementary symmetric polynomials e2 and e3, [2, n], of the rows of `parts` [n, m], by Newton's identities."""
    p1, p2, p3 = ((parts**k).sum(axis=1) for k in (1, 2, 3))
    return np.stack([(p1**2 - p2) / 2, (p1**3 - 3 * p1 * p2 + 2 * p3) / 6])


def _threshold(unit: Floats, graded: NDArray[np.bool_], labels: Floats | None) -> float:
    if labels is None or not graded.any():
        return 0.5
    labeled = ~np.isnan(labels)
    grid = np.linspace(0.05, 0.95, 19)
    accuracy = [float(((unit[labeled][:, graded] >= t) == (labels[labeled, None] == 1)).mean()) for t in grid]
    best = np.flatnonzero(np.array(accuracy) == max(accuracy))
    return float(grid[best[np.argmin(np.abs(grid[best] - 0.5))]])


def _binarize(unit: Floats, graded: NDArray[np.bool_], threshold: float) -> Floats:
    return np.where(graded, unit >= threshold, unit > 0.5).astype(np.float64)


def _filter(rate: Floats, pi: float, one_class: Bools) -> Bools:
    """Mask [m] of the verifiers to use. The yes-rate of a one-score verifier is its coverage and is not tested."""
    varying = (rate > 0) & (rate < 1)
    if not _MIDDLE[0] <= pi <= _MIDDLE[1]:
        return varying
    selected = varying & (((rate >= _MIDDLE[0]) & (rate <= _MIDDLE[1])) | one_class)
    return selected if selected.sum() >= 3 else varying
