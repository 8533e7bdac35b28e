"""Verifiers made of verifiers: weighted sums, hard checks, seats.

In: verifiers. Out: a verifier. Waits for its parts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_agents.types import Trajectory
from forge_verifiers.core.verifier import (
    Assessment,
    Composable,
    Cost,
    ScoreError,
    Scores,
    State,
    Verifier,
    checked,
    checked_scores,
    group_ids,
    longest_s,
)

COSTS: tuple[Cost, ...] = ("cheap", "model", "expensive")
"""Cost classes, cheapest first."""


def terms_of(verifier: Verifier) -> tuple[tuple[float, Verifier], ...]:
    """The weighted terms of a sum; any other verifier is one term of weight 1."""
    return verifier.terms if isinstance(verifier, Sum) else ((1.0, verifier),)


def dearest(parts: Sequence[Verifier]) -> Cost:
    """The cost class of the dearest part."""
    return COSTS[max(COSTS.index(part.cost) for part in parts)]


def any_sees_groups(parts: Sequence[Verifier]) -> bool:
    """Whether any part looks beyond one trajectory; see `Composable.sees_groups`."""
    return any(getattr(part, "sees_groups", False) for part in parts)


def nested_state(parts: Mapping[str, Verifier]) -> State:
    """The states of parts under "name/" prefixes; parts without a state_dict have none."""
    state: State = {}
    for prefix, part in parts.items():
        own = part.state_dict() if hasattr(part, "state_dict") else {}
        state.update({f"{prefix}/{key}": value for key, value in own.items()})
    return state


def load_nested(parts: Mapping[str, Verifier], state: Mapping[str, NDArray[Any]], *, owner: str) -> None:
    """Gives every part its share of what `nested_state` returned.

    Raises:
        ValueError: a key belongs to no part.
    """
    shares: dict[str, dict[str, NDArray[Any]]] = {prefix: {} for prefix in parts}
    for key, value in state.items():
        prefix = next((p for p in parts if key.startswith(f"{p}/")), None)
        if prefix is None:
            raise ValueError(f"{owner!r} has no part for state {key!r}; its parts are {', '.join(parts)}")
        shares[prefix][key[len(prefix) + 1 :]] = value
    for prefix, part in parts.items():
        if hasattr(part, "load_state_dict"):
            part.load_state_dict(shares[prefix])
        elif shares[prefix]:
            raise ValueError(f"{part.name!r} in {owner!r} cannot load state; give it a load_state_dict")


class Nested(Composable):
    """A verifier whose state is the state of its parts."""

    def parts(self) -> Mapping[str, Verifier]:
        """The parts, by the prefix of their state."""
        raise NotImplementedError

    def longest_s(self, trajectories: Sequence[Trajectory], otherwise_s: float) -> float:
        """One part after the other."""
        return sum(longest_s(part, trajectories, otherwise_s) for part in self.parts().values())

    def state_dict(self) -> State:
        """The states of the parts."""
        return nested_state(self.parts())

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restores what `state_dict` returned. Raises ValueError for anything else."""
        load_nested(self.parts(), state, owner=self.name)


class Sum(Nested):
    """The weighted sum of verifiers: what ``0.5 * a + 0.5 * b`` makes.

    Weights that add up to more than 1 are divided by their sum, so ``a + b`` is the mean and scores stay in [0, 1].
    A term that abstains is replaced by the weighted mean of the others; where all abstain the sum does, too. A term
    that failed on a trajectory counts as it does for the siblings on average, so that nobody gains by a failure.

    Args:
        terms: Weight and verifier of each term; weights positive.
        name: What reports call it; the formula by default.
    """

    def __init__(self, terms: Sequence[tuple[float, Verifier]], *, name: str | None = None) -> None:
        if not terms:
            raise ValueError("a Sum was given no terms; send at least one (weight, verifier)")
        for weight, verifier in terms:
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(f"weight {weight} of verifier {verifier.name!r} must be positive and finite")
        self.terms = tuple(terms)
        self.name = name or " + ".join(v.name if w == 1 else f"{w:g}*{v.name}" for w, v in terms)
        families = {v.family for _, v in terms}
        self.family = families.pop() if len(families) == 1 else None
        likenesses = {getattr(v, "likeness", None) for _, v in terms}
        self.likeness = likenesses.pop() if len(likenesses) == 1 else None
        self.cost = dearest([v for _, v in terms])
        self.sees_groups = any_sees_groups([v for _, v in terms])

    def parts(self) -> Mapping[str, Verifier]:
        """The terms by their place."""
        return {str(k): verifier for k, (_, verifier) in enumerate(self.terms)}

    def __mul__(self, weight: float) -> Sum:
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            return NotImplemented
        return Sum([(weight * w, v) for w, v in self.terms])

    __rmul__ = __mul__

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """The weighted sum, float32 [n]."""
        return self.assess(trajectories).scores

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """The same; where a term scores turns, the others' scores of the trajectory count for each of its turns."""
        parts = [assessed(verifier, trajectories) for _, verifier in self.terms]
        heard = np.stack([part.scores for part in parts])
        scores = self._sum(_evened(heard, [part.failed for part in parts], group_ids(trajectories)))
        scores[np.isnan(heard).all(axis=0)] = math.nan
        failed = {at: why for part in parts for at, why in part.failed.items() if math.isnan(scores[at])}
        if all(part.turns is None for part in parts):
            return Assessment(scores=scores, failed=failed)
        turns = []
        for at, trajectory in enumerate(trajectories):
            whole = np.ones(len(trajectory.turns), np.float32)
            turns.append(
                self._sum(np.stack([whole * p.scores[at] if p.turns is None else p.turns[at] for p in parts]))
            )
        return Assessment(scores=scores, turns=turns, failed=failed)

    def _sum(self, scores: Scores) -> Scores:
        """Weighted sum [n] of scores [terms, n]."""
        weights = np.array([w for w, _ in self.terms])
        scores = scores.astype(np.float64)
        present = ~np.isnan(scores)
        mass = weights @ present
        mean = weights @ np.where(present, scores, 0.0) / np.where(mass > 0, mass, 1.0)
        return np.where(mass > 0, mean * min(1.0, float(weights.sum())), math.nan).astype(np.float32)


def _evened(scores: Scores, failed: Sequence[Mapping[int, str]], groups: NDArray[np.intp]) -> Scores:
    """Scores [terms, n] in which a term that failed on a row has the mean of what it said of the row's siblings."""
    evened = scores.copy()
    for term, rows in enumerate(failed):
        for row in rows:
            siblings = scores[term, groups == groups[row]]
            evened[term, row] = np.nanmean(siblings) if np.isfinite(siblings).any() else math.nan
    return evened


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

    def __init__(self, check: Verifier, then: Verifier, *, threshold: float = 0.5, name: str | None = None) -> None:
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold={threshold} of a Gate must lie in (0, 1]; at 0 everything passes")
        self.check, self.then, self.threshold = check, then, threshold
        self.name = name or f"{check.name} -> {then.name}"
        self.family, self.likeness = then.family, getattr(then, "likeness", None)
        self.cost = dearest([check, then])
        self.sees_groups = any_sees_groups([check, then])

    def parts(self) -> Mapping[str, Verifier]:
        """The check and what follows."""
        return {"check": self.check, "then": self.then}

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """0 where the check failed, NaN where it abstained, else the score of `then`; float32 [n]."""
        return self.assess(trajectories).scores

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """The same, with the noise and the scores of turns that `then` knows."""
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

    def __init__(self, agent: str, verifier: Verifier, *, name: str | None = None) -> None:
        self.agent, self.verifier = agent, verifier
        self.name = name or f"{agent}:{verifier.name}"
        self.family, self.cost = verifier.family, verifier.cost
        self.likeness = getattr(verifier, "likeness", None)
        self.sees_groups = any_sees_groups([verifier])

    def parts(self) -> Mapping[str, Verifier]:
        """The one verifier."""
        return {"verifier": self.verifier}

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """The verifier's scores in rows of the agent, NaN in the others; float32 [n]."""
        return self.assess(trajectories).scores

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """The same, with the noise and the scores of turns that the verifier knows."""
        mine = np.flatnonzero([t.agent == self.agent for t in trajectories])
        return _placed(self.verifier, mine, trajectories, np.full(len(trajectories), math.nan, np.float32))


def assessed(verifier: Verifier, trajectories: Sequence[Trajectory]) -> Assessment:
    """The assessment of any verifier, its scores held to the contract.

    Raises:
        ScoreError: see `checked_scores`; or turns that are not one array per trajectory with a score per turn.
    """
    if not isinstance(verifier, Composable):
        return Assessment(scores=checked_scores(verifier, trajectories))
    found = verifier.assess(trajectories)
    scores = checked(found.scores, verifier.name, len(trajectories))
    failed = {at: why for at, why in found.failed.items() if math.isnan(scores[at])}
    if found.turns is None:
        return Assessment(scores=scores, noise=found.noise, failed=failed)
    if [len(own) for own in found.turns] != [len(t.turns) for t in trajectories]:
        raise ScoreError(f"verifier {verifier.name!r} scored other turns than it was shown; return one score per turn")
    return Assessment(scores=scores, noise=found.noise, turns=found.turns, failed=failed)


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
