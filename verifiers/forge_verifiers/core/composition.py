"""Verifiers that pass a part of the trajectories to another: those that pass a check, of one agent, or single turns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from forge_agents.errors import USER_ERRORS
from forge_agents.types import Trajectory
from forge_verifiers.core.functions import describe_error
from forge_verifiers.core.verifier import (
    Assessment,
    Nested,
    ScoreError,
    Scores,
    Verifier,
    VerifierLike,
    assessed,
    check_unit_range,
    max_duration_s,
    range_of,
    turn_means,
    verifier_of,
)


class Gate(Nested):
    """A hard check before another verifier: a trajectory that fails the check scores 0.

    ``then`` receives only trajectories that passed, which saves calls of an expensive judge. Where the check abstains,
    the gate abstains.

    Args:
        check: The hard check.
        then: Scores the trajectories that passed.
        threshold: Lowest score of `check` that passes, in (0, 1].
        name: Name in reports. By default made of both names.
    """

    def __init__(
        self, check: VerifierLike, then: VerifierLike, *, threshold: float = 0.5, name: str | None = None
    ) -> None:
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold={threshold} of a Gate must lie in (0, 1]. At 0 everything passes")
        check, then = verifier_of(check), verifier_of(then)
        self.check, self.then, self.threshold = check, then, threshold
        check_unit_range(check, "the check of a Gate")
        super().__init__(name or f"{check.name} -> {then.name}", {"check": check, "then": then}, relatives=[then])
        low, high = range_of(then)
        self.score_range = (min(low, 0.0), max(high, 0.0))

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """0 where the check failed, NaN where it abstained, else the score of `then`."""
        check = assessed(self.check, trajectories)
        passed = np.flatnonzero(check.scores >= self.threshold)
        default = np.where(np.isnan(check.scores), np.float32(math.nan), np.float32(0.0))
        result = _assess_rows(self.then, passed, trajectories, default)
        failed, ungraded = {**check.failed, **result.failed}, {*check.ungraded, *result.ungraded}
        return dataclasses.replace(result, failed=failed, ungraded=ungraded)


class ForAgent(Nested):
    """Scores only the trajectories of one agent and abstains on the others.

    Args:
        agent: Name of the agent in the environment.
        verifier: Receives only this agent's trajectories.
        name: Name in reports. By default made of both names.

    Raises:
        TypeError: `agent` is not a string.
    """

    def __init__(self, agent: str, verifier: VerifierLike, *, name: str | None = None) -> None:
        if not isinstance(agent, str):
            raise TypeError(f"agent={agent!r} of ForAgent must be the name of one agent")
        verifier = verifier_of(verifier)
        self.agent, self.verifier = agent, verifier
        super().__init__(name or f"{agent}:{verifier.name}", {"verifier": verifier})
        self.score_range = range_of(verifier)

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """The verifier's scores of this agent's trajectories, NaN for the others."""
        rows = np.flatnonzero([t.agent == self.agent for t in trajectories])
        return _assess_rows(self.verifier, rows, trajectories, np.full(len(trajectories), math.nan, np.float32))


def _assess_rows(
    verifier: Verifier, rows: NDArray[np.intp], trajectories: Sequence[Trajectory], default: Scores
) -> Assessment:
    """The verifier's assessment of some rows, and `default` [n], without noise, for the others and their turns.

    If the verifier raises for a part of the trajectories, these rows have failed. The policy decides which answers are
    passed on, so an error for a few of them does not stop a run, as it does for all.
    """
    if not len(rows):
        return Assessment(scores=default)
    try:
        result = assessed(verifier, [trajectories[row] for row in rows])
    except ScoreError:
        raise
    except USER_ERRORS as error:
        if len(rows) == len(trajectories):
            raise
        reason = describe_error(error)
        result = Assessment(
            scores=np.full(len(rows), math.nan, np.float32), failed=dict.fromkeys(range(len(rows)), reason)
        )
    scores = default.copy()
    scores[rows] = result.scores
    noise, turns = None, None
    if result.noise is not None:
        noise = np.zeros(len(trajectories), np.float32)
        noise[rows] = result.noise
    if result.turns is not None:
        turns = [np.full(len(t.turns), value, np.float32) for t, value in zip(trajectories, default, strict=True)]
        for row, turn_scores in zip(rows.tolist(), result.turns, strict=True):
            turns[row] = turn_scores
    failed = {int(rows[k]): reason for k, reason in result.failed.items()}
    ungraded = {int(rows[k]) for k in result.ungraded}
    return Assessment(scores=scores, noise=noise, turns=turns, failed=failed, ungraded=ungraded)


class PerTurn(Nested):
    """Scores each turn as the last turn of a trajectory that ends there.

    The verifier receives all turns of all trajectories in one call. Turns at the same index of one group's
    trajectories form a group: the environment's id gets the index, as in ``"my/Env-v0#turn2"``. A trainer computes an
    advantage for each turn. The score of a trajectory is the mean of its turns' scores.

    Args:
        verifier: Scores the last turn of each trajectory, with the turns before it as context.
        name: Name in reports. By default made of the verifier's.
    """

    def __init__(self, verifier: VerifierLike, *, name: str | None = None) -> None:
        self.verifier = verifier = verifier_of(verifier)
        super().__init__(name or f"{verifier.name} per turn", {"verifier": verifier})
        self.score_range = range_of(verifier)

    def max_duration_s(self, trajectories: Sequence[Trajectory], default_s: float) -> float:
        """The bound for all turns in one call."""
        return max_duration_s(self.verifier, _prefixes(trajectories), default_s)

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """The score of each turn and their mean without abstentions, or NaN if one failed or none has a score.

        A turn that confuses a judge, also one inside another verifier, counts as failed (`Assessment.ungraded`).
        """
        prefixes = _prefixes(trajectories)
        result = assessed(self.verifier, prefixes) if prefixes else Assessment(scores=np.empty(0, np.float32))
        ends = np.cumsum([len(trajectory.turns) for trajectory in trajectories])
        turns = np.split(result.scores, ends[:-1]) if len(trajectories) else []
        row_of = np.repeat(np.arange(len(trajectories)), [len(trajectory.turns) for trajectory in trajectories])
        failed = {int(row_of[k]): reason for k, reason in result.failed.items()}
        ungraded = {int(row_of[k]) for k in result.ungraded}
        return Assessment(scores=turn_means(turns, {*failed, *ungraded}), turns=turns, failed=failed, ungraded=ungraded)


def _prefixes(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """For each turn, the trajectory up to this turn."""
    return [
        dataclasses.replace(whole, turns=whole.turns[: index + 1], env_id=f"{whole.env_id}#turn{index}")
        for whole in trajectories
        for index in range(len(whole.turns))
    ]
