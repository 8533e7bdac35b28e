"""Meshes on this host: deadlines, errors that name the dead process, and no process left behind."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from process_checks import allocated_bytes, ended_within, holds_within, runs

from forge_agents.errors import ActorDiedError, StallError
from forge_agents.private_folder import FOLDER_VARIABLE
from forge_agents.runtime import _monarch, mesh, processes
from forge_agents.runtime._monarch import ReplyPort
from forge_agents.runtime.heartbeat import Heartbeat

pytestmark = pytest.mark.anyio


@contextlib.asynccontextmanager
async def spawned(name: str, **options: Any) -> AsyncIterator[Any]:
    procs = mesh.spawn_procs(name, threads=1, **options)
    try:
        yield procs
    finally:
        await mesh.stop(procs)


@pytest.fixture(scope="module")
async def pair(probe_actors: ModuleType) -> AsyncIterator[Any]:
    """Probes on two ranks, which stay alive."""
    async with spawned("pair", procs=2, env={"COLOR": "green"}) as procs:
        probe = procs.spawn("probe", probe_actors.Probe)
        await mesh.call_all(probe, 2, "pid", timeout_s=200, who="pair")
        yield probe


async def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


# ---- deadlines


@pytest.mark.parametrize("timeout_s", [0.05, 0, -7])  # what is left of a deadline may be negative
async def test_timeout_error_names_who_and_what(timeout_s: float) -> None:
    waiting = mesh.with_deadline(asyncio.sleep(60), timeout_s, who="hero", what="a completion")
    with pytest.raises(StallError, match=rf"hero did not finish a completion within {timeout_s:g} s"):
        await asyncio.wait_for(waiting, 30)


async def test_progress_extends_the_deadline() -> None:
    steps_done = 0

    async def work(steps: int) -> int:
        nonlocal steps_done
        for _ in range(steps):
            await asyncio.sleep(0.05)
            steps_done += 1
        await asyncio.sleep(0 if steps == 8 else 60)
        return steps_done

    async def fail() -> None:
        raise StallError("another one")

    watched: dict[str, Any] = {"progress": lambda: steps_done, "who": "episodes", "what": "collection of step 3"}
    assert await mesh.with_deadline(work(8), 0.2, **watched) == 8
    with pytest.raises(StallError, match=r"episodes did not finish collection of step 3 within 0\.2 s"):
        await mesh.with_deadline(work(1), 0.2, **watched)
    with pytest.raises(StallError, match="another one"):
        await mesh.with_deadline(fail(), 0.2, **watched)


async def test_deadline_passes_results_and_exceptions_on() -> None:
    async def refuse() -> int:
        raise KeyError("nothing")

    assert await mesh.with_deadline(asyncio.sleep(0, 42), 5, who="hero", what="answer") == 42
    with pytest.raises(KeyError, match="nothing"):
        await mesh.with_deadline(refuse(), 5, who="hero", what="answer")


# ---- processes


@pytest.mark.parametrize(("procs", "threads"), [(0, None), (1, 0)])
def test_impossible_meshes_are_refused(procs: int, threads: int | None) -> None:
    with pytest.raises(ValueError, match="'empty'"):
        mesh.spawn_procs("empty", procs=procs, threads=threads)


@pytest.mark.skipif(bool(os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}), reason="set by the user")
@pytest.mark.parametrize(("name", "value"), [("COLOR", "green"), ("OMP_NUM_THREADS", "1"), ("GOMP_SPINCOUNT", "4000")])
async def test_processes_get_their_environment(pair: Any, name: str, value: str) -> None:
    assert await mesh.call_all(pair, 2, "variable", name, timeout_s=200, who="pair") == [value] * 2


async def test_each_process_has_a_log_file_until_the_mesh_stops(probe_actors: ModuleType) -> None:
    async with spawned("two probes", procs=2) as procs:
        probe = procs.spawn("probe", probe_actors.Probe)
        pids = await mesh.call_all(probe, 2, "pid", timeout_s=200, who="two probes")
        assert len(set(pids) | {os.getpid()}) == 3
        folder = mesh.log_folder("two probes")
        assert folder is not None and "pid asked" in (folder / "1.log").read_text()
    assert not any(runs(pid) for pid in pids)
    assert not folder.exists()


@pytest.mark.parametrize(("name", "value"), [("GOMP_SPINCOUNT", "0"), ("OMP_WAIT_POLICY", "active")])
def test_openmp_settings_of_the_user_stay(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert "GOMP_SPINCOUNT" not in processes.variables(""), "a process inherits the other variables"


async def test_exception_of_an_endpoint_is_raised_at_once(pair: Any) -> None:
    started = time.monotonic()
    with pytest.raises(LookupError, match="rank 1 has no such thing") as caught:  # rank 0 would take 200 s
        await mesh.call_all(pair, 2, "fail_on", 1, timeout_s=200, who="pair")
    assert time.monotonic() - started < 100
    assert "probe_actors.py" in caught.value.__notes__[0]


NUM_CALLS, AT_ONCE = 1000, 100


async def test_calls_of_all_ranks_do_not_leak_memory(pair: Any) -> None:
    async def call() -> None:
        assert await mesh.call_all(pair, 2, "nap", 0, timeout_s=300, who="pair") == ["rested"] * 2

    before, rounds, per_round, until = allocated_bytes(), 0, math.inf, time.monotonic() + 120
    # buffers take up to 6 MB on a busy machine, whatever the number of calls
    while (rounds < 5 or per_round >= 2 * 400 * NUM_CALLS) and time.monotonic() < until:
        for _ in range(NUM_CALLS // AT_ONCE):
            await asyncio.gather(*(call() for _ in range(AT_ONCE)))
        rounds += 1
        per_round = (allocated_bytes() - before) / rounds
    assert per_round < 2 * 400 * NUM_CALLS, rounds  # `call_one` of a new mesh leaks 1,100 bytes per call and rank


async def test_idle_processes_leave_no_memory_in_the_controller(pair: Any) -> None:
    growth = []
    for _ in range(3):
        before = allocated_bytes()
        await asyncio.sleep(1.2)
        growth.append(allocated_bytes() - before)
    assert min(growth) < 2000, growth  # with a poll of all actors each second, every round adds 7,000 bytes or more


async def test_reply_port_serves_the_next_call_after_an_error(pair: Any) -> None:
    port, first = ReplyPort(), pair.slice(rank=0)
    with pytest.raises(LookupError, match="rank 0 has no such thing"):
        await mesh.with_deadline(port.call(first.fail_on, 0), 200, who="pair", what="failure")
    assert await mesh.with_deadline(port.call(first.nap, 0), 200, who="pair", what="nap") == "rested"


async def test_log_messages_of_users_have_no_prefix_while_monarch_runs(pair: Any, caplog: Any) -> None:
    await mesh.call_all(pair, 2, "pid", timeout_s=200, who="pair")
    logging.getLogger("my_program").warning("ready")
    assert "ready" in caplog.messages


# ---- the end


@pytest.fixture
def _ends_are_looked_for_every_second() -> Iterator[None]:
    _monarch.poll_processes(1)
    yield
    _monarch.poll_processes(10)


@pytest.mark.usefixtures("_ends_are_looked_for_every_second")
async def test_killed_process_is_named_and_others_continue(pair: Any, probe_actors: ModuleType) -> None:
    async with spawned("victim") as procs:
        victim = procs.spawn("probe", probe_actors.Probe)
        pid = await mesh.with_deadline(victim.pid.call_one(), 200, who="victim", what="pid")
        waiting = asyncio.ensure_future(mesh.with_deadline(victim.nap.call_one(200), 200, who="victim", what="nap"))
        await asyncio.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ActorDiedError, match=r"victim died during nap: .*Killed\(SIGKILL\).*its log in"):
            await waiting
        assert await mesh.call_all(pair, 2, "nap", 0, timeout_s=200, who="pair") == ["rested"] * 2
        folder = mesh.log_folder("victim")
    assert folder is not None and (folder / "0.log").exists()


async def test_calls_of_another_process_end_when_a_dead_mesh_is_stopped(pair: Any, probe_actors: ModuleType) -> None:
    _monarch.poll_processes(300)  # so that Monarch itself does not notice the death
    log = mesh.log_folder("pair") / "0.log"  # type: ignore[operator]
    try:
        async with spawned("victim") as procs:
            victim = procs.spawn("probe", probe_actors.Probe)
            pid = await mesh.with_deadline(victim.pid.choose(), 200, who="victim", what="pid")
            heartbeat = Heartbeat(procs, 1, name="victim", heartbeat_timeout_s=60)  # watches the process at once
            call = pair.slice(rank=0).nap_of.choose(victim, 250)
            waiting = asyncio.ensure_future(mesh.with_deadline(call, 250, who="pair", what="nap of victim"))
            await wait_for(lambda: "waits for another process" in log.read_text())
            await asyncio.sleep(0.2)  # the log may have that line of an earlier call; the heartbeat begins here
            os.kill(pid, signal.SIGKILL)
            error = await asyncio.wait_for(heartbeat.lost(), 120)
            assert f"victim died: process {pid} was ended by SIGKILL (by another program" in str(error)
            assert not waiting.done()
        with pytest.raises(ActorDiedError):
            await asyncio.wait_for(waiting, 120)
    finally:
        _monarch.poll_processes(10)


async def test_monarch_ends_nothing_between_its_looks_for_ended_processes(probe_actors: ModuleType) -> None:
    _monarch.poll_processes(600)
    try:
        async with spawned("quiet") as procs:
            probe = procs.spawn("probe", probe_actors.Probe)
            asked = probe.settings.choose("mesh_orphan_timeout", "supervision_watchdog_timeout")
            ends_actors, ends_calls = await mesh.with_deadline(asked, 200, who="quiet", what="settings")
        assert ends_actors.startswith("11months") and ends_calls == "22m"
    finally:
        _monarch.poll_processes(10)


async def test_crash_error_names_signal_place_and_last_lines(probe_actors: ModuleType) -> None:
    async with spawned("crasher") as procs:
        probe = procs.spawn("probe", probe_actors.Probe)
        await mesh.with_deadline(probe.pid.call_one(), 200, who="crasher", what="pid")
        heartbeat = Heartbeat(procs, 1, name="crasher", heartbeat_timeout_s=60)
        with pytest.raises(ActorDiedError) as caught:
            await asyncio.wait_for(heartbeat.guard(probe.crash.call_one(signal.SIGILL)), 120)
    message = str(caught.value)
    assert "was ended by SIGILL in crash (" in message and "/probe_actors.py:" in message
    assert message.endswith("Last lines of its log:\npid asked\nabout to crash")
    assert caught.value.place.startswith("was ended by SIGILL in [(")


async def test_process_that_ends_before_it_is_watched_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with_deadline, limits_s = mesh.with_deadline, []

    def noted(work: Any, timeout_s: float, **words: Any) -> Any:
        limits_s.append(timeout_s)
        return with_deadline(work, timeout_s, **words)

    async with spawned("brief") as procs:
        await wait_for(lambda: mesh.pids(procs))
        (pid,) = mesh.pids(procs)
        os.kill(pid, signal.SIGKILL)  # it has not loaded an actor yet
        await wait_for(lambda: not runs(pid))
        heartbeat = Heartbeat(procs, 1, name="brief", heartbeat_timeout_s=60)
        error = await asyncio.wait_for(heartbeat.lost(), 120)
        assert isinstance(error, ActorDiedError) and "brief died" in str(error)
        assert mesh.ended(procs) == [pid]
        monkeypatch.setattr(mesh, "with_deadline", noted)
    assert limits_s and max(limits_s) < 1, "a restart does not wait for an end that Monarch does not notice"


async def test_process_that_is_killed_before_it_is_connected_has_died(probe_actors: ModuleType) -> None:
    before = {child.pid for child in psutil.Process().children()}
    async with spawned("early") as procs:
        probe = procs.spawn("probe", probe_actors.Probe)
        asking = asyncio.ensure_future(mesh.with_deadline(probe.pid.call_one(), 200, who="early", what="pid"))
        new: set[int] = set()
        await wait_for(lambda: new.update({child.pid for child in psutil.Process().children()} - before) or new)
        os.kill(new.pop(), signal.SIGKILL)
        with pytest.raises(ActorDiedError, match="early died while it was started") as caught:
            await asking
        assert caught.value.who == "early" and caught.value.ended_at_start


def test_process_that_is_not_connected_in_time_counts_as_dead() -> None:
    late = ValueError("error spawning proc mesh: statuses: Timeout(30.001s)=0..1")
    error = mesh.as_local_error(late, who="engine", what="start")
    assert isinstance(error, ActorDiedError) and "took over 30 s for its first answer" in str(error)
    assert not error.ended_at_start, "on a busy machine another start may be in time"
    other = ValueError("another")
    assert mesh.as_local_error(other, who="engine", what="start") is other


LONG = """
import asyncio, os
import probe_actors
from forge_agents.runtime import mesh

async def main():
    procs = mesh.spawn_procs("long", threads=1)
    asking = procs.spawn("probe", probe_actors.Probe).variable.call_one("TMPDIR")
    print(await mesh.with_deadline(asking, 200, who="long", what="variable"))
    print(os.environ["TMPDIR"])
    await mesh.stop(procs)

asyncio.run(main())
"""


def test_long_folder_for_temporary_files_holds_no_socket(probe_actors: ModuleType, tmp_path: Path) -> None:
    long = tmp_path / ("a folder " * 12)
    long.mkdir()
    variables = {name: value for name, value in os.environ.items() if name != FOLDER_VARIABLE}
    variables |= {"TMPDIR": str(long), "PYTHONPATH": str(Path(str(probe_actors.__file__)).parent)}
    done = subprocess.run([sys.executable, "-c", LONG], env=variables, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [str(long)] * 2, done.stderr


@pytest.mark.parametrize("at_once", [False, True])
async def test_stopped_processes_leave_no_semaphores(probe_actors: ModuleType, at_once: bool) -> None:
    async with spawned("locked") as procs:
        probe = procs.spawn("probe", probe_actors.Probe)
        name = await mesh.with_deadline(probe.lock.call_one(), 200, who="locked", what="lock")
        file = Path("/dev/shm") / f"sem.{name.removeprefix('/')}"
        assert file.exists()
        await mesh.stop(procs, at_once=at_once)
        assert holds_within(10, lambda: not file.exists())


FORKED = """
import multiprocessing, sys
from forge_agents.runtime import _monarch, mesh
from forge_agents.runtime.hosts import Hosts
import asyncio

def child():
    for start in (lambda: mesh.spawn_procs("late"), lambda: asyncio.run(mesh.launch_hosts(Hosts()))):
        try:
            start()
        except Exception as error:
            print(type(error).__name__, error, flush=True)

process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join(60)
process.kill()
sys.exit(process.exitcode)
"""


def test_forked_process_cannot_start_processes() -> None:
    """Calls would wait forever for threads that only the parent has."""
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=False, timeout=200)
    lines = done.stdout.splitlines()
    assert (done.returncode, len(lines)) == (0, 2), done.stderr
    assert all("HostError this process was forked from process" in line for line in lines)
    assert all("multiprocessing.get_context('spawn')" in line for line in lines)


async def test_stop_ends_the_processes_and_may_be_called_twice(probe_actors: ModuleType) -> None:
    procs = mesh.spawn_procs("brief", threads=1)
    probe = procs.spawn("probe", probe_actors.Probe)
    pid = await mesh.with_deadline(probe.pid.call_one(), 200, who="brief", what="pid")
    await mesh.stop(procs)
    assert not runs(pid)
    await mesh.stop(procs)


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


def test_children_import_user_modules_but_no_shadowed_library(tmp_path: Path, probe_actors: ModuleType) -> None:
    folder, marker = tmp_path / "current", tmp_path / "imported"
    (folder / "monarch").mkdir(parents=True)
    (folder / "probe_actors.py").write_text(Path(str(probe_actors.__file__)).read_text())
    for name in ("monarch/__init__.py", "psutil.py", "cloudpickle.py", "forge_agents.py"):
        (folder / name).write_text(f"open({str(marker)!r}, 'a').write(__name__)")
    script = tmp_path / "controller.py"
    script.write_text(IN_CURRENT_FOLDER)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not marker.exists()


CONTROLLER = """
import asyncio, sys
sys.path.insert(0, {folder!r})
from forge_agents.runtime import mesh
from probe_actors import Probe

async def main():
    async with mesh.session():
        probe = mesh.spawn_procs("pair", procs=2, threads=1).spawn("probe", Probe)
        print(*await mesh.call_all(probe, 2, "pid", timeout_s=200, who="pair"), flush=True)
        if {ending!r} == "exception":
            raise RuntimeError("on purpose")
        if {ending!r} != "return":
            await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("ending", ["return", "exception", "SIGINT", "SIGTERM", "SIGKILL"])
def test_no_process_outlives_the_controller(ending: str, tmp_path: Path, probe_actors: ModuleType) -> None:
    script = tmp_path / "controller.py"
    script.write_text(CONTROLLER.format(folder=str(Path(str(probe_actors.__file__)).parent), ending=ending))
    # TMPDIR is the home of the logs, which a killed controller leaves behind
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
    assert ended_within(pids, 60)


# ---- answers without a receiver

LATE = """
import asyncio, sys
from probe_actors import Probe
from forge_agents.runtime import _monarch, mesh

async def main():
    procs = mesh.spawn_procs("victim", threads=1)
    probe = procs.spawn("probe", Probe)
    pid = await mesh.with_deadline(probe.pid.choose(), 200, who="victim", what="pid")
    _monarch.configure(message_delivery_timeout="1s")  # Monarch's own is 30 s
    _monarch.ReplyPort().call(probe.answer_and_end)  # nobody waits for the answer
    while mesh.pids(procs) == [pid]:
        await asyncio.sleep(0.1)
    await asyncio.sleep(3)
    print("alive")

asyncio.run(main())
"""
GIVEN_UP = """
import asyncio, os, sys
from late_answers import Late
from forge_agents.errors import StallError
from forge_agents.runtime import mesh

async def main():
    procs = mesh.spawn_procs("late", threads=1)
    actor = procs.spawn("late", Late)
    pid = await actor.pid.choose()
    if sys.argv[1] == "cancelled":
        call = asyncio.ensure_future(mesh.with_deadline(actor.answer.choose(0.3), 10, who="late", what="answer"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        call.cancel()
    else:
        try:
            await mesh.with_deadline(actor.answer.choose(0.3), 0.1, who="late", what="answer")
        except StallError:
            pass
    while os.path.exists(f"/proc/{pid}/cmdline") and open(f"/proc/{pid}/cmdline").read():
        await asyncio.sleep(0.01)
    await asyncio.sleep(5)  # Monarch returns an answer without a receiver, and ends a process for which it fails
    print("alive", flush=True)
    os._exit(0)

asyncio.run(main())
"""
LATE_ANSWERS = """
import asyncio, os
from forge_agents.runtime._monarch import Actor, concurrent_endpoint, endpoint

class Late(Actor):
    @endpoint
    async def pid(self):
        return os.getpid()

    @concurrent_endpoint
    async def answer(self, seconds):
        await asyncio.sleep(seconds)
        asyncio.get_running_loop().call_later(0.02, os._exit, 9)  # once the answer has been sent
"""


def test_answers_of_a_dying_actor_without_a_receiver_are_harmless(tmp_path: Path, probe_actors: ModuleType) -> None:
    (tmp_path / "late_answers.py").write_text(LATE_ANSWERS)
    (tmp_path / "probe_actors.py").write_text(Path(str(probe_actors.__file__)).read_text())
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with contextlib.ExitStack() as stack:  # they wait for seconds, all at once
        controllers = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", *words], env=environment, text=True, stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )
            for words in ([LATE], [GIVEN_UP, "cancelled"], [GIVEN_UP, "timed out"])
        ]  # fmt: skip
        for controller in controllers:
            output, errors = controller.communicate(timeout=180)
            assert (controller.returncode, output) == (0, "alive\n"), (controller.args, errors)


def test_no_call_of_an_actor_is_dropped_before_it_is_awaited() -> None:
    """Such a call ends this process if the actor answers and dies."""
    root, names = Path(__file__).parents[3], ("choose", "call_one")
    files = [file for file in root.glob("[!.]*/**/*.py") if file.relative_to(root).parts[0] != "tests"]
    texts = {file: text for file in files if any(name in (text := file.read_text()) for name in names)}
    nodes = ((file, node) for file, text in texts.items() for node in ast.walk(ast.parse(text)))
    calls = ((file, node.value) for file, node in nodes if isinstance(node, ast.Expr))
    assert len(files) > 100 and len(texts) > 5
    assert not [
        f"{file}:{call.lineno}"
        for file, call in calls
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in names
    ]
