import asyncio
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

import forge_agents as fa
from forge_agents.errors import HostError
from forge_agents.runtime.hosts import Seat
from forge_agents.serving import Fleet, Replicas, fleet


@pytest.fixture
def started(monkeypatch):
    """Starts a fleet without engines; what `start_engines` was asked for is beside it."""
    asked = {}

    async def engines(folders, configs, *, adapters, store, timeout_s):
        asked.update(adapters=adapters, store=store)
        return {name: Replicas(configs[name], name, store, None, None, silence_s=1.0, start_s=1.0) for name in folders}

    monkeypatch.setattr(fleet, "start_engines", engines)
    monkeypatch.setattr(fleet.models, "resolve", Path)
    monkeypatch.setattr(fleet.Renderer, "of", lambda path, thinking: SimpleNamespace(path=path))

    def start(policies, store=None, config=None):
        return asyncio.run(Fleet.start(policies, config or fa.EngineConfig(), store=store)), asked

    return start


def policies(folder, *names, **settings):
    return {name: fa.Policy(str(folder), name=name, **settings) for name in names}


def test_who_never_changes_shares_an_engine_by_model(started, tmp_path):
    one, two = policies(tmp_path / "m", "a", "b"), policies(tmp_path / "n", "c")
    found, _ = started(one | two)
    assert found.engines.keys() == {"a", "c"}
    assert found.samplers.keys() == found.served.keys() == {"a", "b", "c"}
    assert found.served["b"].renderer.path == tmp_path / "m"


def test_who_may_change_has_an_engine_and_adapters_share_one(started, tmp_path):
    whole = policies(tmp_path / "m", "a", "b")
    adapted = policies(tmp_path / "m", "x", "y", lora=fa.LoRA(rank=2))
    found, asked = started(whole | adapted, store=object())
    assert found.engines.keys() == {"a", "b", "x"}  # in one engine b would load what a has learned
    assert {name: set(own) for name, own in asked["adapters"].items()} == {"a": set(), "b": set(), "x": {"x", "y"}}
    assert [found.samplers[name]._adapter for name in "abxy"] == ["", "", "x", "y"]
    assert found.samplers["y"]._engines is found.engines["x"]


@pytest.mark.parametrize("name", ["adapters", "adapter_folders"])
def test_adapters_are_named_by_policies_alone(started, tmp_path, name):
    wish = fa.EngineConfig(**{name: {"x": fa.LoRA(rank=2) if name == "adapters" else "folder"}})
    with pytest.raises(ValueError, match=rf"engine\.{name} names x; .* give the Policy its lora"):
        started(policies(tmp_path / "m", "x"), config=wish)


def test_a_model_that_no_policy_names_is_refused(started, tmp_path):
    for name in "mn":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    of_policy = fa.EngineConfig(model=str(tmp_path / "n" / ".." / "m"))
    assert started(policies(tmp_path / "m", "a"), config=of_policy)[0].engines.keys() == {"a"}
    with pytest.raises(ValueError, match=r"engine\.model='.*n' is the model of no policy.*/m: leave it out"):
        started(policies(tmp_path / "m", "a"), config=fa.EngineConfig(model=str(tmp_path / "n")))


@pytest.fixture
def on_gpus(monkeypatch, tiny_llama):
    """What engines of so many models would be started with, each of them on the next of `gpus` GPUs of `size` bytes."""

    def config(gpus, models=2, size=80_000_000_000, **settings):
        seats = itertools.cycle(range(gpus))

        def rehearse(meshes):
            return [
                Seat(name=name, role=role, rank=0, host="here", gpu=str(next(seats)), gpu_bytes=size)
                for name, role, _ in meshes
            ]

        monkeypatch.setattr(fleet.mesh, "rehearse", rehearse)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
        folders = {f"model-{i}": tiny_llama for i in range(models)}
        return fleet.divided(folders, fa.EngineConfig(**settings), {})

    return config


def test_engines_divide_a_gpu_that_they_share_and_only_that(on_gpus):
    assert on_gpus(gpus=2) == on_gpus(gpus=1, models=1) == fa.EngineConfig()  # each has one alone
    shared = on_gpus(gpus=1)
    assert shared.gpu_memory_utilization == 0.45
    assert 30 < shared.kv_cache_gb < 0.45 * 80 - 2.5
    assert on_gpus(gpus=1, replicas=2).gpu_memory_utilization == 0.225
    assert on_gpus(gpus=2, models=3).gpu_memory_utilization == 0.45
    assert on_gpus(gpus=1, kv_cache_gb=1.0).kv_cache_gb == 1.0
    unknown = on_gpus(gpus=1, size=0)
    assert (unknown.gpu_memory_utilization, unknown.kv_cache_gb) == (0.45, None)


def test_what_was_said_of_a_shared_gpu_stays_and_too_many_engines_are_refused(on_gpus):
    assert on_gpus(gpus=1, gpu_memory_utilization=0.2).kv_cache_gb is None
    with pytest.raises(HostError, match=r"8 engines share a GPU, each may take 1\.8 GB of it, and one takes 2\.\d GB"):
        on_gpus(gpus=1, models=8, size=16_000_000_000)
