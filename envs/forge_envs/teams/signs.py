"""Weak signs of good work, for any team with tools: verifiers of the process that know nothing of the outcome.

In: a trajectory. Out: a number in [0, 1], None where there is nothing to judge. Waits for nothing.
"""

from __future__ import annotations

from forge_agents.types import Trajectory


def calls_work(trajectory: Trajectory) -> float | None:
    """Share of a seat's calls that were no errors; None where it made none."""
    made = int(trajectory.info.get("tool_calls", 0))
    return 1 - int(trajectory.info.get("tool_errors", 0)) / made if made else None


def calls_differ(trajectory: Trajectory) -> float | None:
    """Share of a seat's calls that it had not made before; None where it made none."""
    made = [str(call) for turn in trajectory.turns for call in turn.tool_calls]
    return len(set(made)) / len(made) if made else None


def ends_in_words(trajectory: Trajectory) -> float | None:
    """Whether a seat's last turn is words, not calls; None where it never came to act."""
    return float(not trajectory.turns[-1].tool_calls) if trajectory.turns else None
