"""The processes of one experiment: the weight store, an engine per model policy, a learner per trainable one.

In: policies and settings. Out: running actors that know each other. Waits for every start, each with a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from forge_agents import mesh, models
from forge_agents.faults import Faults
from forge_agents.players import Served
from forge_agents.policy import Policy
from forge_agents.rendering import Renderer
from forge_agents.rollout import all_or_first_error
from forge_agents.serving import Replicas
from forge_agents.serving.fleet import start_engines
from forge_agents.weights import WeightStore
from forge_trainers.learner import Learner

if TYPE_CHECKING:
    from forge_trainers.config import GRPOConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Running actors, by policy name."""

    policies: Mapping[str, Policy]
    config: GRPOConfig
    folder: Path
    """Where learners put what they dump."""
    store: WeightStore
    engines: Mapping[str, Replicas]
    faults: Faults
    """Deaths so far, and how many are allowed."""
    renderers: Mapping[str, Renderer]
    learners: dict[str, Learner] = field(default_factory=dict)
    """Empty until `start_learners`."""

    @classmethod
    async def start(cls, policies: Mapping[str, Policy], config: GRPOConfig, *, folder: Path) -> Stack:
        """Start the store and the engines; whatever fails to start stops the rest."""
        paths = {name: models.resolve(policy.model) for name, policy in policies.items()}
        renderers = {name: Renderer.of(path) for name, path in paths.items()}
        faults = Faults(max_respawns=config.max_respawns, file=folder / "faults.jsonl")
        store = await WeightStore.start(silence_s=config.silence_s, timeout_s=config.start_timeout_s)
        try:
            engines = await start_engines(
                paths,
                replace(config.engine, seed=config.seed),
                store=store.ref,
                faults=faults,
                silence_s=config.silence_s,
                timeout_s=config.start_timeout_s,
            )
        except BaseException:
            await mesh.shutdown_all()
            raise
        return cls(
            policies=policies,
            config=config,
            folder=folder,
            store=store,
            engines=engines,
            faults=faults,
            renderers=renderers,
        )

    async def start_learners(self) -> None:
        """Start a learner for every trainable policy. Twice is no error."""
        names = [name for name, policy in self.policies.items() if policy.trainable and name not in self.learners]
        started = await all_or_first_error(map(self._start_learner, names))
        self.learners.update(zip(names, started, strict=True))

    async def _start_learner(self, name: str) -> Learner:
        policy = self.policies[name]
        settings = replace(
            self.config.learner,
            model=str(models.resolve(policy.model)),
            temperature=policy.sampling.temperature,
            lora=policy.lora,
            seed=self.config.seed,
            dump_folder=str(self.folder / "learner" / name),
        )
        return await Learner.start(
            settings,
            name=f"{name}-learner",
            weights_name=name,
            store=self.store.ref,
            world_size=self.config.learner_procs,
            timeout_s=self.config.start_timeout_s,
        )

    @property
    def served(self) -> dict[str, Served]:
        """What players need of each engine."""
        return {name: Served(engine, self.renderers[name]) for name, engine in self.engines.items()}

    async def sync(self) -> None:
        """Carry every learner's weights to its engine."""
        await all_or_first_error(map(self._sync_one, self.learners))

    async def _sync_one(self, name: str) -> None:
        version = await self.learners[name].publish()
        await self.engines[name].load_weights(version)

    async def stop(self) -> None:
        """Stop every process."""
        await asyncio.gather(
            *(learner.stop() for learner in self.learners.values()),
            *(engine.stop() for engine in self.engines.values()),
        )
        await self.store.stop()
