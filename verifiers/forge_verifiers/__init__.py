"""Weak verifiers of trajectories, and combiners that make one reward of them.

In: nothing at import. Out: the public names below, loaded when first used. Waits for nothing. A verifier is a few lines
in `core.verifier`; the rooms beside `core` hold those that come with the package; `ensemble` makes one of many.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_verifiers import combiners
    from forge_verifiers.code.unit_tests import UnitTests
    from forge_verifiers.combiners import Prior
    from forge_verifiers.core.composition import Gate, PerTurn, Seat
    from forge_verifiers.core.conformance import check_verifier
    from forge_verifiers.core.verifier import (
        Assessment,
        Composable,
        Cost,
        EnvReward,
        Rule,
        ScoreError,
        Sum,
        Verifier,
        checked_scores,
        group_ids,
    )
    from forge_verifiers.distillation.model import Agreement, Distilled, distill
    from forge_verifiers.ensemble.alarms import Alarm, HackingAlarm, RewardHackingError, RewardHackingWarning
    from forge_verifiers.ensemble.belief import LowerBound, SoftMinimum
    from forge_verifiers.ensemble.ensemble import Ensemble
    from forge_verifiers.ensemble.panel import Cascade
    from forge_verifiers.judge.judge import Judge, JudgeUsage
    from forge_verifiers.judge.prompts import Pairs, Reasoned, Scale, YesNo
    from forge_verifiers.models.text_models import EmbeddingSimilarity, RewardModel
    from forge_verifiers.report.report import EnsembleReport, Snapshot, VerifierReport
    from forge_verifiers.rules.consistency import SelfConsistency
    from forge_verifiers.rules.maths.equal import MathEqual, Numeric
    from forge_verifiers.rules.text import Exact, Format, JsonSchema, Language, Length, Regex, Repetition

_HOME = {
    "code.unit_tests": ("UnitTests",),
    "combiners": ("Prior",),
    "core.composition": ("Gate", "PerTurn", "Seat"),
    "core.conformance": ("check_verifier",),
    "core.verifier": (
        "Assessment", "Composable", "Cost", "EnvReward", "Rule", "ScoreError", "Sum", "Verifier", "checked_scores",
        "group_ids",
    ),
    "distillation.model": ("Agreement", "Distilled", "distill"),
    "ensemble.alarms": ("Alarm", "HackingAlarm", "RewardHackingError", "RewardHackingWarning"),
    "ensemble.belief": ("LowerBound", "SoftMinimum"),
    "ensemble.ensemble": ("Ensemble",),
    "ensemble.panel": ("Cascade",),
    "judge.judge": ("Judge", "JudgeUsage"),
    "judge.prompts": ("Pairs", "Reasoned", "Scale", "YesNo"),
    "models.text_models": ("EmbeddingSimilarity", "RewardModel"),
    "report.report": ("EnsembleReport", "Snapshot", "VerifierReport"),
    "rules.consistency": ("SelfConsistency",),
    "rules.maths.equal": ("MathEqual", "Numeric"),
    "rules.text": ("Exact", "Format", "JsonSchema", "Language", "Length", "Regex", "Repetition"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Agreement", "Alarm", "Assessment", "Cascade", "Composable", "Cost", "Distilled", "EmbeddingSimilarity", "Ensemble",
    "EnsembleReport", "EnvReward", "Exact", "Format", "Gate", "HackingAlarm", "JsonSchema", "Judge", "JudgeUsage",
    "Language", "Length", "LowerBound", "MathEqual", "Numeric", "Pairs", "PerTurn", "Prior", "Reasoned", "Regex",
    "Repetition", "RewardHackingError", "RewardHackingWarning", "RewardModel", "Rule", "Scale", "ScoreError", "Seat",
    "SelfConsistency", "Snapshot", "SoftMinimum", "Sum", "UnitTests", "Verifier", "VerifierReport", "YesNo",
    "check_verifier", "checked_scores", "combiners", "distill", "group_ids",
]


def __getattr__(name: str) -> Any:
    if name == "combiners":
        return importlib.import_module("forge_verifiers.combiners")
    if name not in _MODULE_OF:
        from forge_agents.errors import did_you_mean

        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{did_you_mean(name, __all__)}")
    return getattr(importlib.import_module(f"forge_verifiers.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
