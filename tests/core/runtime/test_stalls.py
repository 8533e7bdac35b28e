"""Snapshots of stalls: current waits, and the place of every task and thread."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time

import pytest

from forge_agents.errors import StallError
from forge_agents.runtime import mesh
from forge_agents.runtime import stalls as _stalls
from forge_agents.runtime.threads import in_thread

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _no_shared_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_stalls, "_last", None)


async def never_answers() -> None:
    await asyncio.sleep(60)


def test_stall_error_names_other_waits_and_has_a_snapshot() -> None:
    async def main() -> StallError:
        _stalls.register("engines", lambda: {"team": 3})
        _stalls.register("broken", lambda: 1 / 0)
        turns = [
            asyncio.ensure_future(mesh.with_deadline(never_answers(), 30, who="team", what="a completion"))
            for _ in range(3)
        ]
        try:
            with pytest.raises(StallError) as caught:
                await mesh.with_deadline(asyncio.gather(*turns), 0.1, who="episodes", what="collection of step 4")
        finally:
            _stalls.register("engines", None)
            _stalls.register("broken", None)
            await asyncio.gather(*turns, return_exceptions=True)
        return caught.value

    error = asyncio.run(main())
    assert "episodes did not finish collection of step 4 within 0.1 s" in str(error)
    assert re.search(r"Other waits at that time: team: a completion \(3 x, up to \d+\.\d s\)", str(error))
    assert error.who == "episodes"
    picture = json.loads(json.dumps(error.snapshot))
    assert picture["engines"] == {"team": 3}
    assert picture["broken"] == "ZeroDivisionError: division by zero"
    assert [(wait["who"], wait["timeout_s"]) for wait in picture["waits"]] == [("team", 30)] * 3
    stalled = next(task for task in picture["tasks"] if "never_answers" in str(task["stack"]))
    assert stalled["count"] == 3
    assert any("test_stalls.py" in line for stack in picture["threads"].values() for line in stack)


async def test_ended_waits_are_removed() -> None:
    await mesh.with_deadline(asyncio.sleep(0), 1, who="team", what="a completion")
    with pytest.raises(StallError):
        await mesh.with_deadline(never_answers(), 0.01, who="team", what="a completion")
    assert _stalls.summary() == ""


async def test_endless_call_does_not_delay_exit() -> None:
    over = threading.Event()
    started = time.monotonic()
    with pytest.raises(StallError, match="reward own did not finish scoring"):
        await mesh.with_deadline(in_thread(over.wait, 60, name="slow"), 0.05, who="reward own", what="scoring")
    assert any(thread.name == "slow" and thread.daemon for thread in threading.enumerate())
    assert time.monotonic() - started < 30
    over.set()


async def test_in_thread_returns_or_raises() -> None:
    assert await in_thread(divmod, 7, 2, name="sum") == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await in_thread(divmod, 7, 0, name="sum")
