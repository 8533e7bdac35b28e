"""`demonstrations`: games of an environment's oracle, which a policy imitates before it plays.

In: an environment's id, a number of games. Out: episodes, on seeds that nothing else plays. Waits for the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from forge_agents.envs import registry
from forge_agents.envs.oracles import oracle_of
from forge_agents.envs.seeds import BENCHMARKS_FROM, DEMONSTRATIONS_FROM
from forge_agents.errors import did_you_mean
from forge_agents.policy import Oracle
from forge_agents.rollout.rollout import Rollout, agents_of
from forge_agents.runtime.interrupts import LoopRunner
from forge_agents.runtime.threads import all_or_first_error
from forge_agents.types import Episode

_NUM_SEEDS = BENCHMARKS_FROM - DEMONSTRATIONS_FROM
_AT_ONCE = 64


def demonstrations(
    env_id: str,
    games: int,
    *,
    seed: int = 0,
    env_args: Mapping[str, Any] | None = None,
    agents: Collection[str] = (),
) -> list[Episode]:
    """Games of an environment's oracle in all seats, for `forge_agents.SFTTrainer.fit`.

    The same arguments give the same games, fewer of them the first. No training, evaluation or benchmark plays their
    seeds.

    Args:
        env_id: An id, ``id@2`` at its second level.
        seed: Chooses the games' seeds, at least 0.
        env_args: Arguments of the environment.
        agents: Agents whose trajectories are kept; empty (default) keeps all. All play.

    Returns:
        Episodes with ``policy`` "oracle" everywhere; one that failed twice has its `error`.

    Raises:
        UnknownIdError, ArgumentError: No such environment, or arguments that it does not take.
        ValueError: It has no oracle or no such seat, or there are no games.
    """
    if games < 1 or seed < 0:
        raise ValueError(f"games={games} must be at least 1 and seed={seed} at least 0")
    spec, make = registry.spec(env_id), partial(registry.make, env_id, **(env_args or {}))
    oracle_of(spec, spec.id)
    possible = agents_of(make, spec.id) if agents else ()
    for agent in agents:
        if agent not in possible:
            names, hint = ", ".join(possible), did_you_mean(agent, possible)
            raise ValueError(f"{spec.id} has no agent {agent!r}; it has {names}.{hint}")
    rollout = Rollout(make_env=make, env_id=spec.id, policies=Oracle(), max_turns=spec.max_turns or 1000)
    limit = asyncio.Semaphore(_AT_ONCE)

    async def play() -> list[Episode]:
        played = await all_or_first_error(rollout.group(one, 1, limit=limit) for one in _seeds(seed, games))
        return [group.episodes[0] for group in played]

    with contextlib.closing(LoopRunner()) as loop:
        episodes = loop.run(play())
    if not agents:
        return episodes
    return [
        replace(one, trajectories={agent: part for agent, part in one.trajectories.items() if agent in agents})
        for one in episodes
    ]


def _seeds(seed: int, games: int) -> list[int]:
    rng = np.random.default_rng([seed, 0xDE305])
    found: dict[int, None] = {}
    while len(found) < games:
        found.setdefault(DEMONSTRATIONS_FROM + int(rng.integers(_NUM_SEEDS)))
    return list(found)
