"""The hosts of a run: reached, counted, watched, and what is placed on which.

In: `Hosts`. Out: for each mesh of processes the hosts it belongs on, and word of hosts that are lost. Waits for the
scheduler and for every host's first answer, with a deadline that names the host.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import math
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

from forge_agents.errors import HostError, StallError
from forge_agents.runtime import startup
from forge_agents.runtime.host_process import HostFacts, Warden, facts_here
from forge_agents.runtime.hosts import ENVS, HERE, ON_GPUS, ROLES, Hosts, ProcessSlot, parse_cores
from forge_agents.runtime.interfaces import own_address
from forge_agents.runtime.jobs import LOOPBACK, Job, start_job
from forge_agents.runtime.processes import bootstrap_command

_EVERYWHERE = "0.0.0.0"  # noqa: S104  # hosts are other machines, and each has a secret
_TICK_S = 1.0
_END_S = 5.0
_MAX_GREETED = 256
"""Connections at one time that have not said a secret yet: strangers may reach the port, too."""
_MANY_GPUS = 1024
_LEAST_ROOM = 4
"""Environments that a host with few cores plays at once: most wait for their players most of the time."""


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
    gpus_by_host: tuple[tuple[str, ...], ...] = ()
    """Ids that each host's processes see, as many on all; empty leaves what there is."""
    cores: frozenset[int] = frozenset()
    """Cores of each host that they may use; empty for all."""
    planned: bool = False
    """It is theirs whether or not they run; see `Layout.plan`."""

    @property
    def elsewhere(self) -> bool:
        """Whether they run on other hosts than the controller's."""
        return self.hosts[0].warden is not None

    @property
    def gpus(self) -> tuple[str, ...]:
        """Those of the first host."""
        return self.gpus_by_host[0]

    @property
    def places(self) -> set[tuple[str, str]]:
        """Hosts and their GPUs."""
        return {(str(host), gpu) for host, gpus in zip(self.hosts, self.gpus_by_host, strict=True) for gpu in gpus}

    @property
    def on_one_machine(self) -> bool:
        """Whether all hosts are one machine: they share a kernel, process ids and the user."""
        places = {host.facts.place.partition("/")[2] for host in self.hosts if host.facts is not None}
        return len(self.hosts) == 1 or len(places) == 1

    @property
    def lost(self) -> str:
        """What was seen of the end of one of the hosts; empty while all live."""
        return next((host.lost for host in self.hosts if host.lost), "")

    def give_back(self) -> None:
        """The processes have ended."""
        if self.planned:
            return
        for host, gpus in zip(self.hosts, self.gpus_by_host, strict=True):
            host.processes -= self.each
            host.gpu_users.subtract(gpus)


class Cluster:
    """The hosts of this process's run.

    Args:
        here: Monarch's mesh of the controller's host, made when it is first needed.
        wants: Processes that are going to compute, by role; where GPUs are not given to roles, each gets one of its
            own if there are enough.
    """

    def __init__(self, config: Hosts, here: Callable[[], Any], wants: Mapping[str, int] | None = None) -> None:
        self.config = config
        self._wants = wants or {}
        self._here_machine = here
        self._here = Host(name=HERE, role="", number=0, machine=None, facts=facts_here())
        self.hosts: list[Host] = []
        self._planned: dict[tuple[str, str, int], Spot] = {}
        self._job: Job | None = None
        self._server: asyncio.Server | None = None
        self._line_address = ("", 0)
        self._greeted: dict[str, asyncio.Future[asyncio.StreamReader]] = {}
        self._lines: list[asyncio.StreamWriter] = []
        self._num_greeted = 0
        self._tasks: list[asyncio.Task[None]] = []

    def suppose(self, gpus: int, *, gpu_bytes: int = 0, here: int | None = None) -> None:
        """Take the hosts that are asked for as given, without reaching one, to `rehearse` on them.

        Args:
            gpus: Of each host whose role `Hosts.gpus` does not name.
            gpu_bytes: Memory of each.
            here: GPUs of the controller's host; None: those that it has.
        """
        if here is not None:
            ids = tuple(map(str, range(here)))
            self._here.facts = HostFacts(
                hostname="supposed", gpus=ids, cores=frozenset(), place="", gpu_bytes=(gpu_bytes,) * here
            )
        what = {"process": "a process here", "slurm": "a node of the job", "kubernetes": "a pod"}.get(self.config.kind)
        for role, count in self.config.counts.items():
            ids = tuple(map(str, range(self.config.gpus.get(role, gpus))))
            for i in range(count):
                name = what or self.config.workers[role][i]
                facts = HostFacts(
                    hostname=name, gpus=ids, cores=frozenset(), place="", gpu_bytes=(gpu_bytes,) * len(ids)
                )
                self.hosts.append(Host(name=f"{role}-{i}", role=role, number=i, machine=None, facts=facts))

    async def launch(
        self, env: Callable[[str], Mapping[str, str]], meshes: Sequence[tuple[str, str, int]] = ()
    ) -> None:
        """Bring the hosts up and see that they have what they should.

        Args:
            env: Variables of what runs on the host of that name.
            meshes: Name, role and processes of what is going to compute; Slurm is asked for GPUs for them.

        Raises:
            HostError: There are fewer hosts or GPUs than asked for, or one cannot be reached.
            StallError: A host did not answer in time.
        """
        try:
            if self.config.kind != "local":
                await self._reach(env, meshes)
            self._check_cores()
            self.check_gpus()
        except BaseException:
            await self.end()
            raise

    async def _reach(
        self, env: Callable[[str], Mapping[str, str]], meshes: Sequence[tuple[str, str, int]]
    ) -> None:
        timeout_s = self.config.start_timeout_s
        self._job = start_job(self.config, env(""), gpus_per_node=gpus_to_ask_for(self.config, meshes))
        for role, machines in self._job.meshes.items():
            self.hosts += [
                Host(name=f"{role}-{i}", role=role, number=i, machine=machines.slice(hosts=slice(i, i + 1)))
                for i in range(self.config.counts[role])
            ]
        bound = self._bind()
        self._server = await asyncio.start_server(self._greet, bound, 0)
        port = self._server.sockets[0].getsockname()[1]
        self._line_address = (self._reached_at() if bound == _EVERYWHERE else bound, port)
        if not self._all_here():
            where = "all interfaces" if bound == _EVERYWHERE else bound
            startup.say(f"the controller listens on {where}, port {port}, for its hosts, which must know a secret")
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
        secret = secrets.token_hex(16)
        line = self._greeted[secret] = asyncio.get_running_loop().create_future()
        try:
            command = bootstrap_command({**env, "OMP_NUM_THREADS": "1"})
            name = host.name.replace("-", "_")
            procs = host.machine.spawn_procs(
                per_host={"rank": 1}, name=f"warden_{name}_{secret[:6]}", bootstrap_command=command
            )
            warden = procs.flatten("rank").spawn("warden", Warden)
            facts: HostFacts = await warden.report.call_one(self._line_address, secret)
            reader = await line
        except (RuntimeError, ValueError, OSError) as cause:
            said = " ".join(str(cause).split())[:300]
            raise HostError(f"host {host}{self._better_name(host)} cannot be used: {said}") from cause
        host.warden, host.facts = warden, facts
        self._tasks += [asyncio.ensure_future(self._listen(host, reader))]

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Whoever connects says a secret first; who knows none is sent away."""
        if self._num_greeted >= _MAX_GREETED:
            writer.close()
            return
        self._num_greeted += 1
        try:
            await self._take_line(reader, writer)
        finally:
            self._num_greeted -= 1

    async def _take_line(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
            while silent_s < self.config.heartbeat_timeout_s:
                await asyncio.wait({hearing}, timeout=_TICK_S)
                if hearing.done():
                    break
                silent_s, heard = (0.0 if heard else silent_s + _TICK_S), False
        finally:
            hearing.cancel()
        why = "its connection ended" if hearing.done() else f"it said nothing for {self.config.heartbeat_timeout_s:g} s"
        self.lose(host, f"host {host} is lost: {why}")

    def lose(self, host: Host, why: str) -> None:
        """Use a host no more and tell everybody who has processes there."""
        if not host.lost:
            host.lost = why
            for listener in host.listeners.copy():
                listener(why)

    # ---- placing

    def spot(self, role: str, procs: int, name: str = "") -> Spot:
        """Choose the hosts of one mesh: those that are planned for its `name`, as long as they live.

        A lost host is replaced by others of its role, then by spare ones, then by those of other roles; for
        environments by the controller's host at once, as they may be played anywhere.

        Raises:
            ValueError: The processes cannot be spread evenly.
            HostError: No host is left.
        """
        if (planned := self._planned.get(mesh := (name, role, procs))) is not None:
            if not planned.lost:
                return planned
            replace(self._planned.pop(mesh), planned=False).give_back()
        home = role if role in self.config.counts else "learner" if role == "store" else ""
        others = () if role == ENVS else ("spare", *(other for other in ROLES if other not in (home, "spare")))
        living = next(filter(None, map(self._living, (home, *others))), [])
        elsewhere = home in self.config.counts and self.config.kind != "local"
        if not elsewhere or (role == ENVS and not living):
            if self._here.machine is None:
                self._here.machine = self._here_machine()
            return self._spot((self._here,), self._here.machine, role, procs)
        if not living:
            raise HostError(
                f"no host is left for {role}: {'; '.join(host.lost for host in self.hosts)}. The run continues from "
                "its newest checkpoint when it is started again"
            )
        if procs == 1 or role != "learner":
            # ranks of an engine talk to each other at each token, so they are on one host;
            # environments are many and go where the most cores are free; of others there are a few large ones
            least = min(living, key=lambda one: self._fullness(one, role, procs))
            return self._spot((least if role != "store" else living[0],), None, role, procs)
        run = _longest_run(living)
        count = next(n for n in range(len(run), 0, -1) if procs % n == 0)
        chosen = tuple(run[:count])
        first = chosen[0]
        machines = None  # of hosts that are supposed
        if self._job is not None:
            machines = self._job.meshes[first.role].slice(hosts=slice(first.number, first.number + count))
        return self._spot(chosen, machines, role, procs)

    def _fullness(self, host: Host, role: str, procs: int) -> tuple[bool, float, int]:
        """Sorts hosts of one role: those that have a GPU for each of `procs` first, then by what is there already."""
        gpus = len(self._pool(host, role))
        room = self._size(host) if role == ENVS else gpus or 1
        return bool(gpus) and gpus < procs, host.processes / room, host.number

    def room(self, role: str) -> int:
        """Processes of a role that its living hosts, or else the controller's, should have at once: one a core."""
        return sum(map(self._size, self._living(role) or [self._here]))

    def _size(self, host: Host) -> int:
        cores = self.config.cores_of(host.role or ENVS)
        return max(_LEAST_ROOM, len(cores or (host.facts.cores if host.facts else os.sched_getaffinity(0))))

    def _living(self, role: str) -> list[Host]:
        return [host for host in self.hosts if host.role == role and not host.lost]

    def plan(self, meshes: Sequence[tuple[str, str, int]]) -> None:
        """Keep for each mesh the place that `rehearse` says, in whatever order and however often they are spawned."""
        for mesh in meshes:
            name, role, procs = mesh
            self._planned[mesh] = replace(self.spot(role, procs, name), planned=True)

    def unplan(self, meshes: Iterable[tuple[str, str, int]]) -> None:
        """These meshes come no more."""
        for mesh in meshes:
            if (spot := self._planned.pop(mesh, None)) is not None:
                replace(spot, planned=False).give_back()

    def planned_on(self, places: Set[tuple[str, str]]) -> list[str]:
        """Names of the meshes that have one of these places, host and GPU, by plan."""
        return [name for (name, *_), spot in self._planned.items() if not places.isdisjoint(spot.places)]

    def rehearse(self, meshes: Sequence[tuple[str, str, int]]) -> list[ProcessSlot]:
        """Where meshes would be if they were spawned now, one after the other.

        Raises:
            HostError: A mesh needs more GPUs than there are.
        """
        seats: list[ProcessSlot] = []
        taken: list[Spot] = []
        try:
            for name, role, procs in meshes:
                taken.append(spot := self.spot(role, procs, name))
                for rank in range(procs):
                    host, gpus = spot.hosts[rank // spot.each], spot.gpus_by_host[rank // spot.each]
                    gpu, facts = gpus[rank % spot.each] if gpus else "", host.facts
                    sizes = dict(zip(facts.gpus, facts.gpu_bytes, strict=False)) if facts is not None else {}
                    size = sizes.get(gpu, 0)
                    seats.append(ProcessSlot(name=name, role=role, rank=rank, host=str(host), gpu=gpu, gpu_bytes=size))
        finally:
            for spot in taken:
                spot.give_back()
        return seats

    def gpus_here(self) -> list[ProcessSlot]:
        """A seat on each GPU that the controller's own process sees."""
        facts = self._here.facts
        assert facts is not None
        sizes = dict(zip(facts.gpus, facts.gpu_bytes, strict=False))
        return [
            ProcessSlot(name="", role="controller", rank=0, host=str(self._here), gpu=gpu, gpu_bytes=sizes.get(gpu, 0))
            for gpu in facts.gpus
        ]

    def _spot(self, hosts: tuple[Host, ...], machines: Any, role: str, procs: int) -> Spot:
        each = procs // len(hosts)
        found = tuple(self._chosen(host, role, each) for host in hosts)
        if any(map(bool, found)) and not all(found):
            without = ", ".join(str(host) for host, gpus in zip(hosts, found, strict=True) if not gpus)
            what = role.removesuffix("s")
            raise HostError(f"{without} has no GPU, and other hosts of this {what} have; give it hosts that are alike")
        for host, gpus in zip(hosts, found, strict=True):
            host.processes += each
            host.gpu_users.update(gpus)
        return Spot(
            hosts=hosts,
            machines=hosts[0].machine if machines is None else machines,
            each=each,
            gpus_by_host=found,
            cores=self.config.cores_of(role),
        )

    def _chosen(self, host: Host, role: str, each: int) -> tuple[str, ...]:
        """GPUs of a host for so many ranks: those with the fewest users; none where it has none."""
        pool = self._pool(host, role)
        gpus = sorted(pool, key=lambda one: (host.gpu_users[one], pool.index(one)))[:each]
        if gpus and len(gpus) < each:
            raise HostError(
                f"{each} ranks of one {role.removesuffix('s')} need a GPU each, and {host} has {len(gpus)} for "
                "them; start fewer, or give it more GPUs"
            )
        return tuple(sorted(gpus, key=pool.index))

    def _pool(self, host: Host, role: str) -> tuple[str, ...]:
        """GPUs that a role may use on a host.

        Roles that share the host come one after the other: each with as many as it was given or else has processes for.
        Where those are more than there are, judges share what others leave, or engines' where that is nothing. Where
        the others are too many already, roles that were given none share what is left.
        """
        gpus = () if host.facts is None else host.facts.gpus
        if role not in ON_GPUS:
            return ()
        sharing = [host.role]
        if host is self._here:
            sharing = [one for one in ROLES if self.config.kind == "local" or one not in self.config.counts]
        if role not in sharing:  # another of its hosts was lost
            return gpus
        given, counts = self.config.gpus, self.config.counts
        if sharing == [role] and role not in given:
            return gpus
        own = {one: given.get(one, math.ceil(self._wants.get(one, 0) / counts.get(one, 1))) for one in sharing}
        if sum(own.values()) > len(gpus) and "judges" in own:
            own["judges"] = given.get("judges", 0)
        if sum(own.values()) > len(gpus):
            own = {one: given.get(one, 0) for one in sharing}
        if own[role]:
            first = sum(own[one] for one in sharing[: sharing.index(role)])
            return gpus[first : first + own[role]]
        left = gpus[sum(own.values()) :]
        return left or (self._pool(host, "engines") if role == "judges" and "engines" in sharing else gpus)

    def _check_cores(self) -> None:
        for role, cores in self.config.cpus.items():
            for host in [host for host in self.hosts if host.role == role] or [self._here]:
                assert host.facts is not None
                if missing := parse_cores(cores) - host.facts.cores:
                    raise HostError(
                        f"cpus of the mesh bind {role} to {cores} and {host} has no core {min(missing)} for it; it has "
                        f"{', '.join(map(str, sorted(host.facts.cores)))}"
                    )

    def check_gpus(self) -> None:
        """See that each host has the GPUs that `Hosts.gpus` gives to the roles on it.

        Raises:
            HostError: One has not.
        """
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
        for host in self.hosts:
            host.lost = host.lost or f"host {host} has ended with its run"
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
        """The address to listen on: of one interface, unless neither this machine's name nor a route tells which."""
        if self._all_here() or self.config.address:
            return self._reached_at()
        workers = [one for addresses in self.config.workers.values() for one in addresses if not one.startswith("ipc")]
        first = workers[0].partition("://")[2].rpartition(":")[0] if workers else "localhost"
        try:
            return own_address(first)
        except HostError:
            return _EVERYWHERE

    def _reached_at(self) -> str:
        if self._all_here():
            return "127.0.0.1"
        return self.config.address.split("//")[1].rpartition(":")[0] if self.config.address else socket.gethostname()

    def _all_here(self) -> bool:
        workers = [one for addresses in self.config.workers.values() for one in addresses]
        return self.config.kind == "process" or bool(
            workers and all(one.startswith(LOOPBACK) for one in workers)
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


def processes_by_role(meshes: Sequence[tuple[str, str, int]]) -> dict[str, int]:
    """How many processes compute in each role, of meshes by name, role and processes."""
    return {role: sum(procs for _, one, procs in meshes if one == role) for role in ON_GPUS}


def gpus_to_ask_for(config: Hosts, meshes: Sequence[tuple[str, str, int]]) -> int | None:
    """GPUs of each node of a Slurm job: what `gpus` says, and one for each process that computes there.

    None where no such job is submitted, `slurm_args` say it, or the environment, which nodes share, is one for CPUs.
    """
    if config.kind != "slurm" or any(option.startswith(("--gpus", "--gres", "-G")) for option in config.slurm_args):
        return None
    each = [*config.gpus.values()]
    if not version("torch").endswith("+cpu"):
        layout = Cluster(config, lambda: None, processes_by_role(meshes))
        layout.suppose(_MANY_GPUS, here=0)
        places = {(seat.host, seat.gpu) for seat in layout.rehearse(meshes) if seat.gpu}
        each += collections.Counter(host for host, _ in places).values()
    return max(each, default=None)
