"""Numbers with their uncertainty: rates, means, differences, pass@k.

In: results, grouped by seed. Out: estimates with 95 % intervals, p-values. Waits for nothing.

Episodes of one seed are not independent of each other (the same deal is played from both seats, by several players), so
the seed is the unit that is resampled everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

Floats = npt.NDArray[np.float64]

CONFIDENCE = 0.95
RESAMPLES = 2000
"""Bootstrap resamples behind an interval."""
PERMUTATIONS = 10_000
"""Sign flips behind a p-value; all of them where there are no more than that."""


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
    z = float(stats.norm.ppf(0.5 + CONFIDENCE / 2))
    p = successes / trials
    middle = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    low = 0.0 if successes == 0 else max(0.0, middle - half)
    return low, 1.0 if successes == trials else min(1.0, middle + half)


def rate(hits: Sequence[float], trials: Sequence[float]) -> Interval:
    """A rate over seeds, with Wilson's interval for as many trials as the seeds are worth.

    Trials of one seed that go together count less than independent ones: the effective number is the one that makes
    the binomial variance equal that of the ratio estimator over seeds (Korn and Graubard 1998), at most the real
    number. Where all trials agree, the variance says nothing, and every seed counts as one trial.

    Args:
        hits: Successes by seed.
        trials: Trials by seed, the same seeds.
    """
    hit, trial = np.asarray(hits, float), np.asarray(trials, float)
    hit, trial = hit[trial > 0], trial[trial > 0]
    seeds, total = len(trial), float(trial.sum())
    if not seeds:
        return Interval(value=math.nan, low=math.nan, high=math.nan, n=0)
    p = float(hit.sum()) / total
    effective = min(float(seeds), total)
    if 0 < p < 1 and seeds > 1:
        variance = float(((hit - p * trial) ** 2).sum()) / total**2 * seeds / (seeds - 1)
        effective = min(total, p * (1 - p) / variance) if variance > 0 else total
    low, high = wilson(p * effective, effective)
    return Interval(value=p, low=low, high=high, n=seeds)


def mean(values: Sequence[float], *, seed: int = 0) -> Interval:
    """The mean of one value a seed, with the BCa bootstrap interval (Efron 1987, JASA 82:171).

    Of values that are all equal the interval is a point; of fewer than two it is NaN.
    """
    x = np.asarray(values, float)
    if not len(x):
        return Interval(value=math.nan, low=math.nan, high=math.nan, n=0)
    middle = math.fsum(x) / len(x)
    if len(x) < 2:
        return Interval(value=middle, low=math.nan, high=math.nan, n=len(x))
    if np.ptp(x) == 0:
        return Interval(value=middle, low=middle, high=middle, n=len(x))
    found = stats.bootstrap(
        (x,),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="BCa",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(value=middle, low=float(found.low), high=float(found.high), n=len(x))


def difference(first: Mapping[int, float], second: Mapping[int, float], *, seed: int = 0) -> Difference:
    """How two players differ on the seeds that both played.

    The interval is the BCa bootstrap of the differences by seed; the p-value flips their signs (Fisher's permutation
    test for pairs), exactly where there are at most `PERMUTATIONS` ways to.

    Args:
        first: Value by seed.
        second: The same of the other player; seeds that only one has are left out.
    """
    gaps = np.array([first[s] - second[s] for s in first if s in second], float)
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
