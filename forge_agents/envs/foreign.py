"""Other people's environments, taking turns: what they leave out of PettingZoo's contract is filled in.

In: a PettingZoo `AECEnv` or `ParallelEnv`, or a Gymnasium `Env`. Out: an `AECEnv`. Waits for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import gymnasium
from pettingzoo import ParallelEnv
from pettingzoo.utils import BaseParallelWrapper
from pettingzoo.utils.conversions import aec_to_parallel_wrapper, parallel_to_aec

from forge_agents.envs.env import TextGame
from forge_agents.envs.spec import AnyEnv


def turn_based(env: Any) -> AnyEnv:
    """`env`, or where all decide at once its conversion, in which they do so one by one."""
    if isinstance(env, ParallelEnv):
        whole = isinstance(env, (TextGame, aec_to_parallel_wrapper))  # the latter is only taken off again
        env = parallel_to_aec(env if whole else Complete(env))
    return cast("AnyEnv", env)


def unpaid_reward(env: Any, acted: str, accounts: Mapping[str, float]) -> str:
    """Why a reward of the last step does not arrive where PettingZoo's ``last`` reports it; empty if all arrive.

    An `AECEnv` states the rewards of a step in `rewards`. It has to add them to accounts (``_accumulate_rewards``), of
    which it empties that of the agent that acts. Rewards that are paid into accounts only, and not stated, are fine.

    Args:
        env: After a step.
        acted: The agent that acted in it.
        accounts: ``env._cumulative_rewards`` before the step.
    """
    for agent, reward in env.rewards.items():
        account, before = env._cumulative_rewards.get(agent), accounts.get(agent, 0.0)
        if not reward or account is None or not math.isfinite(reward):
            continue
        if agent == acted and before and account == before + reward:
            return (
                f"{agent!r} has a reward of {reward:g} in `rewards`, and last() reports {account:g}: its earlier "
                "rewards a second time; set self._cumulative_rewards[agent] = 0 in step() for the agent that acts"
            )
        if account == 0 and (agent == acted or before == 0):
            return (
                f"{agent!r} has a reward of {reward:g} in `rewards`, and last() reports 0; call "
                "self._accumulate_rewards() in step() after the rewards are set"
            )
    return ""


class Complete(BaseParallelWrapper):  # type: ignore[misc]  # PettingZoo ships no types
    """A simultaneous game whose answers name everybody that they should.

    PettingZoo's conversion raises KeyError, or loses a last reward, where a game leaves agents out of an answer or
    keeps those that are out in `agents`. Here who is left out gets no reward, has its old observation and an empty
    info, and is out where `agents` has it no more; who is out leaves `agents`.
    """

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
        """Start an episode."""
        seen, infos = self.env.reset(seed=seed, options=None if options is None else dict(options))
        self.agents: list[str] = list(self.env.agents)
        self._seen, self._said = dict(seen), dict[str, Any]()
        return self._observations(self.agents), {agent: infos.get(agent, {}) for agent in self.agents}

    def step(self, actions: Mapping[str, Any]) -> tuple[Any, ...]:
        """Play a round; agents that are out and still asked for their actions by the game repeat their last ones."""
        acting = list(self.agents)
        self._said |= {agent: actions[agent] for agent in acting}
        sent = {agent: self._said[agent] for agent in self.env.agents}
        seen, rewards, terminated, truncated, infos = self.env.step(sent)
        self._seen |= seen
        left = set(self.env.agents)
        cut = {agent: bool(truncated.get(agent, False)) for agent in acting}
        done = {agent: bool(terminated.get(agent)) or (agent not in left and not cut[agent]) for agent in acting}
        joined = [agent for agent in self.env.agents if agent not in self._said]
        self.agents = [agent for agent in acting if not done[agent] and not cut[agent]] + joined
        told = acting + joined
        return (
            self._observations(told),
            {agent: rewards.get(agent, 0.0) for agent in told},
            {agent: done.get(agent, False) for agent in told},
            {agent: cut.get(agent, False) for agent in told},
            {agent: infos.get(agent, {}) for agent in told},
        )

    def _observations(self, agents: list[str]) -> dict[str, Any]:
        missing = [agent for agent in agents if agent not in self._seen]
        if missing:
            raise ValueError(f"{self}: {missing[0]!r} takes part and no observation of it came; return one for each")
        return {agent: self._seen[agent] for agent in agents}

    def __str__(self) -> str:
        return str(self.env)


class Alone(ParallelEnv):  # type: ignore[misc]  # PettingZoo ships no types
    """A Gymnasium environment as a game of one seat, ``player``."""

    possible_agents = ("player",)

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.env, self.render_mode = env, env.render_mode
        name = env.spec.id if env.spec else type(env.unwrapped).__name__
        self.metadata = {**env.metadata, "name": name}

    @property
    def unwrapped(self) -> Any:
        """Gymnasium's own."""
        return self.env.unwrapped

    def observation_space(self, agent: str) -> Any:
        """Gymnasium's own."""
        return self.env.observation_space

    def action_space(self, agent: str) -> Any:
        """Gymnasium's own."""
        return self.env.action_space

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
        """Start an episode."""
        seen, info = self.env.reset(seed=seed, options=None if options is None else dict(options))
        self.agents = ["player"]
        return {"player": seen}, {"player": info}

    def step(self, actions: Mapping[str, Any]) -> tuple[Any, ...]:
        """Play a decision."""
        seen, reward, done, cut, info = self.env.step(actions["player"])
        self.agents = [] if done or cut else self.agents
        return tuple({"player": each} for each in (seen, float(reward), bool(done), bool(cut), info))

    def render(self) -> Any:
        """What Gymnasium's renders."""
        return self.env.render()

    def close(self) -> None:
        """Close Gymnasium's."""
        self.env.close()
