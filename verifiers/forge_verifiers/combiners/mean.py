"""The two baselines that learn nothing but the scale of each verifier: mean and majority.

In: scores [n, m], NaN = abstained. Out: their mean, or the share of yes votes [n]. Waits for nothing.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from forge_verifiers.combiners.base import Bools, Combiner, Floats, Ints, anchor_mask, family_index

ANCHOR_WEIGHT = 3.0


def score_range(scores: Floats) -> tuple[Floats, Floats]:
    """Least and greatest score of each verifier, each [m]; 0 and 0 for one that always abstained."""
    low = np.where(np.isnan(scores), np.inf, scores).min(axis=0)
    high = np.where(np.isnan(scores), -np.inf, scores).max(axis=0)
    silent = np.isinf(low)
    return np.where(silent, 0.0, low), np.where(silent, 0.0, high)


def min_max(scores: Floats, low: Floats, high: Floats) -> Floats:
    """Scores [n, m] on [0, 1] by the fitted range; beyond it clipped, constant verifiers 0.5, NaN kept."""
    span = np.where(high > low, high - low, 1.0)
    scaled = np.clip((scores - low) / span, 0.0, 1.0)
    return np.where((high > low) | np.isnan(scores), scaled, 0.5)


class Mean(Combiner):
    """Mean of min-max normalised scores; abstentions are left out; 0.5 where all abstain.

    Declared families weigh as much as one verifier each; an anchor weighs three times. One that was not asked
    counts with its usual score, so that leaving out a strict verifier raises nothing.
    """

    name: ClassVar[str] = "mean"

    def _fit(self, scores: Floats, groups: Ints | None, labels: Floats | None, asked: Bools) -> dict[str, NDArray[Any]]:
        m = scores.shape[1]
        family = family_index(self.families, m)
        weight = np.ones(m) if family is None else 1.0 / np.bincount(family)[family]
        weight = np.where(anchor_mask(self.anchors, m), ANCHOR_WEIGHT * weight, weight)
        low, high = score_range(scores)
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
