"""One hypothesis about which verifiers are copies, fitted: scores become voices, and voices become P(correct)."""

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
    Prompts,
    count,
    discount,
    encode,
    expectation_maximization,
    mid_ranks,
    quantile_edges,
)
from forge_verifiers.combiners.published import ANCHOR_WEIGHT, DawidSkene

_CHUNK, _PROMPT_ROUNDS = 16384, 4
_START_SLOPE, _LEAST_SHARED = 3.0, 0.25
_SETTLING, _HALF_TRUST, _INVERTED, _FLAT = 20.0, 30.0, 0.1, 0.005


class Scale(NamedTuple):
    """How the scores of each verifier are read, whatever the hypothesis."""

    edges: Floats  # [m, MAX_BINS - 1] inner edges of its bins
    rank: Floats  # [m, NUM_SYMBOLS] standardized rank of each bin
    low: Floats  # [m]
    high: Floats  # [m]
    center: Floats  # [m] its mean score on [0, 1]

    @classmethod
    def of(cls, scores: Floats, asked: Bools) -> Self:
        """The scale of scores [n, m]."""
        edges, (low, high) = quantile_edges(scores), score_range(scores)
        rank = mid_ranks(count(encode(scores, asked, edges)[: scores.shape[1]]))
        unit = min_max(scores, low, high)
        spoken = ~np.isnan(unit)
        center = np.where(spoken, unit, 0.0).sum(axis=0) / np.maximum(spoken.sum(axis=0), 1)
        return cls(edges, rank, low, high, center)

    def codes(self, scores: Floats, asked: Bools) -> Codes:
        """The bin [m, n] of every score."""
        return encode(scores, asked, self.edges)[: len(self.edges)]

    def mean(self, scores: Floats, weight: Floats) -> Floats:
        """Weighted mean [n] of the scores, each on [0, 1] around its verifier's mean; silence moves nothing."""
        above = min_max(scores, self.low, self.high) - self.center
        heard = np.maximum(~np.isnan(above) @ np.abs(weight), 1e-9)
        return np.asarray(np.nan_to_num(above) @ weight / heard)


class Known(NamedTuple):
    """What is known beside the scores."""

    groups: Ints | None  # [n]
    labels: Floats  # [n] 0, 1 or NaN
    anchors: Bools  # [m]
    upright: Bools  # [m] one-class verifiers, whose vote for a response must never lower P(correct)
    prior_rates: Floats  # [2, m] P(says yes | Y), wrong first
    prior_rows: Floats  # [m] rows of each class that these count for; 0 without a prior
    yes_votes: NDArray[np.float64]  # [n, m] 1 or 0, NaN where a verifier abstained


class Voices(NamedTuple):
    """The sources under one hypothesis: what each voice says, then whether it abstains."""

    voice: Ints  # [m] number of each verifier's voice, -1 for a verifier that never varied
    edges: Floats  # [v, MAX_BINS - 1] inner bin edges of the mean rank of each voice
    sources: Ints  # [s] sources that varied, of 2 v

    def values(self, scale: Scale, scores: Floats, asked: Bools) -> tuple[Floats, Bools]:
        """Mean rank [n, v] of each voice, NaN where all its members abstain, and whether any of them was asked."""
        members = (self.voice[:, None] == np.arange(self.voice.max(initial=-1) + 1)).astype(np.float64)
        codes = scale.codes(scores, asked)
        number = (codes % NUM_SYMBOLS > 0).T @ members
        total = scale.rank.ravel()[codes].T @ members
        return np.where(number > 0, total / np.maximum(number, 1.0), np.nan), asked @ members > 0

    def codes(self, scale: Scale, scores: Floats, asked: Bools) -> Codes:
        """Symbols [s, n], numbered over the sources."""
        shift = (np.arange(len(self.sources)) - self.sources) * NUM_SYMBOLS
        codes = encode(*self.values(scale, scores, asked), self.edges)[self.sources]
        return np.asarray(codes + shift[:, None], np.int32)


class Start(NamedTuple):
    """A hypothesis before EM."""

    hypothesis: Hypothesis
    voices: Voices
    data: Data
    q: Floats  # [n] P(Y = 1) from which EM starts

    @classmethod
    def of(cls, hypothesis: Hypothesis, scale: Scale, scores: Floats, asked: Bools, known: Known) -> Self:
        """Reads the scores [n, m]; labels that speak against the start turn it round."""
        v = len(hypothesis.loading)
        voices = Voices(hypothesis.voice, np.zeros((v, 0)), np.arange(0))
        values, heard = voices.values(scale, scores, asked)
        voices = voices._replace(edges=quantile_edges(values))
        every = encode(values, heard, voices.edges)
        voices = voices._replace(sources=np.flatnonzero((count(every) > 0).sum(axis=1) > 1))
        codes = voices.codes(scale, scores, asked)
        counts, silence = count(codes), voices.sources >= v
        anchored, fixed = (np.isin(np.arange(v), hypothesis.voice[mask]) for mask in (known.anchors, known.upright))
        data = Data(
            codes=codes,
            counts=counts,
            heard=(codes % NUM_SYMBOLS > 0).astype(np.float32),
            x=np.where(silence[:, None], 0.0, mid_ranks(counts)).ravel()[codes],
            groups=known.groups,
            labels=known.labels,
            anchors=np.tile(anchored, 2)[voices.sources] & ~silence,
            silence=silence,
            upright=np.tile(fixed, 2)[voices.sources] & ~silence,
            prior=_prior_rows(hypothesis.voice, known, every)[:, voices.sources],
        )
        side = np.where((hypothesis.loading < -_INVERTED) & ~fixed, -1.0, 1.0)
        balance = 0.5
        if v:
            balance = DawidSkene().fit(values * side, asked=heard).report().class_balance
        q = _start(data, np.tile(side, 2)[voices.sources], float(np.clip(balance, 0.01, 0.99)))
        labelled = ~np.isnan(known.labels)
        support = float(((2 * known.labels[labelled] - 1) * logit(np.clip(q[labelled], 0.05, 0.95))).sum())
        if support < -6.0:  # three labels at least speak against the majority
            q = 1.0 - q
        return cls(hypothesis, voices, data, q)


class Model(NamedTuple):
    """What prediction under one hypothesis needs; see `em.Fit`."""

    voice: Ints
    voice_edges: Floats
    sources: Ints
    table: Floats
    variance: Floats
    kinship: Floats
    prompts: Floats  # the fields of `em.Prompts`
    mean_weight: Floats  # [m] weight in the mean, negative where a voice counts the other way round
    mean_slope: Floats  # log-odds per unit of the mean
    mean_balance: Floats  # share of correct responses according to the mean
    mean_share: Floats  # share of the mean in P(correct), in [0, 1]

    @classmethod
    def fit(cls, start: Start, scale: Scale, scores: Floats, known: Known) -> tuple[Self, Floats, float]:
        """EM from `start`, P(Y = 1) [n] with labels clamped, and the log-likelihood of the labels."""
        hypothesis, voices, data, _ = start
        fit = expectation_maximization(data, start.q)
        spoken = ~data.silence
        agreement = correlations(data.x[spoken], data.heard[spoken])
        share = _mean_share(data, agreement, known, fit.q, alive=int((hypothesis.voice >= 0).sum()))
        side = np.ones(len(hypothesis.loading))
        if share < 1.0:
            against = (data.x[spoken] @ (fit.q - fit.q.mean()) < 0) & ~data.upright[spoken]
            side[voices.sources[spoken]] = np.where(against, -1.0, 1.0)
        alive = hypothesis.voice >= 0
        weight = np.zeros(len(alive))
        weight[alive] = side[hypothesis.voice[alive]] / voice_sizes(hypothesis.voice)[alive]
        weight = weight * np.where(known.anchors, ANCHOR_WEIGHT, 1.0)
        turned = side[voices.sources[spoken]]
        slope = _slope(agreement * np.outer(turned, turned)) / max(float(scale.mean(scores, weight).std()), 1e-3)
        balance = float(start.q.mean())
        mean = sigmoid(slope * scale.mean(scores, weight) + logit(balance))
        numbers = (np.array(fit.prompts), weight, np.array(slope), np.array(balance), np.array(share))
        model = cls(*voices, fit.table, fit.variance, fit.kinship, *numbers)
        labelled = ~np.isnan(known.labels)
        unclamped = fit.evidence.sum(axis=0, dtype=np.float64)[labelled] + logit(fit.prompts.mean)
        odds = (2 * known.labels[labelled] - 1) * np.clip(unclamped, -2.0, 2.0)  # one label may be wrong
        return model, (1 - share) * fit.q + share * mean, float(np.log(sigmoid(odds)).sum())

    @property
    def balance(self) -> float:
        """Share of correct responses."""
        share = float(self.mean_share)
        return (1 - share) * Prompts(*self.prompts.tolist()).mean + share * float(self.mean_balance)

    def predict(
        self, scale: Scale, scores: Floats, groups: Ints | None, asked: Bools
    ) -> tuple[Floats, Floats]:
        """P(correct) [n] and its variance [n]."""
        voices = Voices(self.voice, self.voice_edges, self.sources)
        tables = np.stack([self.table, self.variance]).astype(np.float32).reshape(2, -1)
        sums = np.zeros((2, len(scores)))
        for rows in (slice(low, low + _CHUNK) for low in range(0, len(scores), _CHUNK)):
            codes = voices.codes(scale, scores[rows], asked[rows])
            counted = discount(self.kinship, (codes % NUM_SYMBOLS > 0).astype(np.float32))
            sums[0, rows] = (counted * tables[0][codes]).sum(axis=0)
            sums[1, rows] = (counted**2 * tables[1][codes]).sum(axis=0)
        prompts = Prompts(*self.prompts.tolist())
        log_odds = sums[0] + logit(prompts.mean)
        for _ in range(_PROMPT_ROUNDS if groups is not None and np.isfinite(prompts.strength) else 0):
            log_odds, _ = prompts.log_odds(sums[0], sigmoid(log_odds), groups)
        # E[sigmoid(a)] of a normal a with variance v is about sigmoid(a / sqrt(1 + pi v / 8)), MacKay 1992.
        learned = sigmoid(log_odds / np.sqrt(1.0 + np.pi / 8.0 * sums[1]))
        mean = float(self.mean_slope) * scale.mean(scores, self.mean_weight) + logit(float(self.mean_balance))
        mean, share = sigmoid(np.asarray(mean)), float(self.mean_share)
        variance = ((1 - share) * learned * (1 - learned)) ** 2 * sums[1] + share * (1 - share) * (learned - mean) ** 2
        return (1 - share) * learned + share * mean, variance

    def shares(self) -> Floats:
        """Share [m] of each verifier's evidence that counts: relatives and the members of a voice share one."""
        v = len(self.voice_edges)
        spoken = self.sources < v
        total = np.ones(v)
        total[self.sources[spoken]] = self.kinship[np.ix_(spoken, spoken)].sum(axis=1)
        each = 1.0 / total[self.voice] / voice_sizes(self.voice) if v else np.zeros(len(self.voice))
        return np.asarray(np.where(self.voice >= 0, each, 0.0))

    def state(self, prefix: str) -> dict[str, NDArray[Any]]:
        """The fields as arrays, for `from_state`."""
        return {f"{prefix}/{key}": np.asarray(value) for key, value in self._asdict().items()}

    @classmethod
    def from_state(cls, state: Mapping[str, NDArray[Any]], prefix: str) -> Self:
        """The model that `state` was made of."""
        return cls(*(state[f"{prefix}/{key}"] for key in cls._fields))


def voice_sizes(voice: Ints) -> Floats:
    """Number [m] of verifiers that share each verifier's voice."""
    return np.asarray((voice[:, None] == voice).sum(axis=1), np.float64)


def _prior_rows(voice: Ints, known: Known, codes: Codes) -> Floats:
    """Rows [2, 2 v, NUM_SYMBOLS] by class, wrong first, spread within yes and no as the symbols of the voice are."""
    rows = np.zeros((2, len(codes), NUM_SYMBOLS))
    sizes = voice_sizes(voice)
    for k in np.flatnonzero((known.prior_rows > 0) & (voice >= 0)):
        symbols = codes[voice[k]] - voice[k] * NUM_SYMBOLS
        yes, no = (np.bincount(symbols[known.yes_votes[:, k] == vote], minlength=NUM_SYMBOLS) for vote in (1, 0))
        if yes.any() and no.any():  # a verifier that never varies says nothing, however good
            for y, rate in enumerate(known.prior_rates[:, k]):
                each = rate * yes / yes.sum() + (1 - rate) * no / no.sum()
                rows[y, voice[k]] += known.prior_rows[k] / sizes[k] * each
    return rows


def _start(data: Data, side: Floats, balance: float) -> Floats:
    """P(Y = 1) [n] with mean `balance`: mean rank of the voices, weighted by 1 / (sum of squared correlations).

    Loadings that priors imply replace the estimated ones as far as the priors are trusted. Anchors together weigh as
    much as all others.
    """
    if not len(data.codes):
        return np.full(data.codes.shape[1], 0.5)
    weight = side * ~data.silence / np.maximum((correlations(data.x, data.heard) ** 2).sum(axis=1), 1.0)
    rest = np.abs(weight[~data.anchors]).sum() / max(int(data.anchors.sum()), 1)
    weight = np.where(data.anchors, np.maximum(np.abs(weight), rest), weight)
    strength = data.prior.sum(axis=(0, 2)) / 2
    loading = ((data.prior[1] - data.prior[0]) * mid_ranks(data.counts)).sum(axis=1) / np.maximum(2 * strength, 1e-9)
    trust = strength / (_HALF_TRUST + strength)
    total = ((1 - trust) * weight + np.abs(weight).sum() * trust * loading) @ data.x
    z = _START_SLOPE * total / max(float(total.std()), 1e-9)
    return sigmoid(z + offset_to(balance, z))


def _mean_share(data: Data, agreement: Floats, known: Known, q: Floats, *, alive: int) -> float:
    """Share in [0, 1] that the mean keeps in the posterior; labels and priors take it back as they grow.

    It keeps all where nothing tells which voice is better: one or two voices, correlations as chance gives them, or an
    EM that found no classes.
    """
    v = len(agreement)
    told = int((~np.isnan(known.labels)).sum()) + float(known.prior_rows.sum())
    settled = 1.0 / (1.0 + (told / _SETTLING) ** 2)  # squared, so that a single label changes little
    if v == 0:
        return 0.0
    if v == 1 or v < min(3, alive) or (v == 2 and agreement[0, 1] < 0):
        return settled
    if q.var() < _FLAT * q.mean() * (1 - q.mean()):
        return settled
    heard = data.heard[~data.silence].astype(np.float64)
    pairs = np.triu_indices(v, 1)
    seen, terms = float(((heard @ heard.T) * agreement**2)[pairs].sum()), len(pairs[0])
    if data.groups is not None:  # a voice that tells prompts apart is not noise either
        seen, terms = seen + float(_sibling_chi_squared(data, data.groups).sum()), terms + v
    chance = terms + np.sqrt(2.0 * terms)  # one standard deviation above the mean of chi squared
    return float(settled * min(1.0, chance / max(seen, 1e-9)) ** 2)


def _sibling_chi_squared(data: Data, groups: Ints) -> Floats:
    """Squared z score of the correlation between responses to one prompt, for each voice."""
    x, sizes = data.x[~data.silence], np.bincount(groups).astype(np.float64)
    total = np.stack([np.bincount(groups, row) for row in x])
    together = (total**2).sum(axis=1) - (x * x).sum(axis=1)
    pairs = max(float((sizes * (sizes - 1.0)).sum()), 1.0)
    return np.asarray(together**2 / ((x * x).mean(axis=1) ** 2 * 2.0 * pairs))


def _slope(agreement: Floats) -> float:
    """Log-odds of Y per standard deviation of the mean, for classes of equal spread.

    The squared correlation of the mean with the truth is put at the average correlation of two voices, at least 0.25.
    """
    pairs = np.triu_indices(len(agreement), 1)
    shared = float(np.clip(agreement[pairs].mean() if len(pairs[0]) else 0.0, _LEAST_SHARED, 0.9))
    # Two normal classes of equal size and spread whose means lie d apart: r^2 = d^2 / (4 + d^2), and the log-odds rise
    # by d within-class deviations, that is by d sqrt(1 + d^2 / 4) = 2 r / (1 - r^2) a deviation of the whole.
    return float(2.0 * np.sqrt(shared) / (1.0 - shared))
