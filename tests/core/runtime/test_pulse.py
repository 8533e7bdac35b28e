import asyncio
import types

from forge_agents.errors import StallError
from forge_agents.runtime import mesh
from forge_agents.runtime.pulse import Pulse


def test_a_silent_process_is_told_with_the_setting_that_bears_with_it(monkeypatch):
    asked, starting = [], asyncio.Event()

    async def call_all(actors, size, endpoint, *args, timeout_s, who):
        asked.append(timeout_s)
        starting.set()
        await asyncio.sleep(0)
        error = StallError(f"{who} did not finish {endpoint} (rank 0) within {timeout_s:g} s", who)
        error.picture = {"stack": "learning"}
        raise error

    for name, answer in {"on_lost_host": False, "pids": (), "ended": ()}.items():
        monkeypatch.setattr(mesh, name, lambda *args, answer=answer: answer)
    monkeypatch.setattr(mesh, "call_all", call_all)

    async def heard():
        pulse = Pulse(types.SimpleNamespace(spawn=lambda *args: None), 1, name="hero-learner", silence_s=60)
        await asyncio.wait_for(starting.wait(), 20)  # may be silent meanwhile
        assert pulse.error is None
        pulse.started()
        return await asyncio.wait_for(pulse.lost(), 20)

    error = asyncio.run(heard())
    assert str(error).startswith("hero-learner gave no sign of life for silence_s=60 s: ")
    assert "raise silence_s" in str(error)
    assert (error.who, error.picture, asked[0]) == ("hero-learner", {"stack": "learning"}, 62)
