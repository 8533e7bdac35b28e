"""Training: from scored episodes to better weights.

The parts of a training loop, in its order: `TaskSampler` draws seeds and collects groups, `score` adds rewards,
`credit_groups` computes advantages and samples (for one trajectory: `fa.Credit` and `samples_from`), `pack` makes a
batch, and `Learner.train_step` and `Learner.publish` do the rest. ``examples/rl_loop.py`` is such a loop.
`fa.GRPOTrainer` adds everything that a long run needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_trainers.batch.packing import Sample, pack, samples_from
    from forge_trainers.learner.client import Learner
    from forge_trainers.learner.config import LearnerConfig
    from forge_trainers.rl.rewards import env_reward
    from forge_trainers.rl.samples import credit_groups
    from forge_trainers.rl.scoring import score
    from forge_trainers.rl.tasks import Task, TaskSampler

_HOME = {
    "Learner": "learner.client",
    "LearnerConfig": "learner.config",
    "Sample": "batch.packing",
    "Task": "rl.tasks",
    "TaskSampler": "rl.tasks",
    "credit_groups": "rl.samples",
    "env_reward": "rl.rewards",
    "pack": "batch.packing",
    "samples_from": "batch.packing",
    "score": "rl.scoring",
}

__all__ = [
    "Learner",
    "LearnerConfig",
    "Sample",
    "Task",
    "TaskSampler",
    "credit_groups",
    "env_reward",
    "pack",
    "samples_from",
    "score",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"forge_trainers.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
