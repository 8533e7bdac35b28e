"""Training: scored episodes in, better weights out.

In: nothing at import. Out: the public names below, loaded when first used. Waits for nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_trainers.learner import Learner
    from forge_trainers.learner_config import LearnerConfig
    from forge_trainers.learner_core import LearnerCore
    from forge_trainers.packing import Sample, pack, samples_from

_HOME = {
    "Learner": "learner",
    "LearnerConfig": "learner_config",
    "LearnerCore": "learner_core",
    "Sample": "packing",
    "pack": "packing",
    "samples_from": "packing",
}

__all__ = ["Learner", "LearnerConfig", "LearnerCore", "Sample", "pack", "samples_from"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"forge_trainers.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
