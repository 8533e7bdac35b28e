"""Training: scored episodes in, better weights out.

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

_HOME = {
    "Learner": "learner.client",
    "LearnerConfig": "learner.config",
    "LearnerCore": "learner.core",
    "Sample": "batch.packing",
    "pack": "batch.packing",
    "samples_from": "batch.packing",
}

__all__ = ["Learner", "LearnerConfig", "LearnerCore", "Sample", "pack", "samples_from"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"forge_trainers.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
