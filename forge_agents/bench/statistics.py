"""Numbers with their uncertainty: rates, means, differences, pass@k, and who beats whom as ratings.

In: results, grouped by seed. Out: estimates with 95 % intervals, p-values. Waits for nothing.

Episodes of one seed are not independent of each other (the same deal is played from both seats, by several players), so
the seed is the unit that is resampled everywhere.
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
"""Chance to find the difference that `gap_found` names."""
RESAMPLES = 2000
"""Bootstrap resamples behind an interval."""
SPEAKING = 5
"""Minimum number of seeds with a success, and of seeds with a failure, to use a variance that makes trials
of one seed look independent. With fewer such seeds, a seed counts as one trial at most. In a simulation of 14
environments with 16 seeds, 95 % intervals then contain the truth in 0.967 of the cases, without this rule in 0.887."""
PERMUTATIONS = 10_000
"""Sign flips behind a p-value; all of them where there are no more than that."""
_SEED = 0
"""Of resamples and sign flips: the same results give the same numbers."""
_NOISE = 1e-12
"""Values whose relative difference is less are the same: 0.1 + 0.2 is no better than 0.3."""
_NORMAL = NormalDist()
_Z = _NORMAL.inv_cdf(0.5 + CONFIDENCE / 2)
MEAN = 1000.0
"""Mean rating of the players rated together."""
SCALE = 400 / math.log(10)
"""Rating points per unit of log-odds, so that 400 points are odds of ten to one, as Elo has it."""
PRIOR_DRAWS = 1.0
"""Draws added between any two players that met: a player that never lost still gets a finite rating."""


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
    p, z, n = successes / trials, _Z, trials
    # the p' with |p' - p| <= z sqrt(p' (1 - p') / n): the error is that of p', so p = 0 and p = 1 still get a width
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low = 0.0 if successes == 0 else max(0.0, middle - half)
    return low, 1.0 if successes == trials else min(1.0, middle + half)


def rate(hits: Sequence[float], trials: Sequence[float]) -> Interval:
    """`mean_rate` of one environment: successes by seed, and trials by seed."""
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
    from scipy import special

    arrays = [(np.asarray(hits, float), np.asarray(trials, float)) for hits, trials in strata]
    kept = [(hits[trials > 0], trials[trials > 0]) for hits, trials in arrays]
    if not kept or not all(len(trial) for _, trial in kept):
        return Interval(value=math.nan, low=math.nan, high=math.nan, n=0)
    seeds, total = sum(len(trial) for _, trial in kept), float(sum(trial.sum() for _, trial in kept))
    p, variance = 0.0, 0.0
    for hit, trial in kept:
        own, n = float(hit.sum() / trial.sum()), len(trial)
        p += own / len(kept)
        # the ratio estimator's cluster-robust variance, the seeds being the clusters (Cochran 1977, chapter 6):
        # n / (n - 1) sum_s (h_s - r t_s)^2 / (sum_s t_s)^2
        spread = float(((hit - own * trial) ** 2).sum() / trial.sum() ** 2)
        variance += spread * n / max(1, n - 1) / len(kept) ** 2
    telling = min(sum(int((hit > 0).sum()) for hit, _ in kept), sum(int((hit < trial).sum()) for hit, trial in kept))
    effective, freedom = total if telling >= SPEAKING else min(float(seeds), total), seeds - len(kept)
    if freedom and variance > 0:
        # stdtrit: Student's t quantiles, without the 0.1 ms that stats.t.ppf spends on reading its arguments
        few = (_Z / float(special.stdtrit(freedom, 0.5 + CONFIDENCE / 2))) ** 2
        effective = min(effective, few * p * (1 - p) / variance)  # p (1 - p) / n_eff = variance, as of n_eff coins
    low, high = wilson(p * effective, effective)
    return Interval(value=p, low=low, high=high, n=seeds)


def mean(values: Sequence[float]) -> Interval:
    """The mean of one value a seed, with the BCa bootstrap interval (Efron 1987, JASA 82:171).

    The bootstrap takes n values for the whole population, so with few seeds it is short; its level is raised by
    Student's t for that (Hesterberg 2015, Am. Stat. 69:371, "expanded percentile"). Of values that are all equal the
    interval is a point; of fewer than two it is NaN.
    """
    from scipy import special, stats

    x = np.asarray(values, float)
    if not len(x):
        return Interval(value=math.nan, low=math.nan, high=math.nan, n=0)
    middle, n = math.fsum(x) / len(x), len(x)
    if n < 2:
        return Interval(value=middle, low=math.nan, high=math.nan, n=n)
    if np.ptp(x) <= _NOISE * np.abs(x).max():
        return Interval(value=middle, low=middle, high=middle, n=n)
    # Hesterberg's expanded percentile: the normal tail beyond sqrt(n / (n - 1)) t_(n-1), in place of 0.025
    tail = max(1 / RESAMPLES, _NORMAL.cdf(-math.sqrt(n / (n - 1)) * special.stdtrit(n - 1, 0.5 + CONFIDENCE / 2)))
    rng, level = np.random.default_rng(_SEED), float(1 - 2 * tail)
    found = stats.bootstrap((x,), np.mean, n_resamples=RESAMPLES, confidence_level=level, method="BCa", rng=rng)
    ends = found.confidence_interval
    return Interval(value=middle, low=float(ends.low), high=float(ends.high), n=n)


def difference(first: Mapping[K, float], second: Mapping[K, float]) -> Difference:
    """How two players differ on the seeds that both played.

    The interval is the BCa bootstrap of the differences by seed; the p-value flips their signs (Fisher's permutation
    test for pairs), exactly where there are at most `PERMUTATIONS` ways to.

    Args:
        first: Value by seed, or by environment and seed.
        second: The same of the other player; seeds that only one has are left out.
    """
    from scipy import stats

    both = np.array([(first[s], second[s]) for s in first if s in second], float).reshape(-1, 2)
    gaps = both[:, 0] - both[:, 1]
    gaps[np.abs(gaps) <= _NOISE * np.abs(both).max(1, initial=0.0)] = 0.0
    interval = mean(gaps.tolist())
    if len(gaps) < 2 or not gaps.any():
        return Difference(interval=interval, p_value=math.nan if len(gaps) < 2 else 1.0)
    rng = np.random.default_rng(_SEED)
    found = stats.permutation_test((gaps,), np.mean, permutation_type="samples", n_resamples=PERMUTATIONS, rng=rng)
    return Difference(interval=interval, p_value=min(1.0, float(found.pvalue)))


def ratio(first: Mapping[K, float], second: Mapping[K, float]) -> Interval:
    """The mean of one over the mean of another, on the seeds that both have.

    The interval is that of the mean of ``(x - r y) / mean(y)``, around r: the ratio's first-order expansion (Cochran
    1977, chapter 6). NaN where the mean of `second` is 0 as far as its own interval tells, and the ratio any number.

    Args:
        second: The same of what it is measured by.
    """
    both = np.array([(first[s], second[s]) for s in first if s in second], float).reshape(-1, 2)
    below = mean(both[:, 1].tolist())
    whole = below.value
    if not whole > 0 or below.low <= 0:
        return Interval(value=math.nan, low=math.nan, high=math.nan, n=len(both))
    value = float(both[:, 0].mean()) / whole
    gaps = (both[:, 0] - value * both[:, 1]) / whole
    gaps[np.abs(gaps) <= _NOISE] = 0.0
    around = mean(gaps.tolist())
    return Interval(value=value, low=value + around.low, high=value + around.high, n=len(both))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number (Holm 1979): below 0.05 with 5 % risk of any false alarm. NaN stays NaN."""
    p = np.asarray(p_values, float)
    known = np.flatnonzero(~np.isnan(p))
    order = known[np.argsort(p[known], kind="stable")]
    # of m p-values the k-th smallest is multiplied by m - k + 1, and none falls below one before it
    raised = p[order] * np.arange(len(order), 0, -1)
    p = p.copy()
    p[order] = np.minimum(1.0, np.maximum.accumulate(raised))
    return [float(value) for value in p]


def smallest_p(seeds: int) -> float:
    """The smallest p-value that sign flips over so many seeds can give: of 2^n ways two are the most extreme."""
    return 2.0 ** (1 - seeds) if 2**seeds <= PERMUTATIONS else 2 / (PERMUTATIONS + 1)


def gap_found(seeds: int, pairs: int) -> float:
    """The true difference that one of `pairs` shows with `POWER`, whatever Holm's adjustment makes of the others.

    Returns:
        In standard deviations of the difference between two players on one seed, by the normal approximation.
    """
    # (z_(alpha / 2 m) + z_power) / sqrt(n): Bonferroni's level, which Holm's first step has
    return (_NORMAL.inv_cdf(POWER) - _NORMAL.inv_cdf((1 - CONFIDENCE) / 2 / pairs)) / math.sqrt(seeds)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of `k` samples is right, without bias (arXiv:2107.03374, equation 1)."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(
            f"pass@{k} of {c} right among {n} samples; expected 0 <= right <= samples and 1 <= k <= samples"
        )
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


# ---- ratings


@dataclass(frozen=True, slots=True, kw_only=True)
class Rating:
    """One player's strength."""

    value: float
    low: float
    """Lower end of the 95 % interval; NaN where there is one seed only."""
    high: float
    games: int


@dataclass(frozen=True, slots=True)
class Game:
    """One meeting of two players."""

    seed: Any
    """What games that are not independent share, such as an environment and a seed of it; can be sorted."""
    first: str
    second: str
    score: float
    """1: the first won; 0.5: a draw; 0: the second won."""


def bradley_terry(wins: npt.ArrayLike, *, prior_draws: float = PRIOR_DRAWS) -> tuple[Floats, Floats]:
    """Strengths by maximum likelihood (Bradley and Terry 1952), by Newton's method.

    Args:
        wins: ``[K, K]``; row i, column j: games that i won against j, draws as a half for each.
        prior_draws: Added between every two players that met; 0 is plain maximum likelihood, which is infinite where
            a player won or lost every game.

    Returns:
        Log-odds strengths ``[K]`` with mean 0, and their standard errors ``[K]`` from the Hessian, which take every
        game as independent.

    Raises:
        ValueError: Some players are not linked to the others by games, so they cannot be compared; or, without a
            prior, the likelihood has no maximum.
    """
    w = np.array(wins, float)
    if w.ndim != 2 or w.shape[0] != w.shape[1] or (w < 0).any() or np.diag(w).any():
        raise ValueError(f"wins of shape {w.shape} must be square, not negative, with zeros on the diagonal")
    if not _linked(w):
        raise ValueError("some players never met the others, not even through a third: they cannot be rated together")
    w = w + prior_draws / 2 * ((w + w.T) > 0)
    if _pieces(w, directed=True) > 1:  # Ford 1957: the maximum exists just then
        raise ValueError("some players won or lost every game, so the likelihood has no maximum; set prior_draws > 0")
    theta, information = _strengths(w[None])
    return theta[0], np.sqrt(np.diag(np.linalg.pinv(information[0])))


def _strengths(wins_BKK: Floats) -> tuple[Floats, Floats]:
    """Log-odds strengths ``[B, K]`` of B tables at once, and the negative Hessians ``[B, K, K]`` there."""
    games, theta_BK, information = wins_BKK + wins_BKK.transpose(0, 2, 1), np.zeros_like(wins_BKK[:, 0]), wins_BKK
    for _ in range(200):
        # the chance that i beats j: p_ij = 1 / (1 + exp(theta_j - theta_i))
        p = 1 / (1 + np.exp(np.clip(theta_BK[:, None, :] - theta_BK[:, :, None], -500, 500)))
        weight = games * p * (1 - p)
        information = np.eye(len(p[0])) * weight.sum(2)[:, :, None] - weight
        gradient = (wins_BKK - games * p).sum(2)  # games won minus games that these strengths expect
        # only differences count, so the Hessian is singular along (1, ..., 1): a constant added there makes it whole
        step = np.linalg.solve(information + 1 / len(p[0]), gradient[:, :, None])[:, :, 0]
        theta_BK = theta_BK + np.clip(step, -2.0, 2.0)  # far from the maximum a whole Newton step overshoots
        theta_BK -= theta_BK.mean(1, keepdims=True)
        if np.abs(step).max() < 1e-10:
            break
    return theta_BK, information


def rate_players(games: Sequence[Game], players: Sequence[str]) -> dict[str, Rating]:
    """Ratings of the players that met somebody, by name, best first.

    Intervals are the wider of two: percentiles of a bootstrap over seeds, because games of one seed are not
    independent, and those of the likelihood's curvature, because resampling a player that always wins tells nothing.
    Empty where nobody met, or where the players are not all linked by games.
    """
    names = [name for name in players if any(name in (game.first, game.second) for game in games)]
    if len(names) < 2:
        return {}
    place = {name: index for index, name in enumerate(names)}
    by_seed: defaultdict[int, Floats] = defaultdict(lambda: np.zeros((len(names), len(names))))
    for game in games:
        by_seed[game.seed][place[game.first], place[game.second]] += game.score
        by_seed[game.seed][place[game.second], place[game.first]] += 1 - game.score
    tables = np.stack([by_seed[s] for s in sorted(by_seed)])
    total = tables.sum(0)
    if not _linked(total):
        return {}
    theta, error = bradley_terry(total)
    rng = np.random.default_rng(_SEED)
    seeds = (rng.integers(len(tables), size=len(tables)) for _ in range(400 if len(tables) > 1 else 0))
    drawn = [table for table in (tables[chosen].sum(0) for chosen in seeds) if _linked(table)]
    spread = np.full((2, len(names)), math.nan)
    if drawn:
        draws = np.stack(drawn)
        prior = PRIOR_DRAWS / 2 * ((draws + draws.transpose(0, 2, 1)) > 0)
        spread = np.percentile(_strengths(draws + prior)[0], [2.5, 97.5], axis=0)
    low = MEAN + SCALE * np.minimum(spread[0], theta - _Z * error)
    high = MEAN + SCALE * np.maximum(spread[1], theta + _Z * error)
    middle, counts = MEAN + SCALE * theta, total.sum(0) + total.sum(1)
    return {
        names[i]: Rating(value=float(middle[i]), low=float(low[i]), high=float(high[i]), games=round(float(counts[i])))
        for i in sorted(place.values(), key=lambda i: -middle[i])
    }


def _linked(wins: Floats) -> bool:
    """Whether games lead from every player to every other."""
    return _pieces(wins, directed=False) == 1


def _pieces(wins: Floats, *, directed: bool) -> int:
    """Groups of players within which wins, or where not `directed` games, lead from everyone to everyone."""
    from scipy.sparse.csgraph import connected_components

    return int(connected_components(wins > 0, directed=directed, connection="strong")[0])
