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
    from forge_verifiers.core.texts import TextReward
    from forge_verifiers.core.verifier import Assessment, Composable, ScoreError
    from forge_verifiers.ensemble.alarms import HackingAlarm, RewardHackingError, RewardHackingWarning
    from forge_verifiers.ensemble.panel import Cascade
    from forge_verifiers.ensemble.posterior import LowerConfidenceBound, SoftMinimum
    from forge_verifiers.judge.judge import Judge
    from forge_verifiers.judge.prompts import Pairs, Reasoned, Ruler, Scale, YesNo
    from forge_verifiers.models.text_models import EmbeddingSimilarity, RewardModel
    from forge_verifiers.rules.consistency import SelfConsistency
    from forge_verifiers.rules.maths.equal import MathEqual, Numeric
    from forge_verifiers.rules.text import Exact, Format, JsonSchema, Language, Length, Regex, Repetition

_MODULES = {
    "forge_agents": "Ensemble EnvReward Rule Verifier check_verifier",  # their documented home
    "forge_verifiers.code.unit_tests": "UnitTests",
    "forge_verifiers.combiners": "Prior",
    "forge_verifiers.core.composition": "ForAgent Gate PerTurn",
    "forge_verifiers.core.texts": "TextReward",
    "forge_verifiers.core.verifier": "Assessment Composable ScoreError",
    "forge_verifiers.ensemble.alarms": "HackingAlarm RewardHackingError RewardHackingWarning",
    "forge_verifiers.ensemble.panel": "Cascade",
    "forge_verifiers.ensemble.posterior": "LowerConfidenceBound SoftMinimum",
    "forge_verifiers.judge.judge": "Judge",
    "forge_verifiers.judge.prompts": "Pairs Reasoned Ruler Scale YesNo",
    "forge_verifiers.models.text_models": "EmbeddingSimilarity RewardModel",
    "forge_verifiers.rules.consistency": "SelfConsistency",
    "forge_verifiers.rules.maths.equal": "MathEqual Numeric",
    "forge_verifiers.rules.text": "Exact Format JsonSchema Language Length Regex Repetition",
}

__all__ = [
    "Assessment", "Cascade", "Composable", "EmbeddingSimilarity", "Exact", "ForAgent", "Format", "Gate", "HackingAlarm",
    "JsonSchema", "Judge", "Language", "Length", "LowerConfidenceBound", "MathEqual", "Numeric", "Pairs", "PerTurn",
    "Prior", "Reasoned", "Regex", "Repetition", "RewardHackingError", "RewardHackingWarning", "RewardModel", "Ruler",
    "Scale", "ScoreError", "SelfConsistency", "SoftMinimum", "TextReward", "UnitTests", "YesNo", "combiners",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "combiners":
        return importlib.import_module("forge_verifiers.combiners")
    from forge_agents.errors import did_you_mean, missing_stack

    for module, names in _MODULES.items():
        if name in names.split():
            try:
                return getattr(importlib.import_module(module), name)
            except ModuleNotFoundError as error:
                raise missing_stack(f"forge_verifiers.{name}", error) from error

    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{did_you_mean(name, __all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
