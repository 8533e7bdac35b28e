"""Many weak verifiers as one: learns online, without labels, whom to trust.

In: trajectories. Out: P(correct) of each as a score. Waits for its verifiers, each at most `timeout_s`.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import forge_verifiers.combiners as combiners
from forge_agents.types import Trajectory
from forge_verifiers.combiners import Prior
from forge_verifiers.core.verifier import (
    COSTS,
    Assessment,
    Composable,
    Cost,
    Judging,
    Scores,
    State,
    Verifier,
    check_unit_range,
    group_ids,
    load_nested,
    longest_s,
    nested_state,
    under,
    verifier_of,
)
from forge_verifiers.ensemble.alarms import Alarm, HackingAlarm, Watch, disagreement, mean_scores, sibling_spread
from forge_verifiers.ensemble.belief import (
    Belief,
    LowerBound,
    Pessimism,
    combiner_for,
    families_of,
    rewards,
    witnesses,
)
from forge_verifiers.ensemble.panel import Answers, Caller, Cascade, Panel
from forge_verifiers.report.reasons import direction, is_settled, with_reasons
from forge_verifiers.report.report import EnsembleReport, Evidence

_LOG = logging.getLogger(__name__)
Forget = Literal["exponential", "window"]
_ROWS_THAT_TELL = 128
"""Rows on which some verifier of an ordinary panel is known to be better or worse than chance."""
_ROWS = ("scores", "asked", "groups", "labels")


class ScoreWindow:
    """At most `max_rows` score rows of whole groups.

    ``"exponential"`` lets every new group displace a random one of those held, so ages are geometrically distributed:
    an unweighted sample of exponentially forgotten statistics, with a time constant of `max_rows` rows.
    ``"window"`` displaces the oldest. What is displaced depends on the number of calls alone, never on global
    randomness.
    """

    def __init__(self, *, num_verifiers: int, max_rows: int, forget: Forget) -> None:
        self.max_rows, self.forget = max_rows, forget
        self.scores = np.empty((0, num_verifiers), np.float32)
        """[N, m], NaN where there is none."""
        self.asked = np.empty((0, num_verifiers), bool)
        """[N, m]; False where a verifier was not asked or its call failed, so that its silence says nothing."""
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
        asked: NDArray[np.bool_],
    ) -> None:
        """Takes the rows of one call; `groups` are numbered from 0 within the call."""
        old = np.unique(self.groups)
        order = np.argsort(groups, kind="stable")
        new = {"scores": scores, "asked": asked, "groups": groups + self._next_group, "labels": labels}
        for name in _ROWS:
            setattr(self, name, np.concatenate([getattr(self, name), new[name][order]]))
        self._next_group += int(groups.max()) + 1
        if len(self.groups) > self.max_rows:
            self._displace(old)
        self.calls += 1

    def _displace(self, old: NDArray[np.int64]) -> None:
        new = np.setdiff1d(self.groups, old)
        if self.forget == "exponential":
            rng = np.random.default_rng(self.calls)
            old, new = rng.permutation(old), rng.permutation(new)
        leaving = np.concatenate([old, new])
        sizes = np.bincount(self.groups - self.groups[0])[leaving - self.groups[0]]
        excess = len(self.groups) - self.max_rows
        count = int(np.searchsorted(np.cumsum(sizes), excess)) + 1
        count = min(count, len(leaving) - 1)  # one group always stays, however large
        keep = ~np.isin(self.groups, leaving[:count])
        for name in _ROWS:
            setattr(self, name, getattr(self, name)[keep])

    def state_dict(self) -> State:
        """Everything held."""
        rows = {name: getattr(self, name).copy() for name in _ROWS}
        return {**rows, "calls": np.array(self.calls), "next_group": np.array(self._next_group)}

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restores what `state_dict` returned."""
        for name in _ROWS:
            setattr(self, name, np.array(state[name], getattr(self, name).dtype))
        self.calls, self._next_group = int(state["calls"]), int(state["next_group"])


class Ensemble(Composable):
    """Weak verifiers combined into one score, the probability that a trajectory is correct.

    Every call of `score` collects the matrix [n, m] of all verifiers, adds it to a bounded window of past scores that
    forgets old groups, refits the combiner when `refit_every` calls have passed, and predicts. The parameters are the
    same for all rows of one call and carry a `version`. What a verifier fails to answer, because
    it raises or is late, is counted and says nothing, in the fit as in the score, while an abstention may say
    something. One whose scores have a wrong shape or range raises, because that is a mistake in its code. A trajectory
    on which all abstain gets NaN.

    Args:
        verifiers: The judges, plain functions among them (see `Rule`); names unique. Verifiers of one ``family`` are
            one source to the combiner. Of those that were given none, reward models are a family, and judges on one
            model, and checks of one gold answer; a family of its own keeps a verifier apart.
        combine: Name of a combiner (see `combiners.get`).
        anchors: Names of verifiers known to be better than the rest.
        refit_every: Calls of `score` between two fits; the first call always fits.
        max_rows: Score rows that the window holds.
        forget: ``"exponential"`` displaces random groups, ``"window"`` the oldest. See `ScoreWindow`.
        label: The true correctness of a trajectory where it is known, else None; a few labels help the combiner.
        priors: What is known of verifiers beforehand, by name; for the default combiner.
        cascade: When the dearer verifiers are spared; None asks everybody about everything.
        alarm: When the reward is suspected of being hacked; None never.
        pessimism: Makes the score a lower one than P(correct); None leaves it.
        at_once: Verifiers of a cost class asked at the same time; see `AT_ONCE` for what is not named.
        cache_rows: Verdicts of dear verifiers remembered by content; see `ScoreCache`.
        timeout_s: Seconds that a verifier without limits of its own may take for one call; see `Caller`.
        name: What reports call it.
        family: Its family within another ensemble.

    Raises:
        ValueError: no verifiers, a name twice, or a number out of range.
        UnknownIdError: no combiner or no verifier has the name.
    """

    sees_groups = True

    def __init__(
        self,
        verifiers: Sequence[Judging],
        combine: str = "default",
        *,
        anchors: Sequence[str] = (),
        refit_every: int = 1,
        max_rows: int = 4096,
        forget: Forget = "exponential",
        label: Callable[[Trajectory], bool | None] | None = None,
        priors: Mapping[str, Prior] = MappingProxyType({}),
        cascade: Cascade | None = None,
        alarm: HackingAlarm | None = None,
        pessimism: Pessimism | None = None,
        at_once: Mapping[Cost, int] | None = None,
        cache_rows: int = 65536,
        timeout_s: float = 60.0,
        name: str = "ensemble",
        family: str | None = None,
    ) -> None:
        self.verifiers = tuple(map(verifier_of, verifiers))
        _check(self.verifiers, refit_every=refit_every, max_rows=max_rows, forget=forget, timeout_s=timeout_s)
        self.name, self.family = name, family
        self.cost = COSTS[max(COSTS.index(v.cost) for v in self.verifiers)]
        self.refit_every, self.label = refit_every, label
        self.cascade, self.pessimism = cascade, pessimism
        self.learning = True
        """Whether `score` learns; False freezes the parameters, for evaluation."""
        self.families = families_of(self.verifiers)
        """[m] What the combiner takes for one source each: families as given, or found by likeness; None = its own."""
        self._combiner = combiner_for(self.verifiers, combine, families=self.families, anchors=anchors, priors=priors)
        if isinstance(pessimism, LowerBound) and not combiners.kind(combine).has_uncertainty:
            raise ValueError(f"LowerBound needs an uncertainty, which {combine!r} has none of; use combine='default'")
        self._window = ScoreWindow(num_verifiers=len(self.verifiers), max_rows=max_rows, forget=forget)
        self._timeout_s = timeout_s
        caller = Caller(self.verifiers, timeout_s=timeout_s, at_once=at_once)
        self._panel = Panel(self.verifiers, caller, cascade=cascade, cache_rows=cache_rows)
        names = [v.name for v in self.verifiers]
        self._anchors = [names.index(a) for a in anchors]
        self._watch = None if alarm is None else Watch(alarm, names)
        self._version = 0
        self._warned = False

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """Suspicions of reward hacking so far, oldest first."""
        return tuple(self._watch.alarms) if self._watch is not None else ()

    @property
    def version(self) -> int:
        """How often the combiner was fitted; scores of one version are comparable."""
        return self._version

    def scores(self, trajectories: Sequence[Trajectory]) -> Scores:
        """What every verifier says, float32 [n, m], NaN = abstained; failures are counted, nothing is learned.

        Raises:
            ScoreError: a verifier broke the contract.
        """
        if not len(trajectories):
            return np.empty((0, len(self.verifiers)), np.float32)
        return self._panel.ask(trajectories, group_ids(trajectories)).scores

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """P(correct), float32 [n] in [0, 1]; NaN where every verifier abstained.

        Raises:
            ScoreError: a verifier broke the contract.
            NotFittedError: `learning` is False and nothing was learned yet.
            RewardHackingError: an alarm that is to stop the run.
        """
        return self.assess(trajectories).scores

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """`score`, and the standard deviation of each posterior where the combiner estimates it. Raises as `score`."""
        n = len(trajectories)
        scores = np.full(n, math.nan, np.float32)
        if not n:
            return Assessment(scores=scores)
        groups = group_ids(trajectories)
        answers = self._ask(trajectories, groups)
        heard = ~np.isnan(answers.scores).all(axis=1)
        silent = np.flatnonzero(~heard & ~answers.asked.all(axis=1)).tolist()
        failed = dict.fromkeys(silent, "no verifier answered, and some failed")
        if not heard.any():
            return Assessment(scores=scores, failed=failed)
        if self.learning:
            self._learn(trajectories, groups, answers, heard & answers.verified)
        reward, deviation = rewards(
            self._combiner,
            self._belief(),
            answers.scores[heard],
            groups[heard],
            answers.asked[heard],
            families=self.families,
            pessimism=self.pessimism,
        )
        scores[heard] = reward
        if self.learning and self._watch is not None:
            self._look(self._watch, answers, scores, groups)
        noise = None
        if deviation is not None:
            noise = np.full(n, math.nan, np.float32)
            noise[heard] = deviation
        return Assessment(scores=scores, noise=noise, failed=failed)

    def longest_s(self, trajectories: Sequence[Trajectory], otherwise_s: float) -> float:
        """Its verifiers one after the other, though most run side by side."""
        return sum(longest_s(v, trajectories, self._timeout_s) for v in self.verifiers)

    def report(self) -> EnsembleReport:
        """Accuracy estimates, weights and failures of every verifier. NaN before the first fit."""
        fitted = self._combiner.report() if self._version else None
        evidence = None if fitted is None else self._evidence()
        camps = np.zeros(len(self.verifiers), np.intp) if fitted is None else fitted.camps
        names = [v.name for v in self.verifiers]
        labels, anchors = self._num_labels, [names[k] for k in self._anchors]
        believed = self._panel.report(fitted, self.families, evidence)
        settled = is_settled(labels, anchors)
        rows = with_reasons(believed, evidence, camps, settled=settled)
        notes = [] if fitted is None else fitted.notes(names, settled=settled)
        notes += direction(rows, evidence, num_labels=labels, anchors=anchors)
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
        """Window, fitted parameters and counts, and the states of the verifiers; loading it continues bit-equal."""
        fitted = self._combiner.state_dict() if self._version else {}
        return {
            "names": np.array([v.name for v in self.verifiers]),
            "kind": np.array(self._combiner.name),
            "version": np.array(self._version),
            **{f"panel/{key}": value for key, value in self._panel.state_dict().items()},
            **({f"watch/{key}": value for key, value in self._watch.state_dict().items()} if self._watch else {}),
            **{f"window/{key}": value for key, value in self._window.state_dict().items()},
            **{f"combiner/{key}": value for key, value in fitted.items()},
            **nested_state(self._parts()),
        }

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restores what `state_dict` returned.

        Raises:
            ValueError: the state is of other verifiers or another combiner, or incomplete.
        """
        own, wanted = [v.name for v in self.verifiers], {"names", "kind", "version", "window/asked"}
        missing = sorted(wanted - set(state))
        if missing:
            raise ValueError(f"state for {self.name!r} lacks {', '.join(missing)}; send what state_dict() returned")
        if state["names"].tolist() != own or str(state["kind"]) != self._combiner.name:
            raise ValueError(
                f"state of {state['kind']!s} over {state['names'].tolist()} arrived at {self._combiner.name} over "
                f"{own}; build the ensemble with the same verifiers, order and combiner"
            )
        fitted = under("combiner/", state)
        if fitted:
            self._combiner.load_state_dict(fitted)
        self._window.load_state_dict(under("window/", state))
        self._version = int(state["version"])
        if self._watch is not None and (watched := under("watch/", state)):
            self._watch.load_state_dict(watched)
        self._panel.load_state_dict(under("panel/", state))
        rest = {k: v for k, v in state.items() if k.startswith("verifiers/")}
        load_nested(self._parts(), rest, owner=self.name)

    def _parts(self) -> dict[str, Verifier]:
        return {f"verifiers/{k}": verifier for k, verifier in enumerate(self.verifiers)}

    def _ask(self, trajectories: Sequence[Trajectory], groups: NDArray[np.intp]) -> Answers:
        cascade = self.cascade
        if cascade is None or not self._version or len(self._window.groups) < cascade.warm_up_rows:
            return self._panel.ask(trajectories, groups)
        belief = self._belief()
        return self._panel.ask(
            trajectories, groups, believe=lambda scores, asked: belief(scores, groups, asked), verify=self.learning
        )

    def _belief(self) -> Belief:
        return Belief(self._combiner, self._window.scores, self._window.groups, self._window.asked)

    def _learn(
        self, trajectories: Sequence[Trajectory], groups: NDArray[np.intp], answers: Answers, rows: NDArray[np.bool_]
    ) -> None:
        if not rows.any():
            return
        due = self._version == 0 or self._window.calls % self.refit_every == 0
        index = np.unique(groups[rows], return_inverse=True)[1]
        self._window.add(answers.scores[rows], index, self._labels(trajectories)[rows], answers.asked[rows])
        if due:
            window = self._window
            self._combiner.fit(window.scores, window.groups, window.labels, window.asked)
            self._version += 1
            self._warn_of_direction()

    def _warn_of_direction(self) -> None:
        """Warns once where many rows do not tell which of two opposite readings of the scores is the right one."""
        rows = len(self._window.groups)
        if self._warned or rows < _ROWS_THAT_TELL or is_settled(self._num_labels, self._anchors):
            return
        fitted = self._combiner.report()
        if np.isnan(fitted.tpr - fitted.fpr + fitted.tpr_error).all() or fitted.side.any():
            return
        self._warned = True
        _LOG.warning(
            "%s: on %d rows none of %d verifiers is known to be better or worse than chance, and no anchors or labels "
            "say which responses are correct. Its reward may rise without better answers, or prefer wrong ones. Give "
            "anchors=, or label= with the right answers of a few dozen trajectories; report() has the details",
            self.name,
            rows,
            len(self.verifiers),
        )

    def _look(self, watch: Watch, answers: Answers, rewards: Scores, groups: NDArray[np.intp]) -> None:
        """Shows one call to the alarms: the rewards of all rows, the scores of those on which nobody was spared."""
        rows = answers.verified & ~np.isnan(rewards)
        fitted = self._combiner.report()
        watch.add(
            reward=float(np.nanmean(rewards)),
            effective_number=fitted.effective_number,
            disagreement=disagreement(answers.scores[rows], rewards[rows].astype(np.float64)),
            spread=sibling_spread(rewards, groups),
            means=mean_scores(answers.scores[rows]),
            witnesses=self._anchors or witnesses(fitted, self._window.scores),
        )

    @property
    def _num_labels(self) -> int:
        return int((~np.isnan(self._window.labels)).sum())

    def _labels(self, trajectories: Sequence[Trajectory]) -> NDArray[np.float32]:
        known = np.full(len(trajectories), math.nan, np.float32)
        if self.label is None:
            return known
        for row, trajectory in enumerate(trajectories):
            try:
                value = self.label(trajectory)
                known[row] = math.nan if value is None else float(value)
            except Exception as error:
                error.add_note(
                    f"in label= of {self.name!r}, asked about trajectory {row}, of {trajectory.agent!r} in "
                    f"{trajectory.env_id} seed {trajectory.seed}; return True, False, or None where it is not known"
                )
                raise
        return known


def _check(verifiers: Sequence[Verifier], *, refit_every: int, max_rows: int, forget: str, timeout_s: float) -> None:
    if not verifiers:
        raise ValueError("an Ensemble was given no verifiers; send at least one")
    for verifier in verifiers:
        check_unit_range(verifier, "a member of an Ensemble")
    twice = [name for name, count in Counter(v.name for v in verifiers).items() if count > 1]
    if twice:
        raise ValueError(f"two verifiers are called {twice[0]!r}; give each its own name=, as in Rule(f, name=...)")
    if refit_every < 1 or max_rows < 1:
        raise ValueError(f"refit_every={refit_every}, max_rows={max_rows}; both must be at least 1")
    if forget not in {"exponential", "window"}:
        raise ValueError(f"forget={forget!r} must be 'exponential' or 'window'")
    if not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s={timeout_s} must be positive and finite: no wait goes without a deadline")
