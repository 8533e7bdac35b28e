r"""Reads one mathematical expression, LaTeX or plain, into a tree, and computes what it is worth.

In: text. Out: a `Node`, or `NotMathsError`; whether two of them are equal, or proportional. Waits for nothing: size and
depth of a tree and the size of every number are bounded, which those of sympy are not.
"""

from __future__ import annotations

import cmath
import math
import operator
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, TypeAlias

_MAX_SYMBOLS = 200
_MAX_DEPTH = 40
_MAX_DIGITS = 300
_MAX_EXPONENT = 300
_MAX_LETTERS = 4
_MAX_BITS = 4096
_MAX_CHOICES = 1000
_POINTS, _MIN_POINTS = 6, 3
_ROUNDING = 1e-14  # sin(pi) is not 0 in floating point
GREEK = "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|nu|rho|sigma|tau|phi|omega"
"""Names of variables, with or without a backslash."""
CALLS = frozenset(f"{arc}{name}" for arc in ("", "arc") for name in ("sin", "cos", "tan")) | {
    *("sec", "csc", "cot", "sinh", "cosh", "tanh"),
    *("sqrt", "exp", "ln", "log", "abs"),
}
"""Functions of one argument."""
_SYMBOL = re.compile(
    r"\s*(?:((?:\d+\.\d*|\.\d+|1)[eE][+-]?\d+|\d+e\d+|\d+E[+-]?\d+|\d+\.?\d*|\.\d+)"  # "2e-1" is 2e minus 1
    r"|(\\?)([A-Za-z]+)|([-+*/^!|(){}\[\],_°∞]))"
)
_NAMES = dict.fromkeys(("∞", "infty", "oo", "inf"), "infinity") | {"lg": "log"}
_NAMES |= {f"a{name}": f"arc{name}" for name in ("sin", "cos", "tan")}
_KNOWN = CALLS | set(GREEK.split("|")) | {"pi", "frac", "binom", "infinity"}
_STARTS = frozenset("([{|")


class NotMathsError(ValueError):
    """A text that is no mathematical answer, or a larger one than is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of an expression."""

    op: Literal["number", "decimal", "var", "constant", "call", "neg", "!", "+", "-", "*", "/", "^", "binom", "root"]
    args: tuple[Node, ...] = ()
    name: str = ""
    number: Fraction = Fraction(0)


def nodes(node: Node) -> Iterator[Node]:
    """The node and all below it."""
    left = [node]
    while left:
        this = left.pop()
        left.extend(this.args)
        yield this


def variables(node: Node) -> frozenset[str]:
    """Names of the variables in an expression."""
    return frozenset(this.name for this in nodes(node) if this.op == "var")


def read_expression(text: str) -> Node:
    """Reads an expression.

    Raises:
        NotMathsError: the text is no expression that is read here, or too large.
    """
    reader = _Reader(_symbols(text))
    node = reader.sum()
    if reader.at != len(reader.symbols):
        raise NotMathsError(f"cannot read {''.join(reader.symbols[reader.at :])[:20]!r}")
    return node


_GROUPED = re.compile(r"([-+]?\d{1,3}(?:([,' \u00a0\u202f\u2009]|\{,\}|\\[,!]|,\\!)\d{3})(?:\2\d{3})*)(?:([.,])(\d+))?")
_DOTTED = re.compile(r"([-+]?\d{1,3}(?:(?:\.\d{3}){2,}|(?:\.\d{3})+(?=,)))(?:,(\d+))?")
_LITERAL = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?")
_COMMA = re.compile(r"[-+]?(?:\d{2,}|0),\d+|[-+]?\d,\d{2,}")


def literal(text: str) -> str | None:
    """A number in digits as Python writes it; None for anything else, and where a comma may part two numbers.

    Thousands may be set off by commas, apostrophes and narrow or plain spaces, in English or European style:
    ``1,234.5``, ``1 234,5``, ``1.234,5``.
    """
    if not text.isascii():
        text = text.replace("\u2212", "-")
    if _LITERAL.fullmatch(text):
        return text
    grouped = _GROUPED.fullmatch(text)
    if grouped and grouped[2] != grouped[3] and not grouped[1].lstrip("+-").startswith("0"):
        whole = grouped[1].replace(grouped[2], "")
        return f"{whole}.{grouped[4]}" if grouped[4] else whole
    dotted = _DOTTED.fullmatch(text)
    if dotted:
        return dotted[1].replace(".", "") + (f".{dotted[2]}" if dotted[2] else "")
    return None


def decimal_comma(text: str) -> str | None:
    """The literal that ``3,14`` is where a single number is expected; None where it is none, or thousands."""
    if not text.isascii():
        text = text.replace("\u2212", "-")
    return text.replace(",", ".") if _COMMA.fullmatch(text) and literal(text) is None else None


def number_node(text: str) -> Node:
    """The leaf of a literal such as ``12``, ``.5`` or ``1.5e3``."""
    mantissa, _, exponent = text.lower().partition("e")
    if len(mantissa) > _MAX_DIGITS or len(exponent) > 4 or abs(int(exponent or 0)) > _MAX_EXPONENT:
        raise NotMathsError(f"{text[:20]!r}...: at most {_MAX_DIGITS} digits are read")
    if text.isdigit():
        return Node(op="number", number=Fraction(int(text)))
    return Node(op="decimal", number=Fraction(text))


def _symbols(text: str) -> list[str]:
    symbols: list[str] = []
    at, end = 0, len(text.rstrip())
    while at < end:
        found = _SYMBOL.match(text, at)
        if found is None:
            raise NotMathsError(f"cannot read {text[at : at + 10]!r}")
        number, slash, word, sign = found.groups()
        symbols.extend([number or _NAMES.get(sign, sign)] if word is None else _words(word, bool(slash)))
        at = found.end()
        if len(symbols) > _MAX_SYMBOLS:
            raise NotMathsError(f"more than {_MAX_SYMBOLS} symbols")
    return symbols


def _words(word: str, is_command: bool) -> list[str]:
    name = _NAMES.get(word, word)
    if name in _KNOWN or name.lower() == "infinity":
        return [name.lower()]
    if is_command or len(word) > _MAX_LETTERS:
        raise NotMathsError(f"{word!r} is a word")
    return list(word)


_MINUS_ONE = Node(op="neg", args=(Node(op="number", number=Fraction(1)),))


class _Reader:
    """Recursive descent: sum, product, sign, power, atom."""

    def __init__(self, symbols: list[str]) -> None:
        self.symbols, self.at, self.depth = symbols, 0, 0

    def peek(self) -> str:
        return self.symbols[self.at] if self.at < len(self.symbols) else ""

    def take(self, wanted: str = "") -> str:
        symbol = self.peek()
        if not symbol or (wanted and symbol != wanted):
            raise NotMathsError(f"expected {wanted or 'more'}, got {symbol or 'the end'}")
        self.at += 1
        return symbol

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise NotMathsError(f"nested more than {_MAX_DEPTH} deep")

    def sum(self) -> Node:
        self.deeper()
        node = self.product()
        while self.peek() in {"+", "-"}:
            op: Literal["+", "-"] = "+" if self.take() == "+" else "-"
            node = Node(op=op, args=(node, self.product()))
        self.depth -= 1
        return node

    def product(self) -> Node:
        node = self.signed()
        while symbol := self.peek():
            if symbol in "*/":
                op: Literal["*", "/"] = "/" if self.take() == "/" else "*"
                node = Node(op=op, args=(node, self.signed()))
            elif symbol[0].isdigit() or symbol[0] == ".":
                raise NotMathsError("a number after a factor; write * between them")
            elif symbol[0].isalpha() or symbol in "([{":
                node = Node(op="*", args=(node, self.power()))
            else:
                break
        return node

    def signed(self) -> Node:
        sign = 1
        while self.peek() in {"+", "-"}:
            sign = -sign if self.take() == "-" else sign
        node = self.power()
        return node if sign > 0 else Node(op="neg", args=(node,))

    def power(self) -> Node:
        node = self.atom()
        while self.peek() in {"!", "°"}:
            node = Node(op="!", args=(node,)) if self.take() == "!" else _degrees(node)
        if self.peek() == "^":
            self.take()
            self.deeper()
            exponent = self.group("{", "}") if self.peek() == "{" else self.signed()
            self.depth -= 1
            node = Node(op="^", args=(node, exponent))
            if self.peek() == "°":
                self.take()
                node = _degrees(node)
        return node

    def group(self, opening: str, closing: str) -> Node:
        self.take(opening)
        node = self.sum()
        self.take(closing)
        return node

    def atom(self) -> Node:
        symbol = self.peek()
        if symbol in {"(", "[", "{"}:
            return self.group(symbol, {"(": ")", "[": "]", "{": "}"}[symbol])
        if symbol == "|":
            return Node(op="call", name="abs", args=(self.group("|", "|"),))
        self.take()
        if symbol[0].isdigit() or symbol[0] == ".":
            return self.number(symbol)
        if symbol in {"frac", "binom"}:
            return Node(op="/" if symbol == "frac" else "binom", args=(self.argument(), self.argument()))
        if symbol in CALLS:
            return self.call(symbol)
        if symbol in {"pi", "e", "i", "infinity"}:
            return Node(op="constant", name=symbol)
        if symbol.isalpha():
            return self.variable(symbol)
        raise NotMathsError(f"cannot read {symbol!r} here")

    def number(self, symbol: str) -> Node:
        if self.peek() != "_":
            return number_node(symbol)
        self.take()  # 1011_2 is eleven
        base = self.argument()
        if base.op != "number" or not 2 <= base.number <= 36 or not symbol.isdigit() or len(symbol) > _MAX_DIGITS:
            raise NotMathsError(f"no number in a base from 2 to 36: {symbol[:20]!r}")
        try:
            value = int(symbol, int(base.number))
        except ValueError as error:
            raise NotMathsError(f"no number in base {base.number}: {symbol[:20]!r}") from error
        return Node(op="number", number=Fraction(value))

    def variable(self, name: str) -> Node:
        if self.peek() == "_":
            self.take()
            braced = self.peek() == "{"
            if braced:
                self.take()
            name = f"{name}_{self.take()}"
            if braced:
                self.take("}")
        return Node(op="var", name=name)

    def argument(self) -> Node:
        r"""What follows ``\frac`` or a root: a group, or a single digit or letter."""
        if self.peek() == "{":
            return self.group("{", "}")
        symbol = self.peek()
        if len(symbol) > 1 and symbol.isdigit():  # \frac12 is one half
            self.symbols[self.at] = symbol[1:]
            return Node(op="number", number=Fraction(symbol[0]))
        return self.atom()

    def call(self, name: str) -> Node:
        self.deeper()
        node = self.root() if name == "sqrt" else self.function(name)
        self.depth -= 1
        return node

    def root(self) -> Node:
        if self.peek() == "[":
            degree, inner = self.group("[", "]"), self.argument()
            if not variables(inner):
                return Node(op="root", args=(inner, degree))
            one = Node(op="number", number=Fraction(1))
            return Node(op="^", args=(inner, Node(op="/", args=(one, degree))))
        return Node(op="call", name="sqrt", args=(self.argument(),))

    def function(self, name: str) -> Node:
        base = exponent = None
        if name == "log" and self.peek() == "_":
            self.take()
            written_out = self.at + 1 < len(self.symbols) and self.symbols[self.at + 1] == "("  # log_10(x)
            base = self.atom() if written_out else self.argument()
        if self.peek() == "^":  # sin^2 x
            self.take()
            exponent = self.group("{", "}") if self.peek() == "{" else self.argument()
            if name in {"sin", "cos", "tan"} and exponent == _MINUS_ONE:
                name, exponent = "arc" + name, None
        node = Node(op="call", name=name, args=(self.operand(),))
        if base is not None:
            node = Node(op="/", args=(node, Node(op="call", name=name, args=(base,))))
        return node if exponent is None else Node(op="^", args=(node, exponent))

    def operand(self) -> Node:
        """What a function without brackets is of: ``2x`` in ``sin 2x cos y``."""
        if self.peek() in _STARTS:
            return self.atom()
        node = self.signed()
        while (symbol := self.peek()) and symbol.isalpha() and (symbol not in CALLS or symbol == "sqrt"):
            node = Node(op="*", args=(node, self.power()))
        return node


def _degrees(node: Node) -> Node:
    pi = Node(op="constant", name="pi")
    return Node(op="/", args=(Node(op="*", args=(node, pi)), Node(op="number", number=Fraction(180))))


# Values: exact where they are rational, complex numbers otherwise.

Value: TypeAlias = Fraction | complex
_CONSTANTS = {"pi": complex(math.pi), "e": complex(math.e), "i": 1j}
_OPERATORS: dict[str, Callable[..., Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
_FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    name: getattr(cmath, name) for name in ("sqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh", "exp", "log")
}
_FUNCTIONS |= {f"arc{name}": getattr(cmath, f"a{name}") for name in ("sin", "cos", "tan")}
_FUNCTIONS |= {"ln": cmath.log, "sec": lambda z: 1 / cmath.cos(z), "csc": lambda z: 1 / cmath.sin(z)}
_FUNCTIONS |= {"cot": lambda z: 1 / cmath.tan(z)}


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
            if a == 0 or b == 0 or (positive and not a.real * b.real > 0):
                return False
            first = a, b
        elif not _close(a * first[1], b * first[0], tolerance, exact=False):  # a / b is what it was at the first point
            return False
        compared += 1
    return compared >= _MIN_POINTS


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
    # Schwartz 1980: unequal polynomials of degree d agree at a point drawn from N with a probability of at most d / N.
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
        return Fraction(_OPERATORS[node.op](a, b))
    return complex(_OPERATORS[node.op](complex(a), complex(b)))


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
