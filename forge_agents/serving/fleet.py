"""Several engines at once: one for each model that plays."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from forge_agents.errors import ModelNotFoundError
from forge_agents.models import resolve as models
from forge_agents.models.exports import warn_about_prompts
from forge_agents.models.sizes import ModelSize
from forge_agents.policy import LoRA, Policy, SnapshotPolicy
from forge_agents.rollout.policy_engine import PolicyEngine
from forge_agents.rollout.rendering import Renderer
from forge_agents.runtime import mesh
from forge_agents.runtime.colocation import DeviceAccess, unshared
from forge_agents.runtime.faults import Faults
from forge_agents.runtime.hosts import ProcessSlot
from forge_agents.runtime.machine import visible_gpus
from forge_agents.runtime.threads import all_or_first_error
from forge_agents.serving import memory, shares
from forge_agents.serving.client import EngineClient, names_of
from forge_agents.serving.config import EngineConfig, EnginePlan
from forge_agents.serving.process import HEARTBEAT_TIMEOUT_S

if TYPE_CHECKING:
    from forge_agents.weights.store import WeightStoreRef

C = TypeVar("C", bound=EngineConfig)


async def start_engines(
    folders: Mapping[str, Path],
    configs: Mapping[str, EngineConfig],
    *,
    adapters: Mapping[str, Mapping[str, LoRA]] | None = None,
    store: WeightStoreRef | None = None,
    faults: Faults | None = None,
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
    timeout_s: float = 300.0,
    device_access: DeviceAccess = unshared,
) -> dict[str, EngineClient]:
    """Start engines for each model folder, all at once. If one fails, the others are stopped.

    Mappings have the names of engines as keys, and `adapters` the adapters of each by name. The engines are started
    with `configs`, in which `model` and `adapters` are replaced. Other arguments are those of `EngineClient`.
    """
    counter = Faults() if faults is None else faults
    starting = (
        EngineClient(
            EnginePlan.of(configs[name], model=str(folder), adapters=(adapters or {}).get(name, {})),
            name=name,
            store=store,
            faults=counter,
            heartbeat_timeout_s=heartbeat_timeout_s,
            timeout_s=timeout_s,
            device_access=device_access,
        ).start()
        for name, folder in folders.items()
    )
    engines = await all_or_first_error(starting, EngineClient.stop)
    return dict(zip(folders, engines, strict=True))


def with_divided_threads(config: C, engines: int) -> C:
    """`config` with a number of threads: without a GPU, several `engines` of one host divide its cores.

    With all cores for each engine, threads wait for each other: two engines took four times as long on two cores.
    """
    processes = engines * config.tp
    if config.threads is not None or processes < 2 or visible_gpus() or mesh.has_remote_hosts():
        return config
    return replace(config, threads=max(1, len(os.sched_getaffinity(0)) // processes))


def divide_gpus(folders: Mapping[str, Path], config: C, adapters: Mapping[str, Mapping[str, LoRA]]) -> dict[str, C]:
    """`config` for each engine (a model folder and adapters), with its part of the memory of GPUs that several share.

    Raises:
        HostError: The engines do not fit.
    """
    meshes = _meshes(folders, config)
    on_gpu: dict[tuple[str, str], list[ProcessSlot]] = defaultdict(list)
    for slot in mesh.preview_placement(meshes) if len(meshes) > 1 and visible_gpus() else ():
        if slot.gpu:
            on_gpu[slot.host, slot.gpu].append(slot)
    most = max(map(len, on_gpu.values()), default=1)
    if most == 1:
        return dict.fromkeys(folders, config)
    footprints: dict[str, memory.Footprint] = {}
    with contextlib.suppress(ModelNotFoundError):  # an architecture with other names for its sizes
        footprints = {
            name: memory.Footprint(
                size=ModelSize.of(folder), dtype=models.dtype_of(folder), tp=config.tp,
                adapters=tuple(adapters.get(name, {}).values()),
            )
            for name, folder in folders.items()
        }  # fmt: skip
    if not footprints or not all(slot.gpu_bytes for slots in on_gpu.values() for slot in slots):
        fraction = config.gpu_memory_utilization or round(memory.USUAL_SHARE / most, 4)
        return dict.fromkeys(folders, replace(config, gpu_memory_utilization=fraction))
    engine_of = {replica: name for name in folders for replica in names_of(name, config.replicas)}
    assigned: dict[str, list[shares.MemoryShare]] = defaultdict(list)
    for (host, gpu), slots in on_gpu.items():
        engines = {f"engine {slot.name}": (footprints[engine_of[slot.name]], config) for slot in slots}
        total, advice = slots[0].gpu_bytes, "let fewer models play at once, lower max_model_len, or take more GPUs"
        divided = shares.divide_gpu(f"GPU {gpu} of {host}", total, engines, {}, advice=[advice])
        for slot, count in zip(slots, divided.values(), strict=True):
            assigned[engine_of[slot.name]].append(shares.MemoryShare(count, total, shared=len(slots) > 1))
    return {name: shares.with_memory_share(config, footprints[name], assigned[name]) for name in folders}


def _meshes(engines: Iterable[str], config: EngineConfig) -> list[tuple[str, str, int]]:
    return [(replica, "engines", config.tp) for name in engines for replica in names_of(name, config.replicas)]


def assign_engines(
    policies: Mapping[str, Policy], paths: Mapping[str, Path]
) -> tuple[dict[str, str], dict[str, dict[str, LoRA]]]:
    """Assign policies whose weights may change to engines. Only adapters on one model share an engine.

    Returns:
        The engine of each policy, called by its first policy, and the adapters that each engine serves.
    """
    engine_of: dict[str, str] = {}
    adapters: dict[str, dict[str, LoRA]] = {}
    by_path: dict[Path, str] = {}
    for name, policy in policies.items():
        engine = engine_of[name] = by_path.setdefault(paths[name], name) if shares_engine(policy) else name
        served = {} if policy.lora is None else {name: policy.lora}
        if isinstance(policy, SnapshotPolicy):
            served = dict.fromkeys(policy.adapters, policy.snapshot_lora)
        adapters.setdefault(engine, {}).update(served)
    return engine_of, adapters


def shares_engine(policy: Policy) -> bool:
    """Return whether a policy whose weights may change is served as adapters, next to others on its model."""
    return policy.lora is not None or isinstance(policy, SnapshotPolicy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Engines for all policies: one per model, or with a store one per policy whose weights may change."""

    engines: Mapping[str, EngineClient]
    """By engine name, the name of its first policy."""
    policy_engines: Mapping[str, PolicyEngine]
    """By policy name, the engine that samples for it, or the adapter in one."""
    planned: Sequence[tuple[str, str, int]] = ()
    """Meshes that share GPUs, whose places are reserved until the end."""

    @classmethod
    async def start(
        cls,
        policies: Mapping[str, Policy],
        config: EngineConfig,
        *,
        store: WeightStoreRef | None = None,
        tuned: Mapping[str, Path] | None = None,
        timeout_s: float = 300.0,
    ) -> Fleet:
        """Start the engines of `policies`.

        Args:
            policies: Policies by name. Without a store, all policies of one model share an engine that samples from
                that model. With a store, only adapters on one model share an engine.
            config: Settings of all engines.
            store: Store of new weights, published under the policy's name, or None for models that never change.
            tuned: Without a store, folders of the adapters of policies with `lora`, by policy name.
            timeout_s: Timeout of each start, in seconds.
        """
        paths = {name: models.resolve(policy.model).resolve() for name, policy in policies.items()}
        warn_about_prompts(policies.values())
        renderers = {name: Renderer.of(paths[name], thinking=policy.thinking) for name, policy in policies.items()}
        engine_of, adapters = assign_engines(policies, paths)
        if store is None:
            first = {path: name for name, path in reversed(paths.items())}
            engine_of, adapters = {name: first[path] for name, path in paths.items()}, {}
            for name in tuned or {}:
                if (lora := policies[name].lora) is not None:
                    adapters.setdefault(engine_of[name], {})[name] = lora
            folders_of_adapters = {name: str(folder) for name, folder in (tuned or {}).items()}
            config = EnginePlan.of(config, adapter_folders=folders_of_adapters)
        folders = {engine: paths[engine] for engine in engine_of.values()}
        config = with_divided_threads(config, len(_meshes(folders, config)))
        configs = divide_gpus(folders, config, adapters)
        planned = _meshes(folders, config) if any(each != config for each in configs.values()) else []
        try:
            if planned:
                mesh.reserve(planned)  # in this order, whichever starts first
            engines = await start_engines(folders, configs, adapters=adapters, store=store, timeout_s=timeout_s)
        except BaseException:
            mesh.unreserve(planned)
            raise
        policy_engines = {
            name: PolicyEngine(engines[engine], renderers[name], name if name in adapters.get(engine, {}) else "")
            for name, engine in engine_of.items()
        }
        return cls(engines=engines, policy_engines=policy_engines, planned=planned)

    async def stop(self) -> None:
        """Stop every engine."""
        await asyncio.gather(*(engine.stop() for engine in self.engines.values()))
        if self.planned:
            mesh.unreserve(self.planned)
