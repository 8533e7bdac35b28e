"""Work that needs the weight store, and outlives it."""

import asyncio
import inspect
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from forge_agents.errors import ActorDiedError, StallError
from forge_agents.models import resolve as models
from forge_agents.policy import LoRA, Policy
from forge_agents.runtime.colocation import unshared
from forge_agents.runtime.faults import Faults
from forge_agents.runtime.hosts import Hosts, ProcessSlot
from forge_agents.serving.config import EngineConfig
from forge_agents.serving.fleet import assign_engines
from forge_agents.weights import WeightStoreRef
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.learner.plan import LearnerPlan
from forge_trainers.offline.config import SFTConfig
from forge_trainers.offline.sft import SFTTrainer
from forge_trainers.run import processes
from forge_trainers.run.config import ProcessConfig
from forge_trainers.run.dry_run import dry_run
from forge_trainers.run.plan import (
    Plan,
    Threads,
    _answer_timeout_s,
    check_hosts,
    compute_processes,
    learner_groups,
    resolve,
)
from forge_trainers.run.processes import Processes, _share_gpus


class Stores:
    """Fake for `Processes.with_store`: stores "weights", each replaced by the next."""

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


def test_reference_of_a_store_names_what_a_run_uses():
    """Another transport needs no more than the docstring lists."""
    used = re.findall(r"\b(?:store|broken)\.(?:ref\.|heartbeat\.)?(\w+)", inspect.getsource(processes))
    assert {"ref", "error", "lost", "name", "stop"} <= set(used)
    assert [name for name in used if f"`{name}`" not in WeightStoreRef.__doc__] == []


def test_work_is_repeated_with_the_next_weight_store():
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


def test_death_of_another_process_does_not_replace_the_store():
    processes = Stores()

    async def work(store):
        raise ActorDiedError("hero-opponent died", "hero-opponent")

    with pytest.raises(ActorDiedError, match="hero-opponent died"):
        asyncio.run(Processes.with_store(processes, work))
    assert processes.mended == []


def test_cancelled_store_restart_is_retried():
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


def test_new_store_gets_all_weights_before_engines_look_there(monkeypatch):
    calls = []

    def records(name, error=None):
        async def call(*args, **_):
            calls.append((name, *args))
            if error is not None:
                raise error

        return call

    async def start(*_):
        return SimpleNamespace(ref="new")

    monkeypatch.setattr("forge_trainers.run.processes._start_store", start)

    async def main():
        broken = SimpleNamespace(ref=SimpleNamespace(name="weights"), stop=records("stop"))
        faults = SimpleNamespace(record=lambda *_: None, recovered=lambda _: None)
        processes = SimpleNamespace(
            _mending=asyncio.Lock(),
            store=broken,
            faults=faults,
            config=SimpleNamespace(stage_timeout_s=60.0),
            hosts=None,
            learners={"hero": SimpleNamespace(use_store=records("learner"), publish=records("publish"))},
            republish={"one": records("one", StallError("slow", "weights")), "two": records("two")},
            engines={"hero": SimpleNamespace(use_store=records("engine"), forget_store=lambda: calls.append("forget"))},
        )
        await Processes._replace_store(processes, broken, StallError("gone", "weights"))

    asyncio.run(main())
    published = [("learner", "new"), ("publish",), ("one", "new"), ("two", "new")]
    assert calls == ["forget", ("stop",), *published, ("engine", "new")]


@pytest.mark.parametrize("ended", [None, ActorDiedError("gone", "weights")])
def test_learner_that_dies_with_its_store_starts_with_the_next_store(ended, monkeypatch):
    given = []

    async def start_together(plans, *, store, **_):
        given.append(store)
        if store == "first":  # as Monarch, which cannot send a reference to a store that is stopped
            raise RuntimeError("`ProcMesh` has already been stopped")
        return dict.fromkeys(plans)

    monkeypatch.setattr("forge_trainers.run.processes.Learner.start_together", start_together)

    class Restarting(SimpleNamespace):
        _start_learners = Processes._start_learners

        async def _mend_store(self, broken, cause):
            assert broken is self.store and cause is ended
            self.store = SimpleNamespace(ref="second")

    processes = Restarting(
        store=SimpleNamespace(ref="first", heartbeat=SimpleNamespace(error=ended)),
        config=SimpleNamespace(learner_procs=1, heartbeat_timeout_s=60.0),
        hosts=SimpleNamespace(start_timeout_s=60.0),
        faults=Faults(),
        _learner_access=unshared,
        _resident={},
    )
    starting = processes._start_learners({"hero": LearnerPlan(model="m")})
    if ended is None:
        with pytest.raises(RuntimeError, match="already been stopped"):
            asyncio.run(starting)
        return
    assert list(asyncio.run(starting)) == ["hero"] and given == ["first", "second"]


class Carrying(Stores):
    """Fake for `Processes.sync`: a learner that is killed after publishing, and an engine that never loads."""

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


def test_death_of_a_learner_ends_the_transfer_of_weights():
    async def main():
        processes = Carrying()
        with pytest.raises(ActorDiedError, match="hero-learner was ended by SIGKILL"):
            await asyncio.wait_for(processes.sync(), 60)
        assert processes.waits == 1 and processes.mended == []

    asyncio.run(main())


class Starting:
    """Fake for `Processes.start_learners`, which only records learners."""

    start_learners = Processes.start_learners

    def __init__(self):
        self.policies = {"hero": Policy("hero"), "rival": Policy("rival")}
        self.plan = Plan(engines={}, learners={name: LearnerPlan(model=name) for name in self.policies})
        self.store = SimpleNamespace(heartbeat=SimpleNamespace(error=None))
        self.learners, self._lost = {}, []

    async def _start_learners(self, configs):
        return configs


@pytest.mark.parametrize("failing", ["hero", "rival"])
@pytest.mark.parametrize("early", [False, True])
def test_learners_that_started_are_stopped_if_another_fails(failing, early):
    stopped, cancelled = [], []

    class Failing(Starting):
        async def _start_learners(self, configs):
            (name,) = configs
            if name == failing:
                await asyncio.sleep(0 if early else 0.02)
                raise ValueError(f"{name}-learner has no model")
            try:
                await asyncio.sleep(5 if early else 0)
            except asyncio.CancelledError:
                cancelled.append(name)
                raise

            async def stop():
                stopped.append(name)

            return {name: SimpleNamespace(stop=stop)}

    processes = Failing()
    with pytest.raises(ValueError, match=f"{failing}-learner has no model"):
        asyncio.run(processes.start_learners())
    assert processes.learners == {}
    assert (len(stopped), len(cancelled)) == ((0, 1) if early else (1, 0))


def resolved(tmp_path, engine=None, learners=None, **settings):
    policies = {"hero": Policy("tiny-random"), "rival": Policy("tiny-random")}
    folders = {name: models.resolve(policy.model) for name, policy in policies.items()}
    config = ProcessConfig(learner=LearnerConfig(**settings), engine=EngineConfig(**(engine or {})), seed=3)
    return resolve(policies, folders, config, out_dir=tmp_path, learners=learners, threads=Threads(engine=2, learner=5))


def test_learners_use_memory_driven_values_unless_they_are_set(tmp_path):
    placed = {"max_tokens_per_microbatch": 8192, "loss_chunk_tokens": 1024, "activation_checkpointing": "selective"}
    learners = {"hero-learner": LearnerPlan(**placed)}
    plan = resolved(tmp_path, learners=learners, max_tokens_per_microbatch=64)
    hero, rival = plan.learners["hero"], plan.learners["rival"]
    assert (hero.max_tokens_per_microbatch, hero.loss_chunk_tokens) == (64, 1024)
    assert hero.activation_checkpointing == "selective"
    changes = {name: getattr(rival, name) for name in ("dump_folder", *placed)}
    assert rival == replace(hero, **changes)
    assert (rival.loss_chunk_tokens, rival.activation_checkpointing) == (256, "none")


def test_plan_has_seed_threads_context_and_timeouts(tmp_path):
    plan = resolved(tmp_path, {"max_model_len": 96})
    hero, engine = plan.learners["hero"], plan.engines["hero"]
    assert (hero.seed, hero.threads, hero.max_sample_tokens, hero.temperature) == (3, 5, 96, 1.0)
    assert hero.lr is not None and hero.dump_folder == str(tmp_path / "learner" / "hero")
    assert (engine.seed, engine.threads, engine.answer_timeout_s) == (3, 2, 600.0)
    assert engine.model == hero.model == str(models.resolve("tiny-random"))
    plan.write(tmp_path)
    written = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    assert written["learners"]["hero"]["max_sample_tokens"] == 96 and written["engines"]["hero"]["threads"] == 2


@pytest.mark.parametrize(("stage_s", "answer_s"), [(60, 30), (1500, 600), (7200, 2400)])
def test_completions_may_take_longer_with_a_longer_stage_timeout(stage_s, answer_s):
    assert _answer_timeout_s(stage_s) == answer_s


@pytest.mark.parametrize(
    ("engine", "learner", "shared"),
    [("0", "0", True), ("0", "1", False), ("", "", False)],
    ids=["one GPU", "a GPU each", "no GPU"],
)
def test_learner_starts_with_the_engine_unless_they_share_a_gpu(engine, learner, shared):
    def seat(role, gpu, rank=0, host="here"):
        return ProcessSlot(name=role, role=role, rank=rank, host=host, gpu=gpu, gpu_bytes=0)

    elsewhere = seat("learner", engine, rank=1, host="there")
    assert _share_gpus([seat("store", ""), seat("learner", learner), seat("engines", engine), elsewhere]) is shared


def test_untrainable_model_starts_nothing(tiny_models, tmp_path, monkeypatch):
    async def launched(*args, **options):
        pytest.fail("something was started")

    monkeypatch.setattr("forge_agents.runtime.mesh.launch_hosts", launched)
    model = tiny_models(settings={"architectures": ["MixtralForCausalLM"]})
    policies = {"hero": Policy(str(model), name="hero")}
    reason = f"hero-learner cannot train {model.name}: .*'MixtralForCausalLM' cannot be trained .*TorchTitan has no"
    with pytest.raises(ValueError, match=reason):
        asyncio.run(Processes.start(policies, ProcessConfig(), folder=tmp_path))
    with pytest.raises(ValueError, match=reason):
        dry_run(policies, ProcessConfig(), Hosts(), gpus_per_host=8)
    dry_run({"hero": Policy(str(model), trainable=False)}, ProcessConfig(), Hosts(), gpus_per_host=8)
    chat = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    with (
        pytest.raises(ValueError, match=f"hero-learner cannot train {model.name}: "),
        SFTTrainer(policies["hero"], SFTConfig(), tmp_path) as sft,
    ):
        sft.fit([chat] * 4, steps=1)


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


def test_dry_run_refuses_a_model_that_engines_on_cpu_do_not_compute(tiny_models):
    policies = {"hero": Policy(str(tiny_models(family="qwen3_5", dtype="float32")), name="hero")}
    with pytest.raises(ValueError, match="hero has recurrent layers, .* not compute on CPU in float32, only in bfloat"):
        dry_run(policies, ProcessConfig(), Hosts(), gpus_per_host=0)
    assert any("GPU" in line for line in dry_run(policies, ProcessConfig(), Hosts(), gpus_per_host=8))


@pytest.mark.parametrize(("names", "twice"), [(("a", "a-learner"), "'a-learner'"), (("weights", "a"), "'weights'")])
def test_equal_names_of_processes_are_refused(names, twice):
    policies = {name: Policy("tiny-random", name=name) for name in names}
    compute = compute_processes(policies, {name: Path(name) for name in names}, ProcessConfig())
    with pytest.raises(ValueError, match=f"{twice} would be the name of .* Rename one of the policies"):
        check_hosts(compute, Hosts(), ProcessConfig())
    with pytest.raises(ValueError, match="Rename one"):
        dry_run(policies, ProcessConfig(), Hosts(), gpus_per_host=8)


def test_memory_of_engines_is_reported_on_devices_only():
    class Engine:
        def __init__(self, *peaks, error=None):
            self.peaks, self.error, self.on_device = peaks, error, any(peaks)

        async def infos(self):
            assert self.on_device, "on CPU it costs no message"
            if self.error is not None:
                raise self.error
            states = [SimpleNamespace(peak_device_bytes=peak, device_used_bytes=2 * peak) for peak in self.peaks]
            return dict(enumerate(states))

    def told(*engines):
        processes = SimpleNamespace(engines=dict(enumerate(engines)))
        return asyncio.run(Processes.engines_memory(processes))

    assert told(Engine(0)) == {}
    assert told(Engine(3, 5), Engine(4)) == {"engines/peak_device_bytes": 5.0, "engines/device_used_bytes": 10.0}
    for error in (ActorDiedError("it died", "hero"), RuntimeError("the engine has failed: out of memory")):
        assert told(Engine(3, error=error)) == {}


def test_only_adapters_on_one_model_share_an_engine_and_a_learner():
    lora = LoRA(rank=8)
    policies = {"a": Policy("m", name="a"), "b": Policy("m", name="b"), "c": Policy("m", name="c", lora=lora),
                "d": Policy("m", name="d", lora=lora), "e": Policy("n", name="e", lora=lora)}  # fmt: skip
    paths = {name: Path(policy.model) for name, policy in policies.items()}
    homes, adapters = assign_engines(policies, paths)
    assert homes == {"a": "a", "b": "b", "c": "c", "d": "c", "e": "e"}
    assert adapters == {"a": {}, "b": {}, "c": {"c": lora, "d": lora}, "e": {"e": lora}}
    assert learner_groups(policies, paths) == [["a"], ["b"], ["c", "d"], ["e"]]
