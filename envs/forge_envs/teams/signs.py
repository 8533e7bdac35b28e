"""Weak process verifiers for any team with tools, independent of the outcome."""

from __future__ import annotations

from forge_agents.types import Trajectory


def calls_work(trajectory: Trajectory) -> float | None:
    """Return the fraction of an agent's tool calls without errors, or None without calls."""
    calls = int(trajectory.info.get("tool_calls", 0))
    return 1 - int(trajectory.info.get("tool_errors", 0)) / calls if calls else None


def calls_differ(trajectory: Trajectory) -> float | None:
    """Return the fraction of an agent's tool calls that are distinct, or None without calls."""
    calls = [str(call) for turn in trajectory.turns for call in turn.tool_calls]
    return len(set(calls)) / len(calls) if calls else None


def ends_in_words(trajectory: Trajectory) -> float | None:
    """Return 1 if an agent's last turn has no tool calls, else 0, or None without turns."""
    return float(not trajectory.turns[-1].tool_calls) if trajectory.turns else None
