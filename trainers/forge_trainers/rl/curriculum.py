"""Curricula: practice the levels at which the team neither always fails nor always succeeds.

A group teaches as much as its rewards differ: of success rate p, rewards have the variance p (1 - p).
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from forge_agents import states
from forge_agents.envs import registry
from forge_agents.envs.seeds import HELD_OUT_FROM
from forge_agents.errors import ArgumentError
from forge_agents.settings import settings_class
from forge_agents.types import EpisodeGroup

_log = logging.getLogger(__name__)
EnvSeed: TypeAlias = tuple[str, int]
"""A group's environment and seed."""


@settings_class
@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """Settings of a curriculum."""

    low: float = 0.2
    """Success rate below which a level is too hard."""
    high: float = 0.8
    """Success rate above which a level is too easy."""
    explore: float = 0.1
    """Fraction of groups that go to all levels evenly. Above 0, up to 1."""
    memory: int = 256
    """Number of episodes, over all levels, after which the weight of an episode in the success rates has fallen to a
    third. At least 1. Old results describe a team that has changed since."""
    replay: float = 0.0
    """Fraction of groups that replay a seed whose episodes differed, with probability in proportion to p (1 - p) of
    their success rate (prioritized level replay, arXiv 2010.03934, by the learnability of arXiv 2408.15099). At least
    0, below 1."""
    max_seeds: int = 256
    """Maximum number of seeds kept for replay, at least 1. The least informative ones are dropped first."""

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

    The success of a group is the mean reward of its trained agents divided by the maximum reward. The environment or
    the reward declares the maximum with ``max_reward``. The default is 1. Rewards below 0 count as 0.

    An environment's success rate is the mean over its newest episodes, see `memory`, without replayed seeds. Groups
    are shared evenly by the environments whose success rate lies between `low` and `high`, plus or minus 0.5 / sqrt(n),
    the largest standard error of n episodes. If there is none, the nearest environment gets all groups, and of several
    that are equally far too hard, the easiest. An environment without recent episodes has a large error, so it is
    tried again. One without any episodes counts as its next easier level, and the first level as 0.5. A fraction
    `explore` of the groups goes to all environments evenly.

    Evaluations use all levels evenly.
    """

    env: str | Sequence[str]
    """An id, whose registered levels form the curriculum, or a list of ids, with or without levels, easiest first."""

    @property
    def env_ids(self) -> tuple[str, ...]:
        """The environments, easiest first. Raises UnknownIdError or ArgumentError if there are fewer than two."""
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

    def check_max_rewards(self, max_rewards: Mapping[str, float | None]) -> None:
        """Raise ArgumentError if success cannot be a fraction of the maximum reward. None is unknown."""
        for env_id, top in max_rewards.items():
            if top is not None and not 0 < top < math.inf:
                raise ArgumentError(
                    f"max_reward={top:g} of {env_id} or of the reward: a curriculum measures success as a fraction of "
                    "it, from 0 on. Shift the rewards to start at 0, such as by a constant per episode, and max_reward "
                    "with them, or train on one level after the other"
                )


class Progress:
    """The success rates of a run by environment. A checkpoint keeps them."""

    def __init__(self) -> None:
        self._success: dict[str, tuple[float, float]] = {}
        """Decayed sum of success and decayed number of episodes. The number never falls below one."""
        self._seeds: dict[EnvSeed, float] = {}
        """Success rate of seeds whose episodes differed."""
        self._replayed: set[EnvSeed] = set()
        """Replayed seeds. A group may finish after its seed was solved and dropped."""
        self._collected: Counter[str] = Counter()
        """Number of groups with new seeds in all trained steps, by environment."""
        self._ahead: dict[int, tuple[list[EnvSeed], Counter[str]]] = {}
        """Of each step that was sampled and not trained: its tasks, and its groups with new seeds by environment."""
        self._last: tuple[int, list[EnvSeed]] = -1, []
        """The last trained step, and its tasks. A resumed run collects its late groups again."""
        self._warned: set[str] = set()

    def record(
        self,
        curriculum: Curriculum,
        groups: Sequence[EpisodeGroup],
        trained: Collection[str],
        max_rewards: Mapping[str, float | None],
    ) -> dict[str, float]:
        """Record the scored groups of a step after training. Failed episodes and abstentions are left out.

        Returns:
            ``curriculum/level``: mean position of the groups' environments in the curriculum, from 1.
            ``curriculum/success/ID``: success rate of each environment so far.
        """
        if self._ahead:
            step = min(self._ahead)
            pairs, new_groups = self._ahead.pop(step)
            self._last = step, pairs
            self._collected += new_groups
        ids = curriculum.env_ids
        groups = [group for group in groups if group.env_id in ids]
        levels = [ids.index(group.env_id) + 1 for group in groups]
        scores = [self._scores(group, trained, max_rewards.get(group.env_id)) for group in groups]
        keys = [(group.env_id, group.seed) for group in groups]
        biased = self._seeds.keys() | self._replayed  # chosen by their success, so no evidence of the success rate
        new = sum(len(values) for key, values in zip(keys, scores, strict=True) if key not in biased)
        self._decay((1 - 1 / curriculum.memory) ** new)
        for key, values in zip(keys, scores, strict=True):
            if len(values):
                if key not in biased:
                    total, count = self._success.get(key[0], (0.0, 0.0))
                    self._success[key[0]] = total + float(values.sum()), count + len(values)
                self._keep_seed(curriculum, key, float(values.mean()))
        rates = {f"curriculum/success/{env_id}": self.success(env_id) for env_id in ids if env_id in self._success}
        return {"curriculum/level": float(np.mean(levels))} | rates if levels else rates

    def collected_before(self, step: int) -> Counter[str]:
        """Return the number of groups with new seeds in all earlier steps, by environment."""
        ahead = [counts for earlier, (_, counts) in self._ahead.items() if earlier < step]
        return sum(ahead, Counter(self._collected))

    def sampled(self, step: int, pairs: list[EnvSeed], new: Counter[str]) -> None:
        """Note the tasks of a step that is not trained, and its number of groups with new seeds by environment."""
        if step > self._last[0]:  # a resumed run with another number of groups samples the last step again
            self._ahead[step] = pairs, new

    def trained_tasks(self, step: int) -> list[EnvSeed] | None:
        """Return the tasks of `step` if it is the last trained one, otherwise None."""
        return self._last[1] if step == self._last[0] else None

    def success(self, env_id: str) -> float:
        """Return the success rate of an environment with episodes, in [0, 1]."""
        total, count = self._success[env_id]
        return total / count

    def shares(self, curriculum: Curriculum) -> np.ndarray:
        """Return the probability of each environment: float64 ``[environments]``, sum 1."""
        rates, (expected, count) = [], (0.5, math.inf)
        for env_id in curriculum.env_ids:
            if env_id in self._success:
                expected, count = self.success(env_id), self._success[env_id][1]
            rates.append((expected, 0.5 / math.sqrt(count)))  # sqrt(p (1 - p) / n) is at most that
        expected_n, error_n = np.array(rates).T
        chosen = (expected_n + error_n >= curriculum.low) & (expected_n - error_n <= curriculum.high)
        if not chosen.any():  # without the errors: an unknown level is not nearer for that reason
            distance_n = np.maximum(curriculum.low - expected_n, expected_n - curriculum.high)
            chosen = distance_n == distance_n.min()
            if expected_n[chosen][0] < curriculum.low:  # of equally hard levels the first, which is the easiest
                chosen = np.arange(len(chosen)) == chosen.argmax()
        shares: np.ndarray = curriculum.explore / len(chosen) + (1 - curriculum.explore) * chosen / chosen.sum()
        return shares

    def replayed(self, curriculum: Curriculum, rng: np.random.Generator) -> EnvSeed | None:
        """Return an environment and a seed to replay, or None for a new seed."""
        ids = curriculum.env_ids
        seeds = [key for key in self._seeds if key[0] in ids]
        if not (rng.random() < curriculum.replay and seeds):
            return None
        variance = np.array([_variance(self._seeds[key]) for key in seeds])
        key = seeds[int(rng.choice(len(seeds), p=variance / variance.sum()))]
        self._replayed.add(key)
        return key

    def _decay(self, factor: float) -> None:
        """Multiply the weight of all episodes by `factor`, down to one episode per environment."""
        for env_id, (total, count) in self._success.items():
            bounded = min(1.0, max(factor, 1 / count))
            self._success[env_id] = bounded * total, bounded * count

    def _scores(self, group: EpisodeGroup, trained: Collection[str], top: float | None) -> np.ndarray:
        """Return the success of each episode that has a reward: float64 in [0, 1]."""
        means = []
        for index, episode in enumerate(group.episodes):
            rewards = group.episode_rewards(index)
            present = episode.trajectories  # an agent may miss an episode, and a failed one may have none
            values = [r for agent, r in rewards.items() if agent in present and present[agent].policy in trained]
            if episode.error is None and values and not np.isnan(values).all():
                means.append(np.nanmean(values))
        scores, env_id = np.array(means, np.float64) / (1.0 if top is None else top), group.env_id
        clipped = scores.clip(0.0, 1.0)
        if np.abs(scores - clipped).max(initial=0.0) > 1e-6 and env_id not in self._warned:
            self._warned.add(env_id)
            _log.warning(
                "rewards of %s lie between %g and %g times the maximum. Its curriculum clips them to [0, 1]. Declare "
                "the maximum with max_reward of the environment or the reward",
                env_id,
                scores.min(),
                scores.max(),
            )
        return clipped

    def _keep_seed(self, curriculum: Curriculum, key: EnvSeed, success: float) -> None:
        if curriculum.replay and _variance(success):
            self._seeds[key] = success
        else:
            self._seeds.pop(key, None)
        if len(self._seeds) > curriculum.max_seeds:
            del self._seeds[min(self._seeds, key=lambda seed: _variance(self._seeds[seed]))]

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return success by environment and by seed, for a checkpoint."""
        replayed = sorted(self._replayed)  # a set has another order in each process
        return {
            "ids": np.array(list(self._success), dtype=np.str_),
            "success": np.array(list(self._success.values()), np.float64).reshape(-1, 2),
            "seed_ids": np.array([env_id for env_id, _ in self._seeds], dtype=np.str_),
            "seeds": np.array([seed for _, seed in self._seeds], np.int64),
            "seed_success": np.array(list(self._seeds.values()), np.float64),
            "replayed_ids": np.array([env_id for env_id, _ in replayed], dtype=np.str_),
            "replayed_seeds": np.array([seed for _, seed in replayed], np.int64),
            "collected_ids": np.array(list(self._collected), dtype=np.str_),
            "collected": np.array(list(self._collected.values()), np.int64),
            "last_step": np.array([self._last[0]], np.int64),
            "last_ids": np.array([env_id for env_id, _ in self._last[1]], dtype=np.str_),
            "last_seeds": np.array([seed for _, seed in self._last[1]], np.int64),
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from `state_dict`. Raises ValueError for counts, rates or seeds that no training has."""
        ids, seed_ids = states.texts(state, "ids", -1), states.texts(state, "seed_ids", -1)
        sums = states.numbers(state, "success", len(ids), 2, low=0.0)
        if (sums[:, 1] < 0.5).any() or (sums[:, 0] > sums[:, 1] + 1e-6).any():  # up to rounding, see `_decay`
            raise ValueError("success holds more successes than episodes, or less than one episode")
        seeds = states.whole(state, "seeds", len(seed_ids), high=HELD_OUT_FROM - 1)
        rates = states.numbers(state, "seed_success", len(seed_ids), low=0.0, high=1.0)
        if not all(map(_variance, rates.tolist())):
            raise ValueError("seed_success holds 0 or 1. Expected rates of seeds whose episodes differed")
        self._success = dict(zip(ids, map(tuple, sums.tolist()), strict=True))
        self._seeds = dict(zip(zip(seed_ids, seeds.tolist(), strict=True), rates.tolist(), strict=True))
        self._replayed = set()
        if "replayed_ids" in state:  # earlier versions did not save it
            replayed_ids = states.texts(state, "replayed_ids", -1)
            replayed_seeds = states.whole(state, "replayed_seeds", len(replayed_ids), high=HELD_OUT_FROM - 1)
            self._replayed = set(zip(replayed_ids, replayed_seeds.tolist(), strict=True))
        self._collected, self._ahead, self._last = Counter(), {}, (-1, [])
        if "collected" in state:  # earlier versions did not save it
            names = states.texts(state, "collected_ids", -1)
            counts = states.whole(state, "collected", len(names))
            self._collected.update(dict(zip(names, counts.tolist(), strict=True)))
        if "last_step" in state:  # earlier versions did not save it
            last_ids = states.texts(state, "last_ids", -1)
            last_seeds = states.whole(state, "last_seeds", len(last_ids), high=HELD_OUT_FROM - 1)
            (step,) = states.whole(state, "last_step", 1, low=-1).tolist()
            self._last = step, list(zip(last_ids, last_seeds.tolist(), strict=True))


def _variance(success: float) -> float:
    """Return the variance of rewards 0 and 1 with this mean."""
    return success * (1 - success)
