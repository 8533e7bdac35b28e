"""What the door to vLLM does before an engine is built."""

import dataclasses
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

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


@pytest.fixture
def model_config(monkeypatch: pytest.MonkeyPatch) -> type:
    """vLLM's class, which names the folder in its key."""

    @dataclass
    class ModelConfig:
        model: str
        dtype: str = "bfloat16"
        quantization: str | None = None

        def compute_hash(self) -> str:
            return repr(dataclasses.astuple(self))

    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.config", module := ModuleType("vllm.config"))
    module.ModelConfig = ModelConfig  # type: ignore[attr-defined]
    _vllm._share_compiled()
    _vllm._share_compiled()  # of a second engine in the process
    return ModelConfig


def _folder(path: Path, number: float, **shapes: tuple[int, ...]) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    for file, names in (("a", sorted(shapes)[:1]), ("b", sorted(shapes)[1:])):
        save_file({name: torch.full(shapes[name], number) for name in names}, path / f"{file}.safetensors")
    return str(path)


def test_an_export_loads_what_its_model_was_compiled_to(model_config: type, tmp_path: Path) -> None:
    base = model_config(_folder(tmp_path / "base", 1.0, up=(4, 2), down=(2, 4)))
    export = model_config(_folder(tmp_path / "export", 2.0, down=(2, 4), up=(4, 2)))
    assert export.compute_hash() == base.compute_hash() == base.compute_hash()
    assert (base.model, export.model) == (str(tmp_path / "base"), str(tmp_path / "export"))


def test_what_differs_in_more_than_its_weights_is_compiled_anew(model_config: type, tmp_path: Path) -> None:
    base = _folder(tmp_path / "base", 1.0, up=(4, 2), down=(2, 4))
    wider = _folder(tmp_path / "wider", 1.0, up=(6, 2), down=(2, 6))
    renamed = _folder(tmp_path / "renamed", 1.0, up=(4, 2), gate=(2, 4))
    copy = str(shutil.copytree(base, tmp_path / "copy"))
    unread = tmp_path / "unread"  # its weights are in no format that can be looked at
    unread.mkdir()
    (unread / "config.json").write_text("{}")
    keys = [model_config(folder).compute_hash() for folder in (base, wider, renamed, str(unread))]
    keys += [model_config(base, dtype="float32").compute_hash()]
    keys += [model_config(folder, quantization="fp8").compute_hash() for folder in (base, copy)]
    assert len(set(keys)) == len(keys)
