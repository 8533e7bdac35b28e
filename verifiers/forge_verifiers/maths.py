"""Equality of mathematical answers, without ever evaluating text as code.

In: trajectories with a gold answer. Out: 1 where the answers are equal, else 0. Waits for nothing.
"""

from __future__ import annotations

import cmath
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from forge_agents.types import Trajectory
from forge_verifiers.answers import final_answer, folded, golds, last_action
from forge_verifiers.maths_parser import MAX_CHARS, Answer, Node, NotMathsError, parse_answer, variables
from forge_verifiers.verifier import TrajectoryRule

Value = Fraction | complex

_MAX_BITS = 4096
_POINTS = 6
_MIN_POINTS = 3
_FUNCTIONS = {
    "sqrt": cmath.sqrt,
    "sin": cmath.sin,
    "cos": cmath.cos,
    "tan": cmath.tan,
    "arcsin": cmath.asin,
    "arccos": cmath.acos,
    "arctan": cmath.atan,
    "sinh": cmath.sinh,
    "cosh": cmath.cosh,
    "tanh": cmath.tanh,
    "exp": cmath.exp,
    "ln": cmath.log,
    "log": cmath.log,
}


class _UndefinedError(ArithmeticError):
    """The expression has no value here, or one too large to compute with."""


@dataclass(frozen=True, kw_only=True)
class MathEqual(TrajectoryRule):
    r"""The final answer equals the gold answer as mathematics: ``\frac{1}{2}``, ``0.5`` and ``50\%`` are equal.

    Reads LaTeX and plain text: numbers, fractions, powers, roots, the common functions, variables, tuples, intervals,
    sets and equations. Rational numbers are compared exactly; expressions at seeded random points, which unequal ones
    pass with probability near 0 (Schwartz 1980); equations up to a constant factor. ``log`` is the natural one. What
    cannot be read is compared as text. Time is bounded by construction: at most 200 symbols, nested at most 40 deep,
    integers of at most 4,096 bits.
    """

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
    return _parsed_equal(answer, gold, tolerance)


@lru_cache(maxsize=8192)  # siblings give the same answers again and again
def _parsed_equal(answer: str, gold: str, tolerance: float) -> bool:
    try:
        left, right = parse_answer(answer), parse_answer(gold)
    except NotMathsError:
        return False
    return _same(left, right, tolerance)


def _same(left: Answer, right: Answer, tolerance: float) -> bool:
    if left.kind == "equation" and right.kind == "value" and left.parts[0].op == "var":
        left = Answer(kind="value", parts=left.parts[1:])  # "x = 5" answers "5"
    if right.kind == "equation" and left.kind == "value" and right.parts[0].op == "var":
        right = Answer(kind="value", parts=right.parts[1:])
    if left.kind != right.kind or len(left.parts) != len(right.parts):
        return False
    if left.kind == "equation":
        return _proportional(_difference(left), _difference(right), tolerance)
    if left.kind == "set":
        rest = list(right.parts)
        for part in left.parts:
            match = next((k for k, other in enumerate(rest) if _equal(part, other, tolerance)), None)
            if match is None:
                return False
            del rest[match]
        return True
    return all(_equal(a, b, tolerance) for a, b in zip(left.parts, right.parts, strict=True))


def _difference(equation: Answer) -> Node:
    return Node(op="-", args=equation.parts)


def _equal(left: Node, right: Node, tolerance: float) -> bool:
    pairs = _values(left, right)
    return pairs is not None and all(_close(a, b, tolerance) for a, b in pairs)


def _proportional(left: Node, right: Node, tolerance: float) -> bool:
    pairs = _values(left, right)
    if pairs is None:
        return False
    (a0, b0), *rest = [(complex(a), complex(b)) for a, b in pairs]
    if not rest or a0 == 0 or b0 == 0:
        return False
    return all(_close(a * b0, b * a0, tolerance) for a, b in rest)


def _values(left: Node, right: Node) -> list[tuple[Value, Value]] | None:
    """Values of both at the same points; None where they cannot be compared."""
    names = sorted(variables(left) | variables(right))
    rng = random.Random("/".join(names))
    pairs: list[tuple[Value, Value]] = []
    for point in range(_POINTS if names else 1):
        sign = 1 if point % 2 == 0 else -1
        at = {name: Fraction(sign * rng.randint(20, 250), 97) for name in names}
        a, b = _value(left, at), _value(right, at)
        if (a is None) != (b is None):
            return None
        if a is not None and b is not None:
            pairs.append((a, b))
    return pairs if len(pairs) >= (_MIN_POINTS if names else 1) else None


def _value(node: Node, at: Mapping[str, Fraction]) -> Value | None:
    try:
        return _evaluate(node, at)
    except (ArithmeticError, ValueError):  # undefined here: a division by zero, a pole, an overflow
        return None


def _close(a: Value, b: Value, tolerance: float) -> bool:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    a, b = complex(a), complex(b)
    return abs(a - b) <= tolerance * max(abs(a), abs(b), 1e-12)


def _evaluate(node: Node, at: Mapping[str, Fraction]) -> Value:
    if node.op == "number":
        return node.number
    if node.op == "decimal":
        return complex(node.number)
    if node.op == "var":
        return at[node.name]
    if node.op == "constant":
        return {"pi": complex(math.pi), "e": complex(math.e), "i": 1j}[node.name]
    values = [_evaluate(arg, at) for arg in node.args]
    value = _apply(node, values)
    if isinstance(value, Fraction):
        if value.numerator.bit_length() + value.denominator.bit_length() > _MAX_BITS:
            raise _UndefinedError("too large")
    elif not cmath.isfinite(value):
        raise _UndefinedError("no finite value")
    return value


def _apply(node: Node, values: list[Value]) -> Value:
    if node.op == "call":
        return _call(node.name, values[0])
    if node.op == "neg":
        return -values[0]
    if node.op == "!":
        return _factorial(values[0])
    a, b = values
    if node.op == "^":
        return _power(a, b)
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return {"+": Fraction.__add__, "-": Fraction.__sub__, "*": Fraction.__mul__, "/": Fraction.__truediv__}[
            node.op
        ](a, b)
    a, b = complex(a), complex(b)
    if node.op == "+":
        return a + b
    if node.op == "-":
        return a - b
    return a * b if node.op == "*" else a / b


def _call(name: str, value: Value) -> Value:
    if name == "abs":
        return abs(value) if isinstance(value, Fraction) else complex(abs(value))
    if name == "sqrt" and isinstance(value, Fraction) and value >= 0:
        top, bottom = math.isqrt(value.numerator), math.isqrt(value.denominator)
        if top * top == value.numerator and bottom * bottom == value.denominator:
            return Fraction(top, bottom)
    return _FUNCTIONS[name](complex(value))


def _power(base: Value, exponent: Value) -> Value:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(exponent.numerator) <= _MAX_BITS:
            return Fraction(base**exponent.numerator)
    return complex(complex(base) ** complex(exponent))


def _factorial(value: Value) -> Fraction:
    if not (isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= 170):
        raise _UndefinedError("factorial of something else than an integer from 0 to 170")
    return Fraction(math.factorial(value.numerator))
