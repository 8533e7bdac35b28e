"""Text environments: write what the game is, and PettingZoo's bookkeeping is done for you.

In: a game's `setup`, `instructions`, `observe_text`, and `act` (agents decide one at a time: `TurnEnv`) or `act_all`
(all decide at once: `ParallelTurnEnv`). Out: a `pettingzoo.AECEnv` or `ParallelEnv` whose observations and actions are
text. Waits for nothing.
"""

from __future__ import annotations

import copy
import json
import math
import string
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
from gymnasium.spaces import Text
from pettingzoo import AECEnv, ParallelEnv

from forge_agents.envs.spec import EnvSpec, check_max_turns
from forge_agents.errors import did_you_mean
from forge_agents.files import is_shallow

HOOKS = (
    "instructions", "tool_schemas", "secrets", "swap_secrets", "legal_actions", "refusal", "about_answer", "compact",
)
"""Methods that environments may have beside PettingZoo's; each takes an agent first."""

CONVERSATION = "conversation"
"""The info of a deciding agent in an environment that lets a seat hold several conversations, or writes whole messages.

None, or absent, where the agent's main conversation goes on with the observation. Else a
mapping: ``messages``, each with ``role`` ("system", "user" or "assistant") and ``content``, in the place of
instructions and observation; ``after``, which of the agent's decisions of this episode they go on from, counted from 0
(from one of the main conversation, or one that something has gone on from already, a branch begins: a side question),
or None where they begin a conversation; ``only_results``, whether they are results of its own tool calls; ``tools``,
the schemas of those that this answer may call, where these are others than the seat's; and, where they are wished
for, ``max_tokens`` (less than the policy's own counts), ``stop`` (more texts that end the answer) and ``asked`` (other
wishes about sampling, which are not followed). `Turn.new_messages` keeps the messages.
"""


_MAX_ARRAY = 64
"""Longer arrays in infos, such as masks, are kept as NumPy abbreviates them."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one action, or the actions of all, led to."""

    next: str | None = None
    """Who decides next; None means the next live seat in `possible_agents`, round and round. Simultaneous: None."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Reward of this step by agent; agents that are not named get 0. Finite."""
    done: bool | Collection[str] = False
    """The game is over: for everybody (True), or for the agents named; the others play on."""
    truncated: bool | Collection[str] = False
    """The game is cut off before its natural end: for everybody (True), or for the agents named."""
    info: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By agent; merged into `infos[agent]`, where it stays until replaced. JSON-safe. Never shown to the agents."""


class Observation(str):
    """A string that also carries the dtype of its space, which PettingZoo's `api_test` compares."""

    __slots__ = ()
    dtype: ClassVar[np.dtype[np.str_]] = np.dtype(str)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # plain text wherever it travels


class TextSpace(Text):
    """Text of bounded length, in any characters that UTF-8 can write.

    Models write any script, so membership asks for the length and valid Unicode only. Samples are printable ASCII and
    newlines, which are also the `characters` that flattening knows.

    Args:
        max_chars: Longest text, in characters. The shortest is empty.
    """

    def __init__(self, max_chars: int) -> None:
        printable = string.digits + string.ascii_letters + string.punctuation + " \n"
        super().__init__(max_chars, min_length=0, charset=printable)

    def contains(self, x: Any) -> bool:
        """Whether `x` is text of allowed length."""
        return isinstance(x, str) and len(x) <= self.max_length and x == writable(x)


def writable(text: str) -> str:
    """`text` with the code points that no encoding can write (lone surrogates) replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)
    return text


def observation(env: object, agent: str, text: object, method: str, max_chars: int) -> Observation:
    """A text that `method` gave as what `agent` sees.

    Raises:
        TypeError, ValueError: It is no string, or longer than its space allows.
    """
    if not isinstance(text, str):
        raise TypeError(f"{env}: {method} returned {type(text).__name__} for {agent!r}; return a string")
    if len(text) > max_chars:
        raise ValueError(
            f"{env}: observation of {agent!r} has {len(text)} characters, the space allows {max_chars}; shorten it or "
            "raise max_observation_chars"
        )
    return Observation(text)


def as_json(value: Any) -> Any:
    """A plain value, of a dataclass or a model of pydantic its fields; of one that is nested without end its JSON.

    NumPy's numbers and truth values stay what they are, for anybody would take "False" for true.
    """
    try:
        text = json.dumps(value, default=_plain)
        plain = json.loads(text)
    except (TypeError, ValueError, RecursionError) as cause:  # keys that JSON does not have, a value that holds itself
        try:
            return str(value)
        except (ValueError, RecursionError):  # Python writes no number of more than 4300 digits
            return f"a value of type {type(value).__name__} that cannot be written ({cause})"
    return plain if is_shallow(plain) else text


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.size <= _MAX_ARRAY:
        return value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if callable(plain := getattr(type(value), "model_dump", None)):  # of pydantic
        return plain(value)
    return sorted(value, key=str) if isinstance(value, set | frozenset) else str(value)


class Forkable:
    """Branching, of what keeps all its state on itself."""

    def fork(self) -> Self:
        """An independent copy in the same state: it continues like this one, and neither notices the other."""
        return copy.deepcopy(self)

    def snapshot(self) -> Mapping[str, Any]:
        """The whole state, for `restore` of this or another instance of the class."""
        return copy.deepcopy(vars(self))

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Go back to a `snapshot`, which can be used any number of times."""
        self.__dict__ = copy.deepcopy(dict(snapshot))


class TextGame(Forkable):
    """The part of a text environment that does not depend on who decides when; see `TurnEnv`, `ParallelTurnEnv`."""

    possible_agents: Sequence[str]
    """All seats that there may be, in their order."""
    min_agents: int | None = None
    """Fewest seats that ``reset(options={"num_agents": n})`` may ask for; None: every episode has all seats."""
    sides: Sequence[Sequence[str]] = ()
    """Seats that win and lose together, where sides play against each other; empty: each seat for itself. A benchmark
    gives a player a whole side."""
    max_turns: int | None = None
    max_reward: float | None = None
    """The most that a seat can earn in an episode, where that is known: a trainer whose episodes all earn it has solved
    the game and ends."""
    observes_reasoning: bool = False
    """Whether actions arrive with the thought before them, as ``<think>``, thought, ``</think>``, answer. Otherwise a
    game is given answers alone, so that nobody reads what another seat thought."""
    max_action_chars: int = 4096
    """Upper bound of the action space. Longer actions still reach the game, which decides what they are worth."""
    max_observation_chars: int = 32768
    """Upper bound of the observation space. A longer observation is an error of the environment."""
    spec: EnvSpec | None = None
    """Set by `register` and `make`."""
    render_mode: str = "ansi"
    agents: list[str] = []  # PettingZoo's: empty until `reset`, then the instance's own
    episode_seed: int | None = None
    """Seed of the current episode, also where none was given to `reset`."""
    _parallelizable: ClassVar[bool]

    def __init__(self, *, max_turns: int | None = None) -> None:
        super().__init__()
        if max_turns is not None:
            check_max_turns(max_turns, type(self).__name__)
            self.max_turns = max_turns

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.spec = None  # a subclass is not what its base was registered as
        if "metadata" not in vars(cls) and hasattr(cls, "_parallelizable"):
            flags = {"render_modes": ["ansi"], "is_parallelizable": cls._parallelizable}
            cls.metadata = {"name": cls.__name__, **flags}  # type: ignore[attr-defined]  # PettingZoo's attribute

    # ---- what a game writes

    def take_seats(self, rng: np.random.Generator) -> Sequence[str]:
        """Who takes part in this episode, asked before `setup`; `self.agents` from then on.

        Unless overridden: the first ``options["num_agents"]`` of `possible_agents`, at least `min_agents`; without
        that option all. A game that draws its number of seats overrides this.
        """
        number, most = self.options.get("num_agents"), len(self.possible_agents)
        if number is None:
            return self.possible_agents
        fewest = most if self.min_agents is None else self.min_agents
        if type(number) is not int or not fewest <= number <= most:
            allowed = f"{fewest} to {most}" if fewest < most else f"{most}, no other number,"
            raise ValueError(f"{self}: num_agents={number!r} arrived; {allowed} seats can play")
        return self.possible_agents[:number]

    def setup(self, rng: np.random.Generator) -> str | None:
        """Start an episode; `self.agents` says who takes part.

        Args:
            rng: The episode's generator, also `self.rng` from here on. Use no other randomness.

        Returns:
            Who decides first; None means the first of `agents`. May fill `self.infos[agent]`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define setup(self, rng)")

    def instructions(self, agent: str) -> str:
        """The system prompt of a seat: rules and how to answer. Constant during an episode."""
        raise NotImplementedError(f"{type(self).__name__} must define instructions(self, agent)")

    def observe_text(self, agent: str) -> str:
        """What a seat sees now and has not seen yet. Changes nothing: it may be called any number of times."""
        raise NotImplementedError(f"{type(self).__name__} must define observe_text(self, agent)")

    def legal_actions(self, agent: str) -> Sequence[str] | None:
        """Texts that are legal now, or None where they cannot be listed.

        A deciding agent's are in `infos[agent]["legal_actions"]`; random players and checks draw from them, and a
        policy with `constrain_actions` writes nothing else.
        """
        return None

    def compact(self, agent: str, left_out: Sequence[tuple[str, str]]) -> str | None:
        """What `agent` should know of turns that its conversation has no room for any more.

        Asked where the seat's policy has ``context="window"``. Changes nothing; tells nothing that the seat has not
        seen.

        Args:
            left_out: What the seat observed and answered, from its first turn on. The first observation stays.

        Returns:
            A short text, which the model reads in their place; None for a mark that something is left out.
        """
        return None

    # ---- what every PettingZoo environment has

    def observe(self, agent: str) -> Observation:
        """What `agent` sees now.

        Raises:
            TypeError, ValueError: The game's text is no string, or longer than `max_observation_chars`.
        """
        return observation(self, agent, self.observe_text(agent), "observe_text", self.max_observation_chars)

    def observation_space(self, agent: str) -> TextSpace:
        """Text of at most `max_observation_chars`."""
        return self._space("_observation_spaces", agent, self.max_observation_chars)

    def action_space(self, agent: str) -> TextSpace:
        """Text of at most `max_action_chars`."""
        return self._space("_action_spaces", agent, self.max_action_chars)

    def render(self) -> str:
        """The episode so far: who said what, and the rewards."""
        lines = []
        for texts, rewards in getattr(self, "_transcript", ()):
            lines += [f"[{agent}] {text}\n" for agent, text in texts.items()]
            lines += [f"  {agent} {reward:+g}\n" for agent, reward in rewards.items() if reward]
        return "".join(lines)

    def close(self) -> None:
        """Nothing to release. Games that hold something override this."""

    def __str__(self) -> str:
        return self.spec.id if self.spec else type(self).__name__

    # ---- for the two kinds of game

    def _begin(self, seed: int | None, options: Mapping[str, Any] | None) -> None:
        """A new episode's generator, seats and empty accounts."""
        known = list(self.possible_agents)
        if not known or len(set(known)) < len(known) or not all(isinstance(agent, str) for agent in known):
            raise ValueError(f"{self}: possible_agents is {known}; name one or more different agents, by texts")
        self.episode_seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else int(seed)
        self.rng = np.random.default_rng(self.episode_seed)
        self.options: dict[str, Any] = dict(options or {})
        seats = list(self.take_seats(self.rng))
        self._check_agents(seats, "take_seats named")
        if not seats or len(set(seats)) < len(seats):
            raise ValueError(f"{self}: take_seats returned {seats}; name one or more different agents")
        self.agents = seats
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in seats}
        self.num_turns = 0
        self._limit = self.max_turns if self.max_turns is not None else (self.spec.max_turns if self.spec else None)
        self._transcript: list[tuple[dict[str, str], dict[str, float]]] = []

    def _check_names(self) -> None:
        """A game may not keep state under the name of a method, such as `last`, which PettingZoo's loop calls."""
        kind = type(self)
        taken = [n for n, value in vars(self).items() if callable(getattr(kind, n, None)) and not callable(value)]
        if taken:
            raise ValueError(f"{self}: setup sets self.{taken[0]}, which hides a method; give it another name")

    def _space(self, store: str, agent: str, max_chars: int) -> TextSpace:
        spaces: dict[str, TextSpace] = self.__dict__.setdefault(store, {})
        if agent not in spaces:
            self._check_agents([agent], "a space was asked for")
            spaces[agent] = TextSpace(max_chars)
        return spaces[agent]

    def _text(self, agent: str, action: object) -> str:
        if not isinstance(action, str):
            raise TypeError(f"{self}: {agent!r} must act with text, got {type(action).__name__}")
        return writable(action)

    def _forget_fault(self, agent: str) -> None:
        """What was illegal in its decision before says nothing of the one that comes."""
        if "illegal" in self.infos[agent]:
            self.infos[agent] = without(self.infos[agent], "illegal")

    def _checked_rewards(self, outcome: object, method: str) -> dict[str, float]:
        """An outcome's rewards, and its infos merged."""
        if not isinstance(outcome, Outcome):
            raise TypeError(f"{self}: {method} returned {type(outcome).__name__}; return an Outcome")
        returned: Mapping[str, Any] = outcome.rewards  # what a game really gave
        rewards: dict[str, float] = {}
        for seat, reward in returned.items():
            if not isinstance(reward, (int, float, np.number, np.bool_)) or not math.isfinite(reward):
                raise ValueError(
                    f"{self}: reward of {seat!r} is {reward!r} after {method}; rewards must be finite numbers"
                )
            if seat in self.agents:
                rewards[seat] = float(reward)
                continue
            self._check_agents([seat], "Outcome.rewards names")
            if reward:
                raise ValueError(
                    f"{self}: {method} rewards {seat!r} with {reward!r}, which is out of the game; reward an agent no "
                    "later than in the outcome that ends its game, or keep it in until the end"
                )
        for seat, info in outcome.info.items():
            self._check_agents([seat], "Outcome.info names")
            if seat not in self.agents:
                raise ValueError(f"{self}: {method} informs {seat!r}, which is out of the game; inform self.agents")
            self.infos[seat] = {**self.infos[seat], **info}  # a new one: a reader may hold the old
        return rewards

    def _named(self, who: bool | Collection[str], field_name: str) -> list[str]:
        """The agents whose game an outcome ends."""
        if isinstance(who, (bool, np.bool_)):
            return list(self.agents) if who else []
        if isinstance(who, str) or not isinstance(who, Collection):
            raise TypeError(f"{self}: Outcome.{field_name} is {who!r}; give True, False or a collection of agents")
        self._check_agents(who, f"Outcome.{field_name} names")
        return [agent for agent in self.agents if agent in who]

    def _ends(self, outcome: Outcome) -> tuple[list[str], list[str]]:
        """Whose game is over and whose is cut off; what is over is not cut off by the turn limit."""
        at_limit = self._limit is not None and self.num_turns >= self._limit
        if outcome.done is False and outcome.truncated is False and not at_limit:
            return [], []
        done = self._named(outcome.done, "done")
        cut = self._named(outcome.truncated, "truncated")
        return done, [agent for agent in self.agents if agent in cut or (at_limit and agent not in done)]

    def _legal(self, agent: str) -> None:
        """List the legal actions of an agent that decides next."""
        legal = self.legal_actions(agent)
        if legal is not None:
            self.infos[agent] = {**self.infos[agent], "legal_actions": list(legal)}

    def _check_agents(self, names: Iterable[str], what: str) -> None:
        for name in names:
            if name not in self.possible_agents:
                known = list(self.possible_agents)
                raise ValueError(f"{self}: {what} {name!r}; the agents are {known}.{did_you_mean(str(name), known)}")


class TurnEnv(TextGame, AECEnv):  # type: ignore[misc]  # PettingZoo ships no types
    """A text game whose agents decide one at a time.

    A subclass sets `possible_agents` and writes `setup`, `instructions`, `observe_text` and `act`. This class keeps
    PettingZoo's state (spaces, rewards and their sums, terminations, dead steps, infos), the turn limit and the
    episode's random generator. All state of the game belongs on `self`, so that `fork` copies it.

    Two optional methods let `check_env` prove that a seat reads no secret: ``secrets(agent) -> Sequence[str]``, the
    texts that `agent` must not be able to read now, and ``swap_secrets(agent, rng) -> None``, which replaces all that
    `agent` does not know by something else that fits what it has seen.

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
        max_turns: Decisions of all agents together after which the episode is truncated. None takes the class's, then
            the registered limit.
    """

    _parallelizable = False

    def act(self, agent: str, action: str) -> Outcome:
        """Play one decision. Any text arrives here; illegal text is an outcome, never an exception."""
        raise NotImplementedError(f"{type(self).__name__} must define act(self, agent, action)")

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> None:
        """Start an episode.

        Args:
            seed: Non-negative; the same seed gives the same episode. None draws a fresh one.
            options: Available to the game as `self.options`; ``num_agents`` says how many seats take part.
        """
        self._begin(seed, options)
        self._order = tuple(self.agents)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self._skip_agent_selection = None  # where PettingZoo's dead steps keep their place
        self.agent_selection = self.agents[0]
        first = self.setup(self.rng)
        if first is not None:
            self._check_live(first, "setup returned")
            self.agent_selection = first
        self._check_names()
        self._legal(self.agent_selection)

    def step(self, action: str | None) -> None:
        """Play the decision of `agent_selection`; None for an agent that is out, as PettingZoo asks."""
        if not self.agents:
            raise RuntimeError(f"{self}: no episode is running; call reset() before step()")
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        text = self._text(agent, action)
        self._forget_fault(agent)
        outcome = self._play(agent, text)
        if "legal_actions" in self.infos[agent]:
            self.infos[agent] = without(self.infos[agent], "legal_actions")
        rewards = self._checked_rewards(outcome, f"act({agent!r}, ...)")
        self.num_turns += 1
        self.rewards = dict.fromkeys(self.agents, 0.0) | rewards
        self._cumulative_rewards[agent] = 0.0  # `last` tells an agent what it earned since its own last decision
        for seat, reward in rewards.items():
            self._cumulative_rewards[seat] += reward
        self._transcript.append(({agent: text}, rewards))
        done, cut = self._ends(outcome)
        self.terminations.update(dict.fromkeys(done, True))
        self.truncations.update(dict.fromkeys(cut, True))
        out = frozenset((*done, *cut))
        if len(out) < len(self.agents):
            self.agent_selection = self._following(agent, outcome.next, out)
            self._legal(self.agent_selection)
        if out:
            self._deads_step_first()  # PettingZoo's rule: who is out takes a step of None before anybody plays on

    def _play(self, agent: str, action: str) -> Outcome:
        """What a decision led to. Families of games, such as those with tools, come between here and `act`."""
        return self.act(agent, action)

    def _following(self, agent: str, chosen: str | None, out: frozenset[str]) -> str:
        """Who decides next among those that play on."""
        if chosen is not None:
            self._check_live(chosen, "Outcome.next is", out)
            return chosen
        place = self._order.index(agent) + 1
        # Most steps of most games: nobody is out, and nothing need be searched.
        if len(self.agents) == len(self._order) and not out:
            return self._order[place % len(self._order)]
        later = self._order[place:] + self._order[:place]
        return next(seat for seat in later if seat in self.agents and seat not in out)

    def _check_live(self, agent: str, what: str, out: frozenset[str] = frozenset()) -> None:
        self._check_agents([agent], what)
        if agent not in self.agents or agent in out:
            raise ValueError(f"{self}: {what} {agent!r}, which does not play any more; name a live agent")


Steps: TypeAlias = tuple[
    dict[str, Observation], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]
]
"""Observations, rewards, terminations, truncations and infos by agent."""


class ParallelTurnEnv(TextGame, ParallelEnv):  # type: ignore[misc]  # PettingZoo ships no types
    """A text game whose agents decide at the same time, none knowing what the others do in this round.

    A subclass sets `possible_agents` and writes `setup`, `instructions`, `observe_text` and `act_all`; all else is as
    in `TurnEnv`, the hooks of `check_env` and `max_turns` included. An agent whose game is over leaves `agents`; the
    round in which that happens is the last that reports it. A turn is one decision, so a round of n agents counts as n
    of `max_turns`. `pettingzoo.utils.conversions.parallel_to_aec` makes a turn-based environment of it.

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
    """

    _parallelizable = True

    def act_all(self, actions: dict[str, str]) -> Outcome:
        """Play the decisions of all live agents, in the order of `agents`. Illegal text is never an exception."""
        raise NotImplementedError(f"{type(self).__name__} must define act_all(self, actions)")

    def reset(
        self, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Observation], dict[str, dict[str, Any]]]:
        """Start an episode, as `TurnEnv.reset` does. Returns observations and infos by agent."""
        self._begin(seed, options)
        if self.setup(self.rng) is not None:
            raise ValueError(f"{self}: setup named who decides first, but all decide together; return None")
        self._check_names()
        for agent in self.agents:
            self._legal(agent)
        return {agent: self.observe(agent) for agent in self.agents}, dict(self.infos)

    def step(self, actions: Mapping[str, str]) -> Steps:
        """Play one round of one text per live agent. Returns what became of the agents that acted."""
        if not self.agents:
            raise RuntimeError(f"{self}: no episode is running; call reset() before step()")
        if set(actions) != set(self.agents):
            raise ValueError(f"{self}: actions of {list(actions)} arrived; send one for each of {self.agents}")
        acting = list(self.agents)
        texts = {agent: self._text(agent, actions[agent]) for agent in acting}
        for agent in acting:
            self._forget_fault(agent)
        outcome = self.act_all(dict(texts))
        self.infos = {agent: without(self.infos[agent], "legal_actions") for agent in acting}
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


def without(info: Mapping[str, Any], name: str) -> dict[str, Any]:
    """`info` without an entry that was of an earlier decision; a new one, because a reader may hold the old."""
    return {key: value for key, value in info.items() if key != name}


def sides_of(env: Any) -> tuple[tuple[str, ...], ...]:
    """The `sides` that an environment names; none where it has something else by that name."""
    sides = hook(env, "sides")
    if not isinstance(sides, (list, tuple)) or not all(isinstance(side, (list, tuple)) for side in sides):
        return ()
    return tuple(map(tuple, sides)) if all(isinstance(seat, str) for side in sides for seat in side) else ()


def hook(env: Any, name: str) -> Any:
    """The method `name` of an environment or, where a conversion or wrapper hides it, of what is inside; else None."""
    return getattr(env, name, None) or getattr(env.unwrapped, name, None)
