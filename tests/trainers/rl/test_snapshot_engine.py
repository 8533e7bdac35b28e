"""Snapshots of a LoRA policy as adapters on its engine: slots, versions, files of strangers."""

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors
import torch
from plain_env import Plain
from refusals import raises
from safetensors.torch import save_file

import forge_agents as fa
from forge_agents.cli.config import parse
from forge_agents.cli.served import find_policies
from forge_agents.errors import MismatchError
from forge_agents.policy import SnapshotPolicy
from forge_agents.rollout.policy_engine import LoadedSnapshot, PolicyEngine
from forge_agents.rollout.rollout import Rollout
from forge_agents.serving._shapes import adapter_shapes, expected_shapes
from forge_agents.serving.adapter_files import ADAPTER_FILE, read_adapter
from forge_agents.serving.fleet import assign_engines
from forge_agents.types import Completion, VersionSpan
from forge_trainers.rl.league_policies import policies_of
from forge_trainers.rl.plan import RunPlan
from forge_trainers.rl.rewards import env_reward
from forge_trainers.rl.snapshot_engine import SnapshotEngine
from forge_trainers.rl.tasks import Task, TaskSampler

AGENTS = ("player_0", "player_1")
LORA = fa.LoRA(rank=2, targets=("q_proj",))
MANY = {"opponents_per_step": 99, "pool": 100}, 8


def hero(model, **options):
    return fa.Policy(str(model), name="hero", lora=LORA, **options)


def write_adapter(folder, model, *, value=0.5, **changes):
    """Write an adapter in which all weights of B are `value`. Returns its file."""
    shapes = adapter_shapes(str(model), LORA)
    tensors = {name: torch.full(shape, value if "lora_B" in name else 1.0) for name, shape in shapes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors | changes, folder / ADAPTER_FILE)
    return folder / ADAPTER_FILE


class Store:
    """Records version and first weight of B of what is published under each name."""

    def __init__(self):
        self.published = {}
        self.ref = self

    def publisher(self, name, **options):
        async def publish(version, tensors):
            weight = next(float(tensor[0, 0]) for key, tensor in tensors.items() if "lora_B" in key)
            self.published[name] = (version, weight)

        return SimpleNamespace(publish=publish)


class Engine:
    """Reports the version that each adapter has loaded."""

    max_model_len = 64

    def __init__(self, store):
        self.store, self.loaded, self.loads = store, {"": 0}, []

    async def load_weights(self, version, *, adapter, timeout_s):
        assert self.store.published[adapter][0] == version
        self.loaded[adapter] = version
        self.loads.append(adapter)

    async def generate(self, prompt_ids, sampling, *, adapter=""):
        spans = (VersionSpan(version=self.loaded[adapter], start=0, end=1),)
        return Completion(token_ids=(1,), logprobs=(0.0,), finish_reason="stop", versions=spans)


class Run:
    """Processes of a run with one engine, and a league's snapshots 1 to 8."""

    def __init__(self, model, folder, **settings):
        self.store, self.republish = Store(), {}
        self.engine, self.league = Engine(self.store), fa.League(hero(model), **settings)
        self.policy_engines = {"hero-opponent": PolicyEngine(self.engine, None)}
        self.snapshots = SnapshotEngine(self.league, fa.GRPOConfig(), folder)
        for version in range(1, 9):
            write_adapter(folder / f"hero-{version:06d}/adapter", model, value=float(version))

    async def with_store(self, work):
        return await work(self.store)

    def serve(self, *versions):
        names = {f"hero-{version:06d}": version for version in versions}
        (batch,) = self.snapshots.batches(list(names))
        return asyncio.run(self.snapshots.serve({name: names[name] for name in batch}, self))

    def reported(self, served):
        completions = {name: asyncio.run(each.generate((0,), fa.Sampling())) for name, each in served.items()}
        return {name: completion.versions[0].version for name, completion in completions.items()}


def test_lora_league_has_the_engines_of_its_policy(tiny_llama, tmp_path):
    paths = dict.fromkeys(("hero", "hero-opponent", "rival"), tiny_llama)
    alone = assign_engines({"hero": hero(tiny_llama)}, paths)
    for options, slots in (({}, 2), ({"pool": 2}, 1), ({"opponents_per_step": 9}, 7), ({"self_play": 1.0}, 0), MANY):
        league = fa.League(hero(tiny_llama), **options)
        engines, adapters = assign_engines(
            policies_of(league, fa.GRPOConfig(), tmp_path).declared({"duel": AGENTS}), paths
        )
        assert engines == {"hero": "hero", "hero-opponent": "hero"} and set(adapters) == set(alone[1])
        assert adapters["hero"] == {
            "hero": LORA,
            **{f"hero-opponent-{slot}": LORA for slot in range(1, slots + 1)},
        }
    rival = fa.Policy(str(tiny_llama), name="rival", trainable=False)
    whole = fa.League(replace(hero(tiny_llama), lora=None), anchors=(rival,))
    declared = policies_of(whole, fa.GRPOConfig(), tmp_path).declared({"duel": AGENTS})
    assert assign_engines(declared, paths)[1] == {"hero": {}, "hero-opponent": {}, "rival": {}}


def test_dry_run_has_the_policies_of_the_run(tiny_llama, tmp_path):
    file = tmp_path / "run.yaml"
    lora = "{rank: 2, targets: [q_proj]}"
    file.write_text(
        f"env: forge/KuhnPoker-v0\npolicies: {{hero: {{model: {tiny_llama}, lora: {lora}}}}}\nleague: {{pool: 4}}\n"
    )
    run = parse(fa.RunConfig, [str(file)], prog="forge-agents train", description="d")
    assert run.models == policies_of(run.players, run.trainer, tmp_path).declared({"kuhn": AGENTS})
    assert run.models["hero-opponent"].adapters == ("hero-opponent-1", "hero-opponent-2")


def test_snapshots_are_loaded_when_they_play_and_stay(tiny_llama, tmp_path):
    run = Run(tiny_llama, tmp_path)
    assert run.reported(run.serve(0)) == {"hero-000000": 0} and run.engine.loads == []
    served = run.serve(3, 0, 5)
    assert run.reported(served) == {"hero-000003": 3, "hero-000000": 0, "hero-000005": 5}
    slots = {name: each.adapter for name, each in served.items()}
    assert slots == {"hero-000000": "", "hero-000003": "hero-opponent-1", "hero-000005": "hero-opponent-2"}
    assert run.reported(run.serve(5, 3)) == {"hero-000003": 3, "hero-000005": 5} and len(run.engine.loads) == 2
    assert run.reported(run.serve(5, 8)) == {"hero-000005": 5, "hero-000008": 8}
    assert run.engine.loads == ["hero-opponent-1", "hero-opponent-2", "hero-opponent-1"]
    weights = {name: weight for name, (_, weight) in run.store.published.items()}
    assert weights == {"hero-opponent-1": 8.0, "hero-opponent-2": 5.0}


def test_more_snapshots_than_adapters_play_one_after_the_other(tiny_llama, tmp_path):
    run = Run(tiny_llama, tmp_path)
    run.serve(5)
    names = [f"hero-{version:06d}" for version in (1, 0, 2, 5, 3)]
    assert run.snapshots.batches(names) == [
        ["hero-000000", "hero-000005", "hero-000001"],
        ["hero-000002", "hero-000003"],
    ]
    assert run.snapshots.batches(names[1:2]) == [["hero-000000"]] and run.snapshots.batches([]) == []
    mirror = Run(tiny_llama, tmp_path, self_play=1.0)
    assert mirror.reported(mirror.serve(0)) == {"hero-000000": 0}


def test_other_weights_of_the_same_name_are_loaded_again(tiny_llama, tmp_path):
    run = Run(tiny_llama, tmp_path)
    run.serve(3)
    first = run.engine.loaded["hero-opponent-1"]
    write_adapter(tmp_path / "hero-000003/adapter", tiny_llama, value=9.0)
    run.snapshots.forget("hero-000003")
    assert run.reported(run.serve(3)) == {"hero-000003": 3}
    assert run.engine.loaded["hero-opponent-1"] > first, "otherwise the engine would not read them"
    assert run.store.published["hero-opponent-1"][1] == 9.0


def test_adapters_reach_a_store_that_replaces_another(tiny_llama, tmp_path):
    run = Run(tiny_llama, tmp_path)
    run.serve(3, 5)
    before = dict(run.store.published)
    run.store = Store()
    for publish in run.republish.values():
        asyncio.run(publish(run.store))
    assert run.store.published == before
    assert run.reported(run.serve(3, 5)) == {"hero-000003": 3, "hero-000005": 5} and len(run.engine.loads) == 2


class Echo(Plain):
    def act(self, agent, action):
        return fa.Outcome(rewards={agent: 1.0}, done=True)


def test_tokens_of_other_weights_end_the_run(tiny_llama):
    from forge_agents.rollout.rendering import Renderer

    engine = Engine(Store())
    snapshot = LoadedSnapshot(name="hero-000003", version=3, load=7)
    engines = {"hero-000003": PolicyEngine(engine, Renderer.of(tiny_llama), snapshot=snapshot)}
    rival = fa.Policy(str(tiny_llama), name="hero-000003", trainable=False, sampling=fa.Sampling(max_tokens=1))
    rollout = Rollout(make_env=Echo, env_id="echo", policies=rival, engines=engines)
    engine.generate = lambda prompt, sampling, **_: Engine.generate(engine, prompt, sampling)
    engine.loaded[""] = 7
    group = asyncio.run(rollout.group(0, 1))
    assert group.episodes[0].trajectories["a"].turns[0].versions == (VersionSpan(version=3, start=0, end=1),)
    engine.loaded[""] = 8
    raises(MismatchError, "for hero-000003 with weights of load 8, .* loaded as 7", asyncio.run, rollout.group(0, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": torch.zeros(1)}, r"1 are unknown \(\['extra'\]\).* or restore the file"),
        ({"lm_head.weight": torch.zeros(1)}, r"1 are unknown \(\['lm_head.weight'\]\)"),
        ({"A": torch.zeros(999, 2)}, r"has shape \(999, 2\)"),
        ({"A": torch.tensor(float("nan"))}, "not finite numbers"),
        ({"A": torch.tensor(1)}, "weights of type torch.int64"),
        ({"A": torch.tensor(1.0).to(torch.float8_e4m3fn)}, "weights of type torch.float8_e4m3fn"),
        ({"A": torch.tensor(3.4e38)}, "not finite numbers"),  # infinite in bfloat16
    ],
    ids=["unknown", "head", "large", "nan", "integers", "float8", "infinite in bfloat16"],
)
def test_adapter_of_a_stranger_is_refused(tiny_llama, tmp_path, change, message):
    name, shape = next(iter(adapter_shapes(str(tiny_llama), LORA).items()))
    changes = {
        name if key == "A" else key: value if value.ndim else value.repeat(shape) for key, value in change.items()
    }
    file = write_adapter(tmp_path, tiny_llama, **changes)
    raises(ValueError, message, read_adapter, file, Path(tiny_llama), LORA)


def test_large_adapter_is_refused_before_its_weights_are_read(tiny_llama, tmp_path, monkeypatch):
    name = next(iter(adapter_shapes(str(tiny_llama), LORA)))
    file = write_adapter(tmp_path, tiny_llama, **{name: torch.zeros(10_000, 128)})
    opens = safetensors.safe_open
    monkeypatch.setattr(
        safetensors,
        "safe_open",
        lambda file, framework: pytest.fail("read") if framework == "pt" else opens(file, "np"),
    )
    raises(ValueError, "has shape", read_adapter, file, Path(tiny_llama), LORA)


def write_model(folder, model, **changes):
    """Write a snapshot of all weights, which are 0.5 where `changes` have no others."""
    tensors = {name: torch.full(shape, 0.5) for name, shape in expected_shapes(str(model)).items()}
    folder.mkdir(parents=True)
    save_file(tensors | changes, folder / "model.safetensors")
    return folder / "model.safetensors"


def read_model(model, folder):
    league = fa.League(fa.Policy(str(model), name="hero"))
    return SnapshotEngine(league, fa.GRPOConfig(), folder)._read("hero-000003", 3)


def test_snapshot_of_all_weights_is_read_without_a_tied_head(tiny_llama, tmp_path):
    write_model(tmp_path / "hero-000003", tiny_llama)
    tensors = read_model(tiny_llama, tmp_path)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected_shapes(str(tiny_llama))
    assert all(tensor.eq(0.5).all() for tensor in tensors.values())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(99_999, 64), r"has shape \(99999, 64\)"),
        (torch.tensor(float("nan")), "not finite numbers"),
        (None, r"1 are unknown \(\['extra'\]\)"),
    ],
    ids=["large", "nan", "unknown"],
)
def test_snapshot_of_a_stranger_is_refused(tiny_llama, tmp_path, value, message):
    name, shape = next(iter(expected_shapes(str(tiny_llama)).items()))
    change = {"extra": torch.zeros(1)} if value is None else {name: value if value.ndim else value.repeat(shape)}
    write_model(tmp_path / "hero-000003", tiny_llama, **change)
    raises(ValueError, message, read_model, tiny_llama, tmp_path)


def test_sparse_snapshot_or_adapter_is_refused(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setattr("forge_agents.files.MAX_BYTES", 1 << 20)
    for file in (write_model(tmp_path / "hero-000003", tiny_llama), write_adapter(tmp_path / "adapter", tiny_llama)):
        os.truncate(file, 1 << 40)
    raises(ValueError, "hero-000003 does not fit .*almost none are on the disk", read_model, tiny_llama, tmp_path)
    raises(ValueError, "almost none are on the disk", read_adapter, file, Path(tiny_llama), LORA)


def test_cut_or_missing_adapter_is_named(tiny_llama, tmp_path):
    raises(ValueError, f"{ADAPTER_FILE} cannot be read", read_adapter, tmp_path / ADAPTER_FILE, tiny_llama, LORA)
    file = write_adapter(tmp_path, tiny_llama)
    os.truncate(file, 100)
    raises(ValueError, "cannot be read .*half-written", read_adapter, file, tiny_llama, LORA)


def league_state(model, folder, **rows):
    """Return a LoRA league, and the state of one with snapshot 3 in which `rows` are replaced."""
    first, second = (policies_of(fa.League(hero(model)), fa.GRPOConfig(), folder) for _ in range(2))
    first.standings.add("hero-000003", 3)
    return second, first.state_dict() | {name: np.array(value) for name, value in rows.items()}


def test_league_of_adapters_continues_from_a_checkpoint(tiny_llama, tmp_path):
    league, state = league_state(tiny_llama, tmp_path)
    raises(ValueError, f"hero-000003/adapter/{ADAPTER_FILE} of the league is missing", league.load_state_dict, state)
    write_adapter(tmp_path / "league/hero-000003/adapter", tiny_llama)
    league.load_state_dict(state)
    assert [opponent.name for opponent in league.standings.opponents] == ["hero-000000", "hero-000003"]


def test_resumed_league_plays_the_adapters_of_its_snapshots(tiny_llama, tmp_path):
    run = Run(tiny_llama, tmp_path / "league", opponents="uniform", opponents_per_step=7, self_play=0.0)
    run.policy_engines["hero"] = PolicyEngine(run.engine, None, "hero")
    first, second = (policies_of(run.league, fa.GRPOConfig(), tmp_path) for _ in range(2))
    for version in (2, 3, 5, 8):
        first.standings.add(f"hero-{version:06d}", version)
    second.load_state_dict(first.state_dict())
    met = {}

    async def play(task, players, engines):
        (rival,) = {players[agent].name for agent in AGENTS} - {"hero"}
        completion = await engines[rival].generate((0,), fa.Sampling())
        weight = run.store.published.get(engines[rival].adapter, (0, 0.0))[1]
        met[rival] = completion.versions[0].version, weight

    tasks = [Task(env_id="duel", seed=number, agents=AGENTS, number=number) for number in range(14)]
    asyncio.run(second.collect(tasks, play, run, step=3))
    assert len(met) >= 3 and met == {name: (int(name[-6:]), float(name[-6:])) for name in met}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"names": ["hero-000000", "hero"]}, "league's 'hero' is not a valid snapshot name"),
        ({"names": ["hero-000000", "../hero-000003"]}, "is not a valid snapshot name"),
        ({"counts": [[0, 0], [4, 0]]}, "league's 'hero-000003' is not a valid snapshot name"),
        ({"counts": [[0, 0], [0, 0]]}, "opponent or version twice"),
        ({"counts": [[3, 0], [3, 0]]}, "opponent or version twice"),
    ],
    ids=["current weights", "path", "other version", "start model", "start model of a later version"],
)
def test_opponents_of_a_stranger_are_snapshots_of_their_version(tiny_llama, tmp_path, rows, message):
    league, state = league_state(tiny_llama, tmp_path, **rows)
    write_adapter(tmp_path / "league/hero-000003/adapter", tiny_llama)
    raises(ValueError, message, league.load_state_dict, state)


def test_recorded_settings_of_a_league_can_be_served(tiny_llama, tmp_path):
    sampler = TaskSampler("forge/KuhnPoker-v0")
    config = fa.GRPOConfig()
    plan = RunPlan(sampler, policies_of(fa.League(hero(tiny_llama)), config, tmp_path), config, env_reward)
    assert isinstance(plan.models["hero-opponent"], SnapshotPolicy) and plan.trained == ["hero"]
    settings = plan.settings(reward=None, policy_function=None, steps=1, hosts=fa.Hosts())
    assert settings["policies"]["hero-opponent"]["lora"] is None
    (tmp_path / "config.yaml").write_text(json.dumps(settings, default=str))
    (tmp_path / "export").symlink_to(tiny_llama)
    assert find_policies(str(tmp_path)).policies["hero-opponent"] == fa.Policy(
        str(tiny_llama), name="hero-opponent", trainable=False
    )
