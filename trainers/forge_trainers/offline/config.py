"""Settings of supervised fine-tuning and of preference optimisation.

In: what a user sets. Out: checked, frozen dataclasses. Waits for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from forge_agents.policy import Policy
from forge_agents.runtime.hosts import Hosts
from forge_agents.settings import settings_class
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.records.trackers import Tracker, check_tracker
from forge_trainers.run.config import check_at_least, check_deadlines
from forge_trainers.run.ineffective import refuse_ineffective

if TYPE_CHECKING:
    from forge_agents.types import Episode


@settings_class
@dataclass(frozen=True, kw_only=True)
class OfflineConfig:
    """What learning from given data has in common."""

    batch_size: int = 32
    """Conversations, or pairs of them, per optimiser step."""
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    """Optimizer and precision. The trainer sets its loss, correction and temperature. The default learning rate of a
    method is that of `forge_trainers.learner.rates`: for SFT 5e-5 to 1e-5, for DPO 5e-6 to 5e-7, by the model's size,
    and ten times as much for an adapter."""
    learner_procs: int = 1
    """Processes of the learner; more than one shards it."""
    too_long: Literal["error", "drop"] = "drop"
    """What happens to a conversation that the model or `learner.max_sample_tokens` has no room for: "drop" leaves it
    out, counts it and names the first."""
    eval_share: float = 0.0
    """Share of the data that is never learned, chosen by `seed`, and measured. In [0, 0.9]."""
    eval_every: int = 0
    """Steps between measurements of what is held out; 0 measures after the last step only."""
    checkpoint_every: int = 100
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept on disk."""
    tracker: Tracker = "tensorboard"
    """Where curves go beside ``metrics.jsonl``: "tensorboard", "wandb" or "mlflow"."""
    seed: int = 0
    """Of the order of the data and of the held-out share."""
    start_timeout_s: float = 600.0
    """Deadline for the learner to start."""
    stage_timeout_s: float = 1800.0
    """Deadline of each step, measurement and export."""
    heartbeat_timeout_s: float = 60.0
    """Seconds after which a learner that says nothing counts as dead."""

    def __post_init__(self) -> None:
        refuse_ineffective(self.learner)
        check_at_least(self, 1, "batch_size", "learner_procs", "checkpoint_every", "keep_checkpoints")
        check_at_least(self, 0, "eval_every", "seed")
        check_deadlines(self, "start_timeout_s", "stage_timeout_s", "heartbeat_timeout_s")
        if self.too_long not in ("error", "drop"):
            raise ValueError(f"too_long={self.too_long!r} is neither 'error' nor 'drop'")
        if not 0 <= self.eval_share <= 0.9:
            raise ValueError(f"eval_share={self.eval_share} is outside [0, 0.9]")
        check_tracker(self.tracker)
        if self.learner.num_iterations * self.learner.num_minibatches > 1:
            raise ValueError(
                f"learner.num_iterations={self.learner.num_iterations} and learner.num_minibatches="
                f"{self.learner.num_minibatches} are for batches of rollouts; here set epochs of fit, and batch_size"
            )


@settings_class
@dataclass(frozen=True, kw_only=True)
class SFTConfig(OfflineConfig):
    """Supervised fine-tuning: cross-entropy of the answers, given what stands before them."""

    min_reward: float | None = None
    """Of episodes, only trajectories with at least this reward are learned; None sets no bound."""
    best_per_group: int | None = None
    """Of trajectories of one agent in episodes with one environment and seed, this many of highest reward are learned;
    None sets no bound. With `min_reward`: of those that reach it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best_per_group is not None and self.best_per_group < 1:
            raise ValueError(f"best_per_group={self.best_per_group} leaves nothing; set at least 1, or None for all")


@settings_class
@dataclass(frozen=True, kw_only=True)
class DPOConfig(OfflineConfig):
    """Direct preference optimisation (arXiv 2305.18290) against the frozen start model."""

    beta: float = 0.1
    """How closely the policy is held to the start model; above 0."""
    min_difference: float = 0.0
    """Of episodes with one environment and seed, an agent's best and worst make a pair where their rewards differ by
    more than this. At least 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.beta < math.inf:
            raise ValueError(f"beta={self.beta} must be above 0; 0.1 is usual")
        if not self.min_difference >= 0:
            raise ValueError(f"min_difference={self.min_difference} must be at least 0")


@settings_class
@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """What a policy learns by imitation before it plays."""

    data: str
    """A JSONL file of conversations, or the folder of a run, whose episodes are learned; with `games`, an environment's
    id."""
    games: int | None = None
    """Games of the oracle of the environment that `data` names, which are learned. null: `data` is a file or folder."""
    env_args: dict[str, Any] = field(default_factory=dict)
    """Arguments of that environment."""
    eval_data: str | None = None
    """The same, measured and never learned; null takes `trainer.eval_share` of `data`."""
    epochs: int = 1
    """Times that every conversation is learned."""
    steps: int | None = None
    """Optimiser steps; null takes as many as `epochs` needs."""
    trainer: SFTConfig = field(default_factory=SFTConfig)
    """Settings of the trainer; its `seed` also chooses the seeds of `games`."""

    def __post_init__(self) -> None:
        if self.games is not None and self.games < 1:
            raise ValueError(f"games={self.games} shows nothing; set at least 1, or null where data is a file")
        if self.env_args and self.games is None:
            raise ValueError(f"env_args={self.env_args} are of games of an oracle; say how many with games")

    def dataset(self, seats: Collection[str] = ()) -> str | list[Episode]:
        """What `fit` learns: `data`, or the games, which are played now; of them the part of `seats`, empty: all."""
        if self.games is None:
            return self.data
        from forge_agents.episodes.demonstrations import demonstrations  # nothing is played when settings are read

        seed = self.trainer.seed
        return demonstrations(self.data, self.games, seed=seed, env_args=self.env_args, agents=seats)


@settings_class
@dataclass(frozen=True, kw_only=True)
class SFTRunConfig(WarmStart):
    """One run of supervised fine-tuning, as YAML and flags say it."""

    policy: Policy
    """The model that learns."""
    out_dir: str = "runs/sft"
    """The run's folder; a run in it is continued."""
    mesh: Hosts = field(default_factory=Hosts)
    """Where the learner runs."""
