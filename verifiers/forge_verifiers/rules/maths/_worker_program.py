"""Program of a worker process: parses formulas by math-verify and compares them in sympy.

Standard input has one request per line, ``{"gold", "answer", "tolerance", "cpu_s"}`` in JSON. Standard output gets one
result per line: ``true``, ``false``, ``"gold"`` for an unreadable gold answer, or a number for a request without a gold
answer. A request that exceeds the limit of processor time or memory ends the process.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

_MEMORY = 3 << 30


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
        if "gold" not in request:
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
    value = parsed[0].doit() if isinstance(parsed[0], sympy.Set) else parsed[0]
    unit = next((s for s in getattr(value, "free_symbols", ()) if s.name == "i"), None)
    if unit is not None and not value.has(sympy.Sum, sympy.Product):
        value = value.subs(unit, sympy.I)
    return value.replace(_is_odd_root, lambda root: -((-root.base) ** root.exp)) if hasattr(value, "replace") else value


def _is_odd_root(node: Any) -> bool:
    """True if a node is an odd root of a negative number, which stands for the real root."""
    return bool(node.is_Pow and node.exp.is_Rational and node.exp.p == 1 and node.exp.q % 2 and node.base.is_negative)


def _number(text: str) -> float | None:
    value = _read(text)
    value = None if value is None else complex(value.doit().evalf(20))
    return value.real if value is not None and value.imag == 0 else None


def _same(gold: Any, answer: Any, tolerance: float) -> bool:
    """True if two objects of sympy are equal as answers."""
    if gold == answer:
        return not (hasattr(gold, "has") and gold.has(sympy.zoo, sympy.nan))
    gold, answer = _in_form_of(gold, answer), _in_form_of(answer, gold)
    if any(isinstance(gold, kind) != isinstance(answer, kind) for kind in (sympy.Tuple, sympy.Set, Relational)):
        return False
    if isinstance(gold, bool) or isinstance(answer, bool) or _is_infinite(gold) or _is_infinite(answer):
        return False
    if _count_equations(gold) != _count_equations(answer):  # "x = 1, y = 2" is not "1, 2"
        return False
    digits = max(0, round(-math.log10(tolerance)))
    return any(verify(*pair, float_rounding=digits, timeout_seconds=None) for pair in ((gold, answer), (answer, gold)))


def _count_equations(value: Any) -> int:
    return sum(isinstance(part, sympy.Eq) for part in _parts(value)) if isinstance(value, sympy.FiniteSet) else 0


def _is_infinite(value: Any) -> bool:
    """True if an expression has no finite value. Equal infinities are not compared by their value."""
    return isinstance(value, sympy.Expr) and value.doit().has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan)


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
    if isinstance(value, sympy.Interval) and isinstance(other, sympy.Tuple | sympy.FiniteSet):
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
        if not value.free_symbols and _same(value.lhs, value.rhs, 1e-6):  # 3 = sqrt(9)
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


main()
