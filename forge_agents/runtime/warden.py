"""A small process on every other host: it says what the host has, and ends the host when the controller is gone.

In: where the controller listens. Out: facts, a beat every second, and the end of processes. Waits for the controller's
end of the line.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from forge_agents.envs.workers._homes import keep_alive, obey
from forge_agents.runtime._monarch import Actor, concurrent_endpoint

MESH_VARIABLE = "FORGE_AGENTS_MESH"
"""Environment variable that marks every process of one mesh."""
_BEAT_S = 1.0
_CONNECT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What a host has."""

    hostname: str
    gpus: tuple[str, ...]
    """Ids of the GPUs that a process there sees, as CUDA_VISIBLE_DEVICES takes them."""
    cores: frozenset[int]
    """Those that a process there may use."""
    place: str
    """Who shares memory with its processes; see `_places.place`."""


def facts_here() -> HostFacts:
    """Of the host that this process runs on."""
    from forge_agents.runtime.places import place

    return HostFacts(
        hostname=socket.gethostname(), gpus=visible_gpus(), cores=frozenset(os.sched_getaffinity(0)), place=place()
    )


def visible_gpus() -> tuple[str, ...]:
    """Ids of NVIDIA GPUs here, without loading a library that would take hold of them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(one.strip() for one in chosen.split(",") if one.strip() not in ("", "-1"))
    devices = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return tuple(str(number) for number in range(len(devices)))


class Warden(Actor):
    """On a host that is not the controller's; its parent is the host's process."""

    @concurrent_endpoint
    async def report(self, address: tuple[str, int], secret: str) -> HostFacts:
        """Hold a line to the controller from now on. Returns what the host has."""
        line = await asyncio.to_thread(socket.create_connection, address, _CONNECT_S)
        line.sendall(f"{secret}\n".encode())
        keep_alive(line)
        threading.Thread(target=_hold, args=(line,), name="lifeline", daemon=True).start()
        return facts_here()

    @concurrent_endpoint
    async def start_workers(self, place: str) -> None:
        """Start and end worker processes of environments, as told at `place`; see `_worker_homes.obey`."""
        threading.Thread(target=obey, args=(place,), name="workers", daemon=True).start()

    @concurrent_endpoint
    async def lacks(self, paths: tuple[str, ...]) -> tuple[str, ...]:
        """Those of `paths` that do not exist here."""
        return tuple(path for path in paths if not Path(path).exists())

    @concurrent_endpoint
    async def kill(self, mark: str, logs: str) -> None:
        """Kill what is left here of a mesh; remove the logs of one that ended well, if `logs` names their folder."""
        for pid in marked(mark):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if logs:
            await asyncio.to_thread(shutil.rmtree, logs, ignore_errors=True)


def marked(mark: str) -> list[int]:
    """Processes here that belong to a mesh."""
    wanted, found = f"{MESH_VARIABLE}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it ended, or is somebody else's
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def _hold(line: socket.socket) -> None:
    """Beat until the controller's end of the line is closed, by whatever; then end the host."""
    line.settimeout(_BEAT_S)
    while True:
        try:
            line.sendall(b".")
            if not line.recv(64):
                break
        except TimeoutError:
            continue
        except OSError:
            break
    host = os.getppid()  # this process and the others of the host end with it
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(OSError):
            if host > 1:
                os.kill(host, sign)
        time.sleep(_BEAT_S)
    os._exit(0)
