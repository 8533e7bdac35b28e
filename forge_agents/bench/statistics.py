"""Numbers with their uncertainty: rates, means, differences, pass@k.

In: results, grouped by seed. Out: estimates with 95 % intervals, p-values. Waits for nothing.

Episodes of one seed are not independent of each other (the same deal is played from both seats, by several players), so
the seed is the unit that is resampled everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from scipy import stats

Floats = npt.NDArray[np.float64]
K = TypeVar("K", bound=Hashable)

CONFIDENCE = 0.95
POWER = 0.8
"""Chance to find the difference that `gap_found` names."""
RESAMPLES = 2000
"""Bootstrap resamples behind an interval."""
SPEAKING = 5
"""Seeds with a success, and seeds with a failure, from which on the variance between seeds is believed where it says
that trials of one seed are independent; docs/decisions/0011 has what fewer cost."""
PERMUTATIONS = 10_000
"""Sign flips behind a p-value; all of them where there are no more than that."""
_NOISE = 1e-12
"""Values whose relative difference is less are the same: 0.1 + 0.2 is no better than 0.3."""
_Z = float(stats.norm.ppf(0.5 + CONFIDENCE / 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate and its 95 % confidence interval; NaN where there is too little to say."""

    value: float
    low: float
    high: float
    n: int
    """Independent units behind it: seeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first player minus the second, on the same seeds."""

    interval: Interval
    p_value: float
    """Two-sided, of the hypothesis that neither is better; NaN below two seeds."""


def wilson(successes: float, trials: float) -> tuple[float, float]:
    """Wilson's interval of a rate (1927, JASA 22:209).

    Args:
        successes: From 0 to `trials`; need not be whole, because effective numbers are not.
        trials: Above 0.
    """
    if not (trials > 0 and 0 <= successes <= trials):
        raise ValueError(f"{successes} successes of {trials} trials; expected 0 <= successes <= trials, trials > 0")
    z = _Z
    p = successes / trials
    middle = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    low = 0.0 if successes == 0 else max(0.0, middle - half)
    return low, 1.0 if successes == trials else min(1.0, middle + half)


def rate(hits: Sequence[float], trials: Sequence[float]) -> Interval:
    """A rate over seeds: `mean_rate` of one environment.

    Args:
        hits: Successes by seed.
        trials: Trials by seed, the same seeds.
    """
    return mean_rate([(hits, trials)])


def mean_rate(strata: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Interval:
    """The mean of rates over seeds, with Wilson's interval for as many trials as the seeds are worth.

    Trials of one seed that go together count less than independent ones: the effective number is the one that makes
    the binomial variance equal that of the ratio estimator over seeds, shrunk by the quantiles of Student's t because
    that variance comes from few seeds (Korn and Graubard 1998, Survey Methodology 24:193), at most the real number.
    Where no stratum has two seeds, or fewer than `SPEAKING` have a success, or a failure, little is known of the
    variance, and every seed counts as at most one trial.

    Args:
        strata: Of each environment its successes and its trials by seed. Environments count alike; the same seed tells
            nothing of two environments, so its trials there are independent.

    Returns:
        The interval; `n` is the number of seeds, counted in each environment.
    """
    kept = [_with_trials(hits, trials) for hits, trials in strata]
    if not kept or not all(len(trial) for _, trial in kept):
        return Interval(value=math.nan, low=math.nan, high=math.nan, n=0)
    seeds, total = sum(len(trial) for _, trial in kept), float(sum(trial.sum() for _, trial in kept))
    p, variance = 0.0, 0.0
    for hit, trial in kept:
        own, n = float(hit.sum() / trial.sum()), len(trial)
        p += own / len(kept)
        spread = float(((hit - own * trial) ** 2).sum() / trial.sum() ** 2)
        variance += spread * n / max(1, n - 1) / len(kept) ** 2
    telling = min(sum(int((hit > 0).sum()) for hit, _ in kept), sum(int((hit < trial).sum()) for hit, trial in kept))
    effective, freedom = total if telling >= SPEAKING else min(float(seeds), total), seeds - len(kept)
    if freedom and variance > 0:
        few = (_Z / float(stats.t.ppf(0.5 + CONFIDENCE / 2, freedom))) ** 2
        effective = min(effective, few * p * (1 - p) / variance)
    low, high = wilson(p * effective, effective)
    return Interval(value=p, low=low, high=high, n=seeds)


def _with_trials(hits: Sequence[float], trials: Sequence[float]) -> tuple[Floats, Floats]:
    hit, trial = np.asarray(hits, float), np.asarray(trials, float)
    return hit[trial > 0], trial[trial > 0]


def mean(values: Sequence[float], *, seed: int = 0) -> Interval:
    """The mean of one value a seed, with the BCa bootstrap interval (Efron 1987, JASA 82:171).

    The bootstrap takes n values for the whole population, so with few seeds it is short; its level is raised by
    Student's t for that (Hesterberg 2015, Am. Stat. 69:371, "expanded percentile"). Of values that are all equal the
    interval is a point; of fewer than two it is NaN.
    """
    x = np.asarray(values, float)
    if not len(x):
        return Interval(value=math.nan, low=math.nan, high=math.nan, n=0)
    middle, n = math.fsum(x) / len(x), len(x)
    if n < 2:
        return Interval(value=middle, low=math.nan, high=math.nan, n=n)
    if np.ptp(x) <= _NOISE * np.abs(x).max():
        return Interval(value=middle, low=middle, high=middle, n=n)
    tail = max(1 / RESAMPLES, stats.norm.sf(math.sqrt(n / (n - 1)) * stats.t.ppf(0.5 + CONFIDENCE / 2, n - 1)))
    found = stats.bootstrap(
        (x,),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=float(1 - 2 * tail),
        method="BCa",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(value=middle, low=float(found.low), high=float(found.high), n=n)


def difference(first: Mapping[K, float], second: Mapping[K, float], *, seed: int = 0) -> Difference:
    """How two players differ on the seeds that both played.

    The interval is the BCa bootstrap of the differences by seed; the p-value flips their signs (Fisher's permutation
    test for pairs), exactly where there are at most `PERMUTATIONS` ways to.

    Args:
        first: Value by seed, or by environment and seed.
        second: The same of the other player; seeds that only one has are left out.
    """
    both = np.array([(first[s], second[s]) for s in first if s in second], float).reshape(-1, 2)
    gaps = both[:, 0] - both[:, 1]
    gaps[np.abs(gaps) <= _NOISE * np.abs(both).max(1, initial=0.0)] = 0.0
    interval = mean(gaps.tolist(), seed=seed)
    if len(gaps) < 2:
        return Difference(interval=interval, p_value=math.nan)
    if not gaps.any():
        return Difference(interval=interval, p_value=1.0)
    found = stats.permutation_test(
        (gaps,),
        np.mean,
        permutation_type="samples",
        n_resamples=PERMUTATIONS,
        rng=np.random.default_rng(seed),
    )
    return Difference(interval=interval, p_value=min(1.0, float(found.pvalue)))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number (Holm 1979): below 0.05 with 5 % risk of any false alarm. NaN stays NaN."""
    p = np.asarray(p_values, float)
    known = np.flatnonzero(~np.isnan(p))
    order = known[np.argsort(p[known], kind="stable")]
    raised = p[order] * np.arange(len(order), 0, -1)
    p = p.copy()
    p[order] = np.minimum(1.0, np.maximum.accumulate(raised))
    return [float(value) for value in p]


def smallest_p(seeds: int) -> float:
    """The smallest p-value that sign flips over so many seeds can give."""
    return 2.0 ** (1 - seeds) if 2**seeds <= PERMUTATIONS else 2 / (PERMUTATIONS + 1)


def gap_found(seeds: int, pairs: int) -> float:
    """The true difference that one of `pairs` shows with `POWER`, whatever Holm's adjustment makes of the others.

    Returns:
        In standard deviations of the difference between two players on one seed, by the normal approximation.
    """
    return float(stats.norm.isf((1 - CONFIDENCE) / 2 / pairs) + stats.norm.ppf(POWER)) / math.sqrt(seeds)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of `k` samples is right, without bias (arXiv:2107.03374, equation 1).

    Args:
        n: Samples drawn.
        c: How many of them were right.
        k: From 1 to `n`.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(
            f"pass@{k} of {c} right among {n} samples; expected 0 <= right <= samples and 1 <= k <= samples"
        )
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)
