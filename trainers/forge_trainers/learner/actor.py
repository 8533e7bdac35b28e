"""The learner in its own process: one Monarch actor per rank around `LearnerCore`.

In: endpoint calls of the controller's `Learner`. Out: metrics, weights in the store. Waits for the other ranks.

Long computations run on one thread of their own, so that the process still answers its pulse and the store's messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from forge_agents.runtime._monarch import Actor, concurrent_endpoint
from forge_agents.types import EpisodeBatch
from forge_agents.weights import Publisher, WeightStoreRef
from forge_trainers.learner._memory import keep_freed_memory
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.learner.core import LearnerCore
from forge_trainers.losses.registry import Loss, add_loss

T = TypeVar("T")


class LearnerActor(Actor):
    """One rank of one learner, or of several whose adapters share a model.

    Calls say whose learner they are for, and wait for each other in the order they arrive.
    """

    def __init__(
        self, configs: Mapping[str, LearnerConfig], name: str, store: WeightStoreRef | None, losses: Iterable[Loss]
    ) -> None:
        keep_freed_memory()
        for loss in losses:
            add_loss(loss)  # one that the user registered is not known in this process
        self._configs = configs
        self._name = name
        self._store = store
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")
        self._cores: dict[str, LearnerCore] = {}
        self._publishers: dict[str, Publisher] = {}
        # collectives of two calls must not mix: every rank takes its calls in the order they were sent
        self._one_at_a_time = asyncio.Lock()

    @concurrent_endpoint
    async def build(self) -> dict[str, int]:
        """Load the model, once. Returns `LearnerCore.max_sample_tokens` of each learner."""

        def build() -> dict[str, int]:
            for whose, config in self._configs.items():
                self._cores[whose] = LearnerCore(config, base=next(iter(self._cores.values()), None))
            return {whose: core.max_sample_tokens for whose, core in self._cores.items()}

        return await self._compute(build)

    @concurrent_endpoint
    async def use_store(self, whose: str, store: WeightStoreRef) -> None:
        """Publish there from now on."""
        async with self._one_at_a_time:
            self._store = store
            self._publishers.pop(whose, None)

    @concurrent_endpoint
    async def set_total_steps(self, whose: str, total: int) -> None:
        """`LearnerCore.set_total_steps`."""
        await self._compute(lambda: self._core(whose).set_total_steps(total))

    @concurrent_endpoint
    async def train_step(self, whose: str, batch: EpisodeBatch) -> dict[str, float]:
        """`LearnerCore.train_step`."""
        return await self._compute(lambda: self._core(whose).train_step(batch))

    @concurrent_endpoint
    async def logprobs(self, whose: str, batch: EpisodeBatch) -> torch.Tensor:
        """`LearnerCore.logprobs`."""
        return await self._compute(lambda: self._core(whose).logprobs(batch))

    @concurrent_endpoint
    async def start_save(self, whose: str, folder: str) -> None:
        """`LearnerCore.start_save`."""
        await self._compute(lambda: self._core(whose).start_save(folder))

    @concurrent_endpoint
    async def finish_save(self, whose: str) -> dict[str, list[int]]:
        """`LearnerCore.finish_save`, beside whatever is computed."""
        return await asyncio.to_thread(self._core(whose).finish_save)

    @concurrent_endpoint
    async def load(self, whose: str, folder: str) -> int:
        """`LearnerCore.load`."""
        return await self._compute(lambda: self._core(whose).load(folder))

    @concurrent_endpoint
    async def export(self, whose: str, folder: str, dtype: str | None) -> None:
        """`LearnerCore.export`."""
        chosen = None if dtype is None else getattr(torch, dtype)
        await self._compute(lambda: self._core(whose).export(folder, dtype=chosen))

    @concurrent_endpoint
    async def publish(self, whose: str) -> dict[str, float]:
        """Put the current weights into the store. Returns the publisher's timings and ``version``."""
        if self._store is None:
            raise RuntimeError(f"learner {self._name!r} was started without a store; nothing can be published")
        dtype: torch.dtype = getattr(torch, self._configs[whose].compute_dtype)
        if whose not in self._publishers:
            self._publishers[whose] = Publisher(self._store, whose, dtype=dtype)
        core = self._core(whose)
        async with self._one_at_a_time:
            state = await self._on_thread(lambda: core.published_state(dtype=dtype))
            return {**await self._publishers[whose].publish(state, core.version), "version": float(core.version)}

    async def _compute(self, work: Callable[[], T]) -> T:
        async with self._one_at_a_time:
            return await self._on_thread(work)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _core(self, whose: str) -> LearnerCore:
        if whose not in self._cores:
            raise RuntimeError(f"learner {self._name!r} is not built; call build first")
        return self._cores[whose]
