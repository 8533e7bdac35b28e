"""How large an engine's cache is where nobody said: one conversation at least, what fits at most."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forge_agents.models.sizes import SHAPES, ModelSize
from forge_agents.serving import EngineConfig, _actor, _vllm

GB = 1_000_000_000


@pytest.fixture
def large(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["8b"]))
    return tmp_path


def cache(folder: Path, monkeypatch: pytest.MonkeyPatch, free: int, **settings: object) -> int:
    monkeypatch.setattr(_vllm, "available_bytes", lambda: free)
    return _vllm.cache_bytes(EngineConfig(model=str(folder), **settings), "bfloat16")  # type: ignore[arg-type]


def test_a_model_at_its_own_context_starts(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = 40960 * ModelSize.named("8b").kv_per_token() * 2
    assert one == pytest.approx(6.04 * GB, rel=0.01)
    assert one < cache(large, monkeypatch, 64 * GB) < 1.02 * one
    assert one / 2 < cache(large, monkeypatch, 64 * GB, tp=2) < 1.02 * one / 2  # its heads are spread over the ranks


def test_short_conversations_take_a_gigabyte_or_what_they_can_use(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache(large, monkeypatch, 64 * GB, max_model_len=512) == GB
    few = cache(large, monkeypatch, 64 * GB, max_model_len=512, max_num_seqs=2)
    assert 1024 * 147456 < few < 2 * 1024 * 147456
    assert cache(large, monkeypatch, GB // 2, max_model_len=512) == GB // 2
    assert cache(large, monkeypatch, GB, max_model_len=512, kv_cache_gb=3.0) == 3 * GB  # somebody said


def test_a_conversation_that_does_not_fit_is_refused_with_one_that_does(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"max_model_len=40960 tokens needs 6\.1 GB.*147456 bytes a.*at most 13312"):
        cache(large, monkeypatch, 2 * GB)


def test_an_unknown_architecture_gets_what_it_always_got(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert cache(tmp_path, monkeypatch, 64 * GB) == GB


@pytest.mark.parametrize(("heads", "kv", "tp", "choices"), [(9, 3, 2, "1 or 3 or 9"), (4, 2, 3, "1 or 2 or 4")])
def test_ranks_that_do_not_divide_the_heads_are_refused(
    tmp_path: Path, heads: int, kv: int, tp: int, choices: str
) -> None:
    config = {**SHAPES["8b"], "num_attention_heads": heads, "num_key_value_heads": kv}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"tp={tp} does not divide .* choose {choices}$"):
        _vllm.check_ranks(EngineConfig(model=str(tmp_path), tp=tp))


def test_an_engine_tells_what_it_takes_of_its_device_and_what_all_do(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(mem_get_info=lambda: (10 * GB, 80 * GB), max_memory_allocated=lambda: 60 * GB)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "get_device_module", lambda: device)
    assert _actor._device_bytes() == (60 * GB, 70 * GB)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert _actor._device_bytes() == (0, 0)
