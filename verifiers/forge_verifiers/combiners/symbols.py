"""Scores become symbols: up to six quantile bins per verifier, and "abstained" as one more.

In: scores [n, m]. Out: symbol numbers [m, n], unique over all verifiers. Waits for nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forge_verifiers.combiners.base import Floats, Ints

MAX_BINS = 6
NUM_SYMBOLS = MAX_BINS + 1
"""Symbols reserved per verifier; the last is "abstained". Verifier k owns k * NUM_SYMBOLS onwards."""
_ROWS_PER_BIN = 8


def quantile_edges(scores: Floats) -> Floats:
    """Inner bin edges per verifier, [m, MAX_BINS - 1], filled with +inf where fewer are needed.

    Verifiers with at most MAX_BINS distinct values keep every value; others are cut at quantiles with at least eight
    rows a bin, and ties never straddle an edge. Edges lie midway between neighbouring scores.
    """
    edges = np.full((scores.shape[1], MAX_BINS - 1), np.inf)
    for k, column in enumerate(scores.T):
        values = np.sort(column[~np.isnan(column)])
        if len(values) == 0:
            continue
        starts = np.flatnonzero(np.diff(values) > 0) + 1
        if len(starts) >= MAX_BINS:
            bins = min(MAX_BINS, max(2, len(values) // _ROWS_PER_BIN))
            wanted = values[np.arange(1, bins) * len(values) // bins]
            starts = np.unique(np.searchsorted(values, wanted))
            starts = starts[starts > 0]
        edges[k, : len(starts)] = values[starts - 1] / 2 + values[starts] / 2
    return edges


def encode(scores: Floats, edges: Floats) -> NDArray[np.int32]:
    """Symbol number of every score, int32 [m, n]; raising a score never lowers its bin."""
    m = scores.shape[1]
    codes = np.empty((m, len(scores)), np.int32)
    for k in range(m):
        column = np.ascontiguousarray(scores[:, k])
        bins = np.zeros(len(column), np.int8)
        for edge in edges[k]:
            if np.isinf(edge):
                break
            bins += column > edge
        bins[np.isnan(column)] = MAX_BINS
        codes[k] = bins
        codes[k] += k * NUM_SYMBOLS
    return codes


def count(codes: NDArray[np.int32], weights: Floats | None = None) -> Floats:
    """Weighted number of times each symbol occurs, [m, NUM_SYMBOLS]; weights [m, n] or None for 1 each."""
    m = len(codes)
    flat = None if weights is None else weights.ravel()
    return np.bincount(codes.ravel(), flat, m * NUM_SYMBOLS).astype(np.float64).reshape(m, NUM_SYMBOLS)


def mid_ranks(counts: Floats) -> Floats:
    """Standardised mid-rank of every bin [m, NUM_SYMBOLS]: mean 0 and variance 1 over what was seen; abstained is 0.

    All 0 for a verifier that never varied.
    """
    seen = counts[:, :MAX_BINS]
    total = np.maximum(seen.sum(axis=1, keepdims=True), 1.0)
    rank = (np.cumsum(seen, axis=1) - seen / 2) / total - 0.5
    spread = np.sqrt((seen * rank**2).sum(axis=1, keepdims=True) / total)
    out = np.zeros(counts.shape)
    out[:, :MAX_BINS] = np.where(spread > 1e-6, rank / np.where(spread > 1e-6, spread, 1.0), 0.0)
    return out


def abstained(codes: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Which symbols are "abstained", [m, n]."""
    first: Ints = np.arange(len(codes)) * NUM_SYMBOLS
    return np.asarray(codes == (first + MAX_BINS)[:, None])
