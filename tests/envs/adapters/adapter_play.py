"""Playing an environment with random or given texts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import forge_agents as fa


def play(env: Any, seed: int, choose: Callable[[Any, str, random.Random], str], *, max_turns: int = 300) -> list[Any]:
    """The observations, actions and rewards of one episode; the last entry is the infos by agent."""
    env.reset(seed=seed)
    rng = random.Random(seed)
    steps: list[Any] = []
    infos: dict[str, Any] = {}
    while env.agents and len(steps) < max_turns:
        agent = env.agent_selection
        observation, reward, terminated, truncated, info = env.last()
        infos[agent] = info
        action = None if terminated or truncated else choose(env, agent, rng)
        steps.append((agent, str(observation), reward, action))
        env.step(action)
    return [*steps, infos]


def plausible(env: Any, agent: str, rng: random.Random) -> str:
    """A legal action, or a text that the game may well accept."""
    legal = env.infos[agent].get("legal_actions")
    return rng.choice(legal) if legal else env.unwrapped.sample_action(agent, rng)


def survives(env_id: str, texts: tuple[str, ...], **kwargs: Any) -> None:
    """Every text is played, in as many episodes as that takes, and none raises."""
    waiting = list(texts)
    env = fa.make(env_id, **kwargs)
    while waiting:
        env.reset(seed=len(waiting))
        while env.agents and waiting:
            observation, _, terminated, truncated, _ = env.last()
            assert env.observation_space(env.agent_selection).contains(observation)
            env.step(None if terminated or truncated else waiting.pop())
    env.close()
