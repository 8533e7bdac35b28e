"""Dawid and Skene's EM over graded symbols, with an estimate of the remaining dependence between voices.

Axes: n responses, v voices, s sources (the values of each voice, then its abstentions), S symbols of one source.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forge_verifiers.combiners.base import Bools, Floats, Ints, logit, sigmoid

Singles = NDArray[np.float32]
Codes = NDArray[np.int32]

MAX_BINS = 6
NUM_SYMBOLS = MAX_BINS + 1
"""Symbols of a source, numbered from source * NUM_SYMBOLS. The first one means that nothing was observed."""
_ROWS_PER_BIN = 4
_PRIOR_ROWS, _PRIOR_LEAN = 20.0, 0.6
"""Weight of the prior in rows, and its log-odds per symbol at the ends of the scale."""
_ANCHOR_SHARE, _ANCHOR_LEAN = 0.1, 0.94
"""The same for anchors, where the weight is a fraction of the rows."""
_LABEL_ROWS = 4.0
_MAX_STEPS, _INDEPENDENT_STEPS, _STEPS_WITHOUT_ABSTENTIONS = 22, 2, 6
_STEP_SIZE, _TOLERANCE = 0.7, 4e-3
_MAX_LABEL_LOG_ODDS = 12.0
_GRID = ((np.arange(12, dtype=np.float32) + 0.5) / 12)[:, None]


class PromptModel(NamedTuple):
    """Statistics that responses to one prompt share."""

    mean: float = 0.5  # P(correct) over all prompts
    strength: float = np.inf  # a prompt's rate of correct responses has the prior Beta(mean s, (1 - mean) s)
    right: float = 0.0  # mean evidence of correct responses
    wrong: float = 0.0
    intraclass: float = 0.0  # correlation of a prompt's evidence around these means

    def log_odds(self, evidence: Floats, q: Floats, groups: Ints | None) -> tuple[Floats, float]:
        """Log-odds [n] of P(Y = 1 | evidence of all responses to the prompt), and a new estimate of `strength`.

        Two effects raise the evidence of all responses to a prompt: verifiers that like the prompt, and a high rate of
        correct responses. The first is predicted as a random intercept (best linear predictor). Only half of it is
        subtracted, because it may be the rate after all. The rate is integrated out on a grid. To avoid circular
        evidence, a response's rate is based on the other responses to the prompt. Their evidence is divided by the
        design effect of k correlated samples, 1 + (k - 1) * intraclass.
        """
        if groups is None or np.isinf(self.strength):
            return np.asarray(evidence + logit(self.mean)), np.inf
        design_effect = 1.0 + (np.bincount(groups) - 1.0) * self.intraclass
        residual = np.bincount(groups, evidence - q * self.right - (1 - q) * self.wrong)
        intercept = residual * self.intraclass / design_effect
        corrected = evidence - 0.5 * intercept[groups]
        odds = np.exp(np.minimum(corrected, 40.0).astype(np.float32))
        likelihood = np.log(_GRID * odds + 1 - _GRID) / design_effect[groups]
        alpha, beta = self.mean * self.strength, (1 - self.mean) * self.strength
        prior = (alpha - 1) * np.log(_GRID) + (beta - 1) * np.log1p(-_GRID)
        all_responses = np.stack([np.bincount(groups, row) for row in likelihood]) + prior
        other_responses = (all_responses[:, groups] - likelihood).astype(np.float32)
        others, rates = (normalize(np.exp(x - x.max(axis=0)).T) for x in (other_responses, all_responses))
        mean = float((rates @ _GRID).mean())
        variance = float((rates @ _GRID**2).mean()) - mean**2
        strength = float(np.clip(mean * (1 - mean) / max(variance, 1e-6) - 1.0, 0.3, 200.0))
        return np.asarray(corrected + logit((others @ _GRID)[:, 0])), strength


class Data(NamedTuple):
    """Input of EM: the sources that vary."""

    codes: Codes  # [s, n] symbols, numbered over these sources
    counts: Floats  # [s, S] frequency of each symbol
    observed: Singles  # [s, n] 1 or 0
    x: Floats  # [s, n] standardized mid-ranks; 0 for abstention sources and where nothing was observed
    groups: Ints | None
    labels: Floats  # [n] 0, 1 or NaN
    anchors: Bools  # [s]
    is_abstention: Bools  # [s]
    monotone: Bools  # [s] whether higher symbols must not be evidence against a response, whatever the data say
    prior: Floats  # [2, s, S] pseudo-counts of rows by class, wrong first


class Fit(NamedTuple):
    """Result of EM."""

    q: Floats  # [n] P(Y = 1)
    rates: Floats  # [2, s, S] P(symbol | Y), wrong first
    table: Floats  # [s, S] log ratio of the rates: the evidence of a symbol
    variance: Floats  # [s, S] of `table`
    error_correlation: Floats  # [s, s] correlation of errors beyond chance, in [0, 1]
    prompts: PromptModel
    evidence: Singles  # [s, n] contribution of each source to the log-odds; dependent sources share one


def quantile_edges(scores: Floats) -> Floats:
    """Inner bin edges per verifier, [m, MAX_BINS - 1], midway between scores. +inf for unused bins.

    Up to MAX_BINS distinct values have one bin each. With more values, a value frequent enough to fill a bin gets its
    own.
    """
    edges = np.full((scores.shape[1], MAX_BINS - 1), np.inf)
    for k, column in enumerate(scores.T):
        values, counts = np.unique(column[~np.isnan(column)], return_counts=True)
        cuts = list(range(len(values) - 1))
        if len(values) > MAX_BINS:
            cuts = _quantile_cuts(counts)
        edges[k, : len(cuts)] = [values[i] / 2 + values[i + 1] / 2 for i in cuts]
    return edges


def _quantile_cuts(counts: Ints) -> list[int]:
    """Indices of the values after which a bin ends."""
    rows, bins = int(counts.sum()), int(np.clip(counts.sum() // _ROWS_PER_BIN, 2, MAX_BINS))
    full, filled = rows / bins, 0
    cuts: list[int] = []
    for i, (number, following) in enumerate(zip(counts[:-1].tolist(), counts[1:].tolist(), strict=True)):
        filled += number
        if bins > 1 and (filled + following / 2 >= rows / bins or (following >= full and 4 * filled >= full)):
            cuts.append(i)
            rows, bins, filled = rows - filled, bins - 1, 0
    return cuts


def encode(scores: Floats, queried: Bools, edges: Floats) -> Codes:
    """Symbols int32 [2m, n] of scores [n, m]: the bin of each verifier, then whether it, if queried, abstained."""
    missing = np.isnan(scores.T)
    bins = np.zeros(scores.T.shape, np.intp)
    for k, edge in enumerate(edges):
        bins[k] = np.searchsorted(edge, scores[:, k])
    codes = np.concatenate([np.where(missing, 0, 1 + bins), np.where(queried.T, 1 + missing, 0)])
    return np.asarray(codes + np.arange(len(codes))[:, None] * NUM_SYMBOLS, np.int32)


def count(codes: Codes, weights: NDArray[np.floating] | None = None) -> Floats:
    """Weighted number [s, S] of rows with each symbol, 0 for "nothing". Codes and weights [s, n]."""
    flat = None if weights is None else np.ascontiguousarray(weights).ravel()
    counts = np.bincount(codes.ravel(), flat, len(codes) * NUM_SYMBOLS).astype(np.float64).reshape(-1, NUM_SYMBOLS)
    counts[:, 0] = 0.0
    return counts


def mid_ranks(counts: Floats) -> Floats:
    """Standardized mid-rank of every symbol [s, S]: mean 0 and variance 1 over the observations. 0 for "nothing"."""
    total = np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
    rank = np.where(counts > 0, (np.cumsum(counts, axis=1) - counts / 2) / total - 0.5, 0.0)
    return np.asarray(rank / np.sqrt(np.maximum((counts * rank**2).sum(axis=1, keepdims=True) / total, 1e-9)))


def discount(error_correlation: Floats, observed: Singles) -> Singles:
    """Fraction in [0, 1] of each source's evidence that counts, [s, n] or [s, 1]: correlated sources share one."""
    if observed.all():
        return np.asarray(1.0 / error_correlation.sum(axis=1, keepdims=True), np.float32)
    return np.asarray(observed / np.maximum(error_correlation.astype(np.float32) @ observed, 1.0))


def expectation_maximization(data: Data, start: Floats) -> Fit:
    """EM from P(Y = 1) = `start` [n]. Each step estimates symbol rates, error correlations and the posterior."""
    labeled = ~np.isnan(data.labels)
    rows = np.where(labeled, _LABEL_ROWS, 1.0)
    prior, counts = _prior_rows(data, start), count(data.codes, data.observed * rows)
    q = np.where(labeled, data.labels, start)
    posterior: NDArray[np.floating] = np.broadcast_to(q, data.codes.shape)
    prompts = PromptModel(strength=np.inf if data.groups is None else 4.0)
    smoothed = np.eye(len(data.codes))
    step = 0
    while True:
        # M-step, Dawid and Skene 1979, eqs. 2.3 and 2.4: P(symbol | y) is the sum of P(Y = y) over the rows with the
        # symbol, divided by the sum over all rows, plus pseudo-counts. `posterior` is different for each source (see
        # below), so its class sizes are first scaled to those of the full posterior `q`.
        right, size = data.observed @ (rows * q), counts.sum(axis=1)
        with_1 = count(data.codes, posterior * rows)
        by_class = [np.maximum(counts - with_1, 0.0), with_1]
        sizes = zip(by_class, (size - right, right), strict=True)
        both = np.stack([normalize(c) * k[:, None] for c, k in sizes]) + prior
        rates = normalize(both)
        table = np.where(data.counts > 0, np.log(np.maximum(rates[1], 1e-12) / np.maximum(rates[0], 1e-12)), 0.0)
        table = _monotone_table(data, table, q)
        if step < _STEPS_WITHOUT_ABSTENTIONS:  # otherwise a common pattern of abstentions becomes the latent class
            table[data.is_abstention] = 0.0
        e = table.astype(np.float32).ravel()[data.codes]
        correlation = _error_correlation(data, e, q)
        # E-step, eq. 2.5: log-odds = logit P(Y) + sum of log P(symbol | 1) / P(symbol | 0). That equation assumes
        # independent errors. Sources whose errors correlate are discounted to the evidence of one source.
        smoothed = (1 - _STEP_SIZE) * smoothed + _STEP_SIZE * correlation
        if step < _INDEPENDENT_STEPS:
            smoothed = np.eye(len(correlation))
        shared = discount(smoothed, data.observed) * e
        evidence = shared.sum(axis=0, dtype=np.float64)
        mean = float((rows @ q + 1.0) / (rows.sum() + 2.0))
        has_intercept = step > _INDEPENDENT_STEPS
        prompts = _fit_prompts(data.groups, evidence, q, prompts._replace(mean=mean), has_intercept=has_intercept)
        log_odds, strength = prompts.log_odds(evidence, q, data.groups)
        log_odds = np.where(labeled, _MAX_LABEL_LOG_ODDS * (2.0 * data.labels - 1.0), log_odds)
        prompts = prompts._replace(strength=strength)
        before, q = q, sigmoid(log_odds)
        step += 1
        converged = step > _STEPS_WITHOUT_ABSTENTIONS + 1 and np.abs(q - before).max() < _TOLERANCE
        if step == _MAX_STEPS or converged:
            break
        # A source must not confirm itself through sources that copy it: its rates are counted with a posterior from
        # which the evidence of correlated sources is removed.
        correlated = (correlation - np.eye(len(correlation))) @ shared
        posterior = np.where(labeled, q, _posterior_without(log_odds, correlated))
    variance = np.where(data.counts > 0, (1.0 / (both + 1.0)).sum(axis=0), 0.0)
    if data.monotone.any():  # else a rare vote for a response lowers a high P(correct), because it is less certain
        average = (normalize(data.counts) * variance).sum(axis=1, keepdims=True)
        variance[data.monotone] = np.where(data.counts > 0, average, 0.0)[data.monotone]
    return Fit(q, rates, table, variance, smoothed, prompts, shared)


def normalize(weights: Floats) -> Floats:
    """Weights scaled to sum to 1 over the last axis. 0 where all are 0."""
    return np.asarray(weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-12))


def _monotone_table(data: Data, table: Floats, q: Floats) -> Floats:
    """The evidence [s, S] of values, monotone in the symbol and in between no better than on a line over mid-ranks.

    With free evidence, responses that leave every verifier undecided would become the latent class, because their
    scores agree. The evidence rises or falls as the values do with `q` [n]. Each source alone then gives the same mean
    P(Y = 1) as before.
    """
    rises = ((data.x @ (q - q.mean()) >= 0) | data.monotone)[:, None]
    worst_first = np.where(rises, np.arange(NUM_SYMBOLS), np.arange(NUM_SYMBOLS)[::-1])
    ranks = np.where(rises, 1.0, -1.0) * mid_ranks(data.counts)
    values, counts, ranks = (np.take_along_axis(each, worst_first, axis=1) for each in (table, data.counts, ranks))
    seen = counts > 0
    smooth = isotonic(values, counts + 1e-9)
    worst, low = (np.where(seen, each, np.inf).min(axis=1, keepdims=True) for each in (smooth, ranks))
    best, high = (np.where(seen, each, -np.inf).max(axis=1, keepdims=True) for each in (smooth, ranks))
    line = worst + (best - worst) * (ranks - low) / np.maximum(high - low, 1e-9)
    shape = np.take_along_axis(np.minimum(smooth, line), worst_first, axis=1)
    shape = np.where((data.counts > 0) & ~data.is_abstention[:, None], shape, table)
    frequency, prior = normalize(data.counts), logit(np.clip(q.mean(), 0.01, 0.99))
    mean = (frequency * sigmoid(table + prior)).sum(axis=1, keepdims=True)
    shift = np.zeros_like(mean)
    for _ in range(6):  # Newton's method
        p = sigmoid(shape + shift + prior)
        slope = (frequency * p * (1 - p)).sum(axis=1, keepdims=True)
        shift += np.clip((mean - (frequency * p).sum(axis=1, keepdims=True)) / np.maximum(slope, 1e-3), -2.0, 2.0)
    return np.where(data.counts > 0, shape + shift, 0.0)


def isotonic(values: Floats, weights: Floats) -> Floats:
    """Weighted isotonic regression of each row [s, S]. One call for all rows is faster than scipy's for each.

    By the min-max formula, a symbol gets the largest, over the starts up to it, of the smallest mean from the start to
    any end from the symbol on.
    """
    total, weight = (np.pad(np.cumsum(each, axis=1), ((0, 0), (1, 0))) for each in (weights * values, weights))
    is_backward = np.tri(values.shape[1], k=-1, dtype=bool)  # [start, end]
    span = np.where(is_backward, 1.0, weight[:, None, 1:] - weight[:, :-1, None])
    means = np.where(is_backward, np.inf, (total[:, None, 1:] - total[:, :-1, None]) / span)
    smallest = np.minimum.accumulate(means[..., ::-1], axis=2)[..., ::-1]
    return np.asarray(np.where(is_backward, -np.inf, smallest).max(axis=1))


def _prior_rows(data: Data, start: Floats) -> Floats:
    """Pseudo-counts of rows [2, s, S]: each source slightly better than chance, in the direction of `start`."""
    present = (data.counts > 0).astype(np.float64)
    size = np.maximum(present.sum(axis=1, keepdims=True) - 1.0, 1.0)
    place = 2.0 * (np.cumsum(present, axis=1) - 1.0) / size - 1.0
    covariance = data.x @ (start - start.mean()) / max(float(start.std()), 1e-9)
    direction = np.where(covariance / np.maximum(data.observed.sum(axis=1), 1) < -0.1, -1.0, 1.0)
    lean = _PRIOR_LEAN * place * np.where(data.is_abstention, 0.0, direction)[:, None]
    shape = np.where(data.is_abstention[:, None], data.counts, present) * np.exp(np.stack([-lean, lean]))
    rank = np.clip(_ANCHOR_LEAN * mid_ranks(data.counts), -3.0, 3.0)
    anchors = normalize(data.counts * np.exp(np.stack([-rank, rank]))) * data.anchors[:, None]
    return np.asarray(_PRIOR_ROWS * normalize(shape) + _ANCHOR_SHARE * data.codes.shape[1] * anchors + data.prior)


def _error_correlation(data: Data, e: Singles, q: Floats) -> Floats:
    """Correlation [s, s] of evidence within the classes, minus two standard errors and a margin for few rows."""
    right, observed = q.astype(np.float32), data.observed
    n = np.maximum(observed @ observed.T, 1e-3)
    n1 = np.clip((observed * right) @ observed.T, 1e-3, n)
    s1 = (e * right) @ observed.T
    s0 = e @ observed.T - s1
    within = ((e @ e.T - s1 * s1.T / n1 - s0 * s0.T / np.maximum(n - n1, 1e-3)) / n).astype(np.float64)
    deviation = np.sqrt(np.maximum(np.diag(within), 1e-9))
    correlation = np.clip(within / np.outer(deviation, deviation) - 2.0 / np.sqrt(n) - 8.0 / n, 0.0, 1.0)
    np.fill_diagonal(correlation, 1.0)
    return np.asarray(correlation)


def _posterior_without(log_odds: Floats, evidence: NDArray[np.floating]) -> Singles:
    """P(Y = 1) [s, n] without the given evidence [s, n]."""
    return np.asarray(1.0 / (1.0 + np.exp(np.clip(evidence - log_odds, -30.0, 30.0))), np.float32)


def _fit_prompts(
    groups: Ints | None, evidence: Floats, q: Floats, prompts: PromptModel, *, has_intercept: bool
) -> PromptModel:
    """Class means of the evidence, and its correlation within prompts minus one standard error."""
    right, wrong = (float(p @ evidence / max(p.sum(), 1e-9)) for p in (q, 1 - q))
    intraclass = 0.0
    if groups is not None and has_intercept:
        residual, sizes = evidence - q * right - (1 - q) * wrong, np.bincount(groups)
        energy, pairs = float(residual @ residual), max(float((sizes * (sizes - 1.0)).sum()), 1.0)
        covariance = float((np.bincount(groups, residual) ** 2).sum()) - energy
        correlation = covariance / max(pairs * energy / len(q), 1e-12)
        intraclass = float(np.clip(correlation - np.sqrt(2.0 / pairs), 0.0, 1.0))
    return prompts._replace(right=right, wrong=wrong, intraclass=intraclass)
