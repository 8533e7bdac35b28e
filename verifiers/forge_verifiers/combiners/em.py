"""Expectation maximisation behind the default combiner.

In: symbols int32 [m, n]. Out: log-likelihood ratio of every symbol, weights, prior. Waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forge_verifiers.combiners.base import Floats, Ints, logit, sigmoid
from forge_verifiers.combiners.priors import Told
from forge_verifiers.combiners.prompts import PromptPrior, PromptTaste, sibling_prior, taste_of, without_taste
from forge_verifiers.combiners.start import INVERTED, Bools, Data, Start, free_anchors, gather, start_from
from forge_verifiers.combiners.structure import dependence, evidence_weights
from forge_verifiers.combiners.symbols import MAX_BINS, abstained, count

_ROUNDS = 22
_TOLERANCE = 4e-3
_SYMBOL_PRIOR = 2.0
"""Pseudo-rows per verifier and class, spread as the symbols are."""
_SILENCE_PRIOR = 4.0
_SILENT_ROUNDS = 6
"""Abstention is no evidence in the first rounds: a common pattern of silence would become the latent class."""
_SETTLE_ROUNDS = 2
_STEP = 0.7
_KIN_FROM = 0.2
_LABEL_ROWS = 4.0
"""Rows that one label counts for."""
MIN_SOURCES = 3
"""Independent verifiers or families below which second moments say nothing about accuracy."""
_EQUAL_LOADING = 0.4
"""Correlation with the truth assumed of a verifier whose accuracy cannot be learned."""
_START_STRENGTH = 4.0
_NO_TASTE = PromptTaste(right=0.0, wrong=0.0, share=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What EM learned."""

    table: Floats
    """[m, NUM_SYMBOLS] weighted log P(symbol | correct) / P(symbol | wrong)."""
    variance: Floats
    """[m, NUM_SYMBOLS] squared standard error of `table`."""
    weight: Floats
    tpr: Floats
    fpr: Floats
    dependence: Floats
    """[m, m] error correlations beyond chance, in [0, 1]."""
    prior: PromptPrior
    """``strength`` is 0 where prompts are unknown."""
    taste: PromptTaste
    effective_number: float
    num_sources: int
    """Verifiers that vary, each declared family counted once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pseudo:
    """Pseudo-counts of symbols per class [m, NUM_SYMBOLS]: spread as the symbols are, a little better than chance."""

    right: Floats
    wrong: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rates:
    p1: Floats
    p0: Floats
    n1: float
    n0: float
    table: Floats
    silence: Floats
    """What speaking or abstaining says on its own, already weighted."""


def evidence_em(
    codes: NDArray[np.int32],
    *,
    groups: Ints | None,
    labels: Floats | None,
    family: Ints | None,
    anchors: Bools,
    known: Told | None = None,
) -> Evidence:
    """Fits symbol rates, dependence and priors. See `Symbolic` for the method."""
    data = gather(codes, groups=groups, labels=labels, family=family, anchors=anchors, told=known)
    start = start_from(data)
    if data.num_sources < MIN_SOURCES and labels is None:
        return _unlearned(data, start)
    return _iterate(data, start)


def _iterate(data: Data, start: Start) -> Evidence:
    codes, (m, n) = data.codes, data.codes.shape
    known = np.zeros(n, bool) if data.labels is None else ~np.isnan(data.labels)
    truth = np.zeros(n) if data.labels is None else np.where(known, data.labels, 0.0)
    rows = np.where(known, _LABEL_ROWS, 1.0)
    counts = count(codes, np.broadcast_to(rows, (m, n))) if known.any() else data.counts
    pseudo, hush = _pseudo(data, start), np.zeros(m)
    weight = 1.0 / start.kinship.sum(axis=1) * data.alive
    own = weight
    q = np.where(known, truth, start.q)
    posterior = np.broadcast_to(q, (m, n))
    prior = PromptPrior(mean=0.5, strength=_START_STRENGTH, bias=0.0)
    taste = _NO_TASTE
    rates, kinship = _rates(count(codes, posterior * rows), counts, float(rows @ q), pseudo, hush), start.kinship
    for step in range(_ROUNDS):
        if step == _SILENT_ROUNDS:
            hush = _silence_weight(codes, q) * (data.counts[:, MAX_BINS] > 0)
        n1 = float(rows @ q)
        rates = _rates(count(codes, posterior * rows), counts, n1, pseudo, hush)
        e = rates.table.astype(np.float32).ravel()[codes]
        kinship, scale = _kinship(e, q, data)
        if step >= _SETTLE_ROUNDS:
            shared, own = evidence_weights(kinship, scale, own)
            weight = (1 - _STEP) * weight + _STEP * 0.5 * (shared + own) * data.alive
        log_odds = (weight.astype(np.float32) @ e).astype(np.float64)
        if hush.any():
            log_odds += rates.silence.astype(np.float32).ravel()[codes].sum(axis=0)
        if data.groups is not None and step > _SETTLE_ROUNDS:
            taste = taste_of(log_odds, q, data.groups)
            log_odds = without_taste(log_odds, q, data.groups, taste)
        log_odds = np.where(known, 24.0 * truth - 12.0, log_odds)
        share = float((n1 + 1.0) / (rows.sum() + 2.0))
        bias = taste_of(log_odds, q, data.groups).share if data.groups is not None and step > 1 else 0.0
        shift, prior = _prior(log_odds, data.groups, PromptPrior(mean=share, strength=prior.strength, bias=bias))
        before, q = q, np.where(known, truth, sigmoid(log_odds + shift))
        if step + 1 == _ROUNDS or (step > _SILENT_ROUNDS and np.abs(q - before).max() < _TOLERANCE):
            break
        rest = _kin(kinship) * weight
        posterior = np.where(known, truth, _posterior_without(rest.astype(np.float32) @ e, log_odds + shift))
    if not known.any() and (q - q.mean()) @ start.q < 0:  # the classes swapped names on the way
        rates = _Rates(p1=rates.p0, p0=rates.p1, n1=rates.n0, n0=rates.n1, table=-rates.table, silence=-rates.silence)
        prior = PromptPrior(mean=1.0 - prior.mean, strength=prior.strength, bias=prior.bias)
        taste = PromptTaste(right=-taste.wrong, wrong=-taste.right, share=taste.share)
    return _evidence(data, rates, weight, kinship, (prior, taste))


def _pseudo(data: Data, start: Start) -> _Pseudo:
    rows = np.where(data.anchors, _SYMBOL_PRIOR + 0.1 * data.codes.shape[1], _SYMBOL_PRIOR)[:, None]
    trust = np.where(data.anchors, start.loading / (1 - start.loading**2), 0.18)
    trust = np.where(start.loading < INVERTED, -trust, trust)
    lean = np.clip(trust[:, None] * start.rank, -3.0, 3.0)
    up, down = data.counts * np.exp(lean), data.counts * np.exp(-lean)
    right, wrong = rows * up / up.sum(axis=1, keepdims=True), rows * down / down.sum(axis=1, keepdims=True)
    if data.told is not None:
        right, wrong = data.told.added_to(right, wrong)
    return _Pseudo(right=right, wrong=wrong)


def _silence_weight(codes: NDArray[np.int32], q: Floats) -> Floats:
    """Share [m] in [0, 1] of each verifier's silence that counts.

    All of it where others share at most a quarter, given Y, and none where they share half: silence in company is a
    schedule (a cascade), not evidence.
    """
    within = _error_covariance(abstained(codes).astype(np.float32), q)
    spread = np.sqrt(np.maximum(np.diag(within), 1e-9))
    alone = 1.0 / dependence(within / np.outer(spread, spread), len(q)).sum(axis=1)
    return np.asarray(np.clip(4.0 * alone - 2.0, 0.0, 1.0))


def _rates(c1: Floats, counts: Floats, n1: float, pseudo: _Pseudo, hush: Floats) -> _Rates:
    """P(symbol | Y), the log ratio of the bin among spoken rows, and `hush` times that of speaking at all.

    Args:
        c1: how often each symbol came with Y = 1, [m, NUM_SYMBOLS]; `counts` likewise with any Y.
        n1: rows with Y = 1; every verifier's counts are brought to it.
    """
    n0 = float(counts[0].sum()) - n1
    c0 = counts - c1
    c1 = c1 * (n1 / np.maximum(c1.sum(axis=1, keepdims=True), 1e-9))
    c0 = c0 * (n0 / np.maximum(c0.sum(axis=1, keepdims=True), 1e-9))
    p1 = (c1 + pseudo.right + 1e-9) / (n1 + pseudo.right.sum(axis=1, keepdims=True))
    p0 = (c0 + pseudo.wrong + 1e-9) / (n0 + pseudo.wrong.sum(axis=1, keepdims=True))
    table = np.log(p1 / p0)
    spoken = slice(0, MAX_BINS)
    table[:, spoken] -= np.log(p1[:, spoken].sum(axis=1) / p0[:, spoken].sum(axis=1))[:, None]
    silence = counts[:, MAX_BINS] / counts.sum(axis=1)
    s1 = (c1[:, MAX_BINS] + _SILENCE_PRIOR * silence + 1e-9) / (n1 + _SILENCE_PRIOR + 2e-9)
    s0 = (c0[:, MAX_BINS] + _SILENCE_PRIOR * silence + 1e-9) / (n0 + _SILENCE_PRIOR + 2e-9)
    heard = (silence > 0) & (silence < 1)
    s1, s0 = np.where(heard, s1, 0.5), np.where(heard, s0, 0.5)
    table[:, MAX_BINS] = 0.0
    table[counts == 0] = 0.0
    silent = np.repeat((hush * np.log((1 - s1) / (1 - s0)))[:, None], counts.shape[1], axis=1)
    silent[:, MAX_BINS] = hush * np.log(s1 / s0)
    return _Rates(p1=p1, p0=p0, n1=n1, n0=n0, table=table, silence=silent)


def _kinship(e: NDArray[np.float32], q: Floats, data: Data) -> tuple[Floats, Floats]:
    within = _error_covariance(e, q)
    scale = np.sqrt(np.maximum(np.diag(within), 1e-9))
    kinship = dependence(within / np.outer(scale, scale), len(q), data.family)
    return free_anchors(kinship, data.anchors), scale


def _error_covariance(e: NDArray[np.float32], q: Floats) -> Floats:
    """Covariance [m, m] of the evidence within the classes, averaged over both."""
    n = e.shape[1]
    n1 = float(q.sum())
    whole, right = e.sum(axis=1, dtype=np.float64), (e @ q.astype(np.float32)).astype(np.float64)
    m1, m0 = right / max(n1, 1e-9), (whole - right) / max(n - n1, 1e-9)
    return np.asarray((e @ e.T).astype(np.float64) / n - n1 / n * np.outer(m1, m1) - (1 - n1 / n) * np.outer(m0, m0))


def _prior(log_odds: Floats, groups: Ints | None, prior: PromptPrior) -> tuple[Floats, PromptPrior]:
    """Prior log-odds [n], and the prior brought up to date by the moments of the prompts' rates."""
    if groups is None:
        return np.full(len(log_odds), float(logit(prior.mean))), PromptPrior(mean=prior.mean, strength=0.0, bias=0.0)
    shift, mean, variance = sibling_prior(log_odds, groups, prior)
    mean = float(np.clip(mean, 1e-3, 1 - 1e-3))
    strength = float(np.clip(mean * (1 - mean) / variance - 1.0, 0.3, 200.0))
    return shift, PromptPrior(mean=mean, strength=strength, bias=prior.bias)


def _kin(kinship: Floats) -> Floats:
    """Kinship to others [m, m]; none for verifiers with hardly any."""
    kin = kinship - np.diag(np.diag(kinship))
    return np.where(kin.sum(axis=1, keepdims=True) > _KIN_FROM, kin, 0.0)


def _posterior_without(evidence: NDArray[np.float32], log_odds: Floats) -> NDArray[np.float32]:
    """P(Y = 1) [m, n] had the given evidence [m, n] not been heard. Overwrites `evidence`."""
    evidence -= log_odds.astype(np.float32)
    np.clip(evidence, -40.0, 40.0, out=evidence)
    np.exp(evidence, out=evidence)
    evidence += 1.0
    return np.reciprocal(evidence, out=evidence)


def _evidence(
    data: Data, rates: _Rates, weight: Floats, kinship: Floats, prompts: tuple[PromptPrior, PromptTaste]
) -> Evidence:
    tpr, fpr = _telling_cut(rates.p1, rates.p0, data.alive)
    doubt = 1.0 / (rates.n1 * rates.p1 + 1.0) + 1.0 / (rates.n0 * rates.p0 + 1.0)
    return Evidence(
        table=rates.table * weight[:, None] + rates.silence,
        variance=np.where(data.counts > 0, doubt * weight[:, None] ** 2, 0.0),
        weight=weight,
        tpr=tpr,
        fpr=fpr,
        dependence=kinship,
        prior=prompts[0],
        taste=prompts[1],
        effective_number=float((data.alive / kinship.sum(axis=1)).sum()),
        num_sources=data.num_sources,
    )


def _telling_cut(p1: Floats, p0: Floats, alive: Bools) -> tuple[Floats, Floats]:
    """P(score above the cut | Y) [m] at the cut that tells the classes apart best."""
    above1, above0 = _tails(p1), _tails(p0)
    best = np.abs(above1 - above0).argmax(axis=1)
    k = np.arange(len(best))
    return np.where(alive, above1[k, best], np.nan), np.where(alive, above0[k, best], np.nan)


def _tails(p: Floats) -> Floats:
    """P(bin above each inner edge | spoken) [m, MAX_BINS - 1]."""
    spoken = p[:, :MAX_BINS]
    return np.asarray(1.0 - np.cumsum(spoken, axis=1)[:, :-1] / np.maximum(spoken.sum(axis=1, keepdims=True), 1e-12))


def _unlearned(data: Data, start: Start) -> Evidence:
    """Fewer than three independent sources: rates that nobody told are assumed, all but anchors alike, at even odds."""
    n, counts = data.codes.shape[1], data.counts
    loading = np.where(data.anchors, start.loading, _EQUAL_LOADING) * data.alive
    lean = (loading / (1.0 - loading**2))[:, None] * start.rank
    up, down = counts * np.exp(lean), counts * np.exp(-lean)
    table = np.where(counts > 0, 2.0 * lean, 0.0)
    if data.told is not None:
        given = data.told.right > 0
        up, down = np.where(given, data.told.right, up), np.where(given, data.told.wrong, down)
        table = np.where(given, np.log(np.where(given, up, 1.0) / np.where(given, down, 1.0)), table)
    rates = _Rates(
        p1=up / up.sum(axis=1, keepdims=True),
        p0=down / down.sum(axis=1, keepdims=True),
        n1=n / 2,
        n0=n / 2,
        table=table,
        silence=np.zeros(counts.shape),
    )
    weight = data.alive / start.kinship.sum(axis=1)
    return _evidence(data, rates, weight, start.kinship, (PromptPrior(mean=0.5, strength=0.0, bias=0.0), _NO_TASTE))
