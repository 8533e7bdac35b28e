"""The actor around one engine: receives requests, returns answers and loads weights."""

from __future__ import annotations

import asyncio
import os
import sys
import time
import traceback
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from forge_agents.runtime._monarch import Actor, concurrent_endpoint
from forge_agents.serving import _shapes, _vllm
from forge_agents.serving._loop import EngineThread, follow
from forge_agents.serving._wire import Answer, EngineInfo, Request

if TYPE_CHECKING:
    from forge_agents.serving.config import EnginePlan
    from forge_agents.weights import LoadedWeights, Subscriber, WeightStoreRef

_BATCHING_S = 0.002
"""Time in which answers of one step are collected for one message."""


class EngineActor(Actor):
    """Serves one model. The controller calls it through `EngineProcess`."""

    def __init__(
        self, config: EnginePlan, store: WeightStoreRef | None, weights_name: str, heartbeat_timeout_s: float
    ) -> None:
        self._config = config
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._store = store
        self._weights_name = weights_name
        self._subscribers: dict[str, Subscriber] = {}
        self._versions = dict.fromkeys(("", *config.adapters), 0)
        self._fetched: dict[str, int] = {}
        """Versions that came from the store. Version 0 of the model's folder is none of them."""
        self._answers: list[Answer] = []
        self._failure: str | None = None
        self._has_answers = asyncio.Event()
        self._thread: EngineThread | None = None

    @concurrent_endpoint
    async def start(self) -> EngineInfo | None:
        """Build the engine, on all ranks together. Only the first rank gets further calls. The others return None."""
        if self._config.tp > 1 and int(os.environ["RANK"]) > 0:
            ready: Future[None] = Future()
            follow(self._config, ready, _exit)
            await asyncio.wrap_future(ready)
            return None
        loop = asyncio.get_running_loop()
        thread = EngineThread(
            self._config,
            deliver=lambda answers: loop.call_soon_threadsafe(self._receive, answers),
            on_death=lambda error: loop.call_soon_threadsafe(self._fail, f"{type(error).__name__}: {error}"),
        )
        await asyncio.wrap_future(thread.ready)
        self._thread = thread
        return self._info()

    @concurrent_endpoint
    async def add(self, requests: list[Request]) -> None:
        """Queue requests. `poll` returns the answers."""
        self._running().add(requests)

    @concurrent_endpoint
    async def abort(self, request_ids: list[int]) -> None:
        """Drop requests."""
        self._running().abort(request_ids)

    @concurrent_endpoint
    async def poll(self, timeout_s: float) -> tuple[list[Answer], float]:
        """Answers since the last poll as soon as there are any, or none after `timeout_s` as a heartbeat.

        The second value is the number of seconds in which the engine has had work.
        """
        stalled_s = self._running().stalled_s
        if stalled_s > self._heartbeat_timeout_s:
            self._fail(f"no step for {stalled_s:.0f} s, although it has work")
            self._running()
        try:
            await asyncio.wait_for(self._has_answers.wait(), timeout_s)
            await asyncio.sleep(_BATCHING_S)
        except TimeoutError:
            return [], self._running().busy_s
        thread = self._running()
        self._has_answers.clear()
        answers, self._answers = self._answers, []
        return answers, thread.busy_s

    @concurrent_endpoint
    async def load_weights(self, version: int | None, adapter: str) -> dict[str, float]:
        """Load a version from the store into the running engine, between two steps.

        An empty `adapter` stands for the model's own weights.
        """
        number = _vllm.adapter_number(self._config, adapter)
        if self._config.adapters and not adapter:
            raise ValueError("this engine serves adapters. The model's own weights must not change under them")
        self._running()
        start = time.perf_counter()
        subscriber = self._subscriber(adapter or self._weights_name)
        async with subscriber.load(version, current=lambda: self._fetched.get(adapter)) as weights:
            if weights.tensors:
                await self._apply(weights, adapter, number)
        seconds = time.perf_counter() - start if weights.tensors else weights.fetch_s
        return {
            "version": float(weights.version),
            "seconds": seconds,
            "fetch_s": weights.fetch_s,
            "load_s": seconds - weights.fetch_s,
            "bytes": float(weights.num_bytes),
        }

    async def _apply(self, weights: LoadedWeights, adapter: str, number: int) -> None:
        thread, model, lora = self._running(), self._config.model, self._config.adapters.get(adapter)
        tensors = weights.tensors
        _shapes.check_tensors(tensors, _shapes.adapter_shapes(model, lora) if lora else _shapes.expected_shapes(model))
        if lora:
            # A copy, because a message to the other ranks would contain the whole buffer with each view of it. It is
            # checked before it is used, so an overwritten version leaves the engine as it was.
            tensors = await asyncio.to_thread(lambda: {name: view.clone() for name, view in weights.tensors.items()})
            await weights.verify()

        def load() -> None:
            if lora:
                thread.ranks.call("load_adapter", number, lora, tensors, weights.version)
                return
            thread.ranks.load(tensors, weights.version)
            # Before the next step: a version that was overwritten while it was read must never sample a token.
            weights.check()

        try:
            await asyncio.wrap_future(thread.call(load))
        except Exception as error:
            self._fail(f"the weight update broke off half-way: {type(error).__name__}: {error}")
            raise
        self._versions[adapter] = self._fetched[adapter] = weights.version

    @concurrent_endpoint
    async def sleep(self) -> None:
        """Offload the weights, on all ranks."""
        await self._call_idle("sleep")

    @concurrent_endpoint
    async def wake(self) -> None:
        """Load the weights back to the device, on all ranks."""
        await self._call_idle("wake")

    async def _call_idle(self, name: str) -> None:
        thread = self._running()

        def work() -> None:
            if thread.unfinished:
                raise ValueError(f"{thread.unfinished} requests are under way. An engine can only {name} without any")
            thread.ranks.call(name)

        await asyncio.wrap_future(thread.call(work))

    @concurrent_endpoint
    async def use_store(self, store: WeightStoreRef) -> None:
        """Look for weights in `store` from now on."""
        self._store = store
        self._subscribers.clear()

    @concurrent_endpoint
    async def info(self) -> EngineInfo:
        """Current state."""
        return self._info()

    def _info(self) -> EngineInfo:
        thread = self._running()
        peak_device_bytes, device_used_bytes = _device_bytes()
        return EngineInfo(
            pid=os.getpid(),
            vocab_size=int(thread.engine.model_config.get_vocab_size()),
            max_model_len=_vllm.max_model_len(thread.engine),
            version=self._versions[""],
            generated_tokens=thread.generated_tokens,
            prompt_tokens=thread.prompt_tokens,
            cached_tokens=thread.cached_tokens,
            unfinished=thread.unfinished,
            steps=thread.steps,
            peak_device_bytes=peak_device_bytes,
            device_used_bytes=device_used_bytes,
        )

    @concurrent_endpoint
    async def close(self) -> None:
        """End the engine's thread."""
        if self._thread is not None:
            await asyncio.to_thread(self._thread.close, 5.0)

    def _subscriber(self, weights_name: str) -> Subscriber:
        if self._store is None:
            raise ValueError("this engine was started without a weight store. Pass store= to its start")
        if weights_name not in self._subscribers:
            self._subscribers[weights_name] = self._store.subscriber(weights_name)
        return self._subscribers[weights_name]

    def _running(self) -> EngineThread:
        if self._failure is not None:
            raise RuntimeError(f"the engine has failed: {self._failure}")
        if self._thread is None:
            raise RuntimeError("the engine has not been started")
        return self._thread

    def _receive(self, answers: list[Answer]) -> None:
        self._answers += answers
        self._has_answers.set()

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._has_answers.set()


def _exit(error: BaseException) -> None:
    """End this rank's process, which the controller sees at once: the other ranks cannot continue without it."""
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)


def _device_bytes() -> tuple[int, int]:
    """Peak bytes that torch allocated on this process's accelerator, and bytes in use there by all processes."""
    import torch

    if not torch.accelerator.is_available():
        return 0, 0
    device: Any = torch.get_device_module()
    free, total = device.mem_get_info()
    return int(device.max_memory_allocated()), int(total - free)
