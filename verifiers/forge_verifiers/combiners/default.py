"""The default combiner: two latent classes behind graded symbols, checked by how well verifiers predict each other.

In: scores [n, m], NaN = abstained, and who was asked. Out: calibrated P(correct) [n], how sure it is, a report. Waits
for nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from forge_verifiers.combiners import latent
from forge_verifiers.combiners.base import (
    Bools,
    Combiner,
    Floats,
    Ints,
    anchor_mask,
    correlations,
    family_index,
    logit,
    sigmoid,
)
from forge_verifiers.combiners.dawid_skene import DawidSkene
from forge_verifiers.combiners.mean import ANCHOR_WEIGHT, min_max, score_range
from forge_verifiers.combiners.priors import Prior, told_rows

_LOG = logging.getLogger(__name__)
_CHUNK, _MIN_GROUPS, _PROMPT_ROUNDS = 16384, 20, 4
_START_SLOPE, _LEAST_SHARED = 3.0, 0.25
_BETTER, _SETTLING, _HALF_TRUST, _FEW = 10.0, 20.0, 30.0, 5.0


class Symbolic(Combiner):
    """Dawid and Skene's latent class over quantile symbols, hardened against how verifiers really fail.

    * Graded scores keep up to six bins each. Whether a verifier that was asked spoke or abstained is a source of its
      own; one that was not asked says nothing.
    * EM starts with one voice for every block of correlated verifiers. P(symbol | Y) of a source is counted with a
      posterior that leaves out its relatives, so that a block of copies cannot elect itself the truth; what relatives
      say counts once. Good verifiers agree because they are right, which looks like a block: a second start, Dawid
      and Skene's posterior, replaces the first where the sources then predict each other ten times better.
    * The share of correct responses varies by prompt; siblings inform each other's prior.
    * Dependence that no declared family explains leaves open which block is right: the mean, one voice a block, keeps
      a share of the posterior; all of it where fewer than three families are declared, or nothing predicts anything.
    * Priors count as rows. Labels are clamped, count four rows each, and together may turn the sign of the whole.
    * Probabilities are moderated by the uncertainty of the counts (MacKay 1992, probit approximation).

    A constant verifier counts for nothing; where all abstain the answer is the class balance. What each constant does
    is measured in docs/decisions/0007-default-combiner.md.
    """

    name: ClassVar[str] = "default"
    has_uncertainty: ClassVar[bool] = True
    takes_priors: ClassVar[bool] = True

    def __init__(
        self,
        families: Sequence[Hashable | None] | Mapping[int, Hashable] | None = None,
        anchors: Sequence[int] | None = None,
        priors: Mapping[int, Prior] | None = None,
    ) -> None:
        super().__init__(families, anchors)
        self.priors, self._said = dict(priors or {}), False

    def _fit(self, scores: Floats, groups: Ints | None, labels: Floats | None, asked: Bools) -> dict[str, NDArray[Any]]:
        m, edges = scores.shape[1], latent.quantile_edges(scores)
        truth = np.full(len(scores), np.nan) if labels is None else labels
        sources, data = self._data(scores, latent.encode(scores, asked, edges), groups, truth)
        simple = DawidSkene().fit(scores, labels=truth, asked=asked).predict_proba(scores, asked=asked)
        fit = self._best(data, simple)
        heard = sources[~data.silence]
        kinship = fit.kinship[: len(heard), : len(heard)]
        weight, tpr, fpr, voice = np.zeros(m), np.full(m, np.nan), np.full(m, np.nan), np.zeros(m)
        weight[heard] = 1.0 / kinship.sum(axis=1)
        fpr[heard], tpr[heard] = _telling_cut(fit.rates[:, : len(heard)])
        share = self._mean_share(data, fit, weight[heard])
        turned = (share < 1.0) & (data.x[: len(heard)] @ (fit.q - fit.q.mean()) < 0)
        side = np.where(turned, -1.0, 1.0)
        voice[heard] = side * weight[heard] * np.where(data.anchors[: len(heard)], ANCHOR_WEIGHT, 1.0)
        low, high = score_range(scores)
        centre = np.nan_to_num(np.nanmean(np.vstack([min_max(scores, low, high), np.full(m, 0.5)]), axis=0))
        mean = {"low": low, "high": high, "centre": centre, "voice": voice, "mean_share": np.array(share)}
        mean["mean_slope"] = np.array(_slope(data, kinship, side) / max(float(_mean(mean, scores).std()), 1e-3))
        learned = {"edges": edges, "sources": sources, "table": fit.table, "variance": fit.variance}
        learned |= {"kinship": fit.kinship, "prompts": np.array(fit.prompts), "weight": weight, "tpr": tpr, "fpr": fpr}
        numbers = {"class_balance": np.array(fit.prompts.mean), "effective_number": np.array(weight.sum())}
        return {**mean, **learned, **numbers}

    def _data(
        self, scores: Floats, codes: latent.Codes, groups: Ints | None, labels: Floats
    ) -> tuple[Ints, latent.Data]:
        """The sources [s] that vary, and what EM is given of them."""
        n, m = scores.shape
        told, family = told_rows(self.priors, scores, codes), family_index(self.families, m)
        family = np.arange(m) if family is None else family
        sources = np.flatnonzero((latent.count(codes) > 0).sum(axis=1) > 1)
        codes = _only(codes, sources)
        counts, silence = latent.count(codes), sources >= m
        return sources, latent.Data(
            codes=codes,
            counts=counts,
            heard=(codes % latent.NUM_SYMBOLS > 0).astype(np.float32),
            x=np.where(silence[:, None], 0.0, latent.mid_ranks(counts)).ravel()[codes],
            groups=groups if groups is not None and _MIN_GROUPS <= groups.max() + 1 < n else None,
            labels=labels,
            family=np.concatenate([family, family + m])[sources],
            anchors=np.tile(anchor_mask(self.anchors, m), 2)[sources] & ~silence,
            silence=silence,
            told=told[:, sources],
        )

    def _best(self, data: latent.Data, simple: Floats) -> latent.Fit:
        """EM from one voice a block, or from `simple` [n] where the sources then predict each other far better."""
        start = _one_voice_a_block(data, float(np.clip(simple.mean(), 0.01, 0.99)) if len(data.codes) else 0.5)
        known = ~np.isnan(data.labels)
        odds = (2 * data.labels[known] - 1) @ logit(np.clip(start[known], 0.05, 0.95))
        start = 1.0 - start if odds < -6.0 else start  # three labels at least that speak against the majority
        fit = latent.expectation_maximisation(data, start)
        most = np.log(2.0) * np.count_nonzero(~data.silence)  # a class is worth one bit of each source
        if data.anchors.any() or data.told.any() or _BETTER * fit.gain >= most:
            return fit
        rival = latent.expectation_maximisation(data, np.clip(simple, 0.02, 0.98))
        return rival if rival.gain > _BETTER * max(fit.gain, 0.0) else fit

    def _mean_share(self, data: latent.Data, fit: latent.Fit, weight: Floats) -> float:
        """Share in [0, 1] of the posterior that the mean keeps; labels and priors take it back as they grow."""
        num_labels = int((~np.isnan(data.labels)).sum())
        settled = _SETTLING / (_SETTLING + num_labels + sum(prior.strength for prior in self.priors.values()))
        num_sources, spread = len(np.unique(data.family[~data.silence])), fit.q.mean() * (1 - fit.q.mean())
        if num_sources < min(3, len(weight)):
            return settled
        if fit.gain <= 0 or fit.q.var() < 0.005 * spread:
            if len(weight) > 1 and not self._said:
                _LOG.warning("no verifier's scores predict another's; P(correct) is their mean until some do")
                self._said = True
            return settled
        lost = max(0.0, 1.0 - float(weight.sum()) / num_sources)
        sure = (1.0 - np.sqrt(lost) * min(1.0, _FEW / weight.sum())) * fit.gain**2 / (fit.gain**2 + fit.chance**2)
        return float(settled * (1.0 - sure))

    def _predict(self, scores: Floats, groups: Ints | None, asked: Bools) -> Floats:
        learned, mean, _ = self._posteriors(scores, groups, asked)
        share = float(self._parameters()["mean_share"])
        return np.asarray((1 - share) * learned + share * mean)

    def _uncertainty(self, scores: Floats, groups: Ints | None, asked: Bools) -> Floats:
        """From how few rows a symbol's rates were counted on, and from how far the learned and the mean differ."""
        learned, mean, variance = self._posteriors(scores, groups, asked)
        share = float(self._parameters()["mean_share"])
        counted = (1 - share) * learned * (1 - learned) * np.sqrt(variance)
        return np.asarray(np.sqrt(counted**2 + share * (1 - share) * (learned - mean) ** 2))

    def _posteriors(self, scores: Floats, groups: Ints | None, asked: Bools) -> tuple[Floats, Floats, Floats]:
        """P(correct) as learned, as the mean has it, and the variance of the learned log-odds, each [n]."""
        fitted = self._parameters()
        tables = np.stack([fitted["table"], fitted["variance"]]).astype(np.float32).reshape(2, -1)
        sums = np.zeros((2, len(scores)))
        for rows in (slice(low, low + _CHUNK) for low in range(0, len(scores), _CHUNK)):
            codes = _only(latent.encode(scores[rows], asked[rows], fitted["edges"]), fitted["sources"])
            counted = latent.discount(fitted["kinship"], (codes % latent.NUM_SYMBOLS > 0).astype(np.float32))
            sums[0, rows] = (counted * tables[0][codes]).sum(axis=0)
            sums[1, rows] = (counted**2 * tables[1][codes]).sum(axis=0)
        prompts = latent.Prompts(*fitted["prompts"].tolist())
        log_odds = sums[0] + logit(prompts.mean)
        for _ in range(_PROMPT_ROUNDS if groups is not None and np.isfinite(prompts.strength) else 0):
            log_odds, _ = prompts.log_odds(sums[0], sigmoid(log_odds), groups)
        moderated = sigmoid(log_odds / np.sqrt(1.0 + np.pi / 8.0 * sums[1]))
        mean = float(fitted["mean_slope"]) * _mean(fitted, scores)
        return moderated, sigmoid(mean + logit(prompts.mean)), sums[1]


def _only(codes: latent.Codes, sources: Ints) -> latent.Codes:
    """The symbols of some sources, numbered over these."""
    shift = (np.arange(len(sources)) - sources) * latent.NUM_SYMBOLS
    return np.asarray(codes[sources] + shift[:, None], np.int32)


def _mean(fitted: Mapping[str, NDArray[Any]], scores: Floats) -> Floats:
    """Mean [n] of min-max scores around each verifier's own: who is not heard moves nothing."""
    above = min_max(scores, fitted["low"], fitted["high"]) - fitted["centre"]
    heard = np.maximum(~np.isnan(above) @ np.abs(fitted["voice"]), 1e-9)
    return np.asarray(np.nan_to_num(above) @ fitted["voice"] / heard)


def _slope(data: latent.Data, kinship: Floats, side: Floats) -> float:
    """Log-odds of Y per standard deviation of the mean, for classes of equal spread.

    Its squared correlation with the truth is put at what unrelated verifiers correlate with each other, a fourth at
    least.
    """
    first = slice(0, len(kinship))
    strangers = (1.0 - kinship) / np.outer(kinship.sum(axis=1), kinship.sum(axis=1))
    agreement = correlations(data.x[first], data.heard[first]) * np.outer(side, side)
    shared = float((strangers * agreement).sum() / max(float(strangers.sum()), 1e-9))
    shared = float(np.clip(shared, _LEAST_SHARED, 0.9))
    return float(2.0 * np.sqrt(shared) / (1.0 - shared))


def _one_voice_a_block(data: latent.Data, balance: float) -> Floats:
    """P(Y = 1) [n] with mean `balance`: ranks weighted by 1 / (sum of squared correlations), contradicted ones turned.

    Told loadings replace what correlations say as far as the priors are trusted; anchors together weigh as much as all
    others.
    """
    related = data.family[:, None] == data.family
    correlation = correlations(data.x, data.heard)
    weight = ~data.silence / np.maximum(np.where(related, 1.0, correlation**2).sum(axis=1), 1.0)
    kernel = np.where(related, 0.0, correlation) * np.sqrt(np.outer(weight, weight))
    strength = data.told.sum(axis=(0, 2)) / 2
    told = ((data.told[1] - data.told[0]) * latent.mid_ranks(data.counts)).sum(axis=1) / np.maximum(2 * strength, 1e-9)
    side = np.where((told < 0) & ~data.anchors, -1.0, 1.0)
    for _ in side:  # turns round, one after the other, whom the others contradict most; at first all are upright
        agrees = np.where(data.anchors | (strength > 0), 0.0, side * (kernel @ side))
        if not agrees.min(initial=0.0) < -0.1 * np.abs(kernel @ side).max(initial=0.0):
            break
        side[agrees.argmin()] *= -1.0
    weight = side * weight
    rest = np.abs(weight[~data.anchors]).sum() / max(int(data.anchors.sum()), 1)
    weight = np.where(data.anchors, np.maximum(np.abs(weight), rest), weight)
    sure = strength * told / (_HALF_TRUST + strength)
    total = (_HALF_TRUST / (_HALF_TRUST + strength) * weight + np.abs(weight).sum() * sure) @ data.x
    z, low, high = _START_SLOPE * total / max(float(total.std()), 1e-9), -15.0, 15.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if sigmoid(z + middle).mean() < balance else (low, middle)
    return sigmoid(z + low)


def _telling_cut(rates: Floats) -> Floats:
    """P(symbol above the cut | Y) [2, m], wrong first, at the cut that tells the classes apart best."""
    above = 1.0 - np.cumsum(rates[..., 1:], axis=2)
    best = np.abs(above[1] - above[0]).argmax(axis=1)
    return np.clip(above[:, np.arange(len(best)), best], 0.0, 1.0)
