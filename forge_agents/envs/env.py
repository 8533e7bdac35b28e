"""Base classes of text environments: `TurnEnv` (agents act in turn) and `ParallelTurnEnv` (agents act together)."""

from __future__ import annotations

import copy
import json
import string
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, ClassVar, Self, TypeAlias, cast

import numpy as np
from gymnasium.spaces import Text
from pettingzoo import AECEnv, ParallelEnv

from forge_agents.envs.reasoning import join_reasoning
from forge_agents.envs.spec import EnvSpec, check_max_turns
from forge_agents.errors import did_you_mean
from forge_agents.files import is_shallow

HOOKS = (
    "instructions", "tool_schemas", "secrets", "swap_secrets", "legal_actions", "refusal", "about_answer", "compact",
)  # fmt: skip
"""Optional methods of environments in addition to PettingZoo's. The first argument of each is an agent."""

RIVAL_TAGS = frozenset(("zero-sum", "competitive"))
"""Tags of games in which an agent may gain by what another one loses."""
CONVERSATION = "conversation"
"""Info key of an agent that holds several conversations, or whose environment writes whole messages.

If the entry is None or absent, the agent's main conversation continues with the observation. Otherwise it is a mapping:

- ``messages``: messages with ``role`` ("system", "user" or "assistant") and ``content``. Messages replace instructions
  and observation.
- ``after``: index (from 0) of the agent's decision in this episode that the messages continue, or None for a new
  conversation. Continuing a decision that already has a continuation starts a branch.
- ``only_results``: whether the messages are results of the agent's own tool calls.
- ``tools``: tool schemas for this answer, if they differ from the agent's.
- ``max_tokens``: limit of this answer. The policy's own limit applies if it is lower.
- ``stop``: additional stop strings.
- ``asked``: other requested sampling parameters, recorded but ignored.
- ``session``: value of `Turn.session`, default 0.
- ``session_rewards``: after the last turn, the reward of each session. The agent's reward must be their mean.

`Turn.new_messages` stores the messages.
"""


_MAX_ARRAY = 64
"""Maximum number of array elements in infos and results of tools. Longer arrays are abbreviated as NumPy does."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one action, or of the simultaneous actions of all agents."""

    next: str | None = None
    """Agent that acts next. None selects the next live agent in cyclic order. Always None in parallel games."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards of this step by agent. Finite. Agents that are not listed get 0."""
    done: bool | Collection[str] = False
    """Agents that terminate: True for all, or the listed ones."""
    truncated: bool | Collection[str] = False
    """Agents that are truncated: True for all, or the listed ones."""
    info: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """JSON-serializable facts by agent, merged into `infos[agent]` until replaced. Policies never see them."""


class Observation(str):
    """A string with the dtype of its space, because PettingZoo's `api_test` compares it."""

    __slots__ = ()
    dtype: ClassVar[np.dtype[np.str_]] = np.dtype(str)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # pickled as a plain string


class TextSpace(Text):
    """Space of all valid Unicode texts up to a maximum length.

    Samples consist of printable ASCII characters and newlines.

    Args:
        max_chars: Maximum length in characters. The minimum is 0.
    """

    def __init__(self, max_chars: int) -> None:
        printable = string.digits + string.ascii_letters + string.punctuation + " \n"
        super().__init__(max_chars, min_length=0, charset=printable)

    def contains(self, x: Any) -> bool:
        """Whether `x` is a valid text within the length limit."""
        return isinstance(x, str) and len(x) <= self.max_length and x == writable(x)


def writable(text: str) -> str:
    """Replace lone surrogates with U+FFFD, because UTF-8 cannot encode them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)
    return text


def observation(env: object, agent: str, text: object, method: str, max_chars: int) -> Observation:
    """Convert a text that `method` returned to an observation. Raises TypeError or ValueError if it is none."""
    if not isinstance(text, str):
        raise TypeError(f"{env}: {method} returned {type(text).__name__} for {agent!r}. Return a string")
    if len(text) > max_chars:
        raise ValueError(
            f"{env}: the observation of {agent!r} has {len(text)} characters, and the space allows {max_chars}. "
            "Shorten it or raise max_observation_chars."
        )
    return Observation(text)


def legal_texts(env: object, agent: str, legal: Iterable[str]) -> list[str]:
    """Return the legal actions of an agent as a list. Raises TypeError for a single text."""
    if isinstance(legal, str):
        raise TypeError(f"{env}: legal_actions returned the text {legal!r:.80} for {agent!r}. Return a list of texts")
    return list(legal)


def as_json(value: Any) -> Any:
    """Convert a value to JSON types: dataclasses and pydantic models become dicts, NumPy scalars become Python's.

    Deeply nested values are returned as JSON text, and values that cannot be serialized as ``str(value)``.
    """
    try:
        text = json.dumps(value, default=json_default)
        loaded = json.loads(text)
    except (TypeError, ValueError, RecursionError) as cause:  # unsupported keys, self-references
        try:
            return str(value)
        except (ValueError, RecursionError):  # Python refuses to format integers of more than 4300 digits
            return f"unprintable {type(value).__name__} ({cause})"
    return loaded if is_shallow(loaded) else text


def json_default(value: Any) -> Any:
    """Convert a value that `json.dumps` does not know, as its `default`."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.size <= _MAX_ARRAY:
        return value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if callable(dump := getattr(type(value), "model_dump", None)):  # pydantic
        return dump(value)
    return sorted(value, key=str) if isinstance(value, set | frozenset) else str(value)


class Forkable:
    """Copies, snapshots and restoring, for objects that keep all their state in attributes."""

    def fork(self) -> Self:
        """Return an independent copy in the same state."""
        return copy.deepcopy(self)

    def snapshot(self) -> Mapping[str, Any]:
        """Return the whole state, for `restore` of this or another instance of the class."""
        return copy.deepcopy(vars(self))

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Return to a `snapshot`. A snapshot can be used any number of times."""
        self.__dict__ = copy.deepcopy(dict(snapshot))


_NAME_AGENTS = "Set a list of names, such as possible_agents = ['player_0', 'player_1']"


class _Unset:
    """Stands for an attribute until it is set, and says how to set it."""

    def __init__(self, advice: str) -> None:
        self._advice = advice

    def __get__(self, env: object, owner: type) -> None:
        raise AttributeError(f"{owner.__name__}{self._advice}")


class TextGame(Forkable):
    """Common part of `TurnEnv` and `ParallelTurnEnv`."""

    possible_agents: Sequence[str] = cast("Sequence[str]", _Unset(f" names no agents. {_NAME_AGENTS}"))
    """Names of all agents, in order of play."""
    min_agents: int | None = None
    """Smallest ``num_agents`` that ``reset(options={"num_agents": n})`` accepts. None: every episode has all agents."""
    sides: Sequence[Sequence[str]] = ()
    """Teams of agents that win and lose together. A benchmark assigns a whole team to one player. Empty: every agent
    plays for itself."""
    max_turns: int | None = None
    max_reward: float | None = None
    """Maximum reward of an agent in an episode, if known. Training stops as solved once all episodes earn it."""
    observes_reasoning: bool = False
    """Whether actions include the reasoning, as ``<think>`` reasoning ``</think>`` answer. By default an environment
    receives only the answer, so that no agent can read another agent's reasoning."""
    judges_silence: bool = False
    """Whether an agent whose context is full gives an empty answer, as in games that are tagged as zero-sum or
    competitive. By default the episode ends, with the rewards and infos so far."""
    max_action_chars: int = 4096
    """Upper bound of the action space. Longer actions still reach the game."""
    max_observation_chars: int = 32768
    """Upper bound of the observation space. A longer observation is an error of the environment."""
    spec: EnvSpec | None = None
    """Set by `register` and `make`."""
    render_mode: str = "ansi"
    agents: list[str] = []  # as in PettingZoo, empty until `reset` replaces it
    episode_seed: int | None = None
    """Seed of the current episode. Drawn at random if `reset` got none."""
    _parallelizable: ClassVar[bool]

    def __init__(self, *, max_turns: int | None = None) -> None:
        super().__init__()
        if max_turns is not None:
            check_max_turns(max_turns, type(self).__name__)
            self.max_turns = max_turns

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.spec = None  # a subclass is not registered under its base's id
        if "metadata" not in vars(cls) and hasattr(cls, "_parallelizable"):
            flags = {"render_modes": ["ansi"], "is_parallelizable": cls._parallelizable}
            cls.metadata = {"name": cls.__name__, **flags}  # type: ignore[attr-defined]  # PettingZoo's attribute

    # ---- defined by a game

    def select_agents(self, rng: np.random.Generator) -> Sequence[str]:
        """Return the agents of this episode. Called before `setup`. The result becomes `self.agents`.

        The default returns the first ``options["num_agents"]`` of `possible_agents`, or all of them without the option.
        """
        number, maximum = self.options.get("num_agents"), len(self.possible_agents)
        if number is None:
            return self.possible_agents
        minimum = maximum if self.min_agents is None else self.min_agents
        if type(number) is not int or not minimum <= number <= maximum:
            allowed = f"{minimum} to {maximum}" if minimum < maximum else f"exactly {maximum}"
            raise ValueError(f"{self}: num_agents={number!r} is not possible. The game needs {allowed} agents")
        return self.possible_agents[:number]

    def setup(self, rng: np.random.Generator) -> str | None:
        """Start an episode with `self.agents`. May fill `self.infos[agent]`.

        Args:
            rng: Random generator of the episode, also available as `self.rng`. Use no other source of randomness.

        Returns:
            Agent that acts first. None selects the first of `agents`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define setup(self, rng)")

    def instructions(self, agent: str) -> str:
        """Return the system prompt of an agent: rules and answer format. Constant during an episode."""
        raise NotImplementedError(f"{type(self).__name__} must define instructions(self, agent)")

    def observe_text(self, agent: str) -> str:
        """Return what is new for an agent. Must not change state, because it may be called any number of times."""
        raise NotImplementedError(f"{type(self).__name__} must define observe_text(self, agent)")

    def legal_actions(self, agent: str) -> Sequence[str] | None:
        """Return the texts that are legal now, or None if they cannot be listed.

        `infos[agent]["legal_actions"]` has the list of the acting agent. Random players and checks draw from it, and a
        policy with `constrain_actions` samples only these texts.
        """
        return None

    def compact(self, agent: str, left_out: Sequence[tuple[str, str]]) -> str | None:
        """Summarize turns that no longer fit into the context of an agent whose policy has ``context="window"``.

        Must not change state, and must not reveal anything that the agent has not seen.

        Args:
            left_out: Observations and answers that are dropped, oldest first. The first observation stays.

        Returns:
            A short replacement text. None inserts a generic mark.
        """
        return None

    # ---- PettingZoo's interface

    def observe(self, agent: str) -> Observation:
        """Return the current observation of `agent`. Raises TypeError or ValueError if `observe_text` returned none."""
        if "episode_seed" not in vars(self):
            raise RuntimeError(f"{self}: no episode is running. Call reset() before observe()")
        return observation(self, agent, self.observe_text(agent), "observe_text", self.max_observation_chars)

    def observation_space(self, agent: str) -> TextSpace:
        """Text of at most `max_observation_chars` characters."""
        return self._space("_observation_spaces", agent, self.max_observation_chars)

    def action_space(self, agent: str) -> TextSpace:
        """Text of at most `max_action_chars` characters."""
        return self._space("_action_spaces", agent, self.max_action_chars)

    def render(self) -> str:
        """Return the transcript of the episode so far, with rewards."""
        lines = []
        for texts, rewards in getattr(self, "_transcript", ()):
            lines += [f"[{agent}] {text}\n" for agent, text in texts.items()]
            lines += [f"  {agent} {reward:+g}\n" for agent, reward in rewards.items() if reward]
        return "".join(lines)

    def close(self) -> None:
        """Release resources. The default does nothing."""

    def __str__(self) -> str:
        return self.spec.id if self.spec else type(self).__name__

    # ---- shared by the two kinds of game

    def _begin(self, seed: int | None, options: Mapping[str, Any] | None) -> None:
        """Reset generator, agents, infos and counters for a new episode."""
        if isinstance(self.possible_agents, str):
            raise TypeError(f"{self}: possible_agents is the string {self.possible_agents!r}. {_NAME_AGENTS}")
        given: Any = seed  # a caller may ignore the declared type
        if given is not None and not (isinstance(given, (int, np.integer)) and given >= 0):
            raise ValueError(f"{self}: seed={given!r} is no seed. Pass a whole number from 0 on, or None to draw one")
        possible = list(self.possible_agents)
        if not possible or len(set(possible)) < len(possible) or not all(isinstance(agent, str) for agent in possible):
            raise ValueError(f"{self}: possible_agents is {possible}. Set one or more different strings")
        self.episode_seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else int(seed)
        self.rng = np.random.default_rng(self.episode_seed)
        self.options: dict[str, Any] = dict(options or {})
        agents = list(self.select_agents(self.rng))
        self._check_agents(agents, "select_agents returned")
        if not agents or len(set(agents)) < len(agents):
            raise ValueError(f"{self}: select_agents returned {agents}. Return one or more different agents")
        self.agents = agents
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in agents}
        self.num_turns = 0
        self._limit = self.max_turns if self.max_turns is not None else (self.spec.max_turns if self.spec else None)
        self._transcript: list[tuple[dict[str, str], dict[str, float]]] = []

    def _check_names(self) -> None:
        """Raise if the game hides a method of PettingZoo's loop, such as `last`, or a private one."""
        cls: type = type(self)
        methods, private, hidden = _methods(cls)
        hiding = [name for name, value in vars(self).items() if name in methods and not callable(value)]
        hiding += [*hidden, *private.intersection(vars(self))]
        if hiding:
            raise ValueError(f"{self}: the attribute {hiding[0]!r} hides a method. Choose another name")

    def _space(self, store: str, agent: str, max_chars: int) -> TextSpace:
        spaces: dict[str, TextSpace] = self.__dict__.setdefault(store, {})
        if agent not in spaces:
            self._check_agents([agent], "space requested for")
            spaces[agent] = TextSpace(max_chars)
        return spaces[agent]

    def _text(self, agent: str, action: object) -> str:
        """Check an action, and remove the info about an agent's previous illegal action."""
        if not isinstance(action, str):
            raise TypeError(f"{self}: {agent!r} must act with text, got {type(action).__name__}")
        if "illegal" in self.infos[agent]:
            self.infos[agent] = without(self.infos[agent], "illegal")
        return writable(action)

    def _checked_rewards(self, outcome: object, method: str) -> dict[str, float]:
        """Check the rewards of an outcome and merge its infos. Returns the rewards of live agents."""
        if not isinstance(outcome, Outcome):
            raise TypeError(f"{self}: {method} returned {type(outcome).__name__}. Return an Outcome")
        returned: Mapping[str, Any] = outcome.rewards  # user code may ignore the declared types
        if not isinstance(returned, Mapping):
            raise TypeError(f"{self}: Outcome.rewards is {returned!r} after {method}. Set a dict of rewards by agent")
        rewards: dict[str, float] = {}
        for agent, reward in returned.items():
            is_number = isinstance(reward, (int, float, np.number, np.bool_))
            number = reward.item() if isinstance(reward, np.generic) else reward  # NumPy compares in 32 bits
            if not is_number or not abs(number) <= sys.float_info.max:  # also of an int beyond floats
                raise ValueError(
                    f"{self}: the reward of {agent!r} is {reward!r} after {method}. Rewards must be finite numbers"
                )
            if agent in self.agents:
                rewards[agent] = float(reward)
                continue
            self._check_agents([agent], "Outcome.rewards has")
            if reward:
                raise ValueError(
                    f"{self}: {method} rewards {agent!r} with {reward!r} after its game ended. Reward an agent at the "
                    "latest in the outcome that ends its game, or end its game later"
                )
        for agent, info in outcome.info.items():
            self._check_agents([agent], "Outcome.info has")
            if agent not in self.agents:
                raise ValueError(f"{self}: {method} has infos of {agent!r} after its game ended. Use self.agents")
            self.infos[agent] = {**self.infos[agent], **info}  # a new dict, because a reader may hold the old one
        return rewards

    def _ended(self, ended: bool | Collection[str], field_name: str) -> list[str]:
        """Return the agents that `Outcome.done` or `Outcome.truncated` selects."""
        if isinstance(ended, (bool, np.bool_)):
            return list(self.agents) if ended else []
        if isinstance(ended, (str, Mapping)) or not isinstance(ended, Collection):
            raise TypeError(f"{self}: Outcome.{field_name} is {ended!r}. Set True, False or a collection of agents")
        self._check_agents(ended, f"Outcome.{field_name} has")
        return [agent for agent in self.agents if agent in ended]

    def _ends(self, outcome: Outcome) -> tuple[list[str], list[str]]:
        """Return terminated and truncated agents. The turn limit does not truncate terminated agents."""
        at_limit = self._limit is not None and self.num_turns >= self._limit
        if outcome.done is False and outcome.truncated is False and not at_limit:
            return [], []
        done = self._ended(outcome.done, "done")
        cut = self._ended(outcome.truncated, "truncated")
        return done, [agent for agent in self.agents if agent in cut or (at_limit and agent not in done)]

    def _list_legal_actions(self, agent: str) -> None:
        """Store the legal actions of an agent that acts next in its info."""
        legal = self.legal_actions(agent)
        if legal is not None:
            self.infos[agent] = {**self.infos[agent], "legal_actions": legal_texts(self, agent, legal)}

    def _check_agents(self, names: Iterable[str], what: str) -> None:
        for name in names:
            if name not in self.possible_agents:
                agents = list(self.possible_agents)
                raise ValueError(f"{self}: {what} {name!r}. The agents are {agents}.{did_you_mean(str(name), agents)}")


class TurnEnv(TextGame, AECEnv):  # type: ignore[misc]  # PettingZoo ships no types
    """A text game whose agents act one at a time.

    A subclass sets `possible_agents` and defines `setup`, `instructions`, `observe_text` and `act`. This class manages
    PettingZoo's state (spaces, rewards and their sums, terminations, dead steps, infos), the turn limit and the random
    generator of the episode. Keep all game state in attributes of `self`, so that `fork` copies it.

    Two optional methods let `check_env` test for leaks of hidden information: ``secrets(agent) -> Sequence[str]``
    returns texts that `agent` must not be able to read now, and ``swap_secrets(agent, rng) -> None`` replaces
    everything that `agent` does not know with something else that is consistent with what it has seen.

    Example:
        >>> class Parity(TurnEnv):
        ...     possible_agents = ["player"]
        ...     def setup(self, rng):
        ...         self.number = int(rng.integers(100))
        ...     def instructions(self, agent):
        ...         return "Answer 'odd' or 'even'."
        ...     def observe_text(self, agent):
        ...         return f"Is {self.number} odd or even?"
        ...     def act(self, agent, action):
        ...         right = ("even", "odd")[self.number % 2]
        ...         return Outcome(rewards={agent: float(action.strip().lower() == right)}, done=True)

    Args:
        max_turns: Number of decisions, of all agents together, after which the episode is truncated. None uses the
            class attribute, then the registered limit.
    """

    _parallelizable = False
    agent_selection: str = cast("str", _Unset(": no episode is running. Call reset() first"))

    def act(self, agent: str, action: str) -> Outcome:
        """Apply one action. Any text may arrive: handle an illegal one by an `Outcome`, never by an exception."""
        raise NotImplementedError(f"{type(self).__name__} must define act(self, agent, action)")

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> None:
        """Start an episode.

        Args:
            seed: Non-negative seed. The same seed gives the same episode. None draws a random one.
            options: Stored as `self.options`. ``num_agents`` sets the number of agents.
        """
        TextGame._check_names(self)  # because `self._begin` may be hidden
        self._begin(seed, options)
        self._order = tuple(self.agents)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self._skip_agent_selection = None  # used by PettingZoo's dead steps
        self.agent_selection = self.agents[0]
        first = self.setup(self.rng)
        if first is not None:
            self._check_live(first, "setup returned")
            self.agent_selection = first
        TextGame._check_names(self)
        self._list_legal_actions(self.agent_selection)

    def step(self, action: str | None) -> None:
        """Apply the action of `agent_selection`. Pass None for a terminated or truncated agent, as in PettingZoo."""
        if not self.agents:
            raise RuntimeError(f"{self}: no episode is running. Call reset() before step()")
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            if action is not None:
                raise ValueError(
                    f"{self}: the game of {agent!r} has ended, so its action must be None. Call reset() for another "
                    "episode"
                )
            self._was_dead_step(None)
            return
        text = self._text(agent, action)
        outcome = self._play(agent, text)
        if "legal_actions" in self.infos[agent]:
            self.infos[agent] = without(self.infos[agent], "legal_actions")
        rewards = self._checked_rewards(outcome, f"act({agent!r}, ...)")
        self.num_turns += 1
        self.rewards = dict.fromkeys(self.agents, 0.0) | rewards
        self._cumulative_rewards[agent] = 0.0  # `last` reports the sum since the agent's own last decision
        for earner, reward in rewards.items():
            self._cumulative_rewards[earner] += reward
        self._transcript.append(({agent: text}, rewards))
        done, cut = self._ends(outcome)
        self.terminations.update(dict.fromkeys(done, True))
        self.truncations.update(dict.fromkeys(cut, True))
        out = frozenset((*done, *cut))
        if len(out) < len(self.agents):
            self.agent_selection = self._next_agent(agent, outcome.next, out)
            self._list_legal_actions(self.agent_selection)
        if out:
            self._deads_step_first()  # PettingZoo: ended agents step with None before any other agent acts

    def _play(self, agent: str, action: str) -> Outcome:
        """Apply an action. Subclasses such as `ToolEnv` intercept actions here."""
        return self.act(agent, action)

    def _next_agent(self, agent: str, chosen: str | None, out: frozenset[str]) -> str:
        if chosen is not None:
            self._check_live(chosen, "Outcome.next is", out)
            return chosen
        start = self._order.index(agent) + 1
        if len(self.agents) == len(self._order) and not out:  # fast path: no agent has ended
            return self._order[start % len(self._order)]
        following = self._order[start:] + self._order[:start]
        return next(other for other in following if other in self.agents and other not in out)

    def _check_live(self, agent: str, what: str, out: frozenset[str] = frozenset()) -> None:
        self._check_agents([agent], what)
        if agent not in self.agents or agent in out:
            raise ValueError(f"{self}: {what} {agent!r}, whose game has ended. Choose a live agent")


Steps: TypeAlias = tuple[
    dict[str, Observation], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]
]
"""Observations, rewards, terminations, truncations and infos by agent."""


class ParallelTurnEnv(TextGame, ParallelEnv):  # type: ignore[misc]  # PettingZoo ships no types
    """A text game whose agents act simultaneously.

    A subclass sets `possible_agents` and defines `setup`, `instructions`, `observe_text` and `act_all`. The rest is as
    in `TurnEnv`. An agent whose game ends leaves `agents` after that round. A round of n agents counts as n turns of
    `max_turns`. `pettingzoo.utils.conversions.parallel_to_aec` converts it to a turn-based environment.

    Example:
        >>> class Meet(ParallelTurnEnv):
        ...     possible_agents = ["left", "right"]
        ...     def setup(self, rng):
        ...         pass
        ...     def instructions(self, agent):
        ...         return "Meet the other agent: answer 'bridge' or 'station'."
        ...     def observe_text(self, agent):
        ...         return "Where do you go?"
        ...     def act_all(self, actions):
        ...         met = len(set(actions.values())) == 1
        ...         return Outcome(rewards=dict.fromkeys(actions, float(met)), done=True)
    """

    _parallelizable = True

    def act_all(self, actions: dict[str, str]) -> Outcome:
        """Apply the actions of all live agents, in the order of `agents`. Never raise because of an illegal text."""
        raise NotImplementedError(f"{type(self).__name__} must define act_all(self, actions)")

    def reset(
        self, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Observation], dict[str, dict[str, Any]]]:
        """Start an episode, as `TurnEnv.reset` does. Returns observations and infos by agent."""
        TextGame._check_names(self)  # because `self._begin` may be hidden
        self._begin(seed, options)
        if self.setup(self.rng) is not None:
            raise ValueError(f"{self}: setup returned a first agent, but all agents act together. Return None")
        TextGame._check_names(self)
        for agent in self.agents:
            self._list_legal_actions(agent)
        return {agent: self.observe(agent) for agent in self.agents}, dict(self.infos)

    def step(self, actions: Mapping[str, str]) -> Steps:
        """Play one round with one text per live agent."""
        if not self.agents:
            raise RuntimeError(f"{self}: no episode is running. Call reset() before step()")
        if set(actions) != set(self.agents):
            raise ValueError(f"{self}: got actions of {list(actions)}. Pass one for each of {self.agents}")
        acting = list(self.agents)
        texts = {agent: self._text(agent, actions[agent]) for agent in acting}
        outcome = self.act_all(dict(texts))
        self.infos = {agent: without(self.infos[agent], "legal_actions") for agent in acting}
        rewards = dict.fromkeys(acting, 0.0) | self._checked_rewards(outcome, "act_all(...)")
        if outcome.next is not None:
            raise ValueError(f"{self}: Outcome.next is {outcome.next!r}, but all agents act together. Leave it None")
        self.num_turns += len(acting)
        self._transcript.append((texts, rewards))
        done, cut = self._ends(outcome)
        observations = {agent: self.observe(agent) for agent in acting}
        self.agents = [agent for agent in acting if agent not in done and agent not in cut]
        for agent in self.agents:
            self._list_legal_actions(agent)
        terminated = {agent: agent in done for agent in acting}
        truncated = {agent: agent in cut for agent in acting}
        return observations, rewards, terminated, truncated, dict(self.infos)


@cache
def _methods(cls: type) -> tuple[frozenset[str], frozenset[str], tuple[str, ...]]:
    """Return a game's methods, the private ones of this package or PettingZoo, and the names that hide a method.

    A game may override public methods, but only by methods.
    """
    private: set[str] = set()
    public: set[str] = set()
    defined: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in ("forge_agents", "pettingzoo"):
            methods = {name for name, value in vars(base).items() if callable(value) and not name.startswith("__")}
            private |= {name for name in methods if name.startswith("_")}
            public |= {name for name in methods if not name.startswith("_")}
        else:
            defined |= vars(base).keys()
    every = frozenset(name for name in dir(cls) if callable(getattr(cls, name, None)))
    hiding = defined & private | (defined & public) - every
    return every, frozenset(private), tuple(sorted(hiding))


def without(info: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a copy of `info` without one entry. A copy, because a reader may hold the original."""
    return {key: value for key, value in info.items() if key != name}


def listed_actions(info: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the legal actions in an agent's info, which may be an array or a set. Empty if there are none."""
    listed = info.get("legal_actions")
    if isinstance(listed, str):
        raise TypeError(f"the info of an agent has the text {listed!r:.80} as its legal_actions. Give a list of texts")
    actions = () if listed is None else tuple(map(str, listed))
    return tuple(sorted(actions)) if isinstance(listed, Set) else actions  # the order of a set differs by process


def sides_of(env: Any) -> tuple[tuple[str, ...], ...]:
    """Return the `sides` of an environment. Empty if its attribute of that name is not a list of lists of strings."""
    sides = hook(env, "sides")
    if not isinstance(sides, (list, tuple)) or not all(isinstance(side, (list, tuple)) for side in sides):
        return ()
    return tuple(map(tuple, sides)) if all(isinstance(agent, str) for side in sides for agent in side) else ()


def acts_together(env: Any) -> bool:
    """Return whether all agents decide before any decision is played, also in a game that was made turn-based."""
    game = env.unwrapped  # in a worker, the attribute says it
    return isinstance(game, ParallelEnv) or getattr(game, "acts_together", None) is True


def can_fork(env: Any) -> bool:
    """Return whether the class of an environment, without its wrappers, has the method `fork`."""
    game = env.unwrapped  # in a worker, the attribute says it
    return hasattr(type(game), "fork") and getattr(game, "can_fork", None) is not False


def forked(env: Any) -> Any:
    """Return an independent copy, by the environment's `fork` or `copy.deepcopy`."""
    return env.fork() if hasattr(type(env), "fork") else copy.deepcopy(env)


def hook(env: Any, name: str) -> Any:
    """Return an optional attribute of an environment, or of the unwrapped one if a wrapper hides it, else None."""
    return getattr(env, name, None) or getattr(env.unwrapped, name, None)


def may_be_silent(env: Any) -> bool:
    """Return whether the environment judges an empty answer of an agent that cannot or will not answer.

    It does in games that are tagged as zero-sum or competitive, and with a true `judges_silence`.
    """
    has_rivals = not RIVAL_TAGS.isdisjoint(getattr(getattr(env, "spec", None), "tags", ()))
    return has_rivals or hook(env, "judges_silence") is True


def visible_action(env: Any, reasoning: str, answer: str) -> str:
    """Return the action for `env`: the answer, with the reasoning if `env.observes_reasoning` is True."""
    # `is True`, because some environments return a value for any attribute
    return join_reasoning(reasoning, answer) if reasoning and hook(env, "observes_reasoning") is True else answer
