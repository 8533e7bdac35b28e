"""The learner in its own process: one Monarch actor per rank around `LearnerCore`.

In: endpoint calls of the controller's `Learner`. Out: metrics, weights in the store. Waits for the other ranks.

Long computations run on one thread of their own, so that the process still answers its pulse and the store's messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from forge_agents._monarch import Actor, concurrent_endpoint
from forge_agents.types import EpisodeBatch
from forge_agents.weights import Publisher, WeightStoreRef
from forge_trainers._memory import keep_freed_memory
from forge_trainers.algorithms import Loss, add_loss
from forge_trainers.learner_config import LearnerConfig
from forge_trainers.learner_core import LearnerCore

T = TypeVar("T")


class LearnerActor(Actor):
    """One rank. Calls wait for each other in the order they arrive."""

    def __init__(
        self, config: LearnerConfig, name: str, store: WeightStoreRef | None, weights_name: str, loss: Loss
    ) -> None:
        keep_freed_memory()
        add_loss(loss)  # one that the user registered is not known in this process
        self._config = config
        self._name = name
        self._weights_name = weights_name
        self._dtype: torch.dtype = getattr(torch, config.compute_dtype)
        self._store = store
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")
        self._core: LearnerCore | None = None
        self._publisher: Publisher | None = None
        # collectives of two calls must not mix: every rank takes its calls in the order they were sent
        self._one_at_a_time = asyncio.Lock()

    @concurrent_endpoint
    async def build(self) -> int:
        """Load the model. Returns the version of its weights."""

        def build() -> int:
            self._core = LearnerCore(self._config)
            return self._core.version

        return await self._compute(build)

    @concurrent_endpoint
    async def use_store(self, store: WeightStoreRef) -> None:
        """Publish there from now on."""
        async with self._one_at_a_time:
            self._store, self._publisher = store, None

    @concurrent_endpoint
    async def set_total_steps(self, total: int) -> None:
        """`LearnerCore.set_total_steps`."""
        await self._compute(lambda: self._built.set_total_steps(total))

    @concurrent_endpoint
    async def train_step(self, batch: EpisodeBatch) -> dict[str, float]:
        """`LearnerCore.train_step`."""
        return await self._compute(lambda: self._built.train_step(batch))

    @concurrent_endpoint
    async def logprobs(self, batch: EpisodeBatch) -> torch.Tensor:
        """`LearnerCore.logprobs`."""
        return await self._compute(lambda: self._built.logprobs(batch))

    @concurrent_endpoint
    async def start_save(self, folder: str) -> None:
        """`LearnerCore.start_save`."""
        await self._compute(lambda: self._built.start_save(folder))

    @concurrent_endpoint
    async def finish_save(self) -> None:
        """`LearnerCore.finish_save`, beside whatever is computed."""
        await asyncio.to_thread(self._built.finish_save)

    @concurrent_endpoint
    async def load(self, folder: str) -> int:
        """`LearnerCore.load`."""
        return await self._compute(lambda: self._built.load(folder))

    @concurrent_endpoint
    async def export(self, folder: str, dtype: str) -> None:
        """`LearnerCore.export`."""
        await self._compute(lambda: self._built.export(folder, dtype=getattr(torch, dtype)))

    @concurrent_endpoint
    async def publish(self) -> dict[str, float]:
        """Put the current weights into the store. Returns the publisher's timings and ``version``."""
        if self._store is None:
            raise RuntimeError(f"learner {self._name!r} was started without a store; nothing can be published")
        if self._publisher is None:
            self._publisher = Publisher(self._store, self._weights_name, dtype=self._dtype)
        async with self._one_at_a_time:
            state = await self._on_thread(lambda: self._built.hf_state_dict(dtype=self._dtype))
            version = self._built.version
            return {**await self._publisher.publish(state, version), "version": float(version)}

    async def _compute(self, work: Callable[[], T]) -> T:
        async with self._one_at_a_time:
            return await self._on_thread(work)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    @property
    def _built(self) -> LearnerCore:
        if self._core is None:
            raise RuntimeError(f"learner {self._name!r} is not built; call build first")
        return self._core
