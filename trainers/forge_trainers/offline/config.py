"""User settings of supervised fine-tuning and preference optimization."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from forge_agents.policy import Policy
from forge_agents.runtime.hosts import Hosts
from forge_agents.settings import MAX_COUNT, settings_class
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.records.trackers import tracker_class
from forge_trainers.run.config import MAX_STEPS, check_at_least, check_processes, refuse_ineffective

if TYPE_CHECKING:
    from forge_agents.types import Episode


@settings_class
@dataclass(frozen=True, kw_only=True)
class OfflineConfig:
    """Settings that all training on given data shares."""

    batch_size: int = 32
    """Number of conversations, or of pairs of them, per optimizer step."""
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    """Optimizer, precision and parallelism. Loss and correction are those of the method. The default learning rate
    depends on method and model size (`forge_trainers.learner.rates`): for SFT 5e-5 to 1e-5, for DPO 5e-6 to 5e-7, and
    ten times as much for an adapter."""
    learner_procs: int = 1
    """Number of processes of the learner. More than one shards its weights (FSDP2)."""
    too_long: Literal["error", "drop"] = "drop"
    """Handling of conversations that are longer than `max_sample_tokens`: "drop" (default) leaves them out, counts them
    and names the first, "error" refuses the data."""
    max_sample_tokens: int | None = None
    """Maximum number of tokens of a conversation, at least 2. None (default): the model's context."""
    eval_share: float = 0.0
    """Fraction of the data that is held out for evaluation, chosen by `seed`, in [0, 0.9]."""
    eval_every: int = 0
    """Number of steps between evaluations on the held-out data. 0 (default) evaluates after the last step only."""
    checkpoint_every: int = 100
    """Number of steps between checkpoints. The last step is always saved."""
    keep_checkpoints: int = 2
    """Number of newest checkpoints that are kept on disk."""
    tracker: str = "tensorboard"
    """Experiment tracker: "tensorboard" (default), "wandb", "mlflow" or "package.module:Class". Metrics are always
    written to ``metrics.jsonl`` as well."""
    seed: int = 0
    """Random seed for the order of the data and the choice of the held-out part."""
    stage_timeout_s: float = 1800.0
    """Timeout in seconds of each step, evaluation and export."""
    heartbeat_timeout_s: float = 60.0
    """Timeout in seconds of the learner's heartbeat. A learner that misses it counts as dead."""

    def __post_init__(self) -> None:
        refuse_ineffective(self.learner, policy_loss=False)
        check_at_least(self, 1, "batch_size", most=MAX_COUNT)
        check_at_least(self, 1, "checkpoint_every", "keep_checkpoints")
        check_processes(self)
        check_at_least(self, 0, "eval_every")
        check_at_least(self, 2, "max_sample_tokens")
        if not 0 <= self.eval_share <= 0.9:
            raise ValueError(f"eval_share={self.eval_share} is outside [0, 0.9]")
        tracker_class(self.tracker)
        if self.learner.num_iterations * self.learner.num_minibatches > 1:
            raise ValueError(
                f"learner.num_iterations={self.learner.num_iterations} and learner.num_minibatches="
                f"{self.learner.num_minibatches} are for batches of rollouts. Here set epochs of fit, and batch_size"
            )


@settings_class
@dataclass(frozen=True, kw_only=True)
class SFTConfig(OfflineConfig):
    """Settings of supervised fine-tuning: cross-entropy of the answers, given the conversation before them."""

    min_reward: float | None = None
    """Minimum reward of a trajectory of an episode to be trained on. None (default) sets no bound."""
    best_per_group: int | None = None
    """Number of trajectories with the highest reward to train on, per agent and seed of an environment. None (default)
    sets no bound. With `min_reward`, the number of those that reach it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best_per_group is not None and self.best_per_group < 1:
            raise ValueError(f"best_per_group={self.best_per_group} leaves nothing. Set at least 1, or None for all")


@settings_class
@dataclass(frozen=True, kw_only=True)
class DPOConfig(OfflineConfig):
    """Settings of direct preference optimization (arXiv 2305.18290) against the frozen start model."""

    beta: float = 0.1
    """Strength of the pull towards the start model, above 0."""
    min_difference: float = 0.0
    """Minimum difference of rewards, at least 0: an agent's best and worst trajectory of one seed make a pair if their
    rewards differ by more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.beta < math.inf:
            raise ValueError(f"beta={self.beta} must be above 0. 0.1 is usual")
        if not self.min_difference >= 0:
            raise ValueError(f"min_difference={self.min_difference} must be at least 0")


@settings_class
@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Imitation learning of a policy before reinforcement learning."""

    data: str
    """JSONL file of conversations, or the folder of a run, whose episodes are imitated. With `games`, the id of an
    environment."""
    games: int | None = None
    """Number of episodes of the environment's oracle to imitate. null (default): `data` is a file or folder."""
    env_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of that environment."""
    eval_data: str | None = None
    """Held-out data in the same format. null (default) holds out `trainer.eval_share` of `data`."""
    epochs: int = 1
    """Number of passes over the data."""
    steps: int | None = None
    """Number of optimizer steps. null (default): as many as `epochs` needs."""
    trainer: SFTConfig = field(default_factory=SFTConfig)
    """Settings of the trainer. Its `seed` also chooses the seeds of `games`."""

    def __post_init__(self) -> None:
        if self.games is not None and self.games < 1:
            raise ValueError(f"games={self.games} shows nothing. Set at least 1, or null where data is a file")
        if self.env_args and self.games is None:
            raise ValueError(f"env_args={self.env_args} are for games of an oracle. Set their number with games")
        check_at_least(self, 1, "epochs", "games", most=MAX_COUNT)
        check_at_least(self, 1, "steps", most=MAX_STEPS)

    def dataset(self, agents: Collection[str] = ()) -> str | list[Episode]:
        """Return the data for `fit`: `data`, or the oracle's games, which are played now, of `agents` (empty: all)."""
        if self.games is None:
            return self.data
        from forge_agents.episodes.demonstrations import demonstrations  # imports environments

        seed = self.trainer.seed
        return demonstrations(self.data, self.games, seed=seed, env_args=self.env_args, agents=agents)


@settings_class
@dataclass(frozen=True, kw_only=True)
class SFTRunConfig(WarmStart):
    """Run of supervised fine-tuning, as in a YAML file and flags."""

    policy: Policy
    """Model to train."""
    out_dir: str = "runs/sft"
    """Run folder. A run in it is continued."""
    mesh: Hosts = field(default_factory=Hosts)
    """Hosts of the learner."""
