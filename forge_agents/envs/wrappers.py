"""Wrappers of environments, in PettingZoo's manner: each takes an environment and is one.

In: a turn-based text environment (`pettingzoo.AECEnv`); for `wrap` any PettingZoo environment, and two functions
between its arrays and text. Out: one that differs in a single respect; of `wrap`, one that is played in text. Waits for
nothing. `build` and `wrapped` are what `make` does with a spec and with the arguments named in `BY_NAME`.
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
    as_json,
    hook,
    observation,
    without,
    writable,
)
from forge_agents.envs.foreign import Alone, turn_based
from forge_agents.envs.spec import AnyEnv, EnvSpec, check_max_turns
from forge_agents.errors import ForgeError

if TYPE_CHECKING:
    from gymnasium.spaces import Space

V = TypeVar("V")
Policy: TypeAlias = Literal["end", "penalty", "ask"]


class EnvWrapper(Forkable, BaseWrapper):  # type: ignore[misc]  # PettingZoo ships no types
    """An environment that passes everything on to the one inside, `env`.

    Raises:
        TypeError: What is to be wrapped is no `AECEnv`.
    """

    env: Any
    """The environment inside."""

    def __init__(self, env: AnyEnv) -> None:
        if not isinstance(env, AECEnv):
            raise TypeError(
                f"{type(self).__name__} wraps a PettingZoo AECEnv, got {type(env).__name__}; "
                "pettingzoo.utils.conversions.parallel_to_aec makes one of a ParallelEnv"
            )
        super().__init__(env)

    def __str__(self) -> str:
        return str(self.env)


class RewardScale(EnvWrapper):
    """Every reward times `scale`, which is finite and not 0."""

    def __init__(self, env: AnyEnv, scale: float) -> None:
        super().__init__(env)
        if not np.isfinite(scale) or scale == 0:
            raise ValueError(f"reward_scale={scale} of {env} hides every reward; set a finite number other than 0")
        self.scale = float(scale)

    @property
    def rewards(self) -> dict[str, float]:
        """Rewards of the last step, by agent."""
        return {agent: self.scale * reward for agent, reward in self.env.rewards.items()}

    @property
    def _cumulative_rewards(self) -> dict[str, float]:
        return {agent: self.scale * reward for agent, reward in self.env._cumulative_rewards.items()}


class ObservationWindow(EnvWrapper):
    """Only the end of each observation: its last `chars` characters, of its last `messages` lines.

    A cut observation starts with "..." in place of what is missing, within the limit.

    Args:
        chars: Longest observation, at least 4 characters; None for no limit.
        messages: Most lines that are not blank; None for no limit.
    """

    def __init__(self, env: AnyEnv, chars: int | None = None, *, messages: int | None = None) -> None:
        super().__init__(env)
        if (chars is None and messages is None) or (chars is not None and chars < 4) or (messages or 1) < 1:
            raise ValueError(
                f"observation window of {env}: set chars={chars} to at least 4 or messages={messages} to at least 1"
            )
        self.chars, self.messages = chars, messages
        self._spaces = {agent: TextSpace(chars) for agent in env.possible_agents} if chars is not None else None

    def observe(self, agent: str) -> Observation:
        """The end of what `agent` sees.

        Raises:
            ForgeError: It is told whole messages, of which nothing would be cut.
        """
        if (self.env.infos.get(agent) or {}).get(CONVERSATION):
            raise ForgeError(
                f"observation_window of {self.env}: models read the messages of a conversation there, which it does "
                "not cut; shorten them where they are written, or set context='window' of the policy"
            )
        text, cut = str(self.env.observe(agent)), False
        if self.messages is not None:
            lines = [line for line in text.splitlines() if line.strip()]
            cut = len(lines) > self.messages
            text = "\n".join(lines[-self.messages :]) if cut else text
        if self.chars is not None and len(text) + 3 * cut > self.chars:
            text, cut = text[-(self.chars - 3) :], True
        return Observation(f"...{text}" if cut else text)

    def observation_space(self, agent: str) -> TextSpace:
        """Text of at most `chars` characters."""
        return cast("TextSpace", self.env.observation_space(agent) if self._spaces is None else self._spaces[agent])


def _by_agent(name: str, doc: str) -> Any:
    """A property of `RoleShuffle`: what stands under `name` inside by role, by agent."""
    return property(lambda self: self._outside(getattr(self.env, name)), doc=doc)


class RoleShuffle(EnvWrapper):
    """Seats change roles: in each episode a permutation says which of the seats inside each agent takes.

    The permutation depends on the episode's seed alone, so the siblings of a group share it, and the game's own random
    numbers stay as they are. `infos[agent]["role"]` names the seat inside; texts use the names inside, too.
    """

    def __init__(self, env: AnyEnv) -> None:
        super().__init__(env)
        self.possible_agents: list[str] = list(env.possible_agents)
        self._role: dict[str, str] = {agent: agent for agent in self.possible_agents}

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> None:
        """Start an episode in new roles."""
        seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else int(seed)
        # A second word beside the seed: the roles must not follow from the game's first draws, nor change them.
        order = np.random.default_rng([seed, 0x520135]).permutation(len(self.possible_agents))
        self._role = {agent: self.possible_agents[i] for agent, i in zip(self.possible_agents, order, strict=True)}
        self.env.reset(seed=seed, options=options)

    @property
    def agents(self) -> list[str]:
        """Who is still in."""
        inside = set(self.env.agents)
        return [agent for agent in self.possible_agents if self._role[agent] in inside]

    @property
    def agent_selection(self) -> str:
        """Who decides."""
        return next(agent for agent, role in self._role.items() if role == self.env.agent_selection)

    rewards = _by_agent("rewards", "Rewards of the last step, by agent.")
    _cumulative_rewards = _by_agent("_cumulative_rewards", "Rewards since an agent's last decision.")
    terminations = _by_agent("terminations", "Whose game is over.")
    truncations = _by_agent("truncations", "Whose game was cut off.")

    @property
    def infos(self) -> dict[str, dict[str, Any]]:
        """Facts by agent, with its role."""
        found = self._outside(self.env.infos)
        return {agent: {**info, "role": self._role[agent]} for agent, info in found.items()}

    def observe(self, agent: str) -> Any:
        """What the agent's role sees."""
        return self.env.observe(self._role[agent])

    def observation_space(self, agent: str) -> Any:
        """The space of the agent's role."""
        return self.env.observation_space(self._role[agent])

    def action_space(self, agent: str) -> Any:
        """The space of the agent's role."""
        return self.env.action_space(self._role[agent])

    def __getattr__(self, name: str) -> Any:
        found = hook(self.env, name) if name in HOOKS else None
        if found is None:
            return super().__getattr__(name)
        return lambda agent, *rest: found(self._role[agent], *rest)

    def _outside(self, inside: Mapping[str, V]) -> dict[str, V]:
        return {agent: inside[role] for agent, role in self._role.items() if role in inside}


class _Mirror(AECEnv):  # type: ignore[misc]  # PettingZoo ships no types
    """PettingZoo's state of an episode, copied from the environment inside, so that the episode can end out here.

    Once it has, the environment inside is not stepped any more: it never saw the decision that ended it.
    """

    env: Any
    agents: list[str] = []  # PettingZoo's: empty until `reset`, then the instance's own

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> None:
        """Start an episode."""
        self.env.reset(seed=seed, options=None if options is None else dict(options))
        self._ended_here = False
        self._skip_agent_selection = None
        self.num_turns = 0
        self._mirror()

    def step(self, action: str | None) -> None:
        """Play a decision; None for an agent that is out."""
        if not self.agents:
            raise RuntimeError(f"{self}: no episode is running; call reset() before step()")
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
        """The reward of a step that the environment inside does not know of."""
        self._cumulative_rewards[agent] = 0.0
        self.rewards = {seat: reward if seat == agent else 0.0 for seat in self.agents}
        self._accumulate_rewards()

    def _playing(self) -> list[str]:
        """The agents whose game is neither over nor cut off."""
        return [agent for agent in self.agents if not (self.terminations[agent] or self.truncations[agent])]

    def _end(self, *, truncated: bool) -> None:
        """End the game for all agents that still play."""
        self._ended_here = True
        (self.truncations if truncated else self.terminations).update(dict.fromkeys(self._playing(), True))
        self.infos = {agent: without(info, "legal_actions") for agent, info in self.infos.items()}
        self._deads_step_first()

    def _count(self, max_turns: int | None) -> None:
        """One decision more; the last one that is allowed cuts the episode off for all agents that still play."""
        self.num_turns += 1
        if max_turns is not None and self.num_turns >= max_turns and self._playing():
            self._end(truncated=True)


class TimeLimit(_Mirror, EnvWrapper):
    """Truncates an episode after `max_turns` decisions of all agents together.

    `make` uses it for environments that do not count turns themselves.
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
    """What an illegal text costs, whatever the environment does about it.

    A text is illegal where the environment says so after it: ``infos[agent]["illegal"]`` is true. The environments of
    this project and those that `forge_agents.wrap` makes do.

    ``"end"`` ends the episode for everybody; the agent gets `penalty` and the others 0. ``"ask"`` undoes the move and
    asks the same agent again, `tries` times per decision, and then ends the episode so. ``"penalty"`` does as
    ``"ask"``, and the agent gets `penalty` each time. The question says what was wrong.

    An environment with a method ``refusal(agent, text)``, as `wrap` makes, says so before a move; of another a
    `copy.deepcopy` is kept while the move is tried.

    Args:
        tries: How often the agent is asked again, at least 1.
        penalty: Reward of an illegal text, finite.
    """

    def __init__(self, env: AnyEnv, policy: Policy = "end", *, tries: int = 2, penalty: float = -1.0) -> None:
        super().__init__(env)
        if policy not in get_args(Policy) or tries < 1 or not np.isfinite(penalty):
            raise ValueError(
                f"invalid_action={policy!r} of {env} must be one of {', '.join(get_args(Policy))}, tries={tries} at "
                f"least 1 and penalty={penalty} finite"
            )
        self.policy, self.tries, self.penalty = policy, tries, float(penalty)

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> None:
        """Start an episode."""
        self._asked, self._complaint = 0, ""
        super().reset(seed=seed, options=options)

    def observe(self, agent: str) -> Observation:
        """What the agent sees; after an illegal text, what was wrong with it first."""
        text = str(self.env.observe(agent))
        if self._complaint and agent == self.agent_selection:
            text = f"{self._complaint}\n{text}"[: self.env.observation_space(agent).max_length]
        return Observation(text)

    def _decide(self, agent: str, action: str | None) -> None:
        listed = self.infos[agent].get("legal_actions") or ()
        refusal = hook(self.env, "refusal")
        why = None if refusal is None or action in listed else refusal(agent, action)
        if not why:
            # Where only the move shows whether a text is illegal, a copy is kept, but for a listed one: that is legal.
            before = self.env if action in listed or refusal is not None else copy.deepcopy(self.env)
            self.env.step(action)
            why = None if before is self.env else self.env.infos.get(agent, {}).get("illegal")
            if not why:
                self._asked, self._complaint = 0, ""
                self._mirror()
                self._count(None)
                return
            self.env = before
        again = self.policy != "end" and self._asked < self.tries
        self._asked += 1
        reason = why if isinstance(why, str) else f"choose one of: {', '.join(listed)}" if listed else "read the rules"
        self._complaint = f"That was not a legal action ({reason})." if again else ""
        self._pay(agent, 0.0 if again and self.policy == "ask" else self.penalty)
        self.infos[agent]["illegal"] = why
        if not again:
            self.infos[agent]["forfeits"] = [agent]
            self._end(truncated=False)


_MOST_NUMBERS = 1000
"""Actions of a discrete space, beyond which they are not listed by number."""
ILLEGAL = (ValueError, LookupError, ArithmeticError)
"""What the `text_to_action` of `wrap` raises at a text that is no action, beside returning None."""


class WrappedEnv(_Mirror):
    """A text environment made of an array environment, which is `env`; `unwrapped` is this text environment.

    Args:
        env: AEC or parallel; a parallel one is stepped agent by agent, as PettingZoo converts it. Of Gymnasium, the one
            seat is ``player``.
        obs_to_text: ``f(observation, agent)`` gives what the agent reads.
        text_to_action: ``g(text, agent, action_space)`` gives the action that a text means. It says that a text is none
            by returning None or raising ValueError, LookupError (KeyError, IndexError) or ArithmeticError. Illegal,
            too, is what the space does not contain and what the action mask, of the observation or the info, forbids.
            Lists and Python's numbers become arrays where the space is a Box. Any other exception is a mistake of the
            function, and the episode fails.
        legal_actions: ``h(observation, agent)`` gives the texts that are legal for the deciding agent, which are then
            in ``infos[agent]["legal_actions"]``, from which random players draw. None lists numbers where the action
            space is a Discrete of at most 1000 actions each of which `text_to_action` reads from a number, without
            those that the action mask forbids; elsewhere nothing is listed, and random players write random letters.
        instructions: System prompt, one for all or by agent.
        illegal_reward: Reward of an illegal action. It ends the episode for everybody, the others get 0, and the
            agent's info says why under ``"illegal"``; ``make(id, invalid_action=...)`` asks again instead.
        max_turns: Decisions of all agents together after which the episode is truncated.
        max_action_chars: Bound of the action spaces, in characters.
        max_observation_chars: Bound of the observation spaces, in characters.

    Raises:
        TypeError: `env` is no such environment, or does not name its possible agents.
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
        env = turn_based(Alone(env) if isinstance(env, gymnasium.Env) else env)
        if not isinstance(env, AECEnv):
            is_one = isinstance(env, type) or hasattr(env, "parallel_env") or hasattr(env, "env")
            hint = "; call it, or its env() or parallel_env(), and pass what that returns" if is_one else ""
            raise TypeError(
                f"wrap takes a PettingZoo AECEnv or ParallelEnv, or a Gymnasium Env, got {type(env).__name__}{hint}"
            )
        if not hasattr(env, "possible_agents"):
            raise TypeError(f"{env} has no possible_agents; seats must be known before an episode starts")
        if other := [agent for agent in env.possible_agents if not isinstance(agent, str)]:
            raise TypeError(
                f"{env} calls a seat {other[0]!r}, a {type(other[0]).__name__}; seats are called by texts: give it "
                "names such as 'player_0' in its possible_agents, agents and answers"
            )
        check_max_turns(max_turns, str(env))
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
        """Where the functions stand that `wrap` was given."""
        functions = (self._to_text, self._to_action, self._legal, self._instructions)
        codes = (getattr(getattr(f, "func", f), "__code__", None) for f in functions)  # of a functools.partial, too
        return frozenset(code.co_filename for code in codes if code is not None)

    def instructions(self, agent: str) -> str:
        """The system prompt of a seat; where `wrap` was given none, that of the environment inside, or empty."""
        given = self._instructions if self._instructions is not None else hook(self.env, "instructions")
        return given(agent) if callable(given) else given or ""

    def refusal(self, agent: str, text: str) -> str:
        """Why `text` would be illegal now; empty if it is legal."""
        return self._read(agent, writable(text))[1]

    def _decide(self, agent: str, action: str | None) -> None:
        if not isinstance(action, str):
            raise TypeError(f"{self}: {agent!r} must act with text, got {type(action).__name__}")
        move, why = self._read(agent, writable(action))
        if why:  # the environment inside never sees an illegal action
            self._pay(agent, self._illegal_reward)
            self.infos[agent] |= {"illegal": why, "forfeits": [agent]}
            self._end(truncated=False)
            return
        self.env.step(move)
        self._mirror()
        self._count(self.max_turns)

    def observe(self, agent: str) -> Observation:
        """The observation inside, as text."""
        text = self._to_text(self.env.observe(agent), agent)
        return observation(self, agent, text, "obs_to_text", self._max_chars["observation"])

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
            if move is not None and isinstance(space, gymnasium.spaces.Box):
                move = np.asarray(move, space.dtype)  # a list, or Python's floats, which the space takes for no action
        except ILLEGAL as error:
            return None, f"{type(error).__name__}: {error}"
        if move is None or not space.contains(move):
            return None, f"not an action: {move!r}" + (f" is not in {space}" if move is not None else "")
        mask = self._mask(agent)
        if mask is not None and np.ndim(move) == 0 and not mask[int(move) - int(getattr(space, "start", 0))]:
            return None, f"action {move!r} is masked"
        return move, ""

    def _mask(self, agent: str) -> Any:
        """The action mask in the observation or info of an agent; None where there is none."""
        inside = self.env.observe(agent)
        mask = inside.get("action_mask") if isinstance(inside, Mapping) else None
        return self.env.infos[agent].get("action_mask") if mask is None else mask

    def _numbered(self, agent: str) -> list[str] | None:
        """Numbers that `text_to_action` reads as the legal actions; None where it does not read each action so."""
        if agent not in self._numbers:
            self._numbers[agent] = self._texts_by_action(agent, self.env.action_space(agent))
        if not (texts := self._numbers[agent]):
            return None
        mask, start = self._mask(agent), min(texts)
        return [text for action, text in texts.items() if mask is None or mask[action - start]]

    def _texts_by_action(self, agent: str, space: Any) -> dict[int, str]:
        """The first number, counted from 0 or 1, that means each action; empty where some action has none."""
        if not isinstance(space, gymnasium.spaces.Discrete) or space.n > _MOST_NUMBERS:
            return {}
        start, found = int(space.start), dict[int, str]()
        for text in map(str, range(min(start, 0), start + int(space.n) + 1)):
            move = _or_none(self._to_action, text, agent, space)
            if move is not None and np.ndim(move) == 0 and space.contains(move):
                found.setdefault(int(move), text)
        return dict(sorted(found.items())) if len(found) == space.n else {}

    def _mirror(self) -> None:
        super()._mirror()
        # A mask is of the actions inside; PettingZoo's tests and samplers would take it for one of texts.
        self.infos = {
            seat: {str(name): as_json(value) for name, value in info.items() if name != "action_mask"}
            for seat, info in self.infos.items()
        }
        agent = self.agent_selection
        if agent not in self.agents:
            return
        if self._legal is not None:
            self.infos = {seat: without(info, "legal_actions") for seat, info in self.infos.items()}
        if not (self.terminations[agent] or self.truncations[agent]):
            if self._legal is not None:
                self.infos[agent]["legal_actions"] = list(self._legal(self.env.observe(agent), agent))
            elif "legal_actions" not in self.infos[agent] and (numbers := self._numbered(agent)) is not None:
                self.infos[agent]["legal_actions"] = numbers


wrap = WrappedEnv


def _or_none(call: Callable[..., Any], *args: object) -> Any:
    """What a user's function returns; None where it raises, as on a text that it was not written for."""
    try:
        return call(*args)
    except Exception:  # noqa: BLE001  # any exception is an answer here
        return None


def _copied(env: Any, memo: dict[int, Any]) -> Any:
    """A deep copy, attribute by attribute: the way of `EzPickle`, which most environments have, starts them anew.

    Raises:
        ForgeError: An attribute cannot be copied; the message names it.
    """
    twin = memo[id(env)] = object.__new__(type(env))
    for name, value in vars(env).items():
        inside = isinstance(value, (AECEnv, ParallelEnv, gymnasium.Env)) and not hasattr(type(value), "__deepcopy__")
        try:
            vars(twin)[name] = _copied(value, memo) if inside and id(value) not in memo else copy.deepcopy(value, memo)
        except ForgeError:
            raise
        except Exception as error:
            owner = f"{type(env).__module__}.{type(env).__qualname__}"
            raise ForgeError(
                f"{owner} keeps {name}, a {type(value).__qualname__}, which cannot be copied ({error}); do without "
                f"copies, or derive from {type(env).__name__} a class whose __deepcopy__ leaves it out"
            ) from error
    return twin


def build(spec: EnvSpec) -> AnyEnv:
    """The environment of a spec in this process, with its turn limit, not wrapped otherwise."""
    env: Any = spec.load()(**spec.kwargs)
    env.spec = spec
    if spec.max_turns is not None:
        if "max_turns" in vars(env) or hasattr(type(env), "max_turns"):  # its own, not that of something inside
            env.max_turns = spec.max_turns
        else:
            env = TimeLimit(env, spec.max_turns)
    return cast("AnyEnv", env)


def wrapped(env: Any, arguments: Mapping[str, Any]) -> AnyEnv:
    """`env`, taking turns, in the wrappers that `make` was asked for, innermost first as in `BY_NAME`.

    Raises:
        ForgeError: A flag that is neither true nor false.
        TypeError, ValueError: As the wrapper's own.
    """
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
"""Arguments of `make` that wrap the environment, innermost first."""
