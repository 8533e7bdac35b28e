"""Equality of numbers and of mathematical answers, without ever evaluating text as code.

In: trajectories with a gold answer. Out: 1 where the answers are equal, else 0; NaN where the gold answer cannot be
read. Waits for nothing, but for math-verify in a sandbox, at most its deadline, where `MathEqual` cannot read one.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from forge_agents.types import Trajectory
from forge_verifiers.core.verifier import Scores
from forge_verifiers.rules.answers import AnswerRule, Stated, folded, same_text
from forge_verifiers.rules.choices import choice_letter
from forge_verifiers.rules.maths import math_verify
from forge_verifiers.rules.maths.expression import (
    Node,
    NotMathsError,
    decimal_comma,
    equal,
    literal,
    number_of,
    proportional,
    variables,
)
from forge_verifiers.rules.maths.parser import (
    MAX_CHARS,
    PERCENT,
    Answer,
    Unit,
    interval,
    parse_answer,
    plain_text,
    solved,
)

_LOG = logging.getLogger(__name__)


_Number: TypeAlias = tuple[Fraction | float, Unit | None]
_ROUNDING = 1e-6  # a tolerance up to here forgives rounding only, which whole numbers need not


class UnreadGolds:
    """Counts gold answers that a rule could not read, so that its silence has a cause in the report."""

    def __init__(self) -> None:
        self.compared = 0
        """Trajectories that math-verify judged instead."""
        self.abstained = 0
        """Trajectories without a score."""
        self._example = self._reason = ""
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def add(self, name: str, gold: str, *, compared: bool, reason: str = "") -> None:
        """Count a trajectory; the first one is logged."""
        with self._lock:
            first = not self._example
            self.compared, self.abstained = self.compared + compared, self.abstained + (not compared)
            self._example, self._reason = gold[:80], reason or self._reason
        if first:
            _LOG.warning("verifier %r: %s", name, self)

    def __str__(self) -> str:
        if not self._example:
            return ""
        total = self.compared + self.abstained
        why = f" ({self._reason})" if self._reason else ""
        return (
            f"gold answers of {total} trajectories cannot be read, such as {self._example!r}: {self.compared} compared "
            f"by math-verify, {self.abstained} without a score{why}"
        )


@dataclass(frozen=True, kw_only=True)
class Numeric(AnswerRule):
    r"""The final answer is the gold number, however it is written: ``1,234.5``, ``1e3``, ``\frac{1}{2}``, ``10^3``.

    A unit, a currency or a percent sign that one side leaves out is forgiven, as `MathEqual` does. An answer that is no
    single number, such as "3-5" for 5 or "41 or 42", is wrong; a gold answer that is none makes it abstain.
    """

    name: str = "numeric"
    tolerance: float = 1e-6
    """Greatest difference that counts as equal, relative to the gold number, and absolute below 1. Up to 1e-6 it is for
    rounding: two whole numbers must be the same."""
    unread: UnreadGolds = field(default_factory=UnreadGolds, init=False, repr=False, compare=False)
    """Gold answers that are no number."""

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < math.inf:
            raise ValueError(f"tolerance={self.tolerance} of {self.name!r} must be finite and not negative")

    def grade(self, trajectory: Trajectory) -> float | None:
        """1 where they are equal, else 0; None without a gold answer that is a number."""
        if (found := self.read(trajectory)) is None:
            return None
        answer, wanted = found
        numbers = [number for gold in wanted if not _fields(gold) and (number := _number(gold))]
        if not numbers:
            self.unread.add(self.name, wanted[0], compared=False, reason="not a number")
            return None
        said = [_number(part) for part in answer.value.split(" or ")]  # "1/2 or 0.5"
        return float(any(all(one and self._equal(one, number) for one in said) for number in numbers))

    def _equal(self, answer: _Number, gold: _Number) -> bool:
        (a, unit_a), (b, unit_b) = answer, gold
        if unit_a is not None and unit_b is not None:
            return unit_a.dimension == unit_b.dimension and self._close(a * unit_a.factor, b * unit_b.factor)
        if PERCENT in {unit_a, unit_b} and self._close(a / 100 if unit_a else a, b / 100 if unit_b else b):
            return True
        return self._close(a, b)

    def _close(self, a: Fraction | float, b: Fraction | float) -> bool:
        if a == b:
            return True
        if self.tolerance <= _ROUNDING and all(isinstance(x, Fraction) and x.denominator == 1 for x in (a, b)):
            return False
        return abs(float(a) - float(b)) <= self.tolerance * max(1.0, abs(float(b)))


@lru_cache(maxsize=8192)
def _number(text: str) -> _Number | None:
    """A text that is one real number, and its unit; None for anything else."""
    digits = literal(text) or decimal_comma(text)
    if digits is not None:
        return (Fraction(digits), None) if math.isfinite(float(digits)) else None
    try:
        answer = parse_answer(text)
    except NotMathsError:
        return None
    if answer.kind == "=" and (solved(answer) or _names(*answer.parts)):  # x = 5
        answer = answer.parts[1]
    value = number_of(answer.node) if answer.kind == "value" and answer.node is not None else None
    try:
        number = complex(math.nan if value is None else value)
    except OverflowError:
        return None
    if not (math.isfinite(number.real) and number.imag == 0):
        return None
    return (value if isinstance(value, Fraction) else number.real), answer.unit


@dataclass(frozen=True, kw_only=True)
class MathEqual(AnswerRule):
    r"""The final answer equals the gold answer as mathematics: ``\frac{1}{2}``, ``0.5`` and ``50\%`` are equal.

    Reads LaTeX and plain text: numbers, mixed numbers, fractions, powers, roots, the common functions, variables,
    units, currencies, tuples, intervals and their unions, sets, ratios, matrices, equations and inequalities. Rational
    numbers are compared exactly; expressions at seeded random points, which unequal ones pass with probability near 0
    (Schwartz 1980); equations up to a constant factor, inequalities up to a positive one. A list without brackets is a
    set of answers. A unit or a percent sign that one side leaves out is forgiven, two different ones are not. ``log``
    is the natural one. An answer that cannot be read is compared as text.

    A gold answer that cannot be read, a sum with ``\sum`` for instance, is handed to math-verify, where that is
    installed, all of a call together, in a sandbox. Where it is not, or does not decide, the score is NaN and counted.

    Otherwise time is bounded by construction, and every thread may ask: at most 64 values, each of at most 200 symbols,
    nested at most 40 deep, with integers of at most 4,096 bits.
    """

    name: str = "math_equal"
    tolerance: float = 1e-6
    """Greatest relative difference between decimal or irrational numbers that count as equal."""
    fallback_s: float = 20.0
    """Seconds that math-verify may take for one call; 0 = never ask it."""
    unread: UnreadGolds = field(default_factory=UnreadGolds, init=False, repr=False, compare=False)
    """Gold answers that cannot be read here."""

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance={self.tolerance} of {self.name!r} must lie between 0 and 1")
        if not 0 <= self.fallback_s < math.inf:
            raise ValueError(f"fallback_s={self.fallback_s} of {self.name!r} must be finite and not negative")

    def grade(self, trajectory: Trajectory) -> float | None:
        """1 where they are equal, else 0; None without a gold answer that can be read."""
        score = float(self.score([trajectory])[0])
        return None if math.isnan(score) else score

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """`grade` of each trajectory, float32 [n]; NaN where it abstained."""
        scores = np.full(len(trajectories), math.nan, np.float32)
        left: dict[int, tuple[str, str]] = {}
        for at, trajectory in enumerate(trajectories):
            if (found := self.read(trajectory)) is None:
                continue
            read, wanted = found
            if any(_right(read, gold, self.tolerance) for gold in wanted):
                scores[at] = 1.0
            elif unread := [gold for gold in wanted if not _readable(gold)]:
                left[at] = (read.value, unread[0])
            else:
                scores[at] = 0.0
        if left:
            verdicts, reason = math_verify.compare(set(left.values()), limit_s=self.fallback_s)
            for at, pair in left.items():
                scores[at] = verdicts.get(pair, math.nan)
                self.unread.add(self.name, pair[1], compared=pair in verdicts, reason=reason)
        return scores


@lru_cache(maxsize=8192)
def _readable(gold: str) -> bool:
    """Whether the reader knows what the gold answer says: mathematics that it reads, or words and nothing else."""
    if not any(sign.isdigit() or sign in "\\=<>^" for sign in plain_text(gold)):
        return True
    try:
        parse_answer(gold)
    except NotMathsError:
        return False
    return True


def _right(read: Stated, gold: str, tolerance: float) -> bool:
    if choice_letter(gold):
        return same_text(read, gold)
    return same_text(read, gold) or (read.value != "" and maths_equal(read.value, gold, tolerance=tolerance))


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
    fields, said = _fields(gold), _fields(answer)
    if fields and (said or fields[0] != ":"):  # 3:30 may be a ratio
        return fields == said
    for one, other in ((answer, gold), (gold, answer)):  # 3,14 is a number beside 3.14, beside "3, 14" it is a list
        if (digits := decimal_comma(one.strip())) and "." in (literal(other.strip()) or ""):
            return _texts_equal(digits, other, tolerance)
        if " or " in one and " or " not in other:  # "1/2 or 0.5" is one answer
            return all(maths_equal(part, other, tolerance=tolerance) for part in one.split(" or ")) or _parsed_equal(
                answer, gold, tolerance
            )
    return _parsed_equal(answer, gold, tolerance)


_FIELDS = re.compile(r"\d+(?:-\d+)+|\d+/\d+/\d+|\d{1,2}:[0-5]\d(?::[0-5]\d)?")


def _fields(text: str) -> tuple[str | int, ...]:
    """The sign and the numbers of a date, a score, a range or a time of day, of which nobody takes the difference."""
    text = text.strip("$ ").replace("\u2013", "-").replace("\u2212", "-")
    if not _FIELDS.fullmatch(text):
        return ()
    sign = text.lstrip("0123456789")[0]
    return sign, *map(int, text.split(sign))


def _parsed_equal(answer: str, gold: str, tolerance: float) -> bool:
    try:
        left, right = parse_answer(answer), parse_answer(gold)
    except NotMathsError:
        return False
    if left.is_words and right.is_words:
        return False
    left, right = _as_asked(left, right), _as_asked(right, left)
    return _same(left, right, tolerance) or any(
        (values := _in_order(one)) is not None and other.kind == "()" and _same(values, other, tolerance)
        for one, other in ((left, right), (right, left))
    )


def _in_order(answer: Answer) -> Answer | None:
    """``y = 3, x = 2`` as (2, 3); None where it is no list of different names and their values."""
    if answer.kind != "set" or not all(part.kind == "=" and _names(*part.parts) for part in answer.parts):
        return None
    if all(names := [solved(part) for part in answer.parts]):
        if len({*names}) < len(names):
            return None
        answer = replace(answer, parts=tuple(sorted(answer.parts, key=solved)))
    return replace(answer, kind="()", parts=tuple(part.parts[1] for part in answer.parts), name="")


def _as_asked(answer: Answer, other: Answer) -> Answer:
    """The answer in the form of the other one: ``x = 5`` and ``AB = 5`` answer 5, ``x > 7`` an interval."""
    if answer.kind == "=" and (other.kind == "value" or solved(answer) == solved(other) != ""):
        for side, value in (answer.parts, answer.parts[::-1]):
            if side.node is not None and (side.node.op == "var" or (other.kind == "value" and _names(side, value))):
                return value
    return answer if other.kind in {"<", "<="} and answer.kind in {"<", "<="} else interval(answer)


def _names(side: Answer, value: Answer) -> bool:
    """Whether an equation says what a named quantity is: ``AB = 5``, ``P(A) = 1/3``, but not ``x + y = 5``."""
    return bool(side.node and value.node and _is_name(side.node) and not variables(value.node))


def _is_name(node: Node) -> bool:
    if node.op in {"*", "/"}:
        left, right = node.args
        return _is_name(left) and (_is_name(right) or (node.op == "*" and right.op == "number"))
    return node.op == "var" or (node.name == "abs" and _is_name(node.args[0]))


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
