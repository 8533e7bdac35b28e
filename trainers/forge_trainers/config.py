"""Settings of a GRPO run.

In: what a user sets. Out: checked, frozen dataclasses. Waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forge_agents.serving.config import EngineConfig
from forge_trainers.credit import Credit
from forge_trainers.learner_config import LearnerConfig


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """Group relative policy optimisation (arXiv 2402.03300) over multi-agent episodes."""

    group_size: int = 8
    """Siblings per group: episodes with one seed, compared with each other. At least 2."""
    groups_per_step: int = 8
    """Groups, so seeds, per optimiser step."""
    credit: Credit = field(default_factory=Credit)
    """How rewards become advantages."""
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    """Optimiser, loss and precision."""
    learner_procs: int = 1
    """Processes of each learner; more than one shards it."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """How models are served."""
    max_staleness: int = 0
    """Weight versions a sample may lie behind the learner that eats it. 0 waits for each update; k plays k steps
    ahead while the learner works."""
    max_live_episodes: int = 512
    """Episodes in flight at once."""
    max_turns: int = 64
    """Decisions after which an episode is cut off, where its environment sets no limit."""
    eval_every: int = 0
    """Steps between evaluations on held-out seeds; 0 evaluates never."""
    eval_episodes: int = 64
    """Held-out seeds of one evaluation."""
    checkpoint_every: int = 10
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept on disk."""
    keep_episodes: int = 4
    """Episodes of each step written to ``episodes.jsonl``."""
    max_empty_steps: int = 5
    """Steps in a row without one group to learn from, after which the run ends with the reason."""
    seed: int = 0
    """Of environments, sampling and initialisation. Training seeds lie below 2**31, held-out seeds above."""
    start_timeout_s: float = 600.0
    """Deadline for engines and learners to start."""
    stage_timeout_s: float = 1800.0
    """Deadline of each stage of a step: collecting, judging, learning, weight return."""

    def __post_init__(self) -> None:
        if self.group_size < 2 and self.credit.baseline != "none":
            raise ValueError(f"group_size={self.group_size} gives every advantage 0; set group_size >= 2")
        for name in ("groups_per_step", "learner_procs", "max_live_episodes", "max_turns", "eval_episodes",
                     "checkpoint_every", "keep_checkpoints", "max_empty_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("max_staleness", "eval_every", "keep_episodes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        for name in ("start_timeout_s", "stage_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive: every wait has a deadline")
