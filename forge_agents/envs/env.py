"""The base of text environments: write what the game is, and PettingZoo's bookkeeping is done for you.

In: a game's `setup`, `instructions`, `observe_text` and `act`. Out: a `pettingzoo.AECEnv` whose observations and
actions are text. Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pettingzoo import AECEnv

from forge_agents.envs._text_game import Observation, Outcome, TextGame, TextSpace, without_legal, writable

__all__ = ["Observation", "Outcome", "TextSpace", "TurnEnv", "writable"]


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
        self._skip_agent_selection = None
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
        outcome = self._play(agent, text)
        if "legal_actions" in self.infos[agent]:
            self.infos[agent] = without_legal(self.infos[agent])
        rewards = self._checked_rewards(outcome, f"act({agent!r}, ...)")
        self.num_turns += 1
        self.rewards = dict.fromkeys(self.agents, 0.0) | rewards
        self._cumulative_rewards[agent] = 0.0
        for seat, reward in rewards.items():
            self._cumulative_rewards[seat] += reward
        self._transcript.append(({agent: text}, rewards))
        done, cut = self._ends(outcome)
        for seat in done:
            self.terminations[seat] = True
        for seat in cut:
            self.truncations[seat] = True
        out = frozenset((*done, *cut))
        if len(out) < len(self.agents):
            self.agent_selection = self._following(agent, outcome.next, out)
            self._legal(self.agent_selection)
        if out:
            self._deads_step_first()

    def _play(self, agent: str, action: str) -> Outcome:
        """What a decision led to. Families of games, such as those with tools, come between here and `act`."""
        return self.act(agent, action)

    def _following(self, agent: str, chosen: str | None, out: frozenset[str]) -> str:
        """Who decides next among those that play on."""
        if chosen is not None:
            self._check_live(chosen, "Outcome.next is", out)
            return chosen
        place = self._order.index(agent) + 1
        if len(self.agents) == len(self._order) and not out:
            return self._order[place % len(self._order)]
        later = self._order[place:] + self._order[:place]
        return next(seat for seat in later if seat in self.agents and seat not in out)

    def _check_live(self, agent: str, what: str, out: frozenset[str] = frozenset()) -> None:
        self._check_agents([agent], what)
        if agent not in self.agents or agent in out:
            raise ValueError(f"{self}: {what} {agent!r}, which does not play any more; name a live agent")
