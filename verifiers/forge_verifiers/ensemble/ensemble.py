"""`Ensemble`: combines weak verifiers into P(correct) and learns online, without labels, how reliable each one is."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

import forge_verifiers.combiners as combiners
from forge_agents import states
from forge_agents.types import Trajectory
from forge_verifiers.combiners import Prior
from forge_verifiers.core.functions import check_trajectories
from forge_verifiers.core.verifier import (
    COSTS,
    Assessment,
    Composable,
    Scores,
    State,
    Verifier,
    VerifierLike,
    check_unit_range,
    group_ids,
    load_nested,
    max_duration_s,
    nested_state,
    state_under,
    verifier_of,
)
from forge_verifiers.ensemble.alarms import Alarm, AlarmMonitor, HackingAlarm, disagreement, group_spread, mean_scores
from forge_verifiers.ensemble.panel import Cascade, Panel, ScoreMatrix
from forge_verifiers.ensemble.posterior import (
    LowerBound,
    LowerConfidenceBound,
    Posterior,
    Scale,
    combiner_for,
    families_of,
    on_log_odds_scale,
    rewards,
    witnesses,
)
from forge_verifiers.report.reasons import direction, has_reference, with_reasons
from forge_verifiers.report.report import EnsembleReport, Evidence

_LOG = logging.getLogger(__name__)
_MIN_ROWS_FOR_WARNING = 128
"""Number of rows on which some verifier of a typical ensemble is known to be better or worse than chance."""
_ROWS = ("scores", "queried", "groups", "labels")


class ScoreWindow:
    """At most `max_rows` rows of scores, in whole groups.

    Each new group replaces a random old one, so that ages are geometrically distributed: an unweighted sample with
    exponential forgetting and a time constant of `max_rows` rows. The random choice depends only on the number of
    calls.
    """

    def __init__(self, *, num_verifiers: int, max_rows: int) -> None:
        self.max_rows = max_rows
        self.scores = np.empty((0, num_verifiers), np.float32)
        """[N, m], NaN where missing."""
        self.queried = np.empty((0, num_verifiers), bool)
        """[N, m]. False where a verifier was not called or failed, so that its missing score is no evidence."""
        self.groups = np.empty(0, np.int64)
        """[N], ascending from old to new."""
        self.labels = np.empty(0, np.float32)
        """[N] 0, 1 or NaN."""
        self.calls = 0
        self._next_group = 0

    def add(
        self,
        scores: NDArray[np.float32],
        groups: NDArray[np.intp],
        labels: NDArray[np.float32],
        queried: NDArray[np.bool_],
    ) -> None:
        """Add the rows of one call. `groups` are numbered from 0 within the call."""
        old = np.unique(self.groups)
        order = np.argsort(groups, kind="stable")
        new = {"scores": scores, "queried": queried, "groups": groups + self._next_group, "labels": labels}
        for name in _ROWS:
            setattr(self, name, np.concatenate([getattr(self, name), new[name][order]]))
        self._next_group += int(groups.max()) + 1
        if len(self.groups) > self.max_rows:
            self._displace(old)
        self.calls += 1

    def _displace(self, old: NDArray[np.int64]) -> None:
        rng = np.random.default_rng(self.calls)
        leaving = np.concatenate([rng.permutation(old), rng.permutation(np.setdiff1d(self.groups, old))])
        numbers, counts = np.unique(self.groups, return_counts=True)
        sizes = counts[np.searchsorted(numbers, leaving)]
        excess = len(self.groups) - self.max_rows
        count = int(np.searchsorted(np.cumsum(sizes), excess)) + 1
        count = min(count, len(leaving) - 1)  # one group always remains, however large
        keep = ~np.isin(self.groups, leaving[:count])
        for name in _ROWS:
            setattr(self, name, getattr(self, name)[keep])

    def state_dict(self) -> State:
        """All rows and counters."""
        rows = {name: getattr(self, name).copy() for name in _ROWS}
        return {**rows, "calls": np.array(self.calls), "next_group": np.array(self._next_group)}

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore `state_dict`. Raises ValueError for rows that no call adds."""
        groups = states.whole(state, "groups", -1)
        num, width = len(groups), self.scores.shape[1]
        scores = states.numbers(state, "scores", num, width, low=0.0, high=1.0, nan=True)
        labels = states.numbers(state, "labels", num, low=0.0, high=1.0, nan=True)
        queried = states.numbers(state, "queried", num, width)
        calls, next_group = int(states.whole(state, "calls")), int(states.whole(state, "next_group"))
        if (np.diff(groups) < 0).any() or (num and groups[-1] >= next_group):
            raise ValueError(f"groups must ascend and be below next_group={next_group}")
        rows = {"scores": scores, "queried": queried, "groups": groups, "labels": labels}
        for name in _ROWS:
            setattr(self, name, rows[name].astype(getattr(self, name).dtype))
        self.calls, self._next_group = calls, next_group

    def forget(self, columns: Sequence[int], *, labels: bool = False) -> None:
        """Forget the scores of verifiers by number, as if they had not been called, and all labels if `labels`."""
        self.scores[:, columns], self.queried[:, columns] = math.nan, False
        if labels:
            self.labels[:] = math.nan
        keep = self.queried.any(axis=1)
        for name in _ROWS:
            setattr(self, name, getattr(self, name)[keep])


class Ensemble(Composable):
    """Weak verifiers combined into one score: the probability that a trajectory is correct.

    Each call of `score` adds the scores [n, m] of all verifiers to a bounded window of past scores, refits the
    combiner every `refit_every` calls, and predicts. All rows of a call use the same parameters, numbered by `version`.
    A verifier that raises or exceeds its timeout is counted and ignored for these rows, while an abstention may be
    evidence. Scores of a wrong shape or range raise, because they are a mistake in the verifier's code. A trajectory on
    which all verifiers abstain gets NaN.

    Args:
        verifiers: Verifiers or functions (see `Rule`) with unique names. Verifiers of one ``family`` count as one
            source. By default reward models are a family, as are judges on one model and checks of one gold answer. A
            unique family separates a verifier from these.
        combine: Name of a combiner, see `combiners.get`.
        anchors: Names of verifiers known to be better than the rest.
        refit_every: Number of `score` calls between fits. The first call always fits.
        max_rows: Number of score rows in the window, in which new groups replace random old ones.
        label: True correctness of a trajectory, or None if unknown. A few labels help the combiner.
        priors: Prior knowledge by verifier name, for the default combiner.
        cascade: Rule for skipping expensive verifiers. With None, all verifiers are called for all rows.
        alarm: Detection of reward hacking. Disabled by default.
        lower_bound: Replaces P(correct) by a lower bound: `SoftMinimum` or `LowerConfidenceBound`.
        scale: "probability" scores P(correct). "log_odds" scores its log-odds between -8 and 8, mapped to [0, 1]. The
            order of the responses and the score 0.5 stay the same. Log-odds keep differences between responses that
            the combiner rates close to 0 or 1. This helps if the combiner takes too many responses for correct.
        cache_rows: Number of cached scores of model and expensive verifiers. See `ScoreCache`.
        timeout_s: Timeout in seconds of a call, for verifiers without limits of their own. See `Caller`.
        name: Name in reports.
        family: Its family within another ensemble.

    Raises:
        ValueError: No verifiers, a repeated name, or a number out of range.
        TypeError: `verifiers` is no list, `anchors` is a string, or `label` is no function.
        UnknownIdError: Unknown combiner or verifier name.
    """

    sees_groups = True

    def __init__(
        self,
        verifiers: Sequence[VerifierLike],
        combine: str = "default",
        *,
        anchors: Sequence[str] = (),
        refit_every: int = 1,
        max_rows: int = 4096,
        label: Callable[[Trajectory], bool | None] | None = None,
        priors: Mapping[str, Prior] = MappingProxyType({}),
        cascade: Cascade | None = None,
        alarm: HackingAlarm | None = None,
        lower_bound: LowerBound | None = None,
        scale: Scale = "probability",
        cache_rows: int = 65536,
        timeout_s: float = 60.0,
        name: str = "ensemble",
        family: str | None = None,
    ) -> None:
        if not isinstance(verifiers, Iterable):
            raise TypeError(f"verifiers is of type {type(verifiers).__name__}. Pass a list of verifiers")
        if isinstance(anchors, str):
            raise TypeError(f"anchors is the string {anchors!r}. Pass a list of names of verifiers")
        if label is not None and not callable(label):
            raise TypeError(f"label is of type {type(label).__name__}. Pass a function of a trajectory")
        self.verifiers = tuple(map(verifier_of, verifiers))
        _check(self.verifiers, refit_every=refit_every, max_rows=max_rows, timeout_s=timeout_s)
        self.name, self.family = name, family
        self.cost = COSTS[max(COSTS.index(v.cost) for v in self.verifiers)]
        self.refit_every, self.label = refit_every, label
        self.cascade, self.lower_bound, self.scale = cascade, lower_bound, scale
        self.learning = True
        """True if `score` learns. False freezes the parameters for evaluation."""
        self.families = families_of(self.verifiers)
        """[m] families, declared or by default, or None for a verifier that is a source by itself."""
        self._combiner = combiner_for(self.verifiers, combine, families=self.families, anchors=anchors, priors=priors)
        if scale not in get_args(Scale):
            raise ValueError(f"scale={scale!r} of an ensemble is none of {', '.join(get_args(Scale))}")
        if isinstance(lower_bound, LowerConfidenceBound) and not combiners.kind(combine).has_uncertainty:
            raise ValueError(f"LowerConfidenceBound needs an uncertainty, {combine!r} has none. Use combine='default'")
        self._window = ScoreWindow(num_verifiers=len(self.verifiers), max_rows=max_rows)
        self._timeout_s = timeout_s
        self._panel = Panel(self.verifiers, cascade=cascade, cache_rows=cache_rows, timeout_s=timeout_s)
        names = [v.name for v in self.verifiers]
        self._anchors = [names.index(a) for a in anchors]
        self._monitor = None if alarm is None else AlarmMonitor(alarm, names)
        self._version = 0
        self._warned = False

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """Suspicions of reward hacking so far, oldest first."""
        return tuple(self._monitor.alarms) if self._monitor is not None else ()

    @property
    def version(self) -> int:
        """Number of fits. Scores of one version are comparable."""
        return self._version

    def scores(self, trajectories: Sequence[Trajectory]) -> Scores:
        """Scores of every verifier, float32 [n, m], NaN = abstained. Nothing is learned. Raises as `score`."""
        check_trajectories(trajectories)
        if not len(trajectories):
            return np.empty((0, len(self.verifiers)), np.float32)
        return self._panel.score(trajectories, group_ids(trajectories)).scores

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """P(correct) or its log-odds by `scale`, float32 [n] in [0, 1], or NaN where every verifier abstained.

        Raises:
            ScoreError: A verifier broke its contract.
            NotFittedError: `learning` is False before the first fit.
            RewardHackingError: An alarm with ``on_alarm="stop"``.
        """
        return self.assess(trajectories).scores

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """`score` with the standard deviation of each posterior if the combiner estimates it. Raises as `score`."""
        check_trajectories(trajectories)
        n = len(trajectories)
        scores = np.full(n, math.nan, np.float32)
        if not n:
            return Assessment(scores=scores)
        groups = group_ids(trajectories)
        matrix = self._score_matrix(trajectories, groups)
        present = ~np.isnan(matrix.scores).all(axis=1)
        failed_rows = np.flatnonzero(~present & ~matrix.queried.all(axis=1)).tolist()
        failed = dict.fromkeys(failed_rows, "no verifier answered, and some failed")
        ungraded = np.flatnonzero(~present & matrix.ungraded).tolist()
        if not present.any():
            return Assessment(scores=scores, failed=failed, ungraded=ungraded)
        if self.learning:
            self._learn(trajectories, groups, matrix, present & matrix.verified)
        reward, deviation = rewards(
            self._posterior(),
            matrix.scores[present],
            groups[present],
            matrix.queried[present],
            families=self.families,
            lower_bound=self.lower_bound,
        )
        scores[present] = reward
        noise = None
        if deviation is not None:
            noise = np.full(n, math.nan, np.float32)
            noise[present] = deviation
        probability = scores
        if self.scale == "log_odds":
            scores, noise = on_log_odds_scale(scores, noise)
        if self.learning and self._monitor is not None:
            self._update_alarms(self._monitor, matrix, probability, group_spread(scores, groups))
        return Assessment(scores=scores, noise=noise, failed=failed, ungraded=ungraded)

    def max_duration_s(self, trajectories: Sequence[Trajectory], default_s: float) -> float:
        """The sum over the verifiers, although most run in parallel."""
        return sum(max_duration_s(v, trajectories, self._timeout_s) for v in self.verifiers)

    def report(self) -> EnsembleReport:
        """Estimates, weights and failures of every verifier, or NaN before the first fit."""
        fitted = self._combiner.report() if self._version else None
        evidence = None if fitted is None else self._evidence()
        clusters = np.zeros(len(self.verifiers), np.intp) if fitted is None else fitted.clusters
        names = [v.name for v in self.verifiers]
        num_labels, deciding = self._num_labels, self._varying_anchors
        anchors, constant = ([names[k] for k in self._anchors if (k in deciding) == varies] for varies in (True, False))
        estimates = self._panel.report(fitted, self.families, evidence)
        reference = has_reference(num_labels, anchors)
        rows = with_reasons(estimates, evidence, clusters, has_reference=reference)
        notes = [] if fitted is None else fitted.notes(names, has_reference=reference)
        notes += direction(rows, evidence, num_labels=num_labels, anchors=anchors, constant_anchors=constant)
        return EnsembleReport(
            name=self.name,
            combiner=self._combiner.name,
            version=self._version,
            window_rows=len(self._window.groups),
            class_balance=math.nan if fitted is None else fitted.class_balance,
            effective_number=math.nan if fitted is None else fitted.effective_number,
            verifiers=rows,
            notes=tuple(notes),
            alarms=tuple(alarm.evidence for alarm in self.alarms),
            evidence=evidence,
        )

    def _evidence(self) -> Evidence:
        rows = {name: getattr(self._window, name) for name in _ROWS}
        return Evidence(**rows, families=self.families, combiner=self._combiner.state_dict())

    def state_dict(self) -> State:
        """Window, parameters, counters and the states of the verifiers. A loaded ensemble continues bit-equal."""
        fitted = self._combiner.state_dict() if self._version else {}
        alarms = self._monitor.state_dict() if self._monitor else {}
        return {
            "names": np.array([v.name for v in self.verifiers]),
            "kind": np.array(self._combiner.name),
            "version": np.array(self._version),
            **{f"panel/{key}": value for key, value in self._panel.state_dict().items()},
            **{f"alarms/{key}": value for key, value in alarms.items()},
            **{f"window/{key}": value for key, value in self._window.state_dict().items()},
            **{f"combiner/{key}": value for key, value in fitted.items()},
            **nested_state(self._parts()),
        }

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore `state_dict`. Raises ValueError for an incomplete state or one of other verifiers or combiners."""
        names = [v.name for v in self.verifiers]
        missing = sorted({"names", "kind", "version", "window/queried"} - set(state))
        if missing:
            raise ValueError(f"state for {self.name!r} lacks {', '.join(missing)}. Pass the result of state_dict()")
        if state["names"].tolist() != names or str(state["kind"]) != self._combiner.name:
            raise ValueError(
                f"state of {state['kind']!s} over {state['names'].tolist()} arrived at {self._combiner.name} over "
                f"{names}. Build the ensemble with the same verifiers, order and combiner"
            )
        fitted = state_under("combiner/", state)
        if fitted:
            self._combiner.load_state_dict(fitted)
        self._window.load_state_dict(state_under("window/", state))
        self._version = int(state["version"])
        if self._monitor is not None and (alarms := state_under("alarms/", state)):
            self._monitor.load_state_dict(alarms)
        self._panel.load_state_dict(state_under("panel/", state))
        rest = {k: v for k, v in state.items() if k.startswith("verifiers/")}
        load_nested(self._parts(), rest, owner=self.name)

    def forget(self, names: Collection[str], *, labels: bool = False) -> None:
        """Forget what verifiers scored before their code or settings changed, and all labels if `labels`.

        The next fit uses the remaining evidence.
        """
        columns = [k for k, verifier in enumerate(self.verifiers) if verifier.name in names]
        self._window.forget(columns, labels=labels)
        self._panel.forget(columns)

    def _parts(self) -> dict[str, Verifier]:
        return {f"verifiers/{k}": verifier for k, verifier in enumerate(self.verifiers)}

    def _score_matrix(self, trajectories: Sequence[Trajectory], groups: NDArray[np.intp]) -> ScoreMatrix:
        cascade, posterior_of = self.cascade, None
        if cascade is not None and self._version and len(self._window.groups) >= cascade.warm_up_rows:
            posterior_of = partial(self._posterior(), groups=groups)
        return self._panel.score(trajectories, groups, posterior_of=posterior_of, verify=self.learning)

    def _posterior(self) -> Posterior:
        return Posterior(self._combiner, self._window.scores, self._window.groups, self._window.queried)

    def _learn(
        self, trajectories: Sequence[Trajectory], groups: NDArray[np.intp], matrix: ScoreMatrix, rows: NDArray[np.bool_]
    ) -> None:
        if not rows.any():
            return
        due = self._version == 0 or self._window.calls % self.refit_every == 0
        index = np.unique(groups[rows], return_inverse=True)[1]
        self._window.add(matrix.scores[rows], index, self._labels(trajectories)[rows], matrix.queried[rows])
        if due:
            window = self._window
            self._combiner.fit(window.scores, window.groups, window.labels, window.queried)
            self._version += 1
            self._warn_of_direction()

    def _warn_of_direction(self) -> None:
        """Warn once if many rows do not determine which responses are correct."""
        rows = len(self._window.groups)
        if self._warned or rows < _MIN_ROWS_FOR_WARNING or has_reference(self._num_labels, self._varying_anchors):
            return
        fitted = self._combiner.report()
        if np.isnan(fitted.tpr - fitted.fpr + fitted.tpr_error).all() or fitted.side.any():
            return
        self._warned = True
        _LOG.warning(
            "%s: on %d rows none of %d verifiers is known to be better or worse than chance, and no labels or anchors "
            "that vary say which responses are correct. Its reward may rise without better answers, or prefer wrong "
            "ones. Give anchors=, or label= with the right answers of a few dozen trajectories. See report()",
            self.name,
            rows,
            len(self.verifiers),
        )

    def _update_alarms(self, monitor: AlarmMonitor, matrix: ScoreMatrix, probability: Scores, spread: float) -> None:
        """Add one call to the alarms: P(correct) of all rows, and the scores of rows that all verifiers scored.

        `spread` is that of the rewards on the scale of the ensemble, because they determine the advantages.
        """
        rows = matrix.verified & ~np.isnan(probability)
        fitted = self._combiner.report()
        monitor.add(
            reward=float(np.nanmean(probability)),
            effective_number=fitted.effective_number,
            disagreement=disagreement(matrix.scores[rows], probability[rows].astype(np.float64)),
            spread=spread,
            means=mean_scores(matrix.scores[rows]),
            witnesses=self._anchors + ([] if self._varying_anchors else witnesses(fitted, self._window.scores)),
        )

    @property
    def _varying_anchors(self) -> list[int]:
        """The anchors that vary in the window. An anchor that rates all rows the same decides nothing."""
        return [k for k in self._anchors if self._varies(k)]

    def _varies(self, k: int) -> bool:
        scores, queried = self._window.scores[:, k], self._window.queried[:, k]
        values = len(np.unique(scores[~np.isnan(scores)]))
        votes = self._combiner.fills_abstentions and bool((np.isnan(scores) & queried).any())
        return values > 1 or (values == 1 and votes)

    @property
    def _num_labels(self) -> int:
        return int((~np.isnan(self._window.labels)).sum())

    def _labels(self, trajectories: Sequence[Trajectory]) -> NDArray[np.float32]:
        labels = np.full(len(trajectories), math.nan, np.float32)
        if self.label is None:
            return labels
        for row, trajectory in enumerate(trajectories):
            try:
                value: Any = self.label(trajectory)
                if value is not None:
                    if value not in (0, 1) and not (isinstance(value, float | np.floating) and math.isnan(value)):
                        raise ValueError(f"the label {value!r:.60} is none of True, False and None")
                    labels[row] = value
            except Exception as error:
                error.add_note(
                    f"in label= of {self.name!r}, called with trajectory {row}, of {trajectory.agent!r} in "
                    f"{trajectory.env_id} seed {trajectory.seed}. Return True, False, or None if unknown"
                )
                raise
        return labels


def _check(verifiers: Sequence[Verifier], *, refit_every: int, max_rows: int, timeout_s: float) -> None:
    if not verifiers:
        raise ValueError("an Ensemble was given no verifiers. Pass at least one")
    for verifier in verifiers:
        check_unit_range(verifier, "a member of an Ensemble")
    repeated = [name for name, count in Counter(v.name for v in verifiers).items() if count > 1]
    if repeated:
        raise ValueError(f"two verifiers are called {repeated[0]!r}. Give each its own name=, as in Rule(f, name=...)")
    if refit_every < 1 or max_rows < 1:
        raise ValueError(f"refit_every={refit_every}, max_rows={max_rows}. Both must be at least 1")
    if not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s={timeout_s} must be positive and finite: every wait needs a timeout")
