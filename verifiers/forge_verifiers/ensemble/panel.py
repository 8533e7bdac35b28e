"""Puts trajectories before the verifiers of an ensemble: remembers verdicts, spares calls, counts failures.

In: trajectories. Out: the score matrix [n, m] and who was asked what. Waits for the verifiers, each at most its
deadline in each cost class.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from forge_agents.types import Trajectory
from forge_verifiers.combiners import CombinerReport
from forge_verifiers.core.verifier import COSTS, Scores, State, Verifier, nested_state
from forge_verifiers.ensemble.cache import ScoreCache, content_key
from forge_verifiers.ensemble.cascade import Cascade
from forge_verifiers.judge.calls import Caller, Verdict
from forge_verifiers.report.data import VerifierReport

_LOG = logging.getLogger(__name__)
COUNTS = ("scored", "abstained", "failed", "errors", "timeouts", "cached", "skipped")
"""What is counted per verifier; see `VerifierReport`."""

Bools: TypeAlias = NDArray[np.bool_]
Believe: TypeAlias = Callable[[Scores, Bools], NDArray[np.float64]]
"""Scores [n, m] and who was heard [n, m] to P(correct) [n]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What the verifiers said. n trajectories, m verifiers."""

    scores: Scores
    """float32 [n, m], NaN where there is none."""
    asked: Bools
    """[n, m]; False where a verifier was not asked or its call failed, so that its silence says nothing."""
    verified: Bools
    """[n]; True where everybody was asked whatever the scores, so that the row may be learned from."""


class Panel:
    """The verifiers of one ensemble.

    Args:
        verifiers: Who judges.
        caller: Calls them.
        cascade: When dearer ones are spared; None asks everybody about everything.
        cache_rows: Verdicts remembered, see `ScoreCache`. Of verifiers that cost a model or more, look at one
            trajectory at a time and learn nothing.
    """

    def __init__(self, verifiers: Sequence[Verifier], caller: Caller, *, cascade: Cascade | None, cache_rows: int):
        self.verifiers = tuple(verifiers)
        classes = [[k for k, v in enumerate(verifiers) if v.cost == cost] for cost in COSTS]
        self._stages = [members for members in classes if members]
        self.cascade = cascade if len(self._stages) > 1 else None
        self.counts = np.zeros((len(COUNTS), len(verifiers)), np.int64)
        self.last_errors = [""] * len(verifiers)
        self._caller, self._cache, self._draws = caller, ScoreCache(cache_rows), 0
        self._cached = [
            v.cost != "cheap" and not getattr(v, "sees_groups", False) and not nested_state({"": v}) for v in verifiers
        ]

    def ask(
        self,
        trajectories: Sequence[Trajectory],
        groups: NDArray[np.intp],
        *,
        believe: Believe | None = None,
        verify: bool = True,
    ) -> Answers:
        """Everybody's scores, or with `believe` and a cascade those that are needed.

        Args:
            trajectories: n of them, at least one.
            groups: The group of each, int [n] from 0.
            believe: P(correct) given what was heard so far; None asks everybody.
            verify: Whether some groups are drawn for the cascade's fully judged sample.

        Raises:
            ScoreError: a verifier broke the contract.
        """
        n, m = len(trajectories), len(self.verifiers)
        scores, asked = np.full((n, m), math.nan, np.float32), np.zeros((n, m), bool)
        keys = [content_key(t) for t in trajectories] if self._cache.max_rows and any(self._cached) else []
        if believe is None or self.cascade is None:
            everybody = {k: np.arange(n) for k in range(m)}
            self._hear(everybody, trajectories, keys, scores, asked)
            return Answers(scores=scores, asked=asked, verified=np.ones(n, bool))
        verified = np.zeros(n, bool)
        if verify:
            verified = self.cascade.verified(groups, self._draws)
            self._draws += 1
        undecided = np.ones(n, bool)
        for stage in self._stages:
            if asked.any():
                belief = np.where(asked.any(axis=1), believe(scores, asked), math.nan)
                undecided &= self.cascade.open(belief)
            wanted = {k: self._rows(k, undecided | verified, groups) for k in stage}
            self._hear(wanted, trajectories, keys, scores, asked)
        return Answers(scores=scores, asked=asked, verified=verified)

    def report(self, fitted: CombinerReport | None, families: Sequence[str | None]) -> tuple[VerifierReport, ...]:
        """Counts and failures of every verifier and what the combiner believes of it; NaN without a fit."""
        tpr = fpr = weight = np.full(len(self.verifiers), math.nan)
        balance = math.nan
        if fitted is not None:
            tpr, fpr, weight, balance = fitted.tpr, fitted.fpr, fitted.weight, fitted.class_balance
        accuracy = balance * tpr + (1 - balance) * (1 - fpr)
        return tuple(
            VerifierReport(
                name=v.name,
                family=families[k],
                cost=v.cost,
                accuracy=float(accuracy[k]),
                tpr=float(tpr[k]),
                fpr=float(fpr[k]),
                weight=float(weight[k]),
                last_error=self.last_errors[k],
                note=str(getattr(v, "unread", "")),
                **dict(zip(COUNTS, self.counts[:, k].tolist(), strict=True)),
            )
            for k, v in enumerate(self.verifiers)
        )

    def state_dict(self) -> State:
        """Counts, failures, remembered verdicts and the place in the cascade's draws."""
        return {
            "counts": self.counts.copy(),
            "last_errors": np.array(self.last_errors),
            "draws": np.array(self._draws),
            **{f"cache/{key}": value for key, value in self._cache.state_dict().items()},
        }

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restores what `state_dict` returned."""
        self.counts = np.array(state["counts"], np.int64)
        self.last_errors = [str(text) for text in state["last_errors"].tolist()]
        self._draws = int(state["draws"])
        self._cache.load_state_dict({key[6:]: value for key, value in state.items() if key.startswith("cache/")})

    def _rows(self, k: int, wanted: Bools, groups: NDArray[np.intp]) -> NDArray[np.intp]:
        """The rows that verifier k gets: whole groups where it compares siblings."""
        if getattr(self.verifiers[k], "sees_groups", False):
            wanted = np.isin(groups, groups[wanted])
        return np.flatnonzero(wanted)

    def _hear(
        self,
        wanted: Mapping[int, NDArray[np.intp]],
        trajectories: Sequence[Trajectory],
        keys: Sequence[bytes],
        scores: Scores,
        asked: Bools,
    ) -> None:
        """Fills `scores` and `asked` with the verdicts on the wanted rows, remembered ones first."""
        known: dict[int, dict[bytes, float]] = {}
        new = {k: rows.tolist() for k, rows in wanted.items()}
        for k, rows in wanted.items():
            if keys and self._cached[k]:
                new[k], known[k] = self._remembered(k, rows.tolist(), keys)
        verdicts = self._caller.ask({k: [trajectories[at] for at in rows] for k, rows in new.items() if rows})
        for k, rows in wanted.items():
            verdict = verdicts.get(k, _NOTHING)
            scores[new[k], k] = verdict.scores
            asked[new[k], k] = [row not in verdict.failed for row in range(len(new[k]))]
            if k in known:
                for row, (at, score) in enumerate(zip(new[k], verdict.scores.tolist(), strict=True)):
                    self._cache.put(k, keys[at], score)
                    if row not in verdict.failed:
                        known[k][keys[at]] = score
                scores[rows, k] = [known[k].get(keys[at], math.nan) for at in rows]
                asked[rows, k] = [keys[at] in known[k] for at in rows]
            self._count(k, verdict, scores[rows, k], asked[rows, k], new=len(new[k]), n=len(trajectories))

    def _remembered(self, k: int, rows: Sequence[int], keys: Sequence[bytes]) -> tuple[list[int], dict[bytes, float]]:
        """One row for each content that verifier k has not judged yet, and its scores of the others."""
        found = {key: self._cache.get(k, key) for key in {keys[at] for at in rows}}
        first = {keys[at]: at for at in reversed(rows) if found[keys[at]] is None}
        return sorted(first.values()), {key: score for key, score in found.items() if score is not None}

    def _count(self, k: int, verdict: Verdict, scores: Scores, heard: Bools, *, new: int, n: int) -> None:
        """Adds one call on `n` rows: the scores of the wanted ones, `new` of which were asked about, and who failed."""
        silent, lost = int(np.isnan(scores[heard]).sum()), int((~heard).sum())
        ended = (verdict.failure == "error", verdict.failure == "timeout")
        rest = (len(scores) - new, n - len(scores))
        self.counts[:, k] += (len(scores) - silent - lost, silent, lost, *ended, *rest)
        if verdict.failed:
            self.last_errors[k] = next(iter(verdict.failed.values()))
            name, answers = self.verifiers[k].name, f"{len(verdict.failed)} of {new} answers"
            _LOG.warning("verifier %r fails on %s: %s", name, answers, self.last_errors[k])


_NOTHING = Verdict(scores=np.empty(0, np.float32))
