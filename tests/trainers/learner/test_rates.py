"""Default learning rates, and the warning about rates that move nothing."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

import forge_agents as fa
from forge_trainers.learner.core import LearnerCore
from forge_trainers.learner.plan import LearnerPlan
from forge_trainers.learner.rates import default_rate, weak_rate, with_rate
from forge_trainers.run.config import ProcessConfig
from forge_trainers.run.plan import rate_line, record_rates, resolved_settings


@pytest.mark.parametrize(
    ("method", "parameters", "adapter", "rate"),
    [
        ("rl", 135_000_000, False, 2e-5),
        ("rl", 135_000_000, True, 2e-4),
        ("rl", 1_000, False, 2e-5),
        ("rl", 7_000_000_000, False, 1e-6),
        ("rl", 70_000_000_000, False, 1e-6),
        ("rl", 8_000_000_000, True, 1e-5),
        ("sft", 135_000_000, False, 5e-5),
        ("sft", 7_000_000_000, True, 1e-4),
        ("dpo", 7_000_000_000, False, 5e-7),
    ],
)
def test_default_rate_depends_on_method_size_and_adapter(method, parameters, adapter, rate):
    assert default_rate(method, parameters, adapter=adapter) == rate


@pytest.mark.parametrize("method", ["rl", "sft", "dpo"])
def test_default_rate_falls_with_size_and_is_ten_times_as_high_for_adapters(method):
    sizes = [135e6, 360e6, 600e6, 1.7e9, 4e9, 7e9]
    full = [default_rate(method, int(size), adapter=False) for size in sizes]
    assert full == sorted(full, reverse=True) and len(set(full)) == len(sizes)
    adapters = [default_rate(method, int(size), adapter=True) for size in sizes]
    assert adapters == pytest.approx([10 * rate for rate in full], rel=0.06), "both are rounded to two digits"


def test_unset_rate_is_resolved_and_a_set_one_stays(tiny_llama):
    unset = LearnerPlan(model=str(tiny_llama))
    assert unset.lr is None and with_rate(unset).lr == 2e-5
    assert with_rate(replace(unset, lora=fa.LoRA())).lr == 2e-4
    assert with_rate(replace(unset, loss="sft")).lr == 5e-5
    assert with_rate(replace(unset, lr=0.0)).lr == 0.0
    assert LearnerCore(replace(unset, threads=1)).config.lr == 2e-5


def test_rate_that_cannot_move_weights_is_named(tiny_models):
    model = str(tiny_models(family="llama", dtype="bfloat16"))
    low = LearnerPlan(model=model, lr=1e-9)
    warning = weak_rate(low, 20)
    assert "lr=1e-09 is too low" in warning and "20 steps" in warning and "default of 2e-05" in warning
    assert not weak_rate(low, 10_000_000), "a long run gets there"
    assert not weak_rate(replace(low, num_iterations=10_000, num_minibatches=1_000), 20)
    for fine in (0.0, 2e-5, 1e-3):
        assert not weak_rate(replace(low, lr=fine), 1), "a control, the default and more give no warning"


def test_warmup_longer_than_the_run_is_named(tiny_models):
    model = str(tiny_models(family="llama", dtype="bfloat16"))
    plan = LearnerPlan(model=model, lr=1e-3, warmup_steps=20)
    assert "the learning rate ends at 0.0005 and never reaches lr=0.001" in weak_rate(plan, 10)
    assert not weak_rate(plan, 20) and not weak_rate(replace(plan, lr=0.0), 10)


def test_warning_counts_the_schedule_and_the_adapter(tiny_models):
    model = str(tiny_models(family="llama", dtype="bfloat16"))
    steady = LearnerPlan(model=model, lr=1.9e-5)
    steps = next(n for n in range(1, 1000) if not weak_rate(steady, n))
    assert steps > 1 and weak_rate(replace(steady, lr_decay="linear"), steps)
    assert weak_rate(replace(steady, lora=fa.LoRA()), steps), "an adapter needs about ten times as much"


@pytest.mark.parametrize(("parameters", "rate"), [(134_515_008, 1e-6), (134_515_008, 2e-6)])
def test_smollm2_at_a_large_models_rate_is_warned_of(parameters, rate):
    from forge_agents.models.resolve import resolve

    settings = LearnerPlan(model=str(resolve("smollm2-135m-instruct")), lr=rate)
    assert "135M parameters" in weak_rate(settings, 20)
    assert not weak_rate(replace(settings, lr=5e-6), 20)


def test_common_rate_is_recorded_in_the_trainer_and_others_by_policy(tiny_llama):
    full, adapter = fa.Policy(str(tiny_llama), name="full"), fa.Policy(str(tiny_llama), name="ad", lora=fa.LoRA())
    frozen, config = fa.Policy(str(tiny_llama), name="frozen", trainable=False), ProcessConfig()

    def written(*policies: fa.Policy, config: ProcessConfig = config) -> dict[str, Any]:
        named = {policy.name: policy for policy in policies}
        rates = {name: settings.lr or 0.0 for name, settings in resolved_settings(named, config).items()}
        rows = {name: asdict(policy) for name, policy in named.items()}
        return record_rates({"policies": rows, "trainer": asdict(config)}, rates)

    one = written(full, frozen)
    assert one["trainer"]["learner"]["lr"] == 2e-5 and one["policies"]["full"]["learner"] is None
    two = written(full, adapter)
    assert two["trainer"]["learner"]["lr"] is None
    assert [two["policies"][name]["learner"] for name in ("full", "ad")] == [{"lr": 2e-5}, {"lr": 2e-4}]
    own = written(full, replace(adapter, learner={"lr": 3e-4, "warmup_steps": 2}))
    assert own["policies"]["ad"]["learner"] == {"lr": 3e-4, "warmup_steps": 2}
    chosen = written(full, adapter, config=ProcessConfig(learner=LearnerPlan(lr=1e-3)))
    assert chosen["trainer"]["learner"]["lr"] == 1e-3 and chosen["policies"]["ad"]["learner"] is None


def test_start_says_the_rate_and_that_it_is_the_default(tiny_llama):
    settings = with_rate(LearnerPlan(model=str(tiny_llama), lora=fa.LoRA()))
    assert rate_line(settings, chosen=True) == "lr 0.0002"
    assert rate_line(settings, chosen=False).startswith("lr 0.0002, the default for a LoRA adapter of a model with 0.")
