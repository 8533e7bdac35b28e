"""Fits one hypothesis about copies: verifier scores become voices, and voices become P(correct)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from forge_verifiers.combiners.base import (
    Bools,
    Floats,
    Ints,
    correlations,
    logit,
    min_max,
    offset_to,
    score_range,
    sigmoid,
)
from forge_verifiers.combiners.copies import Hypothesis
from forge_verifiers.combiners.em import (
    NUM_SYMBOLS,
    Codes,
    Data,
    PromptModel,
    count,
    discount,
    encode,
    expectation_maximization,
    mid_ranks,
    quantile_edges,
)
from forge_verifiers.combiners.published import ANCHOR_WEIGHT, DawidSkene

_CHUNK, _PROMPT_STEPS = 16384, 4
_START_SLOPE, _MIN_SHARED = 3.0, 0.25
_HALF_LABELS, _HALF_PRIOR_ROWS = 20.0, 30.0
"""Labels at which the mean loses half of its share, and prior rows that weigh as much as the correlations."""
_INVERTED = 0.1
_MIN_EXPLAINED = 0.005
"""Explained fraction of the variance of Y below which EM has found no classes."""


class Scale(NamedTuple):
    """How scores of each verifier are read, the same for all hypotheses."""

    edges: Floats  # [m, MAX_BINS - 1] inner edges of its bins
    rank: Floats  # [m, NUM_SYMBOLS] standardized rank of each bin
    low: Floats  # [m]
    high: Floats  # [m]
    center: Floats  # [m] its mean score on [0, 1]

    @classmethod
    def of(cls, scores: Floats, queried: Bools) -> Self:
        """The scale of scores [n, m]."""
        edges, (low, high) = quantile_edges(scores), score_range(scores)
        rank = mid_ranks(count(encode(scores, queried, edges)[: scores.shape[1]]))
        unit = min_max(scores, low, high)
        present = ~np.isnan(unit)
        center = np.where(present, unit, 0.0).sum(axis=0) / np.maximum(present.sum(axis=0), 1)
        return cls(edges, rank, low, high, center)

    def codes(self, scores: Floats, queried: Bools) -> Codes:
        """The bin [m, n] of every score."""
        return encode(scores, queried, self.edges)[: len(self.edges)]

    def mean(self, scores: Floats, weight: Floats) -> Floats:
        """Weighted mean [n] of the scores on [0, 1], each relative to its verifier's mean. Abstentions are left out."""
        relative = min_max(scores, self.low, self.high) - self.center
        total = np.maximum(~np.isnan(relative) @ np.abs(weight), 1e-9)
        return np.asarray(np.nan_to_num(relative) @ weight / total)


class SideInformation(NamedTuple):
    """Knowledge in addition to the scores."""

    groups: Ints | None  # [n]
    labels: Floats  # [n] 0, 1 or NaN
    anchors: Bools  # [m]
    monotone: Bools  # [m] one-score verifiers, whose vote for a response must never lower P(correct)
    prior_rates: Floats  # [2, m] P(says yes | Y), wrong first
    prior_rows: Floats  # [m] weight of these rates in rows of each class; 0 without a prior
    yes_votes: NDArray[np.float64]  # [n, m] 1 or 0, NaN for abstentions


class Voices(NamedTuple):
    """The sources under one hypothesis: the value of each voice, then whether it abstains."""

    voice: Ints  # [m] number of each verifier's voice, -1 for a verifier that never varied
    edges: Floats  # [v, MAX_BINS - 1] inner bin edges of each voice's mean rank
    sources: Ints  # [s] sources that varied, of 2 v

    def values(self, scale: Scale, scores: Floats, queried: Bools) -> tuple[Floats, Bools]:
        """Mean rank [n, v] of each voice, NaN where all its members abstain, and whether any member was queried."""
        members = (self.voice[:, None] == np.arange(self.voice.max(initial=-1) + 1)).astype(np.float64)
        codes = scale.codes(scores, queried)
        number = (codes % NUM_SYMBOLS > 0).T @ members
        total = scale.rank.ravel()[codes].T @ members
        return np.where(number > 0, total / np.maximum(number, 1.0), np.nan), queried @ members > 0

    def codes(self, scale: Scale, scores: Floats, queried: Bools) -> Codes:
        """Symbols [s, n], numbered over the sources."""
        shift = (np.arange(len(self.sources)) - self.sources) * NUM_SYMBOLS
        codes = encode(*self.values(scale, scores, queried), self.edges)[self.sources]
        return np.asarray(codes + shift[:, None], np.int32)


class Start(NamedTuple):
    """A hypothesis before EM."""

    hypothesis: Hypothesis
    voices: Voices
    data: Data
    q: Floats  # [n] initial P(Y = 1)

    @classmethod
    def of(
        cls, hypothesis: Hypothesis, scale: Scale, scores: Floats, queried: Bools, side_information: SideInformation
    ) -> Self:
        """Prepare EM on scores [n, m]. The initial P(Y = 1) is inverted if labels contradict it."""
        v, info = len(hypothesis.loading), side_information
        voices = Voices(hypothesis.voice, np.zeros((v, 0)), np.arange(0))
        values, voice_queried = voices.values(scale, scores, queried)
        voices = voices._replace(edges=quantile_edges(values))
        all_codes = encode(values, voice_queried, voices.edges)
        voices = voices._replace(sources=np.flatnonzero((count(all_codes) > 0).sum(axis=1) > 1))
        codes = voices.codes(scale, scores, queried)
        counts, is_abstention = count(codes), voices.sources >= v
        anchored, monotone = (np.isin(np.arange(v), hypothesis.voice[mask]) for mask in (info.anchors, info.monotone))
        data = Data(
            codes=codes,
            counts=counts,
            observed=(codes % NUM_SYMBOLS > 0).astype(np.float32),
            x=np.where(is_abstention[:, None], 0.0, mid_ranks(counts)).ravel()[codes],
            groups=info.groups,
            labels=info.labels,
            anchors=np.tile(anchored, 2)[voices.sources] & ~is_abstention,
            is_abstention=is_abstention,
            monotone=np.tile(monotone, 2)[voices.sources] & ~is_abstention,
            prior=_prior_rows(hypothesis.voice, info, all_codes)[:, voices.sources],
        )
        side = np.where((hypothesis.loading < -_INVERTED) & ~monotone, -1.0, 1.0)
        balance = 0.5
        if v:
            balance = DawidSkene().fit(values * side, queried=voice_queried).report().class_balance
        q = _initial_posterior(data, np.tile(side, 2)[voices.sources], float(np.clip(balance, 0.01, 0.99)))
        labeled = ~np.isnan(info.labels)
        support = float(((2 * info.labels[labeled] - 1) * logit(np.clip(q[labeled], 0.05, 0.95))).sum())
        if support < -6.0:  # at least three labels contradict the majority
            q = 1.0 - q
        return cls(hypothesis, voices, data, q)


class Model(NamedTuple):
    """Parameters for predictions under one hypothesis. See `em.Fit`."""

    voice: Ints
    voice_edges: Floats
    sources: Ints
    table: Floats
    variance: Floats
    error_correlation: Floats
    prompts: Floats  # the fields of `em.PromptModel`
    mean_weight: Floats  # [m] weight in the mean; negative for an inverted voice
    mean_slope: Floats  # log-odds per unit of the mean
    mean_balance: Floats  # fraction of correct responses for the mean
    mean_share: Floats  # weight of the mean in P(correct), in [0, 1]

    @classmethod
    def fit(
        cls, start: Start, scale: Scale, scores: Floats, side_information: SideInformation
    ) -> tuple[Self, Floats, float]:
        """EM from `start`. Returns the model, P(Y = 1) [n] with clamped labels, and the labels' log-likelihood."""
        hypothesis, voices, data, _ = start
        fit = expectation_maximization(data, start.q)
        is_value = ~data.is_abstention
        agreement = correlations(data.x[is_value], data.observed[is_value])
        varying = hypothesis.voice >= 0
        share = _mean_share(data, agreement, side_information, fit.q, num_varying=int(varying.sum()))
        side = np.ones(len(hypothesis.loading))
        if share < 1.0:
            inverted = (data.x[is_value] @ (fit.q - fit.q.mean()) < 0) & ~data.monotone[is_value]
            side[voices.sources[is_value]] = np.where(inverted, -1.0, 1.0)
        weight = np.zeros(len(varying))
        weight[varying] = side[hypothesis.voice[varying]] / voice_sizes(hypothesis.voice)[varying]
        weight = weight * np.where(side_information.anchors, ANCHOR_WEIGHT, 1.0)
        source_side = side[voices.sources[is_value]]
        deviation = max(float(scale.mean(scores, weight).std()), 1e-3)
        slope = _slope(agreement * np.outer(source_side, source_side)) / deviation
        balance = float(start.q.mean())
        mean = sigmoid(slope * scale.mean(scores, weight) + logit(balance))
        numbers = (np.array(fit.prompts), weight, np.array(slope), np.array(balance), np.array(share))
        model = cls(*voices, fit.table, fit.variance, fit.error_correlation, *numbers)
        labels = side_information.labels
        labeled = ~np.isnan(labels)
        unclamped = fit.evidence.sum(axis=0, dtype=np.float64)[labeled] + logit(fit.prompts.mean)
        odds = (2 * labels[labeled] - 1) * np.clip(unclamped, -2.0, 2.0)  # bounded: a label may be wrong
        return model, (1 - share) * fit.q + share * mean, float(np.log(sigmoid(odds)).sum())

    @property
    def balance(self) -> float:
        """Fraction of correct responses."""
        share = float(self.mean_share)
        return (1 - share) * PromptModel(*self.prompts.tolist()).mean + share * float(self.mean_balance)

    def predict(self, scale: Scale, scores: Floats, groups: Ints | None, queried: Bools) -> tuple[Floats, Floats]:
        """P(correct) [n] and its variance [n]."""
        voices = Voices(self.voice, self.voice_edges, self.sources)
        tables = np.stack([self.table, self.variance]).astype(np.float32).reshape(2, -1)
        sums = np.zeros((2, len(scores)))
        for rows in (slice(low, low + _CHUNK) for low in range(0, len(scores), _CHUNK)):
            codes = voices.codes(scale, scores[rows], queried[rows])
            fraction = discount(self.error_correlation, (codes % NUM_SYMBOLS > 0).astype(np.float32))
            sums[0, rows] = (fraction * tables[0][codes]).sum(axis=0)
            sums[1, rows] = (fraction**2 * tables[1][codes]).sum(axis=0)
        prompts = PromptModel(*self.prompts.tolist())
        log_odds = sums[0] + logit(prompts.mean)
        for _ in range(_PROMPT_STEPS if groups is not None and np.isfinite(prompts.strength) else 0):
            log_odds, _ = prompts.log_odds(sums[0], sigmoid(log_odds), groups)
        # E[sigmoid(a)] of a normal a with variance v is about sigmoid(a / sqrt(1 + pi v / 8)), MacKay 1992.
        learned = sigmoid(log_odds / np.sqrt(1.0 + np.pi / 8.0 * sums[1]))
        mean = float(self.mean_slope) * scale.mean(scores, self.mean_weight) + logit(float(self.mean_balance))
        mean, share = sigmoid(np.asarray(mean)), float(self.mean_share)
        variance = ((1 - share) * learned * (1 - learned)) ** 2 * sums[1] + share * (1 - share) * (learned - mean) ** 2
        return (1 - share) * learned + share * mean, variance

    def shares(self) -> Floats:
        """Fraction [m] of each verifier's evidence that counts: correlated voices and members of a voice share one."""
        v = len(self.voice_edges)
        is_value = self.sources < v
        total = np.ones(v)
        total[self.sources[is_value]] = self.error_correlation[np.ix_(is_value, is_value)].sum(axis=1)
        share = 1.0 / total[self.voice] / voice_sizes(self.voice) if v else np.zeros(len(self.voice))
        return np.asarray(np.where(self.voice >= 0, share, 0.0))

    def state(self, prefix: str) -> dict[str, NDArray[Any]]:
        """The fields as arrays for `from_state`."""
        return {f"{prefix}/{key}": np.asarray(value) for key, value in self._asdict().items()}

    @classmethod
    def from_state(cls, state: Mapping[str, NDArray[Any]], prefix: str) -> Self:
        """Restore `state`."""
        return cls(*(state[f"{prefix}/{key}"] for key in cls._fields))


def voice_sizes(voice: Ints) -> Floats:
    """Number [m] of verifiers in each verifier's voice."""
    return np.asarray((voice[:, None] == voice).sum(axis=1), np.float64)


def _prior_rows(voice: Ints, side_information: SideInformation, codes: Codes) -> Floats:
    """Pseudo-counts [2, 2 v, NUM_SYMBOLS] of declared priors, distributed as the symbols among yes and no votes."""
    info = side_information
    rows = np.zeros((2, len(codes), NUM_SYMBOLS))
    sizes = voice_sizes(voice)
    for k in np.flatnonzero((info.prior_rows > 0) & (voice >= 0)):
        symbols = codes[voice[k]] - voice[k] * NUM_SYMBOLS
        yes, no = (np.bincount(symbols[info.yes_votes[:, k] == vote], minlength=NUM_SYMBOLS) for vote in (1, 0))
        if yes.any() and no.any():  # a verifier that never varies has no information
            for y, rate in enumerate(info.prior_rates[:, k]):
                distribution = rate * yes / yes.sum() + (1 - rate) * no / no.sum()
                rows[y, voice[k]] += info.prior_rows[k] / sizes[k] * distribution
    return rows


def _initial_posterior(data: Data, side: Floats, balance: float) -> Floats:
    """P(Y = 1) [n] with mean `balance`: mean rank of the voices, weighted by 1 / (sum of squared correlations).

    Loadings implied by priors replace the estimated weights as far as the priors are trusted. All anchors together
    weigh as much as all other voices.
    """
    if not len(data.codes):
        return np.full(data.codes.shape[1], 0.5)
    weight = side * ~data.is_abstention / np.maximum((correlations(data.x, data.observed) ** 2).sum(axis=1), 1.0)
    rest = np.abs(weight[~data.anchors]).sum() / max(int(data.anchors.sum()), 1)
    weight = np.where(data.anchors, np.maximum(np.abs(weight), rest), weight)
    strength = data.prior.sum(axis=(0, 2)) / 2
    loading = ((data.prior[1] - data.prior[0]) * mid_ranks(data.counts)).sum(axis=1) / np.maximum(2 * strength, 1e-9)
    trust = strength / (_HALF_PRIOR_ROWS + strength)
    total = ((1 - trust) * weight + np.abs(weight).sum() * trust * loading) @ data.x
    z = _START_SLOPE * total / max(float(total.std()), 1e-9)
    return sigmoid(z + offset_to(balance, z))


def _mean_share(
    data: Data, agreement: Floats, side_information: SideInformation, q: Floats, *, num_varying: int
) -> float:
    """Weight in [0, 1] of the plain mean in P(correct). The weight decreases with the number of labels and prior rows.

    The mean keeps its full weight if the data cannot tell which voice is better: with one or two voices, with
    correlations no larger than chance, or if EM found no classes.
    """
    v = len(agreement)
    rows = int((~np.isnan(side_information.labels)).sum()) + float(side_information.prior_rows.sum())
    share = 1.0 / (1.0 + (rows / _HALF_LABELS) ** 2)  # squared, so that a single label changes little
    if v == 0:
        return 0.0
    if v == 1 or v < min(3, num_varying) or (v == 2 and agreement[0, 1] < 0):
        return share
    if q.var() < _MIN_EXPLAINED * q.mean() * (1 - q.mean()):
        return share
    observed = data.observed[~data.is_abstention].astype(np.float64)
    pairs = np.triu_indices(v, 1)
    chi_squared, terms = float(((observed @ observed.T) * agreement**2)[pairs].sum()), len(pairs[0])
    if data.groups is not None:  # a voice that separates prompts is not noise either
        chi_squared, terms = chi_squared + float(_prompt_chi_squared(data, data.groups).sum()), terms + v
    chance = terms + np.sqrt(2.0 * terms)  # one standard deviation above the mean of chi squared
    return float(share * min(1.0, chance / max(chi_squared, 1e-9)) ** 2)


def _prompt_chi_squared(data: Data, groups: Ints) -> Floats:
    """Squared z score of the correlation between responses to the same prompt, for each voice."""
    x, sizes = data.x[~data.is_abstention], np.bincount(groups).astype(np.float64)
    total = np.stack([np.bincount(groups, row) for row in x])
    covariance = (total**2).sum(axis=1) - (x * x).sum(axis=1)
    pairs = max(float((sizes * (sizes - 1.0)).sum()), 1.0)
    return np.asarray(covariance**2 / ((x * x).mean(axis=1) ** 2 * 2.0 * pairs))


def _slope(agreement: Floats) -> float:
    """Log-odds of Y per standard deviation of the mean, assuming classes of equal spread.

    The squared correlation of the mean with the truth is assumed to be the average correlation of two voices, at
    least 0.25.
    """
    pairs = np.triu_indices(len(agreement), 1)
    shared = float(np.clip(agreement[pairs].mean() if len(pairs[0]) else 0.0, _MIN_SHARED, 0.9))
    # For two normal classes of equal size and spread with means d apart, r^2 = d^2 / (4 + d^2). The log-odds rise by d
    # per within-class deviation, that is by d sqrt(1 + d^2 / 4) = 2 r / (1 - r^2) per deviation of the mixture.
    return float(2.0 * np.sqrt(shared) / (1.0 - shared))
