r"""Reads one mathematical expression, LaTeX or plain, into a tree.

In: text. Out: a `Node`, or `NotMathsError`. Waits for nothing; size and depth are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

_MAX_SYMBOLS = 200
_MAX_DEPTH = 40
_MAX_DIGITS = 300
_MAX_EXPONENT = 300
_MAX_LETTERS = 4
GREEK = "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|nu|rho|sigma|tau|phi|omega"
"""Names of variables, with or without a backslash."""
CALLS = frozenset(
    [
        "sqrt",
        "sin",
        "cos",
        "tan",
        "sec",
        "csc",
        "cot",
        "arcsin",
        "arccos",
        "arctan",
        "sinh",
        "cosh",
        "tanh",
        "exp",
        "ln",
        "log",
        "abs",
    ]
)
"""Functions of one argument."""
_SYMBOL = re.compile(
    r"\s*(?:((?:\d+\.\d*|\.\d+|1)[eE][+-]?\d+|\d+e\d+|\d+E[+-]?\d+|\d+\.?\d*|\.\d+)"  # "2e-1" is 2e minus 1
    r"|(\\?)([A-Za-z]+)|([-+*/^!|(){}\[\],_°∞]))"
)
_NAMES = {"∞": "infinity", "infty": "infinity", "oo": "infinity", "inf": "infinity", "asin": "arcsin"} | {
    "acos": "arccos",
    "atan": "arctan",
    "lg": "log",
}
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
