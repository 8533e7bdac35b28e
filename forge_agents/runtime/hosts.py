"""Settings of a run's hosts: `Hosts`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from forge_agents.errors import HostError, did_you_mean
from forge_agents.settings import settings_class

Kind: TypeAlias = Literal["local", "process", "slurm", "kubernetes", "attach"]

KINDS: tuple[Kind, ...] = get_args(Kind)
ENVS = "envs"
"""Role of the worker processes of isolated environments. Workers use no GPUs."""
HERE = "this host"
"""Name of the controller's host."""
ROLES = ("learner", "engines", "store", "judges", ENVS, "spare")
"""Roles of hosts, in the order in which roles that share a host get its GPUs."""
ON_GPUS = ("learner", "engines", "judges")
"""Roles whose processes use GPUs."""

MAX_PROCESSES = 10_000
"""Maximum number of processes of a role, of its hosts, and of GPUs per host."""

_FIELDS_BY_KIND: Mapping[str, Mapping[str, Any]] = {
    "slurm": {"partition": "", "account": "", "qos": "", "time_limit": "", "slurm_args": ()},
    "kubernetes": {"namespace": ""},
    "attach": {"workers": {}, "certificate": ""},
}
"""Fields that only one kind uses, with their defaults."""
_SLURM_OPTIONS = (
    "account", "comment", "constraint", "contiguous", "cores-per-socket", "cpus-per-gpu", "cpus-per-task", "dependency",
    "exclude", "exclusive", "gpus", "gpus-per-node", "gpus-per-task", "gres", "hint", "licenses", "mem", "mem-per-cpu",
    "mem-per-gpu", "nice", "no-requeue", "nodelist", "partition", "prefer", "qos", "reservation", "switches",
    "threads-per-core", "time", "time-min", "tmp", "wckey",
)  # fmt: skip
"""Options of sbatch that choose nodes, resources and queues. Others name files, commands or variables, which a settings
file from a stranger must not."""


@settings_class
@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Hosts of a run and the roles of their processes.

    The controller and rewards run where the run was started. Roles are "learner", "engines", "store" (the weight
    store), "judges" (engines of verifiers), "envs" (worker processes of environments: of all environments if they have
    hosts of their own, otherwise of those with ``isolation="process"``) and "spare" (replacements for lost hosts). A
    role that `hosts` does not name runs on the controller's host, but the store runs on the learner's first.
    """

    kind: Kind = "local"
    """Source of hosts. "local": only this machine. "process": processes on this machine that behave as hosts, for
    tests. "slurm": a job is submitted. "kubernetes": existing pods. "attach": host processes started by hand or by a
    script."""
    hosts: dict[str, int] = field(default_factory=dict)
    """Number of hosts by role. Engine replicas are spread over their hosts, learner ranks over theirs. The default for
    "attach" is the number of addresses in `workers`."""
    gpus: dict[str, int] = field(default_factory=dict)
    """Number of GPUs per host that a role's processes use, one each, by role. The other roles share the remaining GPUs:
    learner ranks first, then engines, then judges, one GPU each. If there are too few GPUs, these roles share them."""
    cpus: dict[str, str] = field(default_factory=dict)
    """Cores per host to which a role's processes and their OpenMP threads are bound, by role, as "0-15,32". The number
    of threads is set by `engine.threads` and `learner.threads`."""
    workers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Addresses of host processes by role, as "tcp://node1:26600", for "attach".
    ``python -m forge_agents.runtime.host_process --port 26600`` starts one."""
    certificate: str = ""
    """Folder with the run's certificate ``tls.crt`` and its key ``tls.key``, for "attach". Hosts with addresses as
    "tls://node1:26600" accept only processes that have this key, and traffic is encrypted."""
    address: str = ""
    """Address at which hosts reach this process, as "tcp://node0:26601". Empty: this machine's name and a free port.
    Ignored by "local" and "process"."""
    partition: str = ""
    """Slurm partition. Empty uses the cluster's default."""
    account: str = ""
    """Slurm account."""
    qos: str = ""
    """Slurm quality of service."""
    time_limit: str = ""
    """Slurm time limit, HH:MM:SS."""
    slurm_args: tuple[str, ...] = ()
    """Additional options of sbatch, such as "--constraint=h100"."""
    namespace: str = ""
    """Kubernetes namespace of the pods. Each pod there with a role's labels becomes a host, and hosts can run code in
    the controller, so use a namespace for each run."""
    start_timeout_s: float = 600.0
    """Maximum seconds until all hosts answer, including the time in a queue."""
    heartbeat_timeout_s: float = 30.0
    """Seconds without a heartbeat after which a host counts as lost. A host whose connection ends is lost at once."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} of the mesh. Choose one of {KINDS}.{did_you_mean(self.kind, KINDS)}")
        for name in ("hosts", "gpus", "cpus", "workers"):
            roles = tuple(role for role in ROLES if (name, role) != ("gpus", ENVS))
            for role in getattr(self, name):
                if role not in roles:
                    near = did_you_mean(role, roles)
                    raise ValueError(f"{name} of the mesh names {role!r}. Its roles are {', '.join(roles)}.{near}")
        for name in ("hosts", "gpus"):
            for role, count in getattr(self, name).items():
                if not 1 <= count <= MAX_PROCESSES:
                    raise ValueError(
                        f"{name} of the mesh gives {role} {count}. Give 1 to {MAX_PROCESSES}, or leave the role out"
                    )
        for cores in self.cpus.values():
            parse_cores(cores)
        for name in ("start_timeout_s", "heartbeat_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} of the mesh must be positive and finite")
        self._check_texts()
        self._check_kind()

    def _check_texts(self) -> None:
        """Check the texts that a batch script will hold, in which a line break would start a command."""
        for name in ("partition", "account", "qos", "time_limit", "namespace"):
            if not re.fullmatch(r"[\w.,:@/+-]*", text := str(getattr(self, name)), re.ASCII):
                raise ValueError(f"{name}={text!r} of the mesh. Write one word of letters, digits and . , : @ / + -")
        for text in self.slurm_args:
            option = re.fullmatch(r"--([a-z-]+)(?:=[\w.,:@+|&()*[\]=-]+)?", str(text), re.ASCII)
            if option is None or option[1] not in _SLURM_OPTIONS:
                raise ValueError(
                    f"slurm_args of the mesh hold {text!r}. Write options as '--constraint=h100', without quotes and "
                    f"paths. Available are {', '.join(_SLURM_OPTIONS)}. Others can be set as sbatch's environment "
                    "variables, such as SBATCH_MEM_BIND"
                )

    def _check_kind(self) -> None:
        for kind, defaults in _FIELDS_BY_KIND.items():
            for name, default in defaults.items():
                if kind != self.kind and getattr(self, name) != default:
                    raise ValueError(f"{name} of the mesh is for kind={kind!r} and kind is {self.kind!r}. Remove one")
        if self.kind == "local":
            if self.hosts or self.address:
                raise ValueError("kind='local' of the mesh is this host alone. Remove hosts and address, or set a kind")
            return
        if self.kind == "kubernetes" and not self.namespace:
            raise ValueError(
                "kind='kubernetes' of the mesh needs a namespace. Set one that has the pods of this run only"
            )
        if self.kind == "attach":
            for role, count in self.hosts.items():
                if count > (addresses := len(self.workers.get(role, ()))):
                    raise HostError(
                        f"the mesh asks for {count} {role} hosts and workers names {addresses}. Name more, or ask for "
                        "fewer"
                    )
        self._check_addresses()
        if not set(self.counts) - {"spare"}:
            example = "workers: {engines: [tcp://node1:26600]}" if self.kind == "attach" else "hosts: {engines: 2}"
            raise ValueError(f"kind={self.kind!r} of the mesh has no hosts. Set e.g. {example}")

    def _check_addresses(self) -> None:
        for address in self.addresses:
            _check_address(address, "workers")
        if self.address and self.kind == "process":
            raise ValueError("address of the mesh has no effect with kind='process': its hosts are on this machine")
        if self.address:
            _check_address(self.address, "address")
        addresses = [self.address] * bool(self.address) + self.addresses
        schemes = {address.partition(":")[0] for address in addresses}
        if ("tls" in schemes) != bool(self.certificate) or (self.certificate and schemes != {"tls"}):
            raise ValueError(
                f"certificate={self.certificate!r} of the mesh does not fit the addresses {', '.join(addresses)}. With "
                "a certificate, write all addresses as 'tls://node1:26600', and without one none of them"
            )

    @property
    def counts(self) -> dict[str, int]:
        """Number of hosts by role."""
        return {role: len(addresses) for role, addresses in self.workers.items()} | self.hosts

    @property
    def addresses(self) -> list[str]:
        """Addresses of all host processes."""
        return [address for addresses in self.workers.values() for address in addresses]

    @property
    def all_here(self) -> bool:
        """Whether all hosts are processes of this machine, so that no other machine connects to the controller."""
        return self.kind == "process" or bool(self.addresses and all(map(is_local, self.addresses)))

    def cores_of(self, role: str) -> frozenset[int]:
        """Return the cores that a role is bound to. Empty if it may use all."""
        return parse_cores(self.cpus[role]) if role in self.cpus else frozenset()

    def check_processes(self, role: str, processes: int, *, each: int = 1) -> None:
        """Check that a role's processes fit its hosts and GPUs. Units of `each` are spread evenly over the hosts.

        Raises:
            ValueError: The processes do not fit. The message suggests a number that does.
        """
        hosts = self.counts.get(role, 1)
        if each > 1 and each % hosts:
            raise ValueError(
                f"{each} processes of one {role} cannot be spread evenly over {hosts} hosts. Choose a "
                f"multiple of {hosts}"
            )
        gpus = self.gpus.get(role)
        if gpus is not None and processes > gpus * hosts:
            raise ValueError(
                f"{processes} processes of {role} need a GPU each and the mesh gives {role} {hosts} x {gpus}. Raise "
                "gpus or hosts, or start fewer"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSlot:
    """Host and GPU of one process."""

    name: str
    """Name of its mesh."""
    role: str
    rank: int
    host: str
    gpu: str
    """Id on the host. Empty without a GPU."""
    gpu_bytes: int
    """Memory of the GPU, or 0 if not known."""


def parse_cores(text: str) -> frozenset[int]:
    """Parse a list of cores below 100,000 as Linux writes it: ``"0-3,8"`` is 0, 1, 2, 3 and 8.

    Raises:
        ValueError: The text is not such a list.
    """
    cores: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise ValueError(f"cpus {text!r} of the mesh. Write cores as '0-15' or '0,2,8-11'")
        cores |= set(range(first, last + 1))
    return frozenset(cores)


def is_local(address: str) -> bool:
    """Return whether an address is on this machine."""
    return re.match(r"ipc://|t(cp|ls)://(127\.0\.0\.1|localhost):", address) is not None


def _check_address(address: str, name: str) -> None:
    pattern = r"t(cp|ls)://[\w.-]+:\d+" if name == "address" else r"t(cp|ls)://[\w.-]+:\d+|ipc://[\w./-]+"
    if not re.fullmatch(pattern, address, re.ASCII):
        raise ValueError(f"{name} of the mesh holds {address!r}. Write an address as 'tcp://node1:26600'")
