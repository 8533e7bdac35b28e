"""Detection of processes and actors that hang, with a mesh whose processes live."""

import asyncio
import time
import types

import pytest

from forge_agents.errors import ActorDiedError, StallError
from forge_agents.runtime import heartbeat as heartbeat_module
from forge_agents.runtime import mesh
from forge_agents.runtime.heartbeat import Heartbeat

pytestmark = pytest.mark.anyio


@pytest.fixture
def heartbeat(monkeypatch):
    """``heartbeat(name, heartbeat_timeout_s)``: a heartbeat of processes that answer."""

    async def call_all(*args, **options):
        await asyncio.sleep(0.01)

    for name, answer in {"on_lost_host": False, "pids": (), "ended": ()}.items():
        monkeypatch.setattr(mesh, name, lambda *args, answer=answer: answer)
    monkeypatch.setattr(mesh, "call_all", call_all)
    monkeypatch.setattr(heartbeat_module, "_MAX_HOLD_S", 0.01)
    monkeypatch.setattr(mesh, "_LATE_S", 0.1)
    procs = types.SimpleNamespace(spawn=lambda *args: None)
    return lambda name, timeout_s: Heartbeat(procs, 1, name=name, heartbeat_timeout_s=timeout_s)


async def test_hung_process_error_names_heartbeat_timeout_s(heartbeat, monkeypatch):
    timeouts, starting = [], asyncio.Event()

    async def call_all(actors, size, endpoint, *args, timeout_s, who):
        timeouts.append(timeout_s)
        starting.set()
        await asyncio.sleep(0)
        error = StallError(f"{who} did not finish {endpoint} (rank 0) within {timeout_s:g} s", who)
        error.snapshot = {"stack": "learning"}
        raise error

    monkeypatch.setattr(mesh, "call_all", call_all)
    watched = heartbeat("hero-learner", 60)
    await asyncio.wait_for(starting.wait(), 60)  # it may be silent while it starts
    assert watched.error is None
    watched.start_timeout()
    error = await asyncio.wait_for(watched.lost(), 60)
    assert str(error).startswith("hero-learner gave no sign of life for heartbeat_timeout_s=60 s: ")
    assert "raise heartbeat_timeout_s" in str(error)
    assert (error.who, error.snapshot, timeouts[0]) == ("hero-learner", {"stack": "learning"}, 60.01)


async def test_hung_actor_in_a_live_process_is_detected(heartbeat):
    calls = []

    async def answer():
        calls.append(1)
        await asyncio.sleep(60 if len(calls) > 3 else 0)

    watched = heartbeat("weights", 0.2)
    watched.start_timeout()
    watched.add_probe(answer, "answer of the store")
    error = await asyncio.wait_for(watched.lost(), 60)
    assert isinstance(error, StallError) and error.who == "weights"
    assert str(error).startswith("weights gave no sign of life for heartbeat_timeout_s=0.2 s: ")
    assert "weights did not finish answer of the store within 0.2 s" in str(error)
    assert len(calls) == 4  # it answered three times before


@pytest.mark.parametrize("error", [ActorDiedError("weights died", "weights"), KeyError("sign-of-life")])
async def test_failing_probe_counts_as_loss(heartbeat, monkeypatch, error):
    monkeypatch.setattr(heartbeat_module, "_NOTICE_S", 0.01)

    async def answer():
        raise error

    watched = heartbeat("weights", 20)
    watched.add_probe(answer, "answer of the store")
    lost = await asyncio.wait_for(watched.lost(), 60)
    assert (type(lost), lost.who) == (ActorDiedError, "weights")
    assert str(error) in str(lost)


async def test_blocked_controller_thread_does_not_count_as_silence(heartbeat):
    calls, answered_again = [], asyncio.Event()

    async def answer():  # of several messages
        calls.append(1)
        for _ in range(5):
            await asyncio.sleep(0)
            if len(calls) == 1:
                time.sleep(0.4)  # noqa: ASYNC251  # blocks the controller's thread
        if len(calls) == 3:
            answered_again.set()

    watched = heartbeat("weights", 0.2)
    watched.add_probe(answer, "answer of the store")
    outcomes = [asyncio.ensure_future(watched.lost()), asyncio.ensure_future(answered_again.wait())]
    await asyncio.wait(outcomes, return_when=asyncio.FIRST_COMPLETED)
    watched.end()
    assert watched.error is None
    for outcome in outcomes:
        outcome.cancel()


async def test_time_of_a_blocked_thread_is_no_silence_of_processes(heartbeat, monkeypatch):
    """As after Ctrl-Z and `fg`: the answer arrived while the controller was suspended."""
    monkeypatch.setattr(mesh, "_LATE_S", 0.02)
    answered = asyncio.Event()

    async def answer():
        await asyncio.sleep(0.02)
        await asyncio.sleep(0)
        answered.set()
        return "answer"

    waiting = asyncio.ensure_future(mesh.with_deadline(answer(), 0.1, who="engine", what="an answer"))
    await asyncio.sleep(0)
    time.sleep(0.5)  # noqa: ASYNC251  # blocks the controller's thread
    assert await waiting == "answer" and answered.is_set()


async def test_a_thread_that_is_blocked_now_and_then_still_notices_a_stall(monkeypatch):
    monkeypatch.setattr(mesh, "_LATE_S", 0.02)
    waiting = asyncio.ensure_future(mesh.with_deadline(asyncio.sleep(60), 0.2, who="engine", what="an answer"))
    for _ in range(3):
        await asyncio.sleep(0.1)
        time.sleep(0.2)  # noqa: ASYNC251  # blocks the controller's thread
    with pytest.raises(StallError, match=r"engine did not finish an answer within 0\.2 s"):
        await asyncio.wait_for(waiting, 30)


async def test_a_thread_that_is_always_blocked_notices_a_stall(monkeypatch):
    monkeypatch.setattr(mesh, "_LATE_S", 0.02)

    async def block():
        while True:
            time.sleep(0.1)  # noqa: ASYNC251  # blocks the controller's thread
            await asyncio.sleep(0)

    blocking = asyncio.ensure_future(block())
    with pytest.raises(StallError, match="engine did not finish an answer"):
        await asyncio.wait_for(mesh.with_deadline(asyncio.sleep(60), 0.1, who="engine", what="an answer"), 30)
    blocking.cancel()
