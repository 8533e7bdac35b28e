"""The default combiner: two latent classes behind graded symbols, checked by how well verifiers predict each other.

In: scores [n, m], NaN = abstained, who was asked, and what is known beforehand. Out: calibrated P(correct) [n], how
sure it is, a report. Waits for nothing.

Axes: n responses, m verifiers, s sources (their scores, then their silences), S symbols of one. Start at `Default`;
docs/decisions/0007-default-combiner.md says why each step is there.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from forge_verifiers.combiners.base import (
    Bools,
    Combiner,
    Floats,
    Ints,
    anchor_mask,
    correlations,
    family_index,
    logit,
    min_max,
    offset_to,
    score_range,
    sigmoid,
)
from forge_verifiers.combiners.published import ANCHOR_WEIGHT, DawidSkene

_LOG = logging.getLogger(__name__)

Singles = NDArray[np.float32]
Codes = NDArray[np.int32]

MAX_BINS = 6
NUM_SYMBOLS = MAX_BINS + 1
"""Symbols of a source, which owns the numbers from source * NUM_SYMBOLS; its first says that nothing was heard."""
_ROWS_PER_BIN = 4
_PRIOR_ROWS, _PRIOR_LEAN = 20.0, 0.6
_ANCHOR_SHARE, _ANCHOR_LEAN = 0.1, 0.94
_LABEL_ROWS = 4.0
_ROUNDS, _SETTLE, _SILENT, _STEP, _TOLERANCE = 22, 2, 6, 0.7, 4e-3
_CHUNK, _MIN_GROUPS, _PROMPT_ROUNDS = 16384, 20, 4
_START_SLOPE, _LEAST_SHARED = 3.0, 0.25
_BETTER, _SETTLING, _HALF_TRUST, _FEW = 10.0, 20.0, 30.0, 5.0
_YES = 0.5  # a score above it says yes, where a prior speaks of that
_GRID = ((np.arange(12, dtype=np.float32) + 0.5) / 12)[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """How good one verifier is, known before it is heard. A score above 0.5 counts as "yes"."""

    tpr: float
    """P(says yes | correct), in (0, 1)."""
    fpr: float
    """P(says yes | wrong), in (0, 1)."""
    strength: float
    """Responses of each class that the rates count for, above 0. As many as the ensemble's window holds rows make the
    prior weigh as much as everything seen."""

    def __post_init__(self) -> None:
        for name in ("tpr", "fpr"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} of a Prior must lie strictly between 0 and 1")
        if not 0 < self.strength < np.inf:
            raise ValueError(f"strength={self.strength} of a Prior must be positive and finite")

    @classmethod
    def of(cls, accuracy: float, *, strength: float) -> Self:
        """A verifier that is right with probability `accuracy` on correct and on wrong responses alike."""
        return cls(tpr=accuracy, fpr=1.0 - accuracy, strength=strength)


class Default(Combiner):
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
        m, edges = scores.shape[1], quantile_edges(scores)
        truth = np.full(len(scores), np.nan) if labels is None else labels
        sources, data = self._data(scores, encode(scores, asked, edges), groups, truth)
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

    def _data(self, scores: Floats, codes: Codes, groups: Ints | None, labels: Floats) -> tuple[Ints, Data]:
        """The sources [s] that vary, and what EM is given of them."""
        n, m = scores.shape
        prior = _prior_counts(self.priors, scores, codes)
        family = np.arange(m) if (declared := family_index(self.families, m)) is None else declared
        sources = np.flatnonzero((count(codes) > 0).sum(axis=1) > 1)
        codes = _only(codes, sources)
        counts, silence = count(codes), sources >= m
        return sources, Data(
            codes=codes,
            counts=counts,
            heard=(codes % NUM_SYMBOLS > 0).astype(np.float32),
            x=np.where(silence[:, None], 0.0, mid_ranks(counts)).ravel()[codes],
            groups=groups if groups is not None and _MIN_GROUPS <= groups.max() + 1 < n else None,
            labels=labels,
            family=np.concatenate([family, family + m])[sources],
            anchors=np.tile(anchor_mask(self.anchors, m), 2)[sources] & ~silence,
            silence=silence,
            prior=prior[:, sources],
        )

    def _best(self, data: Data, simple: Floats) -> Fit:
        """EM from one voice a block, or from `simple` [n] where the sources then predict each other far better."""
        start = _one_voice_a_block(data, float(np.clip(simple.mean(), 0.01, 0.99)) if len(data.codes) else 0.5)
        known = ~np.isnan(data.labels)
        odds = (2 * data.labels[known] - 1) @ logit(np.clip(start[known], 0.05, 0.95))
        start = 1.0 - start if odds < -6.0 else start  # three labels at least that speak against the majority
        fit = expectation_maximisation(data, start)
        most = np.log(2.0) * np.count_nonzero(~data.silence)  # a class is worth one bit of each source
        if data.anchors.any() or data.prior.any() or _BETTER * fit.gain >= most:
            return fit
        rival = expectation_maximisation(data, np.clip(simple, 0.02, 0.98))
        return rival if rival.gain > _BETTER * max(fit.gain, 0.0) else fit

    def _mean_share(self, data: Data, fit: Fit, weight: Floats) -> float:
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
            codes = _only(encode(scores[rows], asked[rows], fitted["edges"]), fitted["sources"])
            counted = discount(fitted["kinship"], (codes % NUM_SYMBOLS > 0).astype(np.float32))
            sums[0, rows] = (counted * tables[0][codes]).sum(axis=0)
            sums[1, rows] = (counted**2 * tables[1][codes]).sum(axis=0)
        prompts = Prompts(*fitted["prompts"].tolist())
        log_odds = sums[0] + logit(prompts.mean)
        for _ in range(_PROMPT_ROUNDS if groups is not None and np.isfinite(prompts.strength) else 0):
            log_odds, _ = prompts.log_odds(sums[0], sigmoid(log_odds), groups)
        # E[sigmoid(a)] of a normal a with variance v is about sigmoid(a / sqrt(1 + pi v / 8)), MacKay 1992.
        moderated = sigmoid(log_odds / np.sqrt(1.0 + np.pi / 8.0 * sums[1]))
        mean = float(fitted["mean_slope"]) * _mean(fitted, scores)
        return moderated, sigmoid(mean + logit(prompts.mean)), sums[1]


def _only(codes: Codes, sources: Ints) -> Codes:
    """The symbols of some sources, numbered over these."""
    shift = (np.arange(len(sources)) - sources) * NUM_SYMBOLS
    return np.asarray(codes[sources] + shift[:, None], np.int32)


def _mean(fitted: Mapping[str, NDArray[Any]], scores: Floats) -> Floats:
    """Mean [n] of min-max scores around each verifier's own: who is not heard moves nothing."""
    above = min_max(scores, fitted["low"], fitted["high"]) - fitted["centre"]
    heard = np.maximum(~np.isnan(above) @ np.abs(fitted["voice"]), 1e-9)
    return np.asarray(np.nan_to_num(above) @ fitted["voice"] / heard)


def _slope(data: Data, kinship: Floats, side: Floats) -> float:
    """Log-odds of Y per standard deviation of the mean, for classes of equal spread.

    Its squared correlation with the truth is put at what unrelated verifiers correlate with each other, a fourth at
    least.
    """
    first = slice(0, len(kinship))
    strangers = (1.0 - kinship) / np.outer(kinship.sum(axis=1), kinship.sum(axis=1))
    agreement = correlations(data.x[first], data.heard[first]) * np.outer(side, side)
    shared = float((strangers * agreement).sum() / max(float(strangers.sum()), 1e-9))
    shared = float(np.clip(shared, _LEAST_SHARED, 0.9))
    # Two normal classes of equal size and spread whose means lie d apart: r^2 = d^2 / (4 + d^2), and the log-odds rise
    # by d within-class deviations, that is by d sqrt(1 + d^2 / 4) = 2 r / (1 - r^2) a deviation of the whole.
    return float(2.0 * np.sqrt(shared) / (1.0 - shared))


def _one_voice_a_block(data: Data, balance: float) -> Floats:
    """P(Y = 1) [n] with mean `balance`: ranks weighted by 1 / (sum of squared correlations), contradicted ones turned.

    Loadings that priors imply replace what correlations say as far as the priors are trusted; anchors together weigh as
    much as all others.
    """
    related = data.family[:, None] == data.family
    correlation = correlations(data.x, data.heard)
    weight = ~data.silence / np.maximum(np.where(related, 1.0, correlation**2).sum(axis=1), 1.0)
    kernel = np.where(related, 0.0, correlation) * np.sqrt(np.outer(weight, weight))
    strength = data.prior.sum(axis=(0, 2)) / 2
    loading = ((data.prior[1] - data.prior[0]) * mid_ranks(data.counts)).sum(axis=1) / np.maximum(2 * strength, 1e-9)
    side = np.where((loading < 0) & ~data.anchors, -1.0, 1.0)
    for _ in side:  # turns round, one after the other, whom the others contradict most; at first all are upright
        agrees = np.where(data.anchors | (strength > 0), 0.0, side * (kernel @ side))
        if not agrees.min(initial=0.0) < -0.1 * np.abs(kernel @ side).max(initial=0.0):
            break
        side[agrees.argmin()] *= -1.0
    weight = side * weight
    rest = np.abs(weight[~data.anchors]).sum() / max(int(data.anchors.sum()), 1)
    weight = np.where(data.anchors, np.maximum(np.abs(weight), rest), weight)
    sure = strength * loading / (_HALF_TRUST + strength)
    total = (_HALF_TRUST / (_HALF_TRUST + strength) * weight + np.abs(weight).sum() * sure) @ data.x
    z = _START_SLOPE * total / max(float(total.std()), 1e-9)
    return sigmoid(z + offset_to(balance, z))


def _telling_cut(rates: Floats) -> Floats:
    """P(symbol above the cut | Y) [2, m], wrong first, at the cut that tells the classes apart best."""
    above = 1.0 - np.cumsum(rates[..., 1:], axis=2)
    best = np.abs(above[1] - above[0]).argmax(axis=1)
    return np.clip(above[:, np.arange(len(best)), best], 0.0, 1.0)


class Prompts(NamedTuple):
    """What responses to one prompt share."""

    mean: float = 0.5  # P(correct) over all prompts
    strength: float = np.inf  # a prompt's rate follows Beta(mean * strength, (1 - mean) * strength)
    right: float = 0.0  # mean evidence on correct responses
    wrong: float = 0.0
    intraclass: float = 0.0  # correlation of siblings' evidence around these: the prompt is liked, whatever the answer

    def log_odds(self, evidence: Floats, q: Floats, groups: Ints | None) -> tuple[Floats, float]:
        """Log-odds [n] of P(Y = 1 | evidence, siblings), and the strength that the siblings show.

        Half of what a prompt is liked is taken off the evidence: the best linear predictor of a random intercept,
        half because it may be the prompt's rate after all. That rate is integrated out on a grid, every response from
        its siblings alone, whose evidence counts 1 / (1 + (k - 1) intraclass), the design effect of k related samples.
        """
        if groups is None or np.isinf(self.strength):
            return np.asarray(evidence + logit(self.mean)), np.inf
        crowd = 1.0 + (np.bincount(groups) - 1.0) * self.intraclass
        liking = np.bincount(groups, evidence - q * self.right - (1 - q) * self.wrong) * self.intraclass / crowd
        own = evidence - 0.5 * liking[groups]
        each = np.log(_GRID * np.exp(np.minimum(own, 40.0).astype(np.float32)) + 1 - _GRID) / crowd[groups]
        alpha, beta = self.mean * self.strength, (1 - self.mean) * self.strength
        before = (alpha - 1) * np.log(_GRID) + (beta - 1) * np.log1p(-_GRID)
        whole = np.stack([np.bincount(groups, row) for row in each]) + before
        left = (whole[:, groups] - each).astype(np.float32)
        rest, rates = (normal(np.exp(x - x.max(axis=0)).T) for x in (left, whole))
        mean = float((rates @ _GRID).mean())
        spread = float((rates @ _GRID**2).mean()) - mean**2
        strength = float(np.clip(mean * (1 - mean) / max(spread, 1e-6) - 1.0, 0.3, 200.0))
        return np.asarray(own + logit((rest @ _GRID)[:, 0])), strength


class Data(NamedTuple):
    """What EM is given: the sources that vary."""

    codes: Codes  # [s, n] symbols, numbered over these sources
    counts: Floats  # [s, S] how often each was heard
    heard: Singles  # [s, n] 1 or 0
    x: Floats  # [s, n] standardised mid-ranks; 0 for silences and where nothing was heard
    groups: Ints | None
    labels: Floats  # [n] 0, 1 or NaN
    family: Ints  # [s] sources of one number are relatives
    anchors: Bools  # [s]
    silence: Bools  # [s]
    prior: Floats  # [2, s, S] rows by class, wrong first, that count as seen


class Fit(NamedTuple):
    """Where EM ended."""

    q: Floats  # [n] P(Y = 1)
    rates: Floats  # [2, s, S] P(symbol | Y), wrong first
    table: Floats  # [s, S] their log ratio: the evidence of a symbol
    variance: Floats  # [s, S] of `table`
    kinship: Floats  # [s, s] correlation of errors beyond chance, in [0, 1]
    prompts: Prompts
    gain: float  # nats by which the other sources predict a source's symbol, less `chance`; over independent ones
    chance: float  # nats that as many free rates gain of nothing (Akaike 1974)


def quantile_edges(scores: Floats) -> Floats:
    """Inner bin edges per verifier, [m, MAX_BINS - 1], +inf where fewer are needed; midway between scores.

    Up to MAX_BINS distinct values are kept apart. Of more, a value frequent enough to fill a bin gets one to itself.
    """
    edges = np.full((scores.shape[1], MAX_BINS - 1), np.inf)
    for k, column in enumerate(scores.T):
        values, counts = np.unique(column[~np.isnan(column)], return_counts=True)
        cuts = list(range(len(values) - 1))
        if len(values) > MAX_BINS:
            rows, bins = int(counts.sum()), int(np.clip(counts.sum() // _ROWS_PER_BIN, 2, MAX_BINS))
            full, filled, cuts = rows / bins, 0, []
            for i, (number, coming) in enumerate(zip(counts[:-1].tolist(), counts[1:].tolist(), strict=True)):
                filled += number
                if bins > 1 and (filled + coming / 2 >= rows / bins or (coming >= full and 4 * filled >= full)):
                    cuts.append(i)
                    rows, bins, filled = rows - filled, bins - 1, 0
        edges[k, : len(cuts)] = [values[i] / 2 + values[i + 1] / 2 for i in cuts]
    return edges


def encode(scores: Floats, asked: Bools, edges: Floats) -> Codes:
    """Symbols int32 [2m, n] of scores [n, m]: each verifier's bin, then whether it, when asked, spoke or was silent."""
    silent = np.isnan(scores.T)
    bins = np.stack([np.searchsorted(edge, column) for edge, column in zip(edges, scores.T, strict=True)])
    codes = np.concatenate([np.where(silent, 0, 1 + bins), np.where(asked.T, 1 + silent, 0)])
    return np.asarray(codes + np.arange(len(codes))[:, None] * NUM_SYMBOLS, np.int32)


def count(codes: Codes, weights: NDArray[np.floating] | None = None) -> Floats:
    """Weighted number [s, S] of rows in which each symbol was heard; codes and weights [s, n]."""
    flat = None if weights is None else np.ascontiguousarray(weights).ravel()
    counts = np.bincount(codes.ravel(), flat, len(codes) * NUM_SYMBOLS).astype(np.float64).reshape(-1, NUM_SYMBOLS)
    counts[:, 0] = 0.0
    return counts


def mid_ranks(counts: Floats) -> Floats:
    """Standardised mid-rank of every symbol [s, S]: mean 0, variance 1 over what was heard; 0 for "nothing"."""
    total = np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
    rank = np.where(counts > 0, (np.cumsum(counts, axis=1) - counts / 2) / total - 0.5, 0.0)
    return np.asarray(rank / np.sqrt(np.maximum((counts * rank**2).sum(axis=1, keepdims=True) / total, 1e-9)))


def discount(kinship: Floats, heard: Singles) -> Singles:
    """Share in [0, 1] of each source's evidence that counts, [s, n] or [s, 1]: relatives that were heard share one."""
    if heard.all():
        return np.asarray(1.0 / kinship.sum(axis=1, keepdims=True), np.float32)
    return np.asarray(heard / np.maximum(kinship.astype(np.float32) @ heard, 1.0))


def expectation_maximisation(data: Data, start: Floats) -> Fit:
    """Alternates symbol rates, dependence and posterior from P(Y = 1) = `start` [n]. See `Default` for the method."""
    known = ~np.isnan(data.labels)
    rows = np.where(known, _LABEL_ROWS, 1.0)
    prior, counts = _prior_rows(data, start), count(data.codes, data.heard * rows)
    q = np.where(known, data.labels, start)
    posterior: NDArray[np.floating] = np.broadcast_to(q, data.codes.shape)
    prompts = Prompts(strength=np.inf if data.groups is None else 4.0)
    kinship = np.eye(len(data.codes))
    step = 0
    while True:
        # M-step, Dawid and Skene 1979, eqs. 2.3 and 2.4: P(symbol | y) = sum of P(Y = y) over the rows that show it,
        # divided by that over all rows; here plus the prior rows. A source is counted with the posterior of others, so
        # its classes are first brought to the sizes that the whole posterior gives them.
        right, size = data.heard @ (rows * q), counts.sum(axis=1)
        with_1 = count(data.codes, posterior * rows)
        seen = [np.maximum(counts - with_1, 0.0), with_1]
        both = np.stack([normal(c) * k[:, None] for c, k in zip(seen, (size - right, right), strict=True)]) + prior
        rates = normal(both)
        table = np.where(data.counts > 0, np.log(np.maximum(rates[1], 1e-12) / np.maximum(rates[0], 1e-12)), 0.0)
        if step < _SILENT:  # a common pattern of silence would become the latent class
            table[data.silence] = 0.0
        e = table.astype(np.float32).ravel()[data.codes]
        found = _kinship(data, e, q)
        # E-step, eq. 2.5: log-odds = logit P(Y) + sum of log P(symbol | 1) / P(symbol | 0), relatives counted once.
        kinship = np.eye(len(found)) if step < _SETTLE else (1 - _STEP) * kinship + _STEP * found
        shared = discount(kinship, data.heard) * e
        evidence = shared.sum(axis=0, dtype=np.float64)
        mean = float((rows @ q + 1.0) / (rows.sum() + 2.0))
        prompts = _prompts(data.groups, evidence, q, prompts._replace(mean=mean), settled=step > _SETTLE)
        log_odds, strength = prompts.log_odds(evidence, q, data.groups)
        log_odds = np.where(known, 24.0 * data.labels - 12.0, log_odds)  # labels are clamped at 12 nats
        prompts = prompts._replace(strength=strength)
        before, q = q, sigmoid(log_odds)
        step += 1
        if step == _ROUNDS or (step > _SILENT + 1 and np.abs(q - before).max() < _TOLERANCE):
            break
        posterior = np.where(known, q, _without(log_odds, (found - np.eye(len(found))) @ shared))
    variance = np.where(data.counts > 0, (1.0 / (both + 1.0)).sum(axis=0), 0.0)
    gain, chance = _gain(data, _without(log_odds, kinship @ shared), kinship)
    return Fit(q, rates, table, variance, kinship, prompts, gain - chance, chance)


def normal(weights: Floats) -> Floats:
    """Weights that sum to 1 over the last axis, or to 0 where all are 0."""
    return np.asarray(weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-12))


def _prior_rows(data: Data, start: Floats) -> Floats:
    """Rows [2, s, S] that count before any are seen: a little better than chance, on the side of `start`."""
    has = (data.counts > 0).astype(np.float64)
    place = 2.0 * (np.cumsum(has, axis=1) - 1.0) / np.maximum(has.sum(axis=1, keepdims=True) - 1.0, 1.0) - 1.0
    toward = data.x @ (start - start.mean()) / max(float(start.std()), 1e-9) / np.maximum(data.heard.sum(axis=1), 1)
    lean = _PRIOR_LEAN * place * np.where(data.silence, 0.0, np.where(toward < -0.1, -1.0, 1.0))[:, None]
    shape = np.where(data.silence[:, None], data.counts, has) * np.exp(np.stack([-lean, lean]))
    rank = np.clip(_ANCHOR_LEAN * mid_ranks(data.counts), -3.0, 3.0)
    sure = normal(data.counts * np.exp(np.stack([-rank, rank]))) * data.anchors[:, None]
    return np.asarray(_PRIOR_ROWS * normal(shape) + _ANCHOR_SHARE * data.codes.shape[1] * sure + data.prior)


def _kinship(data: Data, e: Singles, q: Floats) -> Floats:
    """Correlation [s, s] of evidence within the classes, less two standard errors and a margin for few rows."""
    right, heard = q.astype(np.float32), data.heard
    n = np.maximum(heard @ heard.T, 1e-3)
    n1 = np.clip((heard * right) @ heard.T, 1e-3, n)
    s1 = (e * right) @ heard.T
    s0 = e @ heard.T - s1
    within = ((e @ e.T - s1 * s1.T / n1 - s0 * s0.T / np.maximum(n - n1, 1e-3)) / n).astype(np.float64)
    spread = np.sqrt(np.maximum(np.diag(within), 1e-9))
    kinship = np.clip(within / np.outer(spread, spread) - 2.0 / np.sqrt(n) - 8.0 / n, 0.0, 1.0)
    kinship[data.family[:, None] == data.family] = 1.0
    np.fill_diagonal(kinship, 1.0)
    return np.asarray(kinship)


def _without(log_odds: Floats, evidence: NDArray[np.floating]) -> Singles:
    """P(Y = 1) [s, n] had the given evidence [s, n] not been heard."""
    return np.asarray(1.0 / (1.0 + np.exp(np.clip(evidence - log_odds, -30.0, 30.0))), np.float32)


def _prompts(groups: Ints | None, evidence: Floats, q: Floats, prompts: Prompts, *, settled: bool) -> Prompts:
    """The evidence that siblings share beyond their classes, less one standard error of its correlation."""
    right, wrong = (float(p @ evidence / max(p.sum(), 1e-9)) for p in (q, 1 - q))
    share = 0.0
    if groups is not None and settled:
        residual, sizes = evidence - q * right - (1 - q) * wrong, np.bincount(groups)
        energy, pairs = float(residual @ residual), max(float((sizes * (sizes - 1.0)).sum()), 1.0)
        together = float((np.bincount(groups, residual) ** 2).sum()) - energy
        share = float(np.clip(together / max(pairs * energy / len(q), 1e-12) - np.sqrt(2.0 / pairs), 0.0, 1.0))
    return prompts._replace(right=right, wrong=wrong, intraclass=share)


def _gain(data: Data, posterior: Singles, kinship: Floats) -> tuple[float, float]:
    chance, c1 = normal(data.counts), count(data.codes, posterior)
    p1, p0 = (normal(c + 3.0 * chance).ravel()[data.codes] for c in (c1, data.counts - c1))
    ratio = (posterior * p1 + (1 - posterior) * p0) / np.maximum(chance.ravel()[data.codes], 1e-12)
    nats = np.log(np.where(data.heard > 0, np.maximum(ratio, 1e-12), 1.0)).sum(axis=1)
    alone = ~data.silence / np.maximum(kinship[:, ~data.silence].sum(axis=1), 1.0)
    rows, free = np.maximum(data.heard.sum(axis=1), 1.0), (data.counts > 0).sum(axis=1) - 1
    return float(alone @ (nats / rows)), float(alone @ (free / (rows + 2 * _PRIOR_ROWS)))


def _prior_counts(priors: Mapping[int, Prior], scores: Floats, codes: NDArray[np.int32]) -> Floats:
    """Rows [2, 2m, NUM_SYMBOLS] by class, wrong first, spread within yes and no as the scores [n, m] are."""
    rows, m = np.zeros((2, len(codes), NUM_SYMBOLS)), scores.shape[1]
    for k, prior in priors.items():
        if k not in range(m):
            raise ValueError(f"priors name verifier {k!r}; expected column numbers 0 to {m - 1}")
        symbols = codes[k] - k * NUM_SYMBOLS
        yes = np.bincount(symbols[scores[:, k] > _YES], minlength=NUM_SYMBOLS)
        no = np.bincount(symbols[scores[:, k] <= _YES], minlength=NUM_SYMBOLS)
        if yes.any() and no.any():  # a verifier that never varies says nothing, however good
            for y, rate in enumerate((prior.fpr, prior.tpr)):
                rows[y, k] = prior.strength * (rate * yes / yes.sum() + (1 - rate) * no / no.sum())
    return rows
