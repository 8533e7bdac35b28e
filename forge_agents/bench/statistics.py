"""Estimates with 95 % intervals and p-values: rates, means, differences, pass@k and ratings.

Episodes of one seed are not independent (several players play the same deal from all sides), so the seed is the unit of
all statistics.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

# scipy loads where it computes: a command's --help needs none of it

Floats = npt.NDArray[np.float64]
K = TypeVar("K", bound=Hashable)

CONFIDENCE = 0.95
POWER = 0.8
"""Probability to detect the difference that `detectable_difference` returns."""
RESAMPLES = 2000
"""Bootstrap resamples per interval."""
MIN_INFORMATIVE_SEEDS = 5
"""Minimum number of seeds with a success, and of seeds with a failure, to use a variance that makes trials
of one seed look independent. With fewer such seeds, a seed counts as one trial at most. In a simulation of 14
environments with 16 seeds, 95 % intervals then contain the truth in 0.967 of the cases, without this rule in 0.887."""
PERMUTATIONS = 10_000
"""Maximum number of sign flips per p-value. Fewer seeds are tested exactly."""
_MAX_ARRAY = 2_000_000
"""Maximum number of values in an array of resamples."""
_MAX_JACKKNIFE = 10_000
"""Maximum number of values of an interval with a correction for skewness. The correction takes quadratic time."""
_SEED = 0
"""Seed of resamples and sign flips."""
_NOISE = 1e-12
"""Relative difference below which values are equal: 0.1 + 0.2 is no better than 0.3."""
_NORMAL = NormalDist()
_Z = _NORMAL.inv_cdf(0.5 + CONFIDENCE / 2)
MEAN = 1000.0
"""Mean rating of all players."""
SCALE = 400 / math.log(10)
"""Rating points per unit of log-odds. As in Elo, 400 points are odds of ten to one."""
PRIOR_DRAWS = 1.0
"""Draws added to each pair that met, so that a player that never lost has a finite rating."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate and its 95 % confidence interval, or NaN if there are too few data."""

    value: float
    low: float
    high: float
    n: int
    """Number of seeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """First player minus second, on the same seeds."""

    interval: Interval
    p_value: float
    """Two-sided p-value of the hypothesis of no difference, or NaN below two seeds."""


def wilson(successes: float, trials: float) -> tuple[float, float]:
    """Return Wilson's interval of a rate (1927, JASA 22:209). Successes in [0, trials] may be fractional."""
    p, z, n = successes / trials, _Z, trials
    # all p' with |p' - p| <= z sqrt(p' (1 - p') / n): the error is that of p', so p = 0 and p = 1 have a width as well
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low = 0.0 if successes == 0 else max(0.0, middle - half)
    return low, 1.0 if successes == trials else min(1.0, middle + half)


def rate(hits: Sequence[float], trials: Sequence[float]) -> Interval:
    """Return `mean_rate` of one environment, from successes and trials by seed."""
    return mean_rate([(hits, trials)])


def mean_rate(strata: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Interval:
    """Return the mean of rates over seeds, with Wilson's interval for the effective number of trials.

    Correlated trials of one seed count less than independent ones. The effective number makes the binomial variance
    equal to that of the ratio estimator over seeds. The number is reduced by the quantiles of Student's t, because that
    variance comes from few seeds (Korn and Graubard 1998, Survey Methodology 24:193), and is at most the actual number.
    If no stratum has two seeds, or fewer than `MIN_INFORMATIVE_SEEDS` have a success or a failure, the variance is
    unreliable, and every seed counts as at most one trial.

    Args:
        strata: Successes and trials by seed, for each environment. Environments have equal weight, and seeds of
            different environments are independent.

    Returns:
        The interval. `n` is the sum of the environments' numbers of seeds.
    """
    from scipy import special

    arrays = [(np.asarray(hits, float), np.asarray(trials, float)) for hits, trials in strata]
    counts = [(hits[trials > 0], trials[trials > 0]) for hits, trials in arrays]
    if not counts or not all(len(trial) for _, trial in counts):
        return Interval(value=math.nan, low=math.nan, high=math.nan, n=0)
    seeds, total = sum(len(trial) for _, trial in counts), float(sum(trial.sum() for _, trial in counts))
    p, variance = 0.0, 0.0
    for hit, trial in counts:
        ratio_s, n = float(hit.sum() / trial.sum()), len(trial)
        p += ratio_s / len(counts)
        # cluster-robust variance of the ratio estimator, with seeds as clusters (Cochran 1977, chapter 6):
        # n / (n - 1) sum_s (h_s - r t_s)^2 / (sum_s t_s)^2
        spread = float(((hit - ratio_s * trial) ** 2).sum() / trial.sum() ** 2)
        variance += spread * n / max(1, n - 1) / len(counts) ** 2
    informative = min(
        sum(int((hit > 0).sum()) for hit, _ in counts), sum(int((hit < trial).sum()) for hit, trial in counts)
    )
    effective = total if informative >= MIN_INFORMATIVE_SEEDS else min(float(seeds), total)
    freedom = seeds - len(counts)
    if freedom and variance > 0:
        # stdtrit returns Student's t quantiles; stats.t.ppf takes 0.1 ms longer to check its arguments
        shrinkage = (_Z / float(special.stdtrit(freedom, 0.5 + CONFIDENCE / 2))) ** 2
        effective = min(effective, shrinkage * p * (1 - p) / variance)  # p (1 - p) / n_eff = variance
    low, high = wilson(p * effective, effective)
    return Interval(value=p, low=low, high=high, n=seeds)


def mean(values: Sequence[float]) -> Interval:
    """Return the mean of one value per seed, with the BCa bootstrap interval (Efron 1987, JASA 82:171).

    With few seeds the bootstrap interval is too short. Its level is raised accordingly (Hesterberg 2015, Am. Stat.
    69:371, "expanded percentile"). With more than 10,000 values it is the percentile interval, without the correction
    for skewness. The interval of equal values is a point, and that of fewer than two values is NaN.
    """
    from scipy import special, stats

    x = np.asarray(values, float)
    if not len(x):
        return Interval(value=math.nan, low=math.nan, high=math.nan, n=0)
    middle, n = math.fsum(x) / len(x), len(x)
    if abs(middle) <= _NOISE * np.abs(x).max():
        middle = 0.0
    if n < 2:
        return Interval(value=middle, low=math.nan, high=math.nan, n=n)
    if np.ptp(x) <= _NOISE * np.abs(x).max():
        return Interval(value=middle, low=middle, high=middle, n=n)
    # Hesterberg's expanded percentile: the normal tail beyond sqrt(n / (n - 1)) t_(n-1) replaces 0.025
    tail = max(1 / RESAMPLES, _NORMAL.cdf(-math.sqrt(n / (n - 1)) * special.stdtrit(n - 1, 0.5 + CONFIDENCE / 2)))
    rng, level = np.random.default_rng(_SEED), float(1 - 2 * tail)
    method = "BCa" if n <= _MAX_JACKKNIFE else "percentile"
    result = stats.bootstrap(
        (x,), np.mean, n_resamples=RESAMPLES, batch=_batch(n), confidence_level=level, method=method, rng=rng
    )
    ends = result.confidence_interval
    return Interval(value=middle, low=float(ends.low), high=float(ends.high), n=n)


def _batch(n: int) -> int:
    """Number of resamples of `n` values that are held in memory at once."""
    return max(1, _MAX_ARRAY // n)


def difference(first: Mapping[K, float], second: Mapping[K, float]) -> Difference:
    """Return the difference of two players on the seeds that both played.

    The interval is the BCa bootstrap of the differences by seed. The p-value flips their signs (Fisher's permutation
    test for pairs), exactly if there are at most `PERMUTATIONS` ways.

    Args:
        first: Values by seed, or by environment and seed.
        second: Values of the other player. Seeds of one player only are left out.
    """
    from scipy import stats

    both = np.array([(first[s], second[s]) for s in first if s in second], float).reshape(-1, 2)
    gaps = both[:, 0] - both[:, 1]
    gaps[np.abs(gaps) <= _NOISE * np.abs(both).max(1, initial=0.0)] = 0.0
    interval = mean(gaps.tolist())
    if len(gaps) < 2 or not interval.value:
        return Difference(interval=interval, p_value=math.nan if len(gaps) < 2 else 1.0)
    rng = np.random.default_rng(_SEED)
    result = stats.permutation_test(
        (gaps,), np.mean, permutation_type="samples", n_resamples=PERMUTATIONS, batch=_batch(len(gaps)), rng=rng
    )
    return Difference(interval=interval, p_value=min(1.0, float(result.pvalue)))


def ratio(first: Mapping[K, float], second: Mapping[K, float]) -> Interval:
    """Return the ratio of two means, on the seeds that both have.

    The interval is that of the mean of ``(x - r y) / mean(y)`` around r, the first-order expansion of the ratio
    (Cochran 1977, chapter 6). NaN if the interval of the mean of `second` includes 0.
    """
    both = np.array([(first[s], second[s]) for s in first if s in second], float).reshape(-1, 2)
    denominator = mean(both[:, 1].tolist())
    whole = denominator.value
    if not whole > 0 or denominator.low <= 0:
        return Interval(value=math.nan, low=math.nan, high=math.nan, n=len(both))
    value = float(both[:, 0].mean()) / whole
    gaps = (both[:, 0] - value * both[:, 1]) / whole
    gaps[np.abs(gaps) <= _NOISE] = 0.0
    around = mean(gaps.tolist())
    return Interval(value=value, low=value + around.low, high=value + around.high, n=len(both))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Holm (1979) to bound the probability of any false positive. NaN stays NaN."""
    p = np.asarray(p_values, float)
    valid = np.flatnonzero(~np.isnan(p))
    order = valid[np.argsort(p[valid], kind="stable")]
    # the k-th smallest of m p-values is multiplied by m - k + 1 and is at least as large as the one before
    raised = p[order] * np.arange(len(order), 0, -1)
    p = p.copy()
    p[order] = np.minimum(1.0, np.maximum.accumulate(raised))
    return [float(value) for value in p]


def smallest_p(seeds: int) -> float:
    """Return the smallest p-value that sign flips over n seeds can give: two of 2^n ways are the most extreme."""
    return 2.0 ** (1 - seeds) if 2**seeds <= PERMUTATIONS else 2 / (PERMUTATIONS + 1)


def detectable_difference(seeds: int, pairs: int) -> float:
    """Return the true difference that one of `pairs` detects with probability `POWER` after Holm's adjustment.

    Returns:
        Difference in standard deviations of a seed's difference, by the normal approximation.
    """
    # (z_(alpha / 2 m) + z_power) / sqrt(n), with Bonferroni's level as in Holm's first step
    return (_NORMAL.inv_cdf(POWER) - _NORMAL.inv_cdf((1 - CONFIDENCE) / 2 / pairs)) / math.sqrt(seeds)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate that at least one of `k` samples is right (arXiv:2107.03374, equation 1)."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


# ---- ratings


@dataclass(frozen=True, slots=True, kw_only=True)
class Rating:
    """Rating of one player."""

    value: float
    low: float
    """Lower end of the 95 % interval, or NaN for a single seed."""
    high: float
    games: int


@dataclass(frozen=True, slots=True)
class Game:
    """A game of two players."""

    seed: Any
    """Sortable key that dependent games share, such as environment and seed."""
    first: str
    second: str
    score: float
    """1: the first won, 0.5: a draw, 0: the second won."""


def bradley_terry(wins_BKK: Floats, *, prior_draws: float = PRIOR_DRAWS) -> tuple[Floats, Floats]:
    """Return maximum-likelihood strengths (Bradley and Terry 1952) of B tables, by Newton's method.

    Args:
        wins_BKK: Entry (i, j) of a table is the number of games that i won against j, with half a win for a draw.
            Games must link all players.
        prior_draws: Draws added to each pair that met. With 0, a player that won or lost every game has an infinite
            strength.

    Returns:
        Log-odds strengths ``[B, K]`` with mean 0, and the negative Hessians ``[B, K, K]`` at the maximum.
    """
    games = wins_BKK + wins_BKK.transpose(0, 2, 1)
    wins_BKK = wins_BKK + prior_draws / 2 * (games > 0)
    games, theta_BK, information = games + prior_draws * (games > 0), np.zeros_like(wins_BKK[:, 0]), wins_BKK
    for _ in range(200):
        # probability that i beats j: p_ij = 1 / (1 + exp(theta_j - theta_i))
        p = 1 / (1 + np.exp(np.clip(theta_BK[:, None, :] - theta_BK[:, :, None], -500, 500)))
        weight = games * p * (1 - p)
        information = np.eye(len(p[0])) * weight.sum(2)[:, :, None] - weight
        gradient = (wins_BKK - games * p).sum(2)  # games won minus expected wins
        # only differences matter, so the Hessian is singular along (1, ..., 1); a constant makes it regular
        step = np.linalg.solve(information + 1 / len(p[0]), gradient[:, :, None])[:, :, 0]
        theta_BK = theta_BK + np.clip(step, -2.0, 2.0)  # far from the maximum a full Newton step overshoots
        theta_BK -= theta_BK.mean(1, keepdims=True)
        if np.abs(step).max() < 1e-10:
            break
    return theta_BK, information


def rate_players(games: Sequence[Game], players: Sequence[str]) -> dict[str, Rating]:
    """Return the ratings of all players with a game, best first.

    An interval is the wider one of two: percentiles of a bootstrap over seeds, because games of one seed are dependent,
    and the curvature of the likelihood, because a bootstrap says nothing about a player that always wins. Empty if
    there are no games, or if the games do not link all players.
    """
    names = [name for name in players if any(name in (game.first, game.second) for game in games)]
    if len(names) < 2:
        return {}
    index_of = {name: index for index, name in enumerate(names)}
    by_seed: defaultdict[int, Floats] = defaultdict(lambda: np.zeros((len(names), len(names))))
    for game in games:
        by_seed[game.seed][index_of[game.first], index_of[game.second]] += game.score
        by_seed[game.seed][index_of[game.second], index_of[game.first]] += 1 - game.score
    tables = np.stack([by_seed[s] for s in sorted(by_seed)])
    total = tables.sum(0)
    if not _linked(total[None])[0]:
        return {}
    thetas, information = bradley_terry(total[None])
    theta, error = thetas[0], np.sqrt(np.diag(np.linalg.pinv(information[0])))  # of independent games
    rng = np.random.default_rng(_SEED)
    seeds = (rng.integers(len(tables), size=len(tables)) for _ in range(400 if len(tables) > 1 else 0))
    drawn = np.array([tables[chosen].sum(0) for chosen in seeds]).reshape(-1, len(names), len(names))
    drawn, spread = drawn[_linked(drawn)], np.full((2, len(names)), math.nan)
    if len(drawn):
        spread = np.percentile(bradley_terry(drawn)[0], [2.5, 97.5], axis=0)
    low = MEAN + SCALE * np.minimum(spread[0], theta - _Z * error)
    high = MEAN + SCALE * np.maximum(spread[1], theta + _Z * error)
    middle, counts = MEAN + SCALE * theta, total.sum(0) + total.sum(1)
    return {
        names[i]: Rating(value=float(middle[i]), low=float(low[i]), high=float(high[i]), games=round(float(counts[i])))
        for i in sorted(index_of.values(), key=lambda i: -middle[i])
    }


def _linked(wins_BKK: Floats) -> npt.NDArray[np.bool_]:
    """Return for each of B tables whether games link all players."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    tables, count, _ = wins_BKK.shape
    table, winner, loser = np.nonzero(wins_BKK > 0)
    edges = np.ones(len(table)), (table * count + winner, table * count + loser)  # one graph with a part per table
    _, part = connected_components(coo_array(edges, shape=(tables * count,) * 2), directed=False)
    part_BK = part.reshape(tables, count)
    return np.asarray((part_BK == part_BK[:, :1]).all(1), np.bool_)
