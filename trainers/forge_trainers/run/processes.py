"""The processes of one run: the weight store, engines per model policy, a learner per trainable one.

In: policies and settings. Out: running actors that know each other, and others in place of those that died. Waits for
every start, each with a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from forge_agents.errors import ActorDiedError, ModelNotFoundError, RespawnLimitError, StallError
from forge_agents.models import families
from forge_agents.models import resolve as models
from forge_agents.policy import LoRA, Policy
from forge_agents.rollout.players import PolicyEngine
from forge_agents.rollout.rendering import Renderer
from forge_agents.runtime import mesh
from forge_agents.runtime import stalls as _stalls
from forge_agents.runtime.colocation import Colocation, DeviceAccess, unshared
from forge_agents.runtime.faults import Fault, Faults
from forge_agents.runtime.hosts import Hosts, ProcessSlot
from forge_agents.runtime.threads import all_or_first_error
from forge_agents.serving import EngineClient
from forge_agents.serving.client import names_of
from forge_agents.serving.config import EngineConfig
from forge_agents.serving.fleet import assign_engines, check_policy_models, start_engines
from forge_agents.weights import WeightStore
from forge_trainers.learner.client import Learner, LearnerConfig
from forge_trainers.learner.degrees import shards_of
from forge_trainers.run.config import ProcessConfig, with_threads
from forge_trainers.run.learner_settings import shared_settings
from forge_trainers.run.placement import OwnEngine, OwnModel, checked_parts, place_here

T = TypeVar("T")
_log = logging.getLogger(__name__)
_STORE = "weights"
_FAULTS = "faults.jsonl"


@dataclass(slots=True, kw_only=True)
class Processes:
    """Running actors, by policy name.

    `EngineClient` replaces engines that die. The store is replaced here, and learners publish to the new one. Lost
    learners are told to the caller, who knows which steps their checkpoints lack.
    """

    policies: Mapping[str, Policy]
    config: ProcessConfig
    folder: Path
    """Where learners put what they dump."""
    store: WeightStore
    faults: Faults
    """Deaths so far, and how many are allowed."""
    hosts: Hosts
    engines: Mapping[str, EngineClient] = field(default_factory=dict)
    """By the name of the first policy that each serves."""
    policy_engines: dict[str, PolicyEngine] = field(default_factory=dict)
    """By policy name, the engine, or the adapter in one, that samples for it."""
    learners: dict[str, Learner] = field(default_factory=dict)
    """Empty until `start_learners`, and again once one was lost."""
    _learning: DeviceAccess = unshared
    """What learners compute in, where they share GPUs with engines."""
    _placed: Mapping[str, LearnerConfig] = field(default_factory=dict)
    """By policy, what its learner leaves to memory, decided."""
    _resident: dict[str, list[Learner]] = field(default_factory=dict)
    """By the name of their processes, learners that have memory on the GPUs when it is their turn."""
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
        """Start the hosts, the store and the engines; whatever fails to start stops the rest.

        Args:
            policies: By name.
            config: Settings.
            folder: Of the run.
            hosts: Where processes run; None: on this host.
            learn: Start the learners as well, at the same time where they have GPUs of their own or there are none.
            judges: Whose engines start by themselves; they are placed here.
            held: What this process loads by itself; it is counted here.
        """
        paths = {name: models.resolve(policy.model) for name, policy in policies.items()}
        check_policy_models(config.engine, paths.values())
        renderers = {  # what has no template starts nothing
            name: Renderer.of(paths[name], thinking=policy.thinking) for name, policy in policies.items()
        }
        for name, policy in policies.items():
            if policy.trainable:  # nor what nobody can train
                families.check_trainable(models.read_json(paths[name] / "config.json"))
        homes, adapters = assign_engines(policies, paths)
        faults = Faults(max_respawns=config.max_respawns, file=folder / _FAULTS)
        hosts, together = hosts or Hosts(), _together(policies, paths)
        if hosts.kind == "local":
            config = with_threads(config, engines=len(adapters), learners=len(together))
        meshes = meshes_of(policies, paths, config)
        parts = computing(policies, paths, config)
        check_hosts(meshes, hosts, config, [settings for settings, _ in parts[1].values()])
        with contextlib.suppress(ModelNotFoundError):
            checked_parts(*parts, ranks=config.learner_procs, engine=config.engine)
        folder.mkdir(parents=True, exist_ok=True)
        later = [(judge.name, "judges", judge.config.tp) for judge in judges]
        await mesh.launch_hosts(hosts, paths=(*paths.values(), folder), meshes=[*meshes, *later])
        try:
            settings, learners = place_here(
                *parts,
                ranks=config.learner_procs,
                engine=config.engine,
                judges=judges,
                held=held,
                turns=config.colocate,
            )
            seats = mesh.preview_placement(meshes)
            store = await _start_store(config, faults)
            placed = {name: learners[_learner_name(names)] for names in together for name in names}
            started = cls(
                policies=policies,
                config=config,
                folder=folder,
                store=store,
                faults=faults,
                hosts=hosts,
                _placed=placed,
            )
            playing = started._take_turns() if any(own.sleeps for own in settings.values()) else unshared
            own = {home: settings[names_of(home, config.engine.replicas)[0]] for home in adapters}
            engines = started._start_engines(own, {home: paths[home] for home in adapters}, adapters, playing)
            if learn and not _share_gpus(seats):
                await all_or_first_error((engines, started.start_learners()))
            else:
                await engines
                if learn:
                    await started.start_learners()
        except BaseException:
            await mesh.shutdown_all()
            raise
        for name, policy in policies.items():
            adapter = "" if policy.lora is None else name
            started.policy_engines[name] = PolicyEngine(started.engines[homes[name]], renderers[name], adapter)
        started._store_watch = asyncio.ensure_future(started._watch_store())
        _stalls.register("run", started.snapshot)
        return started

    def _take_turns(self) -> DeviceAccess:
        """Let engines and learners use their GPUs one after the other. Returns the engines' turn."""
        turns = Colocation("engines", self.config.stage_timeout_s)
        self._learning = turns.register(
            "learner",
            offload=lambda: all_or_first_error(one.offload() for each in self._resident.values() for one in each),
            onload=lambda: all_or_first_error(one.onload() for each in self._resident.values() for one in each),
        )
        return turns.register(
            "engines",
            offload=lambda: all_or_first_error(one.sleep() for one in self.engines.values()),
            onload=lambda: all_or_first_error(one.wake() for one in self.engines.values()),
        )

    async def _start_engines(
        self,
        settings: Mapping[str, EngineConfig],
        paths: Mapping[str, Path],
        adapters: Mapping[str, Mapping[str, LoRA]],
        device_access: DeviceAccess,
    ) -> None:
        config = self.config
        # A late answer fails its episode, before the stage that waits for it fails the run.
        answer_timeout_s = min(config.engine.answer_timeout_s, config.stage_timeout_s / 2)
        self.engines = await start_engines(
            paths,
            {name: replace(own, seed=config.seed, answer_timeout_s=answer_timeout_s) for name, own in settings.items()},
            adapters=adapters,
            store=self.store.ref,
            faults=self.faults,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            timeout_s=config.start_timeout_s,
            device_access=device_access,
        )

    def busy_s(self) -> dict[str, float]:
        """Seconds in which engines and learners had something to do, each the mean over all of them."""
        engines = [busy_s for engine in self.engines.values() for busy_s in engine.busy_s.values()]
        learners = [learner.busy_s for learner in self.learners.values()]
        found = {"engines": engines, "learner": learners}
        return {name: sum(each) / len(each) for name, each in found.items() if each}

    async def engines_memory(self) -> dict[str, float]:
        """On accelerators, of the engine that has most: ``engines/peak_device_bytes`` of torch, and of the device all.

        Nothing on CPU, and where an engine died at this moment.
        """
        states = []
        with contextlib.suppress(ActorDiedError, StallError, RuntimeError):  # the latter of one whose step failed
            for engine in self.engines.values():
                states += [*(await engine.infos()).values()] if engine.on_device else []
        names = ("peak_device_bytes", "device_used_bytes")
        return {f"engines/{name}": float(max(getattr(one, name) for one in states)) for name in names if states}

    async def start_learners(self) -> None:
        """Start a learner for every trainable policy; adapters share one, where they can. Twice is no error.

        Where one fails to start, the others are stopped.
        """
        if (ended := self.store.heartbeat.error) is not None:  # with the learner's host
            await self._mend_store(self.store, ended)
        together: dict[object, dict[str, LearnerConfig]] = {}
        for name, policy in self.policies.items():
            if policy.trainable and name not in self.learners:
                settings = self._learner_settings(name)
                together.setdefault(_shared_by(name, policy, Path(settings.model)), {})[name] = settings

        async def stop(those: Mapping[str, Learner]) -> None:
            await next(iter(those.values())).stop()  # they share their processes

        for started in await all_or_first_error(map(self._start_learners, together.values()), stop):
            self.learners.update(started)
        while self._lost:
            self.faults.recovered(self._lost.pop())

    @property
    def room(self) -> dict[str, int]:
        """Tokens of the longest sample that each policy's learner takes."""
        return {name: learner.max_sample_tokens for name, learner in self.learners.items()}

    async def unless_a_learner_dies(self, work: Awaitable[T]) -> T:
        """What `work` gives, or at once the error of a learner that is lost meanwhile."""
        task = asyncio.ensure_future(work)
        ends = [asyncio.ensure_future(learner.lost()) for learner in self.learners.values()]
        try:
            await asyncio.wait({task, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise next(end.result() for end in ends if end.done())
        finally:
            for one in (task, *ends):
                one.cancel()

    async def stop_learners_after(self, error: ActorDiedError | StallError) -> bool:
        """Stop every learner where `error` is the end of one: the others are ahead of its checkpoint.

        Returns:
            Whether it was; the caller then starts them again and restores them.

        Raises:
            RespawnLimitError: No more may be started.
        """
        if error.who not in {learner.name for learner in self.learners.values()}:
            return False
        self._lost.append(self.faults.record(error.who, error))
        await self._stop_learners(at_once=True)
        return True

    async def fork(self, config: ProcessConfig, folder: Path) -> None:
        """Serve another run of the same policies: learners stop, engines keep the weights that they have.

        Args:
            config: Settings of that run; its engines are those that run.
            folder: Its own.
        """
        await self._stop_learners()
        learner = replace(config.learner, threads=config.learner.threads or self.config.learner.threads)
        self.config, self.folder = replace(config, engine=self.config.engine, learner=learner), folder
        self.faults.reset(folder / _FAULTS)
        self._lost.clear()

    async def _stop_learners(self, *, at_once: bool = False) -> None:
        learners = tuple(self.learners.values())
        self.learners.clear()
        await asyncio.gather(*(learner.stop(at_once=at_once) for learner in learners))
        self._resident.clear()

    def _learner_settings(self, name: str) -> LearnerConfig:
        policy = self.policies[name]
        chosen = self.config.learner_of(policy)
        limit = chosen.max_sample_tokens
        folder = models.resolve(policy.model)
        context = self.config.engine.max_model_len or models.context_of(folder)
        if limit is not None and context is not None and limit < context:
            _log.warning(
                "the engine of %s holds conversations of up to %d tokens, learner.max_sample_tokens=%d: longer ones "
                "are played and not learned; raise it, lower engine.max_model_len, or limit the episode",
                name,
                context,
                limit,
            )
        decided = self._placed.get(name, chosen).with_memory()
        memory = {one: getattr(decided, one) for one in LearnerConfig().left_to_memory}
        return replace(
            chosen.with_memory(**memory),
            max_sample_tokens=limit or context,
            model=str(folder),
            temperature=policy.sampling.temperature,
            lora=policy.lora,
            seed=self.config.seed,
            dump_folder=str(self.folder / "learner" / name),
        )

    async def _start_learners(self, configs: Mapping[str, LearnerConfig]) -> dict[str, Learner]:
        name = _learner_name(configs)

        async def start() -> dict[str, Learner]:
            async with self._learning():
                started = await Learner.start_together(
                    configs,
                    name=name,
                    store=self.store.ref,  # of this moment: a new one may have taken its place
                    world_size=self.config.learner_procs,
                    heartbeat_timeout_s=self.config.heartbeat_timeout_s,
                    timeout_s=self.config.start_timeout_s,
                    device_access=self._learning,
                )
                self._resident[name] = [*started.values()]
            return started

        return await self.faults.start_with_retries(name, start)

    async def sync(self, published: Callable[[], None] = lambda: None) -> None:
        """Carry every learner's weights to its engine. `published` is called when all learners may go on.

        A learner's death ends it: an engine that starts anew would wait for weights that only the next one publishes.
        """
        busy = set(self.learners)

        async def carry(name: str) -> None:
            async def by(store: WeightStore) -> None:
                version = await self.learners[name].publish(timeout_s=self.config.stage_timeout_s)
                busy.discard(name)
                if not busy:
                    published()
                await self.policy_engines[name].load_weights(version, timeout_s=self.config.stage_timeout_s)

            await self.with_store(by)

        await self.unless_a_learner_dies(all_or_first_error(map(carry, self.learners)))

    async def with_store(self, work: Callable[[WeightStore], Awaitable[T]]) -> T:
        """What `work` gives; where the store dies meanwhile, it is done again with the next."""
        while True:
            async with self._mending:  # before all know of it, the next one does not count
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
        """Put another store in place of `broken`; whoever stops waiting for that does not stop it."""
        mend = asyncio.ensure_future(self._replace_store(broken, cause))
        self._mends.add(mend)
        mend.add_done_callback(self._mends.discard)
        await asyncio.shield(mend)

    async def _replace_store(self, broken: WeightStore, cause: ActorDiedError | StallError) -> None:
        """Start a store and publish to it what learners hold, before the engines look there."""
        async with self._mending:
            if self.store is not broken:
                return
            fault = self.faults.record(broken.ref.name, cause)
            await broken.stop()
            self.store = store = await _start_store(self.config, self.faults)
            for learner in tuple(self.learners.values()):
                with contextlib.suppress(ActorDiedError, StallError):  # lost: the next one publishes here
                    await learner.use_store(store.ref, timeout_s=self.config.stage_timeout_s)  # it may be learning
                    await learner.publish(timeout_s=self.config.stage_timeout_s)
            for engine in self.engines.values():
                await engine.use_store(store.ref)
            self.faults.recovered(fault)

    @property
    def answers(self) -> int:
        """Completions of all engines so far."""
        return sum(engine.answers for engine in self.engines.values())

    def snapshot(self) -> dict[str, Any]:
        """Who runs, with what to do, at which version; for the file that a stall leaves."""
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


async def _start_store(config: ProcessConfig, faults: Faults) -> WeightStore:
    def start() -> Coroutine[Any, Any, WeightStore]:
        return WeightStore.start(
            name=_STORE, heartbeat_timeout_s=config.heartbeat_timeout_s, timeout_s=config.start_timeout_s
        )

    return await faults.start_with_retries(_STORE, start)


def computing(
    policies: Mapping[str, Policy], paths: Mapping[str, Path], config: ProcessConfig
) -> tuple[dict[str, tuple[Path, Sequence[LoRA]]], dict[str, tuple[LearnerConfig, int]]]:
    """What engines and learners a run has, by the names of their processes.

    Args:
        policies: By name.
        paths: Their models' folders.
        config: Settings.

    Returns:
        Of each engine the model's folder and the adapters beside it; of each learner its settings, and how many
        policies share it.
    """
    _, adapters = assign_engines(policies, paths)
    engines: dict[str, tuple[Path, Sequence[LoRA]]] = {
        one: (paths[home], tuple(adapters[home].values()))
        for home in adapters
        for one in names_of(home, config.engine.replicas)
    }
    learners = {}
    for names in _together(policies, paths):
        settings = shared_settings([policies[name] for name in names], config)
        longest = settings.max_sample_tokens or config.engine.max_model_len
        learners[_learner_name(names)] = (
            replace(
                settings,
                model=str(paths[names[0]]),
                lora=policies[names[0]].lora,
                max_sample_tokens=longest,
            ),
            len(names),
        )
    return engines, learners


def whose(
    policies: Mapping[str, Policy], paths: Mapping[str, Path], config: ProcessConfig
) -> dict[str, tuple[str, ...]]:
    """Policies of each engine and learner, by the name of its processes; arguments as of `computing`."""
    homes, adapters = assign_engines(policies, paths)
    found = {_learner_name(names): tuple(names) for names in _together(policies, paths)}
    for home in adapters:
        served = tuple(name for name in policies if homes[name] == home)
        found.update(dict.fromkeys(names_of(home, config.engine.replicas), served))
    return found


def meshes_of(
    policies: Mapping[str, Policy], paths: Mapping[str, Path], config: ProcessConfig
) -> list[tuple[str, str, int]]:
    """Name, role and processes of each mesh that a run starts with.

    Args:
        policies: By name.
        paths: Their models' folders.
        config: How many there are of each.
    """
    _, adapters = assign_engines(policies, paths)
    engines = [name for home in adapters for name in names_of(home, config.engine.replicas)]
    learners = [_learner_name(names) for names in _together(policies, paths)]
    return [
        (_STORE, "store", 1),
        *((name, "learner", config.learner_procs) for name in learners),
        *((name, "engines", config.engine.tp) for name in engines),
    ]


def _share_gpus(seats: Iterable[ProcessSlot]) -> bool:
    """Whether a learner has a GPU of an engine: vLLM measures what is free there while it starts."""
    on: dict[str, set[tuple[str, str]]] = {"learner": set(), "engines": set()}
    for seat in seats:
        if seat.gpu and seat.role in on:
            on[seat.role].add((seat.host, seat.gpu))
    return not on["learner"].isdisjoint(on["engines"])


def check_hosts(
    meshes: Iterable[tuple[str, str, int]], hosts: Hosts, config: ProcessConfig, learners: Iterable[LearnerConfig]
) -> None:
    """Check that the processes of a run fit its hosts and their learners' settings, and have different names.

    Raises:
        ValueError: It does not, or two have one; the message says what to do.
    """
    counts, roles = Counter[str](), dict[str, str]()
    for name, role, procs in meshes:
        counts[role] += procs
        if name in roles:
            raise ValueError(
                f"{name!r} would be the name of processes of the {roles[name]} and of the {role}: policies lend their "
                'names to both, as "hero" and "hero-learner"; call one of the policies otherwise'
            )
        roles[name] = role
    hosts.check_processes("engines", counts["engines"])
    hosts.check_processes("learner", counts["learner"], each=config.learner_procs)
    for settings in learners:
        shards_of(settings, config.learner_procs)


def _together(policies: Mapping[str, Policy], paths: Mapping[str, Path]) -> list[list[str]]:
    """Policies that learn, those that share a learner side by side."""
    found: dict[object, list[str]] = {}
    for name, policy in policies.items():
        if policy.trainable:
            found.setdefault(_shared_by(name, policy, paths[name]), []).append(name)
    return [*found.values()]


def _learner_name(policies: Iterable[str]) -> str:
    return f"{'-'.join(policies)}-learner"


def _shared_by(name: str, policy: Policy, path: Path) -> object:
    """Names the learner of a policy: adapters of one shape on one model share theirs."""
    return name if policy.lora is None else (path, policy.lora)
