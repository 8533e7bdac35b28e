"""Program of a worker process: parses formulas by math-verify and compares them in sympy.

Standard input has one request per line, ``{"gold", "answer", "tolerance", "cpu_s"}`` in JSON. Standard output gets one
result per line: ``true``, ``false``, ``"gold"`` for an unreadable gold answer, or a number if the gold answer is null,
as ``"1/3"`` if it is rational.
A request that exceeds the limit of processor time or memory ends the process.
"""

from __future__ import annotations

import cmath
import contextlib
import itertools
import json
import os
import random
import resource
import signal
import sys
from functools import lru_cache, partial
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy
from math_verify import LatexExtractionConfig, parse, parser, verify
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

_MEMORY = 3 << 30
_MAX_BITS = 1000
_POINTS, _MIN_POINTS = 5, 3
_MAYBE_ZERO = 1e-14
_EXACT = 1e-12  # relative difference of equal values in 30 digits, after cancellation


parser.latex2sympy = partial(latex2sympy, conversion_config=ConversionConfig(lowercase_symbols=False))


def main() -> None:
    """Process requests until standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # messages of the libraries must not mix with results
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    _result({"gold": "x > 1", "answer": "1 < x", "tolerance": 1e-6})  # loads sympy's solvers before the limit applies
    for line in sys.stdin:
        request = json.loads(line)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        end = int(usage.ru_utime + usage.ru_stime + 1 + request["cpu_s"])
        resource.setrlimit(resource.RLIMIT_CPU, (end, hard))
        print(json.dumps(_result(request)), file=results, flush=True)


def _result(request: dict[str, Any]) -> Any:
    try:
        if request["gold"] is None:
            return _number(request["answer"])
        gold = _read(request["gold"])
        if gold is None:
            return "gold"
        answer = _read(request["answer"])
        return answer is not None and _same(gold, answer, request["tolerance"])
    except MemoryError:
        os._exit(1)
    except Exception:  # noqa: BLE001  # after any error of sympy, equality is not proven
        return False


@lru_cache(maxsize=4096)
def _read(text: str) -> Any:
    """The formula as an object of sympy, or None if math-verify cannot read it."""
    plain = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
    config = [LatexExtractionConfig(boxed_match_priority=-1, normalization_config=plain)]
    parsed = parse(f"${text}$", config, fallback_mode="no_fallback", parsing_timeout=None)
    if not parsed or isinstance(parsed[0], str):
        return None
    value = parsed[0]
    unit = next((s for s in getattr(value, "free_symbols", ()) if s.name == "i"), None)
    if unit is not None and not value.has(sympy.Sum, sympy.Product):
        if isinstance(value, sympy.Eq):  # z = 3 + 4i, where sympy assumes that z is real
            value = value.func(*(side.subs(unit, sympy.I) for side in value.args), evaluate=False)
        else:
            value = value.subs(unit, sympy.I)
    return value.replace(_is_odd_root, lambda root: -((-root.base) ** root.exp)) if hasattr(value, "replace") else value


def _is_odd_root(node: Any) -> bool:
    """True if a node is an odd root of a negative number, which stands for the real root."""
    return bool(node.is_Pow and node.exp.is_Rational and node.exp.p == 1 and node.exp.q % 2 and node.base.is_negative)


def _number(text: str) -> str | float | None:
    value = _read(text)
    value = None if value is None else value.doit()
    if isinstance(value, sympy.Rational) and max(abs(value.p), value.q).bit_length() < _MAX_BITS:
        return str(value)
    value = None if value is None else complex(value.evalf(20))
    return value.real if value is not None and value.imag == 0 and cmath.isfinite(value) else None


def _same(gold: Any, answer: Any, tolerance: float) -> bool:
    """True if two sympy objects are equal as answers."""
    if gold == answer:
        return not (hasattr(gold, "has") and gold.has(sympy.zoo, sympy.nan))
    gold, answer = _in_form_of(gold, answer), _in_form_of(answer, gold)
    if isinstance(gold, bool) or isinstance(answer, bool):
        return False
    if isinstance(gold, sympy.Set) and isinstance(answer, sympy.Set):
        return _same_set(gold, answer, tolerance)
    if isinstance(gold, sympy.Tuple) and isinstance(answer, sympy.Tuple):
        pairs = itertools.zip_longest(gold, answer)
        return all(None not in pair and _same(*pair, tolerance) for pair in pairs)
    if isinstance(gold, sympy.Tuple | sympy.Set) or isinstance(answer, sympy.Tuple | sympy.Set):
        return False
    if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr) and not isinstance(gold, sympy.MatrixExpr):
        return _same_value(gold, answer, tolerance)
    if isinstance(gold, Relational) != isinstance(answer, Relational):
        return False
    return _verified(gold, answer)


def _verified(gold: Any, answer: Any) -> bool:
    return any(verify(*pair, timeout_seconds=None) for pair in ((gold, answer), (answer, gold)))


def _in_form_of(value: Any, other: Any) -> Any:
    """The value in the form of the other, for example 5 for ``x = 5``, and an interval for ``x > 7``."""
    name, solution = _solved(value)
    other_name, _ = _solved(other)
    if name is not None and (not isinstance(other, Relational) or name == other_name):
        return solution
    if isinstance(value, sympy.FiniteSet) and value.args:
        parts = [_solved(part) for part in _parts(value)]
        names = {part for part, _ in parts}
        if None not in names and len({str(name).partition("_")[0] for name in names}) == 1:  # x = 1 or x = 2; x_1, x_2
            return type(value)(*(part for _, part in parts))
        if None not in names and len(names) == len(parts) and (_pair(other) is not None):  # y = 3, x = 2 for (2, 3)
            return sympy.Tuple(*(part for _, part in sorted(parts, key=lambda part: str(part[0]))))
        if all(isinstance(part, Relational) and not isinstance(part, sympy.Eq) for part in value.args):
            sets = [part.as_set() for part in value.args]
            return sympy.Union(*sets) if len(value.free_symbols) == 1 else value
    if isinstance(value, sympy.MatrixBase) and 1 in value.shape and _pair(other) is not None:
        return sympy.Tuple(*value)
    if isinstance(value, sympy.Interval) and isinstance(other, sympy.Tuple | sympy.FiniteSet | sympy.MatrixBase):
        return _pair(value) or value
    if _is_inequality(value):
        functions = value.atoms(AppliedUndef)
        value = value.subs(next(iter(functions)), sympy.Symbol("f", real=True)) if len(functions) == 1 else value
    if _is_inequality(value) and len(value.free_symbols) == 1:
        same_variable = not _is_inequality(other) or other.free_symbols == value.free_symbols
        return value.as_set() if same_variable else value
    return value


def _parts(value: Any) -> tuple[Any, ...]:
    return tuple(getattr(value, "_unsorted_args", value.args))


def _pair(value: Any) -> Any:
    """The value as a tuple, because ``(1, 2)`` may be parsed as an open interval."""
    if isinstance(value, sympy.Interval) and value.left_open and value.right_open:
        return sympy.Tuple(value.start, value.end)
    return value if isinstance(value, sympy.Tuple) else None


def _is_inequality(value: Any) -> bool:
    parts = value.args if isinstance(value, sympy.And | sympy.Or) else (value,)
    return all(isinstance(part, Relational) and not isinstance(part, sympy.Eq) for part in parts)


def _solved(value: Any) -> tuple[Any, Any]:
    """Name and value in ``x = 5``, ``5 = x``, ``AB = 5`` and ``P(A) = 5``. (None, None) otherwise."""
    if isinstance(value, sympy.Eq):
        if not value.free_symbols and _same_value(value.lhs, value.rhs, 1e-6):  # 3 = sqrt(9)
            return sympy.true, value.rhs
        for name, solution in ((value.lhs, value.rhs), (value.rhs, value.lhs)):
            if isinstance(name, sympy.Symbol):
                return name, solution
        for name, solution in ((value.lhs, value.rhs), (value.rhs, value.lhs)):
            if _is_name(name) and not getattr(solution, "free_symbols", ()):
                return name, solution
    return None, None


def _is_name(value: Any) -> bool:
    if isinstance(value, sympy.Mul | sympy.Pow | sympy.Abs):
        return all(_is_name(part) or part == -1 for part in value.args)
    return isinstance(value, sympy.Symbol | AppliedUndef | sympy.Tuple)


def _same_set(gold: Any, answer: Any, tolerance: float) -> bool:
    if isinstance(gold, sympy.FiniteSet) and isinstance(answer, sympy.FiniteSet):
        rest = list(_parts(answer))
        for part in _parts(gold):
            is_equation = isinstance(part, sympy.Eq)
            candidates = [k for k, other in enumerate(rest) if isinstance(other, sympy.Eq) == is_equation]
            match = next((k for k in candidates if _same(part, rest[k], tolerance)), None)
            if match is None:
                return False
            del rest[match]
        return not rest
    if isinstance(gold, sympy.Interval) and isinstance(answer, sympy.Interval):
        ends = ((gold.start, answer.start), (gold.end, answer.end))
        is_open = (gold.left_open, gold.right_open) == (answer.left_open, answer.right_open)
        return is_open and all(_same(*pair, tolerance) for pair in ends)
    gold, answer = gold.doit(), answer.doit()
    exact = [sympy.nsimplify(value, rational=True) if value.has(sympy.Float) else value for value in (gold, answer)]
    return bool(exact[0] == exact[1] or exact[0].symmetric_difference(exact[1]) == sympy.S.EmptySet)


def _same_value(gold: Any, answer: Any, tolerance: float) -> bool:
    """True if two expressions are equal. With variables, at fixed points (Schwartz 1980)."""
    is_rounded = bool(gold.has(sympy.Float) or answer.has(sympy.Float))
    gold, answer = gold.doit(), answer.doit()  # a sum may have an infinite bound and a finite value
    if any(value.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan) for value in (gold, answer)):
        return False  # equal infinities were handled before
    if gold.is_Rational and answer.is_Rational:
        return bool(gold == answer)
    if is_rounded:  # decimals as they are written
        gold, answer = (sympy.nsimplify(value, rational=True) for value in (gold, answer))
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    compared = 0
    for point in _points(symbols) if symbols else [{}]:
        values = [_at(value, point) for value in (gold, answer)]
        if None in values:
            if values != [None, None]:
                return False
            continue
        largest, allowed = max(map(abs, values)), tolerance if is_rounded else _EXACT
        if not abs(values[0] - values[1]) <= allowed * largest:
            return False
        compared += 1
    if compared == 0 and symbols:  # undefined functions
        return _verified(gold, answer)
    return compared >= (_MIN_POINTS if symbols else 1)


def _points(symbols: list[Any]) -> list[dict[Any, Any]]:
    rng = random.Random("/".join(map(str, symbols)))
    signs = [1 if k % 2 == 0 else -1 for k in range(_POINTS)]
    return [{symbol: sympy.Rational(sign * rng.randint(20, 250), 97) for symbol in symbols} for sign in signs]


def _at(value: Any, point: dict[Any, Any]) -> Any:
    """The value at a point, in 30 digits. None if it is not a number.

    A sum of irrational numbers that is 0 has the value of its rounding errors, which are smaller with more digits.
    """
    with contextlib.suppress(TypeError, ValueError, ZeroDivisionError, ArithmeticError):
        exact = value.subs(point).doit()
        number = _evaluated(exact, 100)
        if number is not None and 0 < abs(number) < _MAYBE_ZERO:
            number = 0 if abs(_evaluated(exact, 200)) < 1e-10 * abs(number) else number
        return number
    return None


def _evaluated(exact: Any, max_digits: int) -> Any:
    number = exact.evalf(30, maxn=max_digits)
    if not number.is_number or number.has(sympy.zoo, sympy.nan, sympy.oo):
        return None
    if number.is_Float:
        return number
    real, imaginary = (part.evalf(30, maxn=max_digits) for part in number.as_real_imag())
    value = complex(real, imaginary)
    return value if cmath.isfinite(value) else None  # infinity would be close to every number


main()
