"""Learner settings of each trainable policy of a run: overrides merged, learning rates resolved, conflicts refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from forge_agents.models import resolve as models
from forge_agents.policy import Policy
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.learner.rates import described, weak_rate, with_rate
from forge_trainers.run.config import ProcessConfig

_OF_AN_ADAPTER = frozenset({
    "lr", "warmup_steps", "lr_decay", "lr_decay_ratio", "lr_min_ratio", "weight_decay", "betas", "max_grad_norm",
    "optimizer_state_dtype", "loss", "clip_low", "clip_high", "sequence", "length_constant", "correction",
    "correction_level", "correction_low", "correction_high", "kl", "kl_coef", "entropy_coef", "num_iterations",
    "num_minibatches",
})  # fmt: skip
"""Fields in which adapters that share one model may differ; the others belong to the model or its processes."""


def shared_settings(policies: Sequence[Policy], config: ProcessConfig) -> LearnerConfig:
    """Settings of a learner, by those of the policies that share it: of the first, with what all must have in common.

    Raises:
        ValueError: Two of the policies differ in a setting of the model or of its processes.
    """
    first, *others = [config.learner_of(policy) for policy in policies]
    for policy, settings in zip(policies[1:], others, strict=True):
        for field in fields(settings):
            mine, theirs = getattr(settings, field.name), getattr(first, field.name)
            if mine != theirs and field.name not in _OF_AN_ADAPTER:
                raise ValueError(
                    f"policies {policies[0].name!r} and {policy.name!r} have adapters on one model and share its "
                    f"learner, but learner.{field.name} is {theirs!r} for one and {mine!r} for the other; give both "
                    "the same value, or adapters of different shapes, which get learners of their own"
                )
    return first


def resolved_settings(policies: Mapping[str, Policy], config: ProcessConfig) -> dict[str, LearnerConfig]:
    """Learner settings of each trainable policy by name, with its model, adapter and learning rate.

    Raises:
        ModelNotFoundError: A model is not there.
    """
    return {
        name: with_rate(replace(config.learner_of(policy), model=str(models.resolve(policy.model)), lora=policy.lora))
        for name, policy in policies.items()
        if policy.trainable
    }


def record_rates(settings: Mapping[str, Any], rates: Mapping[str, float]) -> dict[str, Any]:
    """Settings of a run for config.yaml, with the learning rates in use where none was chosen.

    A rate that all trainable policies have in common stands in ``trainer.learner``, other rates stand in
    ``policies.NAME.learner``.

    Args:
        settings: ``policies`` and ``trainer`` as plain values, among others.
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


def rate_line(settings: LearnerConfig, *, chosen: bool) -> str:
    """Learning rate of a policy, for the start of a run.

    Args:
        settings: As `resolved_settings` gives them.
        chosen: Whether the user chose the rate.
    """
    what = described(settings, models.weight_count(models.resolve(settings.model)))
    return f"lr {settings.lr:g}" + ("" if chosen else f", the default for {what}")


def weak_rates(resolved: Mapping[str, LearnerConfig], steps: int) -> list[str]:
    """Warnings about learning rates that are too low to change a model within `steps` training steps."""
    found = ((name, weak_rate(settings, steps)) for name, settings in resolved.items())
    return [f"policy {name}: {warning}" for name, warning in found if warning]
