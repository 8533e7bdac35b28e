"""The base of text environments: write what the game is, and PettingZoo's bookkeeping is done for you.

In: a game's `setup`, `instructions`, `observe_text` and `act`. Out: a `pettingzoo.AECEnv` whose observations and
actions are text. Waits for nothing.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Text
from pettingzoo import AECEnv

from forge_agents.errors import did_you_mean
from forge_agents.registry import EnvSpec, check_max_turns


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one action led to."""

    next: str | None = None
    """Who decides next; None means the seat after this one in `possible_agents`, round and round."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Reward of this step by agent; agents that are not named get 0. Finite."""
    done: bool = False
    """The game is over for everybody."""
    truncated: bool = False
    """The game is cut off for everybody before its natural end."""
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


class TurnEnv(AECEnv):  # type: ignore[misc]  # PettingZoo ships no types
    """A text game whose agents decide one at a time.

    A subclass sets `possible_agents` and writes `setup`, `instructions`, `observe_text` and `act`. This class keeps
    PettingZoo's state (spaces, rewards and their sums, terminations, dead steps, infos), the turn limit and the
    episode's random generator. All state of the game belongs on `self`, so that `copy.deepcopy` forks it.

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

    possible_agents: Sequence[str]
    max_turns: int | None = None
    max_action_chars: int = 4096
    """Upper bound of the action space. Longer actions still reach `act`, which decides what they are worth."""
    max_observation_chars: int = 32768
    """Upper bound of the observation space. A longer observation is an error of the environment."""
    spec: EnvSpec | None = None
    """Set by `register` and `make`."""
    render_mode: str = "ansi"
    agents: list[str] = []  # PettingZoo's: empty until `reset`, then the instance's own
    episode_seed: int | None = None
    """Seed of the current episode, also where none was given to `reset`."""

    def __init__(self, *, max_turns: int | None = None) -> None:
        super().__init__()
        check_max_turns(max_turns, type(self).__name__)
        if max_turns is not None:
            self.max_turns = max_turns

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.spec = None  # a subclass is not what its base was registered as
        if "metadata" not in vars(cls):
            cls.metadata = {"name": cls.__name__, "render_modes": ["ansi"], "is_parallelizable": False}

    # ---- what a game writes

    def setup(self, rng: np.random.Generator) -> str | None:
        """Start an episode.

        Args:
            rng: The episode's generator, also `self.rng` from here on. Use no other randomness.

        Returns:
            Who decides first; None means the first of `possible_agents`. May fill `self.infos[agent]`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define setup(self, rng)")

    def instructions(self, agent: str) -> str:
        """The system prompt of a seat: rules and how to answer. Constant during an episode."""
        raise NotImplementedError(f"{type(self).__name__} must define instructions(self, agent)")

    def observe_text(self, agent: str) -> str:
        """What a seat sees now and has not seen yet. Changes nothing: it may be called any number of times."""
        raise NotImplementedError(f"{type(self).__name__} must define observe_text(self, agent)")

    def act(self, agent: str, action: str) -> Outcome:
        """Play one decision. Any text arrives here; illegal text is an outcome, never an exception."""
        raise NotImplementedError(f"{type(self).__name__} must define act(self, agent, action)")

    def legal_actions(self, agent: str) -> Sequence[str] | None:
        """Texts that are legal now, or None where they cannot be listed.

        The deciding agent's are in `infos[agent]["legal_actions"]`; random players and checks draw from them.
        """
        return None

    # ---- PettingZoo

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> None:
        """Start an episode.

        Args:
            seed: Non-negative; the same seed gives the same episode. None draws a fresh one.
            options: Available to the game as `self.options`.
        """
        seats = list(self.possible_agents)
        if not seats or len(set(seats)) < len(seats):
            raise ValueError(f"{self}: possible_agents is {seats}; name one or more different agents")
        self.episode_seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else int(seed)
        self.rng = np.random.default_rng(self.episode_seed)
        self.options: dict[str, Any] = dict(options or {})
        self.agents = seats
        self.rewards = dict.fromkeys(seats, 0.0)
        self._cumulative_rewards = dict.fromkeys(seats, 0.0)
        self.terminations = dict.fromkeys(seats, False)
        self.truncations = dict.fromkeys(seats, False)
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in seats}
        self._skip_agent_selection = None
        self.num_turns = 0
        self._limit = self.max_turns if self.max_turns is not None else (self.spec.max_turns if self.spec else None)
        self._transcript: list[str] = []
        self.agent_selection = seats[0]
        first = self.setup(self.rng)
        if first is not None:
            self._check_agents([first], "setup returned")
            self.agent_selection = first
        self._offer_legal_actions()

    def step(self, action: str | None) -> None:
        """Play the decision of `agent_selection`; None for an agent that is out, as PettingZoo asks."""
        if not self.agents:
            raise RuntimeError(f"{self}: no episode is running; call reset() before step()")
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        if not isinstance(action, str):
            raise TypeError(f"{self}: {agent!r} must act with text, got {type(action).__name__}")
        text = writable(action)
        outcome = self._decide(agent, text)
        rewards = self._checked_rewards(agent, outcome)
        self.num_turns += 1
        self._cumulative_rewards[agent] = 0.0
        self.rewards = dict.fromkeys(self.agents, 0.0) | rewards
        self._accumulate_rewards()
        for seat, info in outcome.info.items():
            self.infos[seat] = {**self.infos[seat], **info}
        at_limit = self._limit is not None and self.num_turns >= self._limit
        truncated = outcome.truncated or (at_limit and not outcome.done)
        self.terminations = dict.fromkeys(self.agents, outcome.done)
        self.truncations = dict.fromkeys(self.agents, truncated)
        self._transcript.append(f"[{agent}] {text}\n" + "".join(f"  {a} {r:+g}\n" for a, r in rewards.items() if r))
        following = self.possible_agents[(list(self.possible_agents).index(agent) + 1) % len(self.possible_agents)]
        self.agent_selection = following if outcome.next is None else outcome.next
        self._offer_legal_actions()
        self._deads_step_first()

    def observe(self, agent: str) -> Observation:
        """What `agent` sees now.

        Raises:
            TypeError, ValueError: The game's text is no string, or longer than `max_observation_chars`.
        """
        text = self.observe_text(agent)
        if not isinstance(text, str):
            raise TypeError(f"{self}: observe_text({agent!r}) returned {type(text).__name__}; return a string")
        if len(text) > self.max_observation_chars:
            raise ValueError(
                f"{self}: observation of {agent!r} has {len(text)} characters, the space allows "
                f"{self.max_observation_chars}; shorten it or raise max_observation_chars"
            )
        return Observation(text)

    def observation_space(self, agent: str) -> TextSpace:
        """Text of at most `max_observation_chars`."""
        return self._space("_observation_spaces", agent, self.max_observation_chars)

    def action_space(self, agent: str) -> TextSpace:
        """Text of at most `max_action_chars`."""
        return self._space("_action_spaces", agent, self.max_action_chars)

    def render(self) -> str:
        """The episode so far: who said what, and the rewards."""
        return "".join(getattr(self, "_transcript", []))

    def close(self) -> None:
        """Nothing to release. Games that hold something override this."""

    def __str__(self) -> str:
        return self.spec.id if self.spec else type(self).__name__

    def _decide(self, agent: str, action: str) -> Outcome:
        """What a decision led to. Families of games, such as those with tools, come between here and `act`."""
        return self.act(agent, action)

    # ---- checks

    def _space(self, store: str, agent: str, max_chars: int) -> TextSpace:
        spaces: dict[str, TextSpace] = self.__dict__.setdefault(store, {})
        if agent not in spaces:
            self._check_agents([agent], "a space was asked for")
            spaces[agent] = TextSpace(max_chars)
        return spaces[agent]

    def _checked_rewards(self, agent: str, outcome: object) -> dict[str, float]:
        if not isinstance(outcome, Outcome):
            raise TypeError(f"{self}: act({agent!r}, ...) returned {type(outcome).__name__}; return an Outcome")
        self._check_agents(outcome.rewards, "Outcome.rewards names")
        self._check_agents(outcome.info, "Outcome.info names")
        self._check_agents([] if outcome.next is None else [outcome.next], "Outcome.next is")
        rewards: Mapping[str, Any] = outcome.rewards  # what a game really returned
        for seat, reward in rewards.items():
            if not isinstance(reward, (int, float, np.number, np.bool_)) or not math.isfinite(reward):
                raise ValueError(
                    f"{self}: reward of {seat!r} is {reward!r} after {agent!r} acted; rewards must be finite numbers"
                )
        return {seat: float(reward) for seat, reward in outcome.rewards.items()}

    def _check_agents(self, names: Sequence[str] | Mapping[str, Any], what: str) -> None:
        for name in names:
            if name not in self.possible_agents:
                known = list(self.possible_agents)
                raise ValueError(f"{self}: {what} {name!r}; the agents are {known}.{did_you_mean(str(name), known)}")

    def _offer_legal_actions(self) -> None:
        for agent in self.agents:
            info = {key: value for key, value in self.infos[agent].items() if key != "legal_actions"}
            live = not (self.terminations[agent] or self.truncations[agent])
            legal = self.legal_actions(agent) if live and agent == self.agent_selection else None
            self.infos[agent] = info if legal is None else {**info, "legal_actions": list(legal)}
