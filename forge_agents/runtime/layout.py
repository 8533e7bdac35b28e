"""The hosts of a run: reached, counted, watched, and what is placed on which.

In: `Hosts`. Out: for each mesh of processes the hosts it belongs on, and word of hosts that are lost. Waits for every
host's first answer, with a deadline that names the host.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge_agents.envs.workers import env as workers
from forge_agents.envs.workers._homes import KNOCK_S, Door, Here, There, room
from forge_agents.errors import HostError, StallError
from forge_agents.runtime import _monarch
from forge_agents.runtime import jobs as _host_jobs
from forge_agents.runtime.hosts import ENVS, ROLES, Hosts, parse_cores
from forge_agents.runtime.warden import HostFacts, Warden, facts_here

_TICK_S = 1.0
_END_S = 5.0


@dataclass(slots=True, kw_only=True, eq=False)
class Host:
    """One host; the controller's own has no warden."""

    name: str
    role: str
    number: int
    """Among its role's hosts."""
    machine: Any
    """Monarch's mesh of this host alone."""
    warden: Any = None
    facts: HostFacts | None = None
    lost: str = ""
    """What was seen of its end; empty as long as it lives."""
    processes: int = 0
    gpu_users: collections.Counter[str] = field(default_factory=collections.Counter)
    listeners: list[Callable[[str], None]] = field(default_factory=list)
    """Told when it is lost."""

    def __str__(self) -> str:
        return f"{self.name} ({self.facts.hostname})" if self.facts is not None else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Where the processes of one mesh go."""

    hosts: tuple[Host, ...]
    machines: Any
    """Monarch's mesh of just these hosts."""
    each: int
    """Processes on each."""
    gpus: tuple[str, ...] = ()
    """Ids that each host's processes see, the same on all; empty leaves what there is."""
    cores: frozenset[int] = frozenset()
    """Cores of each host that they may use; empty for all."""

    @property
    def elsewhere(self) -> bool:
        """Whether they run on other hosts than the controller's."""
        return self.hosts[0].warden is not None

    @property
    def lost(self) -> str:
        """What was seen of the end of one of the hosts; empty while all live."""
        return next((host.lost for host in self.hosts if host.lost), "")

    def give_back(self) -> None:
        """The processes have ended."""
        for host in self.hosts:
            host.processes -= self.each
            host.gpu_users.subtract(self.gpus)


class Layout:
    """The hosts of this process's run.

    Args:
        config: What was asked for.
        here: Monarch's mesh of the controller's host, made when it is first needed.
    """

    def __init__(self, config: Hosts, here: Callable[[], Any]) -> None:
        self.config = config
        self._here_machine = here
        self._here = Host(name="this host", role="", number=0, machine=None)
        self.hosts: list[Host] = []
        self._job: _host_jobs.Job | None = None
        self._server: asyncio.Server | None = None
        self._greeted: dict[str, asyncio.Future[asyncio.StreamReader]] = {}
        self._lines: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._door: Door | None = None
        self._worker_homes: list[There] = []

    @property
    def by_ip(self) -> bool:
        """Whether ranks of a learner find each other by address, not by name."""
        return self._job is not None and self._job.by_ip

    async def launch(self, env: Callable[[str], Mapping[str, str]]) -> None:
        """Bring the hosts up and see that they have what they should.

        Args:
            env: Variables of what runs on the host of that name.

        Raises:
            HostError: There are fewer hosts or GPUs than asked for, or one cannot be reached.
            StallError: A host did not answer in time.
        """
        self._here.facts = facts_here()
        try:
            if self.config.kind != "local":
                await self._reach(env)
            self._check_facts()
            await self._settle_workers()
        except BaseException:
            await self.end()
            raise

    async def _reach(self, env: Callable[[str], Mapping[str, str]]) -> None:
        timeout_s = self.config.start_timeout_s
        self._job = _host_jobs.start(self.config, env(""))
        for role, machines in self._job.meshes.items():
            self.hosts += [
                Host(name=f"{role}-{i}", role=role, number=i, machine=machines.slice(hosts=slice(i, i + 1)))
                for i in range(self.config.counts[role])
            ]
        self._server = await asyncio.start_server(self._greet, self._bind(), 0)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(self._meet(role, env) for role in self._job.meshes))
        except TimeoutError:
            waiting = [f"{host}{self._better_name(host)}" for host in self.hosts if host.facts is None]
            raise StallError(
                f"hosts {', '.join(waiting)} did not answer within start_timeout_s={timeout_s:g}; see that their host "
                "processes run, that this machine can connect to them and they to it, and that all have the same "
                "Python environment at the same path",
                self.hosts[0].name,
            ) from None

    async def _meet(self, role: str, env: Callable[[str], Mapping[str, str]]) -> None:
        assert self._job is not None
        try:
            await self._job.meshes[role].initialized
        except (RuntimeError, ValueError) as cause:
            said = str(cause).split("\n\n")[0]
            raise HostError(f"the {role} hosts cannot be reached: {' '.join(said.split())}") from cause
        await asyncio.gather(*(self._station(host, env(host.name)) for host in self.hosts if host.role == role))

    async def _station(self, host: Host, env: Mapping[str, str]) -> None:
        """Start the host's warden and take up its line."""
        assert self._server is not None
        secret = secrets.token_hex(16)
        line = self._greeted[secret] = asyncio.get_running_loop().create_future()
        try:
            command = _monarch.default_bootstrap_cmd().with_env({**env, "OMP_NUM_THREADS": "1"})
            name = host.name.replace("-", "_")
            procs = host.machine.spawn_procs(
                per_host={"rank": 1}, name=f"warden_{name}_{secret[:6]}", bootstrap_command=command
            )
            warden = procs.flatten("rank").spawn("warden", Warden)
            address = (self._reached_at(), self._server.sockets[0].getsockname()[1])
            facts: HostFacts = await warden.report.call_one(address, secret)
            reader = await line
        except (RuntimeError, ValueError, OSError) as cause:
            said = " ".join(str(cause).split())[:300]
            raise HostError(f"host {host}{self._better_name(host)} cannot be used: {said}") from cause
        host.warden, host.facts = warden, facts
        self._tasks += [asyncio.ensure_future(self._listen(host, reader))]

    async def _settle_workers(self) -> None:
        """Let worker processes of environments start on the hosts that are for them."""
        cores = self.config.cores_of(ENVS)
        for host in [host for host in self.hosts if host.role == ENVS]:
            assert host.facts is not None
            try:
                self._door = self._door or Door(self._bind(), self._reached_at())
                place, knocked = self._door.expect()
                async with asyncio.timeout(KNOCK_S):
                    await host.warden.start_workers.call_one(place)
                    control = await asyncio.wrap_future(knocked)
            except (OSError, RuntimeError) as cause:
                raise HostError(
                    f"host {host} did not connect to this process at {self._reached_at()} within {KNOCK_S:g} s for "
                    "worker processes of environments; see that hosts can connect to the controller"
                ) from cause
            capacity = room(len(cores or host.facts.cores))
            home = There(str(host), self._door, control, cores=cores, capacity=capacity)
            host.listeners.append(home.lose)
            self._worker_homes.append(home)
        workers.move(self._worker_homes or ([Here(cores)] if cores else []))

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Whoever connects says a secret first; who knows none is sent away."""
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            secret = (await asyncio.wait_for(reader.readline(), _END_S)).decode(errors="replace").strip()
            line = self._greeted.pop(secret, None)
            if line is not None and not line.done():
                self._lines.append(writer)
                line.set_result(reader)
                return
        writer.close()

    async def _listen(self, host: Host, reader: asyncio.StreamReader) -> None:
        """Hear a host's beats; when they end, it is lost."""
        heard = False

        async def beats() -> None:
            nonlocal heard
            while await reader.read(64):
                heard = True

        hearing, silent_s = asyncio.ensure_future(beats()), 0.0
        try:
            # counted in turns of this loop: while the controller's own thread is busy, nobody falls silent
            while silent_s < self.config.silence_s:
                await asyncio.wait({hearing}, timeout=_TICK_S)
                if hearing.done():
                    break
                silent_s, heard = (0.0 if heard else silent_s + _TICK_S), False
        finally:
            hearing.cancel()
        why = "its connection ended" if hearing.done() else f"it said nothing for {self.config.silence_s:g} s"
        self.lose(host, f"host {host} is lost: {why}")

    def lose(self, host: Host, why: str) -> None:
        """Use a host no more and tell everybody who has processes there."""
        if not host.lost:
            host.lost = why
            for listener in host.listeners.copy():
                listener(why)

    # ---- placing

    def spot(self, role: str, procs: int) -> Spot:
        """Choose the hosts of one mesh.

        A lost host is replaced by others of its role, then by spare ones, then by those of other roles.

        Raises:
            ValueError: The processes cannot be spread evenly.
            HostError: No host is left.
        """
        home = role if role in self.config.counts else "learner" if role == "store" else ""
        if home not in self.config.counts or self.config.kind == "local":
            if self._here.machine is None:
                self._here.machine = self._here_machine()
            return self._spot((self._here,), self._here.machine, role, procs)
        for candidate in (home, "spare", *(other for other in ROLES if other not in (home, "spare"))):
            living = [host for host in self.hosts if host.role == candidate and not host.lost]
            if living:
                break
        else:
            raise HostError(
                f"no host is left for {role}: {'; '.join(host.lost for host in self.hosts)}. The run continues from "
                "its newest checkpoint when it is started again"
            )
        if procs == 1 or role == "store":
            least = min(living, key=lambda host: (host.processes, host.number))
            return self._spot((least if role != "store" else living[0],), None, role, procs)
        run = _longest_run(living)
        count = next(n for n in range(len(run), 0, -1) if procs % n == 0)
        chosen = tuple(run[:count])
        first = chosen[0]
        assert self._job is not None
        machines = self._job.meshes[first.role].slice(hosts=slice(first.number, first.number + count))
        return self._spot(chosen, machines, role, procs)

    def _spot(self, hosts: tuple[Host, ...], machines: Any, role: str, procs: int) -> Spot:
        each = procs // len(hosts)
        pool = self._pool(hosts[0], role)
        gpus = tuple(sorted(pool, key=lambda one: (hosts[0].gpu_users[one], pool.index(one)))[:each])
        if gpus:
            gpus = tuple(sorted(gpus, key=pool.index))
        for host in hosts:
            host.processes += each
            host.gpu_users.update(gpus)
        return Spot(
            hosts=hosts,
            machines=hosts[0].machine if machines is None else machines,
            each=each,
            gpus=gpus,
            cores=self.config.cores_of(role),
        )

    def _pool(self, host: Host, role: str) -> tuple[str, ...]:
        """GPUs that a role may use on a host; those of roles that share the host come one after the other."""
        first, wanted = 0, self.config.gpus
        if role not in wanted or host.facts is None:
            return ()
        if host is self._here:
            sharing = [one for one in ROLES if self.config.kind == "local" or one not in self.config.counts]
            first = sum(wanted.get(one, 0) for one in sharing[: sharing.index(role)])
        return host.facts.gpus[first : first + wanted[role]]

    def _check_facts(self) -> None:
        for role, cores in self.config.cpus.items():
            for host in [host for host in self.hosts if host.role == role] or [self._here]:
                assert host.facts is not None
                if missing := parse_cores(cores) - host.facts.cores:
                    raise HostError(
                        f"cpus of the mesh bind {role} to {cores} and {host} has no core {min(missing)} for it; it has "
                        f"{', '.join(map(str, sorted(host.facts.cores)))}"
                    )
        wanted = collections.Counter[Host]()
        for role, count in self.config.gpus.items():
            for host in [host for host in self.hosts if host.role == role] or [self._here]:
                wanted[host] += count
        for host, count in wanted.items():
            assert host.facts is not None
            if count > len(host.facts.gpus):
                raise HostError(
                    f"the mesh asks for {count} GPUs on {host} and it has {len(host.facts.gpus)}; lower gpus, or "
                    "choose other hosts"
                )

    async def check_paths(self, paths: Sequence[str]) -> None:
        """See that the hosts have these files and folders where the controller has them.

        Raises:
            HostError: One has not; the message names the host and what is missing there.
        """
        for host in self.hosts:
            missing = await host.warden.lacks.call_one(tuple(paths))
            if missing:
                raise HostError(
                    f"host {host} does not see {', '.join(missing)}; models and the run's folder must be on a file "
                    "system that all hosts share, at the same path"
                )

    # ---- the end

    async def end(self) -> None:
        """End the hosts: each ends when its line does. Twice is no error."""
        for home in self._worker_homes:
            home.close(f"host {home.name} has ended with its run")
        self._worker_homes.clear()
        workers.move()
        if self._door is not None:
            self._door.close()
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            self._server.close()
        for line in self._lines:
            line.close()
        self._lines.clear()
        self.hosts.clear()
        job, self._job = self._job, None
        if job is not None:
            await asyncio.to_thread(job.end)

    def _bind(self) -> str:
        return "127.0.0.1" if self._all_here() else self._reached_at() if self.config.address else "0.0.0.0"  # noqa: S104  # hosts are other machines; a secret is asked for

    def _reached_at(self) -> str:
        if self._all_here():
            return "127.0.0.1"
        return self.config.address.split("//")[1].rpartition(":")[0] if self.config.address else socket.gethostname()

    def _all_here(self) -> bool:
        workers = [one for addresses in self.config.workers.values() for one in addresses]
        return self.config.kind == "process" or bool(
            workers and all(one.startswith(_host_jobs.LOOPBACK) for one in workers)
        )

    def _better_name(self, host: Host) -> str:
        names = () if self._job is None else self._job.names.get(host.role, ())
        return f", {names[host.number]}," if host.number < len(names) else ""


def _longest_run(hosts: Sequence[Host]) -> list[Host]:
    """The most hosts whose numbers follow one another: Monarch spawns on such a range at once."""
    runs: list[list[Host]] = []
    for host in sorted(hosts, key=lambda one: one.number):
        if runs and runs[-1][-1].number + 1 == host.number:
            runs[-1].append(host)
        else:
            runs.append([host])
    return max(runs, key=len)
