import asyncio
import itertools
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import forge_agents as fa
from forge_agents.errors import HostError
from forge_agents.models.sizes import SHAPES, ModelSize
from forge_agents.runtime.cluster import Cluster
from forge_agents.runtime.host_process import HostFacts
from forge_agents.runtime.hosts import ProcessSlot
from forge_agents.serving import EngineClient, Fleet, fleet
from forge_agents.serving.config import EnginePlan
from forge_trainers.run.parts import Part
from forge_trainers.run.placement import place


@pytest.fixture
def started(monkeypatch):
    """Starts a fleet without engines and records the arguments of `start_engines`."""
    requested = {}

    async def engines(folders, configs, *, adapters, store, timeout_s):
        requested.update(adapters=adapters, store=store)
        return {name: EngineClient(configs[name], name=name, store=store) for name in folders}

    monkeypatch.setattr(fleet, "start_engines", engines)
    monkeypatch.setattr(fleet.models, "resolve", Path)
    monkeypatch.setattr(fleet.Renderer, "of", lambda path, thinking: SimpleNamespace(path=path))

    def start(policies, store=None, config=None):
        return asyncio.run(Fleet.start(policies, config or fa.EngineConfig(), store=store)), requested

    return start


def policies(folder, *names, **settings):
    return {name: fa.Policy(str(folder), name=name, **settings) for name in names}


def test_frozen_policies_share_an_engine_per_model(started, tmp_path):
    one, two = policies(tmp_path / "m", "a", "b"), policies(tmp_path / "n", "c")
    result, _ = started(one | two)
    assert result.engines.keys() == {"a", "c"}
    assert result.policy_engines.keys() == {"a", "b", "c"}
    assert result.policy_engines["b"].renderer.path == tmp_path / "m"


def test_policy_with_other_prompts_than_its_model_was_trained_with_is_named(started, tmp_path, caplog):
    export = tmp_path / "export"
    export.mkdir()
    trained = {"thinking": "off", "keep_reasoning": "turn", "context": "newest", "trainable": True}
    (tmp_path / "config.yaml").write_text(json.dumps({"policies": {"player": trained}}))
    started(policies(export, "a", thinking="off", keep_reasoning="turn", context="newest") | policies("elsewhere", "b"))
    assert not caplog.messages
    started(policies(export, "a", thinking="off"))
    (message,) = caplog.messages
    assert "policy 'a' has keep_reasoning='all', context='end'" in message
    assert f"{export} was trained with keep_reasoning='turn', context='newest'" in message
    (tmp_path / "config.yaml").write_text(json.dumps({"policy": {"trainable": True, "thinking": "x" * 10_000}}))
    started(policies(export, "a"))
    assert len(caplog.messages[1]) < 1000, "a stranger's file may hold any text"


def test_pipe_next_to_an_export_does_not_stall_the_start(started, tmp_path):
    (tmp_path / "export").mkdir()
    os.mkfifo(tmp_path / "config.yaml")

    def end_reader():
        os.close(os.open(tmp_path / "config.yaml", os.O_RDWR))

    timer = threading.Timer(10.0, end_reader)
    timer.start()
    result, _ = started(policies(tmp_path / "export", "a"))
    was_in_time = timer.is_alive()
    timer.cancel()
    assert was_in_time and result.policy_engines.keys() == {"a"}


def test_trainable_policies_have_engines_and_adapters_share_one(started, tmp_path):
    whole = policies(tmp_path / "m", "a", "b")
    adapted = policies(tmp_path / "m", "x", "y", lora=fa.LoRA(rank=2))
    result, requested = started(whole | adapted, store=object())
    assert result.engines.keys() == {"a", "b", "x"}  # in one engine b would load what a has learned
    assert {name: set(own) for name, own in requested["adapters"].items()} == {"a": set(), "b": set(), "x": {"x", "y"}}
    assert [result.policy_engines[name].adapter for name in "abxy"] == ["", "", "x", "y"]
    assert result.policy_engines["y"].engine is result.engines["x"]


@pytest.fixture
def on_gpus(monkeypatch, tiny_llama):
    """Return the start arguments of engines of that many models, each on the next of `gpus` GPUs of `size` bytes."""

    def configs(gpus, models=2, size=80_000_000_000, folders=None, **settings):
        seats = itertools.cycle(range(gpus))

        def rehearse(meshes):
            return [
                ProcessSlot(name=name, role=role, rank=0, host="here", gpu=str(next(seats)), gpu_bytes=size)
                for name, role, _ in meshes
            ]

        monkeypatch.setattr(fleet.mesh, "preview_placement", rehearse)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
        folders = folders or {f"model-{i}": tiny_llama for i in range(models)}
        return fleet.divide_gpus(folders, fa.EngineConfig(**settings), {})

    def config(*given, **settings):
        """Of the first."""
        return next(iter(configs(*given, **settings).values()))

    config.all = configs
    return config


def test_engines_divide_only_shared_gpus(on_gpus):
    assert on_gpus(gpus=2) == on_gpus(gpus=1, models=1) == fa.EngineConfig()  # each has one alone
    shared = on_gpus(gpus=1)
    assert shared.gpu_memory_utilization == 0.475
    assert 30 < shared.kv_cache_gb < 0.475 * 80 - 2.5
    assert on_gpus(gpus=1, replicas=2).gpu_memory_utilization == 0.2375
    assert [own.gpu_memory_utilization for own in on_gpus.all(gpus=2, models=3).values()] == [0.475, None, 0.475]
    assert on_gpus(gpus=1, kv_cache_gb=1.0).kv_cache_gb == 1.0
    unknown = on_gpus(gpus=1, size=0)
    assert (unknown.gpu_memory_utilization, unknown.kv_cache_gb) == (0.45, None)


def test_large_and_small_model_share_a_gpu_by_need(on_gpus, tmp_path):
    """Half of the GPU would be too little for the large one."""
    folders = {}
    for name in ("32b", "0.6b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(SHAPES[name]))
        folders[name] = tmp_path / name
    result = on_gpus.all(gpus=1, folders=folders, max_model_len=2048)
    parts = [Part(name=name, ranks=1, size=ModelSize.of(folder)) for name, folder in folders.items()]
    placed = place(parts, fa.EngineConfig(max_model_len=2048), fleet.mesh.preview_placement)
    assert {name: EnginePlan.of(config) for name, config in result.items()} == placed.engines
    large, little = (own.gpu_memory_utilization for own in result.values())
    assert large > 0.8 and little < 0.2 and large + little == pytest.approx(0.95, abs=1e-3)
    with pytest.raises(HostError, match=r"76\.0 may be used: engine 32b expects .*; engine 0\.6b expects"):
        on_gpus.all(gpus=1, folders=folders, max_model_len=16384)


def test_configured_share_is_kept_and_too_many_engines_are_refused(on_gpus):
    assert on_gpus(gpus=1, gpu_memory_utilization=0.2).kv_cache_gb is None
    with pytest.raises(HostError, match=r"76\.0 may .*gpu_memory_utilization=0\.5 of engine \S+, which takes 40\.0 GB"):
        on_gpus(gpus=1, gpu_memory_utilization=0.5)
    with pytest.raises(HostError, match=r"of which 15\.2 may be used: engine model-0 expects 2\.\d GB"):
        on_gpus(gpus=1, models=8, size=16_000_000_000)


def test_shared_gpus_stay_reserved_until_the_fleet_ends(started, tmp_path, monkeypatch):
    layout = Cluster(fa.Hosts(), lambda: "here")
    layout._here.facts = HostFacts(
        hostname="node", gpus=("0", "1"), cores=frozenset({0}), memory_domain="", gpu_bytes=(80_000_000_000,) * 2
    )
    monkeypatch.setattr(fleet.mesh, "_cluster", lambda: layout)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    each = {}
    for name, shape in {"large": "32b", "other": "8b", "small": "0.6b"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(SHAPES[shape]))
        each |= policies(tmp_path / name, name)
    result, _ = started(each, config=fa.EngineConfig(max_model_len=2048))
    gpus = [layout.allocate("engines", 1, name).gpus for name in ("small", "other", "large")]
    assert gpus == [("0",), ("1",), ("0",)]
    assert [own._config.gpu_memory_utilization is None for own in result.engines.values()] == [False, True, False]
    asyncio.run(result.stop())
    assert layout._reserved == {} and not any(layout._here.gpu_users.values())


def test_engines_on_cpu_divide_the_cores(monkeypatch):
    monkeypatch.setattr(fleet, "visible_gpus", lambda: ())
    monkeypatch.setattr(fleet.os, "sched_getaffinity", lambda _: set(range(6)))

    def threads(engines, **settings):
        return fleet.with_divided_threads(fa.EngineConfig(**settings), engines).threads

    assert [threads(n) for n in (1, 2, 4, 9)] == [None, 3, 1, 1]
    assert threads(2, threads=5) == 5 and threads(2, tp=2) == 1 and threads(1, tp=2) == 3
    monkeypatch.setattr(fleet.mesh, "has_remote_hosts", lambda: True)
    assert threads(2) is None
    monkeypatch.setattr(fleet.mesh, "has_remote_hosts", lambda: False)
    monkeypatch.setattr(fleet, "visible_gpus", lambda: ("0",))
    assert threads(2) is None
