"""Environment wrappers: `wrap` adapts array environments to text. The others change one aspect of a text environment.

`make` applies the wrappers in `BY_NAME`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast, get_args

import gymnasium
import numpy as np
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils import BaseWrapper

from forge_agents.envs.env import (
    CONVERSATION,
    HOOKS,
    Forkable,
    Observation,
    TextSpace,
    acts_together,
    as_json,
    hook,
    legal_texts,
    listed_actions,
    observation,
    without,
    writable,
)
from forge_agents.envs.foreign import SingleAgentEnv, turn_based
from forge_agents.envs.spec import AnyEnv, EnvSpec, check_max_turns
from forge_agents.errors import ArgumentError, ForgeError
from forge_agents.settings import check_call

if TYPE_CHECKING:
    from gymnasium.spaces import Space

V = TypeVar("V")
Policy: TypeAlias = Literal["end", "penalty", "ask"]


class EnvWrapper(Forkable, BaseWrapper):  # type: ignore[misc]  # PettingZoo ships no types
    """Base of wrappers of an `AECEnv`: passes everything on to the wrapped environment, `env`."""

    env: Any

    def __init__(self, env: AnyEnv) -> None:
        if not isinstance(env, AECEnv):
            raise TypeError(
                f"{type(self).__name__} wraps a PettingZoo AECEnv, got {type(env).__name__}. "
                "Convert a ParallelEnv by pettingzoo.utils.conversions.parallel_to_aec"
            )
        super().__init__(env)

    def __str__(self) -> str:
        return str(self.env)


class RewardScale(EnvWrapper):
    """Multiplies every reward by `scale`, a finite number other than 0."""

    def __init__(self, env: AnyEnv, scale: float) -> None:
        super().__init__(env)
        if not np.isfinite(scale) or scale == 0:
            raise ValueError(f"reward_scale={scale} of {env} hides every reward. Set a finite number other than 0")
        self.scale = float(scale)

    @property
    def max_reward(self) -> float | None:
        """Scaled maximum reward of an agent. None if unknown, as after a change of sign."""
        most = getattr(self.env, "max_reward", None)
        return None if most is None or self.scale < 0 else self.scale * most

    @property
    def rewards(self) -> dict[str, float]:
        """Rewards of the last step, by agent."""
        return {agent: self.scale * reward for agent, reward in self.env.rewards.items()}

    @property
    def _cumulative_rewards(self) -> dict[str, float]:
        return {agent: self.scale * reward for agent, reward in self.env._cumulative_rewards.items()}


class ObservationWindow(EnvWrapper):
    """Shortens observations to their last `chars` characters, at least 4. A shortened observation starts with "..."."""

    def __init__(self, env: AnyEnv, chars: int) -> None:
        super().__init__(env)
        if chars < 4:
            raise ValueError(f"observation window of {env}: chars={chars} must be at least 4")
        self.chars = chars
        self._spaces = {agent: TextSpace(chars) for agent in env.possible_agents}

    def observe(self, agent: str) -> Observation:
        """Return the end of the observation. Whole messages of an environment cannot be shortened."""
        if (self.env.infos.get(agent) or {}).get(CONVERSATION):
            raise ForgeError(
                f"observation_window of {self.env}: the environment writes whole messages, which cannot be shortened. "
                "Shorten them in the environment, or set context='window' of the policy"
            )
        text = str(self.env.observe(agent))
        return Observation(text if len(text) <= self.chars else f"...{text[3 - self.chars :]}")

    def observation_space(self, agent: str) -> TextSpace:
        """Text of at most `chars` characters."""
        return self._spaces[agent]


def _by_agent(name: str, doc: str) -> Any:
    """Return a property of `RoleShuffle` that maps the keys of an attribute of the wrapped environment to agents."""
    return property(lambda self: self._outside(getattr(self.env, name)), doc=doc)


class RoleShuffle(EnvWrapper):
    """Permutes the roles of the agents in every episode. A role is an agent of the wrapped environment.

    The permutation depends only on the episode seed, so the episodes of a group share it, and the random numbers of
    the game do not change. `infos[agent]["role"]` is the role. Texts use the names of roles.
    """

    def __init__(self, env: AnyEnv) -> None:
        super().__init__(env)
        self.possible_agents: list[str] = list(env.possible_agents)
        self._role: dict[str, str] = {agent: agent for agent in self.possible_agents}

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> None:
        """Start an episode with new roles."""
        seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else int(seed)
        # The second word makes the permutation independent of the game's first draws from the same seed.
        order = np.random.default_rng([seed, 0x520135]).permutation(len(self.possible_agents))
        self._role = {agent: self.possible_agents[i] for agent, i in zip(self.possible_agents, order, strict=True)}
        self.env.reset(seed=seed, options=options)

    @property
    def agents(self) -> list[str]:
        """Agents that are still in the game."""
        inside = set(self.env.agents)
        return [agent for agent in self.possible_agents if self._role[agent] in inside]

    @property
    def agent_selection(self) -> str:
        """Agent that acts next."""
        return next(agent for agent, role in self._role.items() if role == self.env.agent_selection)

    rewards = _by_agent("rewards", "Rewards of the last step, by agent.")
    _cumulative_rewards = _by_agent("_cumulative_rewards", "Rewards since an agent's last decision.")
    terminations = _by_agent("terminations", "Whether each agent has terminated.")
    truncations = _by_agent("truncations", "Whether each agent was truncated.")

    @property
    def infos(self) -> dict[str, dict[str, Any]]:
        """Infos by agent, with the role. ``"forfeits"`` names agents, not roles."""
        infos = {agent: {**info, "role": self._role[agent]} for agent, info in self._outside(self.env.infos).items()}
        for info in infos.values():
            if isinstance(forfeits := info.get("forfeits"), (list, tuple)):
                info["forfeits"] = [agent for agent, role in self._role.items() if role in forfeits]
        return infos

    def observe(self, agent: str) -> Any:
        """Return the observation of the agent's role."""
        return self.env.observe(self._role[agent])

    def observation_space(self, agent: str) -> Any:
        """Return the observation space of the agent's role."""
        return self.env.observation_space(self._role[agent])

    def action_space(self, agent: str) -> Any:
        """Return the action space of the agent's role."""
        return self.env.action_space(self._role[agent])

    def __getattr__(self, name: str) -> Any:
        method = hook(self.env, name) if name in HOOKS else None
        if method is None:
            return super().__getattr__(name)
        return lambda agent, *args: method(self._role[agent], *args)

    def _outside(self, inside: Mapping[str, V]) -> dict[str, V]:
        return {agent: inside[role] for agent, role in self._role.items() if role in inside}


def live(env: AnyEnv) -> list[str]:
    """Return the agents that are neither terminated nor truncated."""
    return [agent for agent in env.agents if not (env.terminations[agent] or env.truncations[agent])]


class _Mirror(AECEnv):  # type: ignore[misc]  # PettingZoo ships no types
    """Base of wrappers that can end an episode. Keeps a copy of the PettingZoo state of the wrapped environment.

    After the wrapper has ended the episode, the wrapped environment is no longer stepped.
    """

    env: Any
    agents: list[str] = []  # as in PettingZoo, empty until `reset` replaces it

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> None:
        """Start an episode."""
        self.env.reset(seed=seed, options=None if options is None else dict(options))
        self._ended_here = False
        self._skip_agent_selection = None
        self.num_turns = 0
        self._mirror()

    def step(self, action: str | None) -> None:
        """Apply an action, or None for a terminated or truncated agent."""
        if not self.agents:
            raise RuntimeError(f"{self}: no episode is running. Call reset() before step()")
        agent = self.agent_selection
        if self._ended_here:
            self._was_dead_step(action)
        elif self.terminations[agent] or self.truncations[agent]:
            self.env.step(action)
            self._mirror()
        else:
            self._decide(agent, action)

    def _decide(self, agent: str, action: str | None) -> None:
        raise NotImplementedError

    def _mirror(self) -> None:
        env = self.env
        self.agents, self.agent_selection = list(env.agents), env.agent_selection
        self.rewards, self._cumulative_rewards = dict(env.rewards), dict(env._cumulative_rewards)
        self.terminations, self.truncations = dict(env.terminations), dict(env.truncations)
        self.infos = {agent: dict(info) for agent, info in env.infos.items()}

    def _pay(self, agent: str, reward: float) -> None:
        """Set the reward of a step that the wrapped environment does not see."""
        self._cumulative_rewards[agent] = 0.0
        self.rewards = {other: reward if other == agent else 0.0 for other in self.agents}
        self._accumulate_rewards()

    def _end(self, *, truncated: bool) -> None:
        """End the game of all live agents."""
        self._ended_here = True
        (self.truncations if truncated else self.terminations).update(dict.fromkeys(live(self), True))
        self.infos = {agent: without(info, "legal_actions") for agent, info in self.infos.items()}
        self._deads_step_first()

    def _count(self, max_turns: int | None) -> None:
        """Count a decision, and truncate all live agents at the limit."""
        self.num_turns += 1
        if max_turns is not None and self.num_turns >= max_turns and live(self):
            self._end(truncated=True)


class TimeLimit(_Mirror, EnvWrapper):
    """Truncates an episode after `max_turns` decisions of all agents together.

    `make` uses it for environments that have no `max_turns` of their own.
    """

    def __init__(self, env: AnyEnv, max_turns: int) -> None:
        super().__init__(env)
        check_max_turns(max_turns, str(env))
        self.max_turns = max_turns

    def _decide(self, agent: str, action: str | None) -> None:
        self.env.step(action)
        self._mirror()
        self._count(self.max_turns)


class InvalidAction(_Mirror, EnvWrapper):
    """Replaces an environment's own handling of illegal actions.

    An action is illegal if ``infos[agent]["illegal"]`` is true after it. The environments of this project and those
    that `forge_agents.wrap` makes set it.

    - ``"end"``: the episode ends for all agents. The agent gets `penalty`, the others 0. If the game itself ends by the
      action, its rewards count, and the agent gets `penalty` if that is less.
    - ``"ask"``: the move is undone and the agent acts again, up to `tries` times per decision. The next observation
      says what was wrong. After the last try the episode ends as with ``"end"``.
    - ``"penalty"``: as ``"ask"``, and the agent gets `penalty` each time.

    An environment with a method ``refusal(agent, text)``, as `wrap` makes, checks an action before the move. Otherwise
    a `copy.deepcopy` of the environment is kept during the move.

    Args:
        tries: Maximum number of repeated tries per decision. At least 1.
        penalty: Reward of an illegal action. Finite.

    Raises:
        ArgumentError: The agents act together and there is no ``refusal``, so no single action can be undone.
    """

    def __init__(self, env: AnyEnv, policy: Policy = "end", *, tries: int = 2, penalty: float = -1.0) -> None:
        super().__init__(env)
        if policy not in get_args(Policy) or tries < 1 or not np.isfinite(penalty):
            raise ValueError(
                f"invalid_action={policy!r} of {env} must be one of {', '.join(get_args(Policy))}, tries={tries} must "
                f"be at least 1, and penalty={penalty} must be finite"
            )
        if acts_together(env) and hook(env, "refusal") is None:
            raise ArgumentError(
                f"invalid_action={policy!r} of {env}: its agents act together, so no single action can be undone. "
                "Leave it out: the environment says what an illegal text does"
            )
        self.policy, self.tries, self.penalty = policy, tries, float(penalty)

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> None:
        """Start an episode."""
        self._retries, self._complaint = 0, ""
        super().reset(seed=seed, options=options)

    def observe(self, agent: str) -> Observation:
        """Return the observation; after an illegal action, prefixed with what was wrong."""
        text = str(self.env.observe(agent))
        if self._complaint and agent == self.agent_selection:
            text = f"{self._complaint}\n{text}"[: self.env.observation_space(agent).max_length]
        return Observation(text)

    def _decide(self, agent: str, action: str | None) -> None:
        legal = listed_actions(self.infos[agent])
        refusal = hook(self.env, "refusal")
        illegal = None if refusal is None or action in legal else refusal(agent, action)
        if not illegal:
            # A copy is only needed if the legality of the action is unknown before the move.
            before = self.env if action in legal or refusal is not None else copy.deepcopy(self.env)
            was_illegal = self.env.infos[agent].get("illegal")  # of an earlier action, if a game leaves it in the info
            self.env.step(action)
            is_known = before is self.env or was_illegal
            illegal = None if is_known else self.env.infos.get(agent, {}).get("illegal")
            if not illegal:
                self._retries, self._complaint = 0, ""
                self._mirror()
                self._count(None)
                return
            self.env = before
        retry = self.policy != "end" and self._retries < self.tries
        self._retries += 1
        advice = f"choose one of: {', '.join(legal)}" if legal else "read the rules"
        reason = illegal if isinstance(illegal, str) else advice
        self._complaint = f"That was not a legal action ({reason})." if retry else ""
        if retry or not self._ends_by(agent, action):
            self._pay(agent, 0.0 if retry and self.policy == "ask" else self.penalty)
        self.infos[agent]["illegal"] = illegal
        if not retry:
            self.infos[agent]["forfeits"] = [agent]
            self._end(truncated=False)

    def _ends_by(self, agent: str, action: str | None) -> bool:
        """Let the game end by an illegal action if it does. The end may cost more than the penalty, as in poker."""
        game = self.env if hook(self.env, "refusal") else copy.deepcopy(self.env)
        game.step(action)
        if not all(game.terminations.get(other, True) for other in self.env.agents):
            return False
        self.env = game
        self._mirror()
        extra = min(0.0, self.penalty - self.rewards.get(agent, 0.0))
        self.rewards[agent] = self.rewards.get(agent, 0.0) + extra
        self._cumulative_rewards[agent] += extra
        return True


_MAX_LISTED = 1000
"""Maximum size of a discrete action space whose actions are listed as numbers."""
ILLEGAL = (ValueError, LookupError, ArithmeticError)
"""Exceptions by which the `text_to_action` of `wrap` rejects a text. Returning None rejects it as well."""


class WrappedEnv(_Mirror):
    """A text environment around an array environment, `env`. `unwrapped` is the text environment.

    Args:
        env: PettingZoo environment, or a Gymnasium one, whose only agent is ``player``. A parallel environment becomes
            turn-based.
        obs_to_text: ``f(observation, agent)`` returns the text of an observation.
        text_to_action: ``g(text, agent, action_space)`` returns the action of a text. To reject a text, return None or
            raise ValueError, LookupError (KeyError, IndexError) or ArithmeticError. Actions outside the space, or
            forbidden by an ``action_mask`` in the observation or info, are rejected automatically. Lists and numbers
            become arrays if the space is a Box. Any other exception fails the episode.
        legal_actions: ``h(observation, agent)`` returns the legal texts of the acting agent, stored in
            ``infos[agent]["legal_actions"]``. None lists the unmasked actions as numbers if the space is a Discrete of
            at most 1000 actions and `text_to_action` accepts a number for each. Without a list, random players write
            random letters.
        instructions: System prompt for all agents, or a function of the agent.
        illegal_reward: Reward of an illegal action. Such an action ends the episode for all agents. The others get 0,
            and the agent's info has the reason under ``"illegal"``. ``make(id, invalid_action=...)`` can ask again
            instead.
        max_turns: Number of decisions, of all agents together, after which the episode is truncated.
        max_action_chars: Maximum length in the action spaces.
        max_observation_chars: Maximum length in the observation spaces.

    Raises:
        TypeError: `env` is not such an environment, or has no `possible_agents`, or names of agents that are not
            strings.
        ValueError: `possible_agents` is empty.
    """

    render_mode: str | None = None
    spec: EnvSpec | None = None
    """Set by `register` and `make`."""

    def __init__(
        self,
        env: AECEnv | ParallelEnv | gymnasium.Env[Any, Any],
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
        env = turn_based(SingleAgentEnv(env) if isinstance(env, gymnasium.Env) else env)
        if not isinstance(env, AECEnv):
            is_factory = isinstance(env, type) or hasattr(env, "parallel_env") or hasattr(env, "env")
            hint = ". Call it, or its env() or parallel_env(), and pass the result" if is_factory else ""
            raise TypeError(
                f"wrap takes a PettingZoo AECEnv or ParallelEnv, or a Gymnasium Env, got {type(env).__name__}{hint}"
            )
        if not hasattr(env, "possible_agents"):
            raise TypeError(f"{env} has no possible_agents. Agents must be known before an episode starts")
        if not env.possible_agents:
            raise ValueError(f"{env} has empty possible_agents. Name one or more agents, such as 'player_0'")
        if other := [agent for agent in env.possible_agents if not isinstance(agent, str)]:
            raise TypeError(
                f"{env} has an agent {other[0]!r} of type {type(other[0]).__name__}. Agents must be strings: use names "
                "such as 'player_0' in its possible_agents, agents and results"
            )
        check_max_turns(max_turns, str(env))
        check_call(obs_to_text, "obs_to_text", "observation", "agent")
        check_call(text_to_action, "text_to_action", "text", "agent", "action_space")
        if legal_actions is not None:
            check_call(legal_actions, "legal_actions", "observation", "agent")
        self.env = env
        self.possible_agents: list[str] = list(env.possible_agents)
        self.metadata = {**getattr(env, "metadata", {}), "name": f"text<{env}>"}
        self.render_mode = getattr(env, "render_mode", None)
        self.max_turns = max_turns
        self._to_text, self._to_action, self._instructions = obs_to_text, text_to_action, instructions
        self._legal = legal_actions
        self._illegal_reward = illegal_reward
        self._max_chars = {"observation": max_observation_chars, "action": max_action_chars}
        self._spaces: dict[tuple[str, str], TextSpace] = {}
        self._numbers: dict[str, dict[int, str]] = {}

    @property
    def source_files(self) -> frozenset[str]:
        """Source files of the functions passed to `wrap`."""
        functions = (self._to_text, self._to_action, self._legal, self._instructions)
        codes = (getattr(getattr(f, "func", f), "__code__", None) for f in functions)  # `func` of a functools.partial
        return frozenset(code.co_filename for code in codes if code is not None)

    def instructions(self, agent: str) -> str:
        """Return the system prompt passed to `wrap`, else that of the wrapped environment, else an empty string."""
        source = self._instructions if self._instructions is not None else hook(self.env, "instructions")
        return source(agent) if callable(source) else source or ""

    def refusal(self, agent: str, text: str) -> str:
        """Return why `text` is illegal now. Empty if it is legal."""
        return self._parse(agent, writable(text))[1]

    def _decide(self, agent: str, action: str | None) -> None:
        if not isinstance(action, str):
            raise TypeError(f"{self}: {agent!r} must act with text, got {type(action).__name__}")
        move, reason = self._parse(agent, writable(action))
        if reason:  # the wrapped environment never sees an illegal action
            self._pay(agent, self._illegal_reward)
            self.infos[agent] |= {"illegal": reason, "forfeits": [agent]}
            self._end(truncated=False)
            return
        self.env.step(move)
        self._mirror()
        self._count(self.max_turns)

    def observe(self, agent: str) -> Observation:
        """Return the wrapped environment's observation as text."""
        text = self._to_text(self.env.observe(agent), agent)
        return observation(self, agent, text, "obs_to_text", self._max_chars["observation"])

    def observation_space(self, agent: str) -> TextSpace:
        """Text of at most `max_observation_chars` characters."""
        return self._space("observation", agent)

    def action_space(self, agent: str) -> TextSpace:
        """Text of at most `max_action_chars` characters."""
        return self._space("action", agent)

    def render(self) -> Any:
        """Render the wrapped environment."""
        return self.env.render()

    def close(self) -> None:
        """Close the wrapped environment."""
        self.env.close()

    def __str__(self) -> str:
        return self.spec.id if self.spec else str(self.metadata["name"])

    def __deepcopy__(self, memo: dict[int, Any]) -> WrappedEnv:
        return cast("WrappedEnv", _copied(self, memo))

    def _space(self, kind: str, agent: str) -> TextSpace:
        """Return the space of a kind and agent, created at its first use because most episodes need none."""
        if agent not in self.possible_agents:
            raise KeyError(f"{self}: no agent {agent!r}. The agents are {self.possible_agents}")
        if (kind, agent) not in self._spaces:
            self._spaces[kind, agent] = TextSpace(self._max_chars[kind])
        return self._spaces[kind, agent]

    def _parse(self, agent: str, text: str) -> tuple[Any, str]:
        """Return the action of a text, and why it is illegal (empty if it is legal)."""
        space = self.env.action_space(agent)
        try:
            move = self._to_action(text, agent, space)
            if move is not None and isinstance(space, gymnasium.spaces.Box):
                move = np.asarray(move, space.dtype)  # `contains` accepts only arrays
        except ILLEGAL as error:
            return None, f"{type(error).__name__}: {error}"
        if move is None or not space.contains(move):
            return None, f"not an action: {move!r}" + (f" is not in {space}" if move is not None else "")
        mask = self._mask(agent)
        if mask is not None and np.ndim(move) == 0 and not mask[int(move) - int(getattr(space, "start", 0))]:
            return None, f"action {move!r} is masked"
        return move, ""

    def _mask(self, agent: str) -> Any:
        """Return the action mask in the observation or info of an agent, or None."""
        seen = self.env.observe(agent)
        mask = seen.get("action_mask") if isinstance(seen, Mapping) else None
        return self.env.infos[agent].get("action_mask") if mask is None else mask

    def _legal_numbers(self, agent: str) -> list[str] | None:
        """Return the legal actions as numbers, None if `text_to_action` does not accept a number for every action."""
        if agent not in self._numbers:
            self._numbers[agent] = self._texts_by_action(agent, self.env.action_space(agent))
        if not (texts := self._numbers[agent]):
            return None
        mask, start = self._mask(agent), min(texts)
        return [text for action, text in texts.items() if mask is None or mask[action - start]]

    def _texts_by_action(self, agent: str, space: Any) -> dict[int, str]:
        """Return the first number that maps to each action, counted from 0 or 1. Empty if an action has none."""
        if not isinstance(space, gymnasium.spaces.Discrete) or space.n > _MAX_LISTED:
            return {}
        start, texts = int(space.start), dict[int, str]()
        for text in map(str, range(min(start, 0), start + int(space.n) + 1)):
            move = _or_none(self._to_action, text, agent, space)
            if move is not None and np.ndim(move) == 0 and space.contains(move):
                texts.setdefault(int(move), text)
        return dict(sorted(texts.items())) if len(texts) == space.n else {}

    def _mirror(self) -> None:
        super()._mirror()
        # The mask describes the wrapped actions. PettingZoo's tests and samplers would apply it to texts.
        self.infos = {
            agent: {str(name): as_json(value) for name, value in info.items() if name != "action_mask"}
            for agent, info in self.infos.items()
        }
        agent = self.agent_selection
        if agent not in self.agents:
            return
        if self._legal is not None:
            self.infos = {other: without(info, "legal_actions") for other, info in self.infos.items()}
        if not (self.terminations[agent] or self.truncations[agent]):
            if self._legal is not None:
                legal = self._legal(self.env.observe(agent), agent)
                self.infos[agent]["legal_actions"] = legal_texts(self, agent, legal)
            elif "legal_actions" not in self.infos[agent] and (numbers := self._legal_numbers(agent)) is not None:
                self.infos[agent]["legal_actions"] = numbers


wrap = WrappedEnv


def _or_none(call: Callable[..., Any], *args: object) -> Any:
    """Return the result of a user's function, or None if it raises."""
    try:
        return call(*args)
    except Exception:  # noqa: BLE001  # user code may raise anything
        return None


def _copied(env: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy, made attribute by attribute because `EzPickle` would restart most environments."""
    twin = memo[id(env)] = object.__new__(type(env))
    for name, value in vars(env).items():
        is_env = isinstance(value, (AECEnv, ParallelEnv, gymnasium.Env)) and not hasattr(type(value), "__deepcopy__")
        try:
            vars(twin)[name] = _copied(value, memo) if is_env and id(value) not in memo else copy.deepcopy(value, memo)
        except ForgeError:
            raise
        except Exception as error:
            owner = f"{type(env).__module__}.{type(env).__qualname__}"
            raise ForgeError(
                f"{owner} has an attribute {name} of type {type(value).__qualname__} that cannot be copied ({error}). "
                f"Do without copies, or use a subclass of {type(env).__name__} whose __deepcopy__ omits it"
            ) from error
    return twin


def build(spec: EnvSpec) -> AnyEnv:
    """Make the environment of a spec in this process, with its turn limit and no other wrapper."""
    env: Any = spec.load()(**spec.kwargs)
    if not isinstance(env, (AECEnv, ParallelEnv)):
        raise ArgumentError(
            f"{spec.id} made a {type(env).__name__}, which is not a PettingZoo environment. Its entry point must make "
            "an AECEnv or a ParallelEnv. Convert Gymnasium environments by fa.wrap"
        )
    env.spec = spec
    if spec.max_turns is not None:
        if "max_turns" in vars(env) or hasattr(type(env), "max_turns"):  # not that of a wrapped environment
            env.max_turns = spec.max_turns
        else:
            env = TimeLimit(env, spec.max_turns)
    return cast("AnyEnv", env)


def apply_wrappers(env: Any, arguments: Mapping[str, Any]) -> AnyEnv:
    """Make `env` turn-based and apply the wrappers whose arguments are given, in the order of `BY_NAME`."""
    env = turn_based(env)
    for name, wrapper in BY_NAME.items():
        if arguments.get(name) is not None:
            env = wrapper(env, arguments[name])
    return cast("AnyEnv", env)


def _shuffled(env: AnyEnv, shuffle: object) -> AnyEnv:
    if not isinstance(shuffle, bool):
        raise ForgeError(f"role_shuffle={shuffle!r} of {env} must be true or false")
    return RoleShuffle(env) if shuffle else env


BY_NAME: dict[str, Callable[[AnyEnv, Any], AnyEnv]] = {
    "role_shuffle": _shuffled,
    "invalid_action": InvalidAction,
    "observation_window": ObservationWindow,
    "reward_scale": RewardScale,
}
"""Wrappers by the argument of `make` that applies them, innermost first."""
