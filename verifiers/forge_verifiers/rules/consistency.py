"""Self-consistency: siblings vote on the answer.

In: trajectories, whole groups of them. Out: who agrees with the majority of its group. Waits for nothing.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from forge_agents.types import Trajectory
from forge_verifiers.core.verifier import Composable, Cost, Scores, group_ids
from forge_verifiers.rules.answers import folded, last_action, stated
from forge_verifiers.rules.choices import choice_letter, chosen_letter
from forge_verifiers.rules.maths.equal import equal_answers
from forge_verifiers.rules.maths.quantity import literal

_MAX_LEADING = 16
"""Answers that each other one is compared with, so that a group of siblings who all differ costs little."""


@dataclass(frozen=True, kw_only=True)
class SelfConsistency(Composable):
    """Agreement with the majority answer of the group (Wang et al., arXiv 2203.11171).

    A group is what shares environment, seed and agent within one call. 1 for the answer given most often, 0 for the
    others; answers that tie for the most get one over their number. Empty answers score 0 and do not vote. A group
    of one, or with no answer at all, gets NaN.
    """

    sees_groups = True
    name: str = "self_consistency"
    """What reports call it."""
    family: str | None = None
    """Verifiers of one family share a cause of error."""
    cost: Cost = "cheap"
    """What a score costs."""
    graded: bool = False
    """Whether the score is the share of siblings with the same answer, instead of 0 or 1."""
    extract: Callable[[Trajectory], str | None] | None = None
    """The answer that votes; by default the final answer of the last action, see `answers`."""

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """Agreement with the majority, float32 [n]."""
        answers = [self.extracted(t) for t in trajectories]
        members: defaultdict[int, list[int]] = defaultdict(list)
        for at, group in enumerate(group_ids(trajectories).tolist()):
            members[group].append(at)
        scores = np.full(len(answers), math.nan, np.float32)
        rows_of = [rows for rows in members.values() if len(rows) > 1 and any(answers[at] for at in rows)]
        groups = [Counter(answer for at in rows if (answer := answers[at])) for rows in rows_of]
        equal = _equal_votes(groups) if self.extract is None else [{} for _ in groups]
        for rows, votes, same in zip(rows_of, groups, equal, strict=True):
            for answer, other in same.items():
                votes[other] += votes.pop(answer)
            most = max(votes.values())  # arg max over answers of how many samples gave it, arXiv 2203.11171
            tied = sum(count == most for count in votes.values())
            for at in rows:
                answer = answers[at] or ""
                count = votes.get(same.get(answer, answer), 0)
                scores[at] = count / len(rows) if self.graded else (count == most) / tied
        return scores

    def extracted(self, trajectory: Trajectory) -> str | None:
        """The answer that votes; "42", "42.0" and "It is 42." are one, and "$42" or "84/2" are counted with them."""
        if self.extract is not None:
            return self.extract(trajectory)
        text = last_action(trajectory)
        if text is None:
            return None
        read = stated(text)
        if choice_letter(read.value):
            return chosen_letter(text)
        if read.how == "found":
            return folded(read.given)
        digits = literal(read.value)
        if digits is None:
            return folded(read.value)
        return f"{float(digits):.15g}" if len(digits) < 16 else digits


def _equal_votes(groups: Sequence[Counter[str]]) -> list[dict[str, str]]:
    """By group, answers that are equal as mathematics to a more frequent one, and that one."""
    orders = [sorted(votes, key=lambda answer: (-votes[answer], answer)) for votes in groups]
    pairs = [
        (answer, other)
        for order in orders
        for at, answer in enumerate(order)
        for other in order[: min(at, _MAX_LEADING)]
    ]
    verdicts = equal_answers(dict.fromkeys(pairs))
    found: list[dict[str, str]] = []
    for order in orders:
        same: dict[str, str] = {}
        leading: list[str] = []
        for answer in order:
            equal = next((other for other in leading[:_MAX_LEADING] if verdicts.get((answer, other))), None)
            if equal is None:
                leading.append(answer)
            else:
                same[answer] = equal
        found.append(same)
    return found
