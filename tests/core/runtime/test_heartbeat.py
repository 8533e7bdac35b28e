import asyncio
import time
import types

import pytest

from forge_agents.errors import ActorDiedError, StallError
from forge_agents.runtime import mesh
from forge_agents.runtime.heartbeat import Heartbeat


def test_hung_process_error_names_heartbeat_timeout_s(monkeypatch):
    requested, starting = [], asyncio.Event()

    async def call_all(actors, size, endpoint, *args, timeout_s, who):
        requested.append(timeout_s)
        starting.set()
        await asyncio.sleep(0)
        error = StallError(f"{who} did not finish {endpoint} (rank 0) within {timeout_s:g} s", who)
        error.snapshot = {"stack": "learning"}
        raise error

    for name, answer in {"on_lost_host": False, "pids": (), "ended": ()}.items():
        monkeypatch.setattr(mesh, name, lambda *args, answer=answer: answer)
    monkeypatch.setattr(mesh, "call_all", call_all)

    async def heard():
        procs = types.SimpleNamespace(spawn=lambda *args: None)
        heartbeat = Heartbeat(procs, 1, name="hero-learner", heartbeat_timeout_s=60)
        await asyncio.wait_for(starting.wait(), 20)  # may be silent meanwhile
        assert heartbeat.error is None
        heartbeat.start_timeout()
        return await asyncio.wait_for(heartbeat.lost(), 20)

    error = asyncio.run(heard())
    assert str(error).startswith("hero-learner gave no sign of life for heartbeat_timeout_s=60 s: ")
    assert "raise heartbeat_timeout_s" in str(error)
    assert (error.who, error.snapshot, requested[0]) == ("hero-learner", {"stack": "learning"}, 62)


@pytest.fixture
def living_processes(monkeypatch):
    """What is asked of a mesh whose processes live."""

    async def call_all(*args, **options):
        await asyncio.sleep(0.01)

    for name, answer in {"on_lost_host": False, "pids": (), "ended": ()}.items():
        monkeypatch.setattr(mesh, name, lambda *args, answer=answer: answer)
    monkeypatch.setattr(mesh, "call_all", call_all)
    monkeypatch.setattr("forge_agents.runtime.heartbeat._HOLD_S", 0.01)
    monkeypatch.setattr("forge_agents.runtime.heartbeat._BEAT_S", 0.01)
    return lambda heartbeat_timeout_s: Heartbeat(
        types.SimpleNamespace(spawn=lambda *args: None), 1, name="weights", heartbeat_timeout_s=heartbeat_timeout_s
    )


def test_hung_actor_in_a_live_process_is_detected(living_processes):
    requested = []

    async def answer():
        requested.append(1)
        await asyncio.sleep(60 if len(requested) > 3 else 0)

    async def heard():
        heartbeat = living_processes(0.2)
        heartbeat.start_timeout()
        heartbeat.add_probe(answer, "answer of the store")
        return await asyncio.wait_for(heartbeat.lost(), 20)

    error = asyncio.run(heard())
    assert isinstance(error, StallError)
    assert str(error).startswith("weights gave no sign of life for heartbeat_timeout_s=0.2 s: ")
    assert "weights did not finish answer of the store within 0.2 s" in str(error)
    assert error.who == "weights"
    assert len(requested) == 4  # it answered three times before


@pytest.mark.parametrize("error", [ActorDiedError("weights died", "weights"), KeyError("sign-of-life")])
def test_failing_probe_counts_as_loss(living_processes, monkeypatch, error):
    monkeypatch.setattr("forge_agents.runtime.heartbeat._NOTICE_S", 0.01)

    async def answer():
        raise error

    async def heard():
        heartbeat = living_processes(20)
        heartbeat.add_probe(answer, "answer of the store")
        return await asyncio.wait_for(heartbeat.lost(), 20)

    lost = asyncio.run(heard())
    assert (type(lost), lost.who) == (ActorDiedError, "weights")
    assert str(error) in str(lost)


def test_blocked_controller_thread_does_not_count_as_silence(living_processes):
    requested, heard_again = [], asyncio.Event()

    async def answer():  # of several messages
        requested.append(1)
        for _ in range(5):
            await asyncio.sleep(0)
            if len(requested) == 1:
                hold()
        if len(requested) == 3:
            heard_again.set()

    def hold():
        time.sleep(1)

    async def heard():
        heartbeat = living_processes(0.5)
        heartbeat.add_probe(answer, "answer of the store")
        await asyncio.wait(
            [asyncio.ensure_future(heartbeat.lost()), asyncio.ensure_future(heard_again.wait())],
            return_when=asyncio.FIRST_COMPLETED,
        )
        heartbeat.end()
        return heartbeat.error

    assert asyncio.run(heard()) is None
