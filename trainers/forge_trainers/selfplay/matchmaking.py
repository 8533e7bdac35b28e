"""Matchmaking: probabilities of the opponents, ratings, and which snapshot leaves the pool."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from forge_agents import states

Matchmaking: TypeAlias = Literal["latest", "uniform", "pfsp", "pfsp_even", "near", "regret"]
"""Probabilities of the opponents. "latest": the newest snapshot; "uniform": all equal; "pfsp": in proportion to
``(1 - w)**2``, where w is the win rate, so the hardest most often; "pfsp_even": ``w * (1 - w)``, so those of equal
strength most often (prioritized fictitious self-play: Vinyals et al. 2019, "Grandmaster level in StarCraft II",
Methods); "near": probability of a draw by the ratings (Weng and Lin 2011, as openskill computes it); "regret": in
proportion to an opponent's regret, so those against which the policy earns less than against the opponents that were
drawn (Anytime PSRO, arXiv 2201.07700, whose distribution of opponents is chosen by regret matching)."""

MEMORY = 0.9
"""Decay of earlier results against an opponent per step with games against it: the policy changes."""
_MAX_RATING, _MAX_REGRET = 1e6, 1e40
"""Largest absolute values of ratings and decayed counts, and of sums of rewards, in a checkpoint."""
_PRIOR_GAMES = 2.0
"""Number of draws in the prior of each win rate and margin."""
_EXPLORATION = 0.1
"""Share of draws by "regret" that are uniform. Without them a margin that is never measured again would stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opponent:
    """An opponent and the policy's results against it."""

    name: str
    """Unique in the league."""
    version: int
    """Weight version of a snapshot, 0 for the start model, -1 for an anchor."""
    pinned: bool
    """Whether it never leaves: the start model and the anchors."""
    mu: float
    """Mean of its rating. A new player has 25."""
    sigma: float
    """Standard deviation of its rating. A new player has 25/3."""
    games: int = 0
    """Number of games against the policy."""
    recent_games: float = 0.0
    """Decayed number of games, see `MEMORY`."""
    recent_score: float = 0.0
    """The policy's score in these games: 1 for a win, 0.5 for a draw."""
    recent_margin: float = 0.0
    """The policy's reward minus the opponent's, summed over these games."""
    regret: float = 0.0
    """Reward that the opponents have missed because this one was not always drawn. At least 0."""

    @property
    def win_rate(self) -> float:
        """Probability that the policy wins, in (0, 1): recent games with a prior of two draws."""
        return (self.recent_score + _PRIOR_GAMES / 2) / (self.recent_games + _PRIOR_GAMES)

    @property
    def margin(self) -> float:
        """Mean reward of the policy minus the opponent's: recent games with a prior of two draws."""
        return self.recent_margin / (self.recent_games + _PRIOR_GAMES)


def result_of(margin: float) -> float:
    """Return 1 for a win, 0.5 for a draw and 0 for a loss, by the policy's reward minus the opponent's."""
    return 0.5 if margin == 0 else float(margin > 0)


class Standings:
    """The opponents of one policy, with results and ratings: anchors, and at most `pool` snapshots with the start."""

    def __init__(self, *, anchors: Sequence[str] = (), start: str = "start", pool: int = 8) -> None:
        if pool < 2:
            raise ValueError(f"pool={pool} has no room for a snapshot in addition to the start model. Set at least 2")
        self._pool = pool
        from openskill.models import PlackettLuce

        self._ratings: Any = PlackettLuce()
        fresh = self._ratings.rating()
        self.mu, self.sigma = float(fresh.mu), float(fresh.sigma)
        """The policy's rating."""
        self._win_margin = 0.0
        """Mean absolute margin of the games that were not drawn, in the latest step that had one."""
        names = (start, *anchors)
        if len(set(names)) < len(names):
            raise ValueError(f"opponents need different names, got {', '.join(names)}")
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
        return max(self._opponents.values(), key=lambda opponent: opponent.version)

    def probabilities(self, matchmaking: Matchmaking) -> np.ndarray:
        """Return the probability of drawing each of `opponents`: float64 ``[n]``, sum 1."""
        opponents = self.opponents
        win_n = np.array([opponent.win_rate for opponent in opponents])
        if matchmaking == "latest":
            weights_n = np.array([float(opponent is self.latest) for opponent in opponents])
        elif matchmaking == "uniform":
            weights_n = np.ones(len(opponents))
        elif matchmaking == "pfsp":
            weights_n = (1 - win_n) ** 2
        elif matchmaking == "pfsp_even":
            weights_n = win_n * (1 - win_n)
        elif matchmaking == "regret":
            regret_n = np.array([opponent.regret for opponent in opponents])
            regret_n = regret_n if regret_n.any() else np.ones(len(opponents))
            weights_n = (1 - _EXPLORATION) * regret_n / regret_n.sum() + _EXPLORATION / len(opponents)
        else:
            rating = self._ratings.rating
            pairs = ([[rating(mu=p.mu, sigma=p.sigma)] for p in (self, opponent)] for opponent in opponents)
            weights_n = np.array([float(self._ratings.predict_draw(pair)) for pair in pairs])
            if not weights_n.sum() > 0:  # all are far away: choose the nearest
                weights_n = np.array([-abs(opponent.mu - self.mu) for opponent in opponents])
                weights_n = (weights_n == weights_n.max()).astype(float)
        probabilities_n: np.ndarray = weights_n / weights_n.sum()
        return probabilities_n

    def record(self, margins: Mapping[str, Sequence[float]]) -> None:
        """Record the games of a step: by opponent, the policy's reward minus the opponent's in each game.

        NaN is a game that the opponent's failure ended. It counts as a win by the usual margin, because an opponent may
        fail only when it is about to lose: any lower result would make it look harder than it is, and it would be drawn
        most often. Games against opponents that left are ignored.
        """
        margins = {name: each for name, each in margins.items() if name in self._opponents and each}
        valid = {name: [margin for margin in each if not math.isnan(margin)] for name, each in margins.items()}
        decided = [abs(margin) for each in valid.values() for margin in each if margin]
        self._win_margin = float(np.mean(decided)) if decided else self._win_margin
        for name, each in margins.items():
            opponent, failed = self._opponents[name], len(each) - len(valid[name])
            scores = [1.0 if math.isnan(margin) else result_of(margin) for margin in each]
            mu, sigma = self._rate(opponent, scores)
            # at least that of the easiest other opponent, if the games were of different length
            won = max((other.margin for other in self.opponents if other.name != name), default=0.0)
            new_margin = math.fsum(valid[name]) + failed * max(self._win_margin, won)
            self._opponents[name] = replace(
                opponent,
                mu=mu,
                sigma=sigma,
                games=opponent.games + len(scores),
                recent_games=MEMORY * opponent.recent_games + len(scores),
                recent_score=MEMORY * opponent.recent_score + sum(scores),
                recent_margin=MEMORY * opponent.recent_margin + new_margin,
            )
        if any(valid.values()):
            self._update_regrets()

    def add(self, name: str, version: int) -> list[Opponent]:
        """Add a snapshot of the policy, with its rating. Returns the opponents that left.

        If the pool is full, the snapshot with the highest win rate of the policy leaves, of equal ones the oldest;
        never the start model, an anchor or the new one.
        """
        if name in self._opponents:
            raise ValueError(f"the league has an opponent called {name!r} already")
        if version <= self.latest.version:
            raise ValueError(f"version {version} of snapshot {name!r} is not newer than {self.latest.version}")
        removed = self._remove_weakest(self._pool - 1)
        self._opponents[name] = Opponent(name=name, version=version, pinned=False, mu=self.mu, sigma=self.sigma)
        return removed

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return opponents and ratings as arrays, for a checkpoint."""
        rows = self.opponents
        return {
            "names": np.array([row.name for row in rows], dtype=np.str_),
            "pinned": np.array([row.pinned for row in rows]),
            "counts": np.array([(row.version, row.games) for row in rows], dtype=np.int64),
            "numbers": np.array([(row.mu, row.sigma, row.recent_games, row.recent_score) for row in rows]),
            "own": np.array([self.mu, self.sigma]),
            "regrets": np.array([(row.recent_margin, row.regret) for row in rows]),
            "win_margin": np.array([self._win_margin]),
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from `state_dict`. Raises ValueError for other anchors, or for numbers that no league has.

        If there are more snapshots than the pool holds, because it was larger or the file is a stranger's, those leave
        that `add` would remove.
        """
        names = states.texts(state, "names", -1)
        rows, num = {name: at for at, name in enumerate(names)}, len(names)
        pinned, counts = states.numbers(state, "pinned", num), states.whole(state, "counts", num, 2, low=-1)
        fixed = {opponent.name for opponent in self.opponents if opponent.pinned}
        saved = {name for name, at in rows.items() if pinned[at]}
        if fixed != saved:
            raise ValueError(
                f"the checkpoint's league has the anchors {sorted(saved)}, this one {sorted(fixed)}. Choose another "
                "out_dir"
            )
        # checkpoints of earlier versions have none of these
        state = {"regrets": np.zeros((num, 2)), "win_margin": np.zeros(1), **state}
        own = states.numbers(state, "own", 2, low=-_MAX_RATING, high=_MAX_RATING)
        numbers = states.numbers(state, "numbers", num, 4, low=-_MAX_RATING, high=_MAX_RATING)
        regrets = states.numbers(state, "regrets", num, 2, low=-_MAX_REGRET, high=_MAX_REGRET)
        (win_margin,) = states.numbers(state, "win_margin", 1, low=0, high=_MAX_REGRET)
        are_possible = (
            len(rows) == num
            and min(own[1], *numbers[:, 1]) > 0
            and (numbers[:, 3] >= 0).all()
            and (numbers[:, 3] <= numbers[:, 2]).all()
            and (counts[:, 1] >= 0).all()
            and (regrets[:, 1] >= 0).all()
            and all(counts[at, 0] == self._opponents[name].version for name, at in rows.items() if pinned[at])
            and len({*counts[pinned == 0, 0]} - {-1, 0}) == num - len(saved)
        )
        if not are_possible:
            raise ValueError(
                "the checkpoint's league holds a negative or too large count, score, deviation or regret, or an "
                "opponent or version twice. Choose another checkpoint"
            )
        self.mu, self.sigma, self._win_margin = *map(float, own), float(win_margin)
        self._opponents = {
            name: Opponent(
                name=name,
                version=int(counts[at, 0]),
                pinned=bool(pinned[at]),
                mu=float(numbers[at, 0]),
                sigma=float(numbers[at, 1]),
                games=int(counts[at, 1]),
                recent_games=float(numbers[at, 2]),
                recent_score=float(numbers[at, 3]),
                recent_margin=float(regrets[at, 0]),
                regret=float(regrets[at, 1]),
            )
            for name, at in rows.items()
        }
        self._remove_weakest(self._pool)

    def _remove_weakest(self, most: int) -> list[Opponent]:
        """Remove snapshots until at most `most` are left with the start model, and return them."""
        snapshots = [opponent for opponent in self.opponents if not opponent.pinned]
        snapshots.sort(key=lambda opponent: (-opponent.win_rate, opponent.version))
        return [self._opponents.pop(opponent.name) for opponent in snapshots[: max(0, len(snapshots) + 1 - most)]]

    def _update_regrets(self) -> None:
        """Add the difference between each opponent's margin and that of the opponents that were drawn."""
        # regret matching+ (arXiv 1407.5042): R <- max(0, R + u(opponent) - sum over opponents of p u), u = -margin
        probabilities_n = self.probabilities("regret")
        margins_n = np.array([opponent.margin for opponent in self.opponents])
        for opponent, gain in zip(self.opponents, probabilities_n @ margins_n - margins_n, strict=True):
            self._opponents[opponent.name] = replace(opponent, regret=max(0.0, opponent.regret + float(gain)))

    def _rate(self, opponent: Opponent, scores: Sequence[float]) -> tuple[float, float]:
        """Update the policy's rating. Returns the opponent's."""
        model = self._ratings
        rating, other = model.rating(mu=self.mu, sigma=self.sigma), model.rating(mu=opponent.mu, sigma=opponent.sigma)
        for score in scores:
            [[rating], [other]] = model.rate([[rating], [other]], scores=[score, 1 - score])
        self.mu, self.sigma = float(rating.mu), float(rating.sigma)
        return float(other.mu), float(other.sigma)
