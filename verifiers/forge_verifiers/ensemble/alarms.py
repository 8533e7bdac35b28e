"""Detects reward hacking: a reward that rises without better answers, and groups with nearly equal rewards."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from forge_agents import states
from forge_agents.errors import ForgeError
from forge_verifiers.core.verifier import State

_LOG = logging.getLogger(__name__)

Floats: TypeAlias = NDArray[np.float64]
Kind: TypeAlias = Literal["reward_against_witness", "plateau", "effective_number", "disagreement", "spread"]
_SERIES = ("reward", "effective_number", "disagreement", "spread")
_MIN_CALLS = 12
"""Fewer than six calls per half make Welch's t unreliable, and many runs have no more than 20 calls."""
_SOLVED = 0.95
"""Mean reward from which equal rewards within groups mean success."""


class RewardHackingError(ForgeError, RuntimeError):
    """The reward rises without better answers. The message has the evidence."""


class RewardHackingWarning(UserWarning):
    """The reward may rise without better answers. The message has the evidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HackingAlarm:
    """Conditions under which an ensemble's reward is suspected of being hacked, and the reaction.

    The tests compare the later half of the last `window` learning calls with the earlier half by Welch's t. The first
    test is at the twelfth call of a run, and each alarm is raised at most once per window.

    * ``reward_against_witness``: the mean reward rises and the mean score of a witness falls, each by at least
      `min_change`. Their difference cancels the effect of hard and easy tasks and must exceed `threshold` standard
      errors. Witnesses are the anchors. Without anchors, the witness is the verifier that correlates least with the
      others among those better than chance, because members that share a cause of error are hacked together (Eisenstein
      et al., arXiv 2312.09244).
    * ``plateau``: the same for a reward that no longer rises, if the witness falls by twice `min_change`.
    * ``effective_number``: the effective number of verifiers falls by at least the fraction `max_shrinkage`.
    * ``disagreement``: verifiers disagree more on responses with a high posterior, by `threshold` standard errors and
      at least `min_change`. Disagreement is the mean absolute difference of two verifiers' scores, weighted by the
      posterior of the responses, so that a better policy alone does not change it.
    * ``spread``: rewards within groups have a standard deviation below `min_spread` in the later half, and the mean
      reward is not close to the maximum. Advantages would amplify the remaining noise.
    """

    on_alarm: Literal["log", "warn", "stop"] = "warn"
    """Log an error, warn with `RewardHackingWarning`, or raise `RewardHackingError`."""
    window: int = 40
    """Number of calls that a test uses, at least 12."""
    threshold: float = 5.0
    """Number of standard errors, above 0."""
    min_change: float = 0.03
    """Smallest change of a mean score that raises an alarm, in (0, 1)."""
    max_shrinkage: float = 0.3
    """Fraction of the effective number of verifiers that may be lost within a window, in (0, 1)."""
    min_spread: float = 0.02
    """Standard deviation of rewards within groups, in (0, 1), below which they count as equal."""

    def __post_init__(self) -> None:
        if self.on_alarm not in {"log", "warn", "stop"}:
            raise ValueError(f"on_alarm={self.on_alarm!r} must be 'log', 'warn' or 'stop'")
        if self.window < _MIN_CALLS:
            raise ValueError(f"window={self.window} calls are too few to see a trend. Set at least {_MIN_CALLS}")
        if not self.threshold > 0:
            raise ValueError(f"threshold={self.threshold} must be above 0")
        for name in ("min_change", "max_shrinkage", "min_spread"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie in (0, 1)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A suspicion of reward hacking."""

    kind: Kind
    call: int
    """Number of the learning call that raised it, from 1."""
    evidence: str
    """Description with numbers."""


def disagreement(scores: NDArray[np.float32], posterior: Floats) -> float:
    """Mean absolute difference of two verifiers' scores [n, m], weighted by P(correct) [n], or NaN without pairs."""
    gaps = np.abs(scores[:, :, None] - scores[:, None, :]).astype(np.float64)
    upper = np.triu_indices(scores.shape[1], 1)
    pairs = gaps[:, upper[0], upper[1]]
    weight = np.where(np.isnan(pairs), 0.0, posterior[:, None])
    total = float(weight.sum())
    return float((np.nan_to_num(pairs) * weight).sum() / total) if total > 0 else math.nan


def group_spread(rewards: NDArray[np.float32], groups: NDArray[np.intp]) -> float:
    """Mean standard deviation of the rewards [n] within groups [n] of two or more, or NaN without such groups."""
    present = ~np.isnan(rewards)
    index, values = np.unique(groups[present], return_inverse=True)[1], rewards[present].astype(np.float64)
    count = np.bincount(index)
    mean = np.bincount(index, values) / np.maximum(count, 1)
    variance = np.bincount(index, (values - mean[index]) ** 2) / np.maximum(count, 1)
    return float(np.sqrt(variance[count > 1]).mean()) if (count > 1).any() else math.nan


def mean_scores(scores: NDArray[np.float32]) -> Floats:
    """Mean score [m] of each verifier over the rows [n, m] that it scored, or NaN without such rows."""
    with np.errstate(invalid="ignore"):
        return np.asarray(np.nansum(scores, axis=0, dtype=np.float64) / (~np.isnan(scores)).sum(axis=0))


class AlarmMonitor:
    """The time series that the tests use, and the alarms raised so far. `names` are those of the verifiers [m]."""

    def __init__(self, config: HackingAlarm, names: Sequence[str]) -> None:
        self.config, self.names = config, tuple(names)
        self.alarms: list[Alarm] = []
        self._calls = 0
        self._series = np.empty((0, len(_SERIES) + len(names)))
        """[at most window, 4 + m]: one row per call."""

    def add(
        self,
        *,
        reward: float,
        effective_number: float,
        disagreement: float,
        spread: float,
        means: Floats,
        witnesses: Sequence[int],
    ) -> None:
        """Record one call and raise the alarms that are due. `means` [m] are the verifiers' mean scores.

        Raises RewardHackingError if there is one and `on_alarm` is "stop".
        """
        row = np.array([[reward, effective_number, disagreement, spread, *means]])
        self._series = np.concatenate([self._series, row])[-self.config.window :]
        self._calls += 1
        if len(self._series) < _MIN_CALLS:
            return
        recent = {alarm.kind for alarm in self.alarms if alarm.call > self._calls - self.config.window}
        period = f"over {len(self._series)} calls up to call {self._calls}"
        raised = [
            Alarm(kind=kind, call=self._calls, evidence=f"{kind}: {period}, {evidence}")
            for kind, evidence in (*self._witness_tests(witnesses), *self._drift_tests())
            if kind not in recent
        ]
        self.alarms += raised
        for alarm in raised:
            text = f"the reward may be hacked: {alarm.evidence}. Read the best-paid episodes, or add verifiers"
            if self.config.on_alarm == "warn":
                warnings.warn(text, RewardHackingWarning, stacklevel=2)
            else:
                _LOG.error(text)
        if raised and self.config.on_alarm == "stop":
            raise RewardHackingError("; ".join(alarm.evidence for alarm in raised))

    def state_dict(self) -> State:
        """Series and alarms."""
        return {
            "series": self._series.copy(),
            "calls": np.array(self._calls),
            "kinds": np.array([alarm.kind for alarm in self.alarms], np.str_),
            "at": np.array([alarm.call for alarm in self.alarms], np.int64),
            "evidence": np.array([alarm.evidence for alarm in self.alarms], np.str_),
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore `state_dict`."""
        kinds = states.texts(state, "kinds", -1)
        self._series = states.numbers(state, "series", -1, self._series.shape[1], nan=True)
        self._calls = int(states.whole(state, "calls"))
        at = states.whole(state, "at", len(kinds)).tolist()
        rows = zip(kinds, at, states.texts(state, "evidence", len(kinds)), strict=True)
        self.alarms = [Alarm(kind=kind, call=call, evidence=evidence) for kind, call, evidence in rows]

    def _witness_tests(self, witnesses: Sequence[int]) -> Iterator[tuple[Kind, str]]:
        """The first witness whose scores contradict the reward."""
        reward, min_change = self._series[:, 0], self.config.min_change
        for k in witnesses:
            witness = self._series[:, len(_SERIES) + k]
            (rise, _), (drop, _), (_, t) = _change(reward), _change(-witness), _change(reward - witness)
            is_small = drop < min_change or rise + drop < 2 * min_change or rise < -min_change / 2
            if is_small or t < self.config.threshold:
                continue
            fell = f"while {self.names[k]!r} fell by {drop:.3f}"
            if rise >= min_change:
                yield "reward_against_witness", f"the reward rose by {rise:.3f} {fell}"
            else:
                yield "plateau", f"the reward stays at {_halves(reward)[1].mean():.3f} {fell}"
            return

    def _drift_tests(self) -> Iterator[tuple[Kind, str]]:
        early, late = _halves(self._series[:, 1])
        if len(early) and len(late) and late.mean() < (1 - self.config.max_shrinkage) * early.mean():
            change = f"the effective number of verifiers is {late.mean():.2f}, {early.mean():.2f} before"
            yield "effective_number", change
        drift, t = _change(self._series[:, 2])
        if drift >= self.config.min_change and t >= self.config.threshold:
            yield "disagreement", f"verifiers disagree by {drift:.3f} more on responses with a high posterior"
        spread, level = (_halves(self._series[:, column])[1] for column in (3, 0))
        if len(spread) >= 3 and spread.mean() < self.config.min_spread and level.mean() < _SOLVED:
            yield "spread", f"rewards within groups differ by only {spread.mean():.3f}"


def _halves(series: Floats) -> tuple[Floats, Floats]:
    """The earlier and the later half without NaN."""
    middle = len(series) // 2
    early, late = series[:middle], series[middle:]
    return early[~np.isnan(early)], late[~np.isnan(late)]


def _change(series: Floats) -> tuple[float, float]:
    """Mean of the later half minus that of the earlier half, and its Welch's t. 0 with fewer than three values each."""
    early, late = _halves(series)
    if min(len(early), len(late)) < 3:
        return 0.0, 0.0
    change = float(late.mean() - early.mean())
    error = math.sqrt(early.var(ddof=1) / len(early) + late.var(ddof=1) / len(late))
    return change, change / max(error, 1e-6)
