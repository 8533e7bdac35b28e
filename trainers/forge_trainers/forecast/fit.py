"""Whether a run's processes fit into so many GPUs, and what to change where they do not: `fit`.

In: a run's settings, models, a number of GPUs. Out: a `Fit`: a row for each process, bytes by part. Waits for the
settings of models that are named, never for weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_agents.errors import HostError, ModelNotFoundError, did_you_mean
from forge_agents.models import resolve as models
from forge_agents.models.sizes import SHAPES, ModelSize
from forge_agents.policy import LoRA, Policy
from forge_agents.runtime import mesh
from forge_agents.runtime.hosts import Hosts, ProcessSlot
from forge_agents.settings import settings_class
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
    host_bytes,
    host_doubts,
    judges_of,
    place,
)
from forge_trainers.run.processes import check_hosts, computing, whose

if TYPE_CHECKING:
    from rich.table import Table


@settings_class
@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """GPUs that are all alike."""

    count: int
    memory_gb: float = 80.0
    """Of each, 1e9 bytes."""
    per_host: int = 8
    host_gb: float | None = None
    """Free memory of each host, 1e9 bytes. None: what a run needs of it is told and compared with nothing."""

    def __post_init__(self) -> None:
        if self.count < 1 or self.per_host < 1 or not (math.isfinite(self.memory_gb) and self.memory_gb > 0):
            raise ValueError(f"{self}: give at least one GPU, one a host, and memory above 0")
        if self.host_gb is not None and not 0 < self.host_gb < math.inf:
            raise ValueError(f"host_gb={self.host_gb} must be above 0, or None where it is not known")

    def rehearse(
        self, meshes: Sequence[tuple[str, str, int]], *, hosts: Hosts | None = None, share: bool = False
    ) -> list[ProcessSlot]:
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
        found = mesh.preview_placement_on(hosts, meshes, gpus_per_host=self.per_host, gpu_bytes=each, here=here)
        used = len({(seat.host, seat.gpu) for seat in found if seat.gpu})
        if used > self.count:
            raise HostError(f"the processes are on {used} GPUs of the mesh's hosts, and there are {self.count}")
        return [replace(seat, host="host 0") if hosts.kind == "local" else seat for seat in found]

    def here(self, hosts: Hosts | None = None) -> list[ProcessSlot]:
        """A seat on each GPU that the controller's process sees."""
        hosts = hosts or Hosts()
        many, host = min(self.count, self.per_host), "host 0"
        if hosts.kind != "local":
            (seat,) = mesh.preview_placement_on(
                hosts, [("", "controller", 1)], gpus_per_host=self.per_host, here=self.per_host
            )
            many, host = self.per_host, seat.host
        each = int(self.memory_gb * 1e9)
        return [
            ProcessSlot(name="", role="controller", rank=0, host=host, gpu=str(gpu), gpu_bytes=each)
            for gpu in range(many)
        ]

    def _one_after_the_other(self, meshes: Sequence[tuple[str, str, int]], *, share: bool) -> list[ProcessSlot]:
        seats: list[ProcessSlot] = []
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
                slot = ProcessSlot(name=name, role=role, rank=rank, host=f"host {host}", gpu=str(gpu), gpu_bytes=size)
                seats.append(slot)
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
    hosts: Mapping[str, Mapping[str, int]]
    """Bytes of each host's memory by what they hold; see `forge_trainers.run.placement.host_bytes`."""
    whose: Mapping[str, Sequence[str]]
    """Policies that learn in a learner or that an engine plays, by the name of its processes; of judges and of what the
    controller holds there are none."""

    def table(self) -> Table:
        """A row for each kind of process: how many there are, the bytes of one by part; of several policies, whose."""
        from rich.table import Table

        title = "expected memory" + " with these changes" * bool(self.changes)
        table = Table("process", "how many", "GB of each GPU", "of which", title=title)
        several = len(set(itertools.chain(*self.whose.values()))) > 1
        kinds: dict[tuple[str, str, str], int] = {}
        for one in self.placement.processes:
            parts = ", ".join(f"{part} {count / 1e9:.1f}" for part, count in one.parts.items())
            memory = f"{one.bytes / 1e9:.1f} of {one.seat.gpu_bytes / 1e9:.0f}"
            policies = ", ".join(self._policies_of(one)) if several else ""
            kind = f"{one.seat.role.removesuffix('s')} rank" + f" of {policies}" * bool(policies), memory, parts
            kinds[kind] = kinds.get(kind, 0) + 1
        for (process, memory, parts), many in kinds.items():
            table.add_row(process, str(many), memory, parts)
        for host, needs in self.hosts.items():
            held = ", ".join(f"{what} {count / 1e9:.1f}" for what, count in needs.items()) or "little"
            table.add_row(f"memory of {host}", "1", f"{sum(needs.values()) / 1e9:.1f} of the host", held)
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
            "hosts": {host: dict(needs) for host, needs in self.hosts.items()},
            "processes": [
                {
                    **{name: getattr(one.seat, name) for name in ("name", "role", "rank", "host", "gpu", "gpu_bytes")},
                    "policies": list(self._policies_of(one)),
                    "bytes": dict(one.parts),
                }
                for one in self.placement.processes
            ],
        }

    @property
    def used(self) -> int:
        """GPUs that have something to do."""
        return len({(one.seat.host, one.seat.gpu) for one in self.placement.processes})

    def _policies_of(self, one: Placed) -> Sequence[str]:
        return self.whose.get(one.seat.name, ()) if one.seat.role in ("learner", "engines") else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """What is known of a policy's model."""

    size: ModelSize
    dtype: str = "bfloat16"
    """What it is stored in; well-known shapes are in this."""

    @classmethod
    def of(cls, model: ModelSize | str) -> _Model:
        """Of a size, of a well-known shape, or of a model as `Policy` takes it."""
        if isinstance(model, ModelSize):
            return cls(size=model)
        if model.lower() in SHAPES:
            return cls(size=ModelSize.named(model))
        try:
            return cls.of_policy(model)
        except ModelNotFoundError as error:
            raise ModelNotFoundError(f"{error} Shapes that need no model: {', '.join(SHAPES)}") from error

    @classmethod
    def of_policy(cls, model: str) -> _Model:
        """Of a model as `Policy` takes it; of one on the hub only the settings are fetched."""
        try:
            folder = models.config_folder(model)
        except ModelNotFoundError:
            folder = models.resolve(model)  # in the hub's cache, or built in by another name; or it says what is near
        return cls(size=ModelSize.of(Path(folder)), dtype=models.dtype_of(Path(folder)))


def size_of(model: str) -> ModelSize:
    """Of a well-known shape, such as "8b", or of a model as `Policy` takes it.

    Raises:
        ModelNotFoundError: There is neither.
    """
    return _Model.of(model).size


def fit_gpus(
    settings: ProcessConfig,
    model: ModelSize | str | Mapping[str, ModelSize | str],
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
        model: Its size; or a well-known shape, such as "8b", or a model as `Policy` takes it. By policy name where they
            differ: a policy that is not named has the model that it names itself.
        gpus: What there is.
        lora: The adapter that learns; None: the whole model does. Not read where `policies` say it.
        policies: Of the run; None: one, or those that `model` names.
        hosts: Where each role is; None, or kind "local": wherever there is room.
        judges: Whose engines start by themselves, each with its own model.
        held: What the controller's process loads by itself.

    Raises:
        HostError: Nothing that is known here makes it fit; the message has the arithmetic of the run as it is set.
        ModelNotFoundError: A model is not there.
        ValueError: `model` names no policy, or gives policies that share an engine different models.
    """
    if policies is None:
        names = (*model,) if isinstance(model, Mapping) else ("policy",)
        if not names:
            raise ValueError("model={} names no policy, and there are no policies; give a model, or policies")
        # each has a model of its own, as long as no file says otherwise
        policies = {name: Policy(name, name=name, lora=lora) for name in names}
    sized = _sized(model, policies)
    asked: dict[str, Any] = {
        "learner_procs": settings.learner_procs,
        "engine.replicas": settings.engine.replicas,
        "engine.tp": settings.engine.tp,
        "learner.activation_checkpointing": settings.learner.activation_checkpointing,
        "Policy.lora": None,
    }
    problem = ""
    most = replace(settings, engine=replace(settings.engine, replicas=max(gpus.count, settings.engine.replicas)))
    paths = _paths(policies, sized)
    taken = {*policies, *whose(policies, paths, settings), *whose(policies, paths, most)}  # whatever is tried
    beside, doubts = judges_of(by_own_name(judges, taken=taken))
    loaded, unknown = held_on(held, gpus.here(hosts))
    doubts += unknown
    for tried in itertools.chain([asked], _tries(sized, gpus, policies, hosts, beside, settings=settings)):
        run = replace(
            settings,
            learner_procs=tried["learner_procs"],
            learner=replace(
                settings.learner, activation_checkpointing=tried["learner.activation_checkpointing"]
            ),
            engine=replace(settings.engine, tp=tried["engine.tp"], replicas=tried["engine.replicas"]),
        )
        adapted = _adapted(policies, tried["Policy.lora"])
        served = whose(adapted, _paths(adapted, sized), run)
        parts = [*_parts(adapted, run, sized, served), *beside]
        try:
            found = _placed(parts, run, gpus, hosts, loaded)
            if gpus.host_gb is not None and (short := host_doubts(parts, found, free=int(gpus.host_gb * 1e9))):
                raise HostError(short[0])
        except (HostError, ValueError) as error:
            problem = problem or str(error)
            continue
        changes = {key: value for key, value in tried.items() if value != asked[key]}
        if settings.learner.activation_checkpointing is None:  # a run comes to the same by itself
            changes.pop("learner.activation_checkpointing", None)
        found = replace(found, doubts=[*found.doubts, *doubts])
        needs = host_bytes(parts, found)
        return Fit(placement=found, changes=changes, problem=problem, hosts=needs, whose=served)
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


def _sized(
    model: ModelSize | str | Mapping[str, ModelSize | str], policies: Mapping[str, Policy]
) -> dict[str, _Model]:
    """The model of each policy."""
    if not isinstance(model, Mapping):
        return dict.fromkeys(policies, _Model.of(model))
    for name in model:
        if name not in policies:
            near = did_you_mean(name, policies)
            raise ValueError(f"model names the policy {name!r}, and those that play are {', '.join(policies)}.{near}")
    found = {name: _Model.of(model[name]) if name in model else _own(name, one) for name, one in policies.items()}
    first: dict[str, str] = {}
    for name, policy in policies.items():
        home = name if policy.lora is None else first.setdefault(policy.model, name)
        if found[home] != found[name]:
            raise ValueError(
                f"{home} and {name} are adapters of {policy.model!r} and share an engine, which has one model, and "
                f"{_said(home, model, policy)} is not {_said(name, model, policy)}; give both the same, or let them "
                "name different models"
            )
    return found


def _own(name: str, policy: Policy) -> _Model:
    """Of the model that a policy names itself."""
    try:
        return _Model.of_policy(policy.model)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            f"policy {name}: {error} How large it is can be said, too: --model {name}=8b, or model={{{name!r}: '8b'}}"
        ) from error


def _said(name: str, model: Mapping[str, ModelSize | str], policy: Policy) -> str:
    said = model.get(name, policy.model)
    shown = repr(said) if isinstance(said, str) else f"{said.weights / 1e9:.1f} billion weights"
    return f"{shown} of {name}"


def _paths(policies: Mapping[str, Policy], sized: Mapping[str, _Model]) -> dict[str, Path]:
    """Stands for the models' folders: adapters of one model share what those of several do not.

    Policies that name one model and are given several have several: they share nothing if an adapter is tried.
    """
    given: dict[str, list[_Model]] = {}
    paths: dict[str, Path] = {}
    for name, policy in policies.items():
        own = given.setdefault(policy.model, [])
        own += [] if sized[name] in own else [sized[name]]
        which = own.index(sized[name])
        paths[name] = Path(policy.model, str(which)) if which else Path(policy.model)
    return paths


def _parts(
    policies: Mapping[str, Policy],
    settings: ProcessConfig,
    sized: Mapping[str, _Model],
    served: Mapping[str, Sequence[str]],
) -> list[Part]:
    engines, learners = computing(policies, _paths(policies, sized), settings)
    own = {name: sized[names[0]] for name, names in served.items()}
    return [
        *(
            Part(name=name, ranks=settings.learner_procs, size=own[name].size, learner=learner, sharing=sharing)
            for name, (learner, sharing) in learners.items()
        ),
        *(
            Part(name=name, ranks=settings.engine.tp, size=own[name].size, dtype=own[name].dtype, adapters=adapters)
            for name, (_, adapters) in engines.items()
        ),
    ]


def _placed(
    parts: Sequence[Part], settings: ProcessConfig, gpus: Gpus, hosts: Hosts | None, beside: Sequence[Placed]
) -> Placement:
    check_ranks(parts)
    check_models([part for part in parts if part.judge is None], settings.engine)
    learners = [part.learner for part in parts if part.learner is not None]
    check_hosts([(part.name, part.role, part.ranks) for part in parts], hosts or Hosts(), settings, learners)
    turns = settings.colocate
    rehearse = partial(gpus.rehearse, hosts=hosts, share=turns)
    return place(parts, settings.engine, rehearse, turns=turns, beside=beside)


def _tries(
    sized: Mapping[str, _Model],
    gpus: Gpus,
    policies: Mapping[str, Policy],
    hosts: Hosts | None,
    judges: Sequence[Part],
    *,
    settings: ProcessConfig,
) -> Iterator[dict[str, Any]]:
    """Settings to try, the least change first: half of the GPUs learn, or more; then recomputation; then an adapter.

    Of several hosts whole ones learn; where nobody describes them judges keep GPUs of their own. The run's own
    `engine.tp` is tried first, and no less recomputation than it says.
    """
    counts = {} if hosts is None else hosts.counts
    on = {role: counts[role] * gpus.per_host for role in ("learner", "engines") if role in counts}
    most = min(gpus.per_host, max(1, gpus.count - 1))
    sizes = {one.size for one in sized.values()}
    degrees = [
        found
        for found in range(1, most + 1)
        if gpus.per_host % found == 0 and all(size.divides(found) for size in sizes)
    ]
    degrees.sort(key=lambda found: found != settings.engine.tp)
    unit = gpus.per_host if gpus.count > gpus.per_host else 1
    many = gpus.count // unit
    apart = sum(judge.ranks for judge in judges) if gpus.count > gpus.per_host else 0
    shares = tuple(unit * max(1, learn) for learn in (many // 2, 3 * many // 4, many - 1))
    whole = [sized[name].size for name, policy in policies.items() if policy.trainable and policy.lora is None]
    adapter = LoRA() if all(size.plain_layers for size in whole) else LoRA(targets=ATTENTION_TARGETS)
    for lora, recomputed, share, degree in itertools.product(
        (None, adapter) if whole else (None,),
        _recomputed(settings.learner.activation_checkpointing),
        dict.fromkeys([on["learner"]] if "learner" in on else shares),
        degrees,
    ):
        adapted = _adapted(policies, lora)
        engines, learners = computing(adapted, _paths(adapted, sized), ProcessConfig())
        left = on.get("engines", gpus.count - share - apart)
        yield {
            "learner_procs": max(1, share // max(1, len(learners))),
            "engine.replicas": max(1, left // (degree * len(engines))),
            "engine.tp": degree,
            "learner.activation_checkpointing": recomputed,
            "Policy.lora": lora,
        }


def _recomputed(asked: str | None) -> Sequence[str]:
    """What may be recomputed where a run says `asked`: that, or more."""
    if asked is None:
        return RECOMPUTED
    if asked not in RECOMPUTED:  # the compiler's choice within a budget, of which all is the most
        return (asked, RECOMPUTED[-1])
    return [how for how in RECOMPUTED if RECOMPUTED.index(how) >= RECOMPUTED.index(asked)]
