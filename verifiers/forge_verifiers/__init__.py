"""Weak verifiers of trajectories, and combiners that turn them into one reward.

The names below are imported when they are first used. `Ensemble`, `Verifier`, `Rule`, `EnvReward` and `check_verifier`
are in `forge_agents`, reports in `forge_verifiers.report.report`, and distillation in `forge_verifiers.distillation`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_verifiers import combiners
    from forge_verifiers.code.unit_tests import UnitTests
    from forge_verifiers.combiners import Prior
    from forge_verifiers.core.composition import ForAgent, Gate, PerTurn
    from forge_verifiers.core.verifier import Assessment, Composable, ScoreError
    from forge_verifiers.ensemble.alarms import HackingAlarm, RewardHackingError, RewardHackingWarning
    from forge_verifiers.ensemble.panel import Cascade
    from forge_verifiers.ensemble.posterior import LowerConfidenceBound, SoftMinimum
    from forge_verifiers.judge.judge import Judge
    from forge_verifiers.judge.prompts import Pairs, Reasoned, Scale, YesNo
    from forge_verifiers.models.text_models import EmbeddingSimilarity, RewardModel
    from forge_verifiers.rules.consistency import SelfConsistency
    from forge_verifiers.rules.maths.equal import MathEqual, Numeric
    from forge_verifiers.rules.text import Exact, Format, JsonSchema, Language, Length, Regex, Repetition

_HOME = {
    "code.unit_tests": ("UnitTests",),
    "combiners": ("Prior",),
    "core.composition": ("ForAgent", "Gate", "PerTurn"),
    "core.verifier": ("Assessment", "Composable", "ScoreError"),
    "ensemble.alarms": ("HackingAlarm", "RewardHackingError", "RewardHackingWarning"),
    "ensemble.panel": ("Cascade",),
    "ensemble.posterior": ("LowerConfidenceBound", "SoftMinimum"),
    "judge.judge": ("Judge",),
    "judge.prompts": ("Pairs", "Reasoned", "Scale", "YesNo"),
    "models.text_models": ("EmbeddingSimilarity", "RewardModel"),
    "rules.consistency": ("SelfConsistency",),
    "rules.maths.equal": ("MathEqual", "Numeric"),
    "rules.text": ("Exact", "Format", "JsonSchema", "Language", "Length", "Regex", "Repetition"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
_IN_FORGE_AGENTS = {"Ensemble", "EnvReward", "Rule", "Verifier", "check_verifier"}
"""Names whose documented home is `forge_agents`. Importing them from this package works as well."""

__all__ = [
    "Assessment", "Cascade", "Composable", "EmbeddingSimilarity", "Exact", "ForAgent", "Format", "Gate", "HackingAlarm",
    "JsonSchema", "Judge", "Language", "Length", "LowerConfidenceBound", "MathEqual", "Numeric", "Pairs", "PerTurn",
    "Prior", "Reasoned", "Regex", "Repetition", "RewardHackingError", "RewardHackingWarning", "RewardModel", "Scale",
    "ScoreError", "SelfConsistency", "SoftMinimum", "UnitTests", "YesNo", "combiners",
]


def __getattr__(name: str) -> Any:
    if name == "combiners":
        return importlib.import_module("forge_verifiers.combiners")
    if name in _IN_FORGE_AGENTS:
        return getattr(importlib.import_module("forge_agents"), name)
    if name not in _MODULE_OF:
        from forge_agents.errors import did_you_mean

        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{did_you_mean(name, __all__)}")
    return getattr(importlib.import_module(f"forge_verifiers.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
