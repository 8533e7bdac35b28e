"""The verifier protocol, checks of scores, weighted sums, and verifiers made of functions and environment rewards.

Scores are float32 arrays [n] with one score per trajectory, in [0, 1] unless stated otherwise. NaN is an abstention.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self, TypeAlias, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from forge_agents.display import printable
from forge_agents.errors import ArgumentError, ForgeError
from forge_agents.types import Reward, Trajectory
from forge_verifiers.core.functions import (
    FunctionResults,
    Signature,
    check_trajectories,
    grade_each,
    name_of,
    parse_signature,
)

Cost: TypeAlias = Literal["cheap", "model", "expensive"]
"""Cost of a score: pure Python, one forward pass of a model, or more (a judge that generates text, a sandbox)."""
COSTS: tuple[Cost, ...] = ("cheap", "model", "expensive")

Scores: TypeAlias = NDArray[np.float32]
State: TypeAlias = dict[str, NDArray[Any]]
"""Arrays by "/"-separated key, without pickled objects."""

_LOG = logging.getLogger(__name__)
_ROUNDING = 1e-5


class ScoreError(ForgeError, ValueError):
    """A verifier broke its contract: scores of a wrong shape, outside its range, or not numeric."""


@runtime_checkable
class Verifier(Protocol):
    """Scores trajectories."""

    @property
    def name(self) -> str:
        """Name in reports and errors. Unique within an ensemble."""

    @property
    def family(self) -> str | None:
        """Label of verifiers that share a cause of error, or None for a verifier unrelated to the others."""

    @property
    def cost(self) -> Cost:
        """Cost class."""

    def score(self, trajectories: Sequence[Trajectory]) -> np.ndarray:
        """Scores, float32 [n] in [0, 1], or NaN to abstain."""


VerifierLike: TypeAlias = Verifier | Callable[..., Any]
"""A verifier, or a function that `verifier_of` wraps."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assessment:
    """Scores of n trajectories with details."""

    scores: Scores
    """float32 [n], NaN where the verifier abstained or failed."""
    noise: Scores | None = None
    """float32 [n], standard deviation of each score, or None if unknown."""
    turns: Sequence[Scores] | None = None
    """Scores of each trajectory's turns, float32 [number of turns], NaN for abstentions. None without turn scores."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """Error by row whose question or call failed. Unlike an abstention, a failure is no evidence about the row."""
    ungraded: Collection[int] = ()
    """Rows without a score because their text confused a verifier that grades each text, such as a judge."""


class Composable:
    """Base class of verifiers that can be weighted (``0.5 * a``), added (``a + b``), used as a reward, and saved.

    Subclasses define `score`, `name`, `family` and `cost`.
    """

    name: str
    family: str | None
    cost: Cost
    sees_groups: bool = False
    """True if a score depends on other trajectories: on the call's group, or on what was learned before. Such scores
    are never cached, and a cascade passes whole groups."""
    default_family: str | None = None
    """Family within an `Ensemble` if `family` is None and another verifier has the same value, such as its model."""
    score_range: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest score. Weighted sums may exceed [0, 1]. An `Ensemble` and the check of a `Gate` do not accept
    such verifiers."""
    grades_each_text: bool = False
    """True if the verifier abstains only from texts that confuse it (`Assessment.ungraded`). Such a turn costs its
    trajectory the score, because a mean of the other turns would rise without it."""
    exact: bool = False
    """True if a right answer always scores 1. Checks do, graded scores do not. `check_verifier` tests it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Store the constructor's arguments. A run writes them to its ``config.yaml``."""
        instance = super().__new__(cls)
        object.__setattr__(instance, "_constructor_arguments", (args, kwargs))
        return instance

    @abstractmethod
    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """Scores, float32 [n], or NaN to abstain."""

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """Scores with noise, turn scores and failures where the verifier has them."""
        return Assessment(scores=self.score(trajectories))

    def max_duration_s(self, trajectories: Sequence[Trajectory], default_s: float) -> float:
        """Upper bound in seconds of a call, from the verifier's own limits. `default_s` without such limits."""
        return default_s

    def __call__(self, trajectories: Sequence[Trajectory]) -> Scores:
        """The same as `score`, so that a verifier is a reward."""
        return self.score(trajectories)

    def __mul__(self, weight: float) -> Sum:
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            return NotImplemented
        return Sum([(float(weight) * inner, verifier) for inner, verifier in terms_of(self)])

    __rmul__ = __mul__

    def __add__(self, other: VerifierLike) -> Sum:
        return Sum([*terms_of(self), *terms_of(verifier_of(other))])

    def __radd__(self, other: Callable[..., Any] | int) -> Sum:
        before = [] if other == 0 else terms_of(verifier_of(other))  # the built-in `sum` starts with 0
        return Sum([*before, *terms_of(self)])

    def state_dict(self) -> State:
        """Learned state, empty by default."""
        return {}

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore `state_dict`. Raises ValueError for any other state."""
        if state:
            raise ValueError(f"verifier {self.name!r} has no state but received {min(state)!r}")


def max_duration_s(verifier: Verifier, trajectories: Sequence[Trajectory], default_s: float) -> float:
    """`Composable.max_duration_s` of any verifier."""
    return verifier.max_duration_s(trajectories, default_s) if isinstance(verifier, Composable) else default_s


def range_of(verifier: Verifier) -> tuple[float, float]:
    """Lowest and highest score of any verifier: its `Composable.score_range`, else [0, 1]."""
    return getattr(verifier, "score_range", (0.0, 1.0))


def check_unit_range(verifier: Verifier, role: str) -> None:
    """Raise ArgumentError if scores may leave [0, 1]. `role`, such as "the check of a Gate", is part of the message."""
    low, high = range_of(verifier)
    if low < -_ROUNDING or high > 1 + _ROUNDING:
        raise ArgumentError(
            f"{verifier.name!r} has scores from {low:g} to {high:g} and was given as {role}, which needs scores in "
            f"[0, 1]. " + (f"Multiply it by {1 / high:.4g}" if low >= 0 else "Scale its scores")
        )


def checked_scores(verifier: Verifier, trajectories: Sequence[Trajectory]) -> Scores:
    """The validated scores of any verifier. See `checked`."""
    return checked(verifier.score(trajectories), verifier.name, len(trajectories), range_of(verifier))


def checked(raw: object, name: str, n: int, score_range: tuple[float, float] = (0.0, 1.0)) -> Scores:
    """Validate scores of `n` trajectories and convert them to float32 [n].

    Raises:
        ScoreError: Not one number per trajectory, or a score outside `score_range`. The message names the verifier.
    """
    low, high = score_range
    try:
        scores = np.asarray(as_floats(raw), np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise ScoreError(f"verifier {name!r} returned no numbers: {error}. Use NaN to abstain") from error
    if scores.shape != (n,):
        raise ScoreError(f"verifier {name!r} returned shape {scores.shape} for {n} trajectories. Return one score each")
    outside = (scores < low - _ROUNDING) | (scores > high + _ROUNDING)
    if outside.any():
        row = int(np.flatnonzero(outside)[0])
        raise ScoreError(
            f"verifier {name!r} scored trajectory {row} of {n} with {scores[row]}. "
            f"Scale scores to [{low:g}, {high:g}], use NaN to abstain"
        )
    return np.clip(scores, np.float32(low), np.float32(high))


def group_key(trajectory: Trajectory) -> tuple[str, str, str]:
    """Environment, seed and agent, which are equal for trajectories that are compared.

    The seed is a text, because many integers may have one hash, and comparing these takes quadratic time.
    """
    return trajectory.env_id, str(trajectory.seed), trajectory.agent


def group_ids(trajectories: Sequence[Trajectory]) -> NDArray[np.intp]:
    """Group number of each trajectory, int [n], from 0 in order of appearance. A group shares its `group_key`."""
    check_trajectories(trajectories)
    numbers: dict[tuple[str, str, str], int] = {}
    return np.array([numbers.setdefault(group_key(t), len(numbers)) for t in trajectories], np.intp)


def turn_means(
    turns: Sequence[Scores | NDArray[np.float64]], failed: Collection[int], *, needs_all: bool = False
) -> Scores:
    """Return the mean of each trajectory's turn scores without abstentions: float32 ``[n]``, or NaN without a score.

    The trajectories in `failed` get NaN, because their means would rise without the turn that failed or was not graded.
    With `needs_all`, an abstention has the same effect.
    """
    means = [
        math.nan
        if row in failed or np.isnan(scores).all() or (needs_all and np.isnan(scores).any())
        else float(np.nanmean(scores))
        for row, scores in enumerate(turns)
    ]
    return np.array(means, np.float32)


def assessed(verifier: Verifier, trajectories: Sequence[Trajectory]) -> Assessment:
    """The validated assessment of any verifier.

    Raises:
        ScoreError: As `checked`, or turn scores that are not one array per trajectory with one score per turn.
    """
    if not isinstance(verifier, Composable):
        scores = checked_scores(verifier, trajectories)
        return Assessment(scores=scores, ungraded=_ungraded(verifier, scores, trajectories, ()))
    result = verifier.assess(trajectories)
    scores = checked(result.scores, verifier.name, len(trajectories), verifier.score_range)
    failed = {row: reason for row, reason in result.failed.items() if math.isnan(scores[row])}
    if result.turns is not None and [len(row) for row in result.turns] != [len(t.turns) for t in trajectories]:
        raise ScoreError(f"verifier {verifier.name!r} scored a wrong number of turns. Return one score per turn")
    ungraded = _ungraded(verifier, scores, trajectories, result.ungraded)
    return Assessment(scores=scores, noise=result.noise, turns=result.turns, failed=failed, ungraded=ungraded)


def _ungraded(
    verifier: Verifier, scores: Scores, trajectories: Sequence[Trajectory], reported: Collection[int]
) -> set[int]:
    """The rows without a score that the verifier reports, and all with a turn if it grades each text."""
    missing = set(np.flatnonzero(np.isnan(scores)).tolist())
    if getattr(verifier, "grades_each_text", False):
        return {row for row in missing if trajectories[row].turns}
    return missing.intersection(reported)


def nested_state(parts: Mapping[str, Verifier]) -> State:
    """The states of the parts under "name/" prefixes. Parts without a state_dict are skipped."""
    state: State = {}
    for prefix, part in parts.items():
        part_state = part.state_dict() if hasattr(part, "state_dict") else {}
        state.update({f"{prefix}/{key}": value for key, value in part_state.items()})
    return state


def load_nested(parts: Mapping[str, Verifier], state: Mapping[str, NDArray[Any]], *, owner: str) -> None:
    """Load what `nested_state` returned. Raises ValueError for a key that belongs to no part."""
    shares: dict[str, dict[str, NDArray[Any]]] = {prefix: {} for prefix in parts}
    for key, value in state.items():
        # the longest prefix: a user's names may be "style" and "style/short"
        prefix = max((p for p in parts if key.startswith(f"{p}/")), key=len, default=None)
        if prefix is None:
            raise ValueError(f"{owner!r} has no part for state {key!r}. Its parts are {', '.join(parts)}")
        shares[prefix][key[len(prefix) + 1 :]] = value
    for prefix, part in parts.items():
        if hasattr(part, "load_state_dict"):
            part.load_state_dict(shares[prefix])
        elif shares[prefix]:
            raise ValueError(f"{part.name!r} in {owner!r} cannot load state. Give it a load_state_dict")


def state_under(prefix: str, state: Mapping[str, NDArray[Any]]) -> State:
    """The part of a state whose keys begin with `prefix`, without the prefix."""
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def terms_of(verifier: Verifier) -> tuple[tuple[float, Verifier], ...]:
    """The weighted terms of a sum. Any other verifier is one term of weight 1."""
    return verifier.terms if isinstance(verifier, Sum) else ((1.0, verifier),)


class Nested(Composable):
    """A verifier made of `parts`, by the prefix of their state. Its cost is that of its most expensive part.

    The verifier inherits the errors of its `relatives`, by default all parts, and their `family` if they have the same.
    """

    def __init__(self, name: str, parts: Mapping[str, Verifier], relatives: Sequence[Verifier] = ()) -> None:
        self.name, self._parts = name, parts
        self.cost = COSTS[max(COSTS.index(part.cost) for part in parts.values())]
        self.sees_groups = any(getattr(part, "sees_groups", False) for part in parts.values())
        families, defaults = (
            {getattr(part, key, None) for part in relatives or parts.values()} for key in ("family", "default_family")
        )
        self.family = families.pop() if len(families) == 1 else None
        self.default_family = defaults.pop() if len(defaults) == 1 else None

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """The scores of `assess`."""
        return self.assess(trajectories).scores

    @abstractmethod
    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """Combine the assessments of the parts."""

    def parts(self) -> Mapping[str, Verifier]:
        """The parts by the prefix of their state."""
        return self._parts

    def max_duration_s(self, trajectories: Sequence[Trajectory], default_s: float) -> float:
        """The sum over the parts. Parts run one after the other."""
        return sum(max_duration_s(part, trajectories, default_s) for part in self._parts.values())

    def state_dict(self) -> State:
        """The states of the parts."""
        return nested_state(self._parts)

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore `state_dict`. Raises ValueError for any other state."""
        load_nested(self._parts, state, owner=self.name)


class Sum(Nested):
    """Weighted sum of verifiers: ``a + 0.2 * b``.

    The range is [0, sum of the weights]. For a mean, write ``0.5 * a + 0.5 * b``. A term that abstains adds nothing,
    and the sum abstains if all terms do. `forge_agents.MultiReward` instead compares each term only among the episodes
    that have it. A term that failed on a trajectory contributes its mean over the rest of the group, so that a policy
    cannot gain from a failure.

    Args:
        terms: Weight and verifier of each term. Weights must be positive.
        name: Name in reports. By default the formula.
    """

    def __init__(self, terms: Sequence[tuple[float, VerifierLike]], *, name: str | None = None) -> None:
        if not terms:
            raise ValueError("a Sum was given no terms. Pass at least one (weight, verifier)")
        self.terms = tuple((weight, verifier_of(verifier)) for weight, verifier in terms)
        for weight, verifier in self.terms:
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(f"weight {weight} of verifier {verifier.name!r} must be positive and finite")
        formula = " + ".join(v.name if w == 1 else f"{w:g}*{v.name}" for w, v in self.terms)
        super().__init__(name or formula, {str(k): verifier for k, (_, verifier) in enumerate(self.terms)})
        ranges = [(weight, *range_of(verifier)) for weight, verifier in self.terms]
        self.score_range = (math.fsum(w * low for w, low, _ in ranges), math.fsum(w * high for w, _, high in ranges))

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """The sum. If a term scores turns, the trajectory scores of the other terms count for each of its turns."""
        parts = [assessed(verifier, trajectories) for _, verifier in self.terms]
        raw = np.stack([part.scores for part in parts])
        imputed = _impute_failures(raw, [part.failed for part in parts], group_ids(trajectories))
        scores = self._weighted_sum(imputed)
        scores[np.isnan(raw).all(axis=0)] = math.nan
        failed = {row: reason for part in parts for row, reason in part.failed.items() if math.isnan(scores[row])}
        turns = None
        if any(part.turns is not None for part in parts):
            turns = [self._turn_scores(parts, imputed[:, row], row, len(t.turns)) for row, t in enumerate(trajectories)]
        ungraded = {row for part in parts for row in part.ungraded if math.isnan(scores[row])}
        return Assessment(scores=scores, noise=self._noise(parts), turns=turns, failed=failed, ungraded=ungraded)

    def _turn_scores(self, parts: Sequence[Assessment], scores: Scores, row: int, num_turns: int) -> Scores:
        constant = np.ones(num_turns, np.float32)
        terms = zip(parts, scores, strict=True)
        rows = [constant * score if part.turns is None else part.turns[row] for part, score in terms]
        return self._weighted_sum(np.stack(rows))

    def _noise(self, parts: Sequence[Assessment]) -> Scores | None:
        """Standard deviation [n] of the sum of independent terms, or None if no term has one."""
        terms = zip(self.terms, parts, strict=True)
        noise = [weight * part.noise for (weight, _), part in terms if part.noise is not None]
        return np.sqrt(np.nansum(np.square(noise), axis=0)).astype(np.float32) if noise else None

    def _weighted_sum(self, scores: Scores) -> Scores:
        """Weighted sum [n] of scores [terms, n] that are not NaN, or NaN where all are."""
        weights = np.array([w for w, _ in self.terms])
        total = weights @ np.nan_to_num(scores.astype(np.float64))
        return np.where(np.isnan(scores).all(axis=0), math.nan, total).astype(np.float32)


def _impute_failures(scores: Scores, failed: Sequence[Mapping[int, str]], groups: NDArray[np.intp]) -> Scores:
    """Scores [terms, n] with failed entries replaced by the term's mean over the group."""
    imputed = scores.copy()
    for term, rows in enumerate(failed):
        for row in rows:
            group = scores[term, groups == groups[row]]
            imputed[term, row] = np.nanmean(group) if np.isfinite(group).any() else math.nan
    return imputed


def logged_scores(verifier: Composable, trajectories: Sequence[Trajectory]) -> Scores:
    """The scores of `assess`, float32 [n]. Failures are logged."""
    check_trajectories(trajectories)
    result = verifier.assess(trajectories)
    if result.failed:
        number, reason = len(result.failed), printable(next(iter(result.failed.values())))
        _LOG.warning("%r fails on %d of %d trajectories: %s", verifier.name, number, len(trajectories), reason)
    return result.scores


@dataclass(frozen=True, kw_only=True, eq=False)
class TrajectoryRule(Composable):
    """Base class of verifiers that score one trajectory at a time. Subclasses define `grade`."""

    name: str
    """Name in reports."""
    family: str | None = None
    """Label of verifiers that share a cause of error."""
    cost: Cost = "cheap"
    """Cost class."""

    @abstractmethod
    def grade(self, trajectory: Trajectory) -> float | bool | None:
        """A score in [0, 1], or None to abstain."""

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """The scores of `assess`, float32 [n]. Failures are logged."""
        return logged_scores(self, trajectories)

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """`grade` of each trajectory. An exception loses only its own row.

        Raises:
            ScoreError: `grade` returned anything but a number in [0, 1], True, False or None.
            Exception: The error of `grade`, if it raised on every trajectory.
        """
        return self._assessment(grade_each(self.grade, trajectories), len(trajectories))

    def _assessment(self, results: FunctionResults, n: int) -> Assessment:
        if isinstance(results.values, list):
            for row, value in enumerate(results.values):
                if value is not None and not isinstance(value, int | float | np.floating | np.integer | np.bool_):
                    raise ScoreError(
                        f"verifier {self.name!r} graded trajectory {row} with {type(value).__name__} "
                        f"{str(value)[:60]!r}. Return a number in [0, 1], a bool, or None to abstain"
                    )
        return Assessment(scores=checked(results.values, self.name, n), failed=results.failed)


class Rule(TrajectoryRule):
    """A function as a verifier. Also works as a decorator.

    Args:
        function: Its parameter names decide its arguments, see `functions.parse_signature`. A single parameter of
            another name is a `Trajectory`. Returns a number in [0, 1], a bool, or None to abstain. A function of all
            trajectories returns one value each, and its scores are never cached.
        name: Name in reports. By default that of the function.
        family: Label of verifiers that share a cause of error.
        cost: Cost class of a call.

    Raises:
        ArgumentError: `function` is not a function, or its parameters are unclear.

    Example:
        >>> polite = Rule(lambda t: "please" in t.turns[-1].action, name="polite")
    """

    function: Callable[..., Any]
    _signature: Signature

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        family: str | None = None,
        cost: Cost = "cheap",
    ) -> None:
        signature = parse_signature(function, "verifier", default="one")
        super().__init__(name=name or name_of(function), family=family, cost=cost)
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "_signature", signature)
        object.__setattr__(self, "sees_groups", signature.batch)  # it may compare the trajectories of a call

    def grade(self, trajectory: Trajectory) -> float | bool | None:
        """The function's result."""
        return float(self.assess([trajectory]).scores[0])

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """The function's result for each trajectory. Raises as `TrajectoryRule.assess`."""
        if not trajectories:
            return Assessment(scores=np.empty(0, np.float32))
        return self._assessment(self._signature.call(trajectories), len(trajectories))


def verifier_of(value: Any) -> Verifier:
    """Return a verifier unchanged and wrap a function in a `Rule`.

    Raises:
        ArgumentError: Neither a verifier nor a function, a function with unclear parameters, or a missing attribute.
    """
    if isinstance(value, Verifier) and not isinstance(value, type):
        if value.cost not in COSTS:
            raise ArgumentError(f"cost={value.cost!r} of verifier {value.name!r}. Choose one of {', '.join(COSTS)}")
        return value
    if isinstance(value, Composable):  # callable, but a function would lose its cost and its state
        missing = [name for name in ("name", "family", "cost") if not hasattr(value, name)]
        raise ArgumentError(f"verifier {type(value).__name__} has no {' and no '.join(missing)}. Family may be None")
    if callable(getattr(value, "parts", None)):
        raise ArgumentError(
            f"{type(value).__name__} compares each of its rewards separately, which a verifier cannot. Pass its "
            "verifiers, or make this verifier one of its rewards"
        )
    parse_signature(value, "verifier")  # stricter than `Rule`, which takes any single parameter for a trajectory
    return Rule(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionReward:
    """A function of one trajectory or of texts as a reward of any range."""

    signature: Signature

    @property
    def name(self) -> str:
        """The function's name."""
        return name_of(self.signature.function)

    def __call__(self, trajectories: Sequence[Trajectory]) -> np.ndarray:
        """The function's results, float64 ``[n]``, or NaN where it abstains or fails."""
        return self.assess(trajectories).scores

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """Results and failures. Raises ScoreError for results that are neither numbers nor None."""
        results = self.signature.call(trajectories)
        try:
            scores: Any = np.asarray(as_floats(results.values), np.float64)  # any range: not yet rounded to float32
        except (TypeError, ValueError) as error:
            message = f"reward {self.name} returned no number: {error}. Return one, or None to abstain"
            raise ScoreError(message) from error
        return Assessment(scores=scores, failed=results.failed)


def as_floats(values: Any) -> Any:
    """`values` with infinities in place of whole numbers beyond floats: a policy may answer with 400 digits.

    The masked values of a masked array become NaN, because NumPy would return the numbers below the mask.
    """
    if isinstance(values, np.ma.MaskedArray):
        return np.ma.filled(values.astype(np.float64), math.nan)
    if not isinstance(values, list | tuple):
        return values
    largest = 2**1023
    return [
        value if not isinstance(value, int) or abs(value) < largest else math.inf if value > 0 else -math.inf
        for value in values
    ]


def reward_of(value: Any) -> Reward:
    """Convert a verifier or a function into a reward. A reward is returned unchanged.

    A function's single parameter stands for all trajectories unless its name says otherwise, see
    `functions.parse_signature`.

    Raises:
        ArgumentError: Not callable, or unclear parameters.
    """
    is_verifier = isinstance(value, Verifier) and not isinstance(value, type)
    if is_verifier:
        verifier_of(value)  # raises for an unknown cost
    if callable(value) and callable(getattr(value, "assess", None)) and not isinstance(value, type):
        return cast("Reward", value)
    if is_verifier and not callable(value):
        return Sum([(1.0, value)])
    signature = parse_signature(value, "reward", default="all")
    return cast("Reward", value) if signature.batch and signature.plain else FunctionReward(signature=signature)


def declared_judges(reward: Any) -> list[Verifier]:
    """Verifiers that a user's function or object declares in its attribute ``judges``: one, a list, or a dict.

    A run counts the memory of their models, and does not call the function before the models can start.
    """
    visited: list[Any] = []  # an object's attribute may be a method of the same object
    while reward is not None and not any(reward is other for other in visited):
        visited.append(reward)
        declared = getattr(reward, "judges", None)
        declared = [*declared.values()] if isinstance(declared, Mapping) else declared
        items = declared if isinstance(declared, Sequence) and not isinstance(declared, str) else [declared]
        if judges := [item for item in items if isinstance(item, Verifier) and not isinstance(item, type)]:
            return judges
        if isinstance(reward, FunctionReward):
            reward = reward.signature.function
        else:  # a `Rule`, a `functools.partial`, a bound method
            holders = (getattr(reward, name, None) for name in ("function", "func", "__self__"))
            reward = next((holder for holder in holders if holder is not None), None)
    return []


class EnvReward(Composable):
    """The environment's total reward of each trajectory, scaled from [low, high] to [0, 1].

    Args:
        low: Lowest total reward of an agent.
        high: Highest total reward of an agent.
        clip: Whether rewards outside the range score 0 or 1 instead of raising.
        name: Name in reports.
        family: Label of verifiers that share a cause of error.
    """

    cost: Cost = "cheap"

    def __init__(
        self,
        low: float = 0.0,
        high: float = 1.0,
        *,
        clip: bool = False,
        name: str = "env_reward",
        family: str | None = None,
    ) -> None:
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError(f"EnvReward got low={low}, high={high}. Pass finite bounds with low < high")
        self.low, self.high, self.clip = low, high, clip
        self.rounding = 1e-9 * min(1.0, high - low)
        """Distance from the range up to which a reward counts as its bound."""
        self.name, self.family = name, family

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """Scaled rewards, float32 [n]. Raises ScoreError for a reward outside [low, high] unless `clip` is True."""
        rewards = np.array([t.reward for t in trajectories], np.float64)
        outside = (rewards < self.low - self.rounding) | (rewards > self.high + self.rounding)
        if outside.any() and not self.clip:
            raise ScoreError(self.range_error(float(rewards.min()), float(rewards.max())))
        return np.clip((rewards - self.low) / (self.high - self.low), 0.0, 1.0).astype(np.float32)

    def range_error(self, lowest: float, highest: float) -> str:
        """Error message for an environment whose rewards, from `lowest` to `highest`, leave [low, high]."""
        low, high = min(self.low, lowest), max(self.high, highest)
        outside = [f"{r:g}" for r in dict.fromkeys((lowest, highest)) if not self.low <= r <= self.high]
        return (
            f"verifier {self.name!r} expects total rewards in [{self.low:g}, {self.high:g}], and the environment pays "
            f"{' and '.join(outside)}. Set low and high to the environment's whole range, at least "
            f"EnvReward(low={low:g}, high={high:g}), or clip=True, which scores rewards outside the range 0 or 1"
        )
