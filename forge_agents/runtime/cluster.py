"""The hosts of a run: how the controller starts them, connects to them and notices that one is lost."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Any

from forge_agents.errors import HostError, StallError
from forge_agents.runtime import startup
from forge_agents.runtime.allocation import Allocator, Host, MeshRequest, gpus_per_node
from forge_agents.runtime.host_process import ANSWER, HostAgent, HostFacts
from forge_agents.runtime.hosts import Hosts
from forge_agents.runtime.interfaces import own_address
from forge_agents.runtime.jobs import Job, start_job
from forge_agents.runtime.processes import bootstrap_command, variables

_EVERYWHERE = "0.0.0.0"  # noqa: S104  # hosts are other machines, and each has a secret
_TICK_S = 1.0
_SECRET_TIMEOUT_S = 5.0
_MAX_STRANGERS = 256
"""Maximum number of connections that have not sent a secret yet. Strangers may reach the port as well. The oldest
connection makes room for a new one, which may be a host agent's."""


class Cluster(Allocator):
    """The hosts of this process's run, and the allocation of processes to them. Arguments as for `Allocator`.

    The agent of each remote host connects back to the controller with a secret and sends a heartbeat every second. The
    connection works in both directions: a host ends if it breaks, and the controller counts the host as lost if it
    breaks or stays silent.
    """

    def __init__(self, config: Hosts, here: Callable[[], Any], meshes: Sequence[MeshRequest] = ()) -> None:
        super().__init__(config, here, meshes)
        self._job: Job | None = None
        self._server: asyncio.Server | None = None
        self._address = ("", 0)
        self._expected: dict[str, asyncio.Future[asyncio.StreamReader]] = {}
        """Connections of host agents by secret."""
        self._connections: list[asyncio.StreamWriter] = []
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        """Connections without a secret, oldest first."""
        self._tasks: list[asyncio.Task[None]] = []

    async def launch(self, meshes: Sequence[MeshRequest] = ()) -> None:
        """Start the hosts and check their hardware. Slurm is asked for the GPUs of `meshes`.

        Raises:
            HostError: There are fewer hosts or GPUs than requested, or a host cannot be reached.
            StallError: A host did not answer in time.
        """
        try:
            if self.config.kind != "local":
                await self._reach(meshes)
            self.check()
        except BaseException:
            await self.end()
            raise

    async def _reach(self, meshes: Sequence[MeshRequest]) -> None:
        timeout_s = self.config.start_timeout_s
        self._job = start_job(self.config, variables(""), gpus_per_node=gpus_per_node(self.config, meshes))
        self.machines = self._job.meshes
        for role, machines in self.machines.items():
            self.hosts += [
                Host(name=f"{role}-{i}", role=role, number=i, machine=machines.slice(hosts=slice(i, i + 1)))
                for i in range(self.config.counts[role])
            ]
        await self._open_server()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(self._connect_role(role) for role in self.machines))
        except TimeoutError:
            missing = [f"{host}{self._job_name(host)}" for host in self.hosts if host.facts is None]
            raise StallError(
                f"hosts {', '.join(missing)} did not answer within start_timeout_s={timeout_s:g}. Check that their "
                "host processes run, that this machine and they can connect to each other, and that all have the same "
                "Python environment at the same path",
                self.hosts[0].name,
            ) from None

    async def _open_server(self) -> None:
        bound = self._bind_address()
        self._server = await asyncio.start_server(self._accept, bound, 0)
        port = self._server.sockets[0].getsockname()[1]
        self._address = (socket.gethostname() if bound == _EVERYWHERE else bound, port)
        if not self.config.all_here:
            where = "all interfaces" if bound == _EVERYWHERE else bound
            startup.say(f"the controller listens on {where}, port {port}, for its hosts, which send a secret")

    async def _connect_role(self, role: str) -> None:
        try:
            await self.machines[role].initialized
        except (RuntimeError, ValueError) as cause:
            reason = str(cause).split("\n\n")[0]
            raise HostError(f"the {role} hosts cannot be reached: {' '.join(reason.split())}") from cause
        await asyncio.gather(*(self._start_agent(host) for host in self.hosts if host.role == role))

    async def _start_agent(self, host: Host) -> None:
        """Start the host's agent and wait for its connection."""
        secret = secrets.token_hex(16)
        connection = self._expected[secret] = asyncio.get_running_loop().create_future()
        try:
            command = bootstrap_command({**variables(host.name), "OMP_NUM_THREADS": "1"})
            name = host.name.replace("-", "_")
            procs = host.machine.spawn_procs(
                per_host={"rank": 1}, name=f"agent_{name}_{secret[:6]}", bootstrap_command=command
            )
            agent = procs.flatten("rank").spawn("host_agent", HostAgent)
            facts: HostFacts = await agent.report.call_one(self._address, secret)
            reader = await connection
        except (RuntimeError, ValueError, OSError) as cause:
            reason = " ".join(str(cause).split())[:300]
            raise HostError(f"host {host}{self._job_name(host)} cannot be used: {reason}") from cause
        host.agent, host.facts = agent, facts
        self._tasks += [asyncio.ensure_future(self._watch(host, reader))]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a connection that sends a valid secret in time, and close others, the oldest if there are too many."""
        self._strangers[writer] = None
        if len(self._strangers) > _MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.close()
        connection = None
        try:
            with contextlib.suppress(OSError, TimeoutError, ValueError):
                secret = (await asyncio.wait_for(reader.readline(), _SECRET_TIMEOUT_S)).decode(errors="replace").strip()
                connection = self._expected.pop(secret, None)
        finally:
            self._strangers.pop(writer, None)
        if connection is None or connection.done():
            writer.close()
        else:
            writer.write(ANSWER)
            self._connections.append(writer)
            connection.set_result(reader)

    async def _watch(self, host: Host, reader: asyncio.StreamReader) -> None:
        """Read a host's heartbeats. The host is lost when they stop or the connection ends."""
        reason, silent_s = f"it sent no heartbeat for {self.config.heartbeat_timeout_s:g} s", 0.0
        reading = asyncio.ensure_future(reader.read(64))
        try:
            # Count turns of this loop instead of wall-clock time: while the controller's own thread is blocked, it
            # reads no heartbeats, and then no host must count as lost.
            while silent_s < self.config.heartbeat_timeout_s:
                await asyncio.wait({reading}, timeout=_TICK_S)
                silent_s += _TICK_S
                if reading.done():
                    if reading.exception() is not None or not reading.result():
                        reason = "its connection ended"
                        break
                    silent_s, reading = 0.0, asyncio.ensure_future(reader.read(64))
        finally:
            reading.cancel()
        self.lose(host, f"host {host} is lost: {reason}")

    def lose(self, host: Host, why: str) -> None:
        """Exclude a host from further use and notify all listeners with processes there."""
        if not host.lost:
            host.lost = why
            for listener in host.listeners.copy():
                listener(why)

    async def check_paths(self, paths: Sequence[str]) -> None:
        """Check that all hosts have these files and folders.

        Raises:
            HostError: A path is missing on a host. The message names both.
        """
        for host in self.hosts:
            if missing := await host.agent.missing.call_one(tuple(paths)):
                raise HostError(
                    f"host {host} does not see {', '.join(missing)}. Models and the run's folder must be on a file "
                    "system that all hosts share, at the same path"
                )

    async def end(self) -> None:
        """End all hosts by closing their connections. May be called twice."""
        for host in self.hosts:
            host.lost = host.lost or f"host {host} has ended with its run"
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self.hosts.clear()
        self.machines = {}
        job, self._job = self._job, None
        if job is not None:
            job.end()  # not on a thread: none can be started when the program's exit ends the hosts

    def _bind_address(self) -> str:
        """The address to listen on: that of one interface if this machine's name or a route determines it."""
        if self.config.all_here:
            return "127.0.0.1"
        if self.config.address:
            return self.config.address.split("//")[1].rpartition(":")[0]
        workers = [address for address in self.config.addresses if not address.startswith("ipc")]
        first = workers[0].partition("://")[2].rpartition(":")[0] if workers else "localhost"
        try:
            return own_address(first)
        except HostError:
            return _EVERYWHERE

    def _job_name(self, host: Host) -> str:
        names = () if self._job is None else self._job.names.get(host.role, ())
        return f", {names[host.number]}," if host.number < len(names) else ""
