"""Engines of one model behind the face of one engine: requests are spread, dead engines replaced.

In: prompts as tokens, weight versions. Out: completions. Waits for engines, and for those that are started again,
always with a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from forge_agents.errors import ActorDiedError, StallError, UnknownIdError
from forge_agents.policy import Sampling
from forge_agents.runtime import mesh
from forge_agents.runtime.colocation import DeviceAccess, unshared
from forge_agents.runtime.faults import Faults
from forge_agents.runtime.stalls import waiting
from forge_agents.runtime.threads import BusyTime, all_or_first_error
from forge_agents.serving._wire import EngineInfo
from forge_agents.serving.engine import HEARTBEAT_TIMEOUT_S, Engine
from forge_agents.serving.routing import Router, router_class
from forge_agents.types import Completion

if TYPE_CHECKING:
    from forge_agents.serving.config import EngineConfig
    from forge_agents.weights.store import WeightStoreRef

T = TypeVar("T")
_LOOK_AGAIN_S = 1.0
"""An engine that found no weights looks for them after this long."""
_MOST_SAID = 200
"""Characters of why it found none."""


@dataclass(slots=True, eq=False)
class _Replica:
    """A place that one engine after another fills."""

    name: str
    engine: Engine | None = None
    watcher: asyncio.Task[None] | None = None
    busy: BusyTime = field(default_factory=BusyTime)


class Replicas:
    """One or more engines of one model. Make them with `start`; call them from one event loop.

    A request whose engine dies is asked again, with the same tokens and the same seed, of another replica or of the
    one that takes the dead one's place: a death costs time and no episode, and every request is answered once. A new
    engine holds the newest weights of the store before it is asked.
    """

    def __init__(
        self,
        config: EngineConfig,
        name: str,
        store: WeightStoreRef | None,
        faults: Faults,
        router: Router,
        *,
        heartbeat_timeout_s: float,
        start_s: float,
        device_access: DeviceAccess = unshared,
    ) -> None:
        self.name = name
        self.answers = 0
        """Completions so far."""
        self._config, self._store, self._faults, self._router = config, store, faults, router
        self._heartbeat_timeout_s, self._start_s, self._device_access = heartbeat_timeout_s, start_s, device_access
        self._living: list[Engine] = []
        """Engines whose processes have not been seen to end, on their way in and out as well."""
        self._replicas = [_Replica(each) for each in names_of(name, config.replicas)]
        self._loaded: list[str] = []
        """Whose weights were loaded so far: adapters by name, "" for the model's own."""
        self._failure: BaseException | None = None
        self._max_model_len = 0
        self._changed = asyncio.Event()

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        name: str = "engine",
        store: WeightStoreRef | None = None,
        faults: Faults | None = None,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        timeout_s: float = 300.0,
        router: Router | None = None,
        device_access: DeviceAccess = unshared,
    ) -> Replicas:
        """Start ``config.replicas`` engines, as `Engine.start`; where one fails to start, the others are stopped.

        Args:
            config: The model, its limits, and how many.
            name: Said in errors and logs, with a number where there are several; also what the weights are called.
            store: Where `load_weights` finds new weights; None for a model that never changes.
            faults: Counts deaths; None allows `Faults`'s usual number.
            router: Who picks; None: what ``config.routing`` says.
            device_access: What starts and requests run in, where others use the same GPUs; they `sleep` and `wake`
                the engines.
        """
        router = router or router_class(config.routing)(config.max_num_seqs)
        self = cls(
            config,
            name,
            store,
            faults or Faults(),
            router,
            heartbeat_timeout_s=heartbeat_timeout_s,
            start_s=timeout_s,
            device_access=device_access,
        )
        try:
            await all_or_first_error(map(self._fill, self._replicas))
        except BaseException:
            await self.stop()
            raise
        return self

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and response together."""
        return self._max_model_len

    @property
    def pids(self) -> dict[str, int | None]:
        """Process ids by replica; None where one is being started again."""
        return {replica.name: replica.engine.facts.pid if replica.engine else None for replica in self._replicas}

    @property
    def busy_s(self) -> dict[str, float]:
        """Seconds in which each replica's engine computed, since the start, as far as it has told."""
        return {replica.name: replica.busy.seconds for replica in self._replicas}

    @property
    def unfinished(self) -> dict[str, int | None]:
        """Requests without an answer by replica; None where one is being started again."""
        return {replica.name: replica.engine.unfinished if replica.engine else None for replica in self._replicas}

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, timeout_s: float | None = None, **options: Any
    ) -> Completion:
        """As `Engine.generate`, whose `options` it takes; `timeout_s` includes engines that are started again.

        Raises:
            RespawnLimitError: An engine died, and no more may be started.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s

        async def ask(engine: Engine) -> Completion:
            left_s = None if deadline is None else deadline - time.monotonic()
            return await engine.generate(prompt_ids, sampling, timeout_s=left_s, **options)

        def choose() -> _Replica | None:
            loads = {i: r.engine.unfinished for i, r in enumerate(self._replicas) if r.engine is not None}
            if not loads:
                return None
            if (picked := self._router.pick(prompt_ids, loads)) not in loads:
                who, known = type(self._router).__name__, ", ".join(map(str, loads))
                raise ValueError(f"router {who} picked {picked!r:.40}; the replicas that live are {known}")
            return self._replicas[picked]

        while True:
            replica, completion = await self._with_live(choose, ask, deadline, what="a completion")
            if self._config.on_update == "continue" or len(completion.versions) < 2:
                break
        self.answers += 1
        self._router.answered(prompt_ids, completion.token_ids, self._replicas.index(replica))
        return completion

    async def load_weights(
        self, version: int | None = None, *, adapter: str = "", timeout_s: float = 120.0
    ) -> dict[str, float]:
        """As `Engine.load_weights`, half of the replicas at a time: the others generate undisturbed.

        Returns:
            ``version`` and ``bytes`` of one; ``fetch_s``, ``load_s`` and ``seconds`` of all together.
        """
        self._notify()  # an engine on its way may wait for these weights
        timings: list[dict[str, float]] = []
        for wave in waves(self._replicas):
            timings += await all_or_first_error(self._load(each, version, adapter, timeout_s) for each in wave)
        spent = {name: sum(timing[name] for timing in timings) for name in ("fetch_s", "load_s", "seconds")}
        return {**timings[0], "bytes": max(timing["bytes"] for timing in timings), **spent}

    async def _load(self, replica: _Replica, version: int | None, adapter: str, timeout_s: float) -> dict[str, float]:
        deadline = time.monotonic() + timeout_s

        async def load(engine: Engine) -> dict[str, float]:
            return await engine.load_weights(version, adapter=adapter, timeout_s=deadline - time.monotonic())

        def choose() -> _Replica | None:
            return replica if replica.engine is not None else None

        _, timing = await self._with_live(choose, load, deadline, what="a weight update")
        if adapter not in self._loaded:
            self._loaded.append(adapter)
        return timing

    async def use_store(self, store: WeightStoreRef) -> None:
        """From now on find new weights in `store`, which took the place of one that died."""
        self._store = store
        for engine in [replica.engine for replica in self._replicas]:
            if engine is not None:
                try:
                    await engine.use_store(store)
                except (ActorDiedError, StallError):  # its successor is told
                    continue
        self._notify()

    @property
    def on_device(self) -> bool:
        """Whether a replica that lives has an accelerator."""
        return any(replica.engine.facts.peak_device_bytes for replica in self._replicas if replica.engine is not None)

    async def infos(self) -> dict[str, EngineInfo]:
        """The state of every replica that lives, by name."""
        live = {replica.name: replica.engine for replica in self._replicas if replica.engine is not None}
        states = await asyncio.gather(*(engine.info() for engine in live.values()))
        return dict(zip(live, states, strict=True))

    async def stop(self, *, timeout_s: float = 10.0) -> None:
        """End all engines; requests in flight fail. Twice is no error."""
        self._failure = self._failure or ActorDiedError(f"{self.name} was stopped", self.name)
        self._notify()
        watchers = [replica.watcher for replica in self._replicas if replica.watcher is not None]
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        engines = [replica.engine for replica in self._replicas if replica.engine is not None]
        await asyncio.gather(*(engine.stop(timeout_s=timeout_s) for engine in engines))

    async def sleep(self) -> None:
        """Leave the GPUs to others: when it returns, each engine's weights are in the host's memory or it has ended.

        Raises:
            ValueError: Requests are under way.
            StallError: An engine did not answer.
        """
        await all_or_first_error(self._move(engine, engine.sleep) for engine in self._living)

    async def wake(self) -> None:
        """Come back after `sleep`. An engine that has died meanwhile is replaced, as at any time."""
        await all_or_first_error(self._move(engine, engine.wake) for engine in self._living)

    async def _move(self, engine: Engine, move: Callable[[], Awaitable[None]]) -> None:
        try:
            await move()
        except ActorDiedError:
            await self._end(engine)  # its memory is free when its processes are gone

    async def _end(self, engine: Engine) -> None:
        await engine.stop()
        if engine in self._living:
            self._living.remove(engine)

    async def _with_live(
        self,
        choose: Callable[[], _Replica | None],
        work: Callable[[Engine], Awaitable[T]],
        deadline: float | None,
        *,
        what: str,
    ) -> tuple[_Replica, T]:
        """Do `work` with the engine of the chosen replica; where it dies, choose again.

        Without a `deadline` an engine is waited for as long as three may take to start.
        """
        while True:
            replica = choose()
            if self._failure is not None:
                raise self._failure
            if replica is None or replica.engine is None:
                left_s = 3 * self._start_s if deadline is None else deadline - time.monotonic()
                # `_changed` as it is now, so that no change is missed
                change = self._changed.wait()
                await mesh.with_deadline(change, left_s, who=self.name, what=f"{what} (no engine lives)")
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
        """Start an engine in a place, and keep one there."""
        await self._faults.start_with_retries(replica.name, lambda: self._start_engine(replica))

    async def _start_engine(self, replica: _Replica) -> None:
        store = self._store
        async with self._device_access():
            engine = await Engine.start(
                self._config,
                name=replica.name,
                store=store,
                weights_name=self.name,
                heartbeat_timeout_s=self._heartbeat_timeout_s,
                timeout_s=self._start_s,
            )
            engine.busy = replica.busy
            self._living.append(engine)
        try:
            await self._catch_up(engine, store)
        except BaseException:
            await self._end(engine)
            raise
        self._max_model_len = engine.max_model_len
        replica.engine = engine
        replica.watcher = asyncio.ensure_future(self._watch(replica, engine))
        self._notify()

    async def _catch_up(self, engine: Engine, store: WeightStoreRef | None) -> None:
        """Give a new engine, which looks into `store`, the newest weights, if any were loaded so far.

        Where none can be had it looks again: the store may have died, another may be empty still, or it was busy.
        """
        failed_at: float | None = None
        while True:
            changed = self._changed  # as it is now: a change from here on counts
            try:
                if self._store is not None and self._store is not store:
                    await engine.use_store(self._store)
                    store = self._store
                for adapter in tuple(self._loaded):
                    async with self._device_access():
                        await engine.load_weights(adapter=adapter, timeout_s=self._start_s)
            except (ActorDiedError, StallError, UnknownIdError) as error:
                if isinstance(error, (ActorDiedError, StallError)) and error.who == engine.name:
                    raise
                failed_at = failed_at or time.monotonic()
                left_s = failed_at + self._start_s - time.monotonic()
                what = f"catching up (no weights came into the store: {str(error)[:_MOST_SAID]})"
                if left_s <= 0:
                    message = f"{engine.name} did not finish {what} within {self._start_s:g} s"
                    raise StallError(message, engine.name) from error
                with waiting(engine.name, what, left_s), contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), min(left_s, _LOOK_AGAIN_S))
            else:
                if store is self._store:
                    return
                failed_at = None

    async def _watch(self, replica: _Replica, engine: Engine) -> None:
        """Wait for the engine's end and start another in its place."""
        cause = await engine.died()
        replica.engine = None
        stopping = asyncio.ensure_future(self._end(engine))
        try:
            fault = self._faults.record(replica.name, cause)
            await self._fill(replica)
            self._faults.recovered(fault)
            await stopping
        except Exception as error:  # noqa: BLE001  # the boundary: whoever waits for a completion raises it
            self._failure = error
            self._notify()

    def _notify(self) -> None:
        """Wake those who wait for an engine or a store."""
        self._changed.set()
        self._changed = asyncio.Event()


def names_of(name: str, replicas: int) -> list[str]:
    """What the engines of one model are called."""
    return [f"{name}-{i}" for i in range(replicas)] if replicas > 1 else [name]


def waves(replicas: Sequence[T]) -> list[Sequence[T]]:
    """Parts of `replicas` that load weights one after the other: while one does, at least half of several generate."""
    size = max(1, len(replicas) // 2)
    return [replicas[start : start + size] for start in range(0, len(replicas), size)]
