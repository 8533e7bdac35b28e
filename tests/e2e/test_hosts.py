"""Several hosts, as processes of this machine: what is on them, and what ends with whom."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import forge_agents as fa
from forge_agents import mesh
from forge_agents._places import place
from forge_agents.errors import ActorDiedError, HostError, StallError

pytestmark = pytest.mark.timeout(200)


def host_pid(name: str) -> int:
    """The process that is a host."""
    layout = mesh._hosts[-1]
    assert layout._job is not None
    role, _, number = name.partition("-")
    return layout._job.pids[role][int(number)]


def kill_host(name: str) -> None:
    """The host's process and all processes on it, at once, as when a machine loses power."""
    session = host_pid(name)
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and os.getsid(int(folder.name)) == session:
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:  # it ended meanwhile
            continue


def host_of(pid: int) -> str:
    variables = dict(item.partition("=")[::2] for item in Path(f"/proc/{pid}/environ").read_text().split("\0"))
    return variables.get("FORGE_AGENTS_HOST", "")


ACTORS = """
import os
from forge_agents._monarch import Actor, concurrent_endpoint

class Resident(Actor):
    @concurrent_endpoint
    async def pid(self):
        return os.getpid()
"""


def test_what_is_on_a_killed_host_is_lost_at_once_and_starts_again_on_another(run: Any, import_actors: Any) -> None:
    from forge_agents._pulse import Pulse

    resident = import_actors("host_residents", ACTORS).Resident

    async def start(name: str, role: str, procs: int = 1) -> tuple[Any, Pulse, list[int]]:
        on = mesh.spawn_procs(name, role=role, procs=procs, threads=1)
        pulse = Pulse(on, procs, name=name, silence_s=300)
        pids = await mesh.call_all(on.spawn("resident", resident), procs, "pid", timeout_s=300, who=name)
        return on, pulse, pids

    async def main() -> list[int]:
        config = fa.Hosts(kind="process", hosts={"learner": 2, "engines": 1})
        await mesh.launch_hosts(config, paths=[Path(__file__)])
        with pytest.raises(HostError, match="close the trainer that has them"):
            await mesh.launch_hosts(fa.Hosts())
        hosts = [host_pid(name) for name in ("learner-0", "learner-1", "engines-0")]
        ranks, ranks_pulse, rank_pids = await start("ranks", "learner", 2)
        assert [host_of(pid) for pid in rank_pids] == ["learner-0", "learner-1"]
        await mesh.exchange_addresses(ranks, 300, who="ranks")
        _, replica_pulse, (replica,) = await start("replica", "engines")
        assert host_of(replica) == "engines-0"
        assert mesh.place_of(ranks) != place()

        kill_host("learner-1")
        killed = time.monotonic()
        error = await mesh.with_deadline(ranks_pulse.lost(), 60, who="ranks", what="its end")
        assert time.monotonic() - killed < 2
        assert isinstance(error, ActorDiedError) and "host learner-1" in str(error)
        assert replica_pulse.error is None
        await mesh.stop(ranks)
        assert gone(rank_pids[0])  # its host lives and is asked to end it
        again, again_pulse, again_pids = await start("ranks", "learner", 2)
        assert [host_of(pid) for pid in again_pids] == ["learner-0", "learner-0"]
        again_pulse.end()
        replica_pulse.end()
        await mesh.stop(again)
        return [*hosts, replica]

    async def ended() -> None:
        async with mesh.session():
            left = await main()
        assert all(map(gone, left))

    run(ended())


CONTROLLER = """
import asyncio, sys
from pathlib import Path
import forge_agents as fa
from forge_agents import mesh

async def main():
    await mesh.launch_hosts(fa.Hosts(kind="attach", workers={"engines": (sys.argv[1],)}))
    mesh.spawn_procs("sitter", role="engines", threads=1)
    while not list(mesh.log_folder("sitter").glob("*.pid")):
        await asyncio.sleep(0.1)
    print((next(mesh.log_folder("sitter").glob("*.pid"))).read_text(), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_host_ends_with_a_controller_that_is_killed(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    host = subprocess.Popen([sys.executable, "-m", "forge_agents.host_process", "--address", address])
    controller = subprocess.Popen([sys.executable, "-c", CONTROLLER, address], stdout=subprocess.PIPE, text=True)
    try:
        assert controller.stdout is not None
        sitter = int(controller.stdout.readline())
        assert _lives(sitter) and host.poll() is None
        controller.kill()
        host.wait(10)
        assert gone(sitter)
    finally:
        for process in (controller, host):
            process.kill()
            process.wait(30)


def test_a_host_that_nobody_serves_is_named(run: Any, tmp_path: Path) -> None:
    hosts = fa.Hosts(kind="attach", workers={"engines": (f"ipc://{tmp_path}/nobody",)}, start_timeout_s=3)
    with pytest.raises(StallError, match=r"hosts engines-0, ipc://.*nobody, did not answer within start_timeout_s=3"):
        run(mesh.launch_hosts(hosts))


def gone(pid: int) -> bool:
    """Whether the process ends within ten seconds."""
    deadline = time.monotonic() + 10
    while _lives(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not _lives(pid)


def _lives(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
