"""Whether the processes of a run fit into GPUs, and which settings to change if they do not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from forge_agents.errors import HostError, ModelNotFoundError
from forge_agents.models import resolve as models
from forge_agents.models.sizes import SHAPES, ModelSize
from forge_agents.policy import LoRA, Policy
from forge_agents.runtime.allocation import Allocator
from forge_agents.runtime.hosts import Hosts, ProcessSlot
from forge_trainers.forecast.simulate import Hardware
from forge_trainers.learner.memory import RECOMPUTED
from forge_trainers.learner.plan import MEMORY_DRIVEN
from forge_trainers.run.config import ProcessConfig
from forge_trainers.run.parts import (
    ATTENTION_TARGETS,
    Compute,
    OwnEngine,
    OwnModel,
    Part,
    check_parts,
    judges_of,
    unique_names,
)
from forge_trainers.run.placement import Placement, held_on, host_bytes, host_doubts, place
from forge_trainers.run.plan import check_hosts, compute_processes


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

    def lines(self) -> list[str]:
        """Return the lines of a table with the memory of each process, and a line per host."""
        lines = ["expected memory" + " with these changes" * bool(self.changes), *self.placement.lines()]
        for host, needs in self.hosts.items():
            content = ", ".join(f"{name} {count / 1e9:.1f}" for name, count in needs.items()) or "little"
            lines.append(f"memory of {host}: {sum(needs.values()) / 1e9:.1f} GB ({content})")
        return lines

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
                    "policies": list(process.policies),
                    "bytes": dict(process.parts),
                }
                for process in self.placement.processes
            ],
        }

    @property
    def used(self) -> int:
        """Number of GPUs with a process."""
        return len({(process.slot.host, process.slot.gpu) for process in self.placement.processes})


def fit_gpus(
    settings: ProcessConfig,
    model: str,
    hardware: Hardware,
    *,
    policies: Mapping[str, Policy],
    hosts: Hosts,
    judges: Sequence[OwnEngine] = (),
    held: Sequence[OwnModel] = (),
) -> Fit:
    """Place the learners and engines of a run on GPUs.

    Args:
        settings: Settings of the run.
        model: A well-known shape such as "8b", or a model as `Policy` takes it, for all policies. Empty: the models of
            the policies, which may be such shapes as well.
        hardware: GPUs with their memory, at least one.
        policies: Policies of the run.
        hosts: Hosts of each role. Kind "local": one host, with all GPUs.
        judges: Engines of judges.
        held: Models that the controller's process loads.

    Raises:
        HostError: No known change makes the run fit. The message has the arithmetic of the run as it is.
        ModelNotFoundError: A model is not found.
        ValueError: There is no GPU, or one host has not as many.
    """
    if hardware.gpus < 1:
        raise ValueError(f"gpus={hardware.gpus}. A run needs at least 1 GPU to fit into")
    if hosts.kind == "local" and hardware.gpus > hardware.gpus_per_host:
        raise ValueError(
            f"gpus={hardware.gpus} is more than one host has (gpus_per_host={hardware.gpus_per_host}), and a run uses "
            "one host unless mesh names others. Set mesh.kind and mesh.hosts, or raise gpus_per_host"
        )
    sizes = {name: _size_of(model or policy.model, name) for name, policy in policies.items()}
    current: dict[str, Any] = {
        "learner_procs": settings.learner_procs,
        "engine.replicas": settings.engine.replicas,
        "engine.tp": settings.engine.tp,
        "learner.activation_checkpointing": settings.learner.activation_checkpointing,
        "Policy.lora": None,
    }
    most = replace(settings, engine=replace(settings.engine, replicas=max(hardware.gpus, settings.engine.replicas)))
    reserved = {*policies, *(each.name for run in (settings, most) for each in _compute(policies, run))}
    judge_parts, doubts = judges_of(unique_names(judges, reserved=reserved))  # names that no candidate has
    loaded, unknown = held_on(held, _allocator(hardware, hosts).local_gpus())
    problem = ""
    for candidate in itertools.chain([current], _candidates(sizes, hardware, policies, hosts, settings)):
        try:
            run = _changed(settings, candidate)
            compute = _compute(_adapted(policies, candidate["Policy.lora"]), run)
            parts = [*(Part.of(each, *sizes[each.policies[0]]) for each in compute), *judge_parts]
            check_parts(parts, run.engine)
            check_hosts(parts, hosts, run)
            placement = place(
                parts,
                run.engine,
                lambda meshes: _preview(hardware, hosts, meshes),
                turns=run.colocate,
                loaded=loaded,
            )
            free = None if hardware.host_gb is None else int(hardware.host_gb * 1e9)
            if free is not None and (short := host_doubts(parts, placement, free=free)):
                raise HostError(short[0])
        except (HostError, ValueError) as error:
            problem = problem or str(error)
            continue
        changes = {key: value for key, value in candidate.items() if value != current[key]}
        if settings.learner.activation_checkpointing is None:  # the run chooses the same value itself
            changes.pop("learner.activation_checkpointing", None)
        placement = replace(placement, doubts=[*placement.doubts, *doubts, *unknown])
        return Fit(placement=placement, changes=changes, problem=problem, hosts=host_bytes(parts, placement))
    raise HostError(
        f"{problem}. No number of ranks, recomputation or adapter makes it fit: change the limits that it names, or "
        "take more GPUs or larger ones"
    )


def _changed(settings: ProcessConfig, candidate: Mapping[str, Any]) -> ProcessConfig:
    return replace(
        settings,
        learner_procs=candidate["learner_procs"],
        learner=replace(settings.learner, activation_checkpointing=candidate["learner.activation_checkpointing"]),
        engine=replace(settings.engine, tp=candidate["engine.tp"], replicas=candidate["engine.replicas"]),
    )


def _adapted(policies: Mapping[str, Policy], lora: LoRA | None) -> Mapping[str, Policy]:
    """Give `lora` to the policies that train all weights."""
    if lora is None:
        return policies
    return {
        name: replace(policy, lora=lora) if policy.trainable and policy.lora is None else policy
        for name, policy in policies.items()
    }


def _compute(policies: Mapping[str, Policy], settings: ProcessConfig) -> list[Compute]:
    return compute_processes(policies, {name: Path(policy.model) for name, policy in policies.items()}, settings)


def _allocator(hardware: Hardware, hosts: Hosts, meshes: Sequence[tuple[str, str, int]] = ()) -> Allocator:
    allocator, per_host = Allocator(hosts, meshes=meshes), hardware.gpus_per_host
    here = hardware.gpus if hosts.kind == "local" else per_host
    allocator.assume_hosts(per_host, gpu_bytes=int(hardware.gpu_gb * 1e9), here=here)
    return allocator


def _preview(hardware: Hardware, hosts: Hosts, meshes: Sequence[tuple[str, str, int]]) -> list[ProcessSlot]:
    """Return where a run would place processes, by name, role and number of ranks.

    Raises:
        HostError: There are too few GPUs.
    """
    allocator = _allocator(hardware, hosts, meshes)
    allocator.check()
    slots = allocator.preview(meshes)
    used = len({(slot.host, slot.gpu) for slot in slots if slot.gpu})
    if used > hardware.gpus:
        raise HostError(f"the processes need {used} GPUs of the mesh's hosts, and there are {hardware.gpus}")
    return slots


def _size_of(model: str, policy: str) -> tuple[ModelSize, str]:
    """Return the size of a policy's model and the type of its weights, which are not downloaded."""
    if model.lower() in SHAPES:
        return ModelSize.named(model), "bfloat16"
    try:
        try:
            folder = models.config_folder(model)
        except ModelNotFoundError:
            folder = models.resolve(model)  # in the hub's cache or built in; or its error suggests a similar name
        return ModelSize.of(Path(folder)), models.dtype_of(Path(folder))
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            f"policy {policy}: {error} Or give a size that needs no model ({', '.join(SHAPES)}): "
            f"--policies.{policy}.model 8b, or --model 8b for all policies"
        ) from error


def _candidates(
    sizes: Mapping[str, tuple[ModelSize, str]],
    hardware: Hardware,
    policies: Mapping[str, Policy],
    hosts: Hosts,
    settings: ProcessConfig,
) -> Iterator[dict[str, Any]]:
    """Yield settings to try, the smallest change first: more learner GPUs, then recomputation, then an adapter.

    The run's `engine.tp` is tried first, and no candidate recomputes less than the run.
    """
    gpus, per_host = hardware.gpus, hardware.gpus_per_host
    shares = [max(1, count) for count in (gpus // 2, 3 * gpus // 4, gpus - 1)]
    described = {role: hosts.counts[role] * per_host for role in ("learner", "engines") if role in hosts.counts}
    fully_trained = [sizes[name][0] for name, policy in policies.items() if policy.trainable and policy.lora is None]
    adapter = LoRA() if all(size.adapts_feed_forward for size in fully_trained) else LoRA(targets=ATTENTION_TARGETS)
    degrees = [
        tp
        for tp in range(1, min(per_host, max(1, gpus - 1)) + 1)
        if per_host % tp == 0 and all(size.divides(tp) for size, _ in sizes.values())
    ]
    for lora, recomputed, share, tp in itertools.product(
        (None, adapter) if fully_trained else (None,),
        RECOMPUTED[RECOMPUTED.index(settings.learner.activation_checkpointing or "none") :],  # never less than the run
        dict.fromkeys([described["learner"]] if "learner" in described else shares),
        sorted(degrees, key=lambda tp: tp != settings.engine.tp),
    ):
        compute = _compute(_adapted(policies, lora), ProcessConfig())
        learners = sum(each.learner is not None for each in compute)
        yield {
            "learner_procs": max(1, share // max(1, learners)),
            "engine.replicas": max(1, described.get("engines", gpus - share) // (tp * (len(compute) - learners))),
            "engine.tp": tp,
            "learner.activation_checkpointing": recomputed,
            "Policy.lora": lora,
        }
