"""What a verifier is, and a user's function as one.

In: trajectories. Out: float32 scores [n] in [0, 1], NaN where the verifier abstains. Waits for nothing.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from forge_agents.errors import ForgeError
from forge_agents.types import Trajectory

if TYPE_CHECKING:
    from forge_verifiers.core.composition import Sum

Cost: TypeAlias = Literal["cheap", "model", "expensive"]
"""What a score costs: pure Python, one forward pass of a model, or more (a judge that writes, a sandbox)."""

Scores: TypeAlias = NDArray[np.float32]
State: TypeAlias = dict[str, NDArray[Any]]
"""Flat, "/"-separated keys, arrays without pickled objects."""

_ROUNDING = 1e-5


class ScoreError(ForgeError, ValueError):
    """A verifier broke the contract: scores of a wrong shape, outside [0, 1], or no numbers."""


@runtime_checkable
class Verifier(Protocol):
    """Judges trajectories."""

    @property
    def name(self) -> str:
        """What reports and errors call it; unique within an ensemble."""

    @property
    def family(self) -> str | None:
        """Verifiers of one family share a cause of error; None = unrelated to the others."""

    @property
    def cost(self) -> Cost:
        """What a score costs."""

    def score(self, trajectories: Sequence[Trajectory]) -> np.ndarray:
        """float32 [n] in [0, 1], one per trajectory; NaN where it abstains."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assessment:
    """Scores and what belongs to them. n trajectories."""

    scores: Scores
    """float32 [n] in [0, 1], NaN where the verifier abstains."""
    noise: Scores | None = None
    """float32 [n], the standard deviation of each score; None where it is not known."""
    turns: Sequence[Scores] | None = None
    """Per trajectory float32 [its turns], a score of each turn, NaN where the verifier abstains; None where turns are
    not told apart."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """Why a row has no score because a question or call failed. Such a row is no abstention: it says nothing."""


class Composable:
    """Lets a verifier be weighted (``0.5 * a``), added (``a + b``), used as a reward, and saved.

    Derive from it to get these for your own verifier; `score`, `name`, `family` and `cost` are yours to write.
    """

    name: str
    family: str | None
    cost: Cost
    sees_groups: bool = False
    """Whether the score of a trajectory depends on others: on its siblings in the call, or on what was learned before.
    Such scores are never remembered, and a cascade asks about whole groups."""
    likeness: str | None = None
    """What it has in common with others that err as it does, such as a model: an `Ensemble` makes a family of verifiers
    of one likeness that were given none. None: nothing that the verifier knows of."""
    exact: bool = False
    """Whether what is certainly right scores 1, as checks do and grades do not; `check_verifier` holds it to that."""

    @abstractmethod
    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """float32 [n] in [0, 1], one per trajectory; NaN where it abstains."""

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """`score`, with its noise and the scores of turns where the verifier knows them."""
        return Assessment(scores=self.score(trajectories))

    def longest_s(self, trajectories: Sequence[Trajectory], otherwise_s: float) -> float:
        """Seconds that scoring them may take at most, by its own limits; `otherwise_s` where it has none."""
        return otherwise_s

    def __call__(self, trajectories: Sequence[Trajectory]) -> Scores:
        """The same as `score`: a verifier is a reward."""
        return self.score(trajectories)

    def __mul__(self, weight: float) -> Sum:
        from forge_verifiers.core.composition import Sum

        if isinstance(weight, bool) or not isinstance(weight, int | float):
            return NotImplemented
        return Sum([(float(weight), self)])

    __rmul__ = __mul__

    def __add__(self, other: Verifier) -> Sum:
        from forge_verifiers.core.composition import Sum, terms_of

        if not isinstance(other, Verifier):
            return NotImplemented
        return Sum([*terms_of(self), *terms_of(other)])

    def state_dict(self) -> State:
        """What the verifier has learned; empty where it learns nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restores what `state_dict` returned. Raises ValueError for anything else."""
        if state:
            raise ValueError(f"verifier {self.name!r} learns nothing and was given state {min(state)!r}")


def longest_s(verifier: Verifier, trajectories: Sequence[Trajectory], otherwise_s: float) -> float:
    """`Composable.longest_s` of any verifier."""
    return verifier.longest_s(trajectories, otherwise_s) if isinstance(verifier, Composable) else otherwise_s


def checked_scores(verifier: Verifier, trajectories: Sequence[Trajectory]) -> Scores:
    """The scores of any verifier, held to the contract.

    Raises:
        ScoreError: not one number per trajectory, or one outside [0, 1]; names the verifier.
    """
    return checked(verifier.score(trajectories), verifier.name, len(trajectories))


def checked(raw: object, name: str, n: int) -> Scores:
    """Scores of `n` trajectories as float32 [n], held to the contract.

    Raises:
        ScoreError: not one number per trajectory, or one outside [0, 1]; names the verifier.
    """
    try:
        scores = np.asarray(raw, np.float32)
    except (TypeError, ValueError) as error:
        raise ScoreError(f"verifier {name!r} returned no numbers: {error}; use NaN to abstain") from error
    if scores.shape != (n,):
        raise ScoreError(
            f"verifier {name!r} returned shape {scores.shape} for {n} trajectories; return one score each"
        )
    outside = (scores < -_ROUNDING) | (scores > 1 + _ROUNDING)
    if outside.any():
        at = int(np.flatnonzero(outside)[0])
        raise ScoreError(
            f"verifier {name!r} scored trajectory {at} of {n} with {scores[at]}; "
            "scale scores to [0, 1], use NaN to abstain"
        )
    return np.clip(scores, 0.0, 1.0)


def group_ids(trajectories: Sequence[Trajectory]) -> NDArray[np.intp]:
    """Group number of each trajectory, int [n], from 0 in order of appearance.

    A group holds the siblings: same environment, same seed, same agent.
    """
    numbers: dict[tuple[str, int, str], int] = {}
    return np.array([numbers.setdefault((t.env_id, t.seed, t.agent), len(numbers)) for t in trajectories], np.intp)


@dataclass(frozen=True, kw_only=True, eq=False)
class TrajectoryRule(Composable):
    """A verifier that looks at one trajectory at a time. Subclasses write `grade`."""

    name: str
    """What reports call it."""
    family: str | None = None
    """Verifiers of one family share a cause of error."""
    cost: Cost = "cheap"
    """What a score costs."""

    @property
    def likeness(self) -> str | None:  # type: ignore[override]
        """Checks against the same gold answer read, and misread, the same answer."""
        key = getattr(self, "answer_key", None)
        return f"answer in info[{key!r}]" if self.exact and key is not None else None

    @abstractmethod
    def grade(self, trajectory: Trajectory) -> float | bool | None:
        """A score in [0, 1], or None to abstain."""

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """`grade` of each trajectory, float32 [n]; NaN where it abstained.

        Raises:
            ScoreError: `grade` returned something else than a number in [0, 1], True, False or None.
        """
        grades = [self.grade(trajectory) for trajectory in trajectories]
        for at, value in enumerate(grades):
            if value is None:
                continue
            if not isinstance(value, int | float | np.floating | np.integer | np.bool_):
                raise ScoreError(
                    f"verifier {self.name!r} graded trajectory {at} with {type(value).__name__} {str(value)[:60]!r}; "
                    "return a number in [0, 1], a bool, or None to abstain"
                )
            if not (0.0 <= value <= 1.0 or math.isnan(value)):
                raise ScoreError(f"verifier {self.name!r} graded trajectory {at} with {value}; scale grades to [0, 1]")
        return np.array([math.nan if value is None else value for value in grades], np.float32)


class Rule(TrajectoryRule):
    """A function of one trajectory as a verifier; works as a decorator, too.

    Args:
        function: Takes a `Trajectory`; returns a number in [0, 1], a bool, or None to abstain.
        name: What reports call it; the function's own name by default.
        family: Verifiers of one family share a cause of error.
        cost: What a call costs.

    Example:
        >>> polite = Rule(lambda t: "please" in t.turns[-1].action, name="polite")
    """

    function: Callable[[Trajectory], float | bool | None]

    def __init__(
        self,
        function: Callable[[Trajectory], float | bool | None],
        *,
        name: str | None = None,
        family: str | None = None,
        cost: Cost = "cheap",
    ) -> None:
        if not callable(function):
            raise TypeError(f"Rule takes a function of a trajectory, got {type(function).__name__}")
        own_name = str(getattr(function, "__name__", type(function).__name__))
        super().__init__(name=name or own_name, family=family, cost=cost)
        object.__setattr__(self, "function", function)

    def grade(self, trajectory: Trajectory) -> float | bool | None:
        """What the function returns."""
        return self.function(trajectory)
