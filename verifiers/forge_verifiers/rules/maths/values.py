"""Values of expressions: exact where they are rational, complex numbers otherwise.

In: trees. Out: whether they are equal, or proportional. Waits for nothing; the size of every number is bounded.
"""

from __future__ import annotations

import cmath
import math
import random
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import lru_cache

from forge_verifiers.rules.maths.expression import Node, nodes, variables

Value = Fraction | complex

_MAX_BITS = 4096
_MAX_CHOICES = 1000
_POINTS = 6
_MIN_POINTS = 3
_ROUNDING = 1e-14  # sin(pi) is not 0 in floating point
_CONSTANTS = {"pi": complex(math.pi), "e": complex(math.e), "i": 1j}
_EXACT = {"+": Fraction.__add__, "-": Fraction.__sub__, "*": Fraction.__mul__, "/": Fraction.__truediv__}
_FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    "sqrt": cmath.sqrt,
    "sin": cmath.sin,
    "cos": cmath.cos,
    "tan": cmath.tan,
    "sec": lambda z: 1 / cmath.cos(z),
    "csc": lambda z: 1 / cmath.sin(z),
    "cot": lambda z: 1 / cmath.tan(z),
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


def equal(left: Node, right: Node, tolerance: float) -> bool:
    """Whether two expressions have the same value, at seeded random points where they hold variables."""
    ends = _infinite(left), _infinite(right)
    if ends != (0, 0):
        return ends[0] == ends[1]
    names = variables(left) | variables(right)
    rounded = any(node.op == "decimal" for side in (left, right) for node in nodes(side))
    compared = 0
    for a, b in _values(left, right, names):
        if a is None and b is None:
            continue
        if a is None or b is None or not _close(a, b, tolerance, exact=not rounded):
            return False
        compared += 1
    return compared >= (_MIN_POINTS if names else 1)


def number_of(node: Node) -> Value | None:
    """The value of an expression without variables; None where it has none."""
    return None if variables(node) else _value(node, {})


def proportional(left: Node, right: Node, tolerance: float, *, positive: bool = False) -> bool:
    """Whether ``left = c * right`` for a constant c other than 0, or above 0."""
    first: tuple[Value, Value] | None = None
    compared = 0
    for a, b in _values(left, right, variables(left) | variables(right)):
        if a is None and b is None:
            continue
        if a is None or b is None:
            return False
        if first is None:
            if a == 0 or b == 0 or (positive and not _same_sign(a, b)):
                return False
            first = a, b
        elif not _close(a * first[1], b * first[0], tolerance, exact=False):
            return False
        compared += 1
    return compared >= _MIN_POINTS


def _same_sign(a: Value, b: Value) -> bool:
    return a.real * b.real > 0


def _infinite(node: Node) -> int:
    """1 or -1 for an infinite end of an interval, else 0."""
    if node.op == "neg":
        return -_infinite(node.args[0])
    return int(node.op == "constant" and node.name == "infinity")


def _values(left: Node, right: Node, names: frozenset[str]) -> Iterator[tuple[Value | None, Value | None]]:
    """Values of both at the same points; None where there is none."""
    for at in _points(names):
        yield _value(left, at), _value(right, at)


@lru_cache(maxsize=1024)
def _points(names: frozenset[str]) -> tuple[Mapping[str, Fraction], ...]:
    ordered = sorted(names)
    rng = random.Random("/".join(ordered))
    return tuple(
        {name: Fraction((1 if k % 2 == 0 else -1) * rng.randint(20, 250), 97) for name in ordered}
        for k in range(_POINTS if names else 1)
    )


def _value(node: Node, at: Mapping[str, Fraction]) -> Value | None:
    try:
        return _evaluate(node, at)
    except (ArithmeticError, ValueError):  # undefined here: a division by zero, a pole, an overflow
        return None


def _close(a: Value, b: Value, tolerance: float, *, exact: bool) -> bool:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b or (not exact and abs(a - b) <= Fraction(tolerance) * max(abs(a), abs(b)))
    try:
        a, b = complex(a), complex(b)
    except OverflowError:
        return False
    return abs(a - b) <= max(tolerance * max(abs(a), abs(b)), _ROUNDING)


def _evaluate(node: Node, at: Mapping[str, Fraction]) -> Value:
    if node.op in {"number", "decimal"}:
        return node.number
    if node.op == "var":
        return at[node.name]
    if node.op == "constant":
        if node.name == "infinity":
            raise _UndefinedError("infinity is no number")
        return _CONSTANTS[node.name]
    value = _apply(node, [_evaluate(arg, at) for arg in node.args])
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
        return Fraction(math.factorial(_whole(values[0], 170)))
    a, b = values
    if node.op == "binom":
        return Fraction(math.comb(_whole(a, _MAX_CHOICES), _whole(b, _MAX_CHOICES)))
    if node.op == "root":
        return _root(a, b)
    if node.op == "^":
        return _power(a, b)
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return _EXACT[node.op](a, b)
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


def _root(value: Value, degree: Value) -> Value:
    real = complex(value).imag == 0 and complex(value).real < 0
    if real and isinstance(degree, Fraction) and degree.denominator == 1 and degree.numerator % 2 == 1:
        return -_power(-value, 1 / degree)  # the real root
    return _power(value, 1 / degree)


def _power(base: Value, exponent: Value) -> Value:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(exponent.numerator) <= _MAX_BITS:
            return Fraction(base**exponent.numerator)
    return complex(complex(base) ** complex(exponent))


def _whole(value: Value, most: int) -> int:
    if not (isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= most):
        raise _UndefinedError(f"not an integer from 0 to {most}")
    return value.numerator
