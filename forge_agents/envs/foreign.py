"""Conversion of PettingZoo and Gymnasium environments to complete turn-based ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import gymnasium
from pettingzoo import ParallelEnv
from pettingzoo.utils import BaseParallelWrapper
from pettingzoo.utils.conversions import aec_to_parallel_wrapper, parallel_to_aec

from forge_agents.envs.env import TextGame
from forge_agents.envs.spec import AnyEnv

_RETURNED = {
    "reset": ("observations", "infos"),
    "step": ("observations", "rewards", "terminations", "truncations", "infos"),
}
"""Dictionaries by agent that the methods of a `ParallelEnv` return."""


def turn_based(env: Any) -> AnyEnv:
    """Return `env`, converted to a turn-based environment if it is parallel."""
    if isinstance(env, ParallelEnv):
        complete = isinstance(env, (TextGame, aec_to_parallel_wrapper))  # the conversion just removes the latter
        env = parallel_to_aec(env if complete else CompleteParallelEnv(env))
    return cast("AnyEnv", env)


def find_lost_reward(env: Any, acted: str, sums_before: Mapping[str, float]) -> str:
    """Explain why PettingZoo's ``last`` misreports a reward of the last step. Empty if it reports all of them.

    An `AECEnv` states the rewards of a step in `rewards`. The environment must also add them to the cumulative rewards,
    which were `sums_before` before the step, by ``_accumulate_rewards``, and reset those of the agent that `acted`.
    Rewards that only appear in the sums are allowed.
    """
    for agent, reward in env.rewards.items():
        after, before = env._cumulative_rewards.get(agent), sums_before.get(agent, 0.0)
        if not reward or after is None or not math.isfinite(reward):
            continue
        if agent == acted and before and after == before + reward:
            return (
                f"{agent!r} has a reward of {reward:g} in `rewards`, but last() reports {after:g} because it counts "
                "earlier rewards twice. Set self._cumulative_rewards[agent] = 0 in step() for the agent that acts"
            )
        if after == 0 and (agent == acted or before == 0):
            return (
                f"{agent!r} has a reward of {reward:g} in `rewards`, but last() reports 0. Call "
                "self._accumulate_rewards() in step() after the rewards are set"
            )
    return ""


def by_agent(method: str, result: Any) -> Sequence[Mapping[str, Any]]:
    """Return what ``reset`` or ``step`` of a parallel environment returned. Raises TypeError unless it fits."""
    names = _RETURNED[method]
    expected = f"A ParallelEnv returns {len(names)} dictionaries by agent: {', '.join(names)}"
    if not isinstance(result, tuple | list) or len(result) != len(names):
        got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        raise TypeError(f"{method}() returned {got}. {expected}")
    for name, value in zip(names, result, strict=True):
        if not isinstance(value, Mapping):
            raise TypeError(f"{method}() returned {type(value).__name__} as {name}. {expected}")
    return result


class CompleteParallelEnv(BaseParallelWrapper):  # type: ignore[misc]  # PettingZoo ships no types
    """Wrapper that fills in agents missing from the results of a parallel environment.

    PettingZoo's conversion raises KeyError, or loses a last reward, if a game omits agents from a result or keeps
    ended agents in `agents`. Here an omitted agent gets reward 0, its previous observation and an empty info, and it
    terminates if `agents` no longer has it. Ended agents leave `agents`, and only their later rewards are passed on.
    """

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
        """Start an episode."""
        result = self.env.reset(seed=seed, options=None if options is None else dict(options))
        seen, infos = by_agent("reset", result)
        self.agents: list[str] = list(self.env.agents)
        self._last_seen, self._last_actions = dict(seen), dict[str, Any]()
        return self._observations(self.agents), {agent: infos.get(agent) or {} for agent in self.agents}

    def step(self, actions: Mapping[str, Any]) -> tuple[Any, ...]:
        """Play a round. If the game still expects actions of ended agents, their last ones are repeated."""
        acting = list(self.agents)
        self._last_actions |= {agent: actions[agent] for agent in acting}
        sent = {agent: self._last_actions[agent] for agent in self.env.agents}
        seen, rewards, terminated, truncated, infos = by_agent("step", self.env.step(sent))
        self._last_seen |= seen
        remaining = set(self.env.agents)
        cut = {agent: bool(truncated.get(agent, False)) for agent in acting}
        done = {agent: bool(terminated.get(agent)) or (agent not in remaining and not cut[agent]) for agent in acting}
        joined = [agent for agent in self.env.agents if agent not in self._last_actions]
        self.agents = [agent for agent in acting if not done[agent] and not cut[agent]] + joined
        reported = acting + joined
        late = {agent: reward for agent, reward in rewards.items() if reward and agent not in reported}
        return (
            self._observations(reported),
            {agent: rewards.get(agent, 0.0) for agent in reported} | late,
            {agent: done.get(agent, False) for agent in reported},
            {agent: cut.get(agent, False) for agent in reported},
            {agent: infos.get(agent) or {} for agent in reported},
        )

    def _observations(self, agents: list[str]) -> dict[str, Any]:
        missing = [agent for agent in agents if agent not in self._last_seen]
        if missing:
            raise ValueError(f"{self}: {missing[0]!r} takes part but has no observation. Return one for each agent")
        return {agent: self._last_seen[agent] for agent in agents}

    def __str__(self) -> str:
        return str(self.env)


class SingleAgentEnv(ParallelEnv):  # type: ignore[misc]  # PettingZoo ships no types
    """A Gymnasium environment as a parallel environment with one agent, ``player``."""

    possible_agents = ("player",)

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.env, self.render_mode = env, env.render_mode
        name = env.spec.id if env.spec else type(env.unwrapped).__name__
        self.metadata = {**env.metadata, "name": name}

    @property
    def unwrapped(self) -> Any:
        """The unwrapped Gymnasium environment."""
        return self.env.unwrapped

    def observation_space(self, agent: str) -> Any:
        """Observation space of the Gymnasium environment."""
        return self.env.observation_space

    def action_space(self, agent: str) -> Any:
        """Action space of the Gymnasium environment."""
        return self.env.action_space

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
        """Start an episode."""
        seen, info = self.env.reset(seed=seed, options=None if options is None else dict(options))
        self.agents = ["player"]
        return {"player": seen}, {"player": info}

    def step(self, actions: Mapping[str, Any]) -> tuple[Any, ...]:
        """Play a round of one action."""
        seen, reward, done, cut, info = self.env.step(actions["player"])
        self.agents = [] if done or cut else self.agents
        return tuple({"player": value} for value in (seen, float(reward), bool(done), bool(cut), info))

    def render(self) -> Any:
        """Render the Gymnasium environment."""
        return self.env.render()

    def close(self) -> None:
        """Close the Gymnasium environment."""
        self.env.close()
