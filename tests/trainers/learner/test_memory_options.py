"""Compiling, offloading, recomputing, the type of sums: what they change and what they leave alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_agents.types import EpisodeBatch
from forge_trainers.learner import attention, titan
from forge_trainers.learner import model as titan_model
from forge_trainers.learner.attention import attend
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.learner.core import LearnerCore

Batches = Callable[..., EpisodeBatch]


def config(model: Path, **changes: Any) -> LearnerConfig:
    base = LearnerConfig(model=str(model), compute_dtype="float32", threads=1, lr=1e-3)
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compile": True}, "each new row would be compiled anew"),
        ({"cpu_offload": True}, "the weights are in the host's memory"),
    ],
)
def test_what_helps_nobody_on_cpu_is_refused_there(tiny_llama: Path, changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        LearnerCore(config(tiny_llama, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_checkpointing": "memory_budget"}, "set compile=True"),
        ({"memory_budget": 1.5}, "memory_budget=1.5"),
        ({"reduce_dtype": "float16"}, "reduce_dtype='float16'"),
        ({"activation_checkpointing": "some"}, "activation_checkpointing='some'"),
        ({"ep": 0}, "ep=0"),
    ],
)
def test_bad_options_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        LearnerConfig(**changes)


@pytest.fixture
def gpu_options(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is refused on CPU runs; blocks are traced and not lowered, which takes seconds less."""
    monkeypatch.setattr(titan_model, "check_device", lambda _: None)
    monkeypatch.setattr(titan, "CompileConfig", partial(titan.CompileConfig, backend="aot_eager"))
    budget = torch._functorch.config.activation_memory_budget
    yield
    torch._functorch.config.activation_memory_budget = budget
    torch.compiler.reset()


@pytest.mark.usefixtures("gpu_options")
def test_compiled_blocks_within_a_memory_budget_compute_the_same(tiny_llama: Path, random_batch: Batches):
    batch = random_batch(groups=1)
    compiled = LearnerCore(
        config(tiny_llama, compile=True, activation_checkpointing="memory_budget", memory_budget=0.25)
    )
    assert all(block._compiled_call_impl is not None for block in compiled.model.layers.values())
    assert torch._functorch.config.activation_memory_budget == 0.25
    expected, found = LearnerCore(config(tiny_llama)).train_step(batch), compiled.train_step(batch)
    for name in ("loss", "grad_norm", "entropy"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)


@pytest.mark.parametrize(("how", "passes"), [("none", 1), ("selective", 2), ("full", 2)])
def test_checkpointing_goes_through_the_blocks_again(
    tiny_llama: Path, random_batch: Batches, monkeypatch: pytest.MonkeyPatch, how: str, passes: int
):
    calls = []
    monkeypatch.setattr(attention, "attend", lambda *args, **options: calls.append(1) or attend(*args, **options))
    core = LearnerCore(config(tiny_llama, activation_checkpointing=how))
    core.train_step(random_batch(groups=1))
    assert len(calls) == passes * len(core.model.layers)


def test_sums_in_bfloat16_are_rounded(tiny_llama: Path, random_batch: Batches, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(titan_model, "needs_fsdp", lambda _: True)  # by itself a rank has nothing to add up
    exact, rounded = (
        LearnerCore(config(tiny_llama, reduce_dtype=dtype)).train_step(random_batch())
        for dtype in ("float32", "bfloat16")
    )
    assert rounded["loss"] == exact["loss"]
    assert 1e-7 < abs(rounded["grad_norm"] / exact["grad_norm"] - 1) < 1e-3
