"""Is each level of an environment harder than the one before? A fixed player says so.

In: an environment's id and who plays. Out: mean rewards, or an error. Waits for the environment.
"""

from __future__ import annotations

import asyncio
import math
from functools import partial
from itertools import pairwise
from numbers import Real

import numpy as np

from forge_agents.envs import registry
from forge_agents.policy import PolicyMapping
from forge_agents.rollout.rollout import Rollout
from forge_agents.types import Episode

_SURE = 1.96
"""Standard errors by which two means must differ: 95 %."""


def check_levels(id: str, players: PolicyMapping, *, episodes: int = 100, seed: int = 0) -> list[float]:  # noqa: A002
    """Hold the levels of an environment to their order, with players that do not learn.

    Args:
        id: Of an environment that is registered with two levels or more.
        players: Who plays every level: scripted or random; better than chance at the first level, and not perfect at
            the last.
        episodes: Games at each level, at least 2.
        seed: Of the first; the others follow.

    Returns:
        Mean rewards over episodes and seats, level by level, over the environment's ``max_reward`` if that is above 0.

    Raises:
        AssertionError: A level is easier than the one before, or the last no harder than the first, beyond chance; or
            an episode failed.
        ValueError: There are no levels.
    """
    if len(levels := registry.spec(id).levels) < 2:
        raise ValueError(f"{id} has {len(levels) or 'no'} levels; register it with levels=[{{...}}, {{...}}, ...]")
    found = [
        asyncio.run(_rewards(f"{id}@{level}", players, range(seed, seed + episodes)))
        for level in range(1, len(levels) + 1)
    ]
    means = [float(rewards.mean()) for rewards in found]
    told = ", ".join(f"{mean:.3f}" for mean in means)
    for level, (easier, harder) in enumerate(pairwise(found), start=1):
        if _lead(harder, easier) >= _SURE:
            raise AssertionError(f"level {level + 1} of {id} is easier than level {level}: {told}")
    if _lead(found[0], found[-1]) <= _SURE:
        raise AssertionError(f"the last level of {id} is no harder than the first: {told}")
    return means


async def _rewards(env_id: str, players: PolicyMapping, seeds: range) -> np.ndarray:
    """float64 ``[seeds]``."""
    rollout = Rollout(make_env=partial(registry.make, env_id), env_id=env_id, policies=players)
    most = getattr(registry.make(env_id), "max_reward", None)  # of a level with more turns it is more
    scale = float(most) if isinstance(most, Real) and 0 < float(most) < math.inf else 1.0
    return np.array([_reward((await rollout.group(seed, 1)).episodes[0]) for seed in seeds]) / scale


def _reward(episode: Episode) -> float:
    if episode.error is not None:
        raise AssertionError(f"seed {episode.seed} of {episode.env_id}: {episode.error}")
    return float(np.mean(list(episode.rewards.values())))


def _lead(more: np.ndarray, less: np.ndarray) -> float:
    """By how many standard errors the first mean lies above the second (Welch).

    As if each had seen one episode more that was won by half, without which two wins after none were beyond chance.
    """
    error = math.sqrt(sum((np.var(one, ddof=1) + 0.25 / len(one)) / len(one) for one in (more, less)))
    return float(np.mean(more) - np.mean(less)) / error
