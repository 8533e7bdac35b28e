"""One host of a run: ``python -m forge_agents.runtime.host_process --port 26600``, and its warden.

In: where to listen. Out: the processes that a controller asks for. Waits for one controller, and ends with it: the
warden, a small process on the host, holds a line to the controller and beats on it every second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from forge_agents.runtime._monarch import Actor, concurrent_endpoint, run_worker_loop_forever, use_certificate
from forge_agents.runtime.exposure import warn_of_open_ports
from forge_agents.runtime.machine import gpu_bytes, memory_domain, visible_gpus
from forge_agents.runtime.processes import kill_marked

_BEAT_S = 1.0
_CONNECT_S = 30.0


def main() -> None:
    """Serve one run; does not return."""
    parser = argparse.ArgumentParser(prog="python -m forge_agents.runtime.host_process", description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--port", type=int, help="listen on all interfaces, as the name this machine has")
    where.add_argument("--address", help="listen there: tls://HOST:PORT, tcp://HOST:PORT or ipc://PATH")
    parser.add_argument(
        "--certificate", metavar="FOLDER", help="folder with the run's tls.crt and tls.key; needed for tls addresses"
    )
    parser.add_argument("--end-with-stdin", action="store_true", help="end when the standard input ends")
    chosen = parser.parse_args()
    if chosen.end_with_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    name = socket.getfqdn() if chosen.address is None else ""
    address = chosen.address or f"tcp://{name}:{chosen.port}@tcp://0.0.0.0:{chosen.port}"
    if chosen.certificate and chosen.address is None:
        address = f"tls://{name}:{chosen.port}"
    url = next((part for part in address.split("@") if "://" in part), address)  # an identity may come first
    if url.startswith("tls://") != bool(chosen.certificate):
        parser.error(
            f"{url} with --certificate={chosen.certificate}; tls:// addresses, and no others, need a certificate"
        )
    if chosen.certificate:
        use_certificate(chosen.certificate)
    warn_of_open_ports([url])
    run_worker_loop_forever(address=address, ca="trust_all_connections")


def _end_with_stdin() -> None:
    """The other end of the pipe is held by the controller, and the kernel closes it whatever ends that."""
    while os.read(0, 4096):
        continue
    os._exit(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What a host has."""

    hostname: str
    gpus: tuple[str, ...]
    """Ids of the GPUs that a process there sees, as CUDA_VISIBLE_DEVICES takes them."""
    cores: frozenset[int]
    """Those that a process there may use."""
    place: str
    """Who shares memory with its processes; see `processes.place`."""
    gpu_bytes: tuple[int, ...] = ()
    """Memory of each of `gpus`; empty where nobody could say."""


def facts_here() -> HostFacts:
    """Of the host that this process runs on."""
    gpus = visible_gpus()
    return HostFacts(
        hostname=socket.gethostname(),
        gpus=gpus,
        cores=frozenset(os.sched_getaffinity(0)),
        place=memory_domain(),
        gpu_bytes=gpu_bytes(gpus),
    )


class Warden(Actor):
    """On a host that is not the controller's; its parent is the host's process."""

    @concurrent_endpoint
    async def report(self, address: tuple[str, int], secret: str) -> HostFacts:
        """Hold a line to the controller from now on. Returns what the host has."""
        line = await asyncio.to_thread(socket.create_connection, address, _CONNECT_S)
        line.sendall(f"{secret}\n".encode())
        threading.Thread(target=_hold, args=(line,), name="lifeline", daemon=True).start()
        return facts_here()

    @concurrent_endpoint
    async def lacks(self, paths: tuple[str, ...]) -> tuple[str, ...]:
        """Those of `paths` that do not exist here."""
        return tuple(path for path in paths if not Path(path).exists())

    @concurrent_endpoint
    async def kill(self, mark: str, logs: str) -> None:
        """Kill what is left here of a mesh; remove the logs of one that ended well, if `logs` names their folder."""
        await asyncio.to_thread(kill_marked, mark)
        if logs:
            await asyncio.to_thread(shutil.rmtree, logs, ignore_errors=True)


def _hold(line: socket.socket) -> None:
    """Beat until the controller's end of the line is closed, by whatever; then end the host."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # the kernel gives up on a machine that is gone: 7 s
    for option, value in ((socket.TCP_KEEPIDLE, 3), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 4)):
        line.setsockopt(socket.IPPROTO_TCP, option, value)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 7000)  # also while something is on its way
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


if __name__ == "__main__":
    main()
