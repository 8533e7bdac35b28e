"""An engine's bookkeeping, with vLLM faked: failures must reach everyone who waits."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from process_checks import holds_within
from refusals import raises

from forge_agents.errors import ActorDiedError, LateAnswerError, StallError
from forge_agents.policy import Sampling
from forge_agents.runtime.heartbeat import Heartbeat
from forge_agents.serving import EngineProcess, _shapes, _vllm
from forge_agents.serving import process as engine_module
from forge_agents.serving._loop import EngineThread
from forge_agents.serving._wire import Answer, Request
from forge_agents.serving.config import EnginePlan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float8"}, "dtype='float8'"),
        ({"max_model_len": 1}, "max_model_len=1"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"kv_cache_gb": 0.0}, "kv_cache_gb=0"),
        ({"threads": 0}, "threads=0"),
        ({"answer_timeout_s": 0.0}, "answer_timeout_s=0"),
    ],
)
def test_invalid_settings_are_refused(tmp_path, change, message):
    (tmp_path / "config.json").write_text("{}")
    raises(ValueError, message, EnginePlan, model=str(tmp_path), **change)


@pytest.mark.parametrize(("tiles", "granted"), [(True, True), (True, False), (False, False)])
def test_amx_tiles_are_requested_before_bfloat16_attention(monkeypatch, tiles, granted):
    import torch

    requested = []
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: bool(requested.append(1)) or granted)
    _vllm._permit_tiles("float32")
    if tiles and not granted:
        raises(RuntimeError, r"AMX.*SIGILL. Take EngineConfig\(dtype=\"float32\"\)", _vllm._permit_tiles, "bfloat16")
    else:
        _vllm._permit_tiles("bfloat16")
    assert len(requested) == 2 * tiles


def test_folder_without_model_is_refused(tmp_path):
    raises(FileNotFoundError, r"no folder with a config\.json", EnginePlan, model=str(tmp_path))


@pytest.fixture
def start_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., EngineThread]]:
    """``start_thread(engine, **options)``: the thread of an `EngineThread` around a faked engine."""
    started: list[EngineThread] = []

    def start(engine: Any, *, answer_timeout_s: float = 600.0, **callbacks: Any) -> EngineThread:
        (tmp_path / "config.json").write_text("{}")
        monkeypatch.setattr(_vllm, "build", lambda config: engine)
        monkeypatch.setattr(_vllm, "max_model_len", lambda engine: 8)
        monkeypatch.setattr(_vllm, "add", lambda engine, name, request: engine.requests.append(name))
        monkeypatch.setattr(_vllm, "running", lambda engine: dict(getattr(engine, "working", {})))
        plan = EnginePlan(model=str(tmp_path), answer_timeout_s=answer_timeout_s)
        started.append(EngineThread(plan, **{"deliver": ignore, "on_death": ignore, **callbacks}))
        started[-1].ready.result(timeout=60)
        return started[-1]

    yield start
    for thread in started:
        thread.close(5)


def ignore(event: object) -> None:
    return None


def requests(count: int, max_tokens: int = 2) -> list[Request]:
    sampling = Sampling(max_tokens=max_tokens)
    return [Request(request_id=number, prompt_ids=(1,), sampling=sampling) for number in range(count)]


def answer_of(name: str, finish_reason: str = "stop") -> SimpleNamespace:
    """Output of vLLM for a request, of one token."""
    token = SimpleNamespace(logprob=-0.5)
    sampled = SimpleNamespace(token_ids=[7], logprobs=[{7: token}], finish_reason=finish_reason, weight_versions=None)
    return SimpleNamespace(finished=True, request_id=name, outputs=[sampled], num_cached_tokens=0)


class FailingEngine:
    """Engine that takes requests and raises in its step."""

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def __init__(self) -> None:
        self.requests: list[str] = []

    def step(self) -> list[Any]:
        raise ArithmeticError("numbers went missing")


def test_failed_step_ends_the_thread_and_fails_pending_jobs(start_thread):
    deaths: queue.Queue[BaseException] = queue.Queue()
    thread = start_thread(FailingEngine(), on_death=deaths.put)
    assert thread.call(lambda: 42).result(timeout=60) == 42
    with pytest.raises(LookupError):
        thread.call(lambda: [1][int("1")]).result(timeout=60)
    thread.add(requests(1))
    assert isinstance(deaths.get(timeout=60), ArithmeticError)
    raises(RuntimeError, "thread has ended", thread.call(lambda: 42).result, timeout=60)


class GivingUpEngine:
    """Gives its first request up, and answers the others with one token."""

    def __init__(self) -> None:
        self.requests: list[str] = []

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Any]:
        name = self.requests.pop(0)
        return [answer_of(name, "error" if name == "0" else "stop")]


def test_request_that_vllm_gives_up_fails_alone(start_thread):
    answers: queue.Queue[list[Answer]] = queue.Queue()
    thread = start_thread(GivingUpEngine(), deliver=answers.put)
    thread.add(requests(2))
    (failed,), (answered,) = answers.get(timeout=60), answers.get(timeout=60)
    assert failed.completion is None and "'error'" in failed.error
    assert answered.completion is not None and answered.completion.token_ids == (7,)
    assert (thread.generated_tokens, thread.prompt_tokens, thread.cached_tokens) == (1, 1, 0)


class Clock:
    """The time that the engine's thread sees."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class QueueingEngine:
    """Computes `room` requests at a time. Each takes `seconds` steps of a second, slow ones never end."""

    def __init__(self, clock: Clock, room: int, seconds: int, slow: set[str]) -> None:
        self.clock, self.room, self.seconds, self.slow = clock, room, seconds, slow
        self.requests: list[str] = []
        self.working: dict[str, int] = {}
        self.aborted: list[str] = []

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests or self.working)

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names
        for name in names:
            self.working.pop(name, None)

    def step(self) -> list[Any]:
        self.clock.now += 1.0
        while self.requests and len(self.working) < self.room:
            self.working[self.requests.pop(0)] = 0
        for name in self.working:
            self.working[name] += 1
        done = [name for name, age in self.working.items() if age >= self.seconds and name not in self.slow]
        for name in done:
            del self.working[name]
        return [answer_of(name) for name in done]


def test_answer_timeout_excludes_the_queue_and_fails_one_request(start_thread, monkeypatch):
    fake, answers = QueueingEngine(Clock(), room=64, seconds=8, slow={"5"}), queue.Queue[list[Answer]]()
    monkeypatch.setattr("forge_agents.serving._loop.time", fake.clock)
    thread = start_thread(fake, deliver=answers.put, answer_timeout_s=10.0)
    thread.add(requests(512, max_tokens=99))
    by_id: dict[int, Answer] = {}
    while len(by_id) < 512:
        by_id |= {answer.request_id: answer for answer in answers.get(timeout=60)}
    assert fake.clock.now > 60  # the last ones waited for six times what an answer may take
    late = by_id.pop(5)
    assert late.late and late.completion is None and fake.aborted == ["5"]
    assert "had 12 of at most 99 tokens" in late.error and "answer_timeout_s=10" in late.error
    assert all(answer.completion is not None for answer in by_id.values())
    assert thread.unfinished == 0 and thread.stalled_s == 0


def test_steps_without_running_requests_count_as_stalled(start_thread, monkeypatch):
    fake = QueueingEngine(Clock(), room=0, seconds=1, slow=set())
    monkeypatch.setattr("forge_agents.serving._loop.time", fake.clock)
    thread = start_thread(fake, answer_timeout_s=10.0)
    thread.add(requests(1))
    assert holds_within(60, lambda: thread.stalled_s >= 100)
    fake.room = 1
    assert holds_within(60, lambda: thread.stalled_s == 0)


class Call:
    """Stands for an endpoint."""

    def __init__(self, function: Any) -> None:
        self.choose = function


class FakeActor:
    """Answers requests with their prompts until it is told to fail."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.failing = asyncio.Event()
        self.error: Exception = RuntimeError("the engine has failed: ArithmeticError: numbers went missing")
        self.add, self.poll, self.abort, self.close = map(Call, (self._add, self._poll, self._done, self._done))

    async def _add(self, requests: list[Request]) -> None:
        self.batches.append(len(requests))
        await asyncio.sleep(0.01)

    async def _poll(self, timeout_s: float) -> tuple[list[Answer], float]:
        await self.failing.wait()
        raise self.error

    async def _done(self, *args: Any) -> None:
        return None


class Beating:
    """The heartbeat of a process that lives on."""

    async def lost(self) -> ActorDiedError:
        return await asyncio.Event().wait()  # type: ignore[return-value]

    def end(self) -> None:
        return None


def process_of(actor: Any, config: Any = None, *, heartbeat: Any = None, **options: Any) -> EngineProcess:
    facts: Any = SimpleNamespace(vocab_size=10, max_model_len=8)
    heartbeat = heartbeat or Beating()
    return EngineProcess(
        config or EnginePlan(), name="hero", procs=None, actor=actor, initial_info=facts, heartbeat=heartbeat, **options
    )


@pytest.mark.anyio
async def test_failed_engine_fails_all_waiting_requests():
    actor = FakeActor()
    engine = process_of(actor)
    waiting = [asyncio.ensure_future(engine.generate([1, 2], Sampling(), timeout_s=60)) for _ in range(50)]
    while sum(actor.batches) < 50:  # noqa: ASYNC110  # it is a list
        await asyncio.sleep(0.01)
    assert len(actor.batches) <= 2  # requests of one moment travel together
    actor.failing.set()
    outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 60)
    assert all(isinstance(outcome, ActorDiedError) for outcome in outcomes)
    assert "hero has failed" in str(outcomes[0])
    assert "numbers went missing" in str(outcomes[0])
    with pytest.raises(ActorDiedError, match="hero has failed"):
        await engine.generate([1], Sampling())


class OfTwoRanks(Heartbeat):
    """The heartbeat of an engine's two processes, of which nothing was seen yet."""

    def __init__(self) -> None:
        self._name, self._size, self._tasks = "hero", 2, []
        self._lost = asyncio.get_running_loop().create_future()


@pytest.mark.parametrize(
    "end", [ActorDiedError("hero died: SIGKILL", "hero", "a"), StallError("hero is silent", "hero")]
)
@pytest.mark.anyio
async def test_update_that_fails_with_a_dead_rank_reports_the_death(end):
    actor, heartbeat = FakeActor(), OfTwoRanks()

    async def load_weights(version: int | None, adapter: str) -> None:
        asyncio.get_running_loop().call_later(0.01, heartbeat._tell, end)  # is seen a moment later
        raise RuntimeError("gloo: Connection closed by peer")

    actor.load_weights = Call(load_weights)  # type: ignore[attr-defined]
    engine = process_of(actor, heartbeat=heartbeat)
    with pytest.raises(ActorDiedError, match=str(end)) as caught:  # and not what gloo says, which ends a run
        await engine.load_weights(2)
    assert (caught.value.who, caught.value.place) == ("hero", getattr(end, "place", ""))


@pytest.mark.parametrize("where", ["poll", "add"])
@pytest.mark.anyio
async def test_unexpected_replies_of_the_actor_fail_all_requests(where):
    async def refuse(requests: list[Request]) -> None:
        raise KeyError("Answer")  # such as of a message that cannot be read

    actor: Any = FakeActor()
    actor.error = KeyError("Answer")
    if where == "poll":
        actor.failing.set()
    else:
        actor.add = Call(refuse)
    engine = process_of(actor)
    with pytest.raises(ActorDiedError, match="hero .*KeyError: 'Answer'"):
        await engine.generate([1], Sampling())


class SlowActor(FakeActor):
    """Gives the answers that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Answer] = []

    async def _poll(self, timeout_s: float) -> tuple[list[Answer], float]:
        await asyncio.sleep(0.01)
        given, self.given = self.given, []
        return given, 0.0


class BusyActor(FakeActor):
    """Reports its busy time since its start, in seconds, and ends after the last report."""

    def __init__(self, reports: list[float]) -> None:
        super().__init__()
        self.reports = reports

    async def _poll(self, timeout_s: float) -> tuple[list[Answer], float]:
        await asyncio.sleep(0)
        if not self.reports:
            raise self.error
        return [], self.reports.pop(0)


@pytest.mark.anyio
async def test_busy_time_is_measured_by_the_engine():
    """The controller's own clock would also count the time in which an environment blocks its event loop."""
    engine = process_of(BusyActor([1.5, 1.5, 2.0]))
    engine.busy.seconds = 10.0  # of the process that this one replaces
    await asyncio.wait_for(engine.died(), 60)
    assert engine.busy.seconds == 12.0


@pytest.mark.anyio
async def test_late_answer_fails_alone_and_silent_engine_is_dead(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    actor = SlowActor()
    engine = process_of(actor, EnginePlan(answer_timeout_s=60.0), heartbeat_timeout_s=60.0)
    waiting = [asyncio.ensure_future(engine.generate([1], Sampling())) for _ in range(3)]
    for number in range(2):  # answers of others keep the last one waiting
        clock[0] += 100.0
        actor.given = [Answer(request_id=number, completion=None, error="had 3 tokens", late=True)]
        with pytest.raises(LateAnswerError, match="hero had 3 tokens"):
            await waiting[number]
    await asyncio.sleep(0.05)  # polls without an answer
    assert not waiting[2].done()
    clock[0] += 121.0
    with pytest.raises(ActorDiedError, match=r"answered none of 1 requests for 121 s.*after 60 s"):
        await asyncio.wait_for(waiting[2], 60)


def test_update_must_have_all_tensors_in_their_shapes(tmp_path):
    torch = pytest.importorskip("torch")
    expected = {"a": (2, 3), "b": (4,)}
    whole = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    _shapes.check_tensors(whole, expected)
    _shapes.check_tensors({**whole, "lm_head.weight": torch.zeros(1)}, expected)  # tied: may come or not
    with pytest.raises(ValueError, match=r"1 tensors are missing \(\['b'\]\), 1 are unknown \(\['c'\]\)"):
        _shapes.check_tensors({"a": whole["a"], "c": whole["b"]}, expected)
    with pytest.raises(ValueError, match=r"tensor 'a' has shape \(3, 2\)"):
        _shapes.check_tensors({**whole, "a": torch.zeros(3, 2)}, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_small_updates_of_float32_weights_count_in_an_engine_of_bfloat16(dtype, monkeypatch):
    import torch

    sizes, randint = [], torch.randint
    monkeypatch.setattr(
        torch, "randint", lambda *args, **options: sizes.append(args[2].numel()) or randint(*args, **options)
    )
    monkeypatch.setattr(_vllm, "_ROUNDED_AT_ONCE", 300_000)  # a GPU has no space for four copies of a large weight
    loaded: dict[str, torch.Tensor] = {}
    model = torch.nn.Linear(1, 1)
    engine: Any = SimpleNamespace(
        model_config=SimpleNamespace(dtype=getattr(torch, dtype)),
        model_executor=SimpleNamespace(driver_worker=SimpleNamespace(get_model=lambda: model)),
        collective_rpc=lambda name, kwargs: loaded.update(kwargs["weights_iterator"]),
        reset_prefix_cache=lambda **settings: None,
        get_weight_version=lambda: "{}",
        set_weight_version=lambda text: None,
    )
    bias = "model.layers.0.mlp.gate.e_score_correction_bias"
    old = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    update = 1e-3 * old * torch.randn(old.shape, generator=torch.Generator().manual_seed(1))
    seen = []
    for version, weight in enumerate((old, old + update)):
        _vllm.load_tensors(engine, {"w": weight, bias: weight[0], "b": weight[0].bfloat16()}.items(), version)
        assert loaded["w"].dtype == getattr(torch, dtype)
        assert torch.equal(loaded[bias], weight[0]) and torch.equal(loaded["b"], weight[0].bfloat16())
        seen.append(loaded["w"].float())
    assert torch.equal(seen[0], old)
    assert sizes == [300_000, 300_000, 300_000, 100_000] * 2 * (dtype == "bfloat16")
    assert float(((seen[1] - old) * update).sum() / update.square().sum()) == pytest.approx(1, abs=0.02)
