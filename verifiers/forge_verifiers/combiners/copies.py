"""Hypotheses about which verifiers are copies of one another, scored by the correlations of the verifiers.

Verifiers that agree may all be right, or they may be copies of one mistake. Pairwise correlations often fit both
explanations. This module therefore lists several hypotheses and scores each one. A hypothesis divides the verifiers
into voices: copies share one voice, and each independent verifier has its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

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
"""The same for anchors."""


class Hypothesis(NamedTuple):
    """One division of the verifiers into voices."""

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


def hypotheses(x: Floats, observed: Floats, family: Ints, expected: Floats, spread: Floats) -> list[Hypothesis]:
    """Possible divisions into voices, most probable first, always with the one without undeclared copies.

    `x` [m, n] are standardized ranks, 0 where `observed` [m, n] is 0. A declared `family` [m] always shares one voice.
    `expected` and `spread` [m] are those of `expected_loadings`.
    """
    varying = np.flatnonzero((x * x).sum(axis=1) > 0)
    if not len(varying):
        return [Hypothesis(np.full(len(x), -1), np.zeros(0), 0.0)]
    rows = observed[varying] @ observed[varying].T
    correlation = correlations(x[varying], observed[varying])
    np.fill_diagonal(correlation, 1.0)
    declared = np.unique(family[varying], return_inverse=True)[1]
    results = []
    for voice in _divisions(correlation, declared):
        hypothesis = _scored(voice, declared, correlation, rows, (expected[varying], spread[varying]))
        whole = np.full(len(x), -1)
        whole[varying] = hypothesis.voice
        results.append(hypothesis._replace(voice=whole))
    return sorted(results, key=lambda each: -each.score)


def expected_loadings(anchors: Bools, prior_loading: Floats, prior_rows: Floats) -> tuple[Floats, Floats]:
    """Expected loading of each verifier and its standard deviation, both [m].

    `prior_loading` [m] is TPR minus FPR of a declared prior, and `prior_rows` [m] its strength, 0 without a prior.
    """
    trust = prior_rows / (prior_rows + 30.0)
    expected = np.where(anchors, _ANCHOR, (1 - trust) * _LOADING + trust * prior_loading)
    return expected, np.where(anchors, _ANCHOR_SPREAD, _SPREAD * np.sqrt(1 - trust) + 0.02)


def one_factor(correlation: Floats, *, rounds: int = 40) -> Floats:
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
    for _ in range(rounds):
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
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    divisions = {tuple(declared.tolist()): declared}
    size = int(declared.max()) + 1
    if size < 2:
        return [declared]
    members = np.eye(size)[declared]
    similarity = members.T @ correlation @ members / np.outer(members.sum(axis=0), members.sum(axis=0))
    distance = np.clip(1.0 - (similarity + similarity.T) / 2, 0.0, 2.0)
    np.fill_diagonal(distance, 0.0)
    tree = linkage(squareform(distance, checks=False), "average")
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
    members = np.eye(v)[voice]
    covariance = members.T @ correlation @ members
    deviation = np.sqrt(np.maximum(np.diag(covariance), 1e-9))
    between = covariance / np.outer(deviation, deviation)
    size = members.sum(axis=0)
    loading = one_factor(between)
    common = members.T @ rows @ members / np.outer(size, size)
    mean, width = (members.T @ each / size for each in expectation)
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
    model = np.outer(loading, loading)
    z = (correlation - model) * np.sqrt(np.maximum(rows - 3.0, 1.0)) / (1.0 - model**2)
    degrees = v * (v - 3) / 2
    excess = float((z[np.triu_indices(v, 1)] ** 2).sum()) - degrees - 2.0 * np.sqrt(2.0 * degrees)
    return float(np.clip(excess / 2.0, 0.0, _WORST_FIT))
