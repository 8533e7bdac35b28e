"""Judging every turn instead of whole trajectories.

In: a verifier of trajectories. Out: a verifier that scores each turn. Waits for its part.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from forge_agents.types import Trajectory
from forge_verifiers.core.composition import Nested, any_sees_groups, assessed
from forge_verifiers.core.verifier import Assessment, Scores, Verifier, longest_s


class PerTurn(Nested):
    """Shows a verifier every turn as the last one of a trajectory that ends there.

    The verifier gets all turns of all trajectories in one call. Its siblings are the turns at the same place of the
    sibling trajectories: the environment's id carries the place, as in ``"my/Env-v0#turn2"``. A trainer gives each
    turn an advantage of its own; the score of the whole trajectory is the mean of its turns' scores.

    Args:
        verifier: Judges the last turn of what it is shown, with what led to it before its eyes.
        name: What reports call it; by default made of the verifier's.
    """

    def __init__(self, verifier: Verifier, *, name: str | None = None) -> None:
        self.verifier = verifier
        self.name = name or f"{verifier.name} per turn"
        self.family, self.cost = verifier.family, verifier.cost
        self.likeness = getattr(verifier, "likeness", None)
        self.sees_groups = any_sees_groups([verifier])

    def parts(self) -> Mapping[str, Verifier]:
        """The one verifier."""
        return {"verifier": self.verifier}

    def longest_s(self, trajectories: Sequence[Trajectory], otherwise_s: float) -> float:
        """That of all turns in one call."""
        return longest_s(self.verifier, _shown(trajectories), otherwise_s)

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """Mean score of the turns, float32 [n]; abstentions are left out, NaN without any turn that has a score."""
        return self.assess(trajectories).scores

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """The same with the score of each turn."""
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
    return [_up_to(trajectory, place) for trajectory in trajectories for place in range(len(trajectory.turns))]


def _up_to(trajectory: Trajectory, place: int) -> Trajectory:
    """The trajectory as if it had ended with the turn at `place`."""
    return dataclasses.replace(
        trajectory, turns=trajectory.turns[: place + 1], env_id=f"{trajectory.env_id}#turn{place}"
    )
