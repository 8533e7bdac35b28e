"""Several engines at once: one for each model that plays.

In: policies and engine settings. Out: running engines with their renderers. Waits for every start, with a deadline.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from forge_agents.errors import HostError, ModelNotFoundError
from forge_agents.models import resolve as models
from forge_agents.models.sizes import ModelSize
from forge_agents.policy import LoRA, Policy
from forge_agents.rollout.players import PolicyEngine
from forge_agents.rollout.rendering import Renderer
from forge_agents.runtime import mesh
from forge_agents.runtime.colocation import DeviceAccess, unshared
from forge_agents.runtime.faults import Faults
from forge_agents.runtime.hosts import ProcessSlot
from forge_agents.runtime.machine import visible_gpus
from forge_agents.runtime.threads import all_or_first_error
from forge_agents.serving import memory, shares
from forge_agents.serving.config import EngineConfig
from forge_agents.serving.engine import HEARTBEAT_TIMEOUT_S
from forge_agents.serving.replicas import Replicas, names_of

if TYPE_CHECKING:
    from forge_agents.weights.store import WeightStoreRef


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
) -> dict[str, Replicas]:
    """Start engines for each model folder, all at once; where one fails, the others are stopped.

    The rest is as in `Replicas.start`.

    Args:
        folders: Model folders by engine name.
        configs: Settings by engine name, `replicas` among them; `model` and `adapters` are replaced. See
            `check_named_by_policies`.
        adapters: Adapters that an engine serves, by engine name and their own; None: none.
        store: Where engines find new weights; None for models that never change.
        faults: Counts deaths; None allows `Faults`'s usual number for all of them together.
    """
    shared = Faults() if faults is None else faults
    starts = (
        Replicas.start(
            replace(configs[name], model=str(folder), adapters=(adapters or {}).get(name, {})),
            name=name,
            store=store,
            faults=shared,
            heartbeat_timeout_s=heartbeat_timeout_s,
            timeout_s=timeout_s,
            device_access=device_access,
        )
        for name, folder in folders.items()
    )
    engines = await all_or_first_error(starts, Replicas.stop)
    return dict(zip(folders, engines, strict=True))


def check_named_by_policies(config: EngineConfig, folders: Iterable[Path]) -> None:
    """Refuse what settings of several engines say of one model, which nobody would look at: policies say it.

    Args:
        config: Settings of all engines.
        folders: Of the policies' models.

    Raises:
        ValueError: It names another model than the policies do, or adapters.
    """
    known = {folder.resolve() for folder in folders}
    if config.model and Path(config.model).resolve() not in known:
        raise ValueError(
            f"engine.model={config.model!r} is the model of no policy; engines serve those that policies name, "
            f"{', '.join(map(str, sorted(known)))}: leave it out, or name it in a Policy"
        )
    for name in ("adapters", "adapter_folders"):
        if given := getattr(config, name):
            raise ValueError(
                f"engine.{name} names {', '.join(given)}; engines serve the adapters of policies, which begin at "
                "zero or as their run left them: leave it out, and give the Policy its lora"
            )


def with_own_threads(config: EngineConfig, engines: int) -> EngineConfig:
    """`config` with threads where nobody chose them: without a GPU several `engines` of one host divide its cores.

    With all cores for each, threads wait for each other: on two cores two engines took four times as long.
    """
    processes = engines * config.tp
    if config.threads is not None or processes < 2 or visible_gpus() or mesh.has_remote_hosts():
        return config
    return replace(config, threads=max(1, len(os.sched_getaffinity(0)) // processes))


def shared(
    folders: Mapping[str, Path], config: EngineConfig, adapters: Mapping[str, Mapping[str, LoRA]]
) -> dict[str, EngineConfig]:
    """`config` for each engine, with what it may take of a GPU where several would be on one; as a run divides them.

    Args:
        folders: Model folders by engine name.
        config: Settings of all.
        adapters: That each serves.

    Raises:
        HostError: They do not fit.
    """
    meshes = _meshes(folders, config)
    seats = mesh.preview_placement(meshes) if len(meshes) > 1 and visible_gpus() else []
    on: dict[tuple[str, str], list[ProcessSlot]] = defaultdict(list)
    for seat in seats:
        if seat.gpu:
            on[seat.host, seat.gpu].append(seat)
    most = max(map(len, on.values()), default=1)
    if most == 1:
        return dict.fromkeys(folders, config)
    try:
        models_served = {home: _footprint(folder, config, adapters.get(home, {})) for home, folder in folders.items()}
    except ModelNotFoundError:  # an architecture whose sizes have other names
        models_served = {}
    if not models_served or not all(seat.gpu_bytes for seat in seats):
        share = config.gpu_memory_utilization or round(memory.USUAL_SHARE / most, 4)
        return dict.fromkeys(folders, replace(config, gpu_memory_utilization=share))
    home_of = {name: home for home in folders for name in names_of(home, config.replicas)}
    rooms: dict[str, list[shares.Room]] = defaultdict(list)
    for (host, gpu), sitting in on.items():
        total, alone = sitting[0].gpu_bytes, len(sitting) == 1
        wishes = [
            shares.wish_of(seat.name, models_served[home_of[seat.name]], config, total, alone=alone) for seat in sitting
        ]
        room = wishes[0].taken if alone else int(total * shares.ROOM)
        if (found := shares.divided(room, wishes)) is None and not alone:
            needs = shares.said((f"engine {wish.name}", wish.needs) for wish in wishes)
            if (asked := config.gpu_memory_utilization) is not None:
                needs = f"gpu_memory_utilization={asked} gives each {total * asked / 1e9:.1f}; {needs}"
            raise HostError(
                f"GPU {gpu} of {host} has {total / 1e9:.1f} GB, of which its {len(wishes)} engines may take "
                f"{room / 1e9:.1f}, and {needs}: let fewer models play at once, lower max_model_len, or take more GPUs"
            )
        for name, bytes_ in (found or {}).items():
            rooms[home_of[name]].append(shares.Room(bytes_, total, shared=not alone))
    return {home: shares.told(config, models_served[home], rooms[home]) for home in folders}


def _meshes(folders: Iterable[str], config: EngineConfig) -> list[tuple[str, str, int]]:
    return [(name, "engines", config.tp) for home in folders for name in names_of(home, config.replicas)]


def _footprint(folder: Path, config: EngineConfig, adapters: Mapping[str, LoRA]) -> shares.Footprint:
    return shares.Footprint(
        size=ModelSize.of(folder), dtype=models.dtype_of(folder), tp=config.tp, adapters=tuple(adapters.values())
    )


def homes_of(
    policies: Mapping[str, Policy], paths: Mapping[str, Path]
) -> tuple[dict[str, str], dict[str, dict[str, LoRA]]]:
    """Who shares an engine where weights may change: adapters on one model.

    Returns:
        The engine of each policy, called by its first policy; and by engine the adapters that it serves.
    """
    homes: dict[str, str] = {}
    adapters: dict[str, dict[str, LoRA]] = {}
    shared: dict[Path, str] = {}
    for name, policy in policies.items():
        home = homes[name] = name if policy.lora is None else shared.setdefault(paths[name], name)
        adapters.setdefault(home, {}).update({} if policy.lora is None else {name: policy.lora})
    return homes, adapters


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Engines, one for each model that plays; with a store, one for each policy whose weights may change."""

    engines: Mapping[str, Replicas]
    """By name."""
    policy_engines: Mapping[str, PolicyEngine]
    """By policy name, the engine, or the adapter in one, that samples for it."""
    planned: Sequence[tuple[str, str, int]] = ()
    """Meshes that share GPUs, whose places are kept until the end."""

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
        """Start an engine for each different model of `policies`, which are by name.

        Args:
            policies: Who plays. An engine is called by the first of its policies. Without a store, those of one model
                share one, and it samples from that model; with one, adapters on one model do, and nobody else.
            store: Where engines find new weights, published under the policy's name; None for models that never change.
            tuned: Without a store: folders of the adapters that policies with `lora` play with, by policy name.
        """
        paths = {name: models.resolve(policy.model).resolve() for name, policy in policies.items()}
        check_named_by_policies(config, paths.values())
        renderers = {name: Renderer.of(paths[name], thinking=policy.thinking) for name, policy in policies.items()}
        homes, adapters = homes_of(policies, paths)
        if store is None:
            first = {path: name for name, path in reversed(paths.items())}
            homes, adapters = {name: first[path] for name, path in paths.items()}, {}
            for name in tuned or {}:
                if (lora := policies[name].lora) is not None:
                    adapters.setdefault(homes[name], {})[name] = lora
            config = replace(config, adapter_folders={name: str(folder) for name, folder in (tuned or {}).items()})
        folders = {home: paths[home] for home in homes.values()}
        config = with_own_threads(config, len(_meshes(folders, config)))
        configs = shared(folders, config, adapters)
        planned = _meshes(folders, config) if any(own != config for own in configs.values()) else []
        try:
            if planned:
                mesh.reserve(planned)  # whatever starts first
            engines = await start_engines(folders, configs, adapters=adapters, store=store, timeout_s=timeout_s)
        except BaseException:
            mesh.unreserve(planned)
            raise
        own = {name for adapted in adapters.values() for name in adapted}
        served = {
            name: PolicyEngine(engines[home], renderers[name], name if name in own else "")
            for name, home in homes.items()
        }
        return cls(engines=engines, policy_engines=served, planned=planned)

    async def stop(self) -> None:
        """Stop every engine."""
        await asyncio.gather(*(engine.stop() for engine in self.engines.values()))
        mesh.unreserve(self.planned)
