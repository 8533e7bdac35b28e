"""Allocation of hosts and GPUs to meshes of processes."""

from __future__ import annotations

import collections
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any, TypeAlias

from forge_agents.errors import HostError
from forge_agents.runtime.host_process import HostFacts, facts_here
from forge_agents.runtime.hosts import ENVS, HERE, ON_GPUS, ROLES, Hosts, ProcessSlot

MeshRequest: TypeAlias = tuple[str, str, int]
"""Name, role and number of processes of a mesh."""

_MANY_GPUS = 1024
_MIN_CAPACITY = 4
"""Minimum number of environments that a host plays at once: most wait for their players most of the time."""


@dataclass(slots=True, kw_only=True, eq=False)
class Host:
    """A host. The controller's own has no agent."""

    name: str
    role: str
    number: int
    """Index among the hosts of its role."""
    machine: Any
    """Monarch's mesh of this host alone."""
    agent: Any = None
    facts: HostFacts | None = None
    lost: str = ""
    """Reason why it is lost. Empty while it lives."""
    processes: int = 0
    gpu_users: collections.Counter[str] = field(default_factory=collections.Counter)
    listeners: list[Callable[[str], None]] = field(default_factory=list)
    """Called with the reason when it is lost."""

    def __str__(self) -> str:
        return f"{self.name} ({self.facts.hostname})" if self.facts is not None else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Hosts, GPUs and cores of one mesh's processes."""

    hosts: tuple[Host, ...]
    machines: Any
    """Monarch's mesh of these hosts."""
    each: int
    """Number of processes per host."""
    gpus_by_host: tuple[tuple[str, ...], ...] = ()
    """Ids of the GPUs that each host's processes see, the same number on all. Empty does not restrict them."""
    cores: frozenset[int] = frozenset()
    """Cores of each host that the processes may use. Empty for all."""
    reserved: bool = False
    """Whether the places stay reserved while the processes do not run. See `Allocator.reserve`."""

    @property
    def is_remote(self) -> bool:
        """Whether the hosts are others than the controller's."""
        return self.hosts[0].agent is not None

    @property
    def gpus(self) -> tuple[str, ...]:
        """GPUs of the first host."""
        return self.gpus_by_host[0]

    @property
    def places(self) -> set[tuple[str, str]]:
        """Pairs of host and GPU."""
        return {(str(host), gpu) for host, gpus in zip(self.hosts, self.gpus_by_host, strict=True) for gpu in gpus}

    @property
    def on_one_machine(self) -> bool:
        """Whether all hosts are one machine, with the same kernel, process ids and user."""
        machines = {host.facts.memory_domain.partition("/")[2] for host in self.hosts if host.facts is not None}
        return len(self.hosts) == 1 or len(machines) == 1

    @property
    def lost(self) -> str:
        """Reason why one of the hosts is lost. Empty while all live."""
        return next((host.lost for host in self.hosts if host.lost), "")

    def release(self) -> None:
        """Give the places back after the processes have ended, unless they are reserved."""
        if self.reserved:
            return
        for host, gpus in zip(self.hosts, self.gpus_by_host, strict=True):
            host.processes -= self.each
            host.gpu_users.subtract(gpus)


class Allocator:
    """Assigns processes to hosts and GPUs.

    Args:
        config: The run's hosts.
        here: Returns Monarch's mesh of the controller's host. Called when it is first needed.
        meshes: Meshes that will compute, by name, role and number of processes. Roles without GPUs in ``config.gpus``
            get one for each process if there are enough.
    """

    def __init__(
        self, config: Hosts, here: Callable[[], Any] = lambda: None, meshes: Sequence[MeshRequest] = ()
    ) -> None:
        self.config = config
        self.hosts: list[Host] = []
        self.machines: Mapping[str, Any] = {}
        """Monarch's host mesh by role. Empty before the hosts are reached."""
        self._wants = {role: sum(procs for _, other, procs in meshes if other == role) for role in ON_GPUS}
        self._here_machine = here
        self._here = Host(name=HERE, role="", number=0, machine=None, facts=facts_here())
        self._reserved: dict[MeshRequest, Allocation] = {}

    def assume_hosts(self, gpus: int, *, gpu_bytes: int = 0, here: int | None = None) -> None:
        """Take the requested hosts as given without reaching them, for a `preview`.

        Args:
            gpus: GPUs of each host whose role `Hosts.gpus` does not name.
            gpu_bytes: Memory of each GPU.
            here: GPUs of the controller's host. None for its actual ones.
        """

        def facts(hostname: str, count: int) -> HostFacts:
            ids, sizes = tuple(map(str, range(count))), (gpu_bytes,) * count
            return HostFacts(hostname=hostname, gpus=ids, cores=frozenset(), memory_domain="", gpu_bytes=sizes)

        if here is not None:
            self._here.facts = facts("assumed", here)
        names = {"process": "a process here", "slurm": "a node of the job", "kubernetes": "a pod"}
        for role, count in self.config.counts.items():
            for i in range(count):
                host = Host(name=f"{role}-{i}", role=role, number=i, machine=None)
                hostname = names.get(self.config.kind) or self.config.workers[role][i]
                host.facts = facts(hostname, self.config.gpus.get(role, gpus))
                self.hosts.append(host)

    def allocate(self, role: str, procs: int, name: str = "") -> Allocation:
        """Choose the hosts of one mesh: hosts reserved for its `name`, as long as they live.

        A lost host is replaced by others of its role, then by spare ones, then by those of other roles. Environments
        move to the controller's host at once, because they can be played anywhere.

        Raises:
            ValueError: The processes cannot be spread evenly.
            HostError: No host is left.
        """
        if (reserved := self._reserved.get(mesh := (name, role, procs))) is not None:
            if not reserved.lost:
                return reserved
            self.unreserve([mesh])
        home = role if role in self.config.counts else "learner" if role == "store" else ""
        others = () if role == ENVS else ("spare", *(other for other in ROLES if other not in (home, "spare")))
        living = next(filter(None, map(self._living, (home, *others))), [])
        remote = home in self.config.counts and self.config.kind != "local"
        if not remote or (role == ENVS and not living):
            if self._here.machine is None:
                self._here.machine = self._here_machine()
            return self._take((self._here,), self._here.machine, role, procs)
        if not living:
            raise HostError(
                f"no host is left for {role}: {'; '.join(host.lost for host in self.hosts)}. The run continues from "
                "its newest checkpoint when it is started again"
            )
        if procs == 1 or role != "learner":
            # An engine's ranks communicate for each token, so they share a host. Environments are many small processes
            # and go to the host with the most free cores. Other roles have few and large processes.
            emptiest = min(living, key=lambda host: self._load(host, role, procs))
            return self._take((emptiest if role != "store" else living[0],), None, role, procs)
        run = _longest_run(living)
        count = next(n for n in range(len(run), 0, -1) if procs % n == 0)
        hosts = tuple(run[:count])
        machines = None
        if (first := hosts[0]).role in self.machines:
            machines = self.machines[first.role].slice(hosts=slice(first.number, first.number + count))
        return self._take(hosts, machines, role, procs)

    def _load(self, host: Host, role: str, procs: int) -> tuple[bool, float, int]:
        """Sort key for hosts of one role: hosts with a GPU for each of `procs` first, then by their present load."""
        gpus = len(self._pool(host, role))
        capacity = self._cores(host) if role == ENVS else gpus or 1
        return bool(gpus) and gpus < procs, host.processes / capacity, host.number

    def capacity(self, role: str) -> int:
        """Return how many processes a role's living hosts, or else the controller's, should have: one per core."""
        return sum(map(self._cores, self._living(role) or [self._here]))

    def _cores(self, host: Host) -> int:
        cores = self.config.cores_of(host.role or ENVS)
        return max(_MIN_CAPACITY, len(cores or (host.facts.cores if host.facts else os.sched_getaffinity(0))))

    def _living(self, role: str) -> list[Host]:
        return [host for host in self.hosts if host.role == role and not host.lost]

    def reserve(self, meshes: Sequence[MeshRequest]) -> None:
        """Reserve the places that `preview` shows, in whatever order and however often the meshes are spawned."""
        for name, role, procs in meshes:
            self._reserved[name, role, procs] = replace(self.allocate(role, procs, name), reserved=True)

    def unreserve(self, meshes: Iterable[MeshRequest]) -> None:
        """Give up the reservations of meshes that will not be spawned again."""
        for mesh in meshes:
            if (allocation := self._reserved.pop(mesh, None)) is not None:
                replace(allocation, reserved=False).release()

    def reserved_on(self, places: Set[tuple[str, str]]) -> list[str]:
        """Return the names of meshes that have one of these pairs of host and GPU reserved."""
        return [name for (name, *_), allocation in self._reserved.items() if not places.isdisjoint(allocation.places)]

    def preview(self, meshes: Sequence[MeshRequest]) -> list[ProcessSlot]:
        """Return the places that meshes would get if they were spawned now, in this order.

        Raises:
            HostError: A mesh needs more GPUs than there are.
        """
        slots: list[ProcessSlot] = []
        allocations: list[Allocation] = []
        try:
            for name, role, procs in meshes:
                allocations.append(allocation := self.allocate(role, procs, name))
                for rank in range(procs):
                    at, local_rank = divmod(rank, allocation.each)
                    host, gpus = allocation.hosts[at], allocation.gpus_by_host[at]
                    slots.append(_slot(name, role, rank, host, gpus[local_rank] if gpus else ""))
        finally:
            for allocation in allocations:
                allocation.release()
        return slots

    def local_gpus(self) -> list[ProcessSlot]:
        """Return a slot for each GPU that the controller's own process sees."""
        assert self._here.facts is not None
        return [_slot("", "controller", 0, self._here, gpu) for gpu in self._here.facts.gpus]

    def _take(self, hosts: tuple[Host, ...], machines: Any, role: str, procs: int) -> Allocation:
        each = procs // len(hosts)
        gpus_by_host = tuple(self._free_gpus(host, role, each) for host in hosts)
        if any(map(bool, gpus_by_host)) and not all(gpus_by_host):
            without = ", ".join(str(host) for host, gpus in zip(hosts, gpus_by_host, strict=True) if not gpus)
            what = role.removesuffix("s")
            raise HostError(f"{without} has no GPU, but other hosts of this {what} have. Use hosts of the same kind")
        for host, gpus in zip(hosts, gpus_by_host, strict=True):
            host.processes += each
            host.gpu_users.update(gpus)
        return Allocation(
            hosts=hosts,
            machines=hosts[0].machine if machines is None else machines,
            each=each,
            gpus_by_host=gpus_by_host,
            cores=self.config.cores_of(role),
        )

    def _free_gpus(self, host: Host, role: str, each: int) -> tuple[str, ...]:
        """GPUs of a host for that many ranks: the GPUs with the fewest users. Empty if the host has none."""
        pool = self._pool(host, role)
        gpus = sorted(pool, key=lambda gpu: (host.gpu_users[gpu], pool.index(gpu)))[:each]
        if gpus and len(gpus) < each:
            raise HostError(
                f"{each} ranks of one {role.removesuffix('s')} need a GPU each, and {host} has {len(gpus)} for "
                "them. Start fewer, or give it more GPUs"
            )
        return tuple(sorted(gpus, key=pool.index))

    def _pool(self, host: Host, role: str) -> tuple[str, ...]:
        """GPUs that a role may use on a host.

        Roles that share the host get consecutive GPUs: each the number in ``config.gpus``, or else one per process. If
        the sum exceeds the host's GPUs, judges share what the others leave, or the engines' GPUs if that is nothing. If
        the others exceed them already, roles that are not in ``config.gpus`` share what is left.
        """
        gpus = () if host.facts is None else host.facts.gpus
        if role not in ON_GPUS:
            return ()
        config, counts = self.config.gpus, self.config.counts
        sharing = [host.role]
        if host is self._here:
            sharing = [other for other in ROLES if self.config.kind == "local" or other not in counts]
        if role not in sharing or (sharing == [role] and role not in config):  # the former if another host was lost
            return gpus
        parts = {
            other: config.get(other, math.ceil(self._wants.get(other, 0) / counts.get(other, 1))) for other in sharing
        }
        if sum(parts.values()) > len(gpus) and "judges" in parts:
            parts["judges"] = config.get("judges", 0)
        if sum(parts.values()) > len(gpus):
            parts = {other: config.get(other, 0) for other in sharing}
        if parts[role]:
            first = sum(parts[other] for other in sharing[: sharing.index(role)])
            return gpus[first : first + parts[role]]
        left = gpus[sum(parts.values()) :]
        return left or (self._pool(host, "engines") if role == "judges" and "engines" in sharing else gpus)

    def check(self) -> None:
        """Check that each host has the cores and GPUs that `Hosts.cpus` and `Hosts.gpus` give to the roles on it.

        Raises:
            HostError: A core is missing, or a host has fewer GPUs.
        """
        needed = collections.Counter[Host]()
        for role in ROLES:
            for host in [host for host in self.hosts if host.role == role] or [self._here]:
                assert host.facts is not None
                needed[host] += self.config.gpus.get(role, 0)
                cores = host.facts.cores  # not known for hosts that are assumed
                if cores and (missing := self.config.cores_of(role) - cores):
                    raise HostError(
                        f"cpus of the mesh bind {role} to {self.config.cpus[role]} and {host} has no core "
                        f"{min(missing)} for it. It has {', '.join(map(str, sorted(cores)))}"
                    )
        for host, count in needed.items():
            assert host.facts is not None
            if count > len(host.facts.gpus):
                raise HostError(
                    f"the mesh asks for {count} GPUs on {host} and it has {len(host.facts.gpus)}. Lower gpus, or "
                    "choose other hosts"
                )


def _slot(name: str, role: str, rank: int, host: Host, gpu: str) -> ProcessSlot:
    sizes = dict(zip(host.facts.gpus, host.facts.gpu_bytes, strict=False)) if host.facts is not None else {}
    return ProcessSlot(name=name, role=role, rank=rank, host=str(host), gpu=gpu, gpu_bytes=sizes.get(gpu, 0))


def _longest_run(hosts: Sequence[Host]) -> list[Host]:
    """The longest run of hosts with consecutive numbers. Monarch can address it as one slice."""
    runs: list[list[Host]] = []
    for host in sorted(hosts, key=lambda host: host.number):
        if runs and runs[-1][-1].number + 1 == host.number:
            runs[-1].append(host)
        else:
            runs.append([host])
    return max(runs, key=len)


def gpus_per_node(config: Hosts, meshes: Sequence[MeshRequest]) -> int | None:
    """Return the GPUs of each node of a Slurm job: the GPUs in ``config.gpus``, and one for each process that computes.

    None if no job is submitted, `slurm_args` specify GPUs, or the Python environment, which nodes share, is for CPUs.
    """
    if config.kind != "slurm" or any(option.startswith(("--gpus", "--gres")) for option in config.slurm_args):
        return None
    counts = list(config.gpus.values())
    if not version("torch").endswith("+cpu"):
        allocator = Allocator(config, meshes=meshes)
        allocator.assume_hosts(_MANY_GPUS, here=0)
        places = {(slot.host, slot.gpu) for slot in allocator.preview(meshes) if slot.gpu}
        counts += collections.Counter(host for host, _ in places).values()
    return max(counts, default=None)
