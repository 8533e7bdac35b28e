"""Several engines at once: one for each model that plays.

In: policies and engine settings. Out: running engines with their renderers. Waits for every start, with a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from forge_agents.models import resolve as models
from forge_agents.policy import LoRA, Policy
from forge_agents.rollout.players import Served
from forge_agents.rollout.rendering import Renderer
from forge_agents.runtime.faults import Faults
from forge_agents.runtime.waits import all_or_first_error
from forge_agents.serving.config import EngineConfig
from forge_agents.serving.engine import SILENCE_S
from forge_agents.serving.replicas import Replicas

if TYPE_CHECKING:
    from forge_agents.weights.store import WeightStoreRef


async def start_engines(
    folders: Mapping[str, Path],
    config: EngineConfig,
    *,
    adapters: Mapping[str, Mapping[str, LoRA]] | None = None,
    store: WeightStoreRef | None = None,
    faults: Faults | None = None,
    silence_s: float = SILENCE_S,
    timeout_s: float = 300.0,
) -> dict[str, Replicas]:
    """Start ``config.replicas`` engines for each model folder, all at once; where one fails, the others are stopped.

    Args:
        folders: Model folders by engine name.
        config: Settings of all; its `model` and `adapters` are replaced.
        adapters: Adapters that an engine serves, by engine name and their own; None: none.
        store: Where engines find new weights; None for models that never change.
        faults: Counts deaths; None allows `Faults`'s usual number for all of them together.
        silence_s: As in `Engine.start`.
        timeout_s: Deadline of each start.

    Raises:
        StallError, ValueError, Exception: As `Engine.start`; the first failure.
    """
    shared = Faults() if faults is None else faults
    starts = (
        Replicas.start(
            replace(config, model=str(folder), adapters=(adapters or {}).get(name, {})),
            name=name,
            store=store,
            faults=shared,
            silence_s=silence_s,
            timeout_s=timeout_s,
        )
        for name, folder in folders.items()
    )
    engines = await all_or_first_error(starts, Replicas.stop)
    return dict(zip(folders, engines, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Engines, one for each model that plays. Policies with one model share an engine."""

    engines: Mapping[str, Replicas]
    """By name."""
    served: Mapping[str, Served]
    """What players need, by policy name."""

    @classmethod
    async def start(
        cls,
        policies: Mapping[str, Policy],
        config: EngineConfig,
        *,
        store: WeightStoreRef | None = None,
        timeout_s: float = 300.0,
    ) -> Fleet:
        """Start an engine for each different model of `policies`, which are by name.

        Args:
            policies: Who plays. An engine is called by the first policy of its model.
            config: Settings of every engine.
            store: Where engines find new weights, published under the engine's name; None for models that never change.
            timeout_s: Deadline of each start.
        """
        paths = {name: models.resolve(policy.model).resolve() for name, policy in policies.items()}
        owner: dict[Path, str] = {}
        for name, path in paths.items():
            owner.setdefault(path, name)
        renderers = {path: Renderer.of(path) for path in owner}
        folders = {name: path for path, name in owner.items()}
        engines = await start_engines(folders, config, store=store, timeout_s=timeout_s)
        served = {name: Served(engines[owner[path]], renderers[path]) for name, path in paths.items()}
        return cls(engines=engines, served=served)

    async def stop(self) -> None:
        """Stop every engine."""
        await asyncio.gather(*(engine.stop() for engine in self.engines.values()))
