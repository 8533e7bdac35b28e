"""Collects groups of episodes: environments, policies and engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from forge_agents.policy import PolicyMapping
from forge_agents.rollout.policy_engine import PolicyEngine
from forge_agents.runtime.mesh import with_deadline
from forge_agents.types import EpisodeGroup
from forge_trainers.rl.plan import RunPlan
from forge_trainers.rl.policy_mapping import at_step
from forge_trainers.rl.prefetch import Put
from forge_trainers.rl.report import Messages
from forge_trainers.rl.tasks import Task
from forge_trainers.rl.weight_sync import WeightSync

if TYPE_CHECKING:
    from forge_trainers.run.processes import Processes

T = TypeVar("T")


class Collector:
    """Collects the groups of training steps and evaluations, at most `limit` episodes at the same time."""

    def __init__(
        self, plan: RunPlan, processes: Processes, *, weights: WeightSync, limit: asyncio.Semaphore, messages: Messages
    ) -> None:
        self._plan, self._processes, self._config = plan, processes, plan.config
        self._weights, self._limit, self._messages = weights, limit, messages

    async def collect(
        self, step: int, numbers: Sequence[int], put: Put | None = None, *, resample: int = 0
    ) -> list[EpisodeGroup]:
        """Collect groups of a step, given their numbers, and put each as it finishes. `resample` selects new seeds."""
        await self._weights.done()  # samples of older weights would exceed the policy lag
        config = self._config
        count = len(numbers) if resample else config.groups_per_step
        tasks = self._plan.sampler.tasks(config.seed, step, count, resample=resample)
        if not (tasks := [task for task in tasks if task.number in numbers]):
            return []
        # The key seeds the sampling, so a resumed run samples the same.
        key = f"{config.seed}/{step}/{resample}"
        collect_group = partial(self._group, size=config.group_size, key=key, put=put, step=step)
        return await self._plan.policies.collect(tasks, collect_group, self._processes, step=step, resample=resample)

    async def resample(self, step: int, count: int, attempt: int) -> list[EpisodeGroup]:
        """Collect `count` additional groups of a step, from new seeds."""
        work = self.collect(step, range(count), resample=attempt)
        return await self.while_engines_answer(work, f"resampling of step {step + 1}")

    async def held_out(self, episodes: int, group_size: int) -> list[EpisodeGroup]:
        """Collect groups of held-out seeds, with at least `episodes` episodes."""
        tasks = self._plan.sampler.held_out(-(-episodes // group_size))
        collect_group = partial(self._group, size=group_size, key=f"{self._config.seed}/held-out")
        work = self._plan.policies.collect(tasks, collect_group, self._processes)
        return await self.while_engines_answer(work, "evaluation")

    async def while_engines_answer(self, work: Awaitable[T], what: str) -> T:
        """Await `work`. Long episodes may take any time, but engines must answer within `stage_timeout_s`."""
        return await with_deadline(
            work,
            self._config.stage_timeout_s,
            progress=lambda: self._processes.answers,
            who="episodes",
            what=f"{what} (no engine has answered meanwhile: stage_timeout_s)",
        )

    async def _group(
        self,
        task: Task,
        mapping: PolicyMapping,
        engines: Mapping[str, PolicyEngine],
        *,
        size: int,
        key: str,
        put: Put | None = None,
        step: int | None = None,
    ) -> EpisodeGroup:
        """Collect `size` episodes of a task. `key` and the task determine the sampling."""
        rollout = self._plan.sampler.rollout(task, mapping if step is None else at_step(mapping, step), engines)
        if step is not None and self._plan.forks is not None:
            rollout = replace(rollout, forks=self._plan.forks)
        group = await rollout.group(task.seed, size, limit=self._limit, rng_key=f"{key}/{task.number}")
        if group.failed or (group.alternatives is not None and group.alternatives.group.failed):
            self._messages.report_failure(group)
        if put is not None:
            put(task.number, group)
        return group
