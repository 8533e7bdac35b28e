"""Asks verifiers side by side, each under a deadline; a failure becomes an abstention with a cause.

In: verifiers, trajectories. Out: scores or failures. Waits for each verifier, at most its deadline.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from forge_agents.types import Trajectory
from forge_verifiers.verifier import ScoreError, Scores, Verifier, checked_scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of one call of one verifier."""

    scores: Scores
    """float32 [n]; all NaN after a failure."""
    failure: Literal["", "error", "timeout"] = ""
    message: str = ""
    """The failure in words."""


class _Call(threading.Thread):
    """One call, in a thread of its own: Python cannot end a thread that hangs, but can stop waiting for it."""

    def __init__(self, verifier: Verifier, trajectories: Sequence[Trajectory]) -> None:
        super().__init__(name=f"verifier {verifier.name}", daemon=True)
        self.verifier, self.trajectories = verifier, trajectories
        self.scores: Scores | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.scores = checked_scores(self.verifier, self.trajectories)
        except Exception as error:  # noqa: BLE001  # whatever a verifier raises is data: it abstains and is counted
            self.error = error


class Caller:
    """Calls verifiers and remembers which of them hang.

    Verifiers of cost "model" and "expensive" mostly wait for something else, so they run side by side; cheap ones run
    one after another, meanwhile. While a call that outlived its deadline still runs, its verifier is left out.
    """

    def __init__(self, verifiers: Sequence[Verifier], *, timeout_s: float) -> None:
        self.verifiers, self.timeout_s = tuple(verifiers), timeout_s
        self._hanging: dict[int, _Call] = {}

    def ask(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """One verdict per verifier.

        Raises:
            ScoreError: a verifier broke the contract (wrong shape, a score outside [0, 1]); names it.
        """
        self._hanging = {k: call for k, call in self._hanging.items() if call.is_alive()}
        calls: dict[int, tuple[_Call, float]] = {}
        free = [k for k in range(len(self.verifiers)) if k not in self._hanging]
        for k in sorted(free, key=lambda k: self.verifiers[k].cost == "cheap"):
            call = _Call(self.verifiers[k], trajectories)
            calls[k] = call, time.monotonic() + self.timeout_s
            call.start()
            if self.verifiers[k].cost == "cheap":
                call.join(self.timeout_s)
        for call, deadline in calls.values():
            call.join(max(0.0, deadline - time.monotonic()))
        return [self._verdict(k, calls.get(k), len(trajectories)) for k in range(len(self.verifiers))]

    def _verdict(self, k: int, started: tuple[_Call, float] | None, n: int) -> Verdict:
        silent = np.full(n, math.nan, np.float32)
        if started is None:
            return Verdict(scores=silent, failure="timeout", message="left out: an earlier call still hangs")
        call, _ = started
        if call.is_alive():
            self._hanging[k] = call
            return Verdict(scores=silent, failure="timeout", message=f"no scores after {self.timeout_s:g} s")
        if isinstance(call.error, ScoreError):
            raise call.error
        if call.scores is None:
            return Verdict(scores=silent, failure="error", message=f"{type(call.error).__name__}: {call.error}")
        return Verdict(scores=call.scores)
