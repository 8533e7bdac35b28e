"""The learner in its own process: one Monarch actor per rank around `LearnerCore`.

In: endpoint calls of the controller's `Learner`. Out: metrics, weights in the store. Waits for the other ranks.

All that touches the model or waits for other ranks runs on one thread, whose current device is the rank's, so that the
process still answers its heartbeat and the store's messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from forge_agents.imports import without_garbage_collection

with without_garbage_collection():
    import torch

    from forge_agents.runtime._monarch import Actor, concurrent_endpoint
    from forge_agents.runtime.machine import keep_freed_memory, limit_matmul_cache
    from forge_agents.weights import Publisher, WeightStoreRef
    from forge_trainers.learner.config import LearnerConfig
    from forge_trainers.learner.core import LearnerCore
    from forge_trainers.losses.registry import Loss, add_loss

T = TypeVar("T")


def _method_of_core(name: str) -> Any:
    """An endpoint for a method of one learner's `LearnerCore`, after the calls that came before."""

    async def call(self: LearnerActor, whose: str, *args: Any) -> Any:
        async with self._one_at_a_time:
            return await self._on_thread(getattr(self._core(whose), name), *args)

    call.__name__ = name
    return concurrent_endpoint(call)


class LearnerActor(Actor):
    """One rank of one learner, or of several whose adapters share a model.

    Calls say whose learner they are for, and wait for each other in the order they arrive.
    """

    def __init__(
        self, configs: Mapping[str, LearnerConfig], name: str, store: WeightStoreRef | None, losses: Mapping[str, Loss]
    ) -> None:
        keep_freed_memory()
        limit_matmul_cache()
        for asked, loss in losses.items():
            add_loss(loss, asked=asked)  # one that the user registered is not known in this process
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

        async with self._one_at_a_time:
            return await self._on_thread(build)

    set_total_steps = _method_of_core("set_total_steps")
    train_step = _method_of_core("train_step")
    logprobs = _method_of_core("logprobs")
    start_save = _method_of_core("start_save")
    load = _method_of_core("load")
    export = _method_of_core("export")
    park = _method_of_core("park")
    unpark = _method_of_core("unpark")

    @concurrent_endpoint
    async def finish_save(self, whose: str) -> dict[str, list[int]]:
        """`LearnerCore.finish_save`, beside whatever is computed."""
        return await asyncio.to_thread(self._core(whose).finish_save)

    @concurrent_endpoint
    async def use_store(self, whose: str, store: WeightStoreRef) -> None:
        """Publish there from now on."""
        async with self._one_at_a_time:
            self._store = store
            self._publishers.pop(whose, None)

    @concurrent_endpoint
    async def publish(self, whose: str) -> dict[str, float]:
        """Put the current weights into the store. Returns the publisher's timings and ``version``."""
        if self._store is None:
            raise RuntimeError(f"learner {self._name!r} was started without a store; nothing can be published")
        dtype: torch.dtype = getattr(torch, self._configs[whose].compute_dtype)
        core = self._core(whose)
        async with self._one_at_a_time:
            if whose not in self._publishers:  # now: `use_store` may have had its turn before
                self._publishers[whose] = self._store.publisher(whose, dtype=dtype, thread=self._thread)
            put = await self._publishers[whose].publish(core.version, partial(core.published, dtype))
            return {**put, "version": float(core.version)}

    async def _on_thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    def _core(self, whose: str) -> LearnerCore:
        if whose not in self._cores:
            raise RuntimeError(f"learner {self._name!r} is not built; call build first")
        return self._cores[whose]
