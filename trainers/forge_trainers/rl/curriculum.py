"""Which level of difficulty is practised: those at which the team neither always fails nor always succeeds.

A group of siblings teaches as much as its rewards differ: of success p they have the variance p (1 - p), so what always
fails or always succeeds is played for nothing. In: the judged groups of each step. Out: how likely each environment is
drawn, and seeds that are worth another try. Waits for nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forge_agents.envs import registry
from forge_agents.errors import ArgumentError
from forge_agents.settings import settings_class
from forge_trainers.rl.rewards import JudgedGroup

_log = logging.getLogger(__name__)


@settings_class
@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """When a level is practised."""

    low: float = 0.2
    """Success below which a level is too hard."""
    high: float = 0.8
    """Success above which a level is too easy."""
    explore: float = 0.1
    """Share of the groups that go to all levels evenly, above 0 up to 1."""
    memory: int = 256
    """Episodes of the run, of all levels, after which one counts a third in an estimate of success, at least 1: a team
    that learns at one level is no longer what it was at the others."""
    replay: float = 0.0
    """Share of the groups that play a seed again whose siblings differed, in proportion to p (1 - p) of their success,
    at least 0 and below 1 (prioritised level replay, arXiv 2010.03934, by the learnability of arXiv 2408.15099)."""
    max_seeds: int = 256
    """Seeds that are kept for it, at least 1; the least promising go first."""

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high <= 1:
            raise ValueError(f"low={self.low} and high={self.high} of a curriculum: 0 <= low < high <= 1")
        if not (0 < self.explore <= 1 and 0 <= self.replay < 1 and self.memory >= 1 and self.max_seeds >= 1):
            raise ValueError(
                f"explore={self.explore} of a curriculum must be above 0 up to 1, replay={self.replay} at least 0 and "
                f"below 1, memory={self.memory} and max_seeds={self.max_seeds} at least 1"
            )


@settings_class
@dataclass(frozen=True)
class Curriculum(CurriculumConfig):
    """Environments whose share of the groups follows the team's success: ``trainer.fit(fa.Curriculum("my/Game-v0"))``.

    Success of a group is its siblings' mean reward of the trained seats over the most that can be earned, which
    ``max_reward`` of the environment or the reward says, and which is 1 where neither does: rewards count from 0 on. An
    environment's success is the mean over its episodes, but for those of seeds played again; older ones fade away over
    the run's `memory` newest at all levels. Groups are shared evenly by the environments whose success lies between
    `low` and `high`, give or take 0.5 / sqrt(n), the most that the standard error of n episodes is; if none does, the
    nearest gets them, and of several that are as far too hard the easiest. What was not played for long is so little
    known that it is tried again. One that was not played yet counts as its next easier level, the first as 0.5. A
    share `explore` of the groups goes to all evenly.

    Held-out seeds are of all levels evenly, whatever is practised.
    """

    env: str | Sequence[str]
    """An id, of which all registered levels are practised; or ids, with levels or without, the easiest first."""

    @property
    def env_ids(self) -> tuple[str, ...]:
        """What is practised, the easiest first.

        Raises:
            UnknownIdError: An id that is not registered.
            ArgumentError: One id with fewer than two levels, fewer than two ids, or one twice.
        """
        if isinstance(self.env, str):
            count = len(registry.spec(self.env).levels)
            if count < 2:
                raise ArgumentError(
                    f"a curriculum of {self.env} has nothing to choose from: it has {count or 'no'} levels. Register "
                    "it with levels=[{...}, {...}], arguments of its constructor from the easiest on, or list ids"
                )
            return tuple(f"{self.env}@{level}" for level in range(1, count + 1))
        ids = tuple(self.env)
        if len(ids) < 2 or len(set(ids)) < len(ids):
            raise ArgumentError(f"a curriculum needs two or more different ids, got {list(ids)}")
        return ids

    def check_tops(self, tops: Mapping[str, float | None]) -> None:
        """Raise ArgumentError where success would be no share of the most that can be earned.

        Args:
            tops: That, by environment; None where nobody says it.
        """
        for env_id, top in tops.items():
            if top is not None and not 0 < top < math.inf:
                raise ArgumentError(
                    f"max_reward={top:g} of {env_id} or of the reward: a curriculum takes the share of it that was "
                    "earned for success, from 0 on. Pay rewards from 0 up, such as by adding the same to each episode, "
                    "and raise max_reward with them; or practise one level after the other"
                )


class Practice:
    """What a run knows of its success, by environment; a checkpoint keeps it."""

    def __init__(self) -> None:
        self._success: dict[str, tuple[float, float]] = {}
        """Sum of success and number of episodes, both fading, the latter to no less than one."""
        self._seeds: dict[tuple[str, int], float] = {}
        """Success of groups whose siblings differed."""
        self._again: set[tuple[str, int]] = set()
        """Seeds that were drawn again: a group may come back when its seed is solved and forgotten."""
        self._warned: set[str] = set()

    def record(
        self,
        plan: Curriculum,
        judged: Sequence[JudgedGroup],
        trained: Collection[str],
        tops: Mapping[str, float | None],
    ) -> dict[str, float]:
        """Take note of the groups of a step that has been learned from.

        Args:
            plan: What is practised.
            judged: The groups; failed episodes and abstentions are left out.
            trained: Policies that learn.
            tops: The most that can be earned, by environment; None where nobody says it.

        Returns:
            Metrics: ``curriculum/level``, the mean place of the groups' environments in the plan, from 1, and
            ``curriculum/success/ID`` of each that has been played.
        """
        ids = plan.env_ids
        played = [item for item in judged if item.group.env_id in ids]
        places = [ids.index(item.group.env_id) + 1 for item in played]
        scores = [self._scores(item, trained, tops.get(item.group.env_id)) for item in played]
        keys = [(item.group.env_id, item.group.seed) for item in played]
        chosen = self._seeds.keys() | self._again  # by their success, so that they tell nothing of it
        new = sum(len(own) for key, own in zip(keys, scores, strict=True) if key not in chosen)
        self._fade((1 - 1 / plan.memory) ** new)
        for key, own in zip(keys, scores, strict=True):
            if len(own):
                if key not in chosen:
                    total, count = self._success.get(key[0], (0.0, 0.0))
                    self._success[key[0]] = total + float(own.sum()), count + len(own)
                self._keep(plan, key, float(own.mean()))
        found = {f"curriculum/success/{env_id}": self.success(env_id) for env_id in ids if env_id in self._success}
        return {"curriculum/level": float(np.mean(places))} | found if places else found

    def success(self, env_id: str) -> float:
        """Of an environment that was played, 0 to 1."""
        total, count = self._success[env_id]
        return total / count

    def shares(self, plan: Curriculum) -> np.ndarray:
        """How likely a group is of each environment of `plan`: float64 ``[environments]``, sum 1."""
        found, (expected, count) = [], (0.5, math.inf)
        for env_id in plan.env_ids:
            if env_id in self._success:
                expected, count = self.success(env_id), self._success[env_id][1]
            found.append((expected, 0.5 / math.sqrt(count)))  # sqrt(p (1 - p) / n) is at most that
        expected_n, error_n = np.array(found).T
        chosen = (expected_n + error_n >= plan.low) & (expected_n - error_n <= plan.high)
        if not chosen.any():  # how little is known of a level is no reason to think that it is nearer
            away_n = np.maximum(plan.low - expected_n, expected_n - plan.high)
            chosen = away_n == away_n.min()
            if expected_n[chosen][0] < plan.low:  # of those as hard the first, which is the easiest
                chosen = np.arange(len(chosen)) == chosen.argmax()
        shares: np.ndarray = plan.explore / len(chosen) + (1 - plan.explore) * chosen / chosen.sum()
        return shares

    def again(self, plan: Curriculum, rng: np.random.Generator) -> tuple[str, int] | None:
        """An environment and a seed that are worth another try; None where a new one is to be played."""
        ids = plan.env_ids
        known = [key for key in self._seeds if key[0] in ids]
        if not (rng.random() < plan.replay and known):
            return None
        promise = np.array([_spread(self._seeds[key]) for key in known])
        drawn = known[int(rng.choice(len(known), p=promise / promise.sum()))]
        self._again.add(drawn)
        return drawn

    def _fade(self, left: float) -> None:
        """Let what is known count `left` of what it did, and never less than one episode."""
        for env_id, (total, count) in self._success.items():
            factor = min(1.0, max(left, 1 / count))
            self._success[env_id] = factor * total, factor * count

    def _scores(self, item: JudgedGroup, trained: Collection[str], top: float | None) -> np.ndarray:
        """Success of each sibling that has a reward, float64, 0 to 1."""
        found = []
        for at, episode in enumerate(item.group.episodes):
            rewards = item.episode_rewards(at)
            own = [r for agent, r in rewards.items() if episode.trajectories[agent].policy in trained]
            if episode.error is None and own and not np.isnan(own).all():
                found.append(np.nanmean(own))
        scores, env_id = np.array(found, np.float64) / (1.0 if top is None else top), item.group.env_id
        inside = scores.clip(0.0, 1.0)
        if np.abs(scores - inside).max(initial=0.0) > 1e-6 and env_id not in self._warned:
            self._warned.add(env_id)
            _log.warning(
                "rewards of %s lie between %g and %g times the most that can be earned, and its curriculum counts "
                "them as 0 to 1. Say what can be earned with max_reward of the environment or the reward",
                env_id,
                scores.min(),
                scores.max(),
            )
        return inside

    def _keep(self, plan: Curriculum, key: tuple[str, int], success: float) -> None:
        if plan.replay and _spread(success):
            self._seeds[key] = success
        else:
            self._seeds.pop(key, None)
        if len(self._seeds) > plan.max_seeds:
            del self._seeds[min(self._seeds, key=lambda one: _spread(self._seeds[one]))]

    def state_dict(self) -> dict[str, np.ndarray]:
        """Success by environment and by seed, for a checkpoint."""
        return {
            "ids": np.array(list(self._success), dtype=np.str_),
            "success": np.array(list(self._success.values()), np.float64).reshape(-1, 2),
            "seed_ids": np.array([env_id for env_id, _ in self._seeds], dtype=np.str_),
            "seeds": np.array([seed for _, seed in self._seeds], np.int64),
            "seed_success": np.array(list(self._seeds.values()), np.float64),
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from `state_dict`."""
        sums = (tuple(row) for row in state["success"].tolist())
        self._success = dict(zip(state["ids"].tolist(), sums, strict=True))
        keys = zip(state["seed_ids"].tolist(), state["seeds"].tolist(), strict=True)
        self._seeds = dict(zip(keys, state["seed_success"].tolist(), strict=True))


def _spread(success: float) -> float:
    """Variance of rewards 0 and 1 of this mean: what siblings teach."""
    return success * (1 - success)
