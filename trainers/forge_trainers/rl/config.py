"""Settings of a GRPO run.

In: what a user sets. Out: a checked, frozen dataclass. Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import get_args

from forge_agents.policy import Policy
from forge_agents.settings import settings_class
from forge_agents.types import Trajectory, total_tokens
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.losses.registry import LossNormalization, find_loss
from forge_trainers.records.trackers import Tracker, check_tracker
from forge_trainers.rl.credit import Credit, imported_credit
from forge_trainers.run.config import ProcessConfig, check_at_least, check_deadlines


@settings_class
@dataclass(frozen=True, kw_only=True)
class GRPOConfig(ProcessConfig):
    """Group relative policy optimization over multi-agent episodes, by default DAPO's variant (arXiv 2503.14476).

    ``learner=LearnerConfig(loss="grpo")`` is GRPO as published (arXiv 2402.03300).
    """

    group_size: int = 8
    """Siblings per group: episodes with one seed. At least 2 where `credit` compares them with each other."""
    groups_per_step: int = 8
    """Groups, so seeds, per optimiser step."""
    max_resamples: int | None = None
    """Times a step may replace groups that teach nothing, and failed ones, by groups with other seeds, played on the
    present weights (DAPO's dynamic sampling, arXiv 2503.14476, eq. 11). 0 learns from what is left. None: as the
    learner's loss brings it, 3 for "dapo" and 0 for the others."""
    loss_normalization: LossNormalization | None = None
    """Which trajectories count in the mean that a loss is: "sampled", also those of groups whose siblings earn the same
    (GRPO as published), or "used", those that teach. None: as the learner's loss brings it."""
    credit: Credit | str | None = None
    """How rewards become advantages: a `Credit`, or "package.module:name" of one or of a subclass, which is imported.
    None: as the learner's loss was published."""
    max_concurrent_episodes: int = 512
    """Episodes in flight at once."""
    max_turns: int = 64
    """Decisions after which an episode is cut off, where its environment sets no limit."""
    eval_every: int = 0
    """Number of steps between evaluations on held-out seeds; 0 (default) never evaluates. Episodes are scored by the
    reward of the run; the environment's own reward is reported as well. The next step is played at the same time, on
    the same weights; the learner waits for both."""
    eval_episodes: int = 64
    """Number of held-out episodes of one evaluation. Each has a seed of its own, unless the reward compares episodes of
    a group: then each seed is played `group_size` times."""
    exploitability_samples: int = 0
    """Free answers drawn at every information set at each evaluation, which then also says how much the best response
    wins from each trained policy: in games of two that can list their openings, such as forge/KuhnPoker-v0. 0 leaves
    it out."""
    checkpoint_every: int = 10
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept on disk."""
    keep_best: bool = True
    """Whether the checkpoint of highest held-out reward, by the reward of the run, stays on disk as well. A checkpoint
    is then written at every evaluation, see `eval_every`, that is the best so far."""
    keep_episodes: int = 4
    """Episodes of each step written to ``episodes.jsonl``."""
    tracker: Tracker = "tensorboard"
    """Where curves go beside ``metrics.jsonl``: "tensorboard" writes files in the run's folder; "wandb" and "mlflow"
    are extras to install, and read their own environment variables."""
    max_logprob_gap: float = 0.2
    """Mean absolute difference between the sampler's and the learner's log-probability of the sampled tokens above
    which the run ends: the two no longer hold the same model. Looked at where every sample is of the learner's own
    version, as the first step's always are. bfloat16 against bfloat16 shows 0.02 to 0.042 on average over a step."""
    max_bad_logprobs: float = 0.01
    """Share of a policy's sampled tokens in a step whose log-probability may be NaN, infinite or positive; they are
    masked. More end the run. In [0, 1]."""
    max_skipped_steps: int = 1
    """Maximum number of consecutive steps in which a policy skips its batch, or minibatches of it, because their loss
    or gradient is not finite. What is skipped leaves the weights unchanged. The batch is saved to ``failed-batches``,
    and ``learner/skipped`` or ``learner/skipped_minibatches`` counts it. If exceeded, training stops with
    `DivergedError`."""
    max_empty_steps: int = 5
    """Steps in a row without one group to learn from, after which the run ends, saved and exported, with the reason:
    well where every episode earns the most there is or the highest that was seen, with an `EmptyBatchError`
    elsewhere."""
    preflight: bool = True
    """Whether a few seconds of random play try environment, reward, prompts and disk before engines start, so that what
    fails is told at once; see `forge_trainers.rl.preflight`."""
    block_timeout_s: float = 120.0
    """Seconds that an environment without isolation, or a scripted player, may hold the controller's thread at once;
    then it is interrupted and its episode fails."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.credit, str):
            object.__setattr__(self, "credit", imported_credit(self.credit))
        check_tracker(self.tracker)
        if self.group_size < 2 and self.credit_rule.compares_episodes:
            raise ValueError(f"group_size={self.group_size} gives every advantage 0; set group_size >= 2")
        check_at_least(self, 1, "groups_per_step", "max_concurrent_episodes", "max_turns", "eval_episodes")
        self._check_minibatches(self.learner)
        check_at_least(self, 1, "checkpoint_every", "keep_checkpoints", "max_empty_steps")
        check_at_least(self, 0, "max_resamples", "max_skipped_steps", "eval_every", "keep_episodes")
        if self.loss_normalization not in (None, *get_args(LossNormalization)):
            raise ValueError(
                f"loss_normalization={self.loss_normalization!r} must be one of {get_args(LossNormalization)}, or None"
            )
        if self.exploitability_samples < 0 or (self.exploitability_samples and not self.eval_every):
            raise ValueError(
                f"exploitability_samples={self.exploitability_samples} with eval_every={self.eval_every}: at least 0, "
                "and above 0 only with evaluations, where it is measured"
            )
        if not self.max_logprob_gap > 0:
            raise ValueError(f"max_logprob_gap={self.max_logprob_gap} must be above 0; inf switches the guard off")
        if not 0 <= self.max_bad_logprobs <= 1:
            raise ValueError(f"max_bad_logprobs={self.max_bad_logprobs} must be in [0, 1]; 1 switches the guard off")
        check_deadlines(self, "block_timeout_s")

    def learner_of(self, policy: Policy) -> LearnerConfig:
        """As in `ProcessConfig`; a loss of the policy's own must fit the step, which is the same for all policies.

        Raises:
            ValueError: The loss comes with another credit, loss normalization or dynamic sampling than the trainer's.
        """
        settings = super().learner_of(policy)
        self._check_minibatches(settings)
        for name, of_loss, of_trainer in (
            ("credit", self._credit(settings), self.credit_rule),
            ("max_resamples", self._refills(settings), self.resamples),
            ("loss_normalization", self._loss_normalization(settings), self._loss_normalization(self.learner)),
        ):
            if of_loss != of_trainer:
                raise ValueError(
                    f"policy {policy.name!r}: learner.loss={settings.loss!r} has {name}={of_loss!r} and the trainer's "
                    f"loss {self.learner.loss!r} {name}={of_trainer!r}, but a step has one for all policies; set "
                    f"{name} of the trainer"
                )
        return settings

    def _check_minibatches(self, learner: LearnerConfig) -> None:
        if learner.num_minibatches > self.groups_per_step:
            raise ValueError(
                f"learner.num_minibatches={learner.num_minibatches} is more than groups_per_step="
                f"{self.groups_per_step}, and minibatches are whole groups; lower it, or raise groups_per_step"
            )

    def _credit(self, learner: LearnerConfig) -> Credit:
        own = find_loss(learner.loss).credit
        assert not isinstance(self.credit, str)
        return self.credit or (Credit(**own) if isinstance(own, Mapping) else own)

    def _refills(self, learner: LearnerConfig) -> int:
        return find_loss(learner.loss).max_resamples if self.max_resamples is None else self.max_resamples

    def _loss_normalization(self, learner: LearnerConfig) -> tuple[LossNormalization, str]:
        """Loss normalization, and the unit in which trajectories are counted for it."""
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
        """`max_resamples`, or those of the learner's loss."""
        return self._refills(self.learner)

    @property
    def size_of(self) -> Callable[[Trajectory], int] | None:
        """What a trajectory that teaches nothing adds to the loss normalization; None: nothing."""
        rule = self.loss_normalization or find_loss(self.learner.loss).loss_normalization
        return self._size if rule == "sampled" else None

    def _size(self, trajectory: Trajectory) -> int:
        """Tokens or sequences."""
        tokens = [total_tokens([turn]) for turn in trajectory.turns]
        if find_loss(self.learner.loss).reduction == "token":
            return sum(tokens)
        return sum(map(bool, tokens)) if self.learner.sequence == "turn" else int(any(tokens))
