"""Whether the processes of a run fit into GPUs, and which settings to change if they do not."""

from __future__ import annotations

import itertools
import math
from collections import Counter
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
from forge_agents.serving.fleet import shares_engine
from forge_trainers.forecast.simulate import Hardware
from forge_trainers.learner.memory import RECOMPUTED
from forge_trainers.learner.plan import MEMORY_DRIVEN
from forge_trainers.run.config import ProcessConfig
from forge_trainers.run.placement import (
    ATTENTION_TARGETS,
    Compute,
    OwnEngine,
    OwnModel,
    Part,
    Placed,
    Placement,
    check_parts,
    held_on,
    host_bytes,
    host_doubts,
    judges_of,
    place,
    unique_names,
)
from forge_trainers.run.plan import check_hosts, compute_processes

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Placement of a run, and the changes that it needs."""

    placement: Placement
    """Placement with these settings, or with `changes`."""
    changes: Mapping[str, Any]
    """Settings that make the run fit, by configuration key. Empty if it fits as it is."""
    problem: str
    """Why it does not fit as it is. Empty if it does."""
    hosts: Mapping[str, Mapping[str, int]]
    """Bytes of memory by host and content. See `forge_trainers.run.placement.host_bytes`."""
    policies: Mapping[str, Sequence[str]]
    """Policies of each learner and engine, by process name. Judges and models of the controller have none."""

    def table(self) -> Table:
        """Return a table with a row per kind of process, and one per host."""
        from rich.table import Table

        title = "expected memory" + " with these changes" * bool(self.changes)
        table = Table("process", "number", "GB of each GPU", "parts", title=title)
        several = len(set(itertools.chain(*self.policies.values()))) > 1
        kinds: Counter[tuple[str, str, str]] = Counter()
        for process in self.placement.processes:
            policies = f" of {', '.join(self._policies_of(process))}" * bool(several and self._policies_of(process))
            parts = ", ".join(f"{part} {count / 1e9:.1f}" for part, count in process.parts.items())
            memory = f"{process.bytes / 1e9:.1f} of {process.slot.gpu_bytes / 1e9:.0f}"
            kinds[f"{process.slot.role.removesuffix('s')} rank{policies}", memory, parts] += 1
        for (name, memory, parts), count in kinds.items():
            table.add_row(name, str(count), memory, parts)
        for host, needs in self.hosts.items():
            content = ", ".join(f"{name} {count / 1e9:.1f}" for name, count in needs.items()) or "little"
            table.add_row(f"memory of {host}", "1", f"{sum(needs.values()) / 1e9:.1f} of the host", content)
        return table

    def json(self) -> dict[str, Any]:
        """Return plain data."""
        slot = ("name", "role", "rank", "host", "gpu", "gpu_bytes")
        return {
            "fits": not self.changes,
            "problem": self.problem,
            "changes": {key: asdict(new) if isinstance(new, LoRA) else new for key, new in self.changes.items()},
            "doubts": list(self.placement.doubts),
            "learners": {
                name: {key: getattr(config, key) for key in MEMORY_DRIVEN}
                for name, config in self.placement.learners.items()
            },
            "hosts": {host: dict(needs) for host, needs in self.hosts.items()},
            "processes": [
                {
                    **{name: getattr(process.slot, name) for name in slot},
                    "policies": list(self._policies_of(process)),
                    "bytes": dict(process.parts),
                }
                for process in self.placement.processes
            ],
        }

    @property
    def used(self) -> int:
        """Number of GPUs with a process."""
        return len({(process.slot.host, process.slot.gpu) for process in self.placement.processes})

    def _policies_of(self, process: Placed) -> Sequence[str]:
        return self.policies.get(process.slot.name, ()) if process.slot.role in ("learner", "engines") else ()


def fit_gpus(
    settings: ProcessConfig,
    model: ModelSize | str | Mapping[str, ModelSize | str],
    hardware: Hardware,
    *,
    policies: Mapping[str, Policy] | None = None,
    hosts: Hosts | None = None,
    judges: Sequence[OwnEngine] = (),
    held: Sequence[OwnModel] = (),
) -> Fit:
    """Place the learners and engines of a run on GPUs.

    Args:
        settings: Settings of the run.
        model: A size, a well-known shape such as "8b", or a model as `Policy` takes it, or one per policy, where the
            other policies have the models that they name.
        hardware: GPUs with their memory, at least one.
        policies: Policies of the run. None: one policy, or those that `model` names.
        hosts: Hosts of each role. None, or kind "local": any host with free GPUs.
        judges: Engines of judges.
        held: Models that the controller's process loads.

    Raises:
        HostError: No known change makes the run fit. The message has the arithmetic of the run as it is.
        ModelNotFoundError: A model is not found.
        ValueError: There is no GPU, `model` names no policy, or policies that share an engine have different models.
    """
    if hardware.gpus < 1:
        raise ValueError(f"gpus={hardware.gpus}. A run needs at least 1 GPU to fit into")
    if policies is None:
        names = (*model,) if isinstance(model, Mapping) else ("policy",)
        if not names:
            raise ValueError("model={} names no policy, and there are no policies. Give a model, or policies")
        policies = {name: Policy(name, name=name) for name in names}
    sizes = _model_sizes(model, policies)
    current: dict[str, Any] = {
        "learner_procs": settings.learner_procs,
        "engine.replicas": settings.engine.replicas,
        "engine.tp": settings.engine.tp,
        "learner.activation_checkpointing": settings.learner.activation_checkpointing,
        "Policy.lora": None,
    }
    most = replace(settings, engine=replace(settings.engine, replicas=max(hardware.gpus, settings.engine.replicas)))
    reserved = {*policies}  # names in any candidate
    for variant in (settings, most):
        reserved |= {each.name for each in _compute(policies, sizes, variant)}
    judge_parts, doubts = judges_of(unique_names(judges, reserved=reserved))
    loaded, unknown = held_on(held, _controller_slots(hardware, hosts))
    problem = ""
    candidates = _candidates(sizes, hardware, policies, hosts, judge_parts, settings=settings)
    for candidate in itertools.chain([current], candidates):
        run = _changed(settings, candidate)
        compute = _compute(_adapted(policies, candidate["Policy.lora"]), sizes, run)
        models_of = [sizes[each.policies[0]] for each in compute]
        parts = [Part.of(each, model.size, model.dtype) for each, model in zip(compute, models_of, strict=True)]
        parts += judge_parts
        try:
            placement = _placed(parts, run, hardware, hosts, loaded)
            if hardware.host_gb is not None:
                short = host_doubts(parts, placement, free=int(hardware.host_gb * 1e9))
                if short:
                    raise HostError(short[0])
        except (HostError, ValueError) as error:
            problem = problem or str(error)
            continue
        changes = {key: value for key, value in candidate.items() if value != current[key]}
        if settings.learner.activation_checkpointing is None:  # the run chooses the same value itself
            changes.pop("learner.activation_checkpointing", None)
        placement = replace(placement, doubts=[*placement.doubts, *doubts, *unknown])
        needs, served = host_bytes(parts, placement), {each.name: each.policies for each in compute}
        return Fit(placement=placement, changes=changes, problem=problem, hosts=needs, policies=served)
    raise HostError(
        f"{problem}. No number of ranks, recomputation or adapter makes it fit: change the limits that it names, or "
        "take more GPUs or larger ones"
    )


def _changed(settings: ProcessConfig, candidate: Mapping[str, Any]) -> ProcessConfig:
    recomputed = candidate["learner.activation_checkpointing"]
    tp, replicas = candidate["engine.tp"], candidate["engine.replicas"]
    return replace(
        settings,
        learner_procs=candidate["learner_procs"],
        learner=replace(settings.learner, activation_checkpointing=recomputed),
        engine=replace(settings.engine, tp=tp, replicas=replicas),
    )


# ---- GPUs


def preview_slots(
    hardware: Hardware, meshes: Sequence[tuple[str, str, int]], *, hosts: Hosts | None = None, share: bool = False
) -> list[ProcessSlot]:
    """Return where processes go: as a run places them on one host, or on those that `hosts` describes.

    `meshes` has name, role and number of ranks of each mesh. On several hosts without a description, processes get one
    GPU each in order, and the ranks of an engine share a host. With `share`, the first GPU follows the last.

    Raises:
        HostError: There are too few GPUs.
    """
    hosts = hosts or Hosts()
    per_host, gpus = hardware.gpus_per_host, hardware.gpus
    if hosts.kind == "local" and gpus > per_host:
        return _one_after_the_other(hardware, meshes, share=share)
    here = gpus if hosts.kind == "local" else per_host
    slots = mesh.preview_placement_on(hosts, meshes, gpus_per_host=per_host, gpu_bytes=_gpu_bytes(hardware), here=here)
    used = len({(slot.host, slot.gpu) for slot in slots if slot.gpu})
    if used > gpus:
        raise HostError(f"the processes need {used} GPUs of the mesh's hosts, and there are {gpus}")
    return [replace(slot, host="host 0") if hosts.kind == "local" else slot for slot in slots]


def _gpu_bytes(hardware: Hardware) -> int:
    return int(hardware.gpu_gb * 1e9)


def _controller_slots(hardware: Hardware, hosts: Hosts | None) -> list[ProcessSlot]:
    """Return a slot for each GPU that the controller's process sees."""
    count, host = min(hardware.gpus, hardware.gpus_per_host), "host 0"
    if hosts is not None and hosts.kind != "local":
        count = hardware.gpus_per_host
        (slot,) = mesh.preview_placement_on(hosts, [("", "controller", 1)], gpus_per_host=count, here=count)
        host = slot.host
    size = _gpu_bytes(hardware)
    return [
        ProcessSlot(name="", role="controller", rank=0, host=host, gpu=str(g), gpu_bytes=size) for g in range(count)
    ]


def _one_after_the_other(
    hardware: Hardware, meshes: Sequence[tuple[str, str, int]], *, share: bool
) -> list[ProcessSlot]:
    gpus, per_host, size = hardware.gpus, hardware.gpus_per_host, _gpu_bytes(hardware)
    slots: list[ProcessSlot] = []
    position = 0
    for name, role, ranks in meshes:
        if ranks > gpus:
            raise HostError(f"{ranks} ranks of {name} need a GPU each, and there are {gpus}")
        hosts = range(1, math.ceil(gpus / per_host) + 1)
        if role == "learner" and not any(ranks % n == 0 and ranks // n <= per_host for n in hosts):
            raise HostError(
                f"{ranks} processes of one learner cannot be spread evenly over {gpus // per_host} hosts of {per_host} "
                "GPUs. Change learner_procs"
            )
        one_host = role in ("engines", "judges")
        if one_host and ranks > per_host:
            raise HostError(
                f"{ranks} ranks of {role.removesuffix('s')} {name} must be on one host, which has {per_host} GPUs; "
                "lower engine.tp"
            )
        if one_host and position % per_host + ranks > per_host:
            position += -position % per_host
        for rank in range(ranks):
            host, gpu = divmod(position % gpus if share else position, per_host)
            slots.append(
                ProcessSlot(name=name, role=role, rank=rank, host=f"host {host}", gpu=str(gpu), gpu_bytes=size)
            )
            position += 1
    if not share and position > gpus:
        raise HostError(f"the processes need {position} GPUs, one each, and there are {gpus}")
    return slots


# ---- models


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """Size of a policy's model."""

    size: ModelSize
    dtype: str = "bfloat16"
    """Type of the stored weights."""


def _model_of(model: ModelSize | str) -> _Model:
    if isinstance(model, ModelSize):
        return _Model(size=model)
    if model.lower() in SHAPES:
        return _Model(size=ModelSize.named(model))
    try:
        return _policy_model(model)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"{error} Shapes that need no model: {', '.join(SHAPES)}") from error


def _policy_model(model: str) -> _Model:
    """Return the size of a model as `Policy` takes it. Weights are not downloaded."""
    try:
        folder = models.config_folder(model)
    except ModelNotFoundError:
        folder = models.resolve(model)  # in the hub's cache or built in; or its error suggests a similar name
    return _Model(size=ModelSize.of(Path(folder)), dtype=models.dtype_of(Path(folder)))


def _model_sizes(
    model: ModelSize | str | Mapping[str, ModelSize | str], policies: Mapping[str, Policy]
) -> dict[str, _Model]:
    """Return the model of each policy."""
    if not isinstance(model, Mapping):
        return dict.fromkeys(policies, _model_of(model))
    for name in model:
        if name not in policies:
            hint = did_you_mean(name, policies)
            raise ValueError(
                f"model names the policy {name!r}. The policies of the run are {', '.join(policies)}.{hint}"
            )
    sizes: dict[str, _Model] = {}
    for name, policy in policies.items():
        try:
            sizes[name] = _model_of(model[name]) if name in model else _policy_model(policy.model)
        except ModelNotFoundError as error:
            if name in model:
                raise
            raise ModelNotFoundError(
                f"policy {name}: {error} Or give its size: --model {name}=8b, or model={{{name!r}: '8b'}}"
            ) from error
    first: dict[str, str] = {}
    for name, policy in policies.items():
        home = first.setdefault(policy.model, name) if shares_engine(policy) else name
        if sizes[home] != sizes[name]:
            raise ValueError(
                f"{home} and {name} are adapters of {policy.model!r} and share an engine, but have the models "
                f"{model.get(home, policy.model)!r} and {model.get(name, policy.model)!r}. Give both the same, or "
                "let the policies name different models"
            )
    return sizes


def _paths(policies: Mapping[str, Policy], sizes: Mapping[str, _Model]) -> dict[str, Path]:
    """Return a stand-in for each model's folder. Policies with equal paths can share an engine and a learner.

    Policies that name one model but are given several sizes get different paths.
    """
    sizes_of_model: dict[str, list[_Model]] = {}
    paths: dict[str, Path] = {}
    for name, policy in policies.items():
        variants = sizes_of_model.setdefault(policy.model, [])
        if sizes[name] not in variants:
            variants.append(sizes[name])
        index = variants.index(sizes[name])
        paths[name] = Path(policy.model, str(index)) if index else Path(policy.model)
    return paths


def _adapted(policies: Mapping[str, Policy], lora: LoRA | None) -> Mapping[str, Policy]:
    """Give `lora` to the policies that train all weights."""
    if lora is None:
        return policies
    return {
        name: replace(policy, lora=lora) if policy.trainable and policy.lora is None else policy
        for name, policy in policies.items()
    }


def _compute(policies: Mapping[str, Policy], sizes: Mapping[str, _Model], settings: ProcessConfig) -> list[Compute]:
    return compute_processes(policies, _paths(policies, sizes), settings)


def _placed(
    parts: Sequence[Part], settings: ProcessConfig, hardware: Hardware, hosts: Hosts | None, loaded: Sequence[Placed]
) -> Placement:
    check_parts(parts, settings.engine)
    learners = [part.learner for part in parts if part.learner is not None]
    check_hosts([(part.name, part.role, part.ranks) for part in parts], hosts or Hosts(), settings, learners)
    turns = settings.colocate
    return place(
        parts, settings.engine, partial(preview_slots, hardware, hosts=hosts, share=turns), turns=turns, loaded=loaded
    )


# ---- candidates


def _candidates(
    sizes: Mapping[str, _Model],
    hardware: Hardware,
    policies: Mapping[str, Policy],
    hosts: Hosts | None,
    judges: Sequence[Part],
    *,
    settings: ProcessConfig,
) -> Iterator[dict[str, Any]]:
    """Yield settings to try, the smallest change first: more learner GPUs, then recomputation, then an adapter.

    On several hosts, learners get whole hosts, and judges keep their own GPUs unless `hosts` describes the roles. The
    run's `engine.tp` is tried first, and no candidate recomputes less than the run.
    """
    counts = {} if hosts is None else hosts.counts
    described = {role: counts[role] * hardware.gpus_per_host for role in ("learner", "engines") if role in counts}
    several_hosts = hardware.gpus > hardware.gpus_per_host
    judge_gpus = sum(judge.ranks for judge in judges) if several_hosts else 0
    unit = hardware.gpus_per_host if several_hosts else 1
    units = hardware.gpus // unit
    shares = [unit * max(1, count) for count in (units // 2, 3 * units // 4, units - 1)]
    fully_trained = [sizes[name].size for name, policy in policies.items() if policy.trainable and policy.lora is None]
    adapter = LoRA() if all(size.adapts_feed_forward for size in fully_trained) else LoRA(targets=ATTENTION_TARGETS)
    for lora, recomputed, share, tp in itertools.product(
        (None, adapter) if fully_trained else (None,),
        RECOMPUTED[RECOMPUTED.index(settings.learner.activation_checkpointing or "none") :],  # never less than the run
        dict.fromkeys([described["learner"]] if "learner" in described else shares),
        _tensor_parallel(sizes, hardware, settings.engine.tp),
    ):
        adapted = _adapted(policies, lora)
        compute = _compute(adapted, sizes, ProcessConfig())
        learners = sum(each.learner is not None for each in compute)
        engine_gpus = described.get("engines", hardware.gpus - share - judge_gpus)
        yield {
            "learner_procs": max(1, share // max(1, learners)),
            "engine.replicas": max(1, engine_gpus // (tp * (len(compute) - learners))),
            "engine.tp": tp,
            "learner.activation_checkpointing": recomputed,
            "Policy.lora": lora,
        }


def _tensor_parallel(sizes: Mapping[str, _Model], hardware: Hardware, current: int) -> list[int]:
    """Return the degrees that all models allow, the current one first."""
    most = min(hardware.gpus_per_host, max(1, hardware.gpus - 1))
    different = {model.size for model in sizes.values()}
    degrees = [
        degree
        for degree in range(1, most + 1)
        if hardware.gpus_per_host % degree == 0 and all(size.divides(degree) for size in different)
    ]
    return sorted(degrees, key=lambda degree: degree != current)
