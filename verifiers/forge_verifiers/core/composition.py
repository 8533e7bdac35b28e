"""Verifiers that show others a part of what is judged: what passed a check, one agent's seat, one turn.

In: a verifier. Out: a verifier. Waits for its parts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from forge_agents.types import Trajectory
from forge_verifiers.core.verifier import (
    Assessment,
    Judging,
    Nested,
    Scores,
    Verifier,
    assessed,
    check_unit_range,
    longest_s,
    range_of,
    verifier_of,
)


class Gate(Nested):
    """A hard check before another verifier: what fails the check scores 0, the rest is judged by ``then``.

    ``then`` sees only what passed, so an expensive judge is not asked about the rest. Where the check abstains, so
    does the gate.

    Args:
        check: The hard check.
        then: Judges what passed.
        threshold: Least score of `check` that passes, in (0, 1].
        name: What reports call it; by default made of the two names.
    """

    def __init__(self, check: Judging, then: Judging, *, threshold: float = 0.5, name: str | None = None) -> None:
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold={threshold} of a Gate must lie in (0, 1]; at 0 everything passes")
        check, then = verifier_of(check), verifier_of(then)
        self.check, self.then, self.threshold = check, then, threshold
        check_unit_range(check, "the check of a Gate")
        super().__init__(name or f"{check.name} -> {then.name}", {"check": check, "then": then}, relatives=[then])
        low, high = range_of(then)
        self.score_range = (min(low, 0.0), max(high, 0.0))

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """0 where the check failed, NaN where it abstained, else what `then` says."""
        check = assessed(self.check, trajectories)
        passed = np.flatnonzero(check.scores >= self.threshold)
        otherwise = np.where(np.isnan(check.scores), np.float32(math.nan), np.float32(0.0))
        found = _placed(self.then, passed, trajectories, otherwise)
        return dataclasses.replace(found, failed={**check.failed, **found.failed})


class Seat(Nested):
    """Judges only the trajectories of one agent and abstains on the others.

    Args:
        agent: The agent's name in the environment.
        verifier: Sees that agent's trajectories only.
        name: What reports call it; by default made of both names.
    """

    def __init__(self, agent: str, verifier: Judging, *, name: str | None = None) -> None:
        verifier = verifier_of(verifier)
        self.agent, self.verifier = agent, verifier
        super().__init__(name or f"{agent}:{verifier.name}", {"verifier": verifier})
        self.score_range = range_of(verifier)

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """What the verifier says in rows of the agent, NaN in the others."""
        mine = np.flatnonzero([t.agent == self.agent for t in trajectories])
        return _placed(self.verifier, mine, trajectories, np.full(len(trajectories), math.nan, np.float32))


def _placed(
    verifier: Verifier, rows: NDArray[np.intp], trajectories: Sequence[Trajectory], otherwise: Scores
) -> Assessment:
    """What a verifier says of some rows, and `otherwise` [n], without noise, of the others and their turns."""
    if not len(rows):
        return Assessment(scores=otherwise)
    found = assessed(verifier, [trajectories[at] for at in rows])
    scores = otherwise.copy()
    scores[rows] = found.scores
    noise, turns = None, None
    if found.noise is not None:
        noise = np.zeros(len(trajectories), np.float32)
        noise[rows] = found.noise
    if found.turns is not None:
        turns = [np.full(len(t.turns), value, np.float32) for t, value in zip(trajectories, otherwise, strict=True)]
        for at, own in zip(rows.tolist(), found.turns, strict=True):
            turns[at] = own
    failed = {int(rows[at]): why for at, why in found.failed.items()}
    return Assessment(scores=scores, noise=noise, turns=turns, failed=failed)


class PerTurn(Nested):
    """Shows a verifier every turn as the last one of a trajectory that ends there.

    The verifier gets all turns of all trajectories in one call. Its siblings are the turns at the same place of the
    sibling trajectories: the environment's id carries the place, as in ``"my/Env-v0#turn2"``. A trainer gives each
    turn an advantage of its own; the score of the whole trajectory is the mean of its turns' scores.

    Args:
        verifier: Judges the last turn of what it is shown, with what led to it before its eyes.
        name: What reports call it; by default made of the verifier's.
    """

    def __init__(self, verifier: Judging, *, name: str | None = None) -> None:
        self.verifier = verifier = verifier_of(verifier)
        super().__init__(name or f"{verifier.name} per turn", {"verifier": verifier})
        self.score_range = range_of(verifier)

    def longest_s(self, trajectories: Sequence[Trajectory], otherwise_s: float) -> float:
        """That of all turns in one call."""
        return longest_s(self.verifier, _shown(trajectories), otherwise_s)

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """The score of each turn and their mean; abstentions are left out, NaN without any turn that has a score."""
        shown = _shown(trajectories)
        found = assessed(self.verifier, shown) if shown else Assessment(scores=np.empty(0, np.float32))
        scores = found.scores
        ends = np.cumsum([len(trajectory.turns) for trajectory in trajectories])
        turns = np.split(scores, ends[:-1]) if len(trajectories) else []
        means = [math.nan if np.isnan(own).all() else float(np.nanmean(own)) for own in turns]
        rows = {at: int(np.searchsorted(ends, at, side="right")) for at in found.failed}
        failed = {row: found.failed[at] for at, row in rows.items() if math.isnan(means[row])}
        return Assessment(scores=np.array(means, np.float32), turns=turns, failed=failed)


def _shown(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Every trajectory once for each of its turns, as if it had ended there."""
    return [
        dataclasses.replace(whole, turns=whole.turns[: place + 1], env_id=f"{whole.env_id}#turn{place}")
        for whole in trajectories
        for place in range(len(whole.turns))
    ]
