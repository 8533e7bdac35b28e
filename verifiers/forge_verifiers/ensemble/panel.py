"""Calls the verifiers of an ensemble: timeouts and concurrency, a cascade by cost, a score cache, failure counts."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import pickle
import queue
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from forge_agents import states
from forge_agents.display import printable
from forge_agents.errors import USER_ERRORS
from forge_agents.types import Trajectory, Turn
from forge_verifiers.combiners import CombinerReport
from forge_verifiers.core.functions import describe_error
from forge_verifiers.core.verifier import (
    COSTS,
    Assessment,
    Cost,
    ScoreError,
    Scores,
    State,
    Verifier,
    assessed,
    max_duration_s,
    nested_state,
    state_under,
)
from forge_verifiers.report.report import Evidence, VerifierReport

_LOG = logging.getLogger(__name__)
_DIGEST_BYTES = 16
_SAMPLING = {"prompt_ids", "response_ids", "logprobs", "versions", "generate_s"}
_TURN_FIELDS = tuple(entry.name for entry in fields(Turn) if entry.name not in _SAMPLING | {"info", "notes"})
_TRAJECTORY_FIELDS = tuple(entry.name for entry in fields(Trajectory) if entry.name not in {"info", "turns"})
COUNTS = ("scored", "abstained", "failed", "errors", "timeouts", "cached", "skipped")
"""Counters per verifier. See `VerifierReport`."""
CONCURRENCY: Mapping[Cost, int] = {"cheap": 1, "model": 4, "expensive": 8}
"""Verifiers of a cost class that run at the same time. Pure Python shares one lock, the others mostly wait."""

Bools: TypeAlias = NDArray[np.bool_]
PosteriorFunction: TypeAlias = Callable[[Scores, Bools], NDArray[np.float64]]
"""P(correct) [n] from scores [n, m] and the mask [n, m] of queried verifiers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cascade:
    """Calls the next, more expensive cost class only for rows that the cheaper verifiers leave undecided.

    Skipped scores are missing because of other scores, not at random: judges that see only hard cases look worse than
    they are. Therefore a random sample of whole groups is scored by all verifiers, and the ensemble learns from this
    sample alone. All verifiers are called for every row until `warm_up_rows` rows are learned. Verifiers of a single
    cost class are refused.
    """

    undecided: tuple[float, float] = (0.1, 0.9)
    """A row is undecided while its P(correct) lies strictly between these two."""
    verified_share: float = 0.2
    """Fraction of groups that all verifiers score, in (0, 1]."""
    warm_up_rows: int = 256
    """Number of fully scored rows before the first call is skipped."""
    seed: int = 0
    """Random seed of the sample of groups."""

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
        """The rows [n] of the groups that all verifiers score. `draw` is the number of the sample within the run."""
        rng = np.random.default_rng([self.seed, draw])
        return np.asarray(rng.random(int(groups.max()) + 1)[groups] < self.verified_share)

    def open(self, posterior: NDArray[np.float64]) -> Bools:
        """The rows [n] that the next cost class scores, including NaN."""
        low, high = self.undecided
        return ~((posterior <= low) | (posterior >= high))


def content_key(trajectory: Trajectory) -> bytes:
    """A 16-byte hash of all that a verifier may read: of tokens the number, not ids, log-probabilities and times."""
    content = {name: getattr(trajectory, name) for name in _TRAJECTORY_FIELDS}
    content |= {"info": dict(trajectory.info), "turns": [_turn_content(turn) for turn in trajectory.turns]}
    try:
        text = json.dumps(content, sort_keys=True, default=_content_of)
    except TypeError:  # the info of a trajectory that no environment made may have keys of several types
        text = _content_of(content)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()


def _turn_content(turn: Turn) -> dict[str, Any]:
    content = {name: getattr(turn, name) for name in _TURN_FIELDS}
    tokens = len(turn.prompt_ids), len(turn.response_ids)
    notes = None if turn.notes is None else _turn_content(turn.notes)
    return content | {"info": dict(turn.info), "tokens": tokens, "notes": notes}


def _content_of(value: Any) -> str:
    """Content of an object that is not of JSON's types. The repr of a large array leaves most numbers out."""
    try:
        return pickle.dumps(value).hex()
    except Exception:  # noqa: BLE001  # objects of users may refuse in any way
        return repr(value)


class ScoreCache:
    """LRU cache of up to `max_rows` scores by content. Abstentions are not cached, because they may be temporary."""

    def __init__(self, max_rows: int) -> None:
        if max_rows < 0:
            raise ValueError(f"cache_rows={max_rows} must be at least 0. 0 disables the cache")
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
        """Store a score unless it is NaN."""
        if np.isnan(score) or not self.max_rows:
            return
        self._scores[verifier, key] = score
        self._scores.move_to_end((verifier, key))
        if len(self._scores) > self.max_rows:
            self._scores.popitem(last=False)

    def forget(self, verifiers: Collection[int]) -> None:
        """Remove the scores of verifiers by number."""
        for entry in [entry for entry in self._scores if entry[0] in verifiers]:
            del self._scores[entry]

    def state_dict(self) -> State:
        """All entries, least recently used first."""
        keys = b"".join(key for _, key in self._scores)
        return {
            "verifiers": np.array([verifier for verifier, _ in self._scores], np.int64),
            "keys": np.frombuffer(keys, np.uint8).reshape(-1, _DIGEST_BYTES).copy(),
            "scores": np.array(list(self._scores.values()), np.float32),
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore `state_dict`, at most `max_rows` entries."""
        scores = states.numbers(state, "scores", -1, low=0.0, high=1.0)
        verifiers = states.whole(state, "verifiers", len(scores))
        keys = states.whole(state, "keys", len(scores), _DIGEST_BYTES, high=255).astype(np.uint8)
        self._scores.clear()
        for verifier, key, score in zip(verifiers.tolist(), keys, scores.tolist(), strict=True):
            self.put(verifier, key.tobytes(), score)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """Result of one call of one verifier."""

    scores: Scores
    """float32 [n]. All NaN if the whole call failed."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """Error by failed row, see `Assessment.failed`. All rows if the whole call failed."""
    ungraded: Collection[int] = ()
    """`Assessment.ungraded`."""
    failure: Literal["", "error", "timeout"] = ""
    """Failure of the whole call."""


class _Call(threading.Thread):
    """A call in its own daemon thread: Python cannot stop a thread that hangs, but can stop waiting for it."""

    def __init__(
        self, k: int, verifier: Verifier, trajectories: Sequence[Trajectory], ended: queue.Queue[int], timeout_s: float
    ) -> None:
        super().__init__(name=f"verifier {verifier.name}", daemon=True)
        self.k, self.verifier, self.trajectories, self._ended = k, verifier, trajectories, ended
        self.result: Assessment | None = None
        self.error: BaseException | None = None
        self.timeout_s, self.deadline = timeout_s, math.inf

    def run(self) -> None:
        try:
            self.result = assessed(self.verifier, self.trajectories)
        except USER_ERRORS as error:  # counted as a failure of the verifier
            self.error = error
        self._ended.put(self.k)


class Caller:
    """Calls verifiers with timeouts and remembers which of them hang.

    Each verifier receives all its trajectories in one call. At most `CONCURRENCY` verifiers of a cost class run at the
    same time, and cost classes run in parallel. A call that exceeds its timeout frees its slot but cannot be stopped.
    Its verifier is skipped while the call still runs. A verifier with limits (`Composable.max_duration_s`) gets these
    instead of `timeout_s`: an earlier timeout would lose all its answers because of a single late one.
    """

    def __init__(self, verifiers: Sequence[Verifier], *, timeout_s: float) -> None:
        self.verifiers, self.timeout_s = tuple(verifiers), timeout_s
        self._hanging: dict[int, _Call] = {}

    def call(self, rows: Mapping[int, Sequence[Trajectory]]) -> dict[int, CallResult]:
        """Score trajectories by verifier number. Raises ScoreError if a verifier broke its contract."""
        self._hanging = {k: call for k, call in self._hanging.items() if call.is_alive()}
        ended: queue.Queue[int] = queue.Queue()
        waiting = [
            _Call(k, self.verifiers[k], each, ended, max_duration_s(self.verifiers[k], each, self.timeout_s))
            for k, each in rows.items()
            if k not in self._hanging
        ]
        calls = {call.k: call for call in waiting}
        running: dict[int, _Call] = {}
        while waiting or running:
            waiting = self._start(waiting, running)
            wait_s = min(call.deadline for call in running.values()) - time.monotonic()
            try:
                running.pop(ended.get(timeout=max(0.0, wait_s)), None)
            except queue.Empty:
                late = [k for k, call in running.items() if call.deadline <= time.monotonic()]
                self._hanging |= {k: running.pop(k) for k in late}
        return {k: self._result(calls.get(k), len(each)) for k, each in rows.items()}

    def _start(self, waiting: Sequence[_Call], running: dict[int, _Call]) -> list[_Call]:
        """Start as many calls as the limits allow and return the rest."""
        busy = Counter(call.verifier.cost for call in running.values())
        rest = []
        for call in waiting:
            cost = call.verifier.cost
            if busy[cost] >= CONCURRENCY[cost]:
                rest.append(call)
                continue
            busy[cost] += 1
            call.deadline = time.monotonic() + call.timeout_s
            running[call.k] = call
            call.start()
        return rest

    def _result(self, call: _Call | None, n: int) -> CallResult:
        if call is None:
            return _failed_call(n, "timeout", "skipped: an earlier call still hangs")
        if self._hanging.get(call.k) is call:
            return _failed_call(n, "timeout", f"no scores after {call.timeout_s:g} s")
        if isinstance(call.error, ScoreError):
            raise call.error
        if call.result is None:
            return _failed_call(n, "error", describe_error(call.error) if call.error else "no scores")
        return CallResult(scores=call.result.scores, failed=call.result.failed, ungraded=call.result.ungraded)


def _failed_call(n: int, failure: Literal["error", "timeout"], reason: str) -> CallResult:
    scores = np.full(n, math.nan, np.float32)
    return CallResult(scores=scores, failed=dict.fromkeys(range(n), reason), failure=failure)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreMatrix:
    """Scores of n trajectories by m verifiers."""

    scores: Scores
    """float32 [n, m], NaN where missing."""
    queried: Bools
    """[n, m]. False where a verifier was not called or failed, so that its missing score is no evidence."""
    verified: Bools
    """[n], True for rows that all verifiers were to score, so that the ensemble may learn from them."""
    ungraded: Bools
    """[n], True for rows whose text confused a verifier, see `Assessment.ungraded`."""


class Panel:
    """Scores trajectories by the verifiers of one ensemble, with its `Cascade` and the timeout of its `Caller`.

    A `ScoreCache` of `cache_rows` holds scores of model and expensive verifiers that score each trajectory by itself
    and have no state.
    """

    def __init__(self, verifiers: Sequence[Verifier], *, cascade: Cascade | None, cache_rows: int, timeout_s: float):
        self.verifiers = tuple(verifiers)
        classes = [[k for k, v in enumerate(verifiers) if v.cost == cost] for cost in COSTS]
        self._stages = [members for members in classes if members]
        if cascade is not None and len(self._stages) == 1:
            raise ValueError(
                f"cascade has no effect: all verifiers have cost={verifiers[0].cost!r}. Leave it out, or give those "
                f"that are to be called less another cost ({', '.join(COSTS)})"
            )
        self.cascade = cascade
        self.counts = np.zeros((len(COUNTS), len(verifiers)), np.int64)
        self.last_errors = [""] * len(verifiers)
        self._caller, self._cache, self._draws = Caller(verifiers, timeout_s=timeout_s), ScoreCache(cache_rows), 0
        self._cached = [
            v.cost != "cheap" and not getattr(v, "sees_groups", False) and not nested_state({"": v}) for v in verifiers
        ]

    def score(
        self,
        trajectories: Sequence[Trajectory],
        groups: NDArray[np.intp],
        *,
        posterior_of: PosteriorFunction | None = None,
        verify: bool = True,
    ) -> ScoreMatrix:
        """All scores of at least one trajectory. Raises ScoreError if a verifier broke its contract.

        With a cascade and `posterior_of`, P(correct) given the scores so far, only the scores that are needed. With
        `verify`, all verifiers score a sample of the `groups`, int [n] from 0.
        """
        n, m = len(trajectories), len(self.verifiers)
        scores, queried = np.full((n, m), math.nan, np.float32), np.zeros((n, m), bool)
        verified = np.ones(n, bool)
        matrix = ScoreMatrix(scores=scores, queried=queried, verified=verified, ungraded=np.zeros(n, bool))
        keys = [content_key(t) for t in trajectories] if self._cache.max_rows and any(self._cached) else []
        if posterior_of is None or self.cascade is None:
            self._fill({k: np.arange(n) for k in range(m)}, trajectories, keys, matrix)
            return matrix
        verified[:] = False
        if verify:
            verified[:] = self.cascade.verified(groups, self._draws)
            self._draws += 1
        undecided = np.ones(n, bool)
        for stage in self._stages:
            if queried.any():
                posterior = np.where(queried.any(axis=1), posterior_of(scores, queried), math.nan)
                undecided &= self.cascade.open(posterior)
            rows_of = {}
            for k in stage:
                rows = undecided | verified
                if getattr(self.verifiers[k], "sees_groups", False):
                    rows = np.isin(groups, groups[rows])  # a verifier that compares needs whole groups
                rows_of[k] = np.flatnonzero(rows)
            self._fill(rows_of, trajectories, keys, matrix)
        return matrix

    def report(
        self, fitted: CombinerReport | None, families: Sequence[str | None], evidence: Evidence | None
    ) -> tuple[VerifierReport, ...]:
        """Counters, last failures and the combiner's estimates of every verifier, or NaN before the first fit."""
        unknown, balance = np.full(len(self.verifiers), math.nan), math.nan
        if fitted is not None:
            balance = fitted.class_balance
        names = ("tpr", "fpr", "weight", "tpr_error", "fpr_error", "weight_error")
        rates: dict[str, Any] = {name: getattr(fitted, name, unknown) for name in names}
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

    def forget(self, verifiers: Collection[int]) -> None:
        """Remove the cached scores of verifiers by number."""
        self._cache.forget(verifiers)

    def state_dict(self) -> State:
        """Counters, last failures, the cache and the number of samples drawn by the cascade."""
        return {
            "counts": self.counts.copy(),
            "last_errors": np.array(self.last_errors),
            "draws": np.array(self._draws),
            **{f"cache/{key}": value for key, value in self._cache.state_dict().items()},
        }

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore `state_dict`."""
        self.counts = states.whole(state, "counts", *self.counts.shape)
        self.last_errors = states.texts(state, "last_errors", len(self.last_errors))
        self._draws = int(states.whole(state, "draws"))
        self._cache.load_state_dict(state_under("cache/", state))

    def _fill(
        self,
        rows_of: Mapping[int, NDArray[np.intp]],
        trajectories: Sequence[Trajectory],
        keys: Sequence[bytes],
        matrix: ScoreMatrix,
    ) -> None:
        """Fill the rows of each verifier in `matrix`, from the cache where possible."""
        scores, queried, ungraded = matrix.scores, matrix.queried, matrix.ungraded
        cached: dict[int, dict[bytes, float]] = {}
        new = {k: rows.tolist() for k, rows in rows_of.items()}
        for k, rows in rows_of.items():
            if keys and self._cached[k]:
                new[k], cached[k] = self._look_up(k, rows.tolist(), keys)
        results = self._caller.call({k: [trajectories[row] for row in rows] for k, rows in new.items() if rows})
        for k, rows in rows_of.items():
            result = results.get(k, _EMPTY)
            scores[new[k], k] = result.scores
            queried[new[k], k] = [index not in result.failed for index in range(len(new[k]))]
            confused = [new[k][index] for index in result.ungraded]
            ungraded[confused] = True
            if k in cached:
                for index, (row, score) in enumerate(zip(new[k], result.scores.tolist(), strict=True)):
                    self._cache.put(k, keys[row], score)
                    if index not in result.failed:
                        cached[k][keys[row]] = score
                scores[rows, k] = [cached[k].get(keys[row], math.nan) for row in rows]
                queried[rows, k] = [keys[row] in cached[k] for row in rows]
                contents = {keys[row] for row in confused}
                ungraded[[row for row in rows if keys[row] in contents]] = True
            self._count(k, result, scores[rows, k], queried[rows, k], new=len(new[k]), n=len(trajectories))

    def _look_up(self, k: int, rows: Sequence[int], keys: Sequence[bytes]) -> tuple[list[int], dict[bytes, float]]:
        """A row for each content that is not in the cache of verifier k, and the cached scores of the others."""
        scores = {key: self._cache.get(k, key) for key in dict.fromkeys(keys[row] for row in rows)}
        first = {keys[row]: row for row in reversed(rows) if scores[keys[row]] is None}
        return sorted(first.values()), {key: score for key, score in scores.items() if score is not None}

    def _count(self, k: int, result: CallResult, scores: Scores, queried: Bools, *, new: int, n: int) -> None:
        """Count the scores of one call. `new` of them were computed, and `n` is the number of all trajectories."""
        abstained, failed = int(np.isnan(scores[queried]).sum()), int((~queried).sum())
        failures = (result.failure == "error", result.failure == "timeout")
        saved = (len(scores) - new, n - len(scores))
        self.counts[:, k] += (len(scores) - abstained - failed, abstained, failed, *failures, *saved)
        if result.failed:
            self.last_errors[k] = next(iter(result.failed.values()))
            name, number = self.verifiers[k].name, f"{len(result.failed)} of {new} answers"
            _LOG.warning("verifier %r fails on %s: %s", name, number, printable(self.last_errors[k]))


_EMPTY = CallResult(scores=np.empty(0, np.float32))
