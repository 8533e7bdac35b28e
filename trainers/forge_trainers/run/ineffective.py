"""Refuses settings of a trainer's learner and engine that would have no effect, or that the trainer overwrites."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields

from forge_agents.serving.config import EngineConfig
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.losses.registry import find_loss

_LEARNER_FILLED_IN = {
    "model": "the trainer takes the model of the policy: set Policy(model)",
    "temperature": "the trainer takes that of the policy: set Policy(sampling=Sampling(temperature=...))",
    "lora": "the trainer takes that of the policy: set Policy(lora=LoRA(...))",
    "seed": "the trainer takes its own: set seed of the trainer's config",
    "dump_folder": "the trainer writes it to OUT_DIR/learner",
}
_ENGINE_FILLED_IN = {
    "model": "the trainer takes the model of the policy: set Policy(model)",
    "adapters": "the trainer takes those of the policies: set Policy(lora=LoRA(...))",
    "adapter_folders": "a trainer starts adapters at zero; to train on, give the exported model to the policy",
    "seed": "the trainer takes its own: set seed of the trainer's config",
}
_OF_POLICY_LOSSES = (
    "loss", "clip_low", "clip_high", "sequence", "length_constant", "correction", "correction_level", "correction_low",
    "correction_high",
)
"""Settings that only a policy loss reads."""


def refuse_ineffective(
    learner: LearnerConfig, engine: EngineConfig | None = None, *, only: Collection[str] | None = None
) -> None:
    """Check the settings that a user gave a trainer.

    Args:
        learner: Settings of the learners, as they will learn.
        engine: Settings of the engines; None for fine-tuning on given data, which has a loss of its own.
        only: Names of the learner settings to check; None checks all.

    Raises:
        ValueError: A setting that would be overwritten or never read. The message says what to set instead.
    """
    reasons = dict(_LEARNER_FILLED_IN)
    if engine is None:
        of_losses = "fine-tuning has its own loss, without a sampler to correct for"
        reasons |= dict.fromkeys(_OF_POLICY_LOSSES, of_losses)
    else:
        reasons |= dict(_unread_by_loss(learner))
        _refuse("engine", engine, _ENGINE_FILLED_IN)
    reasons |= dict(_unread(learner))
    _refuse("learner", learner, {name: why for name, why in reasons.items() if only is None or name in only})


def _refuse(part: str, config: LearnerConfig | EngineConfig, reasons: Mapping[str, str]) -> None:
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in reasons and value and value != field.default:
            raise ValueError(f"{part}.{field.name}={value!r:.80} has no effect: {reasons[field.name]}, or leave it out")


def _unread(learner: LearnerConfig) -> Iterator[tuple[str, str]]:
    """Settings that others switch off, with what switches them on."""
    if learner.lr_decay == "none":
        falls = "lr_decay='none' holds the learning rate; set lr_decay to 'linear', 'cosine' or 'sqrt'"
        yield from ((name, falls) for name in ("lr_decay_ratio", "lr_min_ratio"))
    if learner.activation_checkpointing != "memory_budget":
        yield "memory_budget", "it is read with activation_checkpointing='memory_budget'; set that"
    if not learner.kl_coef:
        yield "kl", "kl_coef=0 leaves the divergence out; set kl_coef above 0"


def _unread_by_loss(learner: LearnerConfig) -> Iterator[tuple[str, str]]:
    """Settings that the policy loss does not read, with what would read them."""
    loss, correction = find_loss(learner.loss), learner.loss_settings.correction
    reduction, how = loss.reduction, correction.how
    if reduction != "constant":
        yield "length_constant", f"loss={learner.loss!r} does not divide by a constant; set loss='dr_grpo'"
    if how in ("ratio", "none"):
        reason = f"the correction is {how!r}, which compares no weights; set correction to 'truncate' or 'mask'"
        yield from ((name, reason) for name in ("correction_level", "correction_low", "correction_high"))
    elif how == "truncate":
        yield "correction_low", "correction='truncate' has no lower bound; set correction='mask'"
    if how != "ratio" and learner.num_iterations * learner.num_minibatches == 1:
        reason = (
            f"correction={how!r} takes the ratio to the learner at the start of the batch, so with one optimizer step "
            "per batch it is 1; set num_iterations or num_minibatches above 1, or correction='ratio'"
        )
        yield from ((name, reason) for name in ("clip_low", "clip_high"))
    by_sequence = how in ("truncate", "mask") and correction.level != "token"
    if reduction == "token" and not loss.sequence_ratio and not by_sequence:
        reason = f"loss={learner.loss!r} and its correction look at single tokens; set another loss"
        yield "sequence", reason
