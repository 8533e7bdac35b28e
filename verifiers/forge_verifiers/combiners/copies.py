"""Hypotheses about which verifiers are copies of one another, scored by the correlations of the verifiers.

Verifiers that agree may all be right, or they may be copies of one mistake. Pairwise correlations often fit both
explanations. This module therefore lists several hypotheses and scores each one. A hypothesis divides the verifiers
into voices: copies share one voice, and each independent verifier has its own. If the voices follow two unrelated
criteria, the scores cannot tell which one is correctness, so two hypotheses with equal scores are added.
"""

from __future__ import annotations

from math import comb
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forge_verifiers.combiners.base import Bools, Floats, Ints, correlations

MIN_CORRELATIONS = (0.9, 0.8, 0.7, 0.6, 0.5)
"""Average correlations at which groups of copies are cut from the dendrogram."""
_LOADING, _SPREAD = 0.45, 0.4
"""Prior mean and spread of the loading of an independent verifier. A loading of 0.45 is an accuracy of 72 %."""
_COPY_SHAPE, _GROUP_COST, _COPY_COST = 4.0, 2.5, 0.5
"""A copy's loading on its group follows Beta(4, 1). A group of copies costs 2.5 nats, each copy in it another 0.5."""
_WORST_FIT = 30.0
"""Maximum penalty in nats for a bad fit, because real scores fit no model exactly, however many rows."""
_ANCHOR, _ANCHOR_SPREAD = 0.8, 0.2
"""Prior mean and spread of the loading of an anchor."""
_UNRELATED, _LEAST_GAIN = 0.5, -3.0
"""Two groups of voices follow unrelated criteria up to the first correlation of these criteria. Such groups are
considered if they are at least exp(-3) times as probable as one criterion."""
_ENOUGH = 1000
"""Number of rows from which a second criterion must outweigh the whole number of possible groups. Fewer rows hide a
small group of correct verifiers, and the mean is the safer answer."""


class Hypothesis(NamedTuple):
    """A division of the verifiers into voices."""

    voice: Ints
    """[m] number of each verifier's voice, from 0, or -1 for a verifier that never varies."""
    loading: Floats
    """[v] correlation of each voice with the common factor, which is assumed to be correctness."""
    score: float
    """Log-probability up to a constant."""

    @property
    def num_copies(self) -> int:
        """Number of verifiers minus number of voices."""
        return int((self.voice >= 0).sum()) - len(self.loading)


class _Criteria(NamedTuple):
    """Two groups of voices that follow one criterion each."""

    group: Bools  # [v] members of the first group
    loading: Floats  # [v] correlation of each voice with the criterion of its group
    shared: float  # correlation of the criteria
    model: Floats  # [v, v] correlations of the voices under these parameters
    cost: float  # of the choice of these groups, in nats
    gain: float  # log-likelihood gained over one criterion, less this cost


def hypotheses(x: Floats, observed: Floats, family: Ints, expected: Floats, spread: Floats) -> list[Hypothesis]:
    """Possible divisions into voices, most probable first, always with the one without undeclared copies.

    `x` [m, n] are standardized ranks, 0 where `observed` [m, n] is 0. A declared `family` [m] always shares one voice.
    `expected` and `spread` [m] are those of `expected_loadings`.
    """
    varying = np.flatnonzero((x * x).sum(axis=1) > 0)
    if not len(varying):
        return [Hypothesis(np.full(len(x), -1), np.zeros(0), 0.0)]
    correlation, rows = _correlations(x[varying], observed[varying])
    declared = np.unique(family[varying], return_inverse=True)[1]
    expectation = (expected[varying], spread[varying])
    results = [_scored(voice, declared, correlation, rows, expectation) for voice in _divisions(correlation, declared)]
    best = max(results, key=lambda each: each.score)
    results += _readings(best, x[varying], observed[varying], expectation)
    whole = np.full((len(results), len(x)), -1)
    whole[:, varying] = [each.voice for each in results]
    results = [each._replace(voice=voice) for each, voice in zip(results, whole, strict=True)]
    return sorted(results, key=lambda each: -each.score)


def expected_loadings(anchors: Bools, prior_loading: Floats, prior_rows: Floats) -> tuple[Floats, Floats]:
    """Expected loading of each verifier and its standard deviation, both [m].

    `prior_loading` [m] is TPR minus FPR of a declared prior, and `prior_rows` [m] its strength, 0 without a prior.
    """
    trust = prior_rows / (prior_rows + 30.0)
    expected = np.where(anchors, _ANCHOR, (1 - trust) * _LOADING + trust * prior_loading)
    return expected, np.where(anchors, _ANCHOR_SPREAD, _SPREAD * np.sqrt(1 - trust) + 0.02)


def one_factor(correlation: Floats) -> Floats:
    """Loadings [v] whose products fit the correlations off the diagonal, by principal axis factoring.

    The sign is the one under which the loadings sum to more than 0. One voice gets 0.7 and two voices the square root
    of their correlation, because fewer than three voices determine no loadings.
    """
    v = len(correlation)
    if v == 1:
        return np.array([0.7])
    if v == 2:
        r = float(correlation[0, 1])
        return np.asarray(np.sqrt(abs(r)) * np.array([1.0, 1.0 if r >= 0 else -1.0]))
    reduced, loading = correlation.copy(), np.zeros(v)
    communality = 0.7 * np.abs(correlation - np.eye(v)).max(axis=1)
    for _ in range(40):
        np.fill_diagonal(reduced, communality)
        values, vectors = np.linalg.eigh(reduced)
        loading = np.clip(vectors[:, -1] * np.sqrt(max(values[-1], 1e-9)), -0.99, 0.99)
        before, communality = communality, loading**2
        if np.abs(communality - before).max() < 1e-3:
            break
    return np.asarray(-loading if loading.sum() < 0 else loading)


def _divisions(correlation: Floats, declared: Ints) -> list[Ints]:
    """Candidate divisions [m]: the declared families, and groups from a dendrogram of the correlations.

    A cut of the dendrogram gives groups of verifiers that agree. Candidates are that all groups are copies, and that
    all but one are: the members of that group then agree because they are right.
    """
    from scipy.cluster.hierarchy import fcluster

    divisions = {tuple(declared.tolist()): declared}
    size = int(declared.max()) + 1
    if size < 2:
        return [declared]
    members = np.eye(size)[declared]
    tree = _dendrogram(members.T @ correlation @ members / np.outer(members.sum(axis=0), members.sum(axis=0)))
    for threshold in MIN_CORRELATIONS:
        label = fcluster(tree, 1.0 - threshold, "distance")
        groups = [np.flatnonzero(label == k) for k in np.unique(label) if (label == k).sum() > 1]
        for independent in (None, *range(len(groups))):
            voice = np.arange(size)
            for k, group in enumerate(groups):
                if k != independent:
                    voice[group] = group[0]
            voice = np.unique(voice, return_inverse=True)[1][declared]
            divisions.setdefault(tuple(voice.tolist()), voice)
    return list(divisions.values())


def _dendrogram(similarity: Floats) -> Floats:
    """Average linkage [v - 1, 4] of scipy."""
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import squareform

    distance = np.clip(1.0 - (similarity + similarity.T) / 2, 0.0, 2.0)
    np.fill_diagonal(distance, 0.0)
    return np.asarray(linkage(squareform(distance, checks=False), "average"))


def _readings(best: Hypothesis, x: Floats, observed: Floats, expectation: tuple[Floats, Floats]) -> list[Hypothesis]:
    """Two readings of the best hypothesis if its voices follow two unrelated criteria, otherwise none.

    The correlations do not show which criterion is correctness: the two readings are the same model with two names.
    Both therefore have the same score, except for what priors and anchors tell. In a reading, the members of one group
    are independent, and the other group shares a voice.
    """
    v = len(best.loading)
    criteria = _two_criteria(*_between(best.voice, *_correlations(x, observed)))
    if criteria is None or criteria.gain < _LEAST_GAIN:
        return []
    # Verifiers that change during the rows also look like a second criterion. The gain must remain if one criterion
    # may have other loadings in each half of the rows, at a cost of one nat per loading.
    drift = v - criteria.cost
    for half in (slice(x.shape[1] // 2), slice(x.shape[1] // 2, None)):
        correlation, rows = _between(best.voice, *_correlations(x[:, half], observed[:, half]))
        loading = one_factor(correlation)
        drift += _chi_squared(correlation, rows, np.outer(loading, loading)) / 2
        drift -= _chi_squared(correlation, rows, criteria.model) / 2
    gain = min(criteria.gain, drift, _WORST_FIT)
    informed = expectation[1] < _SPREAD
    results = []
    for right in (criteria.group, ~criteria.group):
        voice = np.unique(np.where(right[best.voice], best.voice, v), return_inverse=True)[1]
        loading = np.where(right, 1.0, criteria.shared) * criteria.loading
        z = ((loading[best.voice] - expectation[0]) / expectation[1])[informed]
        score = best.score + gain - 0.5 * float(z @ z)
        results.append(Hypothesis(voice, np.append(criteria.loading[right], criteria.shared), score))
    return results if gain >= _LEAST_GAIN else []


def _two_criteria(correlation: Floats, rows: Floats) -> _Criteria | None:
    """The division of the voices into two groups, each with its own factor, that fits the correlations best."""
    if (v := len(correlation)) < 4:
        return None
    loading = one_factor(correlation)
    misfit = _chi_squared(correlation, rows, np.outer(loading, loading))
    best: _Criteria | None = None
    nodes = list(np.eye(v, dtype=bool))
    for first, second in _dendrogram(correlation)[:, :2].astype(int):
        group = nodes[first] | nodes[second]
        nodes.append(group)
        if group.sum() > v - 2:
            continue
        # Correlation of the two factors, assuming equal loadings within each group.
        inside = [correlation[np.ix_(k, k)][np.triu_indices(int(k.sum()), 1)].mean() for k in (group, ~group)]
        if min(inside) <= 0 or correlation[np.ix_(group, ~group)].mean() > _UNRELATED * np.sqrt(inside[0] * inside[1]):
            continue
        for part in (group, ~group):
            loading[part] = one_factor(correlation[np.ix_(part, part)])
        product, across = np.outer(loading, loading), np.triu(group[:, None] != group)
        shared = (correlation * product)[across].sum() / max(float((product**2)[across].sum()), 1e-9)
        shared = float(np.clip(shared, -1.0, 1.0))
        model = np.where(group[:, None] != group, shared, 1.0) * product
        cost = _ways(group) * min(1.0, float(rows.mean()) / _ENOUGH)
        gain = (misfit - _chi_squared(correlation, rows, model)) / 2 - cost
        if best is None or gain > best.gain:
            best = _Criteria(group, loading.copy(), shared, model, cost, gain)
    return best


def _ways(group: Bools) -> float:
    """Logarithm of the number of groups of this size: with more of them to choose from, more fit by chance."""
    return float(np.log(comb(len(group), int(group.sum()))))


def _correlations(x: Floats, observed: Floats) -> tuple[Floats, Floats]:
    """Correlations [m, m] between the verifiers, and the number of rows of each."""
    correlation = correlations(x, observed)
    np.fill_diagonal(correlation, 1.0)
    return correlation, observed @ observed.T


def _between(voice: Ints, correlation: Floats, rows: Floats) -> tuple[Floats, Floats]:
    """Correlations [v, v] between the voices, and the number of rows of each."""
    members = np.eye(int(voice.max()) + 1)[voice]
    covariance = members.T @ correlation @ members
    deviation = np.sqrt(np.maximum(np.diag(covariance), 1e-9))
    size = members.sum(axis=0)
    return covariance / np.outer(deviation, deviation), members.T @ rows @ members / np.outer(size, size)


def _chi_squared(correlation: Floats, rows: Floats, model: NDArray[np.floating]) -> float:
    """Misfit of modelled correlations [v, v] to those measured on as many rows [v, v]."""
    z = (correlation - model) * np.sqrt(np.maximum(rows - 3.0, 1.0)) / (1.0 - model**2)
    return float((z[np.triu_indices(len(z), 1)] ** 2).sum())


def _scored(
    voice: Ints, declared: Ints, correlation: Floats, rows: Floats, expectation: tuple[Floats, Floats]
) -> Hypothesis:
    """The hypothesis for a division [m], with its log-probability under `expectation`, from `expected_loadings`.

    The log-probability is the sum of three terms: the prior of the copies' loadings on their group, the prior of the
    voices' loadings on the common factor, and the fit of one common factor to the correlations between the voices.
    """
    v, score = int(voice.max()) + 1, 0.0
    for k in range(v):
        group = np.flatnonzero(voice == k)
        if len(np.unique(declared[group])) > 1:  # declared families have no prior cost
            inner = np.clip(one_factor(correlation[np.ix_(group, group)]), 0.05, 1.0)
            density = np.log(_COPY_SHAPE) + (_COPY_SHAPE - 1) * np.log(inner)
            score += float(density.sum()) - _GROUP_COST - _COPY_COST * (len(group) - 1)
    between, common = _between(voice, correlation, rows)
    loading = one_factor(between)
    mean, width = (np.bincount(voice, each) / np.bincount(voice) for each in expectation)
    upright, inverted = (float((-0.5 * ((s * loading - mean) / width) ** 2 - np.log(width)).sum()) for s in (1, -1))
    score += max(upright, inverted) - v * 0.5 * np.log(2 * np.pi) - _misfit(between, common, loading)
    if v == 2 and loading.min() < 0:  # the data cannot tell which of the two is inverted
        return Hypothesis(voice, np.zeros(2), score)
    return Hypothesis(voice, loading if upright >= inverted else -loading, score)


def _misfit(correlation: Floats, rows: Floats, loading: Floats) -> float:
    """Penalty in nats for a bad fit: half of the chi-squared statistic in excess of chance, at most `_WORST_FIT`."""
    v = len(loading)
    if v < 4:
        return 0.0
    degrees = v * (v - 3) / 2
    excess = _chi_squared(correlation, rows, np.outer(loading, loading)) - degrees - 2.0 * np.sqrt(2.0 * degrees)
    return float(np.clip(excess / 2.0, 0.0, _WORST_FIT))
