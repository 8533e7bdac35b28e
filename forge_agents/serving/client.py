"""The client of a served model: routes requests to replicas, retries them if a replica dies, and loads new weights."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeVar

from forge_agents.errors import ActorDiedError, StallError, UnknownIdError
from forge_agents.policy import Sampling
from forge_agents.runtime import mesh
from forge_agents.runtime.colocation import DeviceAccess, unshared
from forge_agents.runtime.faults import Faults
from forge_agents.runtime.stalls import waiting
from forge_agents.runtime.threads import BusyTime, all_or_first_error
from forge_agents.serving._wire import EngineInfo
from forge_agents.serving.process import HEARTBEAT_TIMEOUT_S, EngineProcess
from forge_agents.serving.routing import Router, router_class
from forge_agents.types import Completion

if TYPE_CHECKING:
    from forge_agents.serving.config import EnginePlan
    from forge_agents.weights.store import WeightStoreRef

T = TypeVar("T")
_RETRY_S = 1.0
"""Seconds after which an engine that found no weights looks again."""
_MAX_REASON_CHARS = 200


@dataclass(slots=True, eq=False)
class _Replica:
    """A place that one engine process after another fills."""

    name: str
    engine: EngineProcess | None = None
    watcher: asyncio.Task[None] | None = None
    busy: BusyTime = field(default_factory=BusyTime)


class EngineClient:
    """One or more engines of one model, which `start` starts. Call it from one event loop.

    If an engine dies, its requests are sent again with the same tokens and seed, to another replica or to the engine
    that takes its place. A death therefore costs time but no episode, and every request is answered once. A new engine
    loads the newest weights of the store before it receives requests.

    Args:
        config: Settings of all replicas. There are ``config.replicas`` engines.
        name: Name in errors and logs, with a number if there are several, also the name of the weights.
        store: Store in which `load_weights` finds new weights, or None for a model that never changes.
        faults: Counter of deaths. None allows the default number of `Faults`.
        heartbeat_timeout_s: Seconds after which a silent engine counts as dead.
        timeout_s: Timeout of the start, in seconds.
        router: Router of requests, or None for the one that ``config.routing`` names.
        device_access: Access to GPUs of other users too, who call `sleep` and `wake`.
    """

    def __init__(
        self,
        config: EnginePlan,
        *,
        name: str = "engine",
        store: WeightStoreRef | None = None,
        faults: Faults | None = None,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        timeout_s: float = 300.0,
        router: Router | None = None,
        device_access: DeviceAccess = unshared,
    ) -> None:
        self.name = name
        self.answers = 0
        """Number of completions so far."""
        self._config, self._store, self._faults = config, store, faults or Faults()
        self._router = router or router_class(config.routing)(config.max_num_seqs)
        self._heartbeat_timeout_s, self._start_timeout_s = heartbeat_timeout_s, timeout_s
        self._device_access = device_access
        self._processes: list[EngineProcess] = []
        """Engines whose processes may exist, including those that start or stop."""
        self._replicas = [_Replica(replica) for replica in names_of(name, config.replicas)]
        self._loaded: list[str] = []
        """Adapters whose weights were loaded so far. "" stands for the model's own."""
        self._failure: BaseException | None = None
        self._max_model_len = 0
        self._changed, self._has_store = asyncio.Event(), asyncio.Event()
        self._has_store.set()

    async def start(self) -> Self:
        """Start the engines, each as by `EngineProcess.start`, and return this client.

        If one fails, the others are stopped.
        """
        try:
            await all_or_first_error(map(self._fill, self._replicas))
        except BaseException:
            await self.stop()
            raise
        return self

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and response together."""
        return self._max_model_len

    @property
    def pids(self) -> dict[str, int | None]:
        """Process ids by replica, or None if a replica is being restarted."""
        return {each.name: each.engine.initial_info.pid if each.engine else None for each in self._replicas}

    @property
    def busy_s(self) -> dict[str, float]:
        """Seconds in which each replica had work, since the start, as last reported."""
        return {replica.name: replica.busy.seconds for replica in self._replicas}

    @property
    def unfinished(self) -> dict[str, int | None]:
        """Requests without an answer by replica, or None if a replica is being restarted."""
        return {each.name: each.engine.unfinished if each.engine else None for each in self._replicas}

    @property
    def on_device(self) -> bool:
        """Whether a live replica has an accelerator."""
        return any(engine.initial_info.peak_device_bytes for engine in self._live())

    def _live(self) -> list[EngineProcess]:
        return [replica.engine for replica in self._replicas if replica.engine is not None]

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, timeout_s: float | None = None, **options: Any
    ) -> Completion:
        """Complete one prompt, as `EngineProcess.generate` with its `options`.

        `timeout_s` includes restarts of engines.

        Raises:
            RespawnLimitError: An engine died and no more may be started.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s

        async def ask(engine: EngineProcess) -> Completion:
            left_s = None if deadline is None else deadline - time.monotonic()
            return await engine.generate(prompt_ids, sampling, timeout_s=left_s, **options)

        while True:
            replica, completion = await self._with_live(
                lambda: self._route(prompt_ids), ask, deadline, what="a completion"
            )
            if self._config.on_update == "continue" or len(completion.versions) < 2:
                break
        self.answers += 1
        if len(self._replicas) > 1:
            self._router.answered(prompt_ids, completion.token_ids, self._replicas.index(replica))
        return completion

    def _route(self, prompt_ids: Sequence[int]) -> _Replica | None:
        """The replica that the router picks, or None if no replica is live."""
        loads = {i: r.engine.unfinished for i, r in enumerate(self._replicas) if r.engine is not None}
        if not loads:
            return None
        if len(self._replicas) == 1:  # a router takes 0.2 s for a million tokens
            return self._replicas[0]
        if (number := self._router.pick(prompt_ids, loads)) not in loads:
            router, live = type(self._router).__name__, ", ".join(map(str, loads))
            raise ValueError(f"router {router} picked {number!r:.40}. The live replicas are {live}")
        return self._replicas[number]

    async def load_weights(
        self, version: int | None = None, *, adapter: str = "", timeout_s: float = 120.0
    ) -> dict[str, float]:
        """Load published weights, as `EngineProcess.load_weights`, in half of the replicas at a time.

        Returns:
            ``version`` and ``bytes`` of one replica. ``fetch_s``, ``load_s`` and ``seconds`` of all together.
        """
        self._notify()  # a starting engine may wait for these weights
        timings: list[dict[str, float]] = []
        for wave in waves(self._replicas):
            loading = (self._load(replica, version, adapter, timeout_s) for replica in wave)
            timings += await all_or_first_error(loading)
        total = {name: sum(timing[name] for timing in timings) for name in ("fetch_s", "load_s", "seconds")}
        return {**timings[0], "bytes": max(timing["bytes"] for timing in timings), **total}

    async def _load(self, replica: _Replica, version: int | None, adapter: str, timeout_s: float) -> dict[str, float]:
        deadline = time.monotonic() + timeout_s

        async def load(engine: EngineProcess) -> dict[str, float]:
            return await engine.load_weights(version, adapter=adapter, timeout_s=deadline - time.monotonic())

        def choose() -> _Replica | None:
            return replica if replica.engine is not None else None

        _, timing = await self._with_live(choose, load, deadline, what="a weight update")
        if adapter not in self._loaded:
            self._loaded.append(adapter)
        return timing

    def forget_store(self) -> None:
        """Let engines that start wait for `use_store`, because a store that is stopped cannot be sent to a process."""
        self._has_store.clear()

    async def use_store(self, store: WeightStoreRef) -> None:
        """Look for new weights in `store` from now on, in place of one that died."""
        self._store = store
        self._has_store.set()
        for engine in self._live():
            with contextlib.suppress(ActorDiedError, StallError):  # its successor starts with the new store
                await engine.use_store(store)
        self._notify()

    async def infos(self) -> dict[str, EngineInfo]:
        """State of every live replica, by name."""
        engines = self._live()
        states = await asyncio.gather(*(engine.info() for engine in engines))
        return dict(zip((engine.name for engine in engines), states, strict=True))

    async def stop(self, *, timeout_s: float = 10.0) -> None:
        """End all engines. Requests in flight fail. Calling it twice is safe."""
        self._failure = self._failure or ActorDiedError(f"{self.name} was stopped", self.name)
        self._notify()
        watchers = [replica.watcher for replica in self._replicas if replica.watcher is not None]
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        await asyncio.gather(*(engine.stop(timeout_s=timeout_s) for engine in self._live()))

    async def sleep(self) -> None:
        """Free the GPUs: on return, each engine's weights are in host memory or its process has ended.

        Raises:
            ValueError: Requests are under way.
            StallError: An engine did not answer.
        """
        await all_or_first_error(self._unless_dead(engine, engine.sleep) for engine in self._processes)

    async def wake(self) -> None:
        """Return to the GPUs after `sleep`. An engine that has died in the meantime is replaced."""
        await all_or_first_error(self._unless_dead(engine, engine.wake) for engine in self._processes)

    async def _unless_dead(self, engine: EngineProcess, move: Callable[[], Awaitable[None]]) -> None:
        try:
            await move()
        except ActorDiedError:
            await self._end(engine)  # its memory is free when its processes have ended

    async def _end(self, engine: EngineProcess) -> None:
        await engine.stop()
        if engine in self._processes:
            self._processes.remove(engine)

    async def _with_live(
        self,
        choose: Callable[[], _Replica | None],
        work: Callable[[EngineProcess], Awaitable[T]],
        deadline: float | None,
        *,
        what: str,
    ) -> tuple[_Replica, T]:
        """Do `work` with the engine of the chosen replica. If the engine dies, choose again.

        Without a `deadline`, the wait for a live engine lasts at most as long as three starts may take.
        """
        while True:
            replica = choose()
            if self._failure is not None:
                raise self._failure
            if replica is None or replica.engine is None:
                left_s = 3 * self._start_timeout_s if deadline is None else deadline - time.monotonic()
                change = self._changed.wait()  # of the present event: `_notify` replaces it
                await mesh.with_deadline(change, left_s, who=self.name, what=f"{what} (no engine is live)")
                continue
            engine = replica.engine
            try:
                async with self._device_access():
                    return replica, await work(engine)
            except ActorDiedError as error:
                if self._failure is not None:
                    raise self._failure from error
                if error.who != replica.name:  # the store died
                    raise
                if replica.engine is engine:
                    replica.engine = None

    async def _fill(self, replica: _Replica) -> None:
        """Start an engine in a replica's place, and again while starts fail and faults allow it."""
        await self._faults.start_with_retries(replica.name, lambda: self._start_engine(replica))

    async def _start_process(self, replica: _Replica) -> tuple[EngineProcess, WeightStoreRef | None]:
        """Start a replica's process. Returns the engine and its store."""
        while True:
            with_store = self._has_store.wait()
            await mesh.with_deadline(with_store, self._start_timeout_s, who=replica.name, what="a start (no store)")
            store = self._store
            try:
                async with self._device_access():
                    engine = await EngineProcess.start(
                        self._config,
                        name=replica.name,
                        store=store,
                        weights_name=self.name,
                        heartbeat_timeout_s=self._heartbeat_timeout_s,
                        timeout_s=self._start_timeout_s,
                    )
                    engine.busy = replica.busy
                    self._processes.append(engine)
                    return engine, store
            except RuntimeError as error:  # Monarch's, if the store was stopped meanwhile
                if type(error) is not RuntimeError or (self._has_store.is_set() and store is self._store):
                    raise

    async def _start_engine(self, replica: _Replica) -> None:
        engine, store = await self._start_process(replica)
        try:
            await self._catch_up(engine, store)
        except BaseException:
            await self._end(engine)
            raise
        self._max_model_len = engine.max_model_len
        replica.engine = engine
        replica.watcher = asyncio.ensure_future(self._watch(replica, engine))
        self._notify()

    async def _catch_up(self, engine: EngineProcess, store: WeightStoreRef | None) -> None:
        """Load the newest weights into a new engine that knows `store`, if any were loaded before.

        Tries again while no weights are found: the store may have died, its successor may still be empty, or it was
        busy. A version that is loaded while this runs reaches the engine either here or by `load_weights`.
        """
        failed_at: float | None = None
        while True:
            changed = self._changed  # the present event: later changes count
            try:
                if self._store is not None and self._store is not store:
                    await engine.use_store(self._store)
                    store = self._store
                for adapter in tuple(self._loaded):
                    async with self._device_access():
                        await engine.load_weights(adapter=adapter, timeout_s=self._start_timeout_s)
            except (ActorDiedError, StallError, UnknownIdError) as error:
                if isinstance(error, (ActorDiedError, StallError)) and error.who == engine.name:
                    raise
                failed_at = failed_at or time.monotonic()
                left_s = failed_at + self._start_timeout_s - time.monotonic()
                what = f"catching up (no weights came into the store: {str(error)[:_MAX_REASON_CHARS]})"
                if left_s <= 0:
                    message = f"{engine.name} did not finish {what} within {self._start_timeout_s:g} s"
                    raise StallError(message, engine.name) from error
                with waiting(engine.name, what, left_s), contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), min(left_s, _RETRY_S))
            else:
                if store is self._store:
                    return
                failed_at = None

    async def _watch(self, replica: _Replica, engine: EngineProcess) -> None:
        """Wait for the engine's end and start another in its place."""
        cause = await engine.died()
        replica.engine = None
        stopping = asyncio.ensure_future(self._end(engine))
        try:
            fault = self._faults.record(replica.name, cause)
            await self._fill(replica)
            self._faults.recovered(fault)
            await stopping
        except Exception as error:  # noqa: BLE001  # the boundary: waiting requests raise it
            self._failure = error
            self._notify()

    def _notify(self) -> None:
        """Wake the tasks that wait for an engine or a store."""
        self._changed.set()
        self._changed = asyncio.Event()


def names_of(name: str, replicas: int) -> list[str]:
    """Names of the engines of one model."""
    return [f"{name}-{i}" for i in range(replicas)] if replicas > 1 else [name]


def waves(replicas: Sequence[T]) -> list[Sequence[T]]:
    """Groups of replicas that load weights one after another: with several, at least half always generate."""
    size = max(1, len(replicas) // 2)
    return [replicas[start : start + size] for start in range(0, len(replicas), size)]
