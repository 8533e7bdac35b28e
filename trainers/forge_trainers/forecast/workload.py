"""How long episodes are: what a simulated run plays.

In: shapes of measured episodes. Out: groups drawn from them, and what a learner computes of a group. Waits for nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnShape:
    """One decision, without its words."""

    agent: str
    policy: str
    prompt_tokens: int = 0
    """0 where no model decided."""
    response_tokens: int = 0
    cut: bool = False
    """`max_tokens` ended the response."""
    common_tokens: int = 0
    """First tokens of the prompt that siblings share; only of an agent's first turn."""
    continues: bool = False
    """The prompt begins with the agent's previous prompt and response."""
    think_s: float = 0.0
    """Seconds of environment and controller before the decision."""
    answer_s: float = 0.0
    """Seconds from the question to the answer, as measured; players without an engine take as long again."""


Rounds = tuple[tuple[TurnShape, ...], ...]
"""An episode: rounds one after the other, the turns of a round at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerWork:
    """What a learner computes of one or more groups."""

    positions: int = 0
    """Tokens through the model, common prompts once."""
    loss_tokens: int = 0
    longest: int = 0
    """Positions of the longest sample, which no rank shares with another."""

    def __add__(self, other: LearnerWork) -> LearnerWork:
        return LearnerWork(
            positions=self.positions + other.positions,
            loss_tokens=self.loss_tokens + other.loss_tokens,
            longest=max(self.longest, other.longest),
        )

    def microbatches(self, max_tokens: int) -> int:
        """Forward passes with room for `max_tokens` each."""
        return max(1, math.ceil(self.positions / max_tokens))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Groups to draw from."""

    groups: Sequence[Sequence[Rounds]]
    """Siblings that were measured, by group."""
    stop_rates: Mapping[str, float] = field(default_factory=dict)
    """By policy: probability that a response ends at a token. It says how long one that was cut goes on under a larger
    `max_tokens`; 0 or absent: to the new limit."""
    used_share: float = 1.0
    """Share of groups that teach something, of those whose siblings earn differently."""
    outcomes: Sequence[Sequence[Hashable]] = ()
    """What siblings earned, by group; groups of other sizes are alike more or less often. Empty: all differ."""

    def __post_init__(self) -> None:
        if not self.groups or not all(self.groups):
            raise ValueError("a workload needs at least one measured episode")
        if not 0 <= self.used_share <= 1:
            raise ValueError(f"used_share={self.used_share} is a share, in [0, 1]")

    def used_share_of(self, size: int) -> float:
        """Share of groups of `size` siblings that teach something.

        Siblings without replacement, so for sizes up to the measured ones this is right on average.
        """
        if not self.outcomes:
            return self.used_share
        return self.used_share * (1 - float(np.mean([_alike(Counter(group), size) for group in self.outcomes])))

    def draw(self, rng: np.random.Generator, size: int, max_tokens: Mapping[str, int]) -> list[Rounds]:
        """`size` siblings of one measured group, with responses as long as `max_tokens` by policy lets them be."""
        siblings = self.groups[int(rng.integers(len(self.groups)))]
        picked = rng.integers(len(siblings), size=size)
        return [self._under(rng, siblings[int(at)], max_tokens) for at in picked]

    def _under(self, rng: np.random.Generator, rounds: Rounds, max_tokens: Mapping[str, int]) -> Rounds:
        """The episode under other limits; what is said longer or shorter is read so in later rounds."""
        shift, found = 0, []
        for turns in rounds:
            new, said = [], 0
            for turn in turns:
                length = self._length(rng, turn, max_tokens.get(turn.policy))
                prompt = max(turn.common_tokens, turn.prompt_tokens + shift) if turn.prompt_tokens else 0
                new.append(replace(turn, response_tokens=length, prompt_tokens=prompt))
                said += length - turn.response_tokens
            shift += said
            found.append(tuple(new))
        return tuple(found)

    def _length(self, rng: np.random.Generator, turn: TurnShape, limit: int | None) -> int:
        if not turn.response_tokens or limit is None:
            return turn.response_tokens
        if not turn.cut or limit <= turn.response_tokens:
            return min(turn.response_tokens, limit)
        rate = self.stop_rates.get(turn.policy, 0.0)
        more = int(rng.geometric(rate)) if rate > 0 else limit
        return min(limit, turn.response_tokens + more)


def _alike(counts: Counter[Hashable], size: int) -> float:
    """Probability that `size` siblings earn the same, where this many of those measured earned each."""
    total = sum(counts.values())
    if size > total:
        return sum((count / total) ** size for count in counts.values())
    return sum(math.comb(count, size) for count in counts.values()) / math.comb(total, size)


def learner_work(
    group: Sequence[Rounds], trained: frozenset[str], *, max_tokens: int, share_prefixes: bool
) -> LearnerWork:
    """What the learners of `trained` policies compute of a group, all together.

    Args:
        group: Siblings.
        trained: Names of the policies.
        max_tokens: Most positions of one piece.
        share_prefixes: Whether siblings' common prompt is computed once for each piece.
    """
    by_agent: dict[str, list[list[TurnShape]]] = {}
    for rounds in group:
        own: dict[str, list[TurnShape]] = {}
        for turns in rounds:
            for turn in turns:
                if turn.policy in trained and turn.response_tokens:
                    own.setdefault(turn.agent, []).append(turn)
        for agent, said in own.items():
            by_agent.setdefault(agent, []).append(said)
    positions = loss_tokens = longest = 0
    for siblings in by_agent.values():
        loss_tokens += sum(turn.response_tokens for said in siblings for turn in said)
        firsts, others = _samples(siblings)
        common = min(said[0].common_tokens for said in siblings) if share_prefixes else 0
        positions += sum(others) + _positions(firsts, common, max_tokens)
        longest = max(longest, *firsts, *others)
    return LearnerWork(positions=positions, loss_tokens=loss_tokens, longest=longest)


def _samples(siblings: Sequence[Sequence[TurnShape]]) -> tuple[list[int], list[int]]:
    """Tokens of each sibling's first sample, and of those that begin anew."""
    firsts, others = [], []
    for said in siblings:
        lengths: list[int] = []
        for turn in said:
            whole = turn.prompt_tokens + turn.response_tokens
            if lengths and turn.continues:
                lengths[-1] = whole
            else:
                lengths.append(whole)
        firsts.append(lengths[0])
        others += lengths[1:]
    return firsts, others


def _positions(lengths: Sequence[int], common: int, max_tokens: int) -> int:
    """Of siblings laid out in pieces of at most `max_tokens`, each with the common tokens once."""
    if not common:
        return sum(lengths)
    total = piece = 0
    for length in lengths:
        own = length - common
        if piece and piece + own <= max_tokens:
            piece += own
            total += own
        else:
            piece = length
            total += length
    return total
