"""Equality of mathematical answers, without ever evaluating text as code.

In: trajectories with a gold answer. Out: 1 where the answers are equal, else 0. Waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from forge_agents.types import Trajectory
from forge_verifiers.answers import final_answer, folded, golds, last_action
from forge_verifiers.maths_expression import Node, NotMathsError
from forge_verifiers.maths_parser import MAX_CHARS, Answer, interval, parse_answer, plain_text, solved
from forge_verifiers.maths_units import PERCENT, Unit
from forge_verifiers.maths_values import equal, proportional
from forge_verifiers.verifier import TrajectoryRule


@dataclass(frozen=True, kw_only=True)
class MathEqual(TrajectoryRule):
    r"""The final answer equals the gold answer as mathematics: ``\frac{1}{2}``, ``0.5`` and ``50\%`` are equal.

    Reads LaTeX and plain text: numbers, mixed numbers, fractions, powers, roots, the common functions, variables,
    units, currencies, tuples, intervals and their unions, sets, ratios, matrices, equations and inequalities. Rational
    numbers are compared exactly; expressions at seeded random points, which unequal ones pass with probability near 0
    (Schwartz 1980); equations up to a constant factor, inequalities up to a positive one. A list without brackets is a
    set of answers. A unit or a percent sign that one side leaves out is forgiven, two different ones are not. ``log``
    is the natural one. What cannot be read is compared as text.

    Time is bounded by construction, and every thread may ask: at most 64 values, each of at most 200 symbols, nested at
    most 40 deep, with integers of at most 4,096 bits.
    """

    exact = True
    name: str = "math_equal"
    answer_key: str = "answer"
    """Where the gold answer lies in `Trajectory.info`."""
    tolerance: float = 1e-6
    """Greatest relative difference between decimal or irrational numbers that count as equal."""

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance={self.tolerance} of {self.name!r} must lie between 0 and 1")

    def grade(self, trajectory: Trajectory) -> float | None:
        """1 where they are equal, else 0."""
        text, wanted = last_action(trajectory), golds(trajectory, self.answer_key)
        if text is None or wanted is None:
            return None
        answer = final_answer(text)
        return float(any(maths_equal(answer, final_answer(gold), tolerance=self.tolerance) for gold in wanted))


def maths_equal(answer: str, gold: str, *, tolerance: float = 1e-6) -> bool:
    """Whether two texts state the same mathematical answer. See `MathEqual`."""
    if folded(answer) == folded(gold):
        return True
    if max(len(answer), len(gold)) > MAX_CHARS:
        return False
    return _texts_equal(answer, gold, tolerance)


@lru_cache(maxsize=8192)  # siblings give the same answers again and again
def _texts_equal(answer: str, gold: str, tolerance: float) -> bool:
    text = plain_text(answer)
    if text and text == plain_text(gold):
        return True
    try:
        left, right = parse_answer(answer), parse_answer(gold)
    except NotMathsError:
        return False
    if left.is_words and right.is_words:
        return False
    return _same(_as_asked(left, right), _as_asked(right, left), tolerance)


def _as_asked(answer: Answer, other: Answer) -> Answer:
    """The answer in the form of the other one: ``x = 5`` answers 5, ``x > 7`` an interval."""
    if answer.kind == "=" and (other.kind == "value" or solved(answer) == solved(other) != ""):
        for side, value in (answer.parts, answer.parts[::-1]):
            if side.node is not None and side.node.op == "var":
                return value
    return answer if other.kind in {"<", "<="} and answer.kind in {"<", "<="} else interval(answer)


def _same(left: Answer, right: Answer, tolerance: float) -> bool:
    if left.kind != right.kind or len(left.parts) != len(right.parts):
        return False
    if left.name and right.name and left.name != right.name:
        return False
    if left.node is not None and right.node is not None:
        return _same_value(left, right, tolerance)
    if left.kind in {"=", "!=", "<", "<="}:
        units = [{part.unit for part in side.parts} - {None} for side in (left, right)]
        if all(units) and units[0] != units[1]:
            return False
        sides = _difference(left), _difference(right)
        return proportional(*sides, tolerance, positive=left.kind in {"<", "<="})
    if left.kind in {"set", "union"}:
        rest = list(right.parts)
        for part in left.parts:
            match = next((k for k, other in enumerate(rest) if _same(part, other, tolerance)), None)
            if match is None:
                return False
            del rest[match]
        return True
    return all(_same(a, b, tolerance) for a, b in zip(left.parts, right.parts, strict=True))


def _difference(relation: Answer) -> Node:
    low, high = relation.parts
    assert low.node is not None and high.node is not None  # the parts of a relation are values
    return Node(op="-", args=(low.node, high.node))


def _same_value(left: Answer, right: Answer, tolerance: float) -> bool:
    assert left.node is not None and right.node is not None
    if left.unit is not None and right.unit is not None:
        if left.unit.dimension != right.unit.dimension:
            return False
        return equal(_scaled(left.node, left.unit), _scaled(right.node, right.unit), tolerance)
    if equal(left.node, right.node, tolerance):  # who leaves the unit out means the same one
        return True
    unit = left.unit or right.unit
    if unit != PERCENT:
        return False
    hundredths = [_scaled(side.node, unit) if side.unit else side.node for side in (left, right) if side.node]
    return equal(hundredths[0], hundredths[1], tolerance)


def _scaled(node: Node, unit: Unit) -> Node:
    return Node(op="*", args=(node, Node(op="number", number=unit.factor)))
