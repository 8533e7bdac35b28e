"""Which answers may be handed to scorers that evaluate them as Python or sympy expressions.

In: a text that a model wrote. Out: why it is refused, or nothing. Waits for nothing.
"""

from __future__ import annotations

import ast
import re

PYTHON_SCORERS = frozenset(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"))
"""Generators of reasoning-gym 0.1.25 that call `eval` on the answer."""

SYMPY_SCORERS = frozenset(
    ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration")
)
"""Generators that hand the answer to `sympy.parse_expr`, which evaluates it as Python, too."""

ARITHMETIC_SCORERS = frozenset(("countdown", "puzzle24"))
"""Those of them whose answers need no more than numbers and the four operations."""

MAX_CHARS = 20_000
_HUGE_EXPONENT = re.compile(r"[eE][+-]?\d{4,}")
_SYMPY_TEXT = re.compile(r"[\w\s+\-*/().,=^]*", re.ASCII)
_SYMPY_NAMES = frozenset(
    "sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln sqrt pi E C Abs Rational".split()  # noqa: SIM905
)
_POWER = re.compile(r"(?:\*\*|\^)\s*(?!\(?\s*-?\s*(?:\d{1,3}(?![\d.])|[A-Za-z]\b))")
_POWER_OF_SUM = re.compile(r"\)\s*(?:\*\*|\^)\s*\(?\s*-?\s*\d{2}")
_NESTED = re.compile(r"[A-Za-z]\w*\([^()]*[A-Za-z]\w*\([^()]*[A-Za-z]\w*\(")
_ARITHMETIC = re.compile(r"(?!.*\*\s*\*)[\d\s+\-*/().]*", re.ASCII | re.DOTALL)
_POWER_OF_POWER = re.compile(r"(?:\*\*|\^)[^+,]*(?:\*\*|\^)")


def refusal(answer: str, generator: str) -> str:
    """Why `answer` is not handed to the scorer of `generator`; empty where it is harmless."""
    if len(answer) > MAX_CHARS:
        return f"longer than {MAX_CHARS} characters"
    if _HUGE_EXPONENT.search(answer):
        return "a number with a huge exponent"
    if generator in PYTHON_SCORERS:
        return _python(answer)
    return _sympy(answer, generator) if generator in SYMPY_SCORERS else ""


def _python(answer: str) -> str:
    """Literals and bare words only: nothing is called or computed. What does not parse cannot run."""
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    allowed = (ast.Expression, ast.List, ast.Tuple, ast.Constant, ast.Name, ast.Load, ast.UnaryOp, ast.USub)
    odd = next((node for node in ast.walk(tree) if not isinstance(node, allowed)), None)
    return "" if odd is None else f"Python code ({type(odd).__name__}), not a literal"


def _sympy(answer: str, generator: str) -> str:
    """Arithmetic with known functions, single-letter variables and small exponents."""
    if len(answer) > 1000:
        return "longer than 1000 characters"
    if generator in ARITHMETIC_SCORERS and not _ARITHMETIC.fullmatch(answer):
        return "more than numbers and the four operations"
    if not _SYMPY_TEXT.fullmatch(answer):
        return "characters that no formula here needs"
    if re.search(r"\.\s*[A-Za-z_]|_|\d[A-Za-z_]\w*\(", answer):
        return "an attribute or a hidden name"
    words = re.findall(r"[A-Za-z]\w*", answer)
    strange = next((word for word in words if len(word) > 1 and word not in _SYMPY_NAMES), "")
    if strange:
        return f"the name {strange[:40]!r}"
    if _NESTED.search(answer):
        return "functions nested too deep"
    towers = any(_POWER_OF_POWER.search(part) for part in re.split(r"[-+,]", answer))
    if towers or _POWER.search(answer) or _POWER_OF_SUM.search(answer):
        return "a power that may not end"
    if re.search(r"\d{40,}", answer) or answer.count("(") > 50:
        return "a number or nesting too large"
    return ""
