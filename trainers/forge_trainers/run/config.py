"""User settings of a run's processes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields, replace
from threading import TIMEOUT_MAX
from typing import Any

from forge_agents.policy import Policy
from forge_agents.runtime.hosts import MAX_PROCESSES
from forge_agents.serving.config import EngineConfig
from forge_agents.settings import MAX_INTEGER, settings_class
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.losses.registry import DISTILL, Correction, find_loss

_POLICY_LOSS_ONLY = ("loss", "clip", "sequence", "correction")
"""Settings that only a policy loss reads."""


MAX_STEPS = 10_000_000
"""Maximum number of steps of a run. The learning rates of all are added up before it starts."""


def check_at_least(settings: object, least: int, *names: str, most: int = MAX_INTEGER) -> None:
    """Raise ValueError if one of the fields `names` is less than `least` or more than `most`. None is allowed."""
    for name in names:
        if (value := getattr(settings, name)) is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
        if value is not None and value > most:
            raise ValueError(f"{name}={value} must be at most {most}")


def check_processes(settings: Any) -> None:
    """Raise ValueError if `learner_procs`, `seed`, or a timeout of `settings` cannot be used by processes."""
    if not 1 <= settings.learner_procs <= MAX_PROCESSES:
        raise ValueError(f"learner_procs={settings.learner_procs} must be at least 1 and at most {MAX_PROCESSES}")
    if not 0 <= settings.seed < 2**32:  # NumPy in the engines accepts no other
        raise ValueError(f"seed={settings.seed} must be at least 0 and below 2**32")
    for name in ("stage_timeout_s", "heartbeat_timeout_s"):
        if not 0 < (value := getattr(settings, name)) <= TIMEOUT_MAX:  # threads cannot wait longer
            raise ValueError(f"{name}={value} must be positive and finite: every wait has a timeout")


@settings_class
@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """Settings of engines, learners and the processes that they run in."""

    learner: LearnerConfig = field(default_factory=LearnerConfig)
    """Optimizer, loss, precision and parallelism of the learners."""
    learner_procs: int = 1
    """Number of processes of each learner. More than one shards its weights (FSDP2)."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Settings of the inference engines."""
    max_staleness: int = 0
    """Maximum policy lag, in weight versions. 0 (default) is fully synchronous and reproducible. 1 overlaps
    rollouts with training. From 2 on, slow groups may also arrive one step late."""
    colocate: bool = False
    """Whether engines and learner use the same GPUs in turns if they do not fit there together. The idle side keeps its
    weights in host memory, which must hold both. If False (default), such a run is refused."""
    seed: int = 0
    """Random seed for environments, sampling and initialization. Seeds of episodes below 2**31 are used for training,
    the others for evaluation."""
    stage_timeout_s: float = 1800.0
    """Timeout in seconds of each stage of a step: scoring, training, weight transfer. For rollouts it is the maximum
    time without a completion of any engine, so that many long episodes may take longer."""
    heartbeat_timeout_s: float = 60.0
    """Timeout in seconds of heartbeats of engines, learners and the weight store. A process that misses it counts as
    dead and is replaced, at most 8 times in a session."""

    def __post_init__(self) -> None:
        refuse_ineffective(self.learning)
        check_processes(self)
        check_at_least(self, 0, "max_staleness")
        if self.max_staleness and (self.colocate or getattr(self.engine, "sleeps", False)):
            raise ValueError(
                f"colocate=True lets engines and learner compute in turns, and max_staleness={self.max_staleness} at "
                "the same time. Set one of them back"
            )
        if not self.max_staleness and self.engine.on_update != EngineConfig.on_update:
            raise ValueError(
                f"engine.on_update={self.engine.on_update!r} has no effect with max_staleness=0, where completions "
                "end before each weight change. Set max_staleness above 0, or leave on_update out"
            )

    @property
    def learning(self) -> LearnerConfig:
        """`learner` with the correction that asynchronous rollouts need."""
        return self.learner.for_old_samples() if self.max_staleness else self.learner

    def learner_of(self, policy: Policy) -> LearnerConfig:
        """Return the learner settings of one policy: `learning` with the overrides of the policy.

        Raises TypeError or ValueError if one is unknown, has a wrong value or cannot differ between policies.
        """
        settings = self.learner.for_policy(policy)
        if settings.compute_dtype == "auto" and self.engine.dtype == "bfloat16":
            settings = replace(settings, compute_dtype="bfloat16")  # the engine would round small updates away
        settings = settings.for_old_samples() if self.max_staleness else settings
        try:
            refuse_ineffective(settings, only=policy.learner or {})
        except ValueError as cause:
            raise ValueError(f"policy {policy.name!r}: {cause}") from None
        return settings


def refuse_ineffective(
    learner: LearnerConfig, *, policy_loss: bool = True, only: Collection[str] | None = None
) -> None:
    """Raise ValueError for a setting that differs from its default and has no effect, with what to set instead.

    `policy_loss` is False for fine-tuning on given data. `only` restricts the check to the named settings.
    """
    if policy_loss:
        _refuse_correction_bounds(learner)
        reasons = dict(_unread_by_loss(learner))
    else:
        reasons = dict.fromkeys(_POLICY_LOSS_ONLY, "fine-tuning has its own loss, without a sampler to correct for")
        if learner.teachers:
            reasons["reference"] = "a teacher is compared on samples of the policy. Use fa.GRPOTrainer"
    reasons |= dict(_switched_off(learner))
    for member in fields(learner):
        value, name = getattr(learner, member.name), member.name
        if name in reasons and value and value != member.default and (only is None or name in only):
            raise ValueError(f"learner.{name}={value!r:.80} has no effect: {reasons[name]}, or leave it out")


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
                f"learner.correction.{name}={value!r} has no effect with how={correction.how!r}. Set how='mask', which "
                "reads all fields, or leave it out"
            )


def _switched_off(learner: LearnerConfig) -> Iterator[tuple[str, str]]:
    """Settings that another setting disables, with the value that enables them."""
    if learner.lr_decay == "none":
        yield (
            "lr_min_ratio",
            "lr_decay='none' keeps the learning rate constant. Set lr_decay to 'linear', 'cosine' or 'sqrt'",
        )
    if not learner.kl_coef:
        for name in ("kl", "reference"):
            yield name, "kl_coef=0 leaves out the KL divergence. Set kl_coef above 0"


def _unread_by_loss(learner: LearnerConfig) -> Iterator[tuple[str, str]]:
    """Settings that the policy loss does not read, with what would read them."""
    loss, correction = find_loss(learner.loss), learner.loss_settings.correction
    if loss.name == DISTILL:
        yield from dict.fromkeys(_POLICY_LOSS_ONLY[1:], f"loss={learner.loss!r} has no probability ratio").items()
        return
    if correction.how != "ratio" and learner.num_iterations * learner.num_minibatches == 1:
        yield (
            "clip",
            (
                f"correction={correction.how!r} takes the ratio to the learner at the start of the batch, so with one "
                "optimizer step per batch it is 1. Set num_iterations or num_minibatches above 1, or correction='ratio'"
            ),
        )
    by_sequence = correction.how in ("truncate", "mask") and correction.level != "token"
    if loss.reduction == "token" and not loss.sequence_ratio and not by_sequence:
        yield "sequence", f"loss={learner.loss!r} and its correction look at single tokens. Set another loss"
