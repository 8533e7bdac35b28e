"""`SelfConsistency`: agreement with the majority answer of the group."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from forge_agents.types import Trajectory
from forge_verifiers.core.functions import grade_each
from forge_verifiers.core.verifier import Assessment, Composable, Cost, Scores, group_ids, logged_scores
from forge_verifiers.rules.answers import fold, last_action, parse_answer
from forge_verifiers.rules.choices import choice_letter, chosen_letter
from forge_verifiers.rules.maths.equal import equal_answers
from forge_verifiers.rules.maths.quantity import literal

_MAX_COMPARED = 16
"""Number of more frequent answers that each answer is compared with, to limit the cost of groups without agreement."""


@dataclass(frozen=True, kw_only=True)
class SelfConsistency(Composable):
    """Agreement with the majority answer of the group (Wang et al., arXiv 2203.11171).

    A group shares environment, seed and agent within one call. The most frequent answer scores 1, others 0. k answers
    that tie score 1 / k. Empty answers score 0 and do not vote. A group of one, or without any answer, gets NaN.
    """

    sees_groups = True
    name: str = "self_consistency"
    """Name in reports."""
    family: str | None = None
    """Label of verifiers that share a cause of error."""
    cost: Cost = "cheap"
    """Cost class."""
    graded: bool = False
    """True if the score is the fraction of the group with the same answer instead of 0 or 1."""
    extract: Callable[[Trajectory], str | None] | None = None
    """Returns the answer. By default the final answer of the last action, see `answers`."""

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """Agreement with the majority, float32 [n]. Failures are logged."""
        return logged_scores(self, trajectories)

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """Agreement with the majority, and failures. An answer that cannot be extracted gets NaN and does not vote."""
        extracted = grade_each(self.extracted, trajectories)
        answers: Sequence[str | None] = extracted.values
        members: defaultdict[int, list[int]] = defaultdict(list)
        for row, group in enumerate(group_ids(trajectories).tolist()):
            members[group].append(row)
        scores = np.full(len(answers), math.nan, np.float32)
        rows_of = [rows for rows in members.values() if len(rows) > 1 and any(answers[row] for row in rows)]
        groups = [Counter(answer for row in rows if (answer := answers[row])) for rows in rows_of]
        equal = _equal_votes(groups) if self.extract is None else [{} for _ in groups]
        for rows, votes, same in zip(rows_of, groups, equal, strict=True):
            for answer, other in same.items():
                votes[other] += votes.pop(answer)
            most = max(votes.values())  # arg max over answers of the number of samples, arXiv 2203.11171
            tied = sum(count == most for count in votes.values())
            for row in rows:
                answer = answers[row] or ""
                count = votes.get(same.get(answer, answer), 0)
                scores[row] = count / len(rows) if self.graded else (count == most) / tied
        scores[list(extracted.failed)] = math.nan
        return Assessment(scores=scores, failed=extracted.failed)

    def extracted(self, trajectory: Trajectory) -> str | None:
        """The answer of a trajectory. "42", "42.0" and "It is 42." are the same. "$42" and "84/2" are merged later."""
        if self.extract is not None:
            return self.extract(trajectory)
        text = last_action(trajectory)
        if text is None:
            return None
        answer = parse_answer(text)
        if choice_letter(answer.value):
            return chosen_letter(text)
        if answer.source == "fallback":
            return fold(answer.raw)
        digits = literal(answer.value)
        if digits is None:
            return fold(answer.value)
        return f"{float(digits):.15g}" if len(digits) < 16 else digits


def _equal_votes(groups: Sequence[Counter[str]]) -> list[dict[str, str]]:
    """For each group, a map from answers to a more frequent answer that is mathematically equal."""
    orders = [sorted(votes, key=lambda answer: (-votes[answer], answer)) for votes in groups]
    pairs = [
        (answer, other)
        for order in orders
        for rank, answer in enumerate(order)
        for other in order[: min(rank, _MAX_COMPARED)]
    ]
    verdicts = equal_answers(dict.fromkeys(pairs))
    equal_answers_of: list[dict[str, str]] = []
    for order in orders:
        same: dict[str, str] = {}
        distinct: list[str] = []
        for answer in order:
            equal = next((other for other in distinct[:_MAX_COMPARED] if verdicts.get((answer, other))), None)
            if equal is None:
                distinct.append(answer)
            else:
                same[answer] = equal
        equal_answers_of.append(same)
    return equal_answers_of
