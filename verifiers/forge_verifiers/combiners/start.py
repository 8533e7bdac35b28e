"""Where EM starts: which verifiers look accurate, inverted or copied, judged from correlations alone.

In: symbols int32 [m, n]. Out: a first posterior [n] and what it rests on. Waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forge_verifiers.combiners.base import Floats, Ints, sigmoid
from forge_verifiers.combiners.priors import Told
from forge_verifiers.combiners.structure import balance_from_sum, correlations, excess_dependence, truth_loadings
from forge_verifiers.combiners.symbols import MAX_BINS, abstained, count, mid_ranks

Bools = NDArray[np.bool_]

INVERTED = -0.02
"""Correlation with the truth below which a verifier starts out as inverted."""
_ANCHOR_LOADING = 0.6
_SLOPE = 2.0
_MIN_GROUPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What EM is given."""

    codes: NDArray[np.int32]
    """[m, n] symbols."""
    counts: Floats
    """[m, NUM_SYMBOLS] how often each occurs."""
    alive: Bools
    """[m] verifiers that vary."""
    groups: Ints | None
    labels: Floats | None
    family: Ints | None
    anchors: Bools
    told: Told | None = None
    """What is known of verifiers beforehand."""

    @property
    def num_sources(self) -> int:
        """Verifiers that vary, each declared family counted once."""
        return int(self.alive.sum()) if self.family is None else len(np.unique(self.family[self.alive]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where EM begins."""

    q: Floats
    """[n] P(Y = 1)."""
    loading: Floats
    """[m] correlation with the truth; negative for inverted verifiers."""
    kinship: Floats
    """[m, m] error correlation in [0, 1]."""
    rank: Floats
    """[m, NUM_SYMBOLS] standardised mid-ranks of the symbols."""


def gather(
    codes: NDArray[np.int32],
    *,
    groups: Ints | None,
    labels: Floats | None,
    family: Ints | None,
    anchors: Bools,
    told: Told | None,
) -> Data:
    """Counts the symbols. Groups are dropped where there are fewer than twenty, or where all are of size one."""
    counts = count(codes)
    usable = groups is not None and _MIN_GROUPS <= groups.max() + 1 < codes.shape[1]
    return Data(
        codes=codes,
        counts=counts,
        alive=(counts[:, :MAX_BINS] > 0).sum(axis=1) > 1,
        groups=groups if usable else None,
        labels=labels,
        family=family,
        anchors=anchors,
        told=told,
    )


def start_from(data: Data) -> Start:
    """Loadings and dependence from correlations, class balance from third moments, then a logistic of their sum."""
    n, alive = data.codes.shape[1], data.alive
    rank = mid_ranks(data.counts)
    x = rank.ravel()[data.codes].T
    correlation = correlations(x, ~abstained(data.codes).T) * np.outer(alive, alive)
    loading = truth_loadings(correlation, n, data.family)
    loading = np.where(data.anchors, np.maximum(np.abs(loading), _ANCHOR_LOADING), loading)
    loading = (loading if data.told is None else data.told.blended(loading)) * alive
    kinship = free_anchors(excess_dependence(correlation, loading, n, data.family), data.anchors)
    sign = np.where(loading < INVERTED, -1.0, 1.0)
    weight = sign * np.maximum(np.abs(loading), 0.02) / (1.0 - loading**2) / kinship.sum(axis=1) * alive
    if data.labels is not None:
        flip = _label_sign(x @ weight, data.labels)
        weight, loading = flip * weight, np.where(data.anchors, loading, flip * loading)
    parts = x * weight
    total = parts.sum(axis=1)
    spread = float(total.std())
    z = total / spread if spread > 1e-9 else np.zeros(n)
    return Start(
        q=_with_mean(z, balance_from_sum(parts, np.abs(loading * weight))), loading=loading, kinship=kinship, rank=rank
    )


def free_anchors(kinship: Floats, anchors: Bools) -> Floats:
    """Kinship in which anchors are nobody's kin: they are never discounted and discount nobody."""
    if not anchors.any():
        return kinship
    free = np.where(anchors[:, None] | anchors[None, :], 0.0, kinship)
    np.fill_diagonal(free, 1.0)
    return free


def _label_sign(score: Floats, labels: Floats) -> float:
    """-1 where labels contradict the start by more than two standard errors, else 1."""
    right, wrong = score[labels == 1], score[labels == 0]
    if min(len(right), len(wrong)) < 3:
        return 1.0
    error = np.sqrt(right.var() / len(right) + wrong.var() / len(wrong)) + 1e-9
    return -1.0 if right.mean() - wrong.mean() < -2.0 * error else 1.0


def _with_mean(z: Floats, pi: float) -> Floats:
    """Logistic of the standardised score, shifted so that its mean is `pi`."""
    low, high, middle = -12.0, 12.0, 0.0
    for _ in range(20):
        middle = (low + high) / 2
        if sigmoid(_SLOPE * z + middle).mean() < pi:
            low = middle
        else:
            high = middle
    return sigmoid(_SLOPE * z + middle)
