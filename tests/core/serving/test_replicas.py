"""EngineClient with engines that are played: whom deaths cost what, and how weights roll."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from refusals import raises

from forge_agents.errors import ActorDiedError, RespawnLimitError, StallError, UnknownIdError
from forge_agents.policy import Sampling
from forge_agents.rollout.policy_engine import PolicyEngine
from forge_agents.runtime.colocation import Colocation
from forge_agents.runtime.faults import Faults
from forge_agents.serving import EngineClient, EngineConfig
from forge_agents.serving import client as module
from forge_agents.serving.routing import LeastLoaded
from forge_agents.types import Completion, VersionSpan


class Played:
    """An engine without a process: `finish` answers, `die` ends it."""

    started: ClassVar[list[Played]] = []
    newest: ClassVar[int | None] = None
    """Content of the store, or None if the store is dead."""
    stores_told: ClassVar[list[Any]] = []
    broken_starts: ClassVar[int] = 0
    on_gpu: ClassVar[set[Any]] = set()
    """Owners of memory there."""

    def __init__(self, name: str) -> None:
        self.name, self.version, self.max_model_len = name, 0, 64
        self.initial_info = SimpleNamespace(pid=len(Played.started))
        self.waiting: list[asyncio.Future[Completion]] = []
        self.seeds: list[Any] = []
        self.adapters: list[str] = []
        self.loaded: list[str] = []
        self.stopped = False
        self._end: asyncio.Future[ActorDiedError] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(cls, config: EngineConfig, *, name: str, **others: Any) -> Played:
        await asyncio.sleep(0)
        if cls.broken_starts:
            cls.broken_starts -= 1
            raise ActorDiedError(f"{name} died during start", name)
        cls.started.append(engine := cls(name))
        await engine.wake()
        return engine

    async def sleep(self, *, timeout_s: float = 1.0) -> None:
        await asyncio.sleep(0)
        if self._end.done():
            raise ActorDiedError(f"{self.name} died", self.name)
        assert not self.waiting
        Played.on_gpu.discard(self)

    async def wake(self, *, timeout_s: float = 1.0) -> None:
        await asyncio.sleep(0)
        if self._end.done():
            raise ActorDiedError(f"{self.name} died", self.name)
        Played.on_gpu.add(self)
        assert "learner" not in Played.on_gpu

    @property
    def unfinished(self) -> int:
        return len(self.waiting)

    async def died(self) -> ActorDiedError:
        return await asyncio.shield(self._end)

    async def generate(
        self, prompt_ids: Any, sampling: Any, *, timeout_s: float | None, seed: Any = None, adapter: str = ""
    ) -> Completion:
        if self._end.done():
            raise ActorDiedError(f"{self.name} died", self.name)
        self.seeds.append(seed)
        self.adapters.append(adapter)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        try:
            return await asyncio.wait_for(future, timeout_s)
        finally:
            self.waiting.remove(future)

    async def load_weights(
        self, version: int | None = None, *, adapter: str = "", timeout_s: float = 1.0
    ) -> dict[str, float]:
        await asyncio.sleep(0)
        if Played.newest is None:
            raise ActorDiedError("weights died during put", "weights")
        if version not in (None, Played.newest):
            raise UnknownIdError("no such version")
        self.version = Played.newest
        self.loaded.append(adapter)
        return {"version": float(self.version), "bytes": 8.0, "fetch_s": 1.0, "load_s": 2.0, "seconds": 3.0}

    async def use_store(self, store: Any) -> None:
        Played.stores_told.append((self.name, store))

    async def stop(self, *, timeout_s: float = 1.0) -> None:
        self.die("stopped")
        await moments(5)  # a process takes its time to end
        self.stopped = True
        Played.on_gpu.discard(self)

    def finish(self, token: int = 7) -> None:
        for future in self.waiting:
            if not future.done():
                future.set_result(Completion(token_ids=(token,), logprobs=(0.0,), finish_reason="stop", versions=()))

    def die(self, why: str = "killed", place: str = "") -> None:
        if not self._end.done():
            self._end.set_result(ActorDiedError(why, self.name, place))
        for future in self.waiting:
            if not future.done():
                future.set_exception(ActorDiedError(f"{self.name} died", self.name))


pytestmark = pytest.mark.anyio
clients: list[EngineClient] = []


@pytest.fixture(autouse=True)
async def played(monkeypatch: pytest.MonkeyPatch, anyio_backend: str) -> AsyncIterator[None]:
    """Clients have engines without processes and are stopped after the test."""
    monkeypatch.setattr(module, "EngineProcess", Played)
    Played.started, Played.newest, Played.stores_told, Played.broken_starts = [], 1, [], 0
    Played.on_gpu = set()
    yield
    while clients:
        await clients.pop().stop()


async def moments(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def replicas(count: int, *, on_update: Any = "continue", **others: Any) -> Any:
    config: Any = EngineConfig(replicas=count, on_update=on_update)
    clients.append(client := await EngineClient(config, name="hero", **others).start())
    return client


async def test_requests_of_a_dead_engine_are_retried_with_their_seed():
    hero = await replicas(2)
    requested = [asyncio.ensure_future(hero.generate([i], Sampling(), seed=i)) for i in range(4)]
    await moments()
    assert hero.unfinished == {"hero-0": 2, "hero-1": 2}
    first, second = Played.started
    lost = first.seeds
    first.die()
    await moments()
    assert second.seeds[2:] == lost
    second.finish()
    assert [completion.token_ids for completion in await asyncio.gather(*requested)] == [(7,)] * 4
    assert first.stopped and len(Played.started) == 3 and Played.started[2].name == "hero-0"


async def test_successor_of_a_single_engine_has_the_newest_weights():
    hero = await replicas(1)
    await hero.load_weights(1)
    Played.newest = 2
    Played.broken_starts = 1  # the first successor dies as well
    requested = asyncio.ensure_future(hero.generate([1], Sampling()))
    await moments()
    Played.started[0].die()
    await moments(40)
    assert Played.started[1].version == 2
    Played.started[1].finish(9)
    assert (await requested).token_ids == (9,)


async def test_too_many_deaths_fail_all_waiting_requests(tmp_path):
    hero = await replicas(2, faults=Faults(max_respawns=1, file=tmp_path / "faults.jsonl"))
    requested = [asyncio.ensure_future(hero.generate([i], Sampling())) for i in range(2)]
    await moments()
    for engine in tuple(Played.started):
        engine.die("killed")
    for answer in await asyncio.gather(*requested, return_exceptions=True):
        assert isinstance(answer, RespawnLimitError)
        assert "2 processes died (hero-0, hero-1). A run restarts at most 1 processes" in str(answer)
    with pytest.raises(RespawnLimitError):
        await hero.load_weights(1)
    rows = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    assert [(row["event"], row["who"]) for row in rows][:2] == [("noticed", "hero-0"), ("noticed", "hero-1")]


async def test_death_is_mended_when_the_disk_is_full(caplog):
    hero = await replicas(1, faults=Faults(file=Path("/dev/full")))
    requested = asyncio.ensure_future(hero.generate([1], Sampling()))
    await moments()
    Played.started[0].die("killed")
    await moments(40)
    Played.started[1].finish(9)
    assert (await requested).token_ids == (9,)
    assert "/dev/full cannot be written" in caplog.text and '"who": "hero"' in caplog.text


async def test_weights_roll_through_replicas_while_others_generate():
    hero = await replicas(2)
    requested = [asyncio.ensure_future(hero.generate([i], Sampling())) for i in range(2)]
    await moments()
    timings = await hero.load_weights(1)
    assert timings == {"version": 1, "bytes": 8, "fetch_s": 2, "load_s": 4, "seconds": 6}
    assert [engine.version for engine in Played.started] == [1, 1]
    assert not any(task.done() for task in requested)
    for engine in Played.started:
        engine.finish()
    await asyncio.gather(*requested)


@pytest.mark.parametrize(("on_update", "asked"), [("continue", 1), ("restart", 3)])
async def test_answer_of_two_versions_is_kept_or_sampled_again(monkeypatch, on_update, asked):
    whole = VersionSpan(version=3, start=0, end=3)
    spans = [(VersionSpan(version=v, start=0, end=v), VersionSpan(version=v + 1, start=v, end=3)) for v in (1, 2)]
    spans.append((whole,))  # type: ignore[arg-type]
    answers = iter(spans)

    async def generate(self: Played, *args: Any, **options: Any) -> Completion:
        self.seeds.append(options["seed"])
        return Completion(token_ids=(7,) * 3, logprobs=(0.0,) * 3, finish_reason="stop", versions=next(answers))

    hero = await replicas(1, on_update=on_update)
    monkeypatch.setattr(Played, "generate", generate)
    completion = await hero.generate([1], Sampling(), seed=5)
    assert Played.started[0].seeds == [5] * asked
    assert completion.versions == spans[asked - 1]


async def test_half_of_the_replicas_load_at_a_time(monkeypatch):
    plain, loading, most = Played.load_weights, 0, []

    async def counted(self: Played, *args: Any, **options: Any) -> dict[str, float]:
        nonlocal loading
        loading += 1
        most.append(loading)
        await asyncio.sleep(0)
        try:
            return await plain(self, *args, **options)
        finally:
            loading -= 1

    hero = await replicas(5)
    monkeypatch.setattr(Played, "load_weights", counted)
    await hero.load_weights(1)
    assert [engine.version for engine in Played.started] == [1] * 5
    assert most == [1, 2, 1, 2, 1]


@pytest.mark.parametrize(("number", "sizes"), [(1, [1]), (2, [1, 1]), (3, [1, 1, 1]), (4, [2, 2]), (9, [4, 4, 1])])
def test_waves_contain_each_replica_once_and_at_most_half(number, sizes):
    result = module.waves(range(number))
    assert [len(wave) for wave in result] == sizes
    assert [one for wave in result for one in wave] == list(range(number))


async def test_dead_store_is_named_and_its_successor_awaited():
    hero = await replicas(2)
    await hero.load_weights(1)
    Played.newest = None
    with pytest.raises(ActorDiedError, match="weights died"):
        await hero.load_weights(2)
    Played.started[0].die()
    await moments()
    assert hero.pids["hero-0"] is None  # not asked before it has weights
    Played.newest = 2
    await hero.use_store("second store")
    await moments()
    assert hero.pids["hero-0"] == 2 and Played.started[2].version == 2
    assert Played.stores_told == [("hero-1", "second store"), ("hero-0", "second store")]


async def test_starting_engine_uses_the_replaced_store(monkeypatch):
    plain, gate = Played.start.__func__, asyncio.Event()  # type: ignore[attr-defined]

    async def slow(cls: type[Played], *args: Any, **options: Any) -> Played:
        if len(cls.started) == 2:
            await gate.wait()
        return await plain(cls, *args, **options)  # type: ignore[no-any-return]

    hero = await replicas(2, store="first store")
    await hero.load_weights(1)
    monkeypatch.setattr(Played, "start", classmethod(slow))
    Played.started[0].die()
    await moments()
    Played.newest = 2
    await hero.use_store("second store")  # the engine that is being started was given the first
    gate.set()
    await moments()
    assert Played.stores_told == [("hero-1", "second store"), ("hero-0", "second store")]
    assert Played.started[2].version == 2 and hero.pids["hero-0"] is not None


@pytest.mark.parametrize("late", [False, True])
async def test_engine_that_dies_with_its_store_starts_with_the_next_store(monkeypatch, late):
    """A reference to a store that is stopped cannot be sent to a process."""
    plain, stopped, given = Played.start.__func__, [], []  # type: ignore[attr-defined]

    async def start(cls: type[Played], *args: Any, store: Any, **options: Any) -> Played:
        await moments(5)
        if store in stopped:
            raise RuntimeError("`ProcMesh` has already been stopped")
        given.append(store)
        return await plain(cls, *args, **options)  # type: ignore[no-any-return]

    hero = await replicas(1, store="first store")
    await hero.load_weights(1)
    monkeypatch.setattr(Played, "start", classmethod(start))
    if late:  # the store dies while the engine starts
        Played.started[0].die()
        await moments(2)
    hero.forget_store()
    stopped.append("first store")
    Played.started[0].die()
    await moments()
    assert given == [] and hero.pids["hero"] is None
    await hero.use_store("second store")
    await moments(40)
    assert given == ["second store"] and hero.pids["hero"] is not None


async def test_error_of_a_start_that_no_store_explains_is_raised(monkeypatch):
    async def start(*_: Any, **__: Any) -> Played:
        raise RuntimeError("vLLM has no kernel")

    hero = await replicas(1, store="first store")
    monkeypatch.setattr(Played, "start", start)
    Played.started[0].die()
    await moments()
    with pytest.raises(RuntimeError, match="vLLM has no kernel"):
        await hero.load_weights(1)


async def test_starting_engine_retries_when_weights_are_loaded():
    hero = await replicas(2)
    await hero.load_weights(1)
    Played.newest = None  # the store is there and empty: its predecessor died
    Played.started[0].die()
    await moments()
    assert hero.pids["hero-0"] is None
    Played.newest = 2
    await asyncio.wait_for(hero.load_weights(2), 10)
    assert [engine.version for engine in Played.started[1:]] == [2, 2]


async def test_starting_engine_polls_for_weights(monkeypatch):
    monkeypatch.setattr(module, "_RETRY_S", 0.01)
    hero = await replicas(1)
    await hero.load_weights(1)
    Played.newest = None
    Played.started[0].die()
    loading = asyncio.ensure_future(hero.load_weights(2))  # has told what it will: it waits for the engine itself
    await moments()
    assert hero.pids["hero"] is None and not loading.done()
    Played.newest = 2
    await asyncio.wait_for(loading, 30)
    assert Played.started[1].version == 2


async def test_engine_without_weights_is_named_instead_of_the_store():
    hero = await replicas(1, timeout_s=0.2)
    await hero.load_weights(1)
    Played.newest = None
    Played.started[0].die()
    await moments()
    with pytest.raises(StallError, match="no weights came into the store") as caught:
        await hero.load_weights(2, timeout_s=10)
    assert caught.value.who == "hero"  # whoever replaces stores would do so again and again


async def test_conversation_stays_with_its_replica():
    hero = await replicas(2)
    for turn in range(3):
        requested = asyncio.ensure_future(hero.generate([1, *[7] * turn], Sampling()))
        await moments()
        busy = [engine.name for engine in Played.started if engine.waiting]
        assert busy == ["hero-0"]
        Played.started[0].finish()
        await requested


async def test_router_that_picks_no_live_replica_is_named():
    class Lost(LeastLoaded):
        def pick(self, prompt_ids: Any, loads: Any) -> int:
            return -1  # as of a list the last

    hero = await replicas(2, router=Lost())
    with pytest.raises(ValueError, match="router Lost picked -1. The live replicas are 0, 1"):
        await hero.generate([1], Sampling())


async def test_single_replica_is_not_routed():
    class Slow(LeastLoaded):  # a router reads all tokens of a prompt in the event loop
        pick = answered = None

    hero = await replicas(1, router=Slow())
    requested = asyncio.ensure_future(hero.generate([1], Sampling()))
    await moments()
    Played.started[0].finish()
    assert (await requested).token_ids


async def test_wait_for_a_live_engine_has_a_timeout():
    hero = await replicas(1)
    Played.broken_starts = 10**9
    hero._faults = Faults(max_respawns=10**9)
    Played.started[0].die()
    with pytest.raises(StallError, match="hero did not finish a completion .no engine is live. within"):
        await hero.generate([1], Sampling(), timeout_s=0.05)


@pytest.mark.parametrize(("field", "value"), [("replicas", 0), ("routing", "nearest")])
def test_meaningless_settings_are_refused(field, value):
    raises(ValueError, f"{field}={value!r}", EngineConfig, **{field: value})


async def test_same_death_twice_ends_the_run_with_its_cause():
    hero = await replicas(1, faults=Faults(max_respawns=8))
    for why, place in (("killed", ""), ("killed", ""), ("SIGILL in a", "a"), ("SIGSEGV in b", "b")):
        Played.started[-1].die(why, place)  # no place is known of a kill from outside: it may come again
        waiting = asyncio.ensure_future(hero.generate([1], Sampling(), timeout_s=5))
        await moments()
        Played.started[-1].finish()
        await waiting
    started = len(Played.started)
    Played.started[-1].die("SIGILL in a", "a")
    with pytest.raises(RespawnLimitError, match="twice the same death at the same place.*SIGILL in a"):
        await hero.generate([1], Sampling(), timeout_s=5)
    assert len(Played.started) == started


def test_start_that_dies_twice_at_one_place_is_not_retried():
    tries = []

    async def start() -> None:
        tries.append(1)
        raise ActorDiedError("hero died: SIGILL", "hero", "SIGILL in warm-up")

    raises(RespawnLimitError, "hero died: SIGILL", asyncio.run, Faults().start_with_retries("hero", start))
    assert len(tries) == 2


def test_process_that_ends_before_each_first_call_is_started_three_times():
    """Each start lacks the same thing, such as a folder."""
    tries = []

    async def start() -> None:
        tries.append(1)
        error = ActorDiedError("hero died while it was started", "hero")
        error.ended_at_start = True
        raise error

    match = "hero ended 3 times before it could be called.* hero died while it was started"
    raises(RespawnLimitError, match, asyncio.run, Faults().start_with_retries("hero", start))
    assert len(tries) == 3


def test_negative_respawn_limit_is_refused():
    raises(ValueError, "max_respawns=-1", Faults, max_respawns=-1)


async def test_successor_has_every_adapter():
    both = await replicas(1)
    hero, rival = (PolicyEngine(both, Any, name) for name in ("hero", "rival"))
    assert hero.max_model_len == 64
    for _ in range(2):
        await hero.load_weights(1)
        await rival.load_weights(1)
    Played.started[0].die()
    await moments()
    assert Played.started[1].loaded == ["hero", "rival"]
    requested = [asyncio.ensure_future(one.generate((1,), Sampling())) for one in (hero, rival, both)]
    await moments()
    assert Played.started[1].adapters == ["hero", "rival", ""]
    Played.started[1].finish()
    await asyncio.gather(*requested)


class Shared:
    """A GPU for engines and a learner in turns, which looks who is there."""

    def __init__(self, dies: str) -> None:
        self.turns, self._dies = Colocation("engines", 5.0), dies
        self.hero: Any = None
        self.playing = self.turns.register("engines", offload=self._leave, onload=self._come)
        self.learning = self.turns.register("learner", offload=self._learner_leaves, onload=self._learner_comes)

    async def _leave(self) -> None:
        if self._dies == "while they leave":
            Played.started[0].die()
        await self.hero.sleep()

    async def _come(self) -> None:
        await self.hero.wake()

    async def _learner_comes(self) -> None:
        assert not Played.on_gpu
        Played.on_gpu.add("learner")

    async def _learner_leaves(self) -> None:
        Played.on_gpu.discard("learner")

    async def play(self) -> None:
        asking = asyncio.ensure_future(self.hero.generate([1], Sampling(), timeout_s=5.0))
        while not asking.done():
            await asyncio.sleep(0)
            for engine in Played.started:
                engine.finish()
        await asking


@pytest.mark.parametrize("dies", ["before", "while they leave", "asleep"])
async def test_colocated_engines_offload_for_the_learner_and_return(dies):
    shared = Shared(dies)
    shared.hero = await replicas(2, device_access=shared.playing)
    await shared.play()
    for _ in range(3):
        if dies == "before":
            Played.started[0].die()
        async with shared.learning():
            assert Played.on_gpu == {"learner"}
            number = len(Played.started)
            if dies == "asleep":
                Played.started[-1].die()
            await moments(50)
            assert Played.on_gpu == {"learner"} and len(Played.started) == number  # the next one waits
        await shared.play()
        await moments()
        assert Played.on_gpu == {engine for engine in Played.started if not engine.stopped}
        assert len(Played.on_gpu) == 2
