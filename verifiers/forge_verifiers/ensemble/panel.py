"""Puts trajectories before the verifiers of an ensemble: remembers verdicts, spares calls, counts failures.

In: trajectories. Out: the score matrix [n, m] and who was asked what. Waits for the verifiers, classes side by side:
for each as long as its own limits say, and at most as long as the ensemble allows where it has none.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import queue
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from forge_agents.types import Trajectory
from forge_verifiers.combiners import CombinerReport
from forge_verifiers.core.functions import told
from forge_verifiers.core.verifier import (
    COSTS,
    Assessment,
    Cost,
    ScoreError,
    Scores,
    State,
    Verifier,
    assessed,
    longest_s,
    nested_state,
    under,
)
from forge_verifiers.report.report import Evidence, VerifierReport

_LOG = logging.getLogger(__name__)
_DIGEST_BYTES = 16
COUNTS = ("scored", "abstained", "failed", "errors", "timeouts", "cached", "skipped")
"""What is counted per verifier; see `VerifierReport`."""
AT_ONCE: Mapping[Cost, int] = {"cheap": 1, "model": 4, "expensive": 8}
"""Verifiers of a cost class asked at the same time: pure Python shares one lock, the others mostly wait."""

Bools: TypeAlias = NDArray[np.bool_]
Believe: TypeAlias = Callable[[Scores, Bools], NDArray[np.float64]]
"""Scores [n, m] and who was heard [n, m] to P(correct) [n]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cascade:
    """Asks the next, dearer cost class only about rows that the cheaper ones leave undecided.

    Rows that were skipped are missing because of their scores, so not at random: judges that see only hard cases look
    worse than they are, and their silence looks like a verdict. So whole groups are drawn beforehand in which every
    verifier judges every row, and the ensemble learns from these alone. Until it has learned from `warm_up_rows` rows,
    and where all verifiers are of one cost class, everybody is asked.
    """

    undecided: tuple[float, float] = (0.1, 0.9)
    """A row is open while its P(correct) lies strictly between these two."""
    verified_share: float = 0.2
    """Share of groups, in (0, 1], in which everybody is asked."""
    warm_up_rows: int = 256
    """Fully judged rows before the first call is spared."""
    seed: int = 0
    """Of the draw of groups."""

    def __post_init__(self) -> None:
        low, high = self.undecided
        if not 0 <= low < high <= 1:
            raise ValueError(f"undecided={self.undecided} must be (low, high) with 0 <= low < high <= 1")
        if not 0 < self.verified_share <= 1:
            raise ValueError(
                f"verified_share={self.verified_share} must lie in (0, 1]: nothing can be learned without such groups"
            )
        if self.warm_up_rows < 1:
            raise ValueError(f"warm_up_rows={self.warm_up_rows} must be at least 1")

    def verified(self, groups: NDArray[np.intp], draw: int) -> Bools:
        """The rows [n] of the groups in which everybody is asked; `draw` numbers the draws of a run."""
        rng = np.random.default_rng([self.seed, draw])
        return np.asarray(rng.random(int(groups.max()) + 1)[groups] < self.verified_share)

    def open(self, posterior: NDArray[np.float64]) -> Bools:
        """The rows [n] on which the next cost class is asked; NaN is open."""
        low, high = self.undecided
        return ~((posterior <= low) | (posterior >= high))


def content_key(trajectory: Trajectory) -> bytes:
    """16 bytes that stand for everything in a trajectory that a verifier may read.

    That is the task, the agent, its instructions, what it saw, thought and said, rewards and infos; not tokens,
    log-probabilities, weights versions and timings.
    """
    turns = [
        (t.observation, t.reasoning, t.raw_reasoning, t.action, t.reward, t.terminated, t.truncated, dict(t.info))
        for t in trajectory.turns
    ]
    content = (
        trajectory.env_id,
        trajectory.seed,
        trajectory.agent,
        trajectory.instructions,
        trajectory.initial_reward,
        dict(trajectory.info),
        turns,
    )
    text = json.dumps(content, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()


class ScoreCache:
    """The last `max_rows` verdicts, least recently used out first. Abstentions are not kept: they may be passing.

    Args:
        max_rows: Verdicts held, all verifiers together; 0 holds none.
    """

    def __init__(self, max_rows: int) -> None:
        if max_rows < 0:
            raise ValueError(f"cache_rows={max_rows} must be at least 0; 0 switches the cache off")
        self.max_rows = max_rows
        self._scores: OrderedDict[tuple[int, bytes], float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._scores)

    def get(self, verifier: int, key: bytes) -> float | None:
        """The score that verifier number `verifier` gave to this content, or None."""
        score = self._scores.get((verifier, key))
        if score is not None:
            self._scores.move_to_end((verifier, key))
        return score

    def put(self, verifier: int, key: bytes, score: float) -> None:
        """Keeps a score; NaN is left out."""
        if np.isnan(score) or not self.max_rows:
            return
        self._scores[verifier, key] = score
        self._scores.move_to_end((verifier, key))
        if len(self._scores) > self.max_rows:
            self._scores.popitem(last=False)

    def state_dict(self) -> State:
        """Everything held, oldest use first."""
        keys = b"".join(key for _, key in self._scores)
        return {
            "verifiers": np.array([verifier for verifier, _ in self._scores], np.int64),
            "keys": np.frombuffer(keys, np.uint8).reshape(-1, _DIGEST_BYTES).copy(),
            "scores": np.array(list(self._scores.values()), np.float32),
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restores what `state_dict` returned, at most `max_rows` of it."""
        rows = zip(state["verifiers"].tolist(), state["keys"], state["scores"].tolist(), strict=True)
        self._scores.clear()
        for verifier, key, score in rows:
            self.put(verifier, key.astype(np.uint8).tobytes(), score)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of one call of one verifier."""

    scores: Scores
    """float32 [n]; all NaN after a failure of the whole call."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """Rows that failed, and why; see `Assessment.failed`. All after a failure of the whole call."""
    failure: Literal["", "error", "timeout"] = ""
    """What ended the whole call, if anything did."""


class _Call(threading.Thread):
    """One call, in a thread of its own: Python cannot end a thread that hangs, but can stop waiting for it."""

    def __init__(
        self, k: int, verifier: Verifier, trajectories: Sequence[Trajectory], ended: queue.Queue[int], limit_s: float
    ) -> None:
        super().__init__(name=f"verifier {verifier.name}", daemon=True)
        self.k, self.verifier, self.trajectories, self._ended = k, verifier, trajectories, ended
        self.found: Assessment | None = None
        self.error: Exception | None = None
        self.limit_s, self.deadline = limit_s, math.inf

    def run(self) -> None:
        try:
            self.found = assessed(self.verifier, self.trajectories)
        except Exception as error:  # noqa: BLE001  # whatever a verifier raises is data: it says nothing and is counted
            self.error = error
        self._ended.put(self.k)


class Caller:
    """Calls verifiers and remembers which of them hang.

    Each verifier gets all its trajectories, of every group, in one call. At most `at_once[cost]` verifiers of a cost
    class run at the same time; the classes run side by side. A call that outlived its deadline gives up its place but
    cannot be ended: while it still runs, its verifier is left out.

    Args:
        verifiers: Who may be asked.
        timeout_s: Seconds that one call may take, from its own start, of a verifier without limits of its own. One that
            has some (`Composable.longest_s`) is waited for until these have passed: cut off from outside, it would lose
            all its answers for one that is late.
        at_once: Calls in flight by cost class; classes that are not named keep the default of `AT_ONCE`.

    Raises:
        ValueError: a limit below 1 or an unknown cost class.
    """

    def __init__(
        self, verifiers: Sequence[Verifier], *, timeout_s: float, at_once: Mapping[Cost, int] | None = None
    ) -> None:
        self.verifiers, self.timeout_s = tuple(verifiers), timeout_s
        self.at_once = {**AT_ONCE, **(at_once or {})}
        for cost, limit in self.at_once.items():
            if cost not in AT_ONCE or limit < 1:
                raise ValueError(
                    f"at_once[{cost!r}]={limit}; send at least 1 for any of {', '.join(map(repr, AT_ONCE))}"
                )
        self._hanging: dict[int, _Call] = {}

    def ask(self, asked: Mapping[int, Sequence[Trajectory]]) -> dict[int, Verdict]:
        """One verdict for each verifier asked, by its number.

        Raises:
            ScoreError: a verifier broke the contract (wrong shape, a score outside [0, 1]); names it.
        """
        self._hanging = {k: call for k, call in self._hanging.items() if call.is_alive()}
        ended: queue.Queue[int] = queue.Queue()
        waiting = [
            _Call(k, self.verifiers[k], rows, ended, longest_s(self.verifiers[k], rows, self.timeout_s))
            for k, rows in asked.items()
            if k not in self._hanging
        ]
        calls = {call.k: call for call in waiting}
        running: dict[int, _Call] = {}
        while waiting or running:
            waiting = self._start(waiting, running)
            rest_s = min(call.deadline for call in running.values()) - time.monotonic()
            try:
                running.pop(ended.get(timeout=max(0.0, rest_s)), None)
            except queue.Empty:
                late = [k for k, call in running.items() if call.deadline <= time.monotonic()]
                self._hanging |= {k: running.pop(k) for k in late}
        return {k: self._verdict(calls.get(k), len(rows)) for k, rows in asked.items()}

    def _start(self, waiting: Sequence[_Call], running: dict[int, _Call]) -> list[_Call]:
        """Starts what the limits allow; returns the rest."""
        busy = Counter(call.verifier.cost for call in running.values())
        rest = []
        for call in waiting:
            cost = call.verifier.cost
            if busy[cost] >= self.at_once[cost]:
                rest.append(call)
                continue
            busy[cost] += 1
            call.deadline = time.monotonic() + call.limit_s
            running[call.k] = call
            call.start()
        return rest

    def _verdict(self, call: _Call | None, n: int) -> Verdict:
        if call is None:
            return _lost(n, "timeout", "left out: an earlier call still hangs")
        if self._hanging.get(call.k) is call:
            return _lost(n, "timeout", f"no scores after {call.limit_s:g} s")
        if isinstance(call.error, ScoreError):
            raise call.error
        if call.found is None:
            return _lost(n, "error", told(call.error) if call.error else "no scores")
        return Verdict(scores=call.found.scores, failed=call.found.failed)


def _lost(n: int, failure: Literal["error", "timeout"], why: str) -> Verdict:
    return Verdict(scores=np.full(n, math.nan, np.float32), failed=dict.fromkeys(range(n), why), failure=failure)


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
            wanted = {}
            for k in stage:
                rows = undecided | verified
                if getattr(self.verifiers[k], "sees_groups", False):  # whole groups where it compares siblings
                    rows = np.isin(groups, groups[rows])
                wanted[k] = np.flatnonzero(rows)
            self._hear(wanted, trajectories, keys, scores, asked)
        return Answers(scores=scores, asked=asked, verified=verified)

    def report(
        self, fitted: CombinerReport | None, families: Sequence[str | None], evidence: Evidence | None
    ) -> tuple[VerifierReport, ...]:
        """Counts and failures of every verifier and what the combiner believes of it; NaN without a fit."""
        unknown, balance = np.full(len(self.verifiers), math.nan), math.nan
        if fitted is not None:
            balance = fitted.class_balance
        names = ("tpr", "fpr", "weight", "tpr_error", "fpr_error", "weight_error")
        rates: dict[str, Any] = {name: getattr(fitted, name, unknown) for name in names}  # unknown without a fit
        if evidence is not None and np.isnan(rates["tpr_error"]).all() and not np.isnan(rates["tpr"]).all():
            rates["tpr_error"], rates["fpr_error"] = evidence.rate_errors(rates["tpr"], rates["fpr"])
        rates["accuracy"] = balance * rates["tpr"] + (1 - balance) * (1 - rates["fpr"])
        rates["accuracy_error"] = np.hypot(balance * rates["tpr_error"], (1 - balance) * rates["fpr_error"])
        return tuple(
            VerifierReport(
                name=v.name,
                family=families[k],
                cost=v.cost,
                last_error=self.last_errors[k],
                note=str(getattr(v, "unread", "")),
                **dict(zip(COUNTS, self.counts[:, k].tolist(), strict=True)),
                **{name: values[k].item() for name, values in rates.items()},
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
        self._cache.load_state_dict(under("cache/", state))

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
