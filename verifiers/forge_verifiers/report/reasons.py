"""Explanations for a report: reasons for low weights, and the evidence for which responses count as correct.

Each statement is backed by an interval. If the data are not sufficient, the statement says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_verifiers.report.report import Evidence, VerifierReport, interval

_COPY = 0.98
"""Correlation from which two verifiers count as copies."""
_SMALL, _FEW_ROWS = 0.1, 64
"""A small weight or TPR - FPR, and a small number of rows."""
_CLEAR_MAJORITY = 1.5
"""Ratio of better to worse independent verifiers from which the worse ones are called worse than chance."""
_MIN_LABELS = 3
"""Number of labels from which they, instead of the majority of the verifiers, decide which side is correct."""


def with_reasons(
    rows: Sequence[VerifierReport],
    evidence: Evidence | None,
    clusters: NDArray[np.intp],
    *,
    has_reference: bool = False,
) -> tuple[VerifierReport, ...]:
    """Add the number of score rows, and the reason of a low weight, to each row [m].

    Without labels or anchors (`has_reference`), a verifier is called worse than chance only if the better ones clearly
    outnumber the worse ones. `clusters` [m] are those of `CombinerReport`.
    """
    better, worse = ([k for k, row in enumerate(rows) if row.side == side] for side in (1, -1))
    votes = [independent_votes(rows, evidence, side) for side in (better, worse)]
    clear = has_reference or (len(better) > len(worse) and votes[0] >= _CLEAR_MAJORITY * votes[1])
    correlation = np.nan_to_num(evidence.correlation()) if evidence is not None else np.zeros((len(rows),) * 2)
    explained = []
    for k, row in enumerate(rows):
        scores = np.empty(0) if evidence is None else evidence.scores[~np.isnan(evidence.scores[:, k]), k]
        in_cluster = clusters[k] != 0 and not has_reference
        opponents = [other.name for j, other in enumerate(rows) if in_cluster and clusters[j] not in (0, clusters[k])]
        if row.side < 0 and not clear:
            opponents = opponents or [rows[j].name for j in better]
        copy = ""
        if evidence is not None:
            copies = [j for j in range(k) if _is_copy(evidence, correlation[k, j], k, j)]
            copy = _copy_text(rows[copies[0]].name, correlation[k, copies[0]], evidence, k, copies[0]) if copies else ""
        reason = _reason(row, scores, copy, opponents, abstention_votes=_abstention_votes(evidence, k))
        if not reason and row.weight < _SMALL:
            reason = "the combiner does not use it"
            if evidence is not None and row.weight > 0 and "0/error_correlation" in evidence.combiner:
                reason = f"its errors correlate with those of others: {1 / row.weight:.0f} of them weigh as one"
        explained.append(dataclasses.replace(row, reason=reason, rows=len(scores)))
    return tuple(explained)


def has_reference(num_labels: int, anchors: Sequence[object]) -> bool:
    """True if labels or anchors decide which responses count as correct."""
    return num_labels >= _MIN_LABELS or bool(anchors)


def independent_votes(rows: Sequence[VerifierReport], evidence: Evidence | None, members: Sequence[int]) -> float:
    """Effective number of independent verifiers among `members`.

    Each counts 1 / (sum of its squared correlations with the members), and at most its weight. Verifiers that agree
    because they are right are discounted like copies: scores alone cannot tell the difference.
    """
    if evidence is None or not len(members):
        return 0.0
    correlation = np.nan_to_num(evidence.correlation())[np.ix_(members, members)]
    np.fill_diagonal(correlation, 1.0)
    weights = np.nan_to_num([rows[k].weight for k in members], nan=1.0)
    return float(np.minimum(1.0 / np.square(correlation).sum(axis=1), weights).sum())


def direction(
    rows: Sequence[VerifierReport],
    evidence: Evidence | None,
    *,
    num_labels: int,
    anchors: Sequence[str],
    constant_anchors: Sequence[str] = (),
) -> list[str]:
    """A sentence on what decides which responses count as correct, or empty if the combiner estimates no rates.

    Scores have two consistent interpretations, each the reverse of the other. Without labels or an anchor, the combiner
    uses the one in which the majority of the verifiers is better than chance. `constant_anchors` give all rows one
    score.
    """
    estimated = [
        k for k, row in enumerate(rows) if not math.isnan(row.tpr - row.fpr + row.difference_error) and row.weight > 0
    ]
    if not estimated:
        return []
    if num_labels >= _MIN_LABELS:
        labels = np.empty(0) if evidence is None else evidence.labels[~np.isnan(evidence.labels)]
        text = f"which responses count as correct follows {num_labels} labels"
        if len(labels) and labels.min() == labels.max():
            text += (
                f". All {len(labels)} of the window are {labels[0]:g}: unless the labeled responses are a random "
                "sample, the estimates are biased. Label both correct and wrong responses"
            )
        return [text]
    if anchors:
        return [f"which responses count as correct follows the anchor {', '.join(anchors)}"]
    missing = "no labels or anchors say which responses are correct"
    if constant_anchors:
        names = ", ".join(constant_anchors)
        missing = f"no labels say which responses are correct, and the anchor {names} scores all of them the same"
    better, worse, unknown = ([k for k in estimated if rows[k].side == side] for side in (1, -1, 0))
    if not better and not worse:
        return [f"{missing}, and the scores do not tell either: no verifier is known to be better or worse than chance"]
    text = (
        f"{missing}: the direction rests on "
        f"{_counted(rows, evidence, better)} better than chance against {_counted(rows, evidence, worse)} worse than "
        "chance"
    )
    if unknown:
        text += f"; for {len(unknown)} the data do not tell which"
    return [text]


def _counted(rows: Sequence[VerifierReport], evidence: Evidence | None, members: Sequence[int]) -> str:
    number = f"{len(members)} verifier{'' if len(members) == 1 else 's'}"
    return f"{number} (worth {independent_votes(rows, evidence, members):.1f} independent ones)" if members else number


def _is_copy(evidence: Evidence, correlation: float, k: int, j: int) -> bool:
    """True if two verifiers correlate above `_COPY`, up to the sign, and not by chance on a few rows."""
    if abs(correlation) <= _COPY:
        return False
    low, _ = _correlation_interval(abs(correlation), _common_rows(evidence, k, j))
    return low > 1 - 5 * (1 - _COPY)


def _copy_text(name: str, correlation: float, evidence: Evidence, k: int, j: int) -> str:
    rows = _common_rows(evidence, k, j)
    low, high = _correlation_interval(abs(correlation), rows)
    relation = "scores almost like" if correlation > 0 else "scores almost the reverse of"
    return f"{relation} {name!r}: correlation {correlation:.2f} [{low:.2f}, {high:.2f}] in size on {rows} common rows"


def _common_rows(evidence: Evidence, k: int, j: int) -> int:
    return int((~np.isnan(evidence.scores[:, [k, j]])).all(axis=1).sum())


def _correlation_interval(correlation: float, rows: int) -> tuple[float, float]:
    """95 % interval of a correlation by Fisher's z transform (Fisher 1921). [-1, 1] on fewer than four rows."""
    if rows < 4:
        return -1.0, 1.0
    z, width = math.atanh(min(correlation, 1 - 1e-9)), 1.96 / math.sqrt(rows - 3)
    if correlation >= 1 - 1e-9:  # equal on all rows: the rule of three bounds the fraction of rows that differ
        return 1.0 - 6.0 / rows, 1.0
    return math.tanh(z - width), math.tanh(z + width)


def _abstention_votes(evidence: Evidence | None, k: int) -> bool:
    """True if the combiner reads an abstention of a one-score verifier as the opposite score."""
    opposite = None if evidence is None else evidence.combiner.get("opposite")
    return opposite is not None and not math.isnan(opposite[k])


def _reason(
    row: VerifierReport, scores: NDArray[Any], copy: str, opponents: Sequence[str], *, abstention_votes: bool
) -> str:
    """The first cause that explains the low weight of a verifier with these scores, or empty for a useful verifier."""
    if not row.scored or (not len(scores) and not math.isnan(row.weight)):
        counts = {"abstained on": row.abstained, "failed on": row.failed, "skipped by a cascade on": row.skipped}
        text = ", ".join(f"{label} {count}" for label, count in counts.items() if count)
        return f"no scores: {text} trajectories" if text else "no scores: never called"
    if len(scores) and scores.min() == scores.max() and not abstention_votes:
        return f"constant: scores {scores[0]:.3g} on all {len(scores)} rows that it answered"
    if copy:
        return f"{copy}{'; the two share one weight' * (row.weight < 0.9)}"
    if row.weight == 0:
        return f"left out by the combiner: it says yes of {np.mean(scores > 0.5):.0%} of the rows"
    return _compared_with_chance(row, len(scores), opponents)


def _compared_with_chance(row: VerifierReport, rows: int, opponents: Sequence[str]) -> str:
    """Comparison of a verifier's rates with chance, or empty if it is better."""
    difference = row.tpr - row.fpr
    if math.isnan(difference):
        return ""
    measured = f"TPR - FPR is {interval(difference, row.difference_error, low=-1.0)} on {rows} rows"
    # The best of many thresholds separates classes of equal size by chance, too: Smirnov 1948.
    chance = max(_SMALL, min(2 * _SMALL, 2.72 / math.sqrt(max(rows, 1))))
    significant = row.side != 0 or (math.isnan(row.difference_error) and difference > 0)
    if significant and difference >= chance:
        return ""
    if opponents:
        decision = "only an anchor or labels can decide which side is right"
        return f"contradicted by {', '.join(opponents)}: {decision}; {measured}"
    if significant and difference <= -chance:
        return f"worse than chance, so the ensemble counts its scores in reverse: {measured}"
    if not math.isnan(row.difference_error) and abs(difference) + 1.96 * row.difference_error < 2 * _SMALL:
        relation = "no better" if not row.side else "hardly better" if difference > 0 else "hardly worse"
        return f"{relation} than chance, according to the others: {measured}"
    if rows < _FEW_ROWS:
        return f"too few rows to distinguish it from chance: {measured}"
    return f"these rows do not distinguish it from chance: {measured}"
