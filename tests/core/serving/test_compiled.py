"""What the door to vLLM does before an engine is built."""

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from forge_agents.serving import _vllm


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(torch.compiler, "load_compiled_function", torch.compiler.load_compiled_function)
    return tmp_path


def test_what_vllm_compiled_on_cpu_loads_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plain() -> None:
        """As PyTorch's own backend gives it on CPU."""

    class Whole:
        """As vLLM's backend gives it on GPU."""

        def finalize_loading(self, config: object) -> str:
            return f"with {config}"

    found = {"plain": plain, "whole": Whole()}

    def load(name: str, *, f_globals: object) -> SimpleNamespace:
        assert f_globals == "globals"
        return SimpleNamespace(_artifacts=SimpleNamespace(compiled_fn=found[name]))

    monkeypatch.setattr(torch.compiler, "load_compiled_function", load)
    _vllm._keep_compiled()
    _vllm._keep_compiled()  # of a second engine in the process
    again = {name: torch.compiler.load_compiled_function(name, f_globals="globals") for name in found}
    assert again["plain"]._artifacts.compiled_fn is plain
    assert again["plain"]._artifacts.compiled_fn.finalize_loading("a config") is None
    assert again["whole"]._artifacts.compiled_fn.finalize_loading("a config") == "with a config"
    assert Path(os.environ["VLLM_CACHE_ROOT"]).parent == cache


def test_what_was_compiled_for_other_threads_is_not_loaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = set()
    for threads in (1, 2, 1):
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "load_compiled_function", lambda: None)
            patch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            _vllm._keep_compiled()
            roots.add(Path(os.environ["VLLM_CACHE_ROOT"]).name)
    assert len(roots) == 2


def test_a_models_class_is_looked_at_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Registry:
        _run_in_subprocess = None  # as vLLM calls what imports all of it once more

    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.models"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["vllm.model_executor.models"], "registry", Registry, raising=False)
    _vllm._inspect_here()
    assert Registry._run_in_subprocess(os.getpid) == os.getpid()
