"""Learner settings of each trainable policy: overrides, learning rates and conflicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from forge_agents.models import resolve as models
from forge_agents.policy import Policy
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.learner.plan import LearnerPlan
from forge_trainers.learner.rates import described, weak_rate, with_rate
from forge_trainers.run.config import ProcessConfig

_OF_AN_ADAPTER = frozenset({
    "lr", "warmup_steps", "lr_decay", "lr_min_ratio", "weight_decay", "betas", "max_grad_norm",
    "optimizer_state_dtype", "loss", "clip", "sequence", "correction", "kl", "kl_coef", "entropy_coef",
    "num_iterations", "num_minibatches",
})  # fmt: skip
"""Fields in which adapters on one model may differ. The others belong to the model or its processes."""


def shared_settings(policies: Sequence[Policy], config: ProcessConfig) -> LearnerConfig:
    """Return the settings of the first policy, after checking that all policies can share one learner.

    Raises:
        ValueError: Two of the policies differ in a setting of the model or of its processes.
    """
    first, *others = [config.learner_of(policy) for policy in policies]
    for policy, settings in zip(policies[1:], others, strict=True):
        for field in fields(settings):
            value, first_value = getattr(settings, field.name), getattr(first, field.name)
            if value != first_value and field.name not in _OF_AN_ADAPTER:
                raise ValueError(
                    f"policies {policies[0].name!r} and {policy.name!r} have adapters on one model and share its "
                    f"learner, but learner.{field.name} is {first_value!r} for one and {value!r} for the other; give "
                    "both the same value, or adapters of different shapes, which get separate learners"
                )
    return first


def resolved_settings(policies: Mapping[str, Policy], config: ProcessConfig) -> dict[str, LearnerPlan]:
    """Return the learner settings of each trainable policy, with model, adapter and learning rate.

    Raises:
        ModelNotFoundError: A model is missing.
    """
    return {
        name: with_rate(
            LearnerPlan.of(config.learner_of(policy), model=str(models.resolve(policy.model)), lora=policy.lora)
        )
        for name, policy in policies.items()
        if policy.trainable
    }


def record_rates(settings: Mapping[str, Any], rates: Mapping[str, float]) -> dict[str, Any]:
    """Return the settings for config.yaml with the learning rates in use.

    A rate that all trainable policies share is written to ``trainer.learner``, other rates to
    ``policies.NAME.learner``.

    Args:
        settings: Plain values, with ``policies`` and ``trainer``.
        rates: Learning rate of each trainable policy by name.
    """
    trainer, policies = settings["trainer"], settings["policies"]
    if trainer["learner"]["lr"] is not None:
        return dict(settings)
    if len({*rates.values()}) == 1 and not any("lr" in (policy["learner"] or {}) for policy in policies.values()):
        learner = {**trainer["learner"], "lr": next(iter(rates.values()))}
        return {**settings, "trainer": {**trainer, "learner": learner}}
    changed = {
        name: {**policies[name], "learner": {**(policies[name]["learner"] or {}), "lr": rate}}
        for name, rate in rates.items()
    }
    return {**settings, "policies": {**policies, **changed}}


def rate_line(settings: LearnerPlan, *, chosen: bool) -> str:
    """Return the learning rate of a policy as a line for the console.

    Args:
        settings: From `resolved_settings`.
        chosen: Whether the user set the rate.
    """
    description = described(settings, models.weight_count(models.resolve(settings.model)))
    return f"lr {settings.lr:g}" + ("" if chosen else f", the default for {description}")


def weak_rates(resolved: Mapping[str, LearnerPlan], steps: int) -> list[str]:
    """Return warnings about learning rates that are too low to change a model within `steps` training steps."""
    warnings = ((name, weak_rate(settings, steps)) for name, settings in resolved.items())
    return [f"policy {name}: {warning}" for name, warning in warnings if warning]
