"""What a verifier is and what its scores must be; a weighted sum, a user's function, an environment's reward as one.

In: trajectories. Out: float32 scores [n] in [0, 1], NaN where the verifier abstains. Waits for nothing.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self, TypeAlias, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from forge_agents.errors import ArgumentError, ForgeError
from forge_agents.types import Reward, Trajectory
from forge_verifiers.core.functions import Reading, Returned, name_of, one_by_one, read

Cost: TypeAlias = Literal["cheap", "model", "expensive"]
"""What a score costs: pure Python, one forward pass of a model, or more (a judge that writes, a sandbox)."""
COSTS: tuple[Cost, ...] = ("cheap", "model", "expensive")
"""Cost classes, cheapest first."""

Scores: TypeAlias = NDArray[np.float32]
State: TypeAlias = dict[str, NDArray[Any]]
"""Flat, "/"-separated keys, arrays without pickled objects."""

_LOG = logging.getLogger(__name__)
_ROUNDING = 1e-5


class ScoreError(ForgeError, ValueError):
    """A verifier broke the contract: scores of a wrong shape, outside its range, or no numbers."""


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


Judging: TypeAlias = Verifier | Callable[..., Any]
"""A verifier, or a function that `verifier_of` makes one of."""


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
    score_range: tuple[float, float] = (0.0, 1.0)
    """Least and greatest score. Only a weighted sum, and what is made of one, has another range than [0, 1]; an
    `Ensemble` and the check of a `Gate` refuse it."""
    exact: bool = False
    """Whether what is certainly right scores 1, as checks do and grades do not; `check_verifier` holds it to that."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Keeps the constructor's arguments, which a run records in its ``config.yaml``."""
        made = super().__new__(cls)
        object.__setattr__(made, "_constructor_arguments", (args, kwargs))
        return made

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
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            return NotImplemented
        return Sum([(float(weight) * own, verifier) for own, verifier in terms_of(self)])

    __rmul__ = __mul__

    def __add__(self, other: Judging) -> Sum:
        return Sum([*terms_of(self), *terms_of(verifier_of(other))])

    def __radd__(self, other: Callable[..., Any] | int) -> Sum:
        before = [] if other == 0 else terms_of(verifier_of(other))  # Python's own `sum` begins with 0
        return Sum([*before, *terms_of(self)])

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
        ScoreError: not one number per trajectory, or one outside the verifier's range; names the verifier.
    """
    return checked(verifier.score(trajectories), verifier.name, len(trajectories), range_of(verifier))


def range_of(verifier: Verifier) -> tuple[float, float]:
    """Least and greatest score of any verifier: [0, 1] unless it has a `Composable.score_range`."""
    return getattr(verifier, "score_range", (0.0, 1.0))


def check_unit_range(verifier: Verifier, use: str) -> None:
    """Refuse a verifier whose scores may leave [0, 1].

    Args:
        verifier: The verifier.
        use: What it is used as, for the error, such as "the check of a Gate".

    Raises:
        ArgumentError: Its range is larger; the message says how to scale it.
    """
    low, high = range_of(verifier)
    if low < -_ROUNDING or high > 1 + _ROUNDING:
        raise ArgumentError(
            f"{verifier.name!r} has scores from {low:g} to {high:g} and was given as {use}, which needs scores in "
            f"[0, 1]. " + (f"Multiply it by {1 / high:.4g}" if low >= 0 else "Scale its scores")
        )


def checked(raw: object, name: str, n: int, score_range: tuple[float, float] = (0.0, 1.0)) -> Scores:
    """Scores of `n` trajectories as float32 [n], held to the contract.

    Raises:
        ScoreError: not one number per trajectory, or one outside `score_range`; names the verifier.
    """
    low, high = score_range
    try:
        scores = np.asarray(raw, np.float32)
    except (TypeError, ValueError) as error:
        raise ScoreError(f"verifier {name!r} returned no numbers: {error}; use NaN to abstain") from error
    if scores.shape != (n,):
        raise ScoreError(f"verifier {name!r} returned shape {scores.shape} for {n} trajectories; return one score each")
    outside = (scores < low - _ROUNDING) | (scores > high + _ROUNDING)
    if outside.any():
        at = int(np.flatnonzero(outside)[0])
        raise ScoreError(
            f"verifier {name!r} scored trajectory {at} of {n} with {scores[at]}; "
            f"scale scores to [{low:g}, {high:g}], use NaN to abstain"
        )
    return np.clip(scores, np.float32(low), np.float32(high))


def group_ids(trajectories: Sequence[Trajectory]) -> NDArray[np.intp]:
    """Group number of each trajectory, int [n], from 0 in order of appearance.

    A group holds the siblings: same environment, same seed, same agent.
    """
    numbers: dict[tuple[str, int, str], int] = {}
    return np.array([numbers.setdefault((t.env_id, t.seed, t.agent), len(numbers)) for t in trajectories], np.intp)


def assessed(verifier: Verifier, trajectories: Sequence[Trajectory]) -> Assessment:
    """The assessment of any verifier, its scores held to the contract.

    Raises:
        ScoreError: see `checked_scores`; or turns that are not one array per trajectory with a score per turn.
    """
    if not isinstance(verifier, Composable):
        return Assessment(scores=checked_scores(verifier, trajectories))
    found = verifier.assess(trajectories)
    scores = checked(found.scores, verifier.name, len(trajectories), verifier.score_range)
    failed = {at: why for at, why in found.failed.items() if math.isnan(scores[at])}
    if found.turns is None:
        return Assessment(scores=scores, noise=found.noise, failed=failed)
    if [len(own) for own in found.turns] != [len(t.turns) for t in trajectories]:
        raise ScoreError(f"verifier {verifier.name!r} scored other turns than it was shown; return one score per turn")
    return Assessment(scores=scores, noise=found.noise, turns=found.turns, failed=failed)


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


def under(prefix: str, state: Mapping[str, NDArray[Any]]) -> State:
    """The part of a state whose keys begin with `prefix`, without it."""
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def terms_of(verifier: Verifier) -> tuple[tuple[float, Verifier], ...]:
    """The weighted terms of a sum; any other verifier is one term of weight 1."""
    return verifier.terms if isinstance(verifier, Sum) else ((1.0, verifier),)


class Nested(Composable):
    """A verifier made of others: it costs as much as the dearest, and its state is theirs.

    Its family and its likeness are those that all of `relatives` share.

    Args:
        name: What reports call it.
        parts: By the prefix of their state.
        relatives: Whose errors it makes; all parts by default.
    """

    def __init__(self, name: str, parts: Mapping[str, Verifier], relatives: Sequence[Verifier] = ()) -> None:
        self.name, self._parts = name, parts
        self.cost = COSTS[max(COSTS.index(part.cost) for part in parts.values())]
        self.sees_groups = any(getattr(part, "sees_groups", False) for part in parts.values())
        families, likenesses = (
            {getattr(part, key, None) for part in relatives or parts.values()} for key in ("family", "likeness")
        )
        self.family = families.pop() if len(families) == 1 else None
        self.likeness = likenesses.pop() if len(likenesses) == 1 else None

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """The scores of `assess`, float32 [n]."""
        return self.assess(trajectories).scores

    @abstractmethod
    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """What it makes of its parts' assessments."""

    def parts(self) -> Mapping[str, Verifier]:
        """The parts, by the prefix of their state: a run finds the ensemble within a reward by them."""
        return self._parts

    def longest_s(self, trajectories: Sequence[Trajectory], otherwise_s: float) -> float:
        """One part after the other."""
        return sum(longest_s(part, trajectories, otherwise_s) for part in self._parts.values())

    def state_dict(self) -> State:
        """The states of the parts."""
        return nested_state(self._parts)

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restores what `state_dict` returned. Raises ValueError for anything else."""
        load_nested(self._parts, state, owner=self.name)


class Sum(Nested):
    """The weighted sum of verifiers: ``a + 0.2 * b`` scores ``a``'s score plus 0.2 times ``b``'s.

    Its range is [0, sum of the weights], which may be larger than [0, 1]; for a mean, write ``0.5 * a + 0.5 * b``.
    A term that abstains is left out, so it adds nothing; where all terms abstain the sum does, too. To compare each
    term only among the episodes that have it, use `forge_agents.MultiReward`. A term that failed on a trajectory
    adds what it adds for the other episodes of the group on average, so that no policy gains by a failure.

    Args:
        terms: Weight and verifier of each term; weights positive.
        name: What reports call it; the formula by default.
    """

    def __init__(self, terms: Sequence[tuple[float, Judging]], *, name: str | None = None) -> None:
        if not terms:
            raise ValueError("a Sum was given no terms; send at least one (weight, verifier)")
        self.terms = tuple((weight, verifier_of(verifier)) for weight, verifier in terms)
        for weight, verifier in self.terms:
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(f"weight {weight} of verifier {verifier.name!r} must be positive and finite")
        formula = " + ".join(v.name if w == 1 else f"{w:g}*{v.name}" for w, v in self.terms)
        super().__init__(name or formula, {str(k): verifier for k, (_, verifier) in enumerate(self.terms)})
        ranges = [(weight, *range_of(verifier)) for weight, verifier in self.terms]
        self.score_range = (math.fsum(w * low for w, low, _ in ranges), math.fsum(w * high for w, _, high in ranges))

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """The sum; where a term scores turns, the others' scores of the trajectory count for each turn of it."""
        parts = [assessed(verifier, trajectories) for _, verifier in self.terms]
        heard = np.stack([part.scores for part in parts])
        evened = _evened(heard, [part.failed for part in parts], group_ids(trajectories))
        scores = self._sum(evened)
        scores[np.isnan(heard).all(axis=0)] = math.nan
        failed = {at: why for part in parts for at, why in part.failed.items() if math.isnan(scores[at])}
        noise = self._noise(parts)
        if all(part.turns is None for part in parts):
            return Assessment(scores=scores, noise=noise, failed=failed)
        turns = []
        for at, trajectory in enumerate(trajectories):
            whole = np.ones(len(trajectory.turns), np.float32)
            of_terms = zip(parts, evened[:, at], strict=True)
            turns.append(self._sum(np.stack([whole * own if p.turns is None else p.turns[at] for p, own in of_terms])))
        return Assessment(scores=scores, noise=noise, turns=turns, failed=failed)

    def _noise(self, parts: Sequence[Assessment]) -> Scores | None:
        """Standard deviation [n] of the sum of independent terms, of those that know theirs; None where none does."""
        weighted = zip(self.terms, parts, strict=True)
        known = [weight * part.noise for (weight, _), part in weighted if part.noise is not None]
        return np.sqrt(np.nansum(np.square(known), axis=0)).astype(np.float32) if known else None

    def _sum(self, scores: Scores) -> Scores:
        """Weighted sum [n] of scores [terms, n] without those that are NaN; NaN where all are."""
        weights = np.array([w for w, _ in self.terms])
        total = weights @ np.nan_to_num(scores.astype(np.float64))
        return np.where(np.isnan(scores).all(axis=0), math.nan, total).astype(np.float32)


def _evened(scores: Scores, failed: Sequence[Mapping[int, str]], groups: NDArray[np.intp]) -> Scores:
    """Scores [terms, n] in which a term that failed on a row has the mean of what it said of the row's siblings."""
    evened = scores.copy()
    for term, rows in enumerate(failed):
        for row in rows:
            siblings = scores[term, groups == groups[row]]
            evened[term, row] = np.nanmean(siblings) if np.isfinite(siblings).any() else math.nan
    return evened


@dataclass(frozen=True, kw_only=True, eq=False)
class TrajectoryRule(Composable):
    """A verifier that looks at one trajectory at a time. Subclasses write `grade`."""

    name: str
    """What reports call it."""
    family: str | None = None
    """Verifiers of one family share a cause of error."""
    cost: Cost = "cheap"
    """What a score costs."""

    @abstractmethod
    def grade(self, trajectory: Trajectory) -> float | bool | None:
        """A score in [0, 1], or None to abstain."""

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """The scores of `assess`, float32 [n]; what failed is logged."""
        found = self.assess(trajectories)
        if found.failed:
            why = next(iter(found.failed.values()))
            _LOG.warning("%r fails on %d of %d trajectories: %s", self.name, len(found.failed), len(trajectories), why)
        return found.scores

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """`grade` of each trajectory; NaN where it abstained. One on which it raises has failed and costs no other.

        Raises:
            ScoreError: `grade` returned something else than a number in [0, 1], True, False or None.
            Exception: What `grade` raised, if it raised on every trajectory.
        """
        return self._assessment(one_by_one(self.grade, trajectories), len(trajectories))

    def _assessment(self, returned: Returned, n: int) -> Assessment:
        if isinstance(returned.values, list):
            for at, value in enumerate(returned.values):
                if value is not None and not isinstance(value, int | float | np.floating | np.integer | np.bool_):
                    raise ScoreError(
                        f"verifier {self.name!r} graded trajectory {at} with {type(value).__name__} "
                        f"{str(value)[:60]!r}; return a number in [0, 1], a bool, or None to abstain"
                    )
        return Assessment(scores=checked(returned.values, self.name, n), failed=returned.failed)


class Rule(TrajectoryRule):
    """A function as a verifier; works as a decorator, too.

    Args:
        function: What it takes the names of its parameters say, see `functions.read`; an only parameter of another
            name is a `Trajectory`. Returns a number in [0, 1], a bool, or None to abstain; one for each trajectory
            where it takes all of them.
        name: What reports call it; the function's own name by default.
        family: Verifiers of one family share a cause of error.
        cost: What a call costs.

    Raises:
        ArgumentError: It is no function, or does not say what it takes.

    Example:
        >>> polite = Rule(lambda t: "please" in t.turns[-1].action, name="polite")
    """

    function: Callable[..., Any]
    _reading: Reading

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        family: str | None = None,
        cost: Cost = "cheap",
    ) -> None:
        reading = read(function, "verifier", otherwise="one")
        super().__init__(name=name or name_of(function), family=family, cost=cost)
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "_reading", reading)
        object.__setattr__(self, "sees_groups", reading.batch)  # it may compare what it is shown

    def grade(self, trajectory: Trajectory) -> float | bool | None:
        """What the function returns."""
        return float(self.assess([trajectory]).scores[0])

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """What the function returns of each trajectory. Raises as `TrajectoryRule.assess`."""
        if not trajectories:
            return Assessment(scores=np.empty(0, np.float32))
        return self._assessment(self._reading(trajectories), len(trajectories))


def verifier_of(what: Any) -> Verifier:
    """`what` itself where it is a verifier, else a `Rule` of the function.

    Raises:
        ArgumentError: It is neither, or a function that does not say what it takes, or it lacks an attribute.
    """
    if isinstance(what, Verifier) and not isinstance(what, type):
        if what.cost not in COSTS:
            raise ArgumentError(f"cost={what.cost!r} of verifier {what.name!r}; choose one of {', '.join(COSTS)}")
        return what
    if isinstance(what, Composable):  # it can be called, but as a function it would lose its cost and its state
        lacks = [name for name in ("name", "family", "cost") if not hasattr(what, name)]
        raise ArgumentError(f"verifier {type(what).__name__} has no {' and no '.join(lacks)}; family may be None")
    if callable(getattr(what, "parts", None)):
        raise ArgumentError(
            f"{type(what).__name__} compares each of its rewards apart, which a verifier cannot; give the verifiers "
            "that it holds, or make this verifier one of its rewards"
        )
    read(what, "verifier")  # `Rule` would take any parameter for one trajectory
    return Rule(what)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionReward:
    """A function of one trajectory, or of texts, as a reward of any range."""

    reading: Reading

    @property
    def name(self) -> str:
        """The function's."""
        return name_of(self.reading.function)

    def __call__(self, trajectories: Sequence[Trajectory]) -> np.ndarray:
        """What the function returns of each, float64 ``[n]``; NaN where it abstains or fails."""
        return self.assess(trajectories).scores

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """The same, and where it failed. Raises ScoreError where it returned anything but numbers or None."""
        returned = self.reading(trajectories)
        try:
            scores: Any = np.asarray(returned.values, np.float64)  # of any range: not rounded to float32 yet
        except (TypeError, ValueError) as error:
            said = f"reward {self.name} returned no number: {error}; return one, or None to abstain"
            raise ScoreError(said) from error
        return Assessment(scores=scores, failed=returned.failed)


def reward_of(what: Any) -> Reward:
    """A reward as it is, or of a verifier, or of a function that takes something else; see `functions.read`.

    A function's only parameter stands for all trajectories, unless its name says otherwise.

    Raises:
        ArgumentError: It cannot be called, or does not say what it takes.
    """
    is_verifier = isinstance(what, Verifier) and not isinstance(what, type)
    if is_verifier:
        verifier_of(what)  # refuses a cost that there is not
    if callable(what) and callable(getattr(what, "assess", None)) and not isinstance(what, type):
        return cast("Reward", what)
    if is_verifier and not callable(what):
        return Sum([(1.0, what)])
    reading = read(what, "reward", otherwise="all")
    return cast("Reward", what) if reading.batch and reading.plain else FunctionReward(reading=reading)


def named_judges(reward: Any) -> list[Verifier]:
    """Verifiers that somebody's own function or object says it asks: one, several, or by name, in ``judges`` of it.

    Nobody else knows them: a run counts their models, and does not ask the function before they can start.
    """
    seen: list[Any] = []  # an object's own attribute may be a method of it
    while reward is not None and not any(reward is one for one in seen):
        seen.append(reward)
        found = getattr(reward, "judges", None)
        found = [*found.values()] if isinstance(found, Mapping) else found
        among = found if isinstance(found, Sequence) and not isinstance(found, str) else [found]
        if named := [one for one in among if isinstance(one, Verifier) and not isinstance(one, type)]:
            return named
        if isinstance(reward, FunctionReward):
            reward = reward.reading.function
        else:  # a `Rule`'s, that of `functools.partial`, whose method it is
            holders = (getattr(reward, name, None) for name in ("function", "func", "__self__"))
            reward = next((holder for holder in holders if holder is not None), None)
    return []


class EnvReward(Composable):
    """The environment's total reward of each trajectory, from ``low`` (scores 0) to ``high`` (scores 1).

    Args:
        low: Least total reward an agent can get.
        high: Greatest total reward an agent can get.
        clip: Whether rewards beyond the range score 0 or 1 instead of raising.
        name: What reports call it.
        family: Verifiers of one family share a cause of error.
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
            raise ValueError(f"EnvReward got low={low}, high={high}; send finite bounds with low < high")
        self.low, self.high, self.clip = low, high, clip
        self.name, self.family = name, family

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """Scaled rewards, float32 [n].

        Raises:
            ScoreError: a reward is outside [low, high] and `clip` is False.
        """
        rewards = np.array([t.reward for t in trajectories], np.float64)
        outside = (rewards < self.low - 1e-9) | (rewards > self.high + 1e-9)
        if outside.any() and not self.clip:
            raise ScoreError(self.too_small_for(float(rewards.min()), float(rewards.max())))
        return np.clip((rewards - self.low) / (self.high - self.low), 0.0, 1.0).astype(np.float32)

    def too_small_for(self, least: float, most: float) -> str:
        """The error of a range [low, high] that does not hold the environment's rewards from `least` to `most`."""
        low, high = min(self.low, least), max(self.high, most)
        outside = [f"{reward:g}" for reward in dict.fromkeys((least, most)) if not self.low <= reward <= self.high]
        return (
            f"verifier {self.name!r} expects total rewards in [{self.low:g}, {self.high:g}], and the environment pays "
            f"{' and '.join(outside)}; set low and high to the environment's whole range, at least "
            f"EnvReward(low={low:g}, high={high:g}), or clip=True, which scores rewards outside the range 0 or 1"
        )
