"""Weak verifiers of trajectories, and combiners that make one reward of them.

In: nothing at import. Out: the public names below, loaded when first used. Waits for nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_verifiers import combiners
    from forge_verifiers.code.unit_tests import UnitTests
    from forge_verifiers.combiners.priors import Prior
    from forge_verifiers.core.composition import Gate, Seat, Sum
    from forge_verifiers.core.conformance import check_verifier
    from forge_verifiers.core.outcome import EnvReward
    from forge_verifiers.core.turns import PerTurn
    from forge_verifiers.core.verifier import (
        Assessment,
        Composable,
        Cost,
        Rule,
        ScoreError,
        Verifier,
        checked_scores,
        group_ids,
    )
    from forge_verifiers.distill.distill import distill
    from forge_verifiers.distill.distilled import Agreement, Distilled
    from forge_verifiers.ensemble.alarms import Alarm, HackingAlarm, RewardHackingError, RewardHackingWarning
    from forge_verifiers.ensemble.cascade import Cascade
    from forge_verifiers.ensemble.ensemble import Ensemble
    from forge_verifiers.ensemble.pessimism import LowerBound, SoftMinimum
    from forge_verifiers.judge.answers import Pairs, Reasoned, Scale, YesNo
    from forge_verifiers.judge.judge import Judge, JudgeUsage
    from forge_verifiers.models.embedding import EmbeddingSimilarity
    from forge_verifiers.models.reward_model import RewardModel
    from forge_verifiers.report.data import EnsembleReport, Snapshot, VerifierReport
    from forge_verifiers.rules.consistency import SelfConsistency
    from forge_verifiers.rules.maths.equal import MathEqual, Numeric
    from forge_verifiers.rules.text import Exact, Format, JsonSchema, Language, Length, Regex, Repetition

_HOME = {
    "Agreement": "distill.distilled",
    "Alarm": "ensemble.alarms",
    "Assessment": "core.verifier",
    "Cascade": "ensemble.cascade",
    "Composable": "core.verifier",
    "Cost": "core.verifier",
    "Distilled": "distill.distilled",
    "EmbeddingSimilarity": "models.embedding",
    "Ensemble": "ensemble.ensemble",
    "EnsembleReport": "report.data",
    "EnvReward": "core.outcome",
    "Exact": "rules.text",
    "Format": "rules.text",
    "Gate": "core.composition",
    "HackingAlarm": "ensemble.alarms",
    "JsonSchema": "rules.text",
    "Judge": "judge.judge",
    "JudgeUsage": "judge.judge",
    "Language": "rules.text",
    "Length": "rules.text",
    "LowerBound": "ensemble.pessimism",
    "MathEqual": "rules.maths.equal",
    "Numeric": "rules.maths.equal",
    "Pairs": "judge.answers",
    "PerTurn": "core.turns",
    "Prior": "combiners.priors",
    "Reasoned": "judge.answers",
    "Regex": "rules.text",
    "Repetition": "rules.text",
    "RewardHackingError": "ensemble.alarms",
    "RewardHackingWarning": "ensemble.alarms",
    "RewardModel": "models.reward_model",
    "Rule": "core.verifier",
    "Scale": "judge.answers",
    "ScoreError": "core.verifier",
    "Seat": "core.composition",
    "SelfConsistency": "rules.consistency",
    "Snapshot": "report.data",
    "SoftMinimum": "ensemble.pessimism",
    "Sum": "core.composition",
    "UnitTests": "code.unit_tests",
    "Verifier": "core.verifier",
    "VerifierReport": "report.data",
    "YesNo": "judge.answers",
    "check_verifier": "core.conformance",
    "checked_scores": "core.verifier",
    "distill": "distill.distill",
    "group_ids": "core.verifier",
}

__all__ = [
    "Agreement",
    "Alarm",
    "Assessment",
    "Cascade",
    "Composable",
    "Cost",
    "Distilled",
    "EmbeddingSimilarity",
    "Ensemble",
    "EnsembleReport",
    "EnvReward",
    "Exact",
    "Format",
    "Gate",
    "HackingAlarm",
    "JsonSchema",
    "Judge",
    "JudgeUsage",
    "Language",
    "Length",
    "LowerBound",
    "MathEqual",
    "Numeric",
    "Pairs",
    "PerTurn",
    "Prior",
    "Reasoned",
    "Regex",
    "Repetition",
    "RewardHackingError",
    "RewardHackingWarning",
    "RewardModel",
    "Rule",
    "Scale",
    "ScoreError",
    "Seat",
    "SelfConsistency",
    "Snapshot",
    "SoftMinimum",
    "Sum",
    "UnitTests",
    "Verifier",
    "VerifierReport",
    "YesNo",
    "check_verifier",
    "checked_scores",
    "combiners",
    "distill",
    "group_ids",
]


def __getattr__(name: str) -> Any:
    if name == "combiners":
        return importlib.import_module("forge_verifiers.combiners")
    if name not in _HOME:
        from forge_agents.errors import did_you_mean

        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{did_you_mean(name, __all__)}")
    return getattr(importlib.import_module(f"forge_verifiers.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
