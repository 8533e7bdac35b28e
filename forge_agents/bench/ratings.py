"""Who beats whom, as one number a player: Bradley-Terry ratings.

In: games won. Out: ratings with their uncertainty. Waits for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.sparse.csgraph import connected_components

Floats = npt.NDArray[np.float64]

MEAN = 1000.0
"""Mean rating of the players rated together."""
SCALE = 400 / math.log(10)
"""Rating points per unit of log-odds, so that 400 points are odds of ten to one, as Elo has it."""
PRIOR_DRAWS = 1.0
"""Draws added between any two players that met: a player that never lost still gets a finite rating."""
_RESAMPLES = 400
_Z = 1.959963984540054
_STEPS = 200


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

    seed: int
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
    met = (w + w.T) > 0
    if not _linked(met):
        raise ValueError("some players never met the others, not even through a third: they cannot be rated together")
    w = w + prior_draws / 2 * met
    if connected_components(w > 0, connection="strong")[0] > 1:  # Ford 1957: the maximum exists just then
        raise ValueError("some players won or lost every game, so the likelihood has no maximum; set prior_draws > 0")
    games, won = w + w.T, w.sum(1)
    k = len(w)
    theta = np.zeros(k)
    for _ in range(_STEPS):
        p = 1 / (1 + np.exp(np.clip(theta[None, :] - theta[:, None], -500, 500)))
        gradient = won - (games * p).sum(1)
        step = np.linalg.solve(_information(games, p) + np.ones((k, k)) / k, gradient)
        theta = theta + np.clip(step, -2.0, 2.0)
        theta -= theta.mean()
        if np.abs(step).max() < 1e-10:
            break
    p = 1 / (1 + np.exp(theta[None, :] - theta[:, None]))
    covariance = np.linalg.pinv(_information(games, p))
    return theta, np.sqrt(np.diag(covariance))


def rate_players(games: Sequence[Game], players: Sequence[str], *, seed: int = 0) -> dict[str, Rating]:
    """Ratings of the players that met somebody, by name, best first.

    Intervals are the wider of two: percentiles of a bootstrap over seeds, because games of one seed are not
    independent, and those of the likelihood's curvature, because resampling a player that always wins tells nothing.
    Empty where nobody met, or where the players are not all linked by games.
    """
    names = [name for name in players if any(name in (game.first, game.second) for game in games)]
    if len(names) < 2:
        return {}
    place = {name: index for index, name in enumerate(names)}
    by_seed = _by_seed(games, place)
    tables = np.stack([by_seed[s] for s in sorted(by_seed)])
    total = tables.sum(0)
    if not _linked((total + total.T) > 0):
        return {}
    theta, error = bradley_terry(total)
    rng = np.random.default_rng(seed)
    draws = []
    for _ in range(_RESAMPLES if len(tables) > 1 else 0):
        drawn = tables[rng.integers(len(tables), size=len(tables))].sum(0)
        if _linked((drawn + drawn.T) > 0):
            draws.append(bradley_terry(drawn)[0])
    spread = np.percentile(draws, [2.5, 97.5], axis=0) if draws else np.full((2, len(names)), math.nan)
    low = MEAN + SCALE * np.minimum(spread[0], theta - _Z * error)
    high = MEAN + SCALE * np.maximum(spread[1], theta + _Z * error)
    counts = total.sum(0) + total.sum(1)
    rated = {
        name: Rating(
            value=float(MEAN + SCALE * theta[i]), low=float(low[i]), high=float(high[i]), games=round(float(counts[i]))
        )
        for name, i in place.items()
    }
    return dict(sorted(rated.items(), key=lambda item: -item[1].value))


def _by_seed(games: Sequence[Game], place: Mapping[str, int]) -> dict[int, Floats]:
    tables: dict[int, Floats] = {}
    for game in games:
        table = tables.setdefault(game.seed, np.zeros((len(place), len(place))))
        table[place[game.first], place[game.second]] += game.score
        table[place[game.second], place[game.first]] += 1 - game.score
    return tables


def _information(games: Floats, p: Floats) -> Floats:
    """The negative Hessian of the log-likelihood."""
    weight = games * p * (1 - p)
    information: Floats = np.diag(weight.sum(1)) - weight
    return information


def _linked(met: npt.NDArray[np.bool_]) -> bool:
    return bool(connected_components(met, directed=False)[0] == 1)
