"""Monarch actor of one learner rank, around `LearnerCore`.

All work on the model and all collectives run on one thread, whose current device is the rank's device. The process's
event loop stays free for heartbeats and for messages of the weight store. The controller imports this module, too, so
only the actor's methods import torch and TorchTitan.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from forge_agents.imports import without_garbage_collection
from forge_agents.runtime._monarch import Actor, concurrent_endpoint
from forge_agents.runtime.machine import keep_freed_memory, limit_matmul_cache

if TYPE_CHECKING:
    from forge_agents.weights import Publisher, WeightStoreRef
    from forge_trainers.learner.core import LearnerCore
    from forge_trainers.learner.plan import LearnerPlan
    from forge_trainers.losses.registry import Loss

T = TypeVar("T")


def _method_of_core(name: str) -> Any:
    """An endpoint that calls a method of a learner's `LearnerCore` after all earlier calls."""

    async def call(self: LearnerActor, learner: str, *args: Any) -> Any:
        async with self._one_at_a_time:
            return await self._on_thread(getattr(self._core(learner), name), *args)

    call.__name__ = name
    return concurrent_endpoint(call)


class LearnerActor(Actor):
    """A rank of one learner, or of several learners with adapters on the same model.

    The first argument of each call is the name of the learner. Calls run in the order in which they arrive.
    """

    def __init__(
        self, configs: Mapping[str, LearnerPlan], name: str, store: WeightStoreRef | None, losses: Mapping[str, Loss]
    ) -> None:
        with without_garbage_collection():
            import forge_trainers.learner.core  # noqa: F401
            from forge_trainers.losses.registry import add_loss

        gc.freeze()  # collections do not visit the imported modules, which takes an eighth of the learner's start
        keep_freed_memory()
        limit_matmul_cache()
        for loss_name, loss in losses.items():
            add_loss(loss, requested_name=loss_name)  # a loss that the user registered is unknown in this process
        self._configs = configs
        self._name = name
        self._store = store
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")
        self._cores: dict[str, LearnerCore] = {}
        self._publishers: dict[str, Publisher] = {}
        # Collectives of two calls must not mix, so every rank runs its calls in the order in which they were sent.
        self._one_at_a_time = asyncio.Lock()

    @concurrent_endpoint
    async def build(self) -> dict[str, tuple[int, str]]:
        """Load the model. Called once. Returns `LearnerCore.max_sample_tokens` and the dtype of each learner."""
        from forge_trainers.learner.core import LearnerCore

        def build() -> dict[str, tuple[int, str]]:
            for learner, config in self._configs.items():
                self._cores[learner] = LearnerCore(config, base=next(iter(self._cores.values()), None))
            return {name: (core.max_sample_tokens, core.config.compute_dtype) for name, core in self._cores.items()}

        async with self._one_at_a_time:
            return await self._on_thread(build)

    set_total_steps = _method_of_core("set_total_steps")
    train_step = _method_of_core("train_step")
    logprobs = _method_of_core("logprobs")
    start_save = _method_of_core("start_save")
    load = _method_of_core("load")
    export = _method_of_core("export")
    offload = _method_of_core("offload")
    onload = _method_of_core("onload")

    @concurrent_endpoint
    async def finish_save(self, learner: str) -> dict[str, list[int]]:
        """`LearnerCore.finish_save`, perhaps at the same time as other calls."""
        return await asyncio.to_thread(self._core(learner).finish_save)

    @concurrent_endpoint
    async def use_store(self, learner: str, store: WeightStoreRef) -> None:
        """Publish to `store` from now on."""
        async with self._one_at_a_time:
            self._store = store
            self._publishers.pop(learner, None)

    @concurrent_endpoint
    async def publish(self, learner: str) -> dict[str, float]:
        """Publish the current weights to the store. Returns the publisher's timings and ``version``."""
        if self._store is None:
            raise RuntimeError(f"learner {self._name!r} cannot publish: it was started without a store")
        import torch

        core = self._core(learner)
        dtype: torch.dtype = getattr(torch, core.config.compute_dtype)
        async with self._one_at_a_time:
            if learner not in self._publishers:  # inside the lock, because `use_store` may have removed it
                self._publishers[learner] = self._store.publisher(learner, dtype=dtype, thread=self._thread)
            put = await self._publishers[learner].publish(core.version, partial(core.published, dtype))
            return {**put, "version": float(core.version)}

    async def _on_thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    def _core(self, learner: str) -> LearnerCore:
        if learner not in self._cores:
            raise RuntimeError(f"learner {self._name!r} is not built. Call build first")
        return self._cores[learner]
