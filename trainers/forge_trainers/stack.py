"""The processes of one experiment: the weight store, an engine per model policy, a learner per trainable one.

In: policies and settings. Out: running actors that know each other. Waits for every start, each with a deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from forge_agents import mesh, models
from forge_agents.players import Served
from forge_agents.policy import Policy
from forge_agents.rendering import Renderer
from forge_agents.rollout import all_or_first_error
from forge_agents.serving import Engine
from forge_agents.weights import WeightStore
from forge_trainers.learner import Learner

if TYPE_CHECKING:
    from forge_trainers.config import GRPOConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Running actors, by policy name."""

    store: WeightStore
    engines: Mapping[str, Engine]
    learners: Mapping[str, Learner]
    renderers: Mapping[str, Renderer]

    @classmethod
    async def start(cls, policies: Mapping[str, Policy], config: GRPOConfig, *, folder: Path) -> Stack:
        """Start everything at once; whatever fails to start stops the rest.

        Args:
            policies: The model policies of the run, by name.
            folder: Where learners put what they dump.
        """
        paths = {name: models.resolve(policy.model) for name, policy in policies.items()}
        renderers = {name: Renderer.of(path) for name, path in paths.items()}
        store = await WeightStore.start(timeout_s=config.start_timeout_s)

        async def engine(name: str) -> Engine:
            settings = replace(config.engine, model=str(paths[name]))
            return await Engine.start(settings, name=name, store=store.ref, timeout_s=config.start_timeout_s)

        async def learner(name: str) -> Learner:
            settings = replace(
                config.learner,
                model=str(paths[name]),
                temperature=policies[name].sampling.temperature,
                dump_folder=str(folder / "learner" / name),
            )
            return await Learner.start(
                settings, name=name, store=store.ref, world_size=config.learner_procs, timeout_s=config.start_timeout_s
            )

        trainable = [name for name, policy in policies.items() if policy.trainable]
        try:
            started = await all_or_first_error([*map(engine, policies), *map(learner, trainable)])
        except BaseException:
            await mesh.shutdown_all()
            raise
        return cls(
            store=store,
            engines=dict(zip(policies, started[: len(policies)], strict=True)),
            learners=dict(zip(trainable, started[len(policies) :], strict=True)),
            renderers=renderers,
        )

    @property
    def served(self) -> dict[str, Served]:
        """What players need of each engine."""
        return {name: Served(engine, self.renderers[name]) for name, engine in self.engines.items()}

    async def sync(self) -> dict[str, float]:
        """Carry every learner's weights to its engine. Returns the seconds it took."""
        started = time.perf_counter()
        await all_or_first_error(map(self._sync_one, self.learners))
        return {"time/sync_s": time.perf_counter() - started}

    async def _sync_one(self, name: str) -> None:
        version = await self.learners[name].publish()
        await self.engines[name].load_weights(version)

    async def stop(self) -> None:
        """Stop every process."""
        await asyncio.gather(
            *(learner.stop() for learner in self.learners.values()), *(engine.stop() for engine in self.engines.values())
        )
        await self.store.stop()
