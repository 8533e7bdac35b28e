"""Meshes on this host: deadlines, deaths by name, and no process left behind."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from forge_agents.errors import ActorDiedError, StallError
from forge_agents.runtime import mesh, processes
from forge_agents.runtime._monarch import ReplyPort
from forge_agents.runtime.heartbeat import Heartbeat
from forge_agents.testing._processes import allocated_bytes, runs

ACTORS = """
import asyncio, ctypes, os
from forge_agents.runtime._monarch import Actor, concurrent_endpoint, current_rank

class Probe(Actor):
    def __init__(self):
        self.rank = current_rank().rank

    @concurrent_endpoint
    async def pid(self):
        print("pid asked", flush=True)
        return os.getpid()

    @concurrent_endpoint
    async def variable(self, name):
        return os.environ.get(name)

    @concurrent_endpoint
    async def crash(self, sign):
        print("about to crash", flush=True)
        getattr(ctypes.PyDLL(None), "raise")(sign)  # keeps the other threads still, as raise_signal would not

    @concurrent_endpoint
    async def nap(self, seconds):
        await asyncio.sleep(seconds)
        return "rested"

    @concurrent_endpoint
    async def fail_on(self, rank):
        if self.rank == rank:
            raise LookupError(f"rank {rank} has no such thing")
        await asyncio.sleep(30)
"""


@pytest.fixture(scope="module")
def probe_class(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An actor class in a module that lies beside no package, as a user's script has."""
    folder = tmp_path_factory.mktemp("actors")
    (folder / "probe_actors.py").write_text(ACTORS)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("probe_actors").Probe
    sys.path.remove(str(folder))


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_timeout_error_names_who_and_what() -> None:
    async def main() -> None:
        with pytest.raises(StallError, match=r"hero did not finish a completion within 0\.05 s"):
            await mesh.with_deadline(asyncio.sleep(60), 0.05, who="hero", what="a completion")

    started = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - started < 30


def test_progress_extends_the_deadline() -> None:
    done = 0

    async def work(steps: int) -> int:
        nonlocal done
        for _ in range(steps):
            await asyncio.sleep(0.05)
            done += 1
        await asyncio.sleep(0 if steps == 8 else 60)
        return done

    async def main() -> None:
        watched = {"progress": lambda: done, "who": "episodes", "what": "collection of step 3"}
        assert await mesh.with_deadline(work(8), 0.2, **watched) == 8  # type: ignore[arg-type]
        with pytest.raises(StallError, match=r"episodes did not finish collection of step 3 within 0\.2 s"):
            await mesh.with_deadline(work(1), 0.2, **watched)  # type: ignore[arg-type]
        with pytest.raises(StallError, match="somebody else"):
            await mesh.with_deadline(fail(), 0.2, **watched)  # type: ignore[arg-type]

    async def fail() -> None:
        raise StallError("somebody else")

    asyncio.run(main())


def test_deadline_passes_results_and_exceptions_on() -> None:
    async def answer() -> int:
        return 42

    async def refuse() -> int:
        raise KeyError("nothing")

    async def main() -> None:
        assert await mesh.with_deadline(answer(), 5, who="hero", what="answer") == 42
        with pytest.raises(KeyError, match="nothing"):
            await mesh.with_deadline(refuse(), 5, who="hero", what="answer")

    asyncio.run(main())


@pytest.mark.parametrize(("procs", "threads"), [(0, None), (1, 0)])
def test_impossible_meshes_are_refused(procs: int, threads: int | None) -> None:
    with pytest.raises(ValueError, match="'nobody'"):
        mesh.spawn_procs("nobody", procs=procs, threads=threads)


def test_processes_get_their_environment_and_log_file(
    probe_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)

    async def main() -> None:
        async with mesh.session():
            procs = mesh.spawn_procs("two probes", procs=2, env={"COLOUR": "green"}, threads=1)
            probe = procs.spawn("probe", probe_class)
            pids = await mesh.call_all(probe, 2, "pid", timeout_s=30, who="two probes")
            assert len(set(pids) | {os.getpid()}) == 3
            colours = await mesh.call_all(probe, 2, "variable", "COLOUR", timeout_s=10, who="two probes")
            assert colours == ["green", "green"]
            assert (
                await mesh.call_all(probe, 2, "variable", "OMP_NUM_THREADS", timeout_s=10, who="two probes")
                == ["1"] * 2
            )
            turns = await mesh.call_all(probe, 2, "variable", "GOMP_SPINCOUNT", timeout_s=10, who="two probes")
            assert turns == ["4000"] * 2
            folder = mesh.log_folder("two probes")
            assert folder is not None
            assert "pid asked" in (folder / "1.log").read_text()
        assert not any(runs(pid) for pid in pids)
        assert not folder.exists()

    asyncio.run(main())


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_openmp_settings_of_the_user_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "0" if name == "GOMP_SPINCOUNT" else "active")
    assert "GOMP_SPINCOUNT" not in processes.variables(""), "a process inherits what is not said"


def test_exception_of_an_endpoint_is_raised_at_once(probe_class: Any) -> None:
    async def main() -> None:
        async with mesh.session():
            probe = mesh.spawn_procs("pair", procs=2, threads=1).spawn("probe", probe_class)
            await mesh.call_all(probe, 2, "pid", timeout_s=30, who="pair")
            started = time.monotonic()
            with pytest.raises(LookupError, match="rank 1 has no such thing") as caught:  # rank 0 would take 30 s
                await mesh.call_all(probe, 2, "fail_on", 1, timeout_s=60, who="pair")
            assert time.monotonic() - started < 20
            assert "probe_actors.py" in caught.value.__notes__[0]

    asyncio.run(main())


NUM_CALLS = 2000
AT_ONCE = 100


def test_calls_of_all_ranks_do_not_leak_memory(probe_class: Any) -> None:
    async def main() -> int:
        async with mesh.session():
            probe = mesh.spawn_procs("probe", threads=1).spawn("probe", probe_class)

            async def call() -> None:
                assert await mesh.call_all(probe, 1, "nap", 0, timeout_s=300, who="probe") == ["rested"]

            growth = []
            for _ in range(4):  # what a call keeps is kept in each round; buffers grow in some
                before = allocated_bytes()
                await call_often(call, NUM_CALLS)
                growth.append(allocated_bytes() - before)
            return min(growth)

    assert asyncio.run(main()) < 400 * NUM_CALLS  # 1,100 bytes a call with `call_one` of a new mesh


def test_reply_port_serves_the_next_call_after_an_error(probe_class: Any) -> None:
    async def main() -> None:
        async with mesh.session():
            probe = mesh.spawn_procs("probe", threads=1).spawn("probe", probe_class)
            port = ReplyPort()
            with pytest.raises(LookupError, match="rank 0 has no such thing"):
                await mesh.with_deadline(port.call(probe.fail_on, 0), 60, who="probe", what="failure")
            assert await mesh.with_deadline(port.call(probe.nap, 0), 60, who="probe", what="nap") == "rested"

    asyncio.run(main())


async def call_often(call: Callable[[], Awaitable[None]], count: int) -> None:
    """Call `count` times, as often at once as a busy machine needs to be done soon."""
    for _ in range(count // AT_ONCE):
        await asyncio.gather(*(call() for _ in range(AT_ONCE)))


def test_killed_process_is_named_and_others_continue(probe_class: Any) -> None:
    async def main() -> Path:
        async with mesh.session():
            victim = mesh.spawn_procs("victim", threads=1).spawn("probe", probe_class)
            other = mesh.spawn_procs("other", threads=1).spawn("probe", probe_class)
            pid = await mesh.with_deadline(victim.pid.call_one(), 30, who="victim", what="pid")
            waiting = asyncio.ensure_future(mesh.with_deadline(victim.nap.call_one(60), 60, who="victim", what="nap"))
            await asyncio.sleep(0.2)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(ActorDiedError, match=r"victim died during nap: .*Killed\(SIGKILL\).*its log in"):
                await waiting
            assert await mesh.with_deadline(other.nap.call_one(0), 10, who="other", what="nap") == "rested"
            folder = mesh.log_folder("victim")
            assert folder is not None
        return folder

    assert (asyncio.run(main()) / "0.log").exists()


def test_crash_error_names_signal_place_and_last_lines(probe_class: Any) -> None:
    async def main() -> None:
        async with mesh.session():
            procs = mesh.spawn_procs("crasher", threads=1)
            heartbeat = Heartbeat(procs, 1, name="crasher", heartbeat_timeout_s=60)
            probe = procs.spawn("probe", probe_class)
            await mesh.with_deadline(probe.pid.call_one(), 30, who="crasher", what="pid")
            with pytest.raises(ActorDiedError) as caught:
                await asyncio.wait_for(heartbeat.guard(probe.crash.call_one(signal.SIGILL)), 30)
            message = str(caught.value)
            assert "was ended by SIGILL in crash (" in message and "/probe_actors.py:" in message
            assert message.endswith("Last lines of its log:\npid asked\nabout to crash")
            assert caught.value.place.startswith("was ended by SIGILL in [(")

    asyncio.run(main())


def test_log_messages_of_users_have_no_prefix_while_monarch_runs(probe_class: Any, caplog: Any) -> None:
    async def main() -> None:
        async with mesh.session():
            probe = mesh.spawn_procs("probe", threads=1).spawn("probe", probe_class)
            await mesh.with_deadline(probe.pid.call_one(), 30, who="probe", what="pid")
            logging.getLogger("my_program").warning("ready")

    asyncio.run(main())
    assert "ready" in caplog.messages


def test_process_that_ends_early_is_noticed_at_once() -> None:
    async def main() -> None:
        async with mesh.session():
            procs = mesh.spawn_procs("brief", threads=1)
            await asyncio.to_thread(wait_for, lambda: mesh.pids(procs))
            (pid,) = mesh.pids(procs)
            os.kill(pid, signal.SIGKILL)  # it has not loaded an actor yet
            await asyncio.to_thread(wait_for, lambda: not runs(pid))
            heartbeat = Heartbeat(procs, 1, name="brief", heartbeat_timeout_s=60)
            error = await asyncio.wait_for(heartbeat.lost(), 30)
            assert isinstance(error, ActorDiedError) and "brief died" in str(error)
            assert mesh.ended(procs) == [pid]

    asyncio.run(main())


def test_stop_ends_the_processes_and_may_be_called_twice(probe_class: Any) -> None:
    async def main() -> None:
        procs = mesh.spawn_procs("brief", threads=1)
        probe = procs.spawn("probe", probe_class)
        pid = await mesh.with_deadline(probe.pid.call_one(), 30, who="brief", what="pid")
        await mesh.stop(procs)
        assert not runs(pid)
        await mesh.stop(procs)

    asyncio.run(main())


CONTROLLER = """
import asyncio, sys
sys.path.insert(0, {folder!r})
from forge_agents.runtime import mesh
from probe_actors import Probe

async def main():
    async with mesh.session():
        probe = mesh.spawn_procs("pair", procs=2, threads=1).spawn("probe", Probe)
        print(*await mesh.call_all(probe, 2, "pid", timeout_s=60, who="pair"), flush=True)
        if {ending!r} == "exception":
            raise RuntimeError("on purpose")
        if {ending!r} != "return":
            await asyncio.sleep(60)

asyncio.run(main())
"""


IN_CURRENT_FOLDER = """
import asyncio, os
from pathlib import Path
from forge_agents.imports import add_user_folder, import_user_module
from forge_agents.runtime import mesh

async def main():
    async with mesh.session():
        add_user_folder(Path.cwd())
        probe = mesh.spawn_procs("pair", threads=1).spawn("probe", import_user_module("probe_actors").Probe)
        print(await mesh.call_all(probe, 1, "pid", timeout_s=300, who="pair"), flush=True)

asyncio.run(main())
"""


def test_children_import_user_modules_but_no_shadowed_library(tmp_path: Path) -> None:
    folder, marker = tmp_path / "current", tmp_path / "imported"
    (folder / "monarch").mkdir(parents=True)
    (folder / "probe_actors.py").write_text(ACTORS)
    for name in ("monarch/__init__.py", "psutil.py", "cloudpickle.py", "forge_agents.py"):
        (folder / name).write_text(f"open({str(marker)!r}, 'a').write(__name__)")
    script = tmp_path / "controller.py"
    script.write_text(IN_CURRENT_FOLDER)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not marker.exists()


@pytest.mark.parametrize("ending", ["return", "exception", "SIGINT", "SIGTERM", "SIGKILL"])
def test_no_process_outlives_the_controller(ending: str, tmp_path: Path) -> None:
    (tmp_path / "probe_actors.py").write_text(ACTORS)
    script = tmp_path / "controller.py"
    script.write_text(CONTROLLER.format(folder=str(tmp_path), ending=ending))
    # tmp_path is the home of the logs as well: a killed controller leaves them behind
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as controller:
        assert controller.stdout is not None
        pids = [int(pid) for pid in controller.stdout.readline().split()]
        assert len(pids) == 2
        if ending.startswith("SIG"):
            controller.send_signal(getattr(signal, ending))
        assert (controller.wait(timeout=60) == 0) == (ending == "return")
    deadline = time.monotonic() + 60
    while any(runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(runs(pid) for pid in pids)
