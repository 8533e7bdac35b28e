"""The actor around one engine.

In: batches of requests, weight versions. Out: batches of answers. Waits for the engine's thread.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import traceback
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from forge_agents.runtime._monarch import Actor, concurrent_endpoint
from forge_agents.runtime.machine import resident_bytes
from forge_agents.serving import _vllm
from forge_agents.serving._loop import EngineThread, follow
from forge_agents.serving._wire import Answer, EngineInfo, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from forge_agents.serving.config import EngineConfig
    from forge_agents.weights.store import WeightStoreRef
    from forge_agents.weights.versions import Subscriber

_LINGER_S = 0.002
"""Answers of one step leave together; later steps wait for the next message."""


class EngineActor(Actor):
    """Serves one model. The controller talks to it through `forge_agents.serving.Engine`."""

    def __init__(
        self, config: EngineConfig, store: WeightStoreRef | None, weights_name: str, heartbeat_timeout_s: float
    ) -> None:
        self._config = config
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._store = store
        self._weights_name = weights_name
        self._subscribers: dict[str, Subscriber] = {}
        self._versions = dict.fromkeys(("", *config.adapters), 0)
        self._fetched: dict[str, int] = {}
        self._last_update: dict[str, float] = {}
        self._start_s = 0.0
        self._answers: list[Answer] = []
        self._failure: str | None = None
        self._news = asyncio.Event()
        self._thread: EngineThread | None = None

    @concurrent_endpoint
    async def start(self) -> EngineInfo | None:
        """Build the engine, all ranks together. Only the first is asked for anything else; the others return None."""
        if self._config.tp > 1 and int(os.environ["RANK"]) > 0:
            ready: Future[None] = Future()
            follow(self._config, ready, _end)
            await asyncio.wrap_future(ready)
            return None
        started = time.perf_counter()
        loop = asyncio.get_running_loop()
        thread = EngineThread(
            self._config,
            deliver=lambda answers: loop.call_soon_threadsafe(self._take, answers),
            died=lambda error: loop.call_soon_threadsafe(self._fail, f"{type(error).__name__}: {error}"),
        )
        await asyncio.wrap_future(thread.ready)
        self._thread = thread
        self._start_s = time.perf_counter() - started
        return self._info()

    @concurrent_endpoint
    async def add(self, requests: list[Request]) -> None:
        """Queue requests; `poll` brings the answers."""
        self._running().add(requests)

    @concurrent_endpoint
    async def abort(self, request_ids: list[int]) -> None:
        """Drop requests."""
        self._running().abort(request_ids)

    @concurrent_endpoint
    async def poll(self, timeout_s: float) -> tuple[list[Answer], float]:
        """Answers since the last poll, as soon as there is one; none after `timeout_s`: the actor lives.

        With them the seconds in which the engine has had something to do.
        """
        still_s = self._running().still_s
        if still_s > self._heartbeat_timeout_s:
            self._fail(f"no step for {still_s:.0f} s, and it has work")
            self._running()
        try:
            await asyncio.wait_for(self._news.wait(), timeout_s)
            await asyncio.sleep(_LINGER_S)
        except TimeoutError:
            return [], self._running().busy_s
        thread = self._running()
        self._news.clear()
        answers, self._answers = self._answers, []
        return answers, thread.busy_s

    @concurrent_endpoint
    async def load_weights(self, version: int | None, adapter: str) -> dict[str, float]:
        """Fetch a version from the store and put it into the live engine, between two steps.

        `adapter` "" are the model's own weights.
        """
        thread = self._running()
        number = _vllm.adapter_number(self._config, adapter)
        if self._config.adapters and not adapter:
            raise ValueError("this engine serves adapters; the model's own weights must not change under them")
        lora = self._config.adapters.get(adapter)
        model = self._config.model
        expected = _vllm.adapter_shapes(model, lora) if lora else _vllm.expected_shapes(model)

        async def apply(
            tensors: Mapping[str, torch.Tensor], arrived: int, check: Callable[[], None] = lambda: None
        ) -> None:
            _vllm.check_tensors(tensors, expected)

            def load() -> None:
                if lora:
                    thread.ranks.together("load_adapter", number, lora, tensors, arrived)
                else:
                    thread.ranks.load(tensors, arrived)
                check()  # before anybody is answered

            try:
                await asyncio.wrap_future(thread.call(load))
            except Exception as error:
                self._fail(f"the weight update broke off half-way: {type(error).__name__}: {error}")
                raise
            self._versions[adapter] = self._fetched[adapter] = arrived

        subscriber = self._subscriber(adapter or self._weights_name)
        read = subscriber.fetch if lora else subscriber.lend  # an adapter is small, and its copy may start over
        result = await read(apply, version=version, have=lambda: self._fetched.get(adapter))
        self._last_update = {
            "version": float(result.version),
            "seconds": result.seconds,
            "fetch_s": result.seconds - result.apply_s,
            "load_s": result.apply_s,
            "bytes": float(result.bytes),
        }
        return self._last_update

    @concurrent_endpoint
    async def sleep(self) -> None:
        """Leave the device, on all ranks."""
        await self._move("sleep")

    @concurrent_endpoint
    async def wake(self) -> None:
        """Come back to the device."""
        await self._move("wake")

    async def _move(self, name: str) -> None:
        thread = self._running()

        def move() -> None:
            if thread.unfinished:
                raise ValueError(f"{thread.unfinished} requests are under way; an engine can only {name} without any")
            thread.ranks.together(name)

        await asyncio.wrap_future(thread.call(move))

    @concurrent_endpoint
    async def use_store(self, store: WeightStoreRef) -> None:
        """Look for weights there."""
        self._store = store
        self._subscribers.clear()

    @concurrent_endpoint
    async def info(self) -> EngineInfo:
        """State now."""
        return self._info()

    def _info(self) -> EngineInfo:
        thread = self._running()
        rss_bytes, peak_rss_bytes = resident_bytes()
        peak_device_bytes, device_used_bytes = _device_bytes()
        return EngineInfo(
            pid=os.getpid(),
            vocab_size=int(thread.engine.model_config.get_vocab_size()),
            max_model_len=_vllm.max_model_len(thread.engine),
            version=self._versions[""],
            adapters={name: version for name, version in self._versions.items() if name},
            generated_tokens=thread.generated_tokens,
            prompt_tokens=thread.prompt_tokens,
            cached_tokens=thread.cached_tokens,
            unfinished=thread.unfinished,
            steps=thread.steps,
            rss_bytes=rss_bytes,
            peak_rss_bytes=peak_rss_bytes,
            peak_device_bytes=peak_device_bytes,
            device_used_bytes=device_used_bytes,
            start_s=self._start_s,
            last_update=self._last_update,
        )

    @concurrent_endpoint
    async def close(self) -> None:
        """End the engine's thread."""
        if self._thread is not None:
            await asyncio.to_thread(self._thread.close, 5.0)

    def _subscriber(self, weights_name: str) -> Subscriber:
        from forge_agents.weights import Subscriber

        if self._store is None:
            raise ValueError("this engine was started without a weight store; pass store= to Engine.start")
        if weights_name not in self._subscribers:
            self._subscribers[weights_name] = Subscriber(self._store, weights_name)
        return self._subscribers[weights_name]

    def _running(self) -> EngineThread:
        if self._failure is not None:
            raise RuntimeError(f"the engine has failed: {self._failure}")
        if self._thread is None:
            raise RuntimeError("the engine has not been started")
        return self._thread

    def _take(self, answers: list[Answer]) -> None:
        self._answers += answers
        self._news.set()

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._news.set()


def _end(error: BaseException) -> None:
    """End this rank's process, which the controller sees at once: the other ranks cannot go on without it."""
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)


def _device_bytes() -> tuple[int, int]:
    """What torch has allocated at most on this process's accelerator, and what all processes have there now."""
    import torch

    if not torch.accelerator.is_available():
        return 0, 0
    device: Any = torch.get_device_module()
    free, total = device.mem_get_info()
    return int(device.max_memory_allocated()), int(total - free)
