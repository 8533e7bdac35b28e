"""What flows between the stages: frozen, complete at construction, defined once.

In: nothing. Out: the types that environments, policies, verifiers and learners hand to each other. Waits for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from tensordict import TensorDict

FinishReason: TypeAlias = Literal["stop", "length", "context", "scripted"]
"""Why a response ended: end-of-turn token, `max_tokens`, no room left in the context, or not made by a model."""

Where: TypeAlias = Literal["make", "reset", "observe", "step", "policy", "reward"]
"""What failed in an episode."""

EndReason: TypeAlias = Literal["terminated", "truncated", "turn_limit", "context", "error"]
"""Why an episode ended: the game was over, or cut itself off, or had its turns, or filled a context, or failed."""

EpisodeBatch: TypeAlias = "TensorDict"
"""What a learner eats: token streams, packed end to end. A TensorDict with two entries.

``tokens``, batch size ``[T]``, one row per token of any sample:
    ``ids`` int64; ``loss_mask`` bool, True where the policy sampled the token; ``logprobs`` float32, the sampler's,
    0 where masked; ``advantages`` float32, 0 where masked; ``versions`` int64, the weights that sampled the token,
    -1 where masked; ``turn`` int64, the number of its turn in the trajectory, -1 where masked.
``samples``, batch size ``[n]``, one row per training sample:
    ``start`` and ``length`` int64, its span in ``tokens``; ``group`` int64, equal for siblings, whose common first
    tokens may be computed once; ``trajectory`` int64, equal for samples of one trajectory.

Built by `forge_trainers.batch.packing.pack`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message as a chat template takes it."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    name: str | None = None
    """Who speaks, where the template distinguishes speakers."""
    tool_call_id: str | None = None
    """The call that a ``tool`` message answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens ``start`` to ``end`` (exclusive) of a response were sampled by weights ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One response of a served model to one prompt."""

    token_ids: tuple[int, ...]
    """Sampled tokens, the end-of-turn token included where the model wrote it."""
    logprobs: tuple[float, ...]
    """The sampler's natural-log probability of each token, under the distribution it was drawn from."""
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]
    """Which weights sampled which tokens; in order, covering every token."""
    top_logprobs: tuple[Mapping[int, float], ...] = ()
    """Per token, the most probable ids there with their natural-log probabilities; empty where nobody asked."""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"{len(self.token_ids)} tokens arrived with {len(self.logprobs)} logprobs; send one per token"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request, as an endpoint counts them."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One decision of one agent."""

    agent: str
    index: int
    """Place in the episode's global order of turns, from 0."""
    observation: str
    """What the agent read before it decided."""
    action: str
    """What it answered, as the environment received it."""
    reward: float
    """Environment reward from this decision up to the agent's next one. Finite."""
    terminated: bool = False
    """The game ended for this agent before its next decision."""
    truncated: bool = False
    """A limit cut the game off before its next decision."""
    policy: str = ""
    """Name of the policy that decided."""
    prompt_ids: tuple[int, ...] = ()
    """Tokens the model read; empty where no model decided."""
    response_ids: tuple[int, ...] = ()
    """Tokens the model sampled, never re-tokenised; empty where no model decided."""
    logprobs: tuple[float, ...] = ()
    """The sampler's log-probability of each response token."""
    versions: tuple[VersionSpan, ...] = ()
    """Which weights sampled which response tokens."""
    finish_reason: FinishReason = "scripted"
    generate_s: float = 0.0
    """Seconds from the request to the response, queueing included."""
    usage: Usage | None = None
    """Tokens of an endpoint's answer, which brings none of them along; None elsewhere, or where it does not say."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """The environment's `infos[agent]` after this decision, JSON-safe."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError(
                f"reward of agent {self.agent!r} is {self.reward}; environments must return finite rewards"
            )
        if len(self.response_ids) != len(self.logprobs):
            raise ValueError(
                f"{len(self.response_ids)} response tokens with {len(self.logprobs)} logprobs; send one per token"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One agent's view of one episode."""

    agent: str
    policy: str
    turns: tuple[Turn, ...]
    early_reward: float = 0.0
    """Environment reward that arrived before the agent's first decision."""
    instructions: str = ""
    """The seat's system prompt; empty where the environment gives none."""
    env_id: str = ""
    seed: int = 0
    info: Mapping[str, Any] = field(default_factory=dict)
    """The environment's last `infos[agent]`, JSON-safe. Gold answers for verifiers live here."""

    @property
    def reward(self) -> float:
        """Total environment reward of the agent."""
        return math.fsum((self.early_reward, *(turn.reward for turn in self.turns)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeError:
    """Why an episode failed: a failed episode is data."""

    where: Where
    kind: str
    """Class name of the exception."""
    message: str
    trace: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What happened, from reset to the last turn."""

    env_id: str
    seed: int
    trajectories: Mapping[str, Trajectory]
    """By agent, in the order of `possible_agents`; agents that never decided have no turns."""
    error: EpisodeError | None = None
    end_reason: EndReason = "terminated"
    duration_s: float = 0.0

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns in the order they happened."""
        return tuple(sorted((t for traj in self.trajectories.values() for t in traj.turns), key=lambda t: t.index))

    @property
    def rewards(self) -> dict[str, float]:
        """Total environment reward by agent."""
        return {agent: trajectory.reward for agent, trajectory in self.trajectories.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeGroup:
    """G siblings: same environment, same seed, same opponents. GRPO compares them with each other."""

    env_id: str
    seed: int
    episodes: tuple[Episode, ...]

    def __post_init__(self) -> None:
        strangers = [e for e in self.episodes if (e.env_id, e.seed) != (self.env_id, self.seed)]
        if strangers:
            raise ValueError(
                f"group of {self.env_id} seed {self.seed} was given an episode of {strangers[0].env_id} seed "
                f"{strangers[0].seed}; siblings share both"
            )

    @property
    def failed(self) -> tuple[Episode, ...]:
        """Episodes that carry an error."""
        return tuple(e for e in self.episodes if e.error is not None)

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """All trajectories, episode by episode."""
        return tuple(t for e in self.episodes for t in e.trajectories.values())


def total_tokens(turns: Sequence[Turn]) -> int:
    """Number of sampled tokens in `turns`."""
    return sum(len(turn.response_ids) for turn in turns)


Reward: TypeAlias = "Callable[[Sequence[Trajectory]], np.ndarray]"
"""Trajectories to float32 ``[n]``; NaN where it cannot tell. Any verifier is one.

A reward that has a method ``assess`` is asked through it. It returns an object with ``scores``, the same ``[n]``;
``noise``, None or the standard deviation of each; and ``turns``, None or a score per turn of each trajectory. Every
verifier of ours has one.
"""
