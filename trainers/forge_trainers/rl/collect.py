"""Collects groups of episodes: environments, policies and engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from forge_agents.policy import PolicyMapping
from forge_agents.rollout.players import PolicyEngine
from forge_agents.runtime.mesh import with_deadline
from forge_agents.types import EpisodeGroup
from forge_trainers.rl.config import GRPOConfig
from forge_trainers.rl.policy_mapping import CollectGroup, FixedPolicies, at_step
from forge_trainers.rl.prefetch import Put
from forge_trainers.rl.report import Messages
from forge_trainers.rl.tasks import Task, TaskSampler
from forge_trainers.rl.weight_sync import WeightSync

if TYPE_CHECKING:
    from forge_trainers.run.processes import Processes

T = TypeVar("T")


class Collector:
    """Collects the groups of training steps and evaluations.

    Args:
        sampler: Environments and seeds.
        policies: Who plays which agent.
        processes: Running engines.
        config: Settings.
        weights: Transfers to the engines, which must end before a step starts.
        limit: Bounds the number of concurrent episodes.
        messages: Reports the first failure.
    """

    def __init__(
        self,
        sampler: TaskSampler,
        policies: FixedPolicies,
        processes: Processes,
        config: GRPOConfig,
        *,
        weights: WeightSync,
        limit: asyncio.Semaphore,
        messages: Messages,
    ) -> None:
        self._sampler, self._policies, self._processes, self._config = sampler, policies, processes, config
        self._weights, self._limit, self._messages = weights, limit, messages

    async def collect(self, step: int, numbers: Sequence[int], put: Put) -> None:
        """Collect groups of a step, given their numbers, and put each as it finishes."""
        await self._weights.done()  # samples of older weights would exceed the policy lag
        tasks = self._sampler.tasks(self._config.seed, step, self._config.groups_per_step)
        await self._collect([task for task in tasks if task.number in numbers], step, 0, put)

    async def resample(self, step: int, count: int, attempt: int) -> list[EpisodeGroup]:
        """Collect `count` additional groups of a step, from new seeds."""
        await self._weights.done()
        tasks = self._sampler.tasks(self._config.seed, step, count, resample=attempt)
        work = self._collect(tasks, step, attempt)
        return await self.while_engines_answer(work, f"resampling of step {step + 1}")

    async def held_out(self, episodes: int, group_size: int) -> list[EpisodeGroup]:
        """Collect groups of held-out seeds, with at least `episodes` episodes."""
        tasks = self._sampler.held_out(-(-episodes // group_size))
        collect_group = self._group_collector(group_size, f"{self._config.seed}/held-out")
        work = self._policies.held_out(tasks, collect_group, self._processes)
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

    async def _collect(
        self, tasks: Sequence[Task], step: int, attempt: int, put: Put | None = None
    ) -> list[EpisodeGroup]:
        if not tasks:
            return []
        name = f"{self._config.seed}/{step}/{attempt}"  # seeds the sampling, so a resumed run samples the same
        collect_group = self._group_collector(self._config.group_size, name, put, step)
        return await self._policies.collect(tasks, collect_group, self._processes, step=step, resample=attempt)

    def _group_collector(self, size: int, name: str, put: Put | None = None, step: int | None = None) -> CollectGroup:
        """Return a function that collects `size` episodes of a task. `name` and the task determine the sampling."""

        async def collect_group(
            task: Task, mapping: PolicyMapping, engines: Mapping[str, PolicyEngine]
        ) -> EpisodeGroup:
            mapping = mapping if step is None else at_step(mapping, step)
            rollout = self._sampler.rollout(task, mapping, engines)
            group = await rollout.group(task.seed, size, limit=self._limit, rng_key=f"{name}/{task.number}")
            if group.failed:
                self._messages.report_failure(group)
            if put is not None:
                put(task.number, group)
            return group

        return collect_group
