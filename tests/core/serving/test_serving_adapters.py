"""Adapters beside a served model: their names, shapes and versions, and what they add on CPU."""

import asyncio
import math
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from refusals import raises
from safetensors.torch import load_file, save_file

from forge_agents.errors import StallError
from forge_agents.models.sizes import ModelSize
from forge_agents.policy import LoRA
from forge_agents.serving import _shapes, _vllm
from forge_agents.serving.adapter_files import read_snapshot
from forge_agents.serving.config import EnginePlan
from forge_agents.serving.memory import adapter_weights
from forge_agents.types import VersionSpan
from forge_agents.weights.subscriber import LoadedWeights


def test_adapters_are_numbered_from_one():
    config = EnginePlan(adapters={"hero": LoRA(), "rival": LoRA()})
    assert [_vllm.adapter_number(config, name) for name in ("", "hero", "rival")] == [0, 1, 2]
    raises(ValueError, "no adapter 'her'. It has hero, rival", _vllm.adapter_number, config, "her")
    raises(ValueError, "no adapter 'hero'. It has none", _vllm.adapter_number, EnginePlan(), "hero")


def test_cpu_engines_with_adapters_are_not_compiled(monkeypatch):
    alone, adapted = (EnginePlan(adapters=own, enforce_eager=False) for own in ({}, {"hero": LoRA()}))
    monkeypatch.setattr("forge_agents.serving.config.visible_gpus", lambda: ())
    assert alone.compiled and not adapted.compiled
    monkeypatch.setattr("forge_agents.serving.config.visible_gpus", lambda: ("0",))
    assert adapted.compiled and not EnginePlan(adapters=adapted.adapters, enforce_eager=True).compiled


def test_completion_has_the_versions_of_its_adapter():
    result = [
        SimpleNamespace(version='{"0": 0, "1": 2, "2": 5}', start=0, end=3),
        SimpleNamespace(version='{"0": 0, "1": 2, "2": 6}', start=3, end=4),
        SimpleNamespace(version='{"0": 0, "1": 3, "2": 6}', start=4, end=9),
    ]
    spans = {adapter: _vllm._spans(result, adapter) for adapter in ("0", "1", "2")}
    assert spans["0"] == (VersionSpan(version=0, start=0, end=9),)
    assert spans["1"] == (VersionSpan(version=2, start=0, end=4), VersionSpan(version=3, start=4, end=9))
    assert spans["2"] == (VersionSpan(version=5, start=0, end=3), VersionSpan(version=6, start=3, end=9))


def test_adapter_shapes_follow_model_and_targets(tiny_llama, tiny_models):
    shapes = _shapes.adapter_shapes(str(tiny_llama), LoRA(rank=3, targets=("q_proj", "down_proj")))
    layer = "base_model.model.model.layers.0."
    assert shapes[layer + "self_attn.q_proj.lora_A.weight"] == (3, 128)
    assert shapes[layer + "mlp.down_proj.lora_B.weight"] == (128, 3)
    assert {name.split(".")[-3] for name in shapes} == {"q_proj", "down_proj"}
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    _shapes.check_tensors(tensors, shapes)
    raises(ValueError, "shape", _shapes.check_tensors, {name: value.T for name, value in tensors.items()}, shapes)


def test_adapter_of_fused_layers_adapts_all_of_their_parts(tiny_models):
    model = str(tiny_models(family="phi3"))
    shapes = _shapes.adapter_shapes(model, LoRA(rank=3))
    assert {name.split(".")[-3] for name in shapes} == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert shapes["base_model.model.model.layers.0.self_attn.qkv_proj.lora_B.weight"] == (256, 3)
    with pytest.raises(ValueError, match="qkv_proj is one layer of this model. Name all or none of q_proj, k_proj"):
        _shapes.adapter_shapes(model, LoRA(targets=("q_proj", "o_proj")))


def test_adapter_of_attention_adapts_recurrent_layers(tiny_models):
    model = str(tiny_models(family="qwen3_5"))
    lora = LoRA(rank=3, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
    shapes = _shapes.adapter_shapes(model, lora)
    recurrent = {name.split(".")[-3] for name in shapes if ".linear_attn." in name}
    assert recurrent == {"in_proj_qkv", "in_proj_z", "out_proj"}
    assert shapes["base_model.model.model.layers.0.linear_attn.in_proj_qkv.lora_B.weight"] == (512, 3)
    assert adapter_weights(ModelSize.of(Path(model)), lora) == sum(math.prod(shape) for shape in shapes.values())
    only_down = _shapes.adapter_shapes(model, LoRA(targets=("down_proj",)))
    assert {name.split(".")[-3] for name in only_down} == {"down_proj"}
    with pytest.raises(ValueError, match="in_proj_qkv is one layer of this model. Name all or none of q_proj, k_proj"):
        _shapes.adapter_shapes(model, LoRA(targets=("q_proj", "o_proj")))


def test_adapter_without_matching_layer_is_refused(tmp_path, tiny_llama):
    from safetensors.torch import save_file

    save_file({"model.layers.0.self_attn.q_proj.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    raises(ValueError, r"no layers \['down_proj', 'gate_proj'", _shapes.adapter_shapes, str(tmp_path), LoRA())


@pytest.mark.parametrize("tokens", [(1, 1, 1, 1, 1), (1, 0, 2, 2, 1), (0, 0, 0, 0, 0)], ids=str)
def test_each_token_uses_its_own_adapter(tokens):
    from vllm.lora.layers import LoRAMapping

    from forge_agents.serving._grouped_lora import GroupedLoRA

    wrapper = GroupedLoRA(max_num_batched_tokens=16, max_batches=16, device="cpu")
    wrapper.update_metadata(LoRAMapping(tokens, tokens, is_prefill=True), [2, 1], 2, 100)  # adapter 2 is in slot 0
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(5, 6, generator=rng), torch.randn(5, 7, generator=rng)
    a = tuple(torch.randn(2, 1, 3, 6, generator=rng) for _ in range(2))
    b = tuple(torch.randn(2, 1, width, 3, generator=rng) for width in (4, 3))
    expected = y.clone()
    for token, adapter in enumerate(tokens):
        if adapter:
            slot = {2: 0, 1: 1}[adapter]
            change = [b_part[slot, 0] @ (a_part[slot, 0] @ x[token]) for a_part, b_part in zip(a, b, strict=True)]
            expected[token] += 0.5 * torch.cat(change)
    wrapper.add_lora_linear(y, x, a, b, 0.5, (4, 3))
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("intact", [True, False], ids=["intact", "overwritten"])
def test_ranks_receive_an_adapter_without_the_buffer_around_it(tiny_llama, intact):
    from forge_agents.serving._actor import EngineActor

    lora = LoRA(rank=2, targets=("q_proj",))
    shapes = _shapes.adapter_shapes(str(tiny_llama), lora)
    buffer, start, views = torch.arange(1e6), 0, {}
    for name, shape in shapes.items():
        views[name] = buffer[start : start + shape[0] * shape[1]].view(shape)
        start += shape[0] * shape[1]
    sent = []

    async def is_intact():
        return intact

    async def apply():
        actor = EngineActor(EnginePlan(model=str(tiny_llama), adapters={"hero": lora}), None, "hero", 60.0)
        ranks = SimpleNamespace(call=lambda *args: sent.append(args))
        actor._thread = SimpleNamespace(ranks=ranks, call=ThreadPoolExecutor(1).submit)
        weights = LoadedWeights(version=3, tensors=views, fetch_s=0.0, _intact=is_intact)
        try:
            await actor._apply(weights, "hero", 1)
        finally:
            assert actor._failure is None and actor._versions["hero"] == (3 if intact else 0)

    if not intact:
        raises(StallError, "overwritten while they were read", asyncio.run, apply())
        assert not sent
        return
    asyncio.run(apply())
    ((_, _, _, tensors, version),) = sent
    assert version == 3 and len(pickle.dumps(tensors)) < 2 * 4 * start + 5000
    assert all(torch.equal(tensors[name], view) for name, view in views.items())


def test_snapshot_keeps_the_tensors_that_an_engine_computes(tiny_models, tmp_path):
    model = tiny_models(dtype="bfloat16")
    stored = load_file(model / "model.safetensors")
    shutil.copytree(model, tmp_path / "snapshot")
    others = {"model.visual.patch_embed.weight": torch.ones(2), "mtp.norm.weight": torch.ones(2)}
    save_file(stored | others, tmp_path / "snapshot" / "model.safetensors", {"format": "pt"})
    read = read_snapshot(tmp_path / "snapshot", model)
    assert read.keys() == stored.keys() - {"lm_head.weight"}
    assert all(torch.equal(read[name], stored[name]) for name in read)
    save_file(stored | {"novel.weight": torch.ones(2)}, tmp_path / "snapshot" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"snapshot does not fit .*novel.weight"):
        read_snapshot(tmp_path / "snapshot", model)
