"""The base of simultaneous text environments: everybody decides, then everybody's decisions are played together.

In: a game's `setup`, `instructions`, `observe_text` and `act_all`. Out: a `pettingzoo.ParallelEnv` whose observations
and actions are text. Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from pettingzoo import ParallelEnv

from forge_agents.envs._text_game import Observation, Outcome, TextGame, without_legal

Steps: TypeAlias = tuple[
    dict[str, Observation], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]
]
"""Observations, rewards, terminations, truncations and infos by agent."""


class ParallelTurnEnv(TextGame, ParallelEnv):  # type: ignore[misc]  # PettingZoo ships no types
    """A text game whose agents decide at the same time, none knowing what the others do in this round.

    A subclass sets `possible_agents` and writes `setup`, `instructions`, `observe_text` and `act_all`; all else is as
    in `TurnEnv`, the hooks of `check_env` included. An agent whose game is over leaves `agents`; the round in which
    that happens is the last that reports it. A turn is one decision, so a round of n agents counts as n of
    `max_turns`. `pettingzoo.utils.conversions.parallel_to_aec` makes a turn-based environment of it.

    Example:
        >>> class Meet(ParallelTurnEnv):
        ...     possible_agents = ["left", "right"]
        ...     def setup(self, rng):
        ...         pass
        ...     def instructions(self, agent):
        ...         return "Meet the other one: answer 'bridge' or 'station'."
        ...     def observe_text(self, agent):
        ...         return "Where do you go?"
        ...     def act_all(self, actions):
        ...         met = len(set(actions.values())) == 1
        ...         return Outcome(rewards=dict.fromkeys(actions, float(met)), done=True)

    Args:
        max_turns: Decisions of all agents together after which the episode is truncated. None takes the class's, then
            the registered limit.
    """

    _parallelizable = True

    def act_all(self, actions: dict[str, str]) -> Outcome:
        """Play the decisions of all live agents, in the order of `agents`. Illegal text is never an exception."""
        raise NotImplementedError(f"{type(self).__name__} must define act_all(self, actions)")

    def reset(
        self, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Observation], dict[str, dict[str, Any]]]:
        """Start an episode.

        Args:
            seed: Non-negative; the same seed gives the same episode. None draws a fresh one.
            options: Available to the game as `self.options`; ``num_agents`` says how many seats take part.

        Returns:
            Observations and infos by agent.
        """
        self._begin(seed, options)
        if self.setup(self.rng) is not None:
            raise ValueError(f"{self}: setup named who decides first, but all decide together; return None")
        self._check_names()
        for agent in self.agents:
            self._legal(agent)
        return {agent: self.observe(agent) for agent in self.agents}, dict(self.infos)

    def step(self, actions: Mapping[str, str]) -> Steps:
        """Play one round.

        Args:
            actions: One text per live agent.

        Returns:
            Observations, rewards, terminations, truncations and infos of the agents that acted.
        """
        if not self.agents:
            raise RuntimeError(f"{self}: no episode is running; call reset() before step()")
        if set(actions) != set(self.agents):
            raise ValueError(f"{self}: actions of {list(actions)} arrived; send one for each of {self.agents}")
        acting = list(self.agents)
        texts = {agent: self._text(agent, actions[agent]) for agent in acting}
        outcome = self.act_all(dict(texts))
        self.infos = {agent: without_legal(self.infos[agent]) for agent in acting}
        rewards = dict.fromkeys(acting, 0.0) | self._checked_rewards(outcome, "act_all(...)")
        if outcome.next is not None:
            raise ValueError(f"{self}: Outcome.next is {outcome.next!r}, but all decide together; leave it out")
        self.num_turns += len(acting)
        self._transcript.append((texts, rewards))
        done, cut = self._ends(outcome)
        observations = {agent: self.observe(agent) for agent in acting}
        self.agents = [agent for agent in acting if agent not in done and agent not in cut]
        for agent in self.agents:
            self._legal(agent)
        terminated = {agent: agent in done for agent in acting}
        truncated = {agent: agent in cut for agent in acting}
        return observations, rewards, terminated, truncated, dict(self.infos)
