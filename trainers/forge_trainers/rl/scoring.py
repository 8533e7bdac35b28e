"""Scores the groups of a step, and replaces uninformative ones (dynamic sampling)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from forge_agents.runtime.mesh import with_deadline
from forge_agents.runtime.threads import in_thread
from forge_agents.types import EpisodeGroup, Reward, Trajectory
from forge_trainers.records.run_folder import RunFolder
from forge_trainers.rl.collect import Collector
from forge_trainers.rl.counterfactual import score_with_alternatives
from forge_trainers.rl.failures import nothing_to_train_on
from forge_trainers.rl.lifecycle import Lifecycle
from forge_trainers.rl.plan import RunPlan
from forge_trainers.rl.reward_state import RewardState
from forge_trainers.rl.rewards import MultiReward, assess, env_reward, weighted_sum
from forge_trainers.rl.samples import compute_advantages, make_samples
from forge_verifiers.core.verifier import Assessment, reward_of


async def score(
    groups: Sequence[EpisodeGroup], reward: Reward | None = None, *, timeout_s: float = 1800.0
) -> list[EpisodeGroup]:
    """Score every trajectory of `groups` in one call of `reward`, or one call of each part of a `MultiReward`.

    Sessions with rewards of their own are scored one by one. Their trajectory has the mean of the scores.

    Args:
        groups: Collected groups, including failed episodes.
        reward: Called in a thread, so it may block. None is the environment's own reward.
        timeout_s: Timeout of the call.

    Returns:
        The groups in order, with float32 ``[G]`` rewards by agent.

    Raises:
        StallError: The reward did not return in time.
        ArgumentError: The reward is not callable, is a class, or has a parameter of unknown meaning.
        TypeError, ValueError: The reward did not return one number per trajectory.
        Exception: Any error of the reward, with a note that names the reward.
    """
    return await score_groups(groups, env_reward if reward is None else reward_of(reward), timeout_s=timeout_s)


async def score_groups(groups: Sequence[EpisodeGroup], reward: Reward, *, timeout_s: float) -> list[EpisodeGroup]:
    """Do the same as `score`, with a reward that `reward_of` returned."""
    if any(group.alternatives is not None for group in groups):
        return await score_with_alternatives(groups, partial(score_groups, reward=reward, timeout_s=timeout_s))
    if isinstance(reward, MultiReward):
        parts = {name: await score_groups(groups, part, timeout_s=timeout_s) for name, part in reward.parts().items()}
        return [
            _combined({name: (reward.weights[name], scored[at]) for name, scored in parts.items()})
            for at in range(len(groups))
        ]
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    name = str(getattr(reward, "name", None) or getattr(reward, "__name__", type(reward).__name__))
    by_session = any(trajectory.session_rewards is not None for trajectory in trajectories)
    to_score = [part for each in trajectories for part in each.sessions] if by_session else trajectories
    assessment = await with_deadline(
        in_thread(assess, reward, to_score, name, name=f"reward {name}"),
        timeout_s,
        who=f"reward {name}",
        what="scoring",
    )
    if not by_session:
        return _split(groups, assessment)
    return _with_session_rewards(_split(groups, _of_trajectories(trajectories, assessment)), assessment.scores)


def _num_sessions(trajectory: Trajectory) -> int:
    """Return the length of `Trajectory.sessions`, which copies all turns."""
    return 1 if trajectory.session_rewards is None else len(trajectory.session_rewards)


def _of_trajectories(trajectories: Sequence[Trajectory], of_sessions: Assessment) -> Assessment:
    """Return the assessment of whole trajectories: mean scores, and the root mean square of the sessions' noise.

    The noise stays that of one session, because advantages compare sessions.
    """
    scores, variances, turns, start = [], [], [], 0
    for trajectory in trajectories:
        rows = slice(start, start + _num_sessions(trajectory))
        start = rows.stop
        scores.append(_mean(of_sessions.scores[rows]))
        if of_sessions.noise is not None:
            variances.append(_mean(np.square(of_sessions.noise[rows], dtype=np.float64)))
        if of_sessions.turns is not None:
            unread = [iter(turn_scores) for turn_scores in of_sessions.turns[rows]]  # by session
            numbers = (0 if trajectory.session_rewards is None else turn.session for turn in trajectory.turns)
            turns.append(np.array([next(unread[number]) for number in numbers], np.float32))
    return Assessment(
        scores=np.array(scores, np.float32),
        noise=None if of_sessions.noise is None else np.sqrt(variances).astype(np.float32),
        turns=None if of_sessions.turns is None else turns,
    )


def _mean(values: np.ndarray) -> float:
    """Return the mean of the values that are not NaN, or NaN if there are none."""
    present = values[~np.isnan(values)]
    return float(present.mean()) if len(present) else math.nan


def _with_session_rewards(groups: Sequence[EpisodeGroup], scores: np.ndarray) -> list[EpisodeGroup]:
    """Distribute the scores of all sessions, float32 ``[n]`` in the order of the trajectories, over their groups."""
    scored, start = [], 0
    for group in groups:
        sessions: dict[str, list[np.ndarray]] = {}
        for index, episode in enumerate(group.episodes):
            for agent, trajectory in episode.trajectories.items():
                stop = start + _num_sessions(trajectory)
                empty = [np.empty(0, np.float32)] * len(group.episodes)
                sessions.setdefault(agent, empty)[index] = scores[start:stop]
                start = stop
        scored.append(replace(group, session_rewards=sessions))
    return scored


def _split(groups: Sequence[EpisodeGroup], assessment: Assessment) -> list[EpisodeGroup]:
    """Distribute the scores of all trajectories over their groups."""
    # The last row, -1, stands for an agent that did not take part in an episode.
    scores = np.append(assessment.scores, np.float32(np.nan))
    noise = None if assessment.noise is None else np.append(assessment.noise, np.float32(np.nan))
    turns = None if assessment.turns is None else [*assessment.turns, np.empty(0, np.float32)]
    scored, start = [], 0
    for group in groups:
        rows: dict[str, list[int]] = {}  # by agent and episode
        for index, episode in enumerate(group.episodes):
            for agent in episode.trajectories:
                rows.setdefault(agent, [-1] * len(group.episodes))[index] = start
                start += 1
        scored.append(
            replace(
                group,
                rewards={agent: scores[indices] for agent, indices in rows.items()},
                noise=None if noise is None else {agent: noise[indices] for agent, indices in rows.items()},
                turn_rewards=None if turns is None else {a: [turns[i] for i in indices] for a, indices in rows.items()},
                session_rewards={},
                parts=None,
                advantages=None,  # those of an earlier reward
            )
        )
    return scored


def _combined(parts: Mapping[str, tuple[float, EpisodeGroup]]) -> EpisodeGroup:
    """Return one group with the weighted sum of the rewards of its parts."""
    first = next(iter(parts.values()))[1]
    totals = {
        agent: weighted_sum([(weight, group.rewards[agent]) for weight, group in parts.values()])
        for agent in first.rewards
    }
    sessions = {
        agent: [
            weighted_sum([(weight, group.session_rewards[agent][index]) for weight, group in parts.values()])
            for index in range(len(first.episodes))
        ]
        for agent in first.session_rewards
    }
    return replace(first, rewards=totals, session_rewards=sessions, noise=None, turn_rewards=None, parts=parts)


class Scorer:
    """Scores steps one at a time, in order, because a reward may learn from what it scores.

    The lifecycle holds the lock of the reward, which evaluations take as well. `state` is the reward's state after the
    last trained step. `run` records the verifiers' reports.
    """

    def __init__(
        self, plan: RunPlan, collector: Collector, lifecycle: Lifecycle, state: RewardState, run: RunFolder | None
    ) -> None:
        self._plan, self._config, self._collector, self._run = plan, plan.config, collector, run
        self._processes, self._lock = lifecycle.running, lifecycle.reward_lock
        self._state = state if state.exists else None
        self._max_resamples = plan.config.resamples
        self.resample_s: dict[int, float] = {}
        """Seconds of collecting replacements, by step."""

    async def score(self, step: int, groups: list[EpisodeGroup]) -> list[EpisodeGroup]:
        """Score the groups of a step, and add groups in place of uninformative ones."""
        async with self._lock:
            if self._state is not None:
                self._state.begin_scoring(step)
            groups = await score_groups(groups, self._plan.reward, timeout_s=self._config.stage_timeout_s)
            if self._max_resamples:
                groups = await self._resampled(step, groups)
            if self._state is not None:
                self._state.end_scoring(step)
            if self._run is not None:
                self._run.keep_verifiers(step + 1, self._plan.reward)
        return groups

    async def _resampled(self, step: int, groups: list[EpisodeGroup]) -> list[EpisodeGroup]:
        """Add groups of new seeds until enough are informative (DAPO, arXiv 2503.14476, eq. 11)."""
        config, trained, collecting_s = self._config, self._processes.learners, 0.0
        for attempt in range(1, self._max_resamples + 1):
            # Without running baselines: they must take in the rewards of a step only once, when it is trained on.
            groups = compute_advantages(groups, self._plan.credit, trained)
            used = make_samples(groups, trained, max_tokens=self._processes.max_sample_tokens).counts["used"]
            missing = config.groups_per_step - used
            if not missing or nothing_to_train_on(groups, trained):
                break
            started = time.perf_counter()
            new = await self._collector.resample(step, missing, attempt)
            collecting_s += time.perf_counter() - started
            groups += await score_groups(new, self._plan.reward, timeout_s=config.stage_timeout_s)
        self.resample_s[step] = collecting_s
        return groups
