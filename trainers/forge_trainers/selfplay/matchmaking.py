"""Whom a policy meets next, how strong everybody is, and who leaves the pool.

In: results of games against opponents. Out: chances of meeting them, ratings, arrays for a checkpoint. Waits for
nothing; knows neither models nor engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

Matchmaking: TypeAlias = Literal["latest", "uniform", "pfsp", "pfsp_even", "near"]
"""How opponents are drawn. "latest": the newest snapshot; "uniform": all alike; "pfsp": by ``(1 - w)**2``, where w is
the chance to beat them, so the hardest most often, "pfsp_even": by ``w * (1 - w)``, so those of equal strength most
often (prioritised fictitious self-play: Vinyals et al. 2019, "Grandmaster level in StarCraft II", Methods); "near":
by the chance of a draw between the ratings (Weng and Lin 2011, as openskill computes it)."""

MEMORY = 0.9
"""What one step with games against an opponent leaves of the results against it before: the policy changes."""
_PRIOR_GAMES = 2.0
"""Draws that count as played against everybody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opponent:
    """One opponent and how the policy did against it."""

    name: str
    """Unique in the league."""
    version: int
    """Weights version of a snapshot, 0 for the start model; -1 for an anchor that is no snapshot."""
    pinned: bool
    """It never leaves: the start model and the anchors."""
    mu: float
    """Mean of its rating; a new player has 25."""
    sigma: float
    """Standard deviation of its rating; a new player has 25/3."""
    games: int = 0
    """Games that the policy played against it."""
    recent_games: float = 0.0
    """The same, where earlier steps count less: see `MEMORY`."""
    recent_score: float = 0.0
    """What the policy won of those: 1 a win, 0.5 a draw."""

    @property
    def win_rate(self) -> float:
        """The chance that the policy beats it, in (0, 1): of recent games and a prior of two draws."""
        return (self.recent_score + _PRIOR_GAMES / 2) / (self.recent_games + _PRIOR_GAMES)


class Standings:
    """The pool of opponents of one policy, with results and ratings.

    Args:
        anchors: Names of fixed opponents.
        start: Name of the start model's snapshot.
        pool: Snapshots kept, the start model included; at least 2.
    """

    def __init__(self, *, anchors: Sequence[str] = (), start: str = "start", pool: int = 8) -> None:
        if pool < 2:
            raise ValueError(f"pool={pool} has no room for a snapshot beside the start model; set at least 2")
        self._pool = pool
        from openskill.models import PlackettLuce

        self._ratings: Any = PlackettLuce()
        fresh = self._ratings.rating()
        self.mu, self.sigma = float(fresh.mu), float(fresh.sigma)
        """The policy's own rating."""
        names = (start, *anchors)
        if len(set(names)) < len(names):
            raise ValueError(f"opponents need names of their own, got {', '.join(names)}")
        self._opponents = {
            name: Opponent(name=name, version=0 if name == start else -1, pinned=True, mu=self.mu, sigma=self.sigma)
            for name in names
        }

    @property
    def opponents(self) -> tuple[Opponent, ...]:
        """The start model, the anchors, then snapshots, oldest first."""
        return tuple(self._opponents.values())

    @property
    def latest(self) -> Opponent:
        """The newest snapshot."""
        return max(self._opponents.values(), key=lambda one: one.version)

    def chances(self, matchmaking: Matchmaking) -> np.ndarray:
        """How likely each of `opponents` is to be met: float64 ``[n]``, sums to 1."""
        everyone = self.opponents
        win_n = np.array([one.win_rate for one in everyone])
        if matchmaking == "latest":
            weights_n = np.array([float(one is self.latest) for one in everyone])
        elif matchmaking == "uniform":
            weights_n = np.ones(len(everyone))
        elif matchmaking == "pfsp":
            weights_n = (1 - win_n) ** 2
        elif matchmaking == "pfsp_even":
            weights_n = win_n * (1 - win_n)
        else:
            rating = self._ratings.rating
            pairs = ([[rating(mu=one.mu, sigma=one.sigma)] for one in (self, other)] for other in everyone)
            weights_n = np.array([float(self._ratings.predict_draw(pair)) for pair in pairs])
            if not weights_n.sum() > 0:  # all far away: the nearest
                weights_n = np.array([-abs(one.mu - self.mu) for one in everyone])
                weights_n = (weights_n == weights_n.max()).astype(float)
        chances_n: np.ndarray = weights_n / weights_n.sum()
        return chances_n

    def record(self, results: Mapping[str, Sequence[float]]) -> None:
        """Take in a step's games.

        Args:
            results: By opponent what the policy got of each game: 1 a win, 0.5 a draw, 0 a loss. Games against
                somebody who has left meanwhile do not count.

        Raises:
            ValueError: A result that is none of these.
        """
        for name, scores in results.items():
            wrong = [score for score in scores if score not in (0, 0.5, 1)]
            if wrong:
                raise ValueError(f"a game against {name} gave {wrong[0]}; expected 1, 0.5 or 0")
            one = self._opponents.get(name)
            if one is None or not scores:
                continue
            mu, sigma = self._rate(one, scores)
            self._opponents[name] = replace(
                one,
                mu=mu,
                sigma=sigma,
                games=one.games + len(scores),
                recent_games=MEMORY * one.recent_games + len(scores),
                recent_score=MEMORY * one.recent_score + float(sum(scores)),
            )

    def add(self, name: str, version: int) -> list[Opponent]:
        """Take the policy as it is into the pool, with its rating, under a new name.

        Where the pool is full, the snapshot that the policy beats most surely leaves, of equal ones the oldest; never
        the start model, an anchor or the new one.

        Returns:
            Those that left.
        """
        if name in self._opponents:
            raise ValueError(f"the league has an opponent called {name!r} already")
        if version <= self.latest.version:
            raise ValueError(f"version {version} of snapshot {name!r} is not newer than {self.latest.version}")
        left = []
        while sum(one.version >= 0 for one in self.opponents) >= self._pool:
            worst = max((one for one in self.opponents if not one.pinned), key=lambda one: (one.win_rate, -one.version))
            left.append(self._opponents.pop(worst.name))
        self._opponents[name] = Opponent(name=name, version=version, pinned=False, mu=self.mu, sigma=self.sigma)
        return left

    def state_dict(self) -> dict[str, np.ndarray]:
        """Everything, as arrays."""
        rows = self.opponents
        return {
            "names": np.array([one.name for one in rows], dtype=np.str_),
            "pinned": np.array([one.pinned for one in rows]),
            "counts": np.array([(one.version, one.games) for one in rows], dtype=np.int64),
            "numbers": np.array([(one.mu, one.sigma, one.recent_games, one.recent_score) for one in rows]),
            "own": np.array([self.mu, self.sigma]),
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from `state_dict`.

        Raises:
            ValueError: Its anchors are not those of this league.
        """
        saved = {str(name): at for at, name in enumerate(state["names"])}
        fixed = {one.name for one in self.opponents if one.pinned}
        kept = {name for name, at in saved.items() if state["pinned"][at]}
        if fixed != kept:
            raise ValueError(
                f"the checkpoint's league has the anchors {sorted(kept)}, this one {sorted(fixed)}; choose another "
                "out_dir"
            )
        self.mu, self.sigma = (float(value) for value in state["own"])
        self._opponents = {
            name: Opponent(
                name=name,
                version=int(state["counts"][at, 0]),
                pinned=bool(state["pinned"][at]),
                mu=float(state["numbers"][at, 0]),
                sigma=float(state["numbers"][at, 1]),
                games=int(state["counts"][at, 1]),
                recent_games=float(state["numbers"][at, 2]),
                recent_score=float(state["numbers"][at, 3]),
            )
            for name, at in saved.items()
        }

    def _rate(self, one: Opponent, scores: Sequence[float]) -> tuple[float, float]:
        """Bring the policy's rating up to date. Returns the opponent's."""
        model = self._ratings
        mine, theirs = model.rating(mu=self.mu, sigma=self.sigma), model.rating(mu=one.mu, sigma=one.sigma)
        for score in scores:
            [[mine], [theirs]] = model.rate([[mine], [theirs]], scores=[score, 1 - score])
        self.mu, self.sigma = float(mine.mu), float(mine.sigma)
        return float(theirs.mu), float(theirs.sigma)
