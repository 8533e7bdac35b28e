"""What the data support saying of a verifier: why it counts for little, and on how many votes the direction rests.

Every sentence here is backed by an interval. Where the data do not tell, the sentence says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_verifiers.report.report import Evidence, VerifierReport, interval

_COPY, _LITTLE, _FEW_ROWS = 0.98, 0.1, 64
"""Correlation from which on two verifiers score alike; a small weight, or TPR less FPR; a small number of rows."""
_CLEAR_MAJORITY = 1.5
"""How many times as much the better verifiers weigh as the worse ones before these are called worse than chance."""
_LABELS_DECIDE = 3
"""Labels from which on they, and not the majority of the verifiers, decide which side is correct."""


def with_reasons(
    rows: Sequence[VerifierReport], evidence: Evidence | None, camps: NDArray[np.intp], *, settled: bool = False
) -> tuple[VerifierReport, ...]:
    """The rows [m], each with the number of score rows behind it and the reason why it counts for little, if it does.

    Args:
        rows: What is known of each verifier.
        evidence: What the combiner was fitted on; None before.
        camps: [m] See `CombinerReport.camps`.
        settled: Whether labels or anchors say which responses are correct. Without them a verifier is called worse than
            chance only if those that are better clearly outnumber those that are worse, and camps are told.
    """
    better, worse = ([k for k, row in enumerate(rows) if row.side == side] for side in (1, -1))
    votes = [independent_votes(rows, evidence, side) for side in (better, worse)]
    clear = settled or (len(better) > len(worse) and votes[0] >= _CLEAR_MAJORITY * votes[1])
    correlation = np.nan_to_num(evidence.correlation()) if evidence is not None else np.zeros((len(rows),) * 2)
    explained = []
    for k, row in enumerate(rows):
        scores = np.empty(0) if evidence is None else evidence.scores[~np.isnan(evidence.scores[:, k]), k]
        in_camps = camps[k] != 0 and not settled
        against = [other.name for j, other in enumerate(rows) if in_camps and camps[j] not in (0, camps[k])]
        twins = [] if evidence is None else [j for j in range(k) if _alike(evidence, correlation[k, j], k, j)]
        like = [_likeness(rows[j].name, correlation[k, j], evidence, k, j) for j in twins[:1] if evidence is not None]
        if row.side < 0 and not clear:
            against = against or [rows[j].name for j in better]
        reason = _reason(row, scores, like, against, silence_votes=_silence_votes(evidence, k))
        if not reason and row.weight < _LITTLE:
            reason = "the combiner makes no use of it"
            if evidence is not None and "kinship" in evidence.combiner:  # then a weight is a share of common errors
                reason = f"the combiner counts it with others that err alike: {1 / row.weight:.0f} of them weigh as one"
        explained.append(dataclasses.replace(row, reason=reason, rows=len(scores)))
    return tuple(explained)


def is_settled(num_labels: int, anchors: Sequence[object]) -> bool:
    """Whether labels or anchors decide which responses count as correct."""
    return num_labels >= _LABELS_DECIDE or bool(anchors)


def independent_votes(rows: Sequence[VerifierReport], evidence: Evidence | None, members: Sequence[int]) -> float:
    """How many independent verifiers some of them are worth.

    Each counts 1 over the sum of its squared correlations with the members, and at most its weight. Verifiers that
    agree because all are right are discounted as well as copies: scores alone cannot tell the two apart.
    """
    if evidence is None or not len(members):
        return 0.0
    correlation = np.nan_to_num(evidence.correlation())[np.ix_(members, members)]
    np.fill_diagonal(correlation, 1.0)
    weights = np.nan_to_num([rows[k].weight for k in members], nan=1.0)
    return float(np.minimum(1.0 / np.square(correlation).sum(axis=1), weights).sum())


def direction(
    rows: Sequence[VerifierReport], evidence: Evidence | None, *, num_labels: int, anchors: Sequence[str]
) -> list[str]:
    """What decides which responses count as correct, in a sentence; empty where the combiner estimates no rates.

    Scores have two consistent readings, each the reverse of the other. Without labels or an anchor, the combiner takes
    the one in which the verifiers are better than chance by majority.

    Args:
        rows: What is known of each verifier.
        evidence: What the combiner was fitted on; None before.
        num_labels: Labeled rows that the combiner was fitted on.
        anchors: Names of the anchors.
    """
    estimated = [
        k for k, row in enumerate(rows) if not math.isnan(row.tpr - row.fpr + row.edge_error) and row.weight > 0
    ]
    if not estimated:
        return []
    if num_labels >= _LABELS_DECIDE:
        return [f"which responses count as correct follows {num_labels} labels"]
    if anchors:
        return [f"which responses count as correct follows the anchor {', '.join(anchors)}"]
    better, worse, unknown = ([k for k in estimated if rows[k].side == side] for side in (1, -1, 0))
    if not better and not worse:
        nothing = "no labels or anchors say which responses are correct, and the scores do not tell either"
        return [f"{nothing}: none of {len(unknown)} verifiers is known to be better or worse than chance"]
    text = (
        "no labels or anchors say which responses are correct: the direction rests on "
        f"{_counted(rows, evidence, better)} better than chance against {_counted(rows, evidence, worse)} worse than "
        "chance"
    )
    if unknown:
        text += f"; for {len(unknown)} the data do not tell which"
    return [text]


def _counted(rows: Sequence[VerifierReport], evidence: Evidence | None, members: Sequence[int]) -> str:
    number = f"{len(members)} verifier{'' if len(members) == 1 else 's'}"
    return f"{number} (worth {independent_votes(rows, evidence, members):.1f} independent ones)" if members else number


def _alike(evidence: Evidence, correlation: float, k: int, j: int) -> bool:
    """Whether two verifiers' scores correlate above `_COPY`, up to the sign, and not by chance on a few rows."""
    if abs(correlation) <= _COPY:
        return False
    low, _ = _correlation_interval(abs(correlation), _common_rows(evidence, k, j))
    return low > 1 - 5 * (1 - _COPY)


def _likeness(name: str, correlation: float, evidence: Evidence, k: int, j: int) -> str:
    rows = _common_rows(evidence, k, j)
    low, high = _correlation_interval(abs(correlation), rows)
    what = "scores almost like" if correlation > 0 else "scores almost the reverse of"
    return f"{what} {name!r}: correlation {correlation:.2f} [{low:.2f}, {high:.2f}] in size on {rows} common rows"


def _common_rows(evidence: Evidence, k: int, j: int) -> int:
    return int((~np.isnan(evidence.scores[:, [k, j]])).all(axis=1).sum())


def _correlation_interval(correlation: float, rows: int) -> tuple[float, float]:
    """95 % interval of a correlation by Fisher's z transform (Fisher 1921); [-1, 1] on fewer than four rows."""
    if rows < 4:
        return -1.0, 1.0
    z, width = math.atanh(min(correlation, 1 - 1e-9)), 1.96 / math.sqrt(rows - 3)
    if correlation >= 1 - 1e-9:  # equal on all rows: the rule of three bounds the share of rows that differ
        return 1.0 - 6.0 / rows, 1.0
    return math.tanh(z - width), math.tanh(z + width)


def _silence_votes(evidence: Evidence | None, k: int) -> bool:
    """Whether the combiner reads an abstention of a verifier of one score as the opposite score."""
    opposite = None if evidence is None else evidence.combiner.get("opposite")
    return opposite is not None and not math.isnan(opposite[k])


def _reason(
    row: VerifierReport, scores: NDArray[Any], like: Sequence[str], against: Sequence[str], *, silence_votes: bool
) -> str:
    """Why a verifier with these scores counts for little: the first cause that explains it; empty where it counts."""
    if not row.scored or (not len(scores) and not math.isnan(row.weight)):
        fates = {"abstained on": row.abstained, "failed on": row.failed, "spared, by cheaper ones, on": row.skipped}
        what = ", ".join(f"{how} {count}" for how, count in fates.items() if count) or "never asked"
        return f"silent: {what}{' trajectories' * (what != 'never asked')}"
    if len(scores) and scores.min() == scores.max() and not silence_votes:
        return f"constant: scores {scores[0]:.3g} on all {len(scores)} rows that it answered"
    if like:
        return f"{like[0]}{'; the two share one weight' * (row.weight < 0.9)}"
    if row.weight == 0:
        return f"left out by the combiner: it says yes of {np.mean(scores > 0.5):.0%} of the rows"
    return _standing(row, len(scores), against)


def _standing(row: VerifierReport, rows: int, against: Sequence[str]) -> str:
    """What its rates say of a verifier against chance; empty where it is better."""
    edge = row.tpr - row.fpr
    if math.isnan(edge):
        return ""
    measured = f"TPR less FPR is {interval(edge, row.edge_error, low=-1.0)} on {rows} rows"
    # The most telling of many cuts seems to tell something by chance, too: Smirnov 1948, classes of equal size.
    chance = max(_LITTLE, min(2 * _LITTLE, 2.72 / math.sqrt(max(rows, 1))))
    sure = row.side != 0 or (math.isnan(row.edge_error) and edge > 0)
    if sure and edge >= chance:
        return ""
    if against:
        return (
            f"contradicted by {', '.join(against)}: which side is right, only an anchor or labels can tell; {measured}"
        )
    if sure and edge <= -chance:
        return f"worse than chance, so the ensemble counts its scores in reverse: {measured}"
    if not math.isnan(row.edge_error) and abs(edge) + 1.96 * row.edge_error < 2 * _LITTLE:
        return f"no better than chance, as far as the others tell: {measured}"
    if rows < _FEW_ROWS:
        return f"too few rows to tell it from chance: {measured}"
    return f"not told from chance by these rows: {measured}"
