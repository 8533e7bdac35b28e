"""Benchmarks: suites of environments, any players, honest statistics, reports that can be compared.

In: players by name and a suite. Out: a `Report`. Waits for the players.
"""

from __future__ import annotations

from forge_agents.bench.exploitability import GameTree, best_response, exploitability, uniform
from forge_agents.bench.leaderboard import leaderboard
from forge_agents.bench.limits import BenchLimits
from forge_agents.bench.model_strategy import ModelStrategy, model_exploitability, model_strategy
from forge_agents.bench.report import Report, ReportError
from forge_agents.bench.runner import benchmark

__all__ = [
    "BenchLimits",
    "GameTree",
    "ModelStrategy",
    "Report",
    "ReportError",
    "benchmark",
    "best_response",
    "exploitability",
    "leaderboard",
    "model_exploitability",
    "model_strategy",
    "uniform",
]
