"""Dawid and Skene's EM over graded symbols, for voices whose remaining dependence is estimated along the way.

Axes: n responses, v voices, s sources (what each voice says, then whether it abstains), S symbols of one source.
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
"""Symbols of a source, which owns the numbers from source * NUM_SYMBOLS; its first says that nothing was heard."""
_ROWS_PER_BIN = 4
_PRIOR_ROWS, _PRIOR_LEAN = 20.0, 0.6
_ANCHOR_SHARE, _ANCHOR_LEAN = 0.1, 0.94
_LABEL_ROWS = 4.0
_ROUNDS, _SETTLE, _SILENT, _STEP, _TOLERANCE = 22, 2, 6, 0.7, 4e-3
_GRID = ((np.arange(12, dtype=np.float32) + 0.5) / 12)[:, None]


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
    x: Floats  # [s, n] standardized mid-ranks; 0 for silences and where nothing was heard
    groups: Ints | None
    labels: Floats  # [n] 0, 1 or NaN
    anchors: Bools  # [s]
    silence: Bools  # [s]
    upright: Bools  # [s] whether higher symbols must not speak against a response
    prior: Floats  # [2, s, S] rows by class, wrong first, that count as seen


class Fit(NamedTuple):
    """Where EM ended."""

    q: Floats  # [n] P(Y = 1)
    rates: Floats  # [2, s, S] P(symbol | Y), wrong first
    table: Floats  # [s, S] their log ratio: the evidence of a symbol
    variance: Floats  # [s, S] of `table`
    kinship: Floats  # [s, s] correlation of errors beyond chance, in [0, 1]
    prompts: Prompts
    evidence: Singles  # [s, n] what each source adds to the log-odds, dependent sources counted once


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
    bins = np.zeros(scores.T.shape, np.intp)
    for k, edge in enumerate(edges):
        bins[k] = np.searchsorted(edge, scores[:, k])
    codes = np.concatenate([np.where(silent, 0, 1 + bins), np.where(asked.T, 1 + silent, 0)])
    return np.asarray(codes + np.arange(len(codes))[:, None] * NUM_SYMBOLS, np.int32)


def count(codes: Codes, weights: NDArray[np.floating] | None = None) -> Floats:
    """Weighted number [s, S] of rows in which each symbol was heard; codes and weights [s, n]."""
    flat = None if weights is None else np.ascontiguousarray(weights).ravel()
    counts = np.bincount(codes.ravel(), flat, len(codes) * NUM_SYMBOLS).astype(np.float64).reshape(-1, NUM_SYMBOLS)
    counts[:, 0] = 0.0
    return counts


def mid_ranks(counts: Floats) -> Floats:
    """Standardized mid-rank of every symbol [s, S]: mean 0, variance 1 over what was heard; 0 for "nothing"."""
    total = np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
    rank = np.where(counts > 0, (np.cumsum(counts, axis=1) - counts / 2) / total - 0.5, 0.0)
    return np.asarray(rank / np.sqrt(np.maximum((counts * rank**2).sum(axis=1, keepdims=True) / total, 1e-9)))


def discount(kinship: Floats, heard: Singles) -> Singles:
    """Share in [0, 1] of each source's evidence that counts, [s, n] or [s, 1]: relatives that were heard share one."""
    if heard.all():
        return np.asarray(1.0 / kinship.sum(axis=1, keepdims=True), np.float32)
    return np.asarray(heard / np.maximum(kinship.astype(np.float32) @ heard, 1.0))


def expectation_maximization(data: Data, start: Floats) -> Fit:
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
        if data.upright.any():
            table[data.upright] = _rising(table, data.counts)[data.upright]
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
    return Fit(q, rates, table, variance, kinship, prompts, shared)


def normal(weights: Floats) -> Floats:
    """Weights that sum to 1 over the last axis, or to 0 where all are 0."""
    return np.asarray(weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-12))


def _rising(table: Floats, counts: Floats) -> Floats:
    """The evidence [s, S] made to rise with the symbol, with the same mean over the rows."""
    rising = np.maximum.accumulate(np.where(counts > 0, table, -np.inf), axis=1)
    rising = np.where(counts > 0, rising, 0.0)
    shift = (counts * (table - rising)).sum(axis=1, keepdims=True) / np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
    return np.where(counts > 0, rising + shift, 0.0)


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


