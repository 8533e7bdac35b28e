"""Whether a run's processes fit into so many GPUs, and what to change where they do not: `fit`.

In: a run's settings, a model, a number of GPUs. Out: a `Fit`: a row for each process, bytes by part. Waits for nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_agents.errors import HostError
from forge_agents.models import resolve as models
from forge_agents.models.sizes import SHAPES, ModelSize
from forge_agents.policy import LoRA, Policy
from forge_agents.runtime import mesh
from forge_agents.runtime.hosts import Hosts, Seat
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.learner.memory import RECOMPUTED
from forge_trainers.run.config import ProcessConfig
from forge_trainers.run.placement import (
    ATTENTION_TARGETS,
    OwnEngine,
    OwnModel,
    Part,
    Placed,
    Placement,
    by_own_name,
    check_models,
    check_ranks,
    held_on,
    judges_of,
    place,
)
from forge_trainers.run.processes import check_hosts, computing

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """GPUs that are all alike."""

    count: int
    memory_gb: float = 80.0
    """Of each, 1e9 bytes."""
    per_host: int = 8

    def __post_init__(self) -> None:
        if self.count < 1 or self.per_host < 1 or not (math.isfinite(self.memory_gb) and self.memory_gb > 0):
            raise ValueError(f"{self}: give at least one GPU, one a host, and memory above 0")

    def rehearse(
        self, meshes: Sequence[tuple[str, str, int]], *, hosts: Hosts | None = None, share: bool = False
    ) -> list[Seat]:
        """Where processes would be: as a run places them on one host, or on those that `hosts` describes.

        On several hosts that nobody describes they come one after the other, a GPU each, an engine's ranks on one host;
        with `share` after the last GPU comes the first again.

        Raises:
            HostError: There are too few GPUs.
        """
        hosts = hosts or Hosts()
        each = int(self.memory_gb * 1e9)
        if hosts.kind == "local" and self.count > self.per_host:
            return self._one_after_the_other(meshes, share=share)
        here = self.count if hosts.kind == "local" else self.per_host
        found = mesh.rehearse_on(hosts, meshes, gpus_per_host=self.per_host, gpu_bytes=each, here=here)
        used = len({(seat.host, seat.gpu) for seat in found if seat.gpu})
        if used > self.count:
            raise HostError(f"the processes are on {used} GPUs of the mesh's hosts, and there are {self.count}")
        return [replace(seat, host="host 0") if hosts.kind == "local" else seat for seat in found]

    def here(self, hosts: Hosts | None = None) -> list[Seat]:
        """A seat on each GPU that the controller's process sees."""
        hosts = hosts or Hosts()
        many, host = min(self.count, self.per_host), "host 0"
        if hosts.kind != "local":
            (seat,) = mesh.rehearse_on(hosts, [("", "controller", 1)], gpus_per_host=self.per_host, here=self.per_host)
            many, host = self.per_host, seat.host
        each = int(self.memory_gb * 1e9)
        return [
            Seat(name="", role="controller", rank=0, host=host, gpu=str(gpu), gpu_bytes=each) for gpu in range(many)
        ]

    def _one_after_the_other(self, meshes: Sequence[tuple[str, str, int]], *, share: bool) -> list[Seat]:
        seats: list[Seat] = []
        at = 0
        for name, role, ranks in meshes:
            if ranks > self.count:
                raise HostError(f"{ranks} ranks of {name} want a GPU each, and there are {self.count}")
            together = role in ("engines", "judges")
            if role == "learner" and not self._spreads(ranks):
                raise HostError(
                    f"{ranks} processes of one learner cannot be spread evenly over hosts of {self.per_host} GPUs, of "
                    f"which {self.count} GPUs are {self.count // self.per_host}; take another learner_procs"
                )
            if together and ranks > self.per_host:
                raise HostError(
                    f"{ranks} ranks of {role.removesuffix('s')} {name} talk at each token and are on one host, and a "
                    f"host has {self.per_host} GPUs; lower engine.tp"
                )
            if together and at % self.per_host + ranks > self.per_host:
                at += -at % self.per_host
            for rank in range(ranks):
                host, gpu = divmod(at % self.count if share else at, self.per_host)
                size = int(self.memory_gb * 1e9)
                seats.append(Seat(name=name, role=role, rank=rank, host=f"host {host}", gpu=str(gpu), gpu_bytes=size))
                at += 1
        if not share and at > self.count:
            raise HostError(f"the processes want {at} GPUs, one each, and there are {self.count}")
        return seats


    def _spreads(self, ranks: int) -> bool:
        """Whether some of the hosts can have as many ranks of a learner each."""
        hosts = range(1, math.ceil(self.count / self.per_host) + 1)
        return any(ranks % many == 0 and ranks // many <= self.per_host for many in hosts)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What was found."""

    placement: Placement
    """As the run is set, or with `changes`."""
    changes: Mapping[str, Any]
    """What to set to make it fit, by the configuration's keys; empty where it does as it is."""
    problem: str
    """Why it does not fit as it is; empty where it does."""

    def table(self) -> Table:
        """A row for each kind of process: how many there are, and the bytes of one by part."""
        from rich.table import Table

        table = Table("process", "how many", "GB of each GPU", "of which", title="expected memory")
        kinds: dict[tuple[str, str, str], int] = {}
        for one in self.placement.processes:
            parts = ", ".join(f"{part} {count / 1e9:.1f}" for part, count in one.parts.items())
            memory = f"{one.bytes / 1e9:.1f} of {one.seat.gpu_bytes / 1e9:.0f}"
            kind = f"{one.seat.role.removesuffix('s')} rank", memory, parts
            kinds[kind] = kinds.get(kind, 0) + 1
        for (process, memory, parts), many in kinds.items():
            table.add_row(process, str(many), memory, parts)
        return table

    def json(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "fits": not self.changes,
            "problem": self.problem,
            "changes": {key: asdict(new) if isinstance(new, LoRA) else new for key, new in self.changes.items()},
            "doubts": list(self.placement.doubts),
            "learners": {
                name: {one: getattr(own, one) for one in LearnerConfig().left_to_memory}
                for name, own in self.placement.learners.items()
            },
            "processes": [
                {
                    **{name: getattr(one.seat, name) for name in ("name", "role", "rank", "host", "gpu", "gpu_bytes")},
                    "bytes": dict(one.parts),
                }
                for one in self.placement.processes
            ],
        }

    @property
    def used(self) -> int:
        """GPUs that have something to do."""
        return len({(one.seat.host, one.seat.gpu) for one in self.placement.processes})


def size_of(model: str) -> ModelSize:
    """Of a well-known shape, such as "8b", or of a model as `Policy` takes it.

    Raises:
        ModelNotFoundError: There is neither.
    """
    return ModelSize.named(model) if model.lower() in SHAPES else ModelSize.of(Path(models.resolve(model)))


def fit_gpus(
    settings: ProcessConfig,
    model: ModelSize | str,
    gpus: Gpus,
    *,
    lora: LoRA | None = None,
    policies: Mapping[str, Policy] | None = None,
    hosts: Hosts | None = None,
    judges: Sequence[OwnEngine] = (),
    held: Sequence[OwnModel] = (),
) -> Fit:
    """Place the learners and engines of a run on GPUs.

    Args:
        settings: Of the run.
        model: Its size; or a well-known shape, such as "8b", or a model as `Policy` takes it.
        gpus: What there is.
        lora: The adapter that learns; None: the whole model does. Not read where `policies` say it.
        policies: Of the run, all of them with this model; None: one.
        hosts: Where each role is; None, or kind "local": wherever there is room.
        judges: Whose engines start by themselves, each with its own model.
        held: What the controller's process loads by itself.

    Raises:
        HostError: Nothing that is known here makes it fit; the message has the arithmetic of the run as it is set.
    """
    size = size_of(model) if isinstance(model, str) else model
    dtype = "bfloat16"  # of the well-known shapes
    if isinstance(model, str) and model.lower() not in SHAPES:
        dtype = models.dtype_of(Path(models.resolve(model)))
    policies = policies or {"policy": Policy("model", name="policy", lora=lora)}
    asked: dict[str, Any] = {
        "learner_procs": settings.learner_procs,
        "engine.replicas": settings.engine.replicas,
        "engine.tp": settings.engine.tp,
        "learner.activation_checkpointing": settings.learner.activation_checkpointing,
        "Policy.lora": None,
    }
    problem = ""
    beside, doubts = judges_of(by_own_name(judges))
    loaded, unknown = held_on(held, gpus.here(hosts))
    doubts += unknown
    for tried in itertools.chain([asked], _tries(size, gpus, policies, hosts, beside, tp=settings.engine.tp)):
        run = replace(
            settings,
            learner_procs=tried["learner_procs"],
            learner=replace(
                settings.learner, activation_checkpointing=tried["learner.activation_checkpointing"]
            ),
            engine=replace(settings.engine, tp=tried["engine.tp"], replicas=tried["engine.replicas"]),
        )
        parts = [*_parts(_adapted(policies, tried["Policy.lora"]), run, size, dtype), *beside]
        try:
            found = _placed(parts, run, gpus, hosts, loaded)
        except (HostError, ValueError) as error:
            problem = problem or str(error)
            continue
        changes = {key: value for key, value in tried.items() if value != asked[key]}
        if settings.learner.activation_checkpointing is None:  # a run comes to the same by itself
            changes.pop("learner.activation_checkpointing", None)
        found = replace(found, doubts=[*found.doubts, *doubts])
        return Fit(placement=found, changes=changes, problem=problem)
    raise HostError(
        f"{problem}. No number of ranks, recomputation or adapter makes it fit: change the limits that it names, or "
        "take more GPUs or larger ones"
    )


def _adapted(policies: Mapping[str, Policy], lora: LoRA | None) -> Mapping[str, Policy]:
    """With `lora` for those that learn all weights."""
    if lora is None:
        return policies
    return {
        name: replace(policy, lora=lora) if policy.trainable and policy.lora is None else policy
        for name, policy in policies.items()
    }


def _paths(policies: Mapping[str, Policy]) -> dict[str, Path]:
    """Stands for the models' folders: adapters of one model share what those of several do not."""
    return {name: Path(policy.model) for name, policy in policies.items()}


def _parts(policies: Mapping[str, Policy], settings: ProcessConfig, size: ModelSize, dtype: str) -> list[Part]:
    engines, learners = computing(policies, _paths(policies), settings)
    return [
        *(
            Part(name=name, ranks=settings.learner_procs, size=size, learner=learner, sharing=sharing)
            for name, (learner, sharing) in learners.items()
        ),
        *(
            Part(name=name, ranks=settings.engine.tp, size=size, dtype=dtype, adapters=adapters)
            for name, (_, adapters) in engines.items()
        ),
    ]


def _placed(
    parts: Sequence[Part], settings: ProcessConfig, gpus: Gpus, hosts: Hosts | None, beside: Sequence[Placed]
) -> Placement:
    check_ranks(parts)
    check_models([part for part in parts if part.judge is None], settings.engine)
    check_hosts([(part.name, part.role, part.ranks) for part in parts], hosts or Hosts(), settings)
    turns = settings.colocate
    rehearse = partial(gpus.rehearse, hosts=hosts, share=turns)
    return place(parts, settings.engine, rehearse, turns=turns, beside=beside)


def _tries(
    size: ModelSize,
    gpus: Gpus,
    policies: Mapping[str, Policy],
    hosts: Hosts | None,
    judges: Sequence[Part],
    *,
    tp: int,
) -> Iterator[dict[str, Any]]:
    """Settings to try, the least change first: half of the GPUs learn, or more; then recomputation; then an adapter.

    Of several hosts whole ones learn; where nobody describes them judges keep GPUs of their own. `tp` is what is tried
    first.
    """
    counts = {} if hosts is None else hosts.counts
    on = {role: counts[role] * gpus.per_host for role in ("learner", "engines") if role in counts}
    most = min(gpus.per_host, max(1, gpus.count - 1))
    degrees = [found for found in range(1, most + 1) if size.divides(found) and gpus.per_host % found == 0]
    degrees.sort(key=lambda found: found != tp)
    unit = gpus.per_host if gpus.count > gpus.per_host else 1
    many = gpus.count // unit
    apart = sum(judge.ranks for judge in judges) if gpus.count > gpus.per_host else 0
    shares = tuple(unit * max(1, learn) for learn in (many // 2, 3 * many // 4, many - 1))
    whole = any(policy.trainable and policy.lora is None for policy in policies.values())
    smallest = LoRA() if size.plain_layers else LoRA(targets=ATTENTION_TARGETS)
    for adapter, recomputed, share, degree in itertools.product(
        (None, smallest) if whole else (None,),
        RECOMPUTED,
        dict.fromkeys([on["learner"]] if "learner" in on else shares),
        degrees,
    ):
        engines, learners = computing(
            _adapted(policies, adapter), _paths(policies), ProcessConfig()
        )
        left = on.get("engines", gpus.count - share - apart)
        yield {
            "learner_procs": max(1, share // max(1, len(learners))),
            "engine.replicas": max(1, left // (degree * len(engines))),
            "engine.tp": degree,
            "learner.activation_checkpointing": recomputed,
            "Policy.lora": adapter,
        }
