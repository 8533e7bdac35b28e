"""A calculator tool: arithmetic with bounded size, without `eval`."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any

from forge_agents.sources import parse_source
from forge_agents.tools.definition import tool

MAX_EXPRESSION_CHARS = 200
_MAX_BITS = 512
_ALLOWED = re.compile(r"[0-9.+\-*/%() \t]*", re.ASCII)
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**"})  # noqa: RUF001  # signs that people write
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@tool
def calculator(expression: str) -> str:
    """Work out an arithmetic expression, such as (17 + 25) * 3.

    Args:
        expression: Numbers with + - * / // % ** and parentheses.
    """
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", expression.strip().rstrip("=? ").translate(_SPELLINGS), flags=re.ASCII)
    if len(text) > MAX_EXPRESSION_CHARS:
        raise ValueError(f"expression has {len(text)} characters, at most {MAX_EXPRESSION_CHARS} are allowed")
    if not text or not _ALLOWED.fullmatch(text):
        raise ValueError("write only numbers, + - * / // % ** and parentheses")
    try:
        value = _evaluate(parse_source(text, "eval").body)
    except SyntaxError as error:
        raise ValueError("that is not an arithmetic expression") from error
    except (OverflowError, RecursionError, MemoryError) as error:
        raise ArithmeticError("the numbers are too large") from error
    if isinstance(value, int):
        return str(value)
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else f"{value:.12g}"


def _evaluate(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _evaluate(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if not isinstance(node, ast.BinOp):
        raise ArithmeticError("only numbers and + - * / // % ** are understood")  # noqa: TRY004  # about the user's text
    left, right = _evaluate(node.left), _evaluate(node.right)
    if isinstance(node.op, ast.Pow):
        return _bounded(_power(left, right))
    if type(node.op) not in _BINARY:
        raise ArithmeticError("only + - * / // % ** are understood")
    return _bounded(_BINARY[type(node.op)](left, right))


def _power(base: float, exponent: float) -> Any:
    if abs(exponent) * math.log2(max(abs(base), 2)) > _MAX_BITS:  # before computing: 9**9**9 would never end
        raise ArithmeticError("the power is too large")
    return base**exponent


def _bounded(value: Any) -> int | float:
    if isinstance(value, complex):
        raise ArithmeticError("the result is not a real number")  # noqa: TRY004  # about the user's text
    if isinstance(value, int) and value.bit_length() > 2 * _MAX_BITS:
        raise ArithmeticError("the result is too large")
    if isinstance(value, float) and not math.isfinite(value):
        raise ArithmeticError("the result is not finite")
    return value  # type: ignore[no-any-return]  # int or float by now
