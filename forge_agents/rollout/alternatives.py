"""Copies of an episode right before single decisions, from which the episode is played again with other answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from forge_agents.rollout.players import Decision
from forge_agents.rollout.policy_engine import sampling_seed
from forge_agents.types import Episode, EpisodeError, total_tokens

Decisions: TypeAlias = Literal["every", "longest"] | int
"""Decisions of an episode to play again: every one, the one with most sampled tokens, or a number of random ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRule:
    """Decisions of an episode that are played again, and their number."""

    samples: int
    """Number of alternatives per decision."""
    decisions: Decisions
    policies: Collection[str]
    """Names of the policies whose decisions may be chosen."""


@dataclass(slots=True, kw_only=True)
class Fork:
    """An episode right before a decision."""

    turn: int
    """Index of the decision in the episode."""
    start: int
    """The same, or in a parallel environment the index of the first decision of the round."""
    truncated: bool
    agents: Mapping[str, tuple[Any, Any]]
    """By name: a copy of the agent's turns so far, and the state of its player."""
    reported: Mapping[str, float] = field(default_factory=dict)
    """Cumulative rewards that a turn-based environment has reported."""
    views: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    """Observations and infos of the round of a parallel environment."""
    decisions: Mapping[str, Decision] = field(default_factory=dict)
    """Unchanged decisions of the other agents in that round."""
    env: Any = None
    """Copy of the environment. None if the copy failed."""
    error: EpisodeError | None = None
    """Failure of the copy."""

    def num_sampled(self, episode: Episode) -> int:
        """Return the number of tokens that were sampled for an alternative, without those of the original episode."""
        end = self.start + len(self.views)
        turns = [turn for turn in episode.turns if turn.index >= self.start]
        return total_tokens([turn for turn in turns if turn.index >= end or turn.agent not in self.decisions])


class Forks:
    """The forks of one episode, before the decisions that a rule chooses.

    Args:
        rule: Which decisions.
        rng_key: Key of the episode, from which random choices follow. None draws them at random.
        close: Closes the environment of a fork that is not needed any more.
    """

    def __init__(self, rule: ForkRule, rng_key: str | None, *, close: Callable[[Any], Awaitable[None]]) -> None:
        self.rule, self._close_env = rule, close
        self._rng = np.random.default_rng(None if rng_key is None else sampling_seed(f"{rng_key}/decisions"))
        self._forks: list[Fork] = []
        self._num_decisions, self._longest = 0, -1

    def __iter__(self) -> Iterator[Fork]:
        return iter(self._forks)

    @property
    def one_by_one(self) -> bool:
        """Whether copies share a process that answers one call after another."""
        return any(hasattr(fork.env, "off_loop") for fork in self._forks)

    def place(self, decision: Decision) -> int | None:
        """Return the position of a fork before this decision, or None if the rule does not choose the decision.

        Must be called once for every decision of the rule's policies, in order.
        """
        number, self._num_decisions = self._num_decisions, self._num_decisions + 1
        if self.rule.decisions == "every":
            return number
        if self.rule.decisions == "longest":
            parts = (decision,) if decision.notes is None else (decision.notes, decision)
            if (length := sum(len(part.response_ids) for part in parts)) <= self._longest:
                return None
            self._longest = length
            return 0
        # reservoir sampling: each of the decisions so far has the same probability of a place
        place = number if number < self.rule.decisions else int(self._rng.integers(number + 1))
        return place if place < self.rule.decisions else None

    async def put(self, place: int, fork: Fork) -> None:
        """Put a fork at a position that `place` returned, and close the one before."""
        replaced, self._forks[place : place + 1] = self._forks[place : place + 1], [fork]
        await self._close(replaced)

    async def close(self) -> None:
        """Close all environments."""
        forks, self._forks = self._forks, []
        await self._close(forks)

    async def _close(self, forks: Sequence[Fork]) -> None:
        for fork in forks:
            if fork.env is not None:
                await self._close_env(fork.env)
