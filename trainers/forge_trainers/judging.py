"""From played groups to what each policy learns from.

In: episode groups, a reward, the credit rule. Out: rewards by role, training samples by policy, and a count of every
group that teaches nothing. Waits for the reward, in a thread, with a deadline.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from forge_agents.mesh import with_deadline
from forge_agents.types import EpisodeGroup, Trajectory
from forge_trainers.credit import Credit

if TYPE_CHECKING:
    from forge_trainers.packing import Sample

Reward: TypeAlias = Callable[[Sequence[Trajectory]], np.ndarray]
"""Trajectories to float32 ``[n]``; NaN where it cannot tell. Any verifier is one.

A reward that has a method ``assess`` is asked through it. It returns an object with ``scores``, the same ``[n]``;
``noise``, None or the standard deviation of each; and ``turns``, None or a score per turn of each trajectory. Every
verifier of ours has one.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedGroup:
    """A group and what its agents earned."""

    group: EpisodeGroup
    rewards: Mapping[str, np.ndarray]
    """By agent: float32 ``[G]``, NaN where the reward abstained."""
    noise: Mapping[str, np.ndarray] | None = None
    """By agent: float32 ``[G]``, the standard deviation of each reward; None where the reward does not know it."""
    turns: Mapping[str, Sequence[np.ndarray]] | None = None
    """By agent and sibling: float32 ``[turns]``, NaN where the reward abstained; None where it scores no turns."""

    def episode_rewards(self, index: int) -> dict[str, float]:
        """Rewards of one sibling, by agent."""
        return {agent: float(rewards[index]) for agent, rewards in self.rewards.items()}


def env_reward(trajectories: Sequence[Trajectory]) -> np.ndarray:
    """The environment's own total reward of each trajectory."""
    return np.array([trajectory.reward for trajectory in trajectories], dtype=np.float32)


async def judge(groups: Sequence[EpisodeGroup], reward: Reward, *, timeout_s: float) -> list[JudgedGroup]:
    """Score every trajectory of `groups` in one call of `reward`.

    Raises:
        StallError: The reward did not return in time.
        TypeError, ValueError: It returned something that is not one number per trajectory.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    name = str(getattr(reward, "name", None) or getattr(reward, "__name__", type(reward).__name__))
    assessed = await with_deadline(
        asyncio.to_thread(_call, reward, trajectories, name), timeout_s, who=f"reward {name}", what="scoring"
    )
    judged, start = [], 0
    for group in groups:
        rows: dict[str, list[int]] = {}
        for trajectory in group.trajectories:
            rows.setdefault(trajectory.agent, []).append(start)
            start += 1
        judged.append(
            JudgedGroup(
                group=group,
                rewards={agent: assessed.scores[own] for agent, own in rows.items()},
                noise=None if assessed.noise is None else {a: assessed.noise[own] for a, own in rows.items()},
                turns=None
                if assessed.turns is None
                else {a: [assessed.turns[at] for at in own] for a, own in rows.items()},
            )
        )
    return judged


@dataclass(frozen=True, slots=True, kw_only=True)
class _Assessed:
    """What a reward said of n trajectories, checked."""

    scores: np.ndarray
    noise: np.ndarray | None = None
    turns: Sequence[np.ndarray] | None = None


def _call(reward: Reward, trajectories: Sequence[Trajectory], name: str) -> _Assessed:
    if not trajectories:
        return _Assessed(scores=np.empty(0, np.float32))
    assess = getattr(reward, "assess", None)
    if not callable(assess):
        return _Assessed(scores=_checked(reward(trajectories), trajectories, name))
    found = assess(trajectories)
    noise = None if found.noise is None else np.asarray(found.noise, np.float32)
    turns = None if found.turns is None else [np.asarray(own, np.float32) for own in found.turns]
    if turns is not None and [len(own) for own in turns] != [len(t.turns) for t in trajectories]:
        raise ValueError(f"reward {name} scored other turns than it was shown; return one score per turn")
    return _Assessed(scores=_checked(found.scores, trajectories, name), noise=noise, turns=turns)


def _checked(returned: Any, trajectories: Sequence[Trajectory], name: str) -> np.ndarray:
    scores = np.asarray(returned, dtype=np.float32)
    if scores.shape != (len(trajectories),):
        raise ValueError(
            f"reward {name} returned shape {scores.shape} for {len(trajectories)} trajectories; return one number each"
        )
    if np.isinf(scores).any():
        raise ValueError(f"reward {name} returned an infinite score; return finite numbers, or NaN to abstain")
    return scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    """What a step can learn from."""

    samples: Mapping[str, Sequence[Sample]]
    """Training samples by policy name; policies without any are absent."""
    counts: Mapping[str, int]
    """Groups by fate: ``used``, ``failed`` (an episode kept failing), ``abstained`` (a reward was NaN), ``flat`` (in
    no trained role did siblings differ by more than the noise)."""


def lessons_from(judged: Sequence[JudgedGroup], credit: Credit, trainable: Collection[str]) -> Lessons:
    """Compare siblings role by role and cut their trajectories into samples.

    A group with a failed episode or an abstained reward is dropped whole: the siblings that remain would be compared
    against a biased baseline.
    """
    from forge_trainers.packing import samples_from

    samples: dict[str, list[Sample]] = {}
    counts: Counter[str] = Counter(used=0, failed=0, abstained=0, flat=0)
    for number, item in enumerate(judged):
        if item.group.failed:
            counts["failed"] += 1
            continue
        trained = {
            agent: rewards
            for agent, rewards in item.rewards.items()
            if item.group.episodes[0].trajectories[agent].policy in trainable
        }
        if any(np.isnan(rewards).any() for rewards in trained.values()):
            counts["abstained"] += 1
            continue
        before = sum(map(len, samples.values()))
        for agent in trained:
            advantages = _advantages(item, agent, credit)
            if advantages is None:
                continue
            for episode, per_turn in zip(item.group.episodes, advantages, strict=True):
                trajectory = episode.trajectories[agent]
                cut = samples_from(trajectory, per_turn, group=number)
                if cut:
                    samples.setdefault(trajectory.policy, []).extend(cut)
        counts["used" if sum(map(len, samples.values())) > before else "flat"] += 1
    return Lessons(samples=samples, counts=dict(counts))


def _advantages(item: JudgedGroup, agent: str, credit: Credit) -> list[list[float]] | None:
    """By sibling the advantage of every turn of one agent; None where the siblings do not differ."""
    noise = None if item.noise is None else item.noise[agent]
    if item.turns is not None:
        by_turn = credit.turn_advantages(item.turns[agent], noise)
        return None if by_turn is None else [own.tolist() for own in by_turn]
    advantages = credit.advantages(item.rewards[agent], noise)
    if advantages is None:
        return None
    trajectories = [episode.trajectories[agent] for episode in item.group.episodes]
    return [[value] * len(t.turns) for value, t in zip(advantages.tolist(), trajectories, strict=True)]


def summarise(judged: Sequence[JudgedGroup]) -> dict[str, float]:
    """Reward metrics of a step; failed episodes and abstentions are left out.

    Returns:
        ``reward/mean`` over episodes of the mean over agents, its 95 % half-width ``reward/ci``, and ``reward/AGENT``.
    """
    episodes: list[float] = []
    by_agent: dict[str, list[float]] = {}
    for item in judged:
        for index, episode in enumerate(item.group.episodes):
            if episode.error is not None:
                continue
            rewards = {agent: value for agent, value in item.episode_rewards(index).items() if not np.isnan(value)}
            if rewards:
                episodes.append(float(np.mean(list(rewards.values()))))
            for agent, value in rewards.items():
                by_agent.setdefault(agent, []).append(value)
    mean, half_width = mean_and_ci(episodes)
    return {
        "reward/mean": mean,
        "reward/ci": half_width,
        **{f"reward/{agent}": float(np.mean(values)) for agent, values in by_agent.items()},
    }


def mean_and_ci(values: Sequence[float]) -> tuple[float, float]:
    """Mean and the half-width of its 95 % confidence interval, by Student's t.

    Without values both are NaN; with one the half-width is infinite.
    """
    from scipy.stats import t

    if not len(values):
        return float("nan"), float("nan")
    if len(values) == 1:
        return float(values[0]), float("inf")
    spread = np.std(values, ddof=1) / np.sqrt(len(values))
    return float(np.mean(values)), float(t.ppf(0.975, len(values) - 1) * spread)
