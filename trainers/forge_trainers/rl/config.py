"""User settings of a GRPO run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from forge_agents.policy import Policy
from forge_agents.settings import MAX_COUNT, settings_class
from forge_agents.types import Trajectory, total_tokens
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.losses.registry import LossNormalization, find_loss
from forge_trainers.records.trackers import tracker_class
from forge_trainers.rl.credit import Credit, imported_credit
from forge_trainers.run.config import ProcessConfig, check_at_least


@settings_class
@dataclass(frozen=True, kw_only=True)
class GRPOConfig(ProcessConfig):
    """Group relative policy optimization over multi-agent episodes, by default DAPO's variant (arXiv 2503.14476).

    ``learner=LearnerConfig(loss="grpo")`` is GRPO as published (arXiv 2402.03300).
    """

    group_size: int = 8
    """Number of episodes per group. All episodes of a group share a seed and are compared with each other, so this must
    be at least 2, unless `credit` compares none."""
    groups_per_step: int = 8
    """Number of groups (seeds) per optimizer step."""
    max_resamples: int | None = None
    """Maximum number of resampling rounds per step (DAPO's dynamic sampling, arXiv 2503.14476, eq. 11). Each round
    replaces failed and zero-variance groups with groups from new seeds. None (default) uses the value of the loss: 3
    for "dapo" and 0 for the others."""
    loss_normalization: LossNormalization | None = None
    """Loss normalization: "sampled" divides by all sampled tokens (GRPO as published). "used" divides by the tokens of
    groups with non-zero variance. None (default) uses the value of the loss."""
    credit: Credit | str | None = None
    """Rule that turns rewards into advantages: a `Credit`, or "package.module:name" of one or of a subclass, which is
    imported. None (default) uses the published rule of the loss."""
    max_concurrent_episodes: int = 512
    """Maximum number of episodes that run at the same time."""
    eval_every: int = 0
    """Number of steps between evaluations on held-out seeds. 0 (default) disables evaluation. Episodes are scored by
    the reward of the run. The environment's own reward is reported as well. The next step's episodes are sampled at the
    same time, with the same weights. The checkpoint of the highest held-out reward is kept, or that of the lowest
    exploitability if `exploitability_samples` is set."""
    eval_episodes: int = 64
    """Number of held-out episodes per evaluation. Each has its own seed, unless the reward compares the episodes of a
    group: then each seed is used `group_size` times."""
    exploitability_samples: int = 0
    """Number of free answers sampled at every information set per evaluation, to estimate how much a best response wins
    from each trained policy as the agents that it plays. For two-player games that list their openings, such as
    forge/KuhnPoker-v0. 0 (default) disables the estimate."""
    checkpoint_every: int = 10
    """Number of steps between checkpoints. The last step is always saved."""
    keep_checkpoints: int = 2
    """Number of newest checkpoints that are kept on disk. The best one is kept as well, see `eval_every`."""
    keep_episodes: int = 4
    """Number of episodes of each step that are written to ``episodes.jsonl``."""
    tracker: str = "tensorboard"
    """Experiment tracker: "tensorboard" (default, files in the run folder), "wandb", "mlflow" or "module:Class".
    "wandb" and "mlflow" are extras to install and read their own environment variables. A class derives from
    `forge_trainers.records.trackers.Tracker`. Metrics are always written to ``metrics.jsonl`` as well."""
    max_logprob_gap: float = 0.2
    """Maximum mean absolute difference between the log-probabilities of sampler and learner. If exceeded, sampler and
    learner no longer hold the same model and training stops with `MismatchError`. Checked in steps whose samples all
    have the learner's current version. bfloat16 shows 0.02 to 0.042 on average over a step. inf disables the check."""
    max_empty_steps: int = 5
    """Number of consecutive steps without an informative group after which the run is saved and exported and ends:
    successfully if every episode earns the maximum or the highest reward seen, otherwise with `EmptyBatchError`."""
    preflight: bool = True
    """Whether to check environment, reward, prompts and disk with a few seconds of random play before engines start,
    see `forge_trainers.rl.preflight`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.credit, str):
            object.__setattr__(self, "credit", imported_credit(self.credit))
        tracker_class(self.tracker)
        if self.group_size < 2 and self.credit_rule.compares_episodes:
            raise ValueError(f"group_size={self.group_size} gives every advantage 0. Set group_size >= 2")
        check_at_least(self, 1, "groups_per_step", "max_concurrent_episodes", "eval_episodes", most=MAX_COUNT)
        if self.group_size * self.groups_per_step < 2 and self.credit_rule.compares_step:
            raise ValueError(
                "group_size=1 and groups_per_step=1 give every advantage 0, because the credit compares the episodes "
                "of a step. Raise one of them"
            )
        check_at_least(self, 0, "max_resamples", most=MAX_COUNT)
        if self.group_size * self.groups_per_step > MAX_COUNT // (1 + self.max_staleness):
            raise ValueError(
                f"group_size={self.group_size} times groups_per_step={self.groups_per_step} must be at most "
                f"{MAX_COUNT // (1 + self.max_staleness)} episodes per step with max_staleness={self.max_staleness}"
            )
        self._check_learner(self.learner)
        check_at_least(self, 1, "checkpoint_every", "keep_checkpoints", "max_empty_steps")
        check_at_least(self, 0, "eval_every", "keep_episodes")
        check_at_least(self, 0, "exploitability_samples", most=MAX_COUNT)
        if self.exploitability_samples and not self.eval_every:
            raise ValueError(
                f"exploitability_samples={self.exploitability_samples} with eval_every=0: may be above 0 only with "
                "evaluations, where it is measured"
            )
        if not self.max_logprob_gap > 0:
            raise ValueError(f"max_logprob_gap={self.max_logprob_gap} must be above 0. inf disables the check")

    def learner_of(self, policy: Policy) -> LearnerConfig:
        """Return the learner settings of one policy. Raises ValueError if its loss needs another trainer setting."""
        settings = super().learner_of(policy)
        self._check_learner(settings)
        for name, of_loss, of_trainer in (
            ("credit", self._credit(settings), self.credit_rule),
            ("max_resamples", self._resamples(settings), self.resamples),
            ("loss_normalization", self._normalization(settings), self._normalization(self.learner)),
        ):
            if of_loss != of_trainer:
                raise ValueError(
                    f"policy {policy.name!r}: learner.loss={settings.loss!r} has {name}={of_loss!r} and the trainer's "
                    f"loss {self.learner.loss!r} {name}={of_trainer!r}, but a step has one for all policies. Set "
                    f"{name} of the trainer"
                )
        return settings

    def _check_learner(self, learner: LearnerConfig) -> None:
        if find_loss(learner.loss).name == "sft":
            raise ValueError(
                "learner.loss='sft' is the loss of SFTTrainer and DPOTrainer, without a ratio to the sampler. Choose "
                "another loss, such as 'rloo' for a plain policy gradient"
            )
        if learner.num_minibatches > self.groups_per_step:
            raise ValueError(
                f"learner.num_minibatches={learner.num_minibatches} is more than groups_per_step="
                f"{self.groups_per_step}, and minibatches are whole groups. Lower it, or raise groups_per_step"
            )

    def _credit(self, learner: LearnerConfig) -> Credit:
        published = find_loss(learner.loss).credit
        assert not isinstance(self.credit, str)
        return self.credit or (Credit(**published) if isinstance(published, Mapping) else published)

    def _resamples(self, learner: LearnerConfig) -> int:
        return find_loss(learner.loss).max_resamples if self.max_resamples is None else self.max_resamples

    def _normalization(self, learner: LearnerConfig) -> tuple[LossNormalization, str]:
        """Return the loss normalization and the unit that it counts."""
        loss = find_loss(learner.loss)
        rule = self.loss_normalization or loss.loss_normalization
        unit = "tokens" if loss.reduction == "token" else learner.sequence
        return (rule, unit) if rule == "sampled" else (rule, "")

    @property
    def credit_rule(self) -> Credit:
        """`credit`, or that of the learner's loss."""
        return self._credit(self.learner)

    @property
    def resamples(self) -> int:
        """`max_resamples`, or that of the learner's loss."""
        return self._resamples(self.learner)

    @property
    def size_of(self) -> Callable[[Trajectory], int] | None:
        """Function from a zero-variance trajectory to its contribution to the loss normalization. None: always 0."""
        rule, _ = self._normalization(self.learner)
        return self._size if rule == "sampled" else None

    def _size(self, trajectory: Trajectory) -> int:
        """Return the number of sampled tokens, or of sequences with a sampled token."""
        tokens = [total_tokens([turn]) for turn in trajectory.turns]
        if find_loss(self.learner.loss).reduction == "token":
            return sum(tokens)
        return sum(map(bool, tokens)) if self.learner.sequence == "turn" else int(any(tokens))
