"""Work that needs the weight store, and outlives it."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from forge_agents.errors import ActorDiedError, StallError
from forge_agents.policy import Policy
from forge_agents.runtime.hosts import Hosts, ProcessSlot
from forge_agents.serving.config import EngineConfig
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.offline.config import SFTConfig
from forge_trainers.offline.sft import SFTTrainer
from forge_trainers.run.config import ProcessConfig
from forge_trainers.run.processes import Processes, _share_gpus, check_hosts, meshes_of
from forge_trainers.run.rehearsal import rehearsal


class Stores:
    """What `Processes.with_store` uses: stores "weights", each mended by the next."""

    def __init__(self):
        self.mended = []
        self.store = self._fresh()
        self._mending, self._mends = asyncio.Lock(), set()

    def _fresh(self):
        return SimpleNamespace(ref=SimpleNamespace(name="weights"), number=len(self.mended))

    async def _replace_store(self, broken, cause):
        async with self._mending:
            assert broken is self.store
            self.mended.append(cause)
            self.store = self._fresh()
            await asyncio.sleep(0.02)

    _mend_store = Processes._mend_store


def test_work_is_done_again_with_the_store_that_takes_a_dead_ones_place():
    processes, seen = Stores(), []

    async def work(store):
        seen.append(store.number)
        if store.number == 0:
            raise ActorDiedError("weights died during put", "weights")
        if store.number == 1:
            raise StallError("weights did not answer", "weights")
        return "loaded"

    assert asyncio.run(Processes.with_store(processes, work)) == "loaded"
    assert seen == [0, 1, 2] and [*map(str, processes.mended)] == ["weights died during put", "weights did not answer"]


def test_another_ones_death_is_not_the_stores():
    processes = Stores()

    async def work(store):
        raise ActorDiedError("hero-opponent died", "hero-opponent")

    with pytest.raises(ActorDiedError, match="hero-opponent died"):
        asyncio.run(Processes.with_store(processes, work))
    assert processes.mended == []


def test_whoever_stops_waiting_for_a_new_store_does_not_stop_it_and_the_next_waits_until_all_know_it():
    async def main():
        processes = Stores()

        async def work(store):
            if store.number == 0:
                raise ActorDiedError("weights died during put", "weights")
            assert not processes._mending.locked()
            return store.number

        first = asyncio.ensure_future(Processes.with_store(processes, work))
        await asyncio.sleep(0.01)
        first.cancel()
        assert await Processes.with_store(processes, work) == 1
        assert [*map(str, processes.mended)] == ["weights died during put"]

    asyncio.run(main())


class Carrying(Stores):
    """What `Processes.sync` uses: a learner that is killed once it has published, and an engine that never loads."""

    sync, unless_a_learner_dies = Processes.sync, Processes.unless_a_learner_dies
    with_store = Processes.with_store

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(stage_timeout_s=600.0)
        self.killed = asyncio.get_running_loop().create_future()
        self.learners, self.policy_engines, self.waits = {"hero": self}, {"hero": self}, 0

    async def publish(self, timeout_s):
        return 3

    async def load_weights(self, version, timeout_s):
        self.waits += 1
        asyncio.get_running_loop().call_soon(self.killed.set_result, None)
        await asyncio.sleep(timeout_s)

    async def lost(self):
        await self.killed
        return ActorDiedError("hero-learner was ended by SIGKILL", "hero-learner")


def test_a_learners_death_ends_the_wait_of_an_engine_that_has_nobody_to_get_weights_from():
    async def main():
        processes = Carrying()
        with pytest.raises(ActorDiedError, match="hero-learner was ended by SIGKILL"):
            await asyncio.wait_for(processes.sync(), 30)
        assert processes.waits == 1 and processes.mended == []

    asyncio.run(main())


class Starting:
    """What `Processes.start_learners` uses: a context of engines, and learners that are only noted."""

    start_learners, _learner_settings = Processes.start_learners, Processes._learner_settings

    def __init__(self, context=8192, **settings):
        self.config = ProcessConfig(learner=LearnerConfig(**settings), engine=EngineConfig(max_model_len=context))
        self.policies = {"hero": Policy("hero"), "rival": Policy("rival")}
        self.store = SimpleNamespace(heartbeat=SimpleNamespace(error=None))
        self.folder, self.learners, self._lost, self._placed = Path("run"), {}, [], {}

    async def _start_learners(self, configs):
        return configs


class Slow:
    """A learner of two, which starts; the other one fails after it, or meanwhile."""

    def __init__(self):
        self.stopped = False

    async def stop(self):
        self.stopped = True


@pytest.mark.parametrize("failing", ["hero", "rival"])
def test_a_learner_that_started_beside_one_that_failed_is_stopped(monkeypatch, failing):
    monkeypatch.setattr("forge_trainers.run.processes.models.resolve", Path)
    started, cancelled = [], []

    class Failing(Starting):
        async def _start_learners(self, configs):
            (name,) = configs
            await asyncio.sleep(0.02)
            if name == failing:
                raise ValueError(f"{name}-learner has no model")
            started.append(Slow())
            return {name: started[0]}

    class Early(Starting):
        async def _start_learners(self, configs):
            (name,) = configs
            if name == failing:
                raise ValueError(f"{name}-learner has no model")
            try:
                await asyncio.sleep(5)
            except asyncio.CancelledError:
                cancelled.append(name)
                raise

    for kind in (Failing, Early):
        processes = kind()
        with pytest.raises(ValueError, match=f"{failing}-learner has no model"):
            asyncio.run(processes.start_learners())
        assert processes.learners == {}
    assert all(learner.stopped for learner in started) and len(cancelled) == 1


def test_learners_take_what_memory_decided_unless_it_is_set(monkeypatch):
    monkeypatch.setattr("forge_trainers.run.processes.models.resolve", Path)
    processes = Starting(loss_chunk_tokens=7)
    placed = {"max_tokens_per_microbatch": 8192, "loss_chunk_tokens": 1024, "activation_checkpointing": "selective"}
    processes._placed = {"hero": LearnerConfig().with_memory(**placed)}
    asyncio.run(processes.start_learners())
    hero, rival = processes.learners["hero"], processes.learners["rival"]
    assert (hero.max_tokens_per_microbatch, hero.loss_chunk_tokens) == (8192, 7)
    assert hero.activation_checkpointing == "selective"
    assert rival == replace(hero, **{name: getattr(rival, name) for name in ("model", "dump_folder", *placed)})
    assert (rival.max_tokens_per_microbatch, rival.activation_checkpointing) == (2048, "none")


@pytest.mark.parametrize(("limit", "taken"), [(None, 8192), (1024, 1024), (9000, 9000)])
def test_learners_take_what_their_engine_holds(monkeypatch, caplog, limit, taken):
    monkeypatch.setattr("forge_trainers.run.processes.models.resolve", Path)
    processes = Starting(8192, max_sample_tokens=limit)
    asyncio.run(processes.start_learners())
    assert [settings.max_sample_tokens for settings in processes.learners.values()] == [taken, taken]
    assert ("up to 8192 tokens, learner.max_sample_tokens=1024" in caplog.text) == (limit == 1024)


@pytest.mark.parametrize(
    ("engine", "learner", "shared"),
    [("0", "0", True), ("0", "1", False), ("", "", False)],
    ids=["one GPU", "a GPU each", "no GPU"],
)
def test_a_learner_starts_beside_an_engine_unless_they_share_a_gpu(engine, learner, shared):
    def seat(role, gpu, rank=0, host="here"):
        return ProcessSlot(name=role, role=role, rank=rank, host=host, gpu=gpu, gpu_bytes=0)

    elsewhere = seat("learner", engine, rank=1, host="there")
    assert _share_gpus([seat("store", ""), seat("learner", learner), seat("engines", engine), elsewhere]) is shared


def test_a_model_that_nobody_can_train_starts_nothing(tiny_models, tmp_path, monkeypatch):
    async def launched(*args, **options):
        pytest.fail("something was started")

    monkeypatch.setattr("forge_trainers.run.processes.mesh.launch_hosts", launched)
    model = tiny_models(settings={"architectures": ["GptOssForCausalLM"]})
    with pytest.raises(ValueError, match=r"'GptOssForCausalLM' cannot be trained \(gpt-oss\): its weights"):
        asyncio.run(Processes.start({"hero": Policy(str(model))}, ProcessConfig(), folder=tmp_path))


def test_ranks_that_cannot_share_a_model_ask_for_no_host(tmp_path, monkeypatch):
    async def launched(*args, **options):
        pytest.fail("a host was asked for, which may wait in a queue for hours")

    monkeypatch.setattr("forge_agents.runtime.mesh.launch_hosts", launched)
    config, hosts = ProcessConfig(engine=EngineConfig(tp=3)), Hosts(kind="slurm", hosts={"engines": 1})
    with pytest.raises(ValueError, match=r"engine\.tp=3 does not divide the 4 query and 2 key heads of hero"):
        asyncio.run(Processes.start({"hero": Policy("tiny-random")}, config, folder=tmp_path, hosts=hosts))
    sft = SFTTrainer(Policy("tiny-random"), SFTConfig(learner_procs=3, learner=LearnerConfig(tp=3)), tmp_path, hosts)
    chat = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    with pytest.raises(ValueError, match=r"learner\.tp=3 does not divide"), sft:
        sft.fit([chat] * 4, steps=1)


def test_adapters_of_an_earlier_run_are_refused_in_a_trainers_settings():
    with pytest.raises(ValueError, match=r"engine\.adapter_folders=.* has no effect: .* give the exported model"):
        ProcessConfig(engine=EngineConfig(adapter_folders={"hero": "runs/old/export/adapter"}))


@pytest.mark.parametrize(
    ("names", "twice"), [(("a", "a-learner"), "'a-learner'"), (("weights", "a"), "'weights'")]
)
def test_policies_whose_processes_would_have_one_name_are_refused(names, twice):
    policies = {name: Policy("tiny-random", name=name) for name in names}
    meshes = meshes_of(policies, {name: Path(name) for name in names}, ProcessConfig())
    with pytest.raises(ValueError, match=f"{twice} would be the name of .* call one of the policies otherwise"):
        check_hosts(meshes, Hosts(), ProcessConfig(), [])
    with pytest.raises(ValueError, match="otherwise"):
        rehearsal(policies, ProcessConfig(), Hosts(), gpus_per_host=8)


def test_memory_of_engines_is_told_where_they_have_a_device() -> None:
    class Engine:
        def __init__(self, *peaks: int, error: Exception | None = None) -> None:
            self.peaks, self.error, self.on_device = peaks, error, any(peaks)

        async def infos(self) -> dict[str, object]:
            assert self.on_device, "on CPU it costs no message"
            if self.error is not None:
                raise self.error
            states = [SimpleNamespace(peak_device_bytes=peak, device_used_bytes=2 * peak) for peak in self.peaks]
            return dict(enumerate(states))  # type: ignore[arg-type]  # by name

    def told(*engines: Engine) -> dict[str, float]:
        processes = SimpleNamespace(engines=dict(enumerate(engines)))
        return asyncio.run(Processes.engines_memory(processes))  # type: ignore[arg-type]  # what it uses

    assert told(Engine(0)) == {}
    assert told(Engine(3, 5), Engine(4)) == {"engines/peak_device_bytes": 5.0, "engines/device_used_bytes": 10.0}
    for error in (ActorDiedError("it died", "hero"), RuntimeError("the engine has failed: out of memory")):
        assert told(Engine(3, error=error)) == {}
