"""Watches an ensemble for reward hacking, a reward that rises although nothing got better, and for rewards all alike.

In: the means of every call. Out: alarms with their evidence. Waits for nothing.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from forge_agents.errors import ForgeError
from forge_verifiers.core.verifier import State

_LOG = logging.getLogger(__name__)

Floats: TypeAlias = NDArray[np.float64]
Kind: TypeAlias = Literal["reward_against_witness", "plateau", "effective_number", "disagreement", "spread"]
_SERIES = ("reward", "effective_number", "disagreement", "spread")
_LEAST_CALLS = 12
"""Six against six: fewer make Welch's t a lottery, and many runs have no more than 20."""
_SOLVED = 0.95
"""Mean reward from which siblings that earn the same are no alarm but success."""


class RewardHackingError(ForgeError, RuntimeError):
    """The reward rises although nothing got better; the message names the evidence."""


class RewardHackingWarning(UserWarning):
    """The reward may be rising although nothing got better; the message names the evidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HackingAlarm:
    """When an ensemble's reward is suspected of being hacked, and what follows.

    All tests look at the last `window` learning calls, from the twelfth call of a run, and compare their later with
    their earlier half by Welch's t. Each fires once per window.

    * ``reward_against_witness``: the mean reward rises and the mean score of a witness falls, each by at least
      `least_change`, and their difference, from which hard and easy tasks cancel, by `threshold` standard errors.
      Witnesses are the anchors; without any, the verifier that
      agrees least with the others among those that are better than chance (Eisenstein et al., arXiv 2312.09244: the
      members of an ensemble that share a cause of error are hacked together).
    * ``plateau``: the same where the reward has risen as far as it can and stays, while the witness falls by twice
      `least_change`.
    * ``effective_number``: the ensemble is worth at least `least_shrinking` fewer independent verifiers, as a share.
    * ``disagreement``: verifiers disagree more about the responses believed correct, by `threshold` standard errors
      and at least `least_change`. It is the mean absolute difference of the scores of two verifiers, responses weighted
      by their posterior, which does not change merely because the policy gets better.
    * ``spread``: siblings' rewards have a standard deviation below `least_spread` in the later half, and not because
      all earn the most: what is left of the reward is noise, which a group's advantages blow up.
    """

    on_alarm: Literal["log", "warn", "stop"] = "warn"
    """Log an error, warn with `RewardHackingWarning`, or raise `RewardHackingError`."""
    window: int = 40
    """Calls that a test looks back on; at least 12."""
    threshold: float = 5.0
    """Standard errors, above 0."""
    least_change: float = 0.03
    """Change of a mean score, in (0, 1), below which nothing is said however sure it is."""
    least_shrinking: float = 0.3
    """Share of the effective number of verifiers, in (0, 1), that may be lost within a window."""
    least_spread: float = 0.02
    """Standard deviation of siblings' rewards, in (0, 1), below which they are all alike."""

    def __post_init__(self) -> None:
        if self.on_alarm not in {"log", "warn", "stop"}:
            raise ValueError(f"on_alarm={self.on_alarm!r} must be 'log', 'warn' or 'stop'")
        if self.window < _LEAST_CALLS:
            raise ValueError(f"window={self.window} calls are too few to see a trend; set at least {_LEAST_CALLS}")
        if not self.threshold > 0:
            raise ValueError(f"threshold={self.threshold} must be above 0")
        for name in ("least_change", "least_shrinking", "least_spread"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie in (0, 1)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One suspicion."""

    kind: Kind
    call: int
    """Learning call at which it was raised, from 1."""
    evidence: str
    """What was seen, in words and numbers."""


def disagreement(scores: NDArray[np.float32], posterior: Floats) -> float:
    """Mean absolute difference [n, m] -> scalar of two verifiers' scores, rows weighted by P(correct); NaN without."""
    gaps = np.abs(scores[:, :, None] - scores[:, None, :]).astype(np.float64)
    upper = np.triu_indices(scores.shape[1], 1)
    pairs = gaps[:, upper[0], upper[1]]
    weight = np.where(np.isnan(pairs), 0.0, posterior[:, None])
    total = float(weight.sum())
    return float((np.nan_to_num(pairs) * weight).sum() / total) if total > 0 else math.nan


def sibling_spread(rewards: NDArray[np.float32], groups: NDArray[np.intp]) -> float:
    """Mean standard deviation of the rewards [n] within groups [n] of two or more; NaN without any."""
    heard = ~np.isnan(rewards)
    index, kept = np.unique(groups[heard], return_inverse=True)[1], rewards[heard].astype(np.float64)
    count = np.bincount(index)
    mean = np.bincount(index, kept) / np.maximum(count, 1)
    variance = np.bincount(index, (kept - mean[index]) ** 2) / np.maximum(count, 1)
    return float(np.sqrt(variance[count > 1]).mean()) if (count > 1).any() else math.nan


def mean_scores(scores: NDArray[np.float32]) -> Floats:
    """Mean score [m] of each verifier over the rows [n, m] where it gave one, NaN where there is none."""
    with np.errstate(invalid="ignore"):
        return np.asarray(np.nansum(scores, axis=0, dtype=np.float64) / (~np.isnan(scores)).sum(axis=0))


class Watch:
    """The series that the tests look at, and the alarms raised so far.

    Args:
        config: When to raise an alarm, and how.
        names: The verifiers' names, m of them.
    """

    def __init__(self, config: HackingAlarm, names: Sequence[str]) -> None:
        self.config, self.names = config, tuple(names)
        self.alarms: list[Alarm] = []
        self._calls = 0
        self._series = np.empty((0, len(_SERIES) + len(names)))
        """[at most window, 4 + m]: one row a call."""

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
        """Takes one call and raises the alarms that are due.

        Args:
            reward: Mean reward of the call.
            effective_number: What the combiner believes.
            disagreement: See the function of this name.
            spread: See `sibling_spread`.
            means: [m] mean score of each verifier, NaN where it abstained.
            witnesses: Verifiers that are held against the reward.

        Raises:
            RewardHackingError: an alarm, where `on_alarm` is "stop".
        """
        row = np.array([[reward, effective_number, disagreement, spread, *means]])
        self._series = np.concatenate([self._series, row])[-self.config.window :]
        self._calls += 1
        if len(self._series) < _LEAST_CALLS:
            return
        rung = {alarm.kind for alarm in self.alarms if alarm.call > self._calls - self.config.window}
        over = f"over {len(self._series)} calls up to call {self._calls}"
        found = [
            Alarm(kind=kind, call=self._calls, evidence=f"{kind}: {over}, {seen}")
            for kind, seen in (*self._hacked(witnesses), *self._drifted())
            if kind not in rung
        ]
        self.alarms += found
        for alarm in found:
            text = f"the reward may be hacked: {alarm.evidence}. Read the best-paid episodes, or add verifiers"
            if self.config.on_alarm == "warn":
                warnings.warn(text, RewardHackingWarning, stacklevel=2)
            else:
                _LOG.error(text)
        if found and self.config.on_alarm == "stop":
            raise RewardHackingError("; ".join(alarm.evidence for alarm in found))

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
        """Restores what `state_dict` returned."""
        self._series, self._calls = np.array(state["series"], np.float64), int(state["calls"])
        rows = zip(state["kinds"].tolist(), state["at"].tolist(), state["evidence"].tolist(), strict=True)
        self.alarms = [Alarm(kind=kind, call=call, evidence=evidence) for kind, call, evidence in rows]

    def _hacked(self, witnesses: Sequence[int]) -> Iterator[tuple[Kind, str]]:
        """The first witness against the reward."""
        reward = self._series[:, 0]
        for k in witnesses:
            witness = self._series[:, len(_SERIES) + k]
            (rise, _), (drop, _), (_, sure) = _change(reward), _change(-witness), _change(reward - witness)
            least = self.config.least_change
            if drop < least or rise + drop < 2 * least or rise < -least / 2 or sure < self.config.threshold:
                continue
            fell = f"while {self.names[k]!r} fell by {drop:.3f}"
            if rise >= least:
                yield "reward_against_witness", f"the reward rose by {rise:.3f} {fell}"
            else:
                yield "plateau", f"the reward stays at {_halves(reward)[1].mean():.3f} {fell}"
            return

    def _drifted(self) -> Iterator[tuple[Kind, str]]:
        early, late = _halves(self._series[:, 1])
        if len(early) and len(late) and late.mean() < (1 - self.config.least_shrinking) * early.mean():
            worth = f"the verifiers are worth {late.mean():.2f} independent ones, {early.mean():.2f} before"
            yield "effective_number", worth
        drift, sure = _change(self._series[:, 2])
        if drift >= self.config.least_change and sure >= self.config.threshold:
            yield "disagreement", f"verifiers disagree by {drift:.3f} more about responses believed to be correct"
        spread, level = (_halves(self._series[:, at])[1] for at in (3, 0))
        if len(spread) >= 3 and spread.mean() < self.config.least_spread and level.mean() < _SOLVED:
            yield "spread", f"siblings' rewards differ by {spread.mean():.3f} only"


def _halves(series: Floats) -> tuple[Floats, Floats]:
    """The earlier and the later half, NaN left out."""
    middle = len(series) // 2
    early, late = series[:middle], series[middle:]
    return early[~np.isnan(early)], late[~np.isnan(late)]


def _change(series: Floats) -> tuple[float, float]:
    """Mean of the later half less that of the earlier, and the same in standard errors; 0 with too few numbers."""
    early, late = _halves(series)
    if min(len(early), len(late)) < 3:
        return 0.0, 0.0
    change = float(late.mean() - early.mean())
    # Welch's t: the standard error of a difference of means whose spreads differ.
    error = math.sqrt(early.var(ddof=1) / len(early) + late.var(ddof=1) / len(late))
    return change, change / max(error, 1e-6)
