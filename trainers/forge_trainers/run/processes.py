"""Processes of one run: the weight store, an engine per model, a learner per trainable policy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from forge_agents.errors import ActorDiedError, RespawnLimitError, StallError
from forge_agents.models import resolve as models
from forge_agents.models.exports import warn_about_prompts
from forge_agents.policy import Policy
from forge_agents.rollout.policy_engine import PolicyEngine
from forge_agents.rollout.rendering import Renderer
from forge_agents.runtime import mesh
from forge_agents.runtime import stalls as _stalls
from forge_agents.runtime.colocation import Colocation, DeviceAccess, unshared
from forge_agents.runtime.faults import Fault, Faults
from forge_agents.runtime.hosts import Hosts, ProcessSlot
from forge_agents.runtime.threads import all_or_first_error
from forge_agents.serving import EngineClient
from forge_agents.serving.fleet import assign_engines, start_engines
from forge_agents.weights import WeightStore, WeightStoreRef
from forge_trainers.learner.client import Learner
from forge_trainers.learner.plan import LearnerPlan
from forge_trainers.run.config import ProcessConfig
from forge_trainers.run.parts import OwnEngine, OwnModel, check_models
from forge_trainers.run.placement import place_here
from forge_trainers.run.plan import (
    STORE,
    Plan,
    check_hosts,
    compute_processes,
    learner_groups,
    learner_name,
    meshes_of,
    resolve,
    teachers_of,
    threads_of,
)

T = TypeVar("T")
_FAULTS = "faults.jsonl"
MAX_RESPAWNS = 8
"""Number of dead processes that a session replaces. One more, or two in one place, ends it."""


@dataclass(slots=True, kw_only=True)
class Processes:
    """Running actors of a run, by policy.

    Engines that die are replaced by `EngineClient`. A weight store that dies is replaced here: learners publish their
    weights to the new one. A dead learner is reported to the caller, which knows the steps that its checkpoint lacks.
    """

    policies: Mapping[str, Policy]
    config: ProcessConfig
    plan: Plan
    folder: Path
    """Run folder."""
    store: WeightStore
    faults: Faults
    """Deaths so far, and the number that is allowed."""
    hosts: Hosts
    engines: Mapping[str, EngineClient] = field(default_factory=dict)
    """By the name of the first policy that each serves."""
    policy_engines: dict[str, PolicyEngine] = field(default_factory=dict)
    """Engine of each policy, or the adapter in an engine, with its renderer."""
    learners: dict[str, Learner] = field(default_factory=dict)
    """Empty until `start_learners`, and again after a learner died."""
    republish: dict[str, Callable[[WeightStoreRef], Awaitable[None]]] = field(default_factory=dict)
    """Publish weights that come from no learner to a store that replaces another one, by the name of the weights."""
    _learner_access: DeviceAccess = unshared
    """Context in which learners compute, if they share GPUs with engines."""
    _resident: dict[str, list[Learner]] = field(default_factory=dict)
    """Learners with memory on the GPUs, by the name of their processes."""
    _lost: list[Fault] = field(default_factory=list)
    _mending: asyncio.Lock = field(default_factory=asyncio.Lock)
    _mends: set[asyncio.Task[None]] = field(default_factory=set)
    _store_watch: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        policies: Mapping[str, Policy],
        config: ProcessConfig,
        *,
        folder: Path,
        hosts: Hosts | None = None,
        learn: bool = False,
        judges: Sequence[OwnEngine] = (),
        held: Sequence[OwnModel] = (),
    ) -> Processes:
        """Start hosts, weight store and engines. If a start fails, started processes are stopped.

        Args:
            policies: By name.
            config: User settings.
            folder: Run folder.
            hosts: Hosts of the processes. None: this host.
            learn: Whether to start the learners as well, at the same time unless they share a GPU with engines.
            judges: Engines of LLM judges, which start with the first score and are placed here.
            held: Models that this process loads with the first score. Their memory is counted here.
        """
        hosts, paths = hosts or Hosts(), {name: models.resolve(policy.model) for name, policy in policies.items()}
        warn_about_prompts(policies.values())
        teachers = [models.resolve(name) for name in teachers_of(policies.values(), config)]
        renderers = {
            name: Renderer.of(paths[name], thinking=policy.thinking) for name, policy in policies.items()
        }  # raises for a model without chat template, before anything starts
        compute = compute_processes(policies, paths, config)
        meshes = meshes_of(compute)
        check_hosts(compute, hosts, config)
        check_models(compute, config.engine)
        folder.mkdir(parents=True, exist_ok=True)
        later = [(judge.name, "judges", judge.config.tp) for judge in judges]
        await mesh.launch_hosts(hosts, paths=(*paths.values(), *teachers, folder), meshes=[*meshes, *later])
        faults = Faults(max_respawns=MAX_RESPAWNS, file=folder / _FAULTS)
        try:
            engines, learners = place_here(
                compute, engine=config.engine, judges=judges, held=held, turns=config.colocate
            )
            homes, adapters = assign_engines(policies, paths)
            threads = threads_of(config, hosts, engines=len(adapters), learners=len(learner_groups(policies, paths)))
            plan = resolve(policies, paths, config, out_dir=folder, engines=engines, learners=learners, threads=threads)
            plan.write(folder)
            share_gpus = _share_gpus(mesh.preview_placement(meshes))  # before the store, which would change it
            started = cls(
                policies=policies,
                config=config,
                plan=plan,
                folder=folder,
                store=await _start_store(config, hosts, faults),
                faults=faults,
                hosts=hosts,
            )
            await started._start_all(learn=learn, at_once=not share_gpus)
        except BaseException:
            await mesh.shutdown_all()
            raise
        for name, policy in policies.items():
            adapter = "" if policy.lora is None else name
            started.policy_engines[name] = PolicyEngine(started.engines[homes[name]], renderers[name], adapter)
        started._store_watch = asyncio.ensure_future(started._watch_store())
        _stalls.register("run", started.snapshot)
        return started

    async def _start_all(self, *, learn: bool, at_once: bool) -> None:
        """Start the engines and, with `learn`, the learners: at the same time, or one after the other."""
        plans = self.plan.engines
        starting = start_engines(
            {name: Path(plan.model) for name, plan in plans.items()},
            plans,
            adapters={name: plan.adapters for name, plan in plans.items()},
            store=self.store.ref,
            faults=self.faults,
            heartbeat_timeout_s=self.config.heartbeat_timeout_s,
            timeout_s=self.hosts.start_timeout_s,
            device_access=self._colocate() if any(plan.sleeps for plan in plans.values()) else unshared,
        )

        async def start() -> None:
            self.engines = await starting

        if learn and at_once:
            await all_or_first_error((start(), self.start_learners()))
        else:
            await start()
            if learn:
                await self.start_learners()

    def _colocate(self) -> DeviceAccess:
        """Let engines and learners use their GPUs one after the other. Returns the engines' context."""
        colocation = Colocation("engines", self.config.stage_timeout_s)

        def resident() -> list[Learner]:
            return [learner for learners in self._resident.values() for learner in learners]

        self._learner_access = colocation.register(
            "learner",
            offload=lambda: all_or_first_error(learner.offload() for learner in resident()),
            onload=lambda: all_or_first_error(learner.onload() for learner in resident()),
        )
        return colocation.register(
            "engines",
            offload=lambda: all_or_first_error(engine.sleep() for engine in self.engines.values()),
            onload=lambda: all_or_first_error(engine.wake() for engine in self.engines.values()),
        )

    def busy_s(self) -> dict[str, float]:
        """Return the seconds in which engines and learners computed, as means over all of them."""
        engines = [busy_s for engine in self.engines.values() for busy_s in engine.busy_s.values()]
        learners = [learner.busy_s for learner in self.learners.values()]
        return {name: sum(each) / len(each) for name, each in (("engines", engines), ("learner", learners)) if each}

    async def engines_memory(self) -> dict[str, float]:
        """Return ``engines/peak_device_bytes`` and ``engines/device_used_bytes`` of the engine that has most.

        Empty on CPU, and if an engine dies meanwhile.
        """
        states = []
        with contextlib.suppress(ActorDiedError, StallError, RuntimeError):  # RuntimeError: the engine's step failed
            for engine in self.engines.values():
                states += [*(await engine.infos()).values()] if engine.on_device else []
        names = ("peak_device_bytes", "device_used_bytes")
        return {f"engines/{name}": float(max(getattr(state, name) for state in states)) for name in names if states}

    async def start_learners(self, policies: Mapping[str, Policy] | None = None) -> None:
        """Start a learner for every trainable policy that has none. If one fails to start, the others are stopped.

        `policies` are those of the present call, with other settings of their learners. None: those of the start.
        """
        if policies is not None:
            self._plan_learners(policies)
        if (ended := self.store.heartbeat.error) is not None:  # it died with the learner's host
            await self._mend_store(self.store, ended)
        folders = {name: Path(plan.model) for name, plan in self.plan.learners.items()}
        trained = {name: self.policies[name] for name in folders if name not in self.learners}
        plans = [{name: self.plan.learners[name] for name in names} for names in learner_groups(trained, folders)]

        async def stop(those: Mapping[str, Learner]) -> None:
            await next(iter(those.values())).stop()  # they share their processes

        for started in await all_or_first_error(map(self._start_learners, plans), stop):
            self.learners.update(started)
        while self._lost:
            self.faults.recovered(self._lost.pop())

    @property
    def max_sample_tokens(self) -> dict[str, int]:
        """Maximum number of tokens of a sample, by policy."""
        return {name: learner.max_sample_tokens for name, learner in self.learners.items()}

    async def unless_a_learner_dies(self, work: Awaitable[T]) -> T:
        """Return the result of `work`, or raise the error of a learner at once if it dies meanwhile."""
        task = asyncio.ensure_future(work)
        deaths = [asyncio.ensure_future(learner.lost()) for learner in self.learners.values()]
        try:
            await asyncio.wait({task, *deaths}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise next(death.result() for death in deaths if death.done())
        finally:
            for waiting in (task, *deaths):
                waiting.cancel()

    async def stop_learners_after(self, error: ActorDiedError | StallError) -> bool:
        """Stop every learner if `error` is the death of one: the others are ahead of its checkpoint.

        Returns whether it was. The caller then starts them again and restores them. Raises RespawnLimitError if no more
        processes may start.
        """
        if error.who not in {learner.name for learner in self.learners.values()}:
            return False
        self._lost.append(self.faults.record(error.who, error))
        await self._stop_learners(at_once=True)
        return True

    async def fork(self, config: ProcessConfig, folder: Path) -> None:
        """Serve another run of the same policies and engine settings: learners stop, engines keep their weights."""
        await self._stop_learners()
        self.config, self.folder = config, folder
        self.faults.reset(folder / _FAULTS)
        self._lost.clear()

    def _plan_learners(self, policies: Mapping[str, Policy]) -> None:
        """Compute the settings of the learners of `policies`, with the memory that the start has found for them."""
        folders = {name: models.resolve(policy.model) for name, policy in policies.items()}
        by_process = {learner_name(names): self.plan.learners[names[0]] for names in learner_groups(policies, folders)}
        threads = threads_of(self.config, self.hosts, engines=len(self.engines), learners=len(by_process))
        resolved = resolve(policies, folders, self.config, out_dir=self.folder, learners=by_process, threads=threads)
        self.policies, self.plan = policies, replace(self.plan, learners=resolved.learners)
        self.plan.write(self.folder)

    async def _stop_learners(self, *, at_once: bool = False) -> None:
        learners = tuple(self.learners.values())
        self.learners.clear()
        await asyncio.gather(*(learner.stop(at_once=at_once) for learner in learners))
        self._resident.clear()

    async def _start_learners(self, plans: Mapping[str, LearnerPlan]) -> dict[str, Learner]:
        name = learner_name(plans)

        async def start() -> dict[str, Learner]:
            store = self.store  # read here, because a new store may have replaced the first
            try:
                async with self._learner_access():
                    started = await Learner.start_together(
                        plans,
                        name=name,
                        store=store.ref,
                        world_size=self.config.learner_procs,
                        heartbeat_timeout_s=self.config.heartbeat_timeout_s,
                        timeout_s=self.hosts.start_timeout_s,
                        device_access=self._learner_access,
                    )
                    self._resident[name] = [*started.values()]
            except RuntimeError as error:  # Monarch's, if the store was stopped meanwhile
                if type(error) is not RuntimeError or (ended := store.heartbeat.error) is None:
                    raise
                await self._mend_store(store, ended)
                return await start()
            return started

        return await self.faults.start_with_retries(name, start)

    async def sync(self, published: Callable[[], None] = lambda: None) -> None:
        """Transfer every learner's weights to its engine. `published` is called when all learners may go on.

        The death of a learner ends the transfer: an engine that restarts would wait for weights that only the next
        learner publishes.
        """
        busy = set(self.learners)

        async def transfer(name: str) -> None:
            async def through(store: WeightStore) -> None:
                version = await self.learners[name].publish(timeout_s=self.config.stage_timeout_s)
                busy.discard(name)
                if not busy:
                    published()
                await self.policy_engines[name].load_weights(version, timeout_s=self.config.stage_timeout_s)

            await self.with_store(through)

        await self.unless_a_learner_dies(all_or_first_error(map(transfer, self.learners)))

    async def with_store(self, work: Callable[[WeightStore], Awaitable[T]]) -> T:
        """Return the result of `work`. If the store dies meanwhile, `work` is repeated with the next store."""
        while True:
            async with self._mending:  # until all processes know the new store, it does not count
                store = self.store
            try:
                return await work(store)
            except (ActorDiedError, StallError) as error:
                if error.who != store.ref.name:
                    raise
                await self._mend_store(store, error)

    async def _watch_store(self) -> None:
        with contextlib.suppress(RespawnLimitError):  # the next `sync` raises it
            while True:
                store = self.store
                error = await store.heartbeat.lost()
                with contextlib.suppress(ActorDiedError, StallError):  # of the next store, or of a learner
                    await self._mend_store(store, error)

    async def _mend_store(self, broken: WeightStore, cause: ActorDiedError | StallError) -> None:
        """Replace `broken`. Cancelling the caller does not cancel the replacement."""
        mend = asyncio.ensure_future(self._replace_store(broken, cause))
        self._mends.add(mend)
        mend.add_done_callback(self._mends.discard)
        await asyncio.shield(mend)

    async def _replace_store(self, broken: WeightStore, cause: ActorDiedError | StallError) -> None:
        """Start a store and publish the learners' weights to it before the engines look there."""
        async with self._mending:
            if self.store is not broken:
                return
            fault = self.faults.record(broken.ref.name, cause)
            for engine in self.engines.values():  # one may be starting
                engine.forget_store()
            await broken.stop()
            self.store = store = await _start_store(self.config, self.hosts, self.faults)
            for learner in tuple(self.learners.values()):
                with contextlib.suppress(ActorDiedError, StallError):  # it died: the next one publishes here
                    await learner.use_store(store.ref, timeout_s=self.config.stage_timeout_s)  # it may be training
                    await learner.publish(timeout_s=self.config.stage_timeout_s)
            for publish in tuple(self.republish.values()):
                with contextlib.suppress(ActorDiedError, StallError):  # the new store died: the next one gets them
                    await publish(store.ref)
            for engine in self.engines.values():
                await engine.use_store(store.ref)
            self.faults.recovered(fault)

    @property
    def answers(self) -> int:
        """Number of completions of all engines so far."""
        return sum(engine.answers for engine in self.engines.values())

    def snapshot(self) -> dict[str, Any]:
        """Return processes, unfinished requests, weight versions and faults, for the file that a stall leaves."""
        return {
            "engines": {name: {"pids": e.pids, "unfinished": e.unfinished} for name, e in self.engines.items()},
            "weights_versions": {name: learner.version for name, learner in self.learners.items()},
            "faults": [asdict(fault) for fault in self.faults.all],
        }

    async def stop(self) -> None:
        """Stop every process."""
        _stalls.register("run", None)
        watching = () if self._store_watch is None else (self._store_watch,)
        for task in (*watching, *self._mends):
            task.cancel()
        await asyncio.gather(
            *(learner.stop() for learner in self.learners.values()),
            *(engine.stop() for engine in self.engines.values()),
            self.store.stop(),
        )
        await mesh.end_hosts(self.hosts)


async def _start_store(config: ProcessConfig, hosts: Hosts, faults: Faults) -> WeightStore:
    timeouts = {"heartbeat_timeout_s": config.heartbeat_timeout_s, "timeout_s": hosts.start_timeout_s}
    return await faults.start_with_retries(STORE, lambda: WeightStore.start(name=STORE, **timeouts))


def _share_gpus(slots: Iterable[ProcessSlot]) -> bool:
    """Return whether a learner has a GPU of an engine: vLLM measures the free memory there while it starts."""
    gpus: dict[str, set[tuple[str, str]]] = {"learner": set(), "engines": set()}
    for slot in slots:
        if slot.gpu and slot.role in gpus:
            gpus[slot.role].add((slot.host, slot.gpu))
    return not gpus["learner"].isdisjoint(gpus["engines"])
