"""Training: scored episodes in, better weights out.

The parts of a loop of your own, in its order: `TaskSampler` draws seeds and plays their groups, `judge` scores them,
`credit_groups` makes advantages and samples (of one trajectory: `fa.Credit` and `samples_from`), `pack` a batch, and
`Learner.train_step` and `Learner.publish` do the rest. ``examples/rl_loop.py`` is such a loop; `fa.GRPOTrainer` is
theirs with what a long run needs around it.

In: nothing at import. Out: the public names below, loaded when first used. Waits for nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_trainers.batch.packing import Sample, pack, samples_from
    from forge_trainers.learner.client import Learner
    from forge_trainers.learner.config import LearnerConfig
    from forge_trainers.learner.core import LearnerCore
    from forge_trainers.rl.rewards import JudgedGroup, env_reward, judge
    from forge_trainers.rl.tasks import Task, TaskSampler
    from forge_trainers.rl.update import StepSamples, credit_groups

_HOME = {
    "JudgedGroup": "rl.rewards",
    "Learner": "learner.client",
    "LearnerConfig": "learner.config",
    "LearnerCore": "learner.core",
    "Sample": "batch.packing",
    "StepSamples": "rl.update",
    "Task": "rl.tasks",
    "TaskSampler": "rl.tasks",
    "credit_groups": "rl.update",
    "env_reward": "rl.rewards",
    "judge": "rl.rewards",
    "pack": "batch.packing",
    "samples_from": "batch.packing",
}

__all__ = [
    "JudgedGroup",
    "Learner",
    "LearnerConfig",
    "LearnerCore",
    "Sample",
    "StepSamples",
    "Task",
    "TaskSampler",
    "credit_groups",
    "env_reward",
    "judge",
    "pack",
    "samples_from",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"forge_trainers.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
