"""The score rows an ensemble learns from: bounded, whole groups, old ones forgotten.

In: scores [n, m] of one call. Out: the rows to fit on. Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Forget = Literal["exponential", "window"]


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
        self.scores = np.concatenate([self.scores, scores[order]])
        self.groups = np.concatenate([self.groups, groups[order] + self._next_group])
        self.labels = np.concatenate([self.labels, labels[order]])
        self.asked = np.concatenate([self.asked, asked[order]])
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
        self.scores, self.groups = self.scores[keep], self.groups[keep]
        self.labels, self.asked = self.labels[keep], self.asked[keep]

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Everything held."""
        return {
            "scores": self.scores.copy(),
            "groups": self.groups.copy(),
            "labels": self.labels.copy(),
            "asked": self.asked.copy(),
            "calls": np.array(self.calls),
            "next_group": np.array(self._next_group),
        }

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restores what `state_dict` returned."""
        self.scores = np.array(state["scores"], np.float32)
        self.groups = np.array(state["groups"], np.int64)
        self.labels = np.array(state["labels"], np.float32)
        self.asked = np.array(state["asked"], bool)
        self.calls, self._next_group = int(state["calls"]), int(state["next_group"])
