"""`demonstrations`: episodes of an environment's oracle, for imitation learning."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from forge_agents.envs import registry
from forge_agents.envs.oracles import oracle_of
from forge_agents.envs.seeds import BENCHMARKS_FROM, DEMONSTRATIONS_FROM, draw_seeds
from forge_agents.errors import did_you_mean
from forge_agents.policy import Oracle
from forge_agents.rollout.rollout import Rollout, agents_of
from forge_agents.runtime.interrupts import LoopRunner
from forge_agents.runtime.threads import all_or_first_error
from forge_agents.settings import named_arguments
from forge_agents.types import Episode

_MAX_CONCURRENT = 64


@named_arguments
def demonstrations(
    env_id: str,
    games: int,
    *,
    seed: int = 0,
    env_args: Mapping[str, Any] | None = None,
    agents: Collection[str] = (),
) -> list[Episode]:
    """Play an environment's oracle with itself, for `forge_agents.SFTTrainer.fit`.

    The same arguments return the same episodes, and a smaller `games` returns the first ones. Training, evaluations and
    benchmarks never use their seeds.

    Args:
        env_id: Id of the environment. ``id@2`` is its second level.
        games: Number of episodes, at least 1.
        seed: Chooses the episodes' seeds. At least 0.
        env_args: Arguments of the environment.
        agents: Agents whose trajectories are kept. Empty (default) keeps all. Every agent plays.

    Returns:
        Episodes in which every ``policy`` is "oracle". An episode that failed twice has its `error`.

    Raises:
        UnknownIdError, ArgumentError: The environment does not exist, or does not accept the arguments.
        ValueError: The environment has no oracle or no such agent, or `games` or `seed` is out of range.
        TypeError: `agents` is a string.
    """
    if isinstance(agents, str):
        raise TypeError(f"agents is the string {agents!r}. Pass a list of names of agents")
    if games < 1 or seed < 0:
        raise ValueError(f"games={games} must be at least 1 and seed={seed} at least 0")
    spec, make = registry.spec(env_id), partial(registry.make, env_id, **(env_args or {}))
    oracle_of(spec, spec.id)
    possible = agents_of(make, spec.id) if agents else ()
    for agent in agents:
        if agent not in possible:
            names, hint = ", ".join(possible), did_you_mean(agent, possible)
            raise ValueError(f"{spec.id} has no agent {agent!r}. It has {names}.{hint}")
    rollout = Rollout(make_env=make, env_id=spec.id, policies=Oracle(), max_turns=spec.max_turns or 1000)
    limit = asyncio.Semaphore(_MAX_CONCURRENT)
    seeds = draw_seeds([seed, 0xDE305], games, first=DEMONSTRATIONS_FROM, size=BENCHMARKS_FROM - DEMONSTRATIONS_FROM)

    async def play() -> list[Episode]:
        played = await all_or_first_error(rollout.group(each, 1, limit=limit) for each in seeds)
        return [group.episodes[0] for group in played]

    with contextlib.closing(LoopRunner()) as loop:
        episodes = loop.run(play())
    if not agents:
        return episodes
    return [
        replace(episode, trajectories={name: each for name, each in episode.trajectories.items() if name in agents})
        for episode in episodes
    ]
