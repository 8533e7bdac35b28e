"""Test that each level of an environment is harder than the one before, with a player that does not learn."""

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

_SIGNIFICANT = 1.96
"""Standard errors between two significantly different means (95 %)."""


def check_levels(id: str, players: PolicyMapping, *, episodes: int = 100, seed: int = 0) -> list[float]:  # noqa: A002
    """Check that the levels of an environment get harder.

    Args:
        id: Id of an environment with two or more levels.
        players: Scripted or random players, better than chance at the first level and not perfect at the last.
        episodes: Number of episodes per level. At least 2.
        seed: Seed of the first episode. The others follow.

    Returns:
        Mean rewards over episodes and agents by level, divided by ``max_reward`` if that is above 0.

    Raises:
        AssertionError: A level is significantly easier than the one before, the last level is not significantly harder
            than the first, or an episode failed.
        ValueError: The environment has fewer than two levels.
    """
    if len(levels := registry.spec(id).levels) < 2:
        raise ValueError(f"{id} has {len(levels) or 'no'} levels. Register it with levels=[{{...}}, {{...}}, ...]")
    rewards = [
        asyncio.run(_rewards(f"{id}@{level}", players, range(seed, seed + episodes)))
        for level in range(1, len(levels) + 1)
    ]
    means = [float(values.mean()) for values in rewards]
    listed = ", ".join(f"{mean:.3f}" for mean in means)
    for level, (easier, harder) in enumerate(pairwise(rewards), start=1):
        if _lead(harder, easier) >= _SIGNIFICANT:
            raise AssertionError(f"level {level + 1} of {id} is easier than level {level}: {listed}")
    if _lead(rewards[0], rewards[-1]) <= _SIGNIFICANT:
        raise AssertionError(f"the last level of {id} is no harder than the first: {listed}")
    return means


async def _rewards(env_id: str, players: PolicyMapping, seeds: range) -> np.ndarray:
    """Return the rewards, float64 ``[seeds]``."""
    rollout = Rollout(make_env=partial(registry.make, env_id), env_id=env_id, policies=players)
    most = getattr(registry.make(env_id), "max_reward", None)  # larger for levels with more turns
    scale = float(most) if isinstance(most, Real) and 0 < float(most) < math.inf else 1.0
    return np.array([_reward((await rollout.group(seed, 1)).episodes[0]) for seed in seeds]) / scale


def _reward(episode: Episode) -> float:
    if episode.error is not None:
        raise AssertionError(f"seed {episode.seed} of {episode.env_id}: {episode.error}")
    return float(np.mean(list(episode.rewards.values())))


def _lead(more: np.ndarray, less: np.ndarray) -> float:
    """Return by how many standard errors the first mean is above the second (Welch).

    The variance is increased as by one more episode with reward 0.5. Otherwise two wins after none were significant.
    """
    error = math.sqrt(sum((np.var(each, ddof=1) + 0.25 / len(each)) / len(each) for each in (more, less)))
    return float(np.mean(more) - np.mean(less)) / error
