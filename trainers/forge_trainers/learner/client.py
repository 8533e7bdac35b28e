"""The controller's handle to a learner: start it, train it on batches, publish and save its weights.

Every call has a timeout and raises as soon as one rank fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from forge_agents.errors import ActorDiedError, StallError
from forge_agents.models import resolve as models
from forge_agents.policy import LoRA
from forge_agents.runtime import mesh, startup
from forge_agents.runtime.colocation import DeviceAccess, unshared
from forge_agents.runtime.threads import BusyTime, in_thread
from forge_agents.types import EpisodeBatch
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.learner.plan import LearnerPlan
from forge_trainers.learner.rates import with_rate
from forge_trainers.losses.registry import find_loss

if TYPE_CHECKING:
    import torch

    from forge_agents.runtime._monarch import ProcMesh
    from forge_agents.runtime.heartbeat import Heartbeat
    from forge_agents.weights import WeightStoreRef


class Learner:
    """A running learner, created by `start`. After an error a learner can only be stopped."""

    def __init__(
        self,
        name: str,
        *,
        config: LearnerPlan,
        learner_name: str,
        procs: ProcMesh,
        actors: Any,
        world_size: int,
        max_sample_tokens: int,
        compute_dtype: str,
        heartbeat: Heartbeat,
        device_access: DeviceAccess = unshared,
        busy: BusyTime | None = None,
    ) -> None:
        self.name = name
        self.config = config
        """The learner's settings, with a resolved learning rate."""
        self.world_size = world_size
        self.max_sample_tokens = max_sample_tokens
        """Number of tokens of the longest sample that `train_step` accepts."""
        self.compute_dtype = compute_dtype
        """Data type of activations and matrix products, with "auto" resolved: "bfloat16" or "float32"."""
        self.version = 0
        """Version of the weights: number of training steps since the start model."""
        self.last_publish: dict[str, float] = {}
        """Timings of the latest `publish`: ``pack_s``, ``put_s``, and ``bytes``."""
        self._procs = procs
        self._actors = actors
        self._learner_name = learner_name
        self._heartbeat = heartbeat
        self._device_access = device_access
        self._busy = busy or BusyTime()

    @classmethod
    async def start(
        cls,
        config: LearnerConfig,
        *,
        model: str,
        lora: LoRA | None = None,
        temperature: float = 1.0,
        seed: int = 0,
        max_sample_tokens: int | None = None,
        name: str = "learner",
        store: WeightStoreRef | None = None,
        weights_name: str | None = None,
        world_size: int = 1,
        heartbeat_timeout_s: float = 60.0,
        timeout_s: float = 600.0,
    ) -> Learner:
        """Start the learner's processes and load the model.

        Args:
            config: Settings.
            model: Name or folder of a model, as in `fa.Policy`.
            lora: Adapter that is trained instead of the weights.
            temperature: Temperature of the sampler, above 0.
            seed: Random seed.
            max_sample_tokens: Maximum number of tokens of a sample. None: the model's context.
            name: Name of the learner in error messages.
            store: Weight store that `publish` writes to. None: the learner cannot publish.
            weights_name: Name of the published weights. None: `name`.
            world_size: Number of ranks. Each rank is a process.
            heartbeat_timeout_s: Seconds without a heartbeat after which a rank, and so the learner, counts as dead.
            timeout_s: Timeout of the start, in seconds.

        Raises:
            ModelNotFoundError: The model does not exist, or some of its files are missing or incomplete.
            ValueError: The model or the parallel degrees are not supported.
            StallError, ActorDiedError: The timeout passed, or a process ended.
        """
        learner_name = weights_name or name
        plan = LearnerPlan.of(
            config, model=model, lora=lora, temperature=temperature, seed=seed, max_sample_tokens=max_sample_tokens
        )
        started = await cls.start_together(
            {learner_name: plan},
            name=name,
            store=store,
            world_size=world_size,
            heartbeat_timeout_s=heartbeat_timeout_s,
            timeout_s=timeout_s,
        )
        return started[learner_name]

    @classmethod
    async def start_together(
        cls,
        configs: Mapping[str, LearnerPlan],
        *,
        name: str = "learner",
        store: WeightStoreRef | None = None,
        world_size: int = 1,
        heartbeat_timeout_s: float = 60.0,
        timeout_s: float = 600.0,
        device_access: DeviceAccess = unshared,
    ) -> dict[str, Learner]:
        """Start several learners in the same processes. Their adapters share one copy of the model.

        `configs` has settings by the name of the published weights, and `device_access` is the context for computations
        of a learner that shares its GPUs with others. Other arguments and errors are those of `start`. Calls of the
        learners run one at a time. Stopping one learner, or a failure of one, ends all of them.

        Raises:
            ValueError: The learners cannot share a model: all need the same model and LoRA adapters of the same shape.
        """
        _check_shared_model(configs)
        first = next(iter(configs.values()))
        resolving = in_thread(models.resolve, first.model, name=f"model of {name}")
        folder = await mesh.with_deadline(resolving, timeout_s, who=name, what="finding its model")  # may download it
        configs = {key: with_rate(replace(config, model=str(folder))) for key, config in configs.items()}
        # Importing torch and Monarch takes seconds, so this module does not import them.
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
                built, *_ = await heartbeat.guard(building)
            heartbeat.start_timeout()
        except BaseException:
            heartbeat.end()
            await mesh.stop(procs, at_once=True)  # a rank may be waiting for a rank that has ended
            raise
        busy = BusyTime()
        return {
            learner_name: cls(
                name,
                config=config,
                learner_name=learner_name,
                procs=procs,
                actors=actors,
                world_size=world_size,
                max_sample_tokens=built[learner_name][0],
                compute_dtype=built[learner_name][1],
                heartbeat=heartbeat,
                device_access=device_access,
                busy=busy,
            )
            for learner_name, config in configs.items()
        }

    async def lost(self) -> ActorDiedError | StallError:
        """Wait until a rank dies or sends no heartbeat. Returns the error."""
        return await self._heartbeat.lost()

    async def set_total_steps(self, total: int, *, timeout_s: float = 60.0) -> None:
        """Set the run's number of training steps, for a decaying learning rate. See `LearnerCore`."""
        await self._call_ranks("set_total_steps", total, timeout_s=timeout_s)

    @property
    def busy_s(self) -> float:
        """Seconds that the processes spent on training and publishing, for all of their learners."""
        return self._busy.seconds

    async def train_step(
        self, batch: EpisodeBatch, *, temperature: float | None = None, timeout_s: float = 1800.0
    ) -> dict[str, float]:
        """Train on one batch, see `LearnerCore.train_step`.

        Returns the metrics of the first rank. Peak memory is the maximum over the ranks.
        """
        results = await self._call("train_step", batch, temperature, timeout_s=timeout_s)
        metrics: dict[str, float] = results[0]
        self._busy.seconds += max(result["step_s"] for result in results)
        self.version = int(metrics["version"])
        peaks = (name for name in metrics if name.startswith("peak_") and name.endswith("_bytes"))
        return {**metrics, **{name: max(result[name] for result in results) for name in peaks}}

    async def logprobs(self, batch: EpisodeBatch, *, timeout_s: float = 1800.0) -> torch.Tensor:
        """Log-probability of every loss token under the current weights: float32 [T], 0 where masked."""
        logprobs_T: torch.Tensor = (await self._call("logprobs", batch, timeout_s=timeout_s))[0]
        return logprobs_T

    async def save(self, folder: str | Path, *, timeout_s: float = 600.0) -> None:
        """Write a checkpoint. See `LearnerCore.save`."""
        await self.start_save(folder, timeout_s=timeout_s)
        await self.finish_save(timeout_s=timeout_s)

    async def start_save(self, folder: str | Path, *, timeout_s: float = 600.0) -> None:
        """Start to write a checkpoint of the current state. The learner may train while it is written."""
        await self._call("start_save", _absolute(folder), timeout_s=timeout_s)

    async def finish_save(self, *, timeout_s: float = 600.0) -> dict[str, list[int]]:
        """Wait until the checkpoint of `start_save` is written. Returns size and CRCs of its files by name.

        Raises:
            RunFolderError: The checkpoint could not be written.
        """
        by_rank: list[dict[str, list[int]]] = await self._call_ranks("finish_save", timeout_s=timeout_s)
        return {name: sums for files in by_rank for name, sums in files.items()}

    async def load(self, folder: str | Path, *, timeout_s: float = 600.0) -> int:
        """Load a checkpoint. Returns the version of its weights."""
        self.version = int((await self._call("load", _absolute(folder), timeout_s=timeout_s))[0])
        return self.version

    async def export(
        self, folder: str | Path, *, dtype: Literal["bfloat16", "float32"] | None = None, timeout_s: float = 600.0
    ) -> None:
        """Write the weights as a Hugging Face model folder. See `LearnerCore.export`."""
        await self._call("export", _absolute(folder), dtype, timeout_s=timeout_s)

    async def publish(self, *, timeout_s: float = 600.0) -> int:
        """Publish the current weights, or the adapter, to the store. Returns the version of the weights."""
        self.last_publish = (await self._call("publish", timeout_s=timeout_s))[0]
        self._busy.seconds += self.last_publish["pack_s"] + self.last_publish["put_s"]
        return int(self.last_publish["version"])

    async def use_store(self, store: WeightStoreRef, *, timeout_s: float = 60.0) -> None:
        """Publish to `store` from now on, for example because the previous store died."""
        await self._call_ranks("use_store", store, timeout_s=timeout_s)

    async def offload(self, *, timeout_s: float = 600.0) -> None:
        """Move weights and optimizer state from the GPUs to host memory until `onload`. Idempotent.

        A learner that has died is stopped, so its GPU memory is free as well when this returns.
        """
        try:
            await self._call_ranks("offload", timeout_s=timeout_s)
        except ActorDiedError:
            await self.stop()

    async def onload(self, *, timeout_s: float = 600.0) -> None:
        """Move weights and optimizer state back to the GPUs. Idempotent."""
        await self._call_ranks("onload", timeout_s=timeout_s)

    async def stop(self, *, timeout_s: float = 10.0, at_once: bool = False) -> None:
        """End the processes. Idempotent. `at_once` is for processes that may be publishing, see `mesh.stop`."""
        at_once = at_once or self._heartbeat.error is not None
        self._heartbeat.end()
        await mesh.stop(self._procs, timeout_s=timeout_s, at_once=at_once)

    async def _call(self, endpoint: str, *args: Any, timeout_s: float) -> list[Any]:
        """Results of a call that computes on the device, from all ranks."""
        async with self._device_access():
            return await self._call_ranks(endpoint, *args, timeout_s=timeout_s)

    async def _call_ranks(self, endpoint: str, *args: Any, timeout_s: float) -> list[Any]:
        """Results of a call from all ranks. Raises as soon as a rank ends."""
        calling = mesh.call_all(
            self._actors, self.world_size, endpoint, self._learner_name, *args, timeout_s=timeout_s, who=self.name
        )
        return await self._heartbeat.guard(calling)


def _absolute(folder: str | Path) -> str:
    """The absolute path of `folder`, because the processes may have another working folder."""
    return str(Path(folder).absolute())


def _check_shared_model(configs: Mapping[str, LearnerPlan]) -> None:
    first, *others = configs.values()
    if others and (first.lora is None or any((c.model, c.lora) != (first.model, first.lora) for c in others)):
        raise ValueError(
            f"learners {', '.join(configs)} cannot share a model: all need the same model and LoRA adapters of the "
            "same shape. Start them separately"
        )
