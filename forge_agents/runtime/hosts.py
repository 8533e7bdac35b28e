"""Which hosts a run has, and what runs on which: `Hosts`; where one process would be: `Seat`.

In: what a user sets. Out: a checked, frozen dataclass. Waits for nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from forge_agents.errors import HostError, did_you_mean
from forge_agents.settings import settings_class

Kind: TypeAlias = Literal["local", "process", "slurm", "kubernetes", "attach"]

KINDS = ("local", "process", "slurm", "kubernetes", "attach")
ENVS = "envs"
"""The role of isolated environments' worker processes. They take no GPUs."""
HERE = "this host"
"""What the controller's own is called."""
ROLES = ("learner", "engines", "store", "judges", ENVS, "spare")
"""What hosts are for, in the order in which roles that share a host take its GPUs."""
ON_GPUS = ("learner", "engines", "judges")
"""Those whose processes compute on GPUs where there are some."""

_SLURM_ONLY: Mapping[str, Any] = {"partition": "", "account": "", "qos": "", "time_limit": "", "slurm_args": ()}
_OWN_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "slurm": _SLURM_ONLY,
    "kubernetes": {"namespace": "default"},
    "attach": {"workers": {}, "certificate": ""},
}
"""Fields that only one kind reads, with their defaults."""


@settings_class
@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Where the processes of a run are.

    The controller and rewards are where the run was started. Roles are "learner", "engines", "store" (the weight
    store), "judges" (engines of verifiers), "envs" (worker processes of environments: with hosts of their own, of all
    environments, otherwise of those with ``isolation="process"``) and "spare" (hosts that take the place of lost
    ones). A role that `hosts` does not name is on the controller's host; the store is then on the learner's first.
    """

    kind: Kind = "local"
    """How there come to be hosts. "local": this one is all. "process": processes on this machine that behave as hosts,
    to try several. "slurm": a job is submitted. "kubernetes": pods that exist. "attach": host processes that were
    started by hand or by a script."""
    hosts: dict[str, int] = field(default_factory=dict)
    """Number of hosts by role. Replicas of engines are spread over theirs, ranks of a learner over its. "attach": as
    many as `workers` names, if left out."""
    gpus: dict[str, int] = field(default_factory=dict)
    """By role: GPUs that its processes take on each of its hosts, one each. Roles that are not named take what is left:
    the learner's ranks first, then engines, then judges, a GPU each; where there are too few, they share them."""
    cpus: dict[str, str] = field(default_factory=dict)
    """By role: the cores its processes, and so their OpenMP threads, may use on each host, as "0-15,32". How many
    threads there are say `engine.threads` and `learner.threads`."""
    workers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Of "attach": by role, where host processes listen, as "tcp://node1:26600";
    ``python -m forge_agents.runtime.host_process --port 26600`` starts one."""
    certificate: str = ""
    """Of "attach": folder with the certificate of the run, ``tls.crt``, and its key ``tls.key``. Hosts with addresses
    as "tls://node1:26600" let in only processes that have this key, and traffic is encrypted."""
    address: str = ""
    """Where hosts reach this process, as "tcp://node0:26601"; empty: this machine's name and a free port. Not read by
    "local" and "process"."""
    partition: str = ""
    """Of "slurm": the partition; empty takes the cluster's default."""
    account: str = ""
    """Of "slurm": who pays."""
    qos: str = ""
    """Of "slurm": quality of service."""
    time_limit: str = ""
    """Of "slurm": HH:MM:SS after which the job is ended."""
    slurm_args: tuple[str, ...] = ()
    """Of "slurm": further options of sbatch, each as "--constraint=h100"."""
    namespace: str = "default"
    """Of "kubernetes": where the pods are."""
    start_timeout_s: float = 600.0
    """Deadline for hosts to be there; time in a queue counts."""
    heartbeat_timeout_s: float = 30.0
    """Seconds after which a host that says nothing counts as lost. One whose connection ends is lost at once."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} of the mesh; choose one of {KINDS}.{did_you_mean(self.kind, KINDS)}")
        for name in ("hosts", "gpus", "cpus", "workers"):
            known = tuple(role for role in ROLES if (name, role) != ("gpus", ENVS))
            for role in getattr(self, name):
                if role not in known:
                    near = did_you_mean(role, known)
                    raise ValueError(f"{name} of the mesh names {role!r}; its roles are {', '.join(known)}.{near}")
        for name in ("hosts", "gpus"):
            for role, count in getattr(self, name).items():
                if count < 1:
                    raise ValueError(f"{name} of the mesh gives {role} {count}; give at least 1, or leave the role out")
        for cores in self.cpus.values():
            parse_cores(cores)
        for name in ("start_timeout_s", "heartbeat_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} of the mesh must be positive and finite")
        self._check_kind()

    def _check_kind(self) -> None:
        for kind, own in _OWN_FIELDS.items():
            for name, default in own.items():
                if kind != self.kind and getattr(self, name) != default:
                    raise ValueError(f"{name} of the mesh is for kind={kind!r} and kind is {self.kind!r}; remove one")
        if self.kind == "local":
            if self.hosts or self.address:
                raise ValueError("kind='local' of the mesh is this host alone; remove hosts and address, or set a kind")
            return
        if self.kind == "attach":
            given = {role: len(addresses) for role, addresses in self.workers.items()}
            for role, count in self.hosts.items():
                if count > given.get(role, 0):
                    raise HostError(
                        f"the mesh asks for {count} {role} hosts and workers names {given.get(role, 0)}; name more, or "
                        "ask for fewer"
                    )
        self._check_addresses()
        if not set(self.counts) - {"spare"}:
            such = "workers: {engines: [tcp://node1:26600]}" if self.kind == "attach" else "hosts: {engines: 2}"
            raise ValueError(f"kind={self.kind!r} of the mesh has no hosts; say e.g. {such}")

    def _check_addresses(self) -> None:
        for address in (address for addresses in self.workers.values() for address in addresses):
            _check_address(address, "workers")
        if self.address and self.kind == "process":
            raise ValueError("address of the mesh has no effect with kind='process': its hosts are on this machine")
        if self.address:
            _check_address(self.address, "address")
        addresses = [self.address] if self.address else []
        addresses += [address for workers in self.workers.values() for address in workers]
        schemes = {address.partition(":")[0] for address in addresses}
        if ("tls" in schemes) != bool(self.certificate) or (self.certificate and schemes != {"tls"}):
            raise ValueError(
                f"certificate={self.certificate!r} of the mesh does not fit the addresses {', '.join(addresses)}; with "
                "a certificate, write all addresses as 'tls://node1:26600', and without one none of them"
            )

    @property
    def counts(self) -> dict[str, int]:
        """Number of hosts by role."""
        return {role: len(addresses) for role, addresses in self.workers.items()} | self.hosts

    def cores_of(self, role: str) -> frozenset[int]:
        """Cores that a role is bound to; none where it may use all."""
        return parse_cores(self.cpus[role]) if role in self.cpus else frozenset()

    def check_processes(self, role: str, processes: int, *, each: int = 1) -> None:
        """See that a role's processes fit its hosts and GPUs.

        Args:
            each: How many of them work as one and so need as many on each host.

        Raises:
            ValueError: They do not; the message says what would.
        """
        hosts = self.counts.get(role, 1)
        if each > 1 and each % hosts:
            raise ValueError(
                f"{each} processes of one {role} cannot be spread evenly over {hosts} hosts; choose a "
                f"multiple of {hosts}"
            )
        gpus = self.gpus.get(role)
        if gpus is not None and processes > gpus * hosts:
            raise ValueError(
                f"{processes} processes of {role} want a GPU each and the mesh gives {role} {hosts} x {gpus}; raise "
                "gpus or hosts, or start fewer"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSlot:
    """Where one process would be."""

    name: str
    """Of its mesh."""
    role: str
    rank: int
    host: str
    gpu: str
    """Its id there; empty where it has none."""
    gpu_bytes: int
    """That GPU's memory; 0 where nobody could say."""


def parse_cores(text: str) -> frozenset[int]:
    """Cores as Linux writes them: ``"0-3,8"`` is 0, 1, 2, 3 and 8.

    Raises:
        ValueError: It is no such list.
    """
    cores: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if last < first:
            raise ValueError(f"cpus {text!r} of the mesh; write cores as '0-15' or '0,2,8-11'")
        cores |= set(range(first, last + 1))
    return frozenset(cores)


def _check_address(address: str, name: str) -> None:
    known = r"t(cp|ls)://[^\s:/]+:\d+" if name == "address" else r"t(cp|ls)://[^\s:/]+:\d+|ipc://\S+"
    if not re.fullmatch(known, address):
        raise ValueError(f"{name} of the mesh holds {address!r}; write an address as 'tcp://node1:26600'")
