"""Compiling, offloading, recomputing, the type of sums: what they change and what they leave alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from learner_helpers import config, equal, moments_of, weights

from forge_trainers.learner import attention, titan
from forge_trainers.learner import model as titan_model
from forge_trainers.learner.attention import attend
from forge_trainers.learner.core import LearnerCore


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"compile": True}, "every new row would be compiled"), ({"cpu_offload": True}, "weights are in host memory")],
)
def test_options_without_use_on_cpu_are_refused_there(tiny_llama, changes, message):
    with pytest.raises(ValueError, match=message):
        LearnerCore(config(tiny_llama, **changes))


@pytest.fixture
def gpu_options(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Options that CPU refuses are allowed. Blocks are traced but not lowered, which is faster."""
    monkeypatch.setattr(titan_model, "check_without_gpu", lambda _: None)
    monkeypatch.setattr(titan, "CompileConfig", partial(titan.CompileConfig, backend="aot_eager"))
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("gpu_options")
def test_compiled_blocks_compute_the_same(tiny_llama, random_batch):
    batch = random_batch(groups=1)
    compiled = LearnerCore(config(tiny_llama, compile=True))
    assert all(block._compiled_call_impl is not None for block in compiled.model.layers.values())
    expected, metrics = LearnerCore(config(tiny_llama)).train_step(batch), compiled.train_step(batch)
    for name in ("loss", "grad_norm", "entropy"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-5)


@pytest.mark.parametrize(("how", "passes"), [("none", 1), ("selective", 2), ("full", 2)])
def test_checkpointing_goes_through_the_blocks_again(tiny_llama, random_batch, monkeypatch, how, passes):
    calls = []
    monkeypatch.setattr(attention, "attend", lambda *args, **options: calls.append(1) or attend(*args, **options))
    core = LearnerCore(config(tiny_llama, activation_checkpointing=how))
    core.train_step(random_batch(groups=1))
    assert len(calls) == passes * len(core.model.layers)


def test_rounded_moments_take_half_the_bytes_and_learn_the_same(tiny_llama, random_batch):
    exact, rounded = (LearnerCore(config(tiny_llama, optimizer_state_dtype=dtype)) for dtype in ("float32", "bfloat16"))
    start = weights(exact)
    losses = [[core.train_step(random_batch(seed=seed))["loss"] for seed in range(8)] for core in (exact, rounded)]
    for name, held in moments_of(rounded).items():
        assert {value.dtype for value in held} == {torch.bfloat16}
        assert 2 * sum(value.nbytes for value in held) == sum(value.nbytes for value in moments_of(exact)[name])
    assert losses[1] != losses[0]  # they are rounded
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)
    here, there = map(weights, (exact, rounded))
    for name, before in start.items():  # beside what was learned the rounding is little
        assert float((there[name] - here[name]).norm()) < 0.03 * float((here[name] - before).norm()), name


def test_a_step_from_rounded_moments_is_computed_in_float32(tiny_llama, random_batch):
    """As PyTorch's fused kernel on CUDA: only the stored moments are rounded."""
    exact, rounded = (LearnerCore(config(tiny_llama, optimizer_state_dtype=dtype)) for dtype in ("float32", "bfloat16"))
    for core in (exact, rounded):
        core.train_step(random_batch())  # from moments of zero, so none was rounded before it
    assert equal(weights(rounded), weights(exact))
    for name, held in moments_of(rounded).items():
        assert all(torch.equal(a, b.bfloat16()) for a, b in zip(held, moments_of(exact)[name], strict=True))


def test_a_checkpoint_loads_into_moments_of_the_other_type(tiny_llama, random_batch, tmp_path):
    exact, rounded = (LearnerCore(config(tiny_llama, optimizer_state_dtype=dtype)) for dtype in ("float32", "bfloat16"))
    exact.train_step(random_batch())
    exact.save(tmp_path / "exact")
    rounded.load(tmp_path / "exact")
    before = moments_of(exact)
    for name, held in moments_of(rounded).items():
        assert all(torch.equal(a, b.bfloat16()) for a, b in zip(held, before[name], strict=True))
    rounded.save(tmp_path / "rounded")
    exact.load(tmp_path / "rounded")
    for name, held in moments_of(exact).items():
        assert all(torch.equal(a, b.float()) for a, b in zip(held, moments_of(rounded)[name], strict=True))
    assert exact.train_step(random_batch(seed=1))["version"] == 2
