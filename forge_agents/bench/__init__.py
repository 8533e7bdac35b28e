"""Benchmarks of any players on suites of environments, with reports that can be compared.

`play` has `benchmark`, which makes a `plan`, plays the episodes that `records` lack, and returns a `report`.
`fingerprints` identify episodes. Numbers come from `summary` and `statistics`, tables from `sections` and `tables`.
`merge` combines reports, and `exploitability` solves small games.
"""

from __future__ import annotations

from forge_agents.bench.exploitability import ModelStrategy, actions_of, model_exploitability, model_strategy
from forge_agents.bench.game_tree import GameTree, average_strategy, best_response, exploitability, uniform
from forge_agents.bench.merge import leaderboard
from forge_agents.bench.plan import BenchLimits
from forge_agents.bench.play import benchmark
from forge_agents.bench.report import Report, ReportError

__all__ = [
    "BenchLimits",
    "GameTree",
    "ModelStrategy",
    "Report",
    "ReportError",
    "actions_of",
    "average_strategy",
    "benchmark",
    "best_response",
    "exploitability",
    "leaderboard",
    "model_exploitability",
    "model_strategy",
    "uniform",
]
