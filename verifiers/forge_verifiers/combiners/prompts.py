"""A prior per prompt: some prompts are easy, and siblings tell which.

In: log-likelihood ratios [n] and group indices [n]. Out: prior log-odds [n] from the siblings. Waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forge_verifiers.combiners.base import Floats, Ints, logit

Singles = NDArray[np.float32]

_GRID = (np.arange(12, dtype=np.float32) + np.float32(0.5)) / np.float32(12)
_CHUNK_GROUPS = 4096
_REMOVED = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPrior:
    """Rates of correct responses per prompt follow Beta(mean * strength, (1 - mean) * strength)."""

    mean: float
    """Average rate, in (0, 1)."""
    strength: float
    """Pseudo-responses; small = prompts differ much."""
    bias: float
    """Correlation in [0, 1] of errors among siblings: a shared liking for the prompt. Evidence of k siblings about
    their prompt's rate is raised to 1 / (1 + (k - 1) bias), as in a design effect."""


def sibling_prior(evidence: Floats, groups: Ints, prior: PromptPrior) -> tuple[Floats, float, float]:
    """Prior log-odds [n] of each response from the other responses to its prompt.

    The rate p of a prompt is integrated out on a 12-point grid: P(p | siblings) is proportional to Beta(p) times the
    product over siblings of (p exp(L) + 1 - p). Exact up to the grid where `prior.bias` is 0.

    Returns:
        log-odds float64 [n], the mean and the variance of the posterior rates over all prompts.
    """
    order = slice(None) if (groups[1:] >= groups[:-1]).all() else np.argsort(groups, kind="stable")
    sizes = np.bincount(groups)
    sizes = sizes[sizes > 0]
    ends = np.cumsum(sizes)
    alpha = max(prior.mean * prior.strength, 1e-3)
    beta = max((1 - prior.mean) * prior.strength, 1e-3)
    log_prior = ((alpha - 1) * np.log(_GRID) + (beta - 1) * np.log1p(-_GRID)).astype(np.float32)
    sorted_evidence = np.minimum(evidence[order], 40.0).astype(np.float32)
    rate = np.empty(len(evidence), np.float32)
    first = total = second = 0.0
    for low in range(0, len(sizes), _CHUNK_GROUPS):  # bounded memory for any n
        chunk = sizes[low : low + _CHUNK_GROUPS]
        start = int(ends[low] - sizes[low])
        rows = slice(start, start + int(chunk.sum()))
        rate[rows], means, squares = _chunk_rates(sorted_evidence[rows], chunk, log_prior, prior.bias)
        first, second, total = first + means, second + squares, total + len(chunk)
    out = np.empty(len(evidence))
    out[order] = logit(rate)
    mean = first / total
    return out, mean, max(second / total - mean**2, 1e-6)


def _chunk_rates(evidence: Singles, sizes: Ints, log_prior: Singles, bias: float) -> tuple[Singles, float, float]:
    grown = _GRID[:, None] * np.exp(evidence)[None, :]
    grown += (1 - _GRID)[:, None]
    own = np.log(grown, out=grown)
    starts = np.cumsum(sizes) - sizes
    temper = (1.0 / (1.0 + (sizes - 1) * bias)).astype(np.float32)
    own *= np.repeat(temper, sizes)
    whole = np.add.reduceat(own, starts, axis=1)
    whole += log_prior[:, None]
    left_out = np.repeat(whole, sizes, axis=1)
    left_out -= own
    left_out -= left_out.max(axis=0)
    weight = np.exp(left_out, out=left_out)
    rate = (_GRID @ weight) / weight.sum(axis=0)
    whole -= whole.max(axis=0)
    posterior = np.exp(whole)
    posterior /= posterior.sum(axis=0)
    return rate, float((_GRID @ posterior).sum()), float((_GRID**2 @ posterior).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTaste:
    """How much verifiers together like or dislike a prompt, whatever the response."""

    right: float
    """Mean evidence of correct responses."""
    wrong: float
    """Mean evidence of wrong responses."""
    share: float
    """Correlation in [0, 1] of siblings' evidence around these means."""


def taste_of(evidence: Floats, q: Floats, groups: Ints) -> PromptTaste:
    """The taste that evidence [n] shows under the posterior `q` [n]."""
    n1 = max(float(q.sum()), 1e-9)
    n0 = max(len(q) - n1, 1e-9)
    right, wrong = float(q @ evidence / n1), float((1 - q) @ evidence / n0)
    return PromptTaste(right=right, wrong=wrong, share=shared_bias(evidence - q * right - (1 - q) * wrong, groups))


def without_taste(evidence: Floats, q: Floats, groups: Ints, taste: PromptTaste) -> Floats:
    """Evidence [n] less half of what its prompt is liked beyond its estimated share of correct responses.

    The liking is the best linear predictor of a random intercept, k share / (1 + (k - 1) share) times the siblings'
    mean residual. Half of it: what looks like taste may be the prompt's rate, which the other half leaves in.
    """
    sizes = np.bincount(groups)
    residual = evidence - q * taste.right - (1 - q) * taste.wrong
    mean = np.bincount(groups, residual) / np.maximum(sizes, 1)
    liking = sizes * taste.share / (1.0 + (sizes - 1.0) * taste.share) * mean
    return np.asarray(evidence - _REMOVED * liking[groups])


def shared_bias(residual: Floats, groups: Ints) -> float:
    """Intraclass correlation, in [0, 1], of the residual evidence [n] among siblings, less one standard error."""
    sizes = np.bincount(groups)
    pairs = float((sizes * (sizes - 1.0)).sum())
    energy = float(residual @ residual)
    if pairs == 0 or energy <= 1e-12:
        return 0.0
    sums = np.bincount(groups, residual)
    found = (sums @ sums - energy) / pairs / (energy / len(residual)) - np.sqrt(2.0 / pairs)
    return float(np.clip(found, 0.0, 1.0))
