"""The learning rate, step by step."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from forge_trainers.learner.core import LearnerCore
from forge_trainers.learner.plan import LearnerPlan
from forge_trainers.learner.rates import learning_rate


def rates(total: int, **settings: Any) -> list[float]:
    config = LearnerPlan(lr=1.0, **settings)
    return [learning_rate(config, step, total) for step in range(total)]


@pytest.mark.parametrize("decay", ["none", "linear", "cosine", "sqrt"])
@pytest.mark.parametrize(("warmup", "floor"), [(0, 0.0), (3, 0.1), (5, 0.2), (2, 0.0), (11, 0.1)])
@pytest.mark.parametrize("total", [12, 40])
def test_rates_are_torchtitans(decay, warmup, floor, total):
    from torchtitan.components.optimizer import LRSchedulersContainer

    adamw = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    titans = LRSchedulersContainer.Config(
        warmup_steps=warmup, decay_ratio={"none": 0.0, "sqrt": 0.2}.get(decay, 1.0),
        decay_type="linear" if decay == "none" else decay, min_lr_factor=floor,
    ).build(optimizers=[adamw], training_steps=total)  # fmt: skip
    expected = []
    for _ in range(total):
        expected.append(adamw.param_groups[0]["lr"])
        adamw.step()
        titans.step()
    result = rates(total, warmup_steps=warmup, lr_decay=decay, lr_min_ratio=floor)
    assert result == pytest.approx(expected, rel=1e-12)


def test_without_decay_the_rate_stays_after_warm_up():
    assert rates(6, warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


def test_a_linear_rate_falls_in_equal_parts_to_one_step_before_zero():
    assert rates(6, warmup_steps=2, lr_decay="linear") == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25])


def test_a_cosine_falls_to_its_floor():
    result = rates(9, lr_decay="cosine", lr_min_ratio=0.1, warmup_steps=1)
    half = [0.5 * (1 + math.cos(math.pi * i / 8)) for i in range(8)]
    assert result == pytest.approx([1, *(0.1 + 0.9 * share for share in half)])


def test_sqrt_decays_in_the_last_fifth_of_the_run_and_fastest_at_first():
    decay = [1, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75)]
    assert rates(20, lr_decay="sqrt") == pytest.approx([1] * 16 + decay)
    assert rates(20, lr_decay="sqrt", warmup_steps=18)[17:] == pytest.approx([1, 1, 1 - math.sqrt(0.5)])


def test_a_falling_rate_needs_to_know_the_end(tiny_llama):
    settings = LearnerPlan(lr=1e-6, lr_decay="linear", warmup_steps=2, model=str(tiny_llama), threads=1)
    with pytest.raises(ValueError, match="0 are taken and None planned"):
        learning_rate(settings, 0, None)
    with pytest.raises(ValueError, match="leaves none of the run's 2 steps"):
        LearnerCore(settings).set_total_steps(2)
    assert all(learning_rate(settings, step, 3) > 0 for step in range(3))
    with pytest.raises(ValueError, match="3 are taken and 3 planned"):  # TorchTitan's own would turn negative
        learning_rate(settings, 3, 3)


def test_a_longer_run_goes_on_at_the_longer_schedules_rate(tiny_llama, random_batch, tmp_path):
    settings = LearnerPlan(
        model=str(tiny_llama), compute_dtype="float32", threads=1, lr=1.0e-3, warmup_steps=1, lr_decay="linear"
    )
    batch = random_batch(groups=1)
    core = LearnerCore(settings)
    core.set_total_steps(3)
    assert [core.train_step(batch)["lr"] for _ in range(2)] == pytest.approx([1e-3, 1e-3])
    core.save(tmp_path / "step-2")
    assert core.train_step(batch)["lr"] == pytest.approx(0.5e-3)
    core.set_total_steps(6)  # in the same session
    assert core.train_step(batch)["lr"] == pytest.approx(0.6e-3)
    resumed = LearnerCore(dataclasses.replace(settings, lr=2.0e-3))  # in another, with another peak
    resumed.load(tmp_path / "step-2")
    resumed.set_total_steps(5)
    assert resumed.train_step(batch)["lr"] == pytest.approx(1.5e-3)


def test_the_trainer_tells_the_learner_how_long_the_run_is(tiny_llama, learner_here, tmp_path):
    import forge_agents as fa

    del learner_here
    settings = LearnerPlan(lr=4e-3, lr_decay="linear", threads=1, compute_dtype="float32")
    with fa.SFTTrainer(fa.Policy(str(tiny_llama)), fa.SFTConfig(learner=settings, batch_size=2), tmp_path) as trainer:
        rows = trainer.fit([{"prompt": f"{i}?", "completion": str(i)} for i in range(4)], steps=4).metrics
    assert [row["learner/lr"] for row in rows] == pytest.approx([4e-3, 3e-3, 2e-3, 1e-3])
