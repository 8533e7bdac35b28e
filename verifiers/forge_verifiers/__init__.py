"""Weak verifiers of trajectories, and combiners that make one reward of them.

In: nothing at import. Out: the public names below, loaded when first used. Waits for nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_verifiers import combiners
    from forge_verifiers.alarms import Alarm, HackingAlarm, RewardHackingError, RewardHackingWarning
    from forge_verifiers.cascade import Cascade
    from forge_verifiers.combiners.priors import Prior
    from forge_verifiers.composition import Gate, Seat, Sum
    from forge_verifiers.consistency import SelfConsistency
    from forge_verifiers.distill import distill
    from forge_verifiers.distilled import Agreement, Distilled
    from forge_verifiers.embedding import EmbeddingSimilarity
    from forge_verifiers.ensemble import Ensemble
    from forge_verifiers.ensemble_report import EnsembleReport, Snapshot, VerifierReport
    from forge_verifiers.judge import Judge, JudgeUsage
    from forge_verifiers.judge_answers import Pairs, Reasoned, Scale, YesNo
    from forge_verifiers.maths import MathEqual, Numeric
    from forge_verifiers.outcome import EnvReward
    from forge_verifiers.pessimism import LowerBound, SoftMinimum
    from forge_verifiers.reward_model import RewardModel
    from forge_verifiers.rules import Exact, Format, JsonSchema, Language, Length, Regex, Repetition
    from forge_verifiers.turns import PerTurn
    from forge_verifiers.unit_tests import UnitTests
    from forge_verifiers.verifier import (
        Assessment,
        Composable,
        Cost,
        Rule,
        ScoreError,
        Verifier,
        checked_scores,
        group_ids,
    )

_HOME = {
    "Agreement": "distilled",
    "Alarm": "alarms",
    "Assessment": "verifier",
    "Cascade": "cascade",
    "Composable": "verifier",
    "Cost": "verifier",
    "Distilled": "distilled",
    "EmbeddingSimilarity": "embedding",
    "Ensemble": "ensemble",
    "EnsembleReport": "ensemble_report",
    "EnvReward": "outcome",
    "Exact": "rules",
    "Format": "rules",
    "Gate": "composition",
    "HackingAlarm": "alarms",
    "JsonSchema": "rules",
    "Judge": "judge",
    "JudgeUsage": "judge",
    "Language": "rules",
    "Length": "rules",
    "LowerBound": "pessimism",
    "MathEqual": "maths",
    "Numeric": "maths",
    "Pairs": "judge_answers",
    "PerTurn": "turns",
    "Prior": "combiners.priors",
    "Reasoned": "judge_answers",
    "Regex": "rules",
    "Repetition": "rules",
    "RewardHackingError": "alarms",
    "RewardHackingWarning": "alarms",
    "RewardModel": "reward_model",
    "Rule": "verifier",
    "Scale": "judge_answers",
    "ScoreError": "verifier",
    "Seat": "composition",
    "SelfConsistency": "consistency",
    "Snapshot": "ensemble_report",
    "SoftMinimum": "pessimism",
    "Sum": "composition",
    "UnitTests": "unit_tests",
    "Verifier": "verifier",
    "VerifierReport": "ensemble_report",
    "YesNo": "judge_answers",
    "checked_scores": "verifier",
    "distill": "distill",
    "group_ids": "verifier",
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
