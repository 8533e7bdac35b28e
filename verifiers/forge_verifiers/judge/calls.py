"""Asks verifiers side by side, each under a deadline; a failure says nothing and has a cause.

In: verifiers, trajectories. Out: scores or failures. Waits for each verifier, as long as its own limits say, and at
most the ensemble's where it has none.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from forge_agents.types import Trajectory
from forge_verifiers.core.verifier import Assessment, Cost, ScoreError, Scores, Verifier, assessed, longest_s

AT_ONCE: Mapping[Cost, int] = {"cheap": 1, "model": 4, "expensive": 8}
"""Verifiers of a cost class asked at the same time: pure Python shares one lock, the others mostly wait."""


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
            return _lost(n, "error", f"{type(call.error).__name__}: {call.error}")
        return Verdict(scores=call.found.scores, failed=call.found.failed)


def _lost(n: int, failure: Literal["error", "timeout"], why: str) -> Verdict:
    return Verdict(scores=np.full(n, math.nan, np.float32), failed=dict.fromkeys(range(n), why), failure=failure)
