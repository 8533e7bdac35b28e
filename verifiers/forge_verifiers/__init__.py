"""Weak verifiers of trajectories, and combiners that make one reward of them.

In: nothing at import. Out: the public names below, loaded when first used. Waits for nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_verifiers import combiners
    from forge_verifiers.composition import Gate, Seat, Sum
    from forge_verifiers.consistency import SelfConsistency
    from forge_verifiers.ensemble import Ensemble
    from forge_verifiers.ensemble_report import EnsembleReport, Snapshot, VerifierReport
    from forge_verifiers.judge import Judge, JudgeUsage
    from forge_verifiers.judge_answers import Pairs, Reasoned, Scale, YesNo
    from forge_verifiers.maths import MathEqual
    from forge_verifiers.outcome import EnvReward
    from forge_verifiers.rules import Exact, Format, JsonSchema, Language, Length, Numeric, Regex, Repetition
    from forge_verifiers.verifier import Composable, Cost, Rule, ScoreError, Verifier, checked_scores, group_ids

_HOME = {
    "Composable": "verifier",
    "Cost": "verifier",
    "Ensemble": "ensemble",
    "EnsembleReport": "ensemble_report",
    "EnvReward": "outcome",
    "Exact": "rules",
    "Format": "rules",
    "Gate": "composition",
    "JsonSchema": "rules",
    "Judge": "judge",
    "JudgeUsage": "judge",
    "Language": "rules",
    "Length": "rules",
    "MathEqual": "maths",
    "Numeric": "rules",
    "Pairs": "judge_answers",
    "Reasoned": "judge_answers",
    "Regex": "rules",
    "Repetition": "rules",
    "Rule": "verifier",
    "Scale": "judge_answers",
    "ScoreError": "verifier",
    "Seat": "composition",
    "SelfConsistency": "consistency",
    "Snapshot": "ensemble_report",
    "Sum": "composition",
    "Verifier": "verifier",
    "VerifierReport": "ensemble_report",
    "YesNo": "judge_answers",
    "checked_scores": "verifier",
    "group_ids": "verifier",
}

__all__ = [
    "Composable",
    "Cost",
    "Ensemble",
    "EnsembleReport",
    "EnvReward",
    "Exact",
    "Format",
    "Gate",
    "JsonSchema",
    "Judge",
    "JudgeUsage",
    "Language",
    "Length",
    "MathEqual",
    "Numeric",
    "Pairs",
    "Reasoned",
    "Regex",
    "Repetition",
    "Rule",
    "Scale",
    "ScoreError",
    "Seat",
    "SelfConsistency",
    "Snapshot",
    "Sum",
    "Verifier",
    "VerifierReport",
    "YesNo",
    "checked_scores",
    "combiners",
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
