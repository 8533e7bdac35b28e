"""Runs end rather than hang: files that stalls leave, and code that holds the controller's thread."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from plain_env import Plain

import forge_agents as fa
from forge_agents.errors import RespawnLimitError, StallError
from forge_agents.rollout.episode import play
from forge_agents.runtime import mesh, watchdog
from forge_agents.runtime.watchdog import Watchdog
from forge_trainers.run.supervision import stalls_recorded


class Sleepy(Plain):
    """Sleeps for an hour in its first decision. Before that, the watchdog's clock is stopped."""

    since = 0.0
    jump_s = 0.0
    is_busy = False

    possible_agents = ("only",)

    def act(self, agent, action):
        type(self).since = time.monotonic()
        time.sleep(3600)
        return fa.Outcome(rewards={agent: 1.0}, done=True)

    @classmethod
    def monotonic(cls):
        return 1.0 + (cls.jump_s + time.monotonic() - cls.since if cls.since else 0.0)

    @classmethod
    def process_time(cls):
        return cls.jump_s if cls.since and cls.is_busy else 0.0


def test_a_stall_leaves_a_file_and_the_error_names_it(tmp_path):
    async def main():
        with stalls_recorded(tmp_path):
            await mesh.with_deadline(asyncio.sleep(60), 0.01, who="team", what="a completion")

    for number in range(2):
        with pytest.raises(StallError, match=rf"team did not finish .*is in .*stall-{number}\.json"):
            asyncio.run(main())
        result = json.loads((tmp_path / f"stall-{number}.json").read_text())
        assert result["error"].startswith("StallError: team did not finish a completion")
        assert result["tasks"] and result["threads"]


def test_a_stall_on_a_full_disk_is_the_error_of_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    why = r"^team hangs\. The state of the run could not be written to .*stall-0\.json"
    with pytest.raises(StallError, match=why), stalls_recorded(tmp_path / "file/run"):
        raise StallError("team hangs", "team")


def test_the_end_by_too_many_deaths_is_written_as_well_and_a_mistake_is_not(tmp_path):
    async def main(error):
        with stalls_recorded(tmp_path):
            raise error

    with pytest.raises(RespawnLimitError, match=r"stall-0\.json"):
        asyncio.run(main(RespawnLimitError("too many")))
    with pytest.raises(ValueError, match="^mistake$"):
        asyncio.run(main(ValueError("mistake")))
    assert len(list(tmp_path.iterdir())) == 1


def test_an_environment_that_holds_the_thread_costs_its_episode_only(tmp_path, monkeypatch):
    monkeypatch.setattr(Sleepy, "since", 0.0)
    monkeypatch.setattr(watchdog, "time", Sleepy)
    before = signal.getsignal(signal.SIGUSR2)

    async def main():
        with stalls_recorded(tmp_path), Watchdog(0.4):
            return await play(Sleepy(), {"only": fa.Scripted(lambda seen: "x")}, seed=0)

    started = time.monotonic()
    episode = asyncio.run(main())
    assert time.monotonic() - started < 60  # an hour without it
    assert episode.error is not None and episode.error.where == "step"
    assert "test_watchdog.py" in episode.error.message and "at most 0.4 s" in episode.error.message
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGUSR2) is before


def test_a_script_that_holds_the_thread_costs_its_episode_only(tmp_path):
    async def main():
        with stalls_recorded(tmp_path), Watchdog(0.4):
            stuck = fa.Scripted(lambda seen: time.sleep(3600))
            return await play(Plain(), dict.fromkeys(Plain.possible_agents, stuck), seed=0)

    error = asyncio.run(main()).error
    assert (error.where, error.kind) == ("policy", "StallError") and "test_watchdog.py" in error.message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("is_busy", "held_s"), [(True, "600"), (False, "0")], ids=["holds the interpreter", "suspended"]
)
def test_time_in_which_the_watchdog_slept_counts_only_if_the_process_computed(is_busy, held_s, monkeypatch):
    """A search for a regular expression, for example, lets no other thread run."""
    for name, value in {"since": 0.0, "jump_s": 600.0, "is_busy": is_busy}.items():
        monkeypatch.setattr(Sleepy, name, value)
    monkeypatch.setattr(watchdog, "time", Sleepy)

    async def main():
        with Watchdog(0.4):
            return await play(Sleepy(), {"only": fa.Scripted(lambda seen: "x")}, seed=0)

    assert f"blocked the controller's thread for {held_s} s" in asyncio.run(main()).error.message


def test_code_that_blocks_a_single_episode_is_named_and_continues(monkeypatch):
    """It may be a debugger, in which a person reads."""
    monkeypatch.setattr(watchdog, "BLOCK_TIMEOUT_S", 0.2)
    named = threading.Event()
    monkeypatch.setattr(watchdog, "write_error", lambda text: (messages.append(text), named.set()))
    messages = []

    def answer(seen):
        assert named.wait(60)
        return "x"

    episode = fa.play(Plain(), fa.Scripted(answer))
    assert episode.error is None
    assert "test_watchdog.py" in messages[0] and "has blocked the controller's thread for over 0.2 s" in messages[0]


def test_a_loop_that_turns_is_left_alone(monkeypatch):
    turns = 0

    async def main():
        nonlocal turns
        with Watchdog(0.3):
            for _ in range(10):
                await asyncio.sleep(0.1)
                turns += 1

    # a turn is a tenth of a second, also of a machine that had no time for it
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: 1 + 0.1 * turns, process_time=lambda: 0.0))
    asyncio.run(main())
    assert turns == 10


LONG_RUN = """
import asyncio, time
from forge_agents.runtime.watchdog import Watchdog

async def main():
    with Watchdog(0.8):
        for _ in range(20):
            print("x" * 9_999, flush=True)
            await asyncio.sleep(0.02)
        print("all steps", flush=True)
        time.sleep(60)  # blocks

asyncio.run(main())
"""


def test_a_suspended_run_and_one_that_nobody_reads_continue():
    with subprocess.Popen(
        [sys.executable, "-c", LONG_RUN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        for _ in range(2):
            time.sleep(1.2)  # a full pipe holds 65,536 bytes
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(1.2)
            os.kill(process.pid, signal.SIGCONT)
        assert process.poll() is None
        assert process.stdout.read().endswith("all steps\n")
        assert "StallError: <string>:11 main blocked the controller's thread" in process.stderr.read()
