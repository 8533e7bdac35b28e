"""Whether a run's processes fit into so many GPUs, and what to change where they do not: `fit`.

In: a run's settings, a model, a number of GPUs. Out: a `Fit`: a row for each process, bytes by part. Waits for nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_agents.errors import HostError
from forge_agents.models import resolve as models
from forge_agents.models.sizes import SHAPES, ModelSize
from forge_agents.policy import LoRA
from forge_agents.runtime.hosts import Seat
from forge_agents.serving.config import EngineConfig
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.run.config import ProcessConfig
from forge_trainers.run.placement import Part, Placement, place

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

    def rehearse(self, meshes: Sequence[tuple[str, str, int]], *, share: bool = False) -> list[Seat]:
        """Processes one after the other, a GPU each; an engine's ranks on one host. One GPU is shared by all.

        `share`: after the last GPU comes the first again.

        Raises:
            HostError: There are too few GPUs.
        """
        seats: list[Seat] = []
        at = 0
        for name, role, ranks in meshes:
            if ranks > self.count:
                raise HostError(f"{ranks} ranks of {name} want a GPU each, and there are {self.count}")
            if role == "engines" and at % self.per_host + ranks > self.per_host:
                at += -at % self.per_host
            for rank in range(ranks):
                place = at % self.count if share or (self.count == 1 and ranks == 1) else at
                host, gpu = divmod(place, self.per_host)
                size = int(self.memory_gb * 1e9)
                seats.append(Seat(name=name, role=role, rank=rank, host=f"host {host}", gpu=str(gpu), gpu_bytes=size))
                at += 1
        if at > self.count and len({(seat.host, seat.gpu) for seat in seats}) > self.count:
            raise HostError(f"the processes want {at} GPUs, one each, and there are {self.count}")
        return seats


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
        for role in ("learner", "engines"):
            alike = [one for one in self.placement.processes if one.seat.role == role]
            if alike:
                parts = ", ".join(f"{part} {count / 1e9:.1f}" for part, count in alike[0].parts.items())
                table.add_row(
                    f"{role.removesuffix('s')} rank",
                    str(len(alike)),
                    f"{alike[0].bytes / 1e9:.1f} of {alike[0].seat.gpu_bytes / 1e9:.0f}",
                    parts,
                )
        return table


def size_of(model: str) -> ModelSize:
    """Of a well-known shape, such as "8b", or of a model as `Policy` takes it.

    Raises:
        ModelNotFoundError: There is neither.
    """
    return ModelSize.named(model) if model.lower() in SHAPES else ModelSize.of(Path(models.resolve(model)))


def fit_gpus(settings: ProcessConfig, model: ModelSize | str, gpus: Gpus, *, lora: LoRA | None = None) -> Fit:
    """Place one learner and the engines of one model on GPUs.

    Args:
        settings: Of the run.
        model: Its size; or a well-known shape, such as "8b", or a model as `Policy` takes it.
        gpus: What there is.
        lora: The adapter that learns; None: the whole model does.

    Raises:
        HostError: Nothing that is known here makes it fit; the message has the arithmetic of the last try.
    """
    size = size_of(model) if isinstance(model, str) else model
    asked: dict[str, Any] = {
        "learner_procs": settings.learner_procs,
        "engine.replicas": settings.engine.replicas,
        "engine.tp": settings.engine.tp,
        "learner.activation_checkpointing": settings.learner.activation_checkpointing,
        "Policy.lora": lora,
    }
    problem = last = ""
    for tried in itertools.chain([asked], _tries(size, gpus, lora)):
        learner = replace(
            settings.learner,
            lora=tried["Policy.lora"],
            activation_checkpointing=tried["learner.activation_checkpointing"],
        )
        engine = replace(settings.engine, tp=tried["engine.tp"], replicas=tried["engine.replicas"])
        try:
            found = _placed(learner, tried["learner_procs"], engine, size, gpus, turns=settings.colocate)
        except HostError as error:
            last = str(error)
            problem = problem or last
            continue
        changes = {key: value for key, value in tried.items() if value != asked[key]}
        return Fit(placement=found, changes=changes, problem=problem)
    raise HostError(f"{last}. No number of ranks, recomputation or adapter makes it fit: take more GPUs or larger ones")


def _placed(
    learner: LearnerConfig, ranks: int, engine: EngineConfig, size: ModelSize, gpus: Gpus, *, turns: bool
) -> Placement:
    parts = [
        Part(name="learner", ranks=ranks, size=size, learner=learner),
        *(Part(name=f"engine-{i}", ranks=engine.tp, size=size) for i in range(engine.replicas)),
    ]
    return place(parts, engine, partial(gpus.rehearse, share=turns), turns=turns)


def _tries(size: ModelSize, gpus: Gpus, lora: LoRA | None) -> Iterator[dict[str, Any]]:
    """Settings to try, the least change first: half of the GPUs learn, or more; then recomputation; then an adapter."""
    most = min(gpus.per_host, max(1, gpus.count - 1))
    degrees = [tp for tp in range(1, most + 1) if size.divides(tp) and gpus.per_host % tp == 0]
    learners = dict.fromkeys((max(1, gpus.count // 2), max(1, 3 * gpus.count // 4), max(1, gpus.count - 1)))
    adapters = (lora,) if lora is not None else (None, LoRA())
    for adapter, recomputed, procs, tp in itertools.product(adapters, ("none", "full"), learners, degrees):
        yield {
            "learner_procs": procs,
            "engine.replicas": max(1, (gpus.count - procs) // tp),
            "engine.tp": tp,
            "learner.activation_checkpointing": recomputed,
            "Policy.lora": adapter,
        }
