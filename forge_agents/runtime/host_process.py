"""The process of one host of a run: ``python -m forge_agents.runtime.host_process --port 26600``.

The host process starts others for one controller and ends with it. A host agent, a small process that the host process
starts, keeps a connection to the controller and sends a heartbeat every second.
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

from forge_agents.runtime._monarch import (
    Actor,
    concurrent_endpoint,
    run_worker_loop_forever,
    shorten_socket_paths,
    use_certificate,
)
from forge_agents.runtime.exposure import warn_of_open_ports
from forge_agents.runtime.machine import gpu_bytes, memory_domain, visible_gpus
from forge_agents.runtime.processes import kill_mesh, raise_file_limit

ANSWER = b"."
"""The controller's answer to a secret."""
_HEARTBEAT_S = 1.0
_CONNECT_TIMEOUT_S = 30.0
_RETRY_S = 0.05


def main() -> None:
    """Serve one run. Does not return."""
    parser = argparse.ArgumentParser(prog="python -m forge_agents.runtime.host_process", description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--port", type=int, help="TCP port to listen on, on all interfaces, under this machine's name")
    where.add_argument("--address", help="address to listen on: tls://HOST:PORT, tcp://HOST:PORT or ipc://PATH")
    parser.add_argument("--certificate", metavar="FOLDER", help="folder with tls.crt and tls.key, for tls addresses")
    parser.add_argument("--end-with-stdin", action="store_true", help="end when the standard input ends")
    args = parser.parse_args()
    if args.end_with_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    name = socket.getfqdn() if args.address is None else ""
    address = args.address or f"tcp://{name}:{args.port}@tcp://0.0.0.0:{args.port}"
    if args.certificate and args.address is None:
        address = f"tls://{name}:{args.port}"
    url = next((part for part in address.split("@") if "://" in part), address)  # a host identity may come first
    if url.startswith("tls://") != bool(args.certificate):
        parser.error(
            f"{url} with --certificate={args.certificate}. Tls:// addresses, and no others, need a certificate"
        )
    if args.certificate:
        use_certificate(args.certificate)
    warn_of_open_ports([url])
    raise_file_limit()
    shorten_socket_paths()
    run_worker_loop_forever(address=address, ca="trust_all_connections")


def _end_with_stdin() -> None:
    """End when the controller's end of the pipe is closed, which the kernel does however the controller ends."""
    while os.read(0, 4096):
        continue
    os._exit(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Hardware of a host."""

    hostname: str
    gpus: tuple[str, ...]
    """Ids of the GPUs that a process there sees, as in CUDA_VISIBLE_DEVICES."""
    cores: frozenset[int]
    """Cores that a process there may use."""
    memory_domain: str
    """See `machine.memory_domain`."""
    gpu_bytes: tuple[int, ...] = ()
    """Memory of each GPU. Empty if not known."""


def facts_here() -> HostFacts:
    """Return the hardware of this process's host."""
    gpus = visible_gpus()
    return HostFacts(
        hostname=socket.gethostname(),
        gpus=gpus,
        cores=frozenset(os.sched_getaffinity(0)),
        memory_domain=memory_domain(),
        gpu_bytes=gpu_bytes(gpus),
    )


class HostAgent(Actor):
    """The controller's agent on a remote host. Its parent is the host process."""

    @concurrent_endpoint
    async def report(self, address: tuple[str, int], secret: str) -> HostFacts:
        """Connect to the controller, start the heartbeat and return the host's hardware."""
        connection = await asyncio.to_thread(_connect, address, secret)
        threading.Thread(target=_keep_alive, args=(connection,), name="heartbeat", daemon=True).start()
        return facts_here()

    @concurrent_endpoint
    async def missing(self, paths: tuple[str, ...]) -> tuple[str, ...]:
        """Return the paths that do not exist on this host."""
        return tuple(path for path in paths if not Path(path).exists())

    @concurrent_endpoint
    async def kill(self, mark: str, logs: str) -> None:
        """Kill the remaining processes of a mesh and remove its log folder `logs`. Empty keeps the logs."""
        await asyncio.to_thread(kill_mesh, mark)
        if logs:
            await asyncio.to_thread(shutil.rmtree, logs, ignore_errors=True)
            with contextlib.suppress(OSError):  # other meshes have logs there
                Path(logs).parent.rmdir()


def _connect(address: tuple[str, int], secret: str) -> socket.socket:
    """Connect to the controller and send the secret, again if the controller closes the connection unread.

    The controller does so while strangers open more connections than it keeps.

    Raises:
        OSError: The controller cannot be reached, or did not answer in time.
    """
    deadline = time.monotonic() + _CONNECT_TIMEOUT_S
    while True:
        connection = socket.create_connection(address, _CONNECT_TIMEOUT_S)
        with contextlib.suppress(ConnectionError):
            connection.sendall(f"{secret}\n".encode())
            if connection.recv(len(ANSWER)):
                return connection
        connection.close()
        if time.monotonic() > deadline:
            raise ConnectionError(f"the controller closed every connection for {_CONNECT_TIMEOUT_S:g} s")
        time.sleep(_RETRY_S)


def _keep_alive(connection: socket.socket) -> None:
    """Send heartbeats until the connection to the controller ends, then end this host.

    TCP itself does not notice a controller machine that disappears, so the kernel's keep-alive probes and the limit on
    unacknowledged data end the connection after 7 s.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 3), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 4)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 7000)  # also while data is in flight
    connection.settimeout(_HEARTBEAT_S)
    while True:
        try:
            connection.sendall(b".")
            if not connection.recv(64):
                break
        except TimeoutError:
            continue
        except OSError:
            break
    host = os.getppid()  # this process and the others of the host end with it
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(OSError):
            if host > 1:
                os.kill(host, number)
        time.sleep(_HEARTBEAT_S)
    os._exit(0)


if __name__ == "__main__":
    main()
