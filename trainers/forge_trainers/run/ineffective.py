"""Refuses learner settings that would have no effect."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import fields

from forge_trainers.learner.config import LearnerConfig
from forge_trainers.losses.registry import Correction, find_loss

_POLICY_LOSS_ONLY = ("loss", "clip", "sequence", "correction")
"""Settings that only a policy loss reads."""


def refuse_ineffective(
    learner: LearnerConfig, *, policy_loss: bool = True, only: Collection[str] | None = None
) -> None:
    """Check that every setting that differs from its default has an effect.

    Args:
        learner: Settings of the learners.
        policy_loss: Whether a policy loss is trained. False for fine-tuning on given data.
        only: Names of the settings to check. None checks all.

    Raises:
        ValueError: A setting has no effect. The message says what to set instead.
    """
    if policy_loss:
        _refuse_correction_bounds(learner)
        reasons = dict(_unread_by_loss(learner))
    else:
        reasons = dict.fromkeys(_POLICY_LOSS_ONLY, "fine-tuning has its own loss, without a sampler to correct for")
    reasons |= dict(_switched_off(learner))
    for field in fields(learner):
        value = getattr(learner, field.name)
        if field.name in reasons and value and value != field.default and (only is None or field.name in only):
            raise ValueError(
                f"learner.{field.name}={value!r:.80} has no effect: {reasons[field.name]}, or leave it out"
            )


def _refuse_correction_bounds(learner: LearnerConfig) -> None:
    """Raise ValueError if a `Correction` sets a field that its kind does not read."""
    correction = learner.correction
    if not isinstance(correction, Correction):
        return
    unread = {"ratio": ("level", "low", "high"), "none": ("level", "low", "high"), "truncate": ("low",)}
    default = Correction(how=correction.how)
    for name in unread.get(correction.how, ()):
        if (value := getattr(correction, name)) != getattr(default, name):
            raise ValueError(
                f"learner.correction.{name}={value!r} has no effect with how={correction.how!r}; set how='mask', which "
                "reads all fields, or leave it out"
            )


def _switched_off(learner: LearnerConfig) -> Iterator[tuple[str, str]]:
    """Settings that another setting disables, with the value that enables them."""
    if learner.lr_decay == "none":
        yield (
            "lr_min_ratio",
            "lr_decay='none' keeps the learning rate constant; set lr_decay to 'linear', 'cosine' or 'sqrt'",
        )
    if not learner.kl_coef:
        yield "kl", "kl_coef=0 leaves out the KL divergence; set kl_coef above 0"


def _unread_by_loss(learner: LearnerConfig) -> Iterator[tuple[str, str]]:
    """Settings that the policy loss does not read, with what would read them."""
    loss, correction = find_loss(learner.loss), learner.loss_settings.correction
    if correction.how != "ratio" and learner.num_iterations * learner.num_minibatches == 1:
        yield "clip", (
            f"correction={correction.how!r} takes the ratio to the learner at the start of the batch, so with one "
            "optimizer step per batch it is 1; set num_iterations or num_minibatches above 1, or correction='ratio'"
        )
    by_sequence = correction.how in ("truncate", "mask") and correction.level != "token"
    if loss.reduction == "token" and not loss.sequence_ratio and not by_sequence:
        yield "sequence", f"loss={learner.loss!r} and its correction look at single tokens; set another loss"
