"""Setup of vLLM before an engine is built."""

import dataclasses
import importlib.util
import json
import logging
import os
import shutil
import sys
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from forge_agents.serving import _vllm


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Those parts of vLLM that decide how a model is compiled on CPU: as one graph, whatever was asked for."""

    class Mode(IntEnum):
        NONE = 0
        DYNAMO_TRACE_ONCE = 2
        VLLM_COMPILE = 3

    class Platform:
        @classmethod
        def check_and_update_config(cls, config: SimpleNamespace) -> None:
            compilation = config.compilation_config
            compilation.backend = "inductor"
            if config.adapters:
                compilation.mode = Mode.NONE
            elif compilation.mode is Mode.VLLM_COMPILE:
                compilation.mode = Mode.DYNAMO_TRACE_ONCE

    class Pass:
        def __call__(self, graph: object) -> None:
            raise AttributeError("no such kernel on CPU")

    result = {
        "vllm": {},
        "vllm.config": {"CompilationMode": Mode},
        "vllm.platforms": {"current_platform": Platform()},
        "vllm.compilation.passes.utility.fix_functionalization": {"FixFunctionalizationPass": Pass},
    }
    for name, values in result.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        vars(sys.modules[name]).update(values)
    _vllm._compile_by_layer()
    _vllm._compile_by_layer()  # of a second engine in the process
    return SimpleNamespace(Mode=Mode, Platform=Platform, Pass=Pass)


def test_cpu_models_are_compiled_by_layer(cpu):
    def chosen(mode: int, adapters: bool = False) -> SimpleNamespace:
        compilation = SimpleNamespace(mode=mode, compile_sizes=None)
        cpu.Platform.check_and_update_config(SimpleNamespace(compilation_config=compilation, adapters=adapters))
        return compilation

    by_layer = chosen(cpu.Mode.VLLM_COMPILE)
    assert (by_layer.mode, by_layer.backend, by_layer.compile_sizes) == (cpu.Mode.VLLM_COMPILE, "inductor", [])
    assert chosen(cpu.Mode.VLLM_COMPILE, adapters=True).mode is cpu.Mode.NONE
    assert chosen(cpu.Mode.NONE).mode is cpu.Mode.NONE
    cpu.Pass()("a graph")


def test_warnings_about_layers_without_weights_are_filtered(caplog):
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None and vllm.origin is not None
    module = Path(vllm.origin).parent.joinpath(*_vllm._RELOAD_LOGGER.split(".")[1:]).with_suffix(".py").read_text()
    assert "logger = init_logger(__name__)" in module and '"%s: Failed to load weights", layer' in module
    logger = logging.getLogger(_vllm._RELOAD_LOGGER)
    logger.addFilter(_vllm._is_relevant)
    try:
        logger.warning("%s: Failed to load weights", "RotaryEmbedding")
        logger.warning("Allocating %.1f MB of device memory", 3.0)
        logger.warning("%s: something else", "RotaryEmbedding")
    finally:
        logger.removeFilter(_vllm._is_relevant)
    # whose line it is stands before it where an actor has run in this process
    (memory, other) = (record.message for record in caplog.records)
    assert memory.endswith("Allocating 3.0 MB of device memory") and other.endswith("RotaryEmbedding: something else")


def test_compile_cache_stays_in_the_configured_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    _vllm._set_compile_cache()
    _vllm._set_compile_cache()  # of a second engine in the process
    assert Path(os.environ["VLLM_CACHE_ROOT"]).parent == tmp_path


def test_compile_cache_depends_on_the_processor_and_needs_no_proc(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    roots = set()
    for flags in ({"avx2"}, {"avx2", "avx512f"}, set()):
        monkeypatch.setattr(_vllm, "processor_flags", lambda flags=flags: frozenset(flags))
        _vllm._set_compile_cache()
        roots.add(os.environ["VLLM_CACHE_ROOT"])
    assert len(roots) == 3


def test_compile_cache_depends_on_the_number_of_threads(monkeypatch, tmp_path):
    roots = set()
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    for threads in (1, 2, 1):  # as in a process that one with other threads has started
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        _vllm._set_compile_cache()
        roots.add(Path(os.environ["VLLM_CACHE_ROOT"]))
    assert len(roots) == 2 and {root.parent for root in roots} == {tmp_path}


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


def test_exports_share_the_compiled_code_of_their_model(model_config, tmp_path):
    base = model_config(_folder(tmp_path / "base", 1.0, up=(4, 2), down=(2, 4)))
    export = model_config(_folder(tmp_path / "export", 2.0, down=(2, 4), up=(4, 2)))
    assert export.compute_hash() == base.compute_hash() == base.compute_hash()
    assert (base.model, export.model) == (str(tmp_path / "base"), str(tmp_path / "export"))


def test_different_models_do_not_share_compiled_code(model_config, tmp_path):
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


def test_packages_are_not_hidden_from_a_library_that_has_found_them(monkeypatch):
    """After `is_scipy_available() == True`, transformers imports scipy, and the engine's build would fail."""
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    assert "scipy" in _vllm._unused_packages()
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    assert _vllm._unused_packages() == ()
