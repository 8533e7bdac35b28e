"""Any PettingZoo environment as a text environment, unchanged inside.

In: an AEC or parallel environment and two functions between its arrays and text. Out: an AEC environment whose
observations and actions are text. Waits for nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils.conversions import parallel_to_aec

from forge_agents.envs._text_game import hook
from forge_agents.envs.env import Observation, TextSpace, writable
from forge_agents.envs.registry import EnvSpec, check_max_turns

if TYPE_CHECKING:
    from gymnasium.spaces import Space


class WrappedEnv(AECEnv):  # type: ignore[misc]  # PettingZoo ships no types
    """What `wrap` returns. The environment inside is `env`; `unwrapped` is this text environment."""

    render_mode: str | None = None
    spec: EnvSpec | None = None
    """Set by `register` and `make`."""

    def __init__(
        self,
        env: AECEnv | ParallelEnv,
        *,
        obs_to_text: Callable[[Any, str], str],
        text_to_action: Callable[[str, str, Space[Any]], Any],
        legal_actions: Callable[[Any, str], Sequence[str]] | None = None,
        instructions: str | Callable[[str], str] | None = None,
        illegal_reward: float = -1.0,
        max_turns: int | None = None,
        max_action_chars: int = 4096,
        max_observation_chars: int = 32768,
    ) -> None:
        super().__init__()
        if isinstance(env, ParallelEnv):
            env = parallel_to_aec(env)
        if not isinstance(env, AECEnv):
            raise TypeError(f"wrap takes a PettingZoo AECEnv or ParallelEnv, got {type(env).__name__}")
        if not hasattr(env, "possible_agents"):
            raise TypeError(f"{env} has no possible_agents; seats must be known before an episode starts")
        check_max_turns(max_turns, str(env))
        self.env = env
        self.possible_agents: list[str] = list(env.possible_agents)
        self.metadata = {**getattr(env, "metadata", {}), "name": f"text<{env}>"}
        self.render_mode = getattr(env, "render_mode", None)
        self.max_turns = max_turns
        self.agents: list[str] = []
        self._to_text, self._to_action, self._instructions = obs_to_text, text_to_action, instructions
        self._legal = legal_actions
        self._illegal_reward = illegal_reward
        self._max_chars = {"observation": max_observation_chars, "action": max_action_chars}
        self._spaces: dict[tuple[str, str], TextSpace] = {}

    def instructions(self, agent: str) -> str:
        """The system prompt of a seat; where `wrap` was given none, that of the environment inside, or empty."""
        given = self._instructions if self._instructions is not None else hook(self.env, "instructions")
        return given(agent) if callable(given) else given or ""

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> None:
        """Start an episode of the environment inside."""
        self.env.reset(seed=seed, options=None if options is None else dict(options))
        self._ended_here = False
        self._skip_agent_selection = None
        self.num_turns = 0
        self._mirror()

    def step(self, action: str | None) -> None:
        """Play a text; None for an agent that is out."""
        if not self.agents:
            raise RuntimeError(f"{self}: no episode is running; call reset() before step()")
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            if self._ended_here:
                self._was_dead_step(action)
            else:
                self.env.step(action)
                self._mirror()
            return
        if not isinstance(action, str):
            raise TypeError(f"{self}: {agent!r} must act with text, got {type(action).__name__}")
        self.num_turns += 1
        move, why = self._read(agent, writable(action))
        if why:
            self._end(agent, {agent: self._illegal_reward}, {"illegal": why})
            return
        self.env.step(move)
        self._mirror()
        live = not any(self.terminations.values()) and not any(self.truncations.values())
        if live and self.max_turns is not None and self.num_turns >= self.max_turns:
            self._truncate()

    def observe(self, agent: str) -> Observation:
        """The observation inside, as text."""
        text = self._to_text(self.env.observe(agent), agent)
        if not isinstance(text, str):
            raise TypeError(f"{self}: obs_to_text returned {type(text).__name__} for {agent!r}; return a string")
        limit = self._max_chars["observation"]
        if len(text) > limit:
            raise ValueError(
                f"{self}: observation of {agent!r} has {len(text)} characters, the space allows {limit}; shorten it or "
                "raise max_observation_chars"
            )
        return Observation(text)

    def observation_space(self, agent: str) -> TextSpace:
        """Text of at most `max_observation_chars`."""
        return self._space("observation", agent)

    def action_space(self, agent: str) -> TextSpace:
        """Text of at most `max_action_chars`."""
        return self._space("action", agent)

    def render(self) -> Any:
        """What the environment inside renders."""
        return self.env.render()

    def close(self) -> None:
        """Close the environment inside."""
        self.env.close()

    def __str__(self) -> str:
        return self.spec.id if self.spec else str(self.metadata["name"])

    def __deepcopy__(self, memo: dict[int, Any]) -> WrappedEnv:
        return cast("WrappedEnv", _copied(self, memo))

    def _space(self, kind: str, agent: str) -> TextSpace:
        """The one space of a kind and agent, made when it is first asked for: most episodes never look at it."""
        if agent not in self.possible_agents:
            raise KeyError(f"{self}: no agent {agent!r}; the agents are {self.possible_agents}")
        if (kind, agent) not in self._spaces:
            self._spaces[kind, agent] = TextSpace(self._max_chars[kind])
        return self._spaces[kind, agent]

    def _read(self, agent: str, text: str) -> tuple[Any, str]:
        """The action that `text` means, and why it is illegal (empty if it is legal)."""
        space = self.env.action_space(agent)
        try:
            move = self._to_action(text, agent, space)
        except (ValueError, LookupError) as error:
            return None, f"{type(error).__name__}: {error}"
        if move is None or not space.contains(move):
            return None, f"not an action: {move!r}"
        inside = self.env.observe(agent)
        mask = inside.get("action_mask") if isinstance(inside, dict) else self.env.infos[agent].get("action_mask")
        if mask is not None and np.ndim(move) == 0 and not mask[int(move)]:
            return None, f"action {move!r} is masked"
        return move, ""

    def _mirror(self) -> None:
        """Take over the state of the environment inside."""
        env = self.env
        self.agents, self.agent_selection = list(env.agents), env.agent_selection
        self.rewards, self._cumulative_rewards = dict(env.rewards), dict(env._cumulative_rewards)
        self.terminations, self.truncations = dict(env.terminations), dict(env.truncations)
        self.infos = {agent: dict(info) for agent, info in env.infos.items()}
        agent = self.agent_selection
        if self._legal is not None and agent in self.agents:
            for info in self.infos.values():
                info.pop("legal_actions", None)
            if not (self.terminations[agent] or self.truncations[agent]):
                self.infos[agent]["legal_actions"] = list(self._legal(env.observe(agent), agent))

    def _end(self, agent: str, rewards: Mapping[str, float], info: Mapping[str, Any]) -> None:
        """End the game for everybody: the environment inside never sees an illegal action."""
        self._ended_here = True
        self._cumulative_rewards[agent] = 0.0
        self.rewards = {seat: float(rewards.get(seat, 0.0)) for seat in self.agents}
        self._accumulate_rewards()
        self.infos[agent] = {**self.infos[agent], **info}
        self.terminations = dict.fromkeys(self.agents, True)
        self._deads_step_first()

    def _truncate(self) -> None:
        self._ended_here = True
        self.truncations = dict.fromkeys(self.agents, True)
        self._deads_step_first()


def _copied(env: AECEnv | ParallelEnv, memo: dict[int, Any]) -> AECEnv | ParallelEnv:
    """A deep copy, attribute by attribute: the way of `EzPickle`, which most environments have, starts them anew."""
    twin = memo[id(env)] = object.__new__(type(env))
    for name, value in vars(env).items():
        inside = isinstance(value, (AECEnv, ParallelEnv))
        vars(twin)[name] = _copied(value, memo) if inside and id(value) not in memo else copy.deepcopy(value, memo)
    return twin


def wrap(
    env: AECEnv | ParallelEnv,
    *,
    obs_to_text: Callable[[Any, str], str],
    text_to_action: Callable[[str, str, Space[Any]], Any],
    legal_actions: Callable[[Any, str], Sequence[str]] | None = None,
    instructions: str | Callable[[str], str] | None = None,
    illegal_reward: float = -1.0,
    max_turns: int | None = None,
    max_action_chars: int = 4096,
    max_observation_chars: int = 32768,
) -> WrappedEnv:
    """Make a text environment of an array environment.

    An action is illegal if `text_to_action` returns None or raises ValueError, KeyError or IndexError, if the space
    does not contain it, or if the action mask forbids it. It ends the episode for everybody: the agent that made it
    gets `illegal_reward`, the others 0, and its info says why under ``"illegal"``.

    Args:
        env: AEC or parallel; a parallel one is stepped agent by agent, as PettingZoo converts it.
        obs_to_text: ``f(observation, agent)`` gives what the agent reads.
        text_to_action: ``g(text, agent, action_space)`` gives the action that a text means.
        legal_actions: ``h(observation, agent)`` gives the texts that are legal for the deciding agent, which are then
            in ``infos[agent]["legal_actions"]``.
        instructions: System prompt, one for all or by agent.
        illegal_reward: Reward of an illegal action.
        max_turns: Decisions of all agents together after which the episode is truncated.
        max_action_chars: Bound of the action spaces, in characters.
        max_observation_chars: Bound of the observation spaces, in characters.

    Raises:
        TypeError: `env` is no PettingZoo environment, or does not name its possible agents.
    """
    return WrappedEnv(
        env,
        obs_to_text=obs_to_text,
        text_to_action=text_to_action,
        legal_actions=legal_actions,
        instructions=instructions,
        illegal_reward=illegal_reward,
        max_turns=max_turns,
        max_action_chars=max_action_chars,
        max_observation_chars=max_observation_chars,
    )
