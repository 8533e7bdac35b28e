"""Scores the groups of a step, and replaces uninformative ones (dynamic sampling)."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from forge_agents.types import EpisodeGroup, Reward
from forge_trainers.records.run_folder import RunFolder
from forge_trainers.rl.collect import Collector
from forge_trainers.rl.config import GRPOConfig
from forge_trainers.rl.failures import nothing_to_train_on
from forge_trainers.rl.rewards import score_groups
from forge_trainers.rl.samples import compute_advantages, make_samples
from forge_trainers.run.checkpoints import RewardState

if TYPE_CHECKING:
    from forge_trainers.run.processes import Processes


class Scorer:
    """Scores steps one at a time, in order, because a reward may learn from what it scores.

    Args:
        reward: Reward of the run.
        collector: Collects groups that replace uninformative ones.
        processes: Running learners.
        config: Settings.
        state: The reward's state after the last step that was trained on.
        lock: Held during a call of the reward, by a step or by an evaluation.
        run: Records the verifiers' reports; None records nothing.
    """

    def __init__(
        self,
        reward: Reward,
        collector: Collector,
        processes: Processes,
        config: GRPOConfig,
        *,
        state: RewardState,
        lock: asyncio.Lock,
        run: RunFolder | None = None,
    ) -> None:
        self._reward, self._state, self._lock, self._run = reward, state, lock, run
        self._collector, self._processes, self._config = collector, processes, config
        self._credit, self._max_resamples = config.credit_rule, config.resamples
        self.resample_s: dict[int, float] = {}
        """Seconds of collecting replacements, by step."""

    async def score(self, step: int, groups: list[EpisodeGroup]) -> list[EpisodeGroup]:
        """Score the groups of a step, and add groups in place of uninformative ones."""
        async with self._lock:
            self._state.judging(step)
            groups = await self._score(groups)
            if self._max_resamples:
                groups = await self._resampled(step, groups)
            self._state.judged(step)
            if self._run is not None:
                self._run.keep_verifiers(step + 1, self._reward)
        return groups

    async def _score(self, groups: list[EpisodeGroup]) -> list[EpisodeGroup]:
        return await score_groups(groups, self._reward, timeout_s=self._config.stage_timeout_s)

    async def _resampled(self, step: int, groups: list[EpisodeGroup]) -> list[EpisodeGroup]:
        """Add groups of new seeds until enough are informative (DAPO, arXiv 2503.14476, eq. 11)."""
        config, trained, collecting_s = self._config, self._processes.learners, 0.0
        for attempt in range(1, self._max_resamples + 1):
            # Without running baselines: they must take in the rewards of a step only once, when it is trained on.
            groups = compute_advantages(groups, self._credit, trained)
            used = make_samples(groups, trained, max_tokens=self._processes.room).counts["used"]
            missing = config.groups_per_step - used
            if not missing or nothing_to_train_on(groups, trained):
                break
            started = time.perf_counter()
            new = await self._collector.resample(step, missing, attempt)
            collecting_s += time.perf_counter() - started
            groups += await self._score(new)
        self.resample_s[step] = collecting_s
        return groups
