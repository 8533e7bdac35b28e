"""Benchmarks: suites of environments, any players, honest statistics, reports that can be compared.

In: players by name and a suite. Out: a `Report`. Waits for the players.

Start at `benchmark` in ``play``: it makes a ``plan`` of who meets whom on which seeds, plays what the log of
``records`` does not hold yet (``fingerprints`` say what is the same episode), and hands the records to a ``report``.
That one's numbers come from ``summary``, which asks ``statistics`` for every interval and rating, and are shown by
``tables``. ``exploitability`` searches small games whole.
"""

from __future__ import annotations

from forge_agents.bench.exploitability import (
    GameTree,
    ModelStrategy,
    best_response,
    exploitability,
    model_exploitability,
    model_strategy,
    uniform,
)
from forge_agents.bench.plan import BenchLimits
from forge_agents.bench.play import benchmark
from forge_agents.bench.report import Report, ReportError, leaderboard

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
