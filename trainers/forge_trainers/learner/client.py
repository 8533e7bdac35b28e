"""The controller's side of a learner: start it, feed it batches, get weights out of it.

In: a `LearnerConfig` and `EpisodeBatch`es. Out: metrics, published versions, checkpoints. Waits for the learner's
processes, each time with a deadline, and raises as soon as one rank fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from forge_agents.errors import ActorDiedError, StallError
from forge_agents.models import resolve as models
from forge_agents.runtime import mesh, startup
from forge_agents.runtime.colocation import DeviceAccess, unshared
from forge_agents.runtime.threads import BusyTime, in_thread
from forge_agents.types import EpisodeBatch
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.learner.rates import with_rate
from forge_trainers.losses.registry import find_loss

if TYPE_CHECKING:
    import torch

    from forge_agents.runtime._monarch import ProcMesh
    from forge_agents.runtime.heartbeat import Heartbeat
    from forge_agents.weights import WeightStoreRef

__all__ = ["Learner", "LearnerConfig"]


class Learner:
    """A running learner. Make one with `start`; after an error it can only be stopped."""

    def __init__(
        self,
        name: str,
        *,
        config: LearnerConfig,
        whose: str,
        procs: ProcMesh,
        actors: Any,
        world_size: int,
        max_sample_tokens: int,
        heartbeat: Heartbeat,
        device_access: DeviceAccess = unshared,
        busy: BusyTime | None = None,
    ) -> None:
        self.name = name
        self.config = config
        """Settings it was started with, the learning rate resolved."""
        self.world_size = world_size
        self.max_sample_tokens = max_sample_tokens
        """Tokens of the longest sample that `train_step` takes."""
        self.version = 0
        """Version of the weights: optimiser steps taken since the start model."""
        self.last_publish: dict[str, float] = {}
        """Timings of the latest `publish`: ``pack_s``, ``put_s``, and ``bytes``."""
        self._procs = procs
        self._actors = actors
        self._whose = whose
        self._heartbeat = heartbeat
        self._device_access = device_access
        self._busy = busy or BusyTime()

    @classmethod
    async def start(
        cls,
        config: LearnerConfig,
        *,
        name: str = "learner",
        store: WeightStoreRef | None = None,
        weights_name: str | None = None,
        world_size: int = 1,
        heartbeat_timeout_s: float = 60.0,
        timeout_s: float = 600.0,
    ) -> Learner:
        """Start the learner's processes and load the model.

        Args:
            config: Settings; `model` is a name or a folder, as `fa.Policy` takes it.
            name: Said in errors.
            store: Where `publish` puts weights; None where it is not called.
            weights_name: What the published weights are called; None for `name`.
            world_size: Number of ranks, one process each.
            heartbeat_timeout_s: A rank that says nothing for longer counts as dead, and with it the learner.
            timeout_s: Deadline of the start.

        Raises:
            ModelNotFoundError: There is no such model, or files of it are missing or half written.
            ValueError: The model or the parallel degrees are not supported.
            StallError: The deadline passed.
            ActorDiedError: A process ended.
        """
        whose = weights_name or name
        started = await cls.start_together(
            {whose: config},
            name=name,
            store=store,
            world_size=world_size,
            heartbeat_timeout_s=heartbeat_timeout_s,
            timeout_s=timeout_s,
        )
        return started[whose]

    @classmethod
    async def start_together(
        cls,
        configs: Mapping[str, LearnerConfig],
        *,
        name: str = "learner",
        store: WeightStoreRef | None = None,
        world_size: int = 1,
        heartbeat_timeout_s: float = 60.0,
        timeout_s: float = 600.0,
        device_access: DeviceAccess = unshared,
    ) -> dict[str, Learner]:
        """As `start`, for learners in one set of processes: their adapters share one copy of the model.

        Other arguments are those of `start`. Each learner works as if it were alone; calls that arrive at the same time
        are done one after the other. One that is stopped, or fails, takes the others with it.

        Args:
            configs: By what their published weights are called. Several need adapters of one shape on one model.
            device_access: What its work runs in, where others use the same GPUs; they `park` and `unpark` it.

        Raises:
            ValueError: The learners cannot share a model. Otherwise as `start`.
        """
        first, *others = configs.values()
        if others and (first.lora is None or any((c.model, c.lora) != (first.model, first.lora) for c in others)):
            raise ValueError(
                f"learners {', '.join(configs)} cannot share a model: each needs a LoRA adapter of one shape on one "
                "model; start them apart"
            )
        found = in_thread(models.resolve, first.model, name=f"model of {name}")
        folder = await mesh.with_deadline(found, timeout_s, who=name, what="finding its model")  # it may be on a hub
        configs = {whose: with_rate(replace(config, model=str(folder))) for whose, config in configs.items()}
        # torch and Monarch load here, not when this module is imported
        from forge_agents.runtime.heartbeat import Heartbeat
        from forge_trainers.learner.actor import LearnerActor

        procs = mesh.spawn_procs(name, procs=world_size, role="learner", threads=first.threads)
        heartbeat = Heartbeat(procs, world_size, name=name, heartbeat_timeout_s=heartbeat_timeout_s)
        what = models.display_name(Path(first.model)) + (f", {world_size} processes" if world_size > 1 else "")
        try:
            on = mesh.hardware_of(procs, threads=first.threads and first.threads * world_size)
            with startup.track("learner", name, what, on=on):
                if world_size > 1:
                    await heartbeat.guard(mesh.exchange_addresses(procs, timeout_s, who=name))
                losses = {config.loss: find_loss(config.loss) for config in configs.values()}
                actors = procs.spawn("learner", LearnerActor, configs, name, store, losses)
                building = mesh.call_all(actors, world_size, "build", timeout_s=timeout_s, who=name)
                room, *_ = await heartbeat.guard(building)
            heartbeat.start_timeout()
        except BaseException:
            heartbeat.end()
            await mesh.stop(procs, at_once=True)  # a rank may wait for another that is gone
            raise
        busy = BusyTime()
        return {
            whose: cls(
                name,
                config=config,
                whose=whose,
                procs=procs,
                actors=actors,
                world_size=world_size,
                max_sample_tokens=room[whose],
                heartbeat=heartbeat,
                device_access=device_access,
                busy=busy,
            )
            for whose, config in configs.items()
        }

    async def lost(self) -> ActorDiedError | StallError:
        """Wait until a rank dies or falls silent; returns what was seen of it."""
        return await self._heartbeat.lost()

    async def set_total_steps(self, total: int, *, timeout_s: float = 60.0) -> None:
        """Say how many optimiser steps the run has, for a learning rate that falls; see `LearnerCore`."""
        await self._tell("set_total_steps", total, timeout_s=timeout_s)

    @property
    def busy_s(self) -> float:
        """Seconds in which its processes learned or published, for it or others in them, by their own clocks."""
        return self._busy.seconds

    async def train_step(
        self, batch: EpisodeBatch, *, temperature: float | None = None, timeout_s: float = 1800.0
    ) -> dict[str, float]:
        """Learn from one batch, sampled at `temperature`; None: that of the settings.

        Returns:
            The metrics of `LearnerCore.train_step`, from the first rank; peaks of memory are the largest of all.
        """
        results = await self._call("train_step", batch, temperature, timeout_s=timeout_s)
        metrics: dict[str, float] = results[0]
        self._busy.seconds += max(result["step_s"] for result in results)
        self.version = int(metrics["version"])
        peaks = (name for name in metrics if name.startswith("peak_") and name.endswith("_bytes"))
        return {**metrics, **{name: max(result[name] for result in results) for name in peaks}}

    async def logprobs(self, batch: EpisodeBatch, *, timeout_s: float = 1800.0) -> torch.Tensor:
        """The current weights' log-probability of every loss token: float32 [T], 0 where masked."""
        logprobs_T: torch.Tensor = (await self._call("logprobs", batch, timeout_s=timeout_s))[0]
        return logprobs_T

    async def save(self, folder: str | Path, *, timeout_s: float = 600.0) -> None:
        """Write a checkpoint, all or nothing; see `LearnerCore.save`."""
        await self.start_save(folder, timeout_s=timeout_s)
        await self.finish_save(timeout_s=timeout_s)

    async def start_save(self, folder: str | Path, *, timeout_s: float = 600.0) -> None:
        """Begin to write a checkpoint of the present state; the learner may be used meanwhile."""
        await self._call("start_save", _absolute(folder), timeout_s=timeout_s)

    async def finish_save(self, *, timeout_s: float = 600.0) -> dict[str, list[int]]:
        """Wait for the checkpoint that `start_save` began. Raises RunFolderError where it cannot be written.

        Returns:
            Size and CRCs of its files, by name; see `forge_agents.files.Sums`.
        """
        by_rank: list[dict[str, list[int]]] = await self._tell("finish_save", timeout_s=timeout_s)
        return {name: sums for own in by_rank for name, sums in own.items()}

    async def load(self, folder: str | Path, *, timeout_s: float = 600.0) -> int:
        """Continue from a checkpoint. Returns its version."""
        self.version = int((await self._call("load", _absolute(folder), timeout_s=timeout_s))[0])
        return self.version

    async def export(
        self,
        folder: str | Path,
        *,
        dtype: Literal["bfloat16", "float32"] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Write a Hugging Face model folder; see `LearnerCore.export`."""
        await self._call("export", _absolute(folder), dtype, timeout_s=timeout_s)

    async def publish(self, *, timeout_s: float = 600.0) -> int:
        """Put the current weights, or the adapter, into the store; see `LearnerCore.published`.

        Returns:
            Their version.
        """
        self.last_publish = (await self._call("publish", timeout_s=timeout_s))[0]
        self._busy.seconds += self.last_publish["pack_s"] + self.last_publish["put_s"]
        return int(self.last_publish["version"])

    async def use_store(self, store: WeightStoreRef, *, timeout_s: float = 60.0) -> None:
        """From now on publish to `store`, which took the place of one that died."""
        await self._tell("use_store", store, timeout_s=timeout_s)

    async def park(self, *, timeout_s: float = 600.0) -> None:
        """Leave the GPUs: weights and moments go to the host's memory until `unpark`. Twice is no error.

        One that has died has left them when this returns.
        """
        try:
            await self._tell("park", timeout_s=timeout_s)
        except ActorDiedError:
            await self.stop()

    async def unpark(self, *, timeout_s: float = 600.0) -> None:
        """Come back to the GPUs. Twice is no error."""
        await self._tell("unpark", timeout_s=timeout_s)

    async def stop(self, *, timeout_s: float = 10.0, at_once: bool = False) -> None:
        """End the processes; `at_once` where they may be publishing, see `mesh.stop`. Twice is no error."""
        at_once = at_once or self._heartbeat.error is not None
        self._heartbeat.end()
        await mesh.stop(self._procs, timeout_s=timeout_s, at_once=at_once)

    async def _call(self, endpoint: str, *args: Any, timeout_s: float) -> list[Any]:
        """What every rank answers to what it computes on its device."""
        async with self._device_access():
            return await self._tell(endpoint, *args, timeout_s=timeout_s)

    async def _tell(self, endpoint: str, *args: Any, timeout_s: float) -> list[Any]:
        """What every rank answers, or at once the end of one."""
        calling = mesh.call_all(
            self._actors, self.world_size, endpoint, self._whose, *args, timeout_s=timeout_s, who=self.name
        )
        return await self._heartbeat.guard(calling)


def _absolute(folder: str | Path) -> str:
    """The processes may have another working folder."""
    return str(Path(folder).absolute())
