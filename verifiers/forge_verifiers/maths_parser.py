r"""Reads mathematical answers, LaTeX or plain, into trees.

In: text. Out: an `Answer`, or `NotMathsError`. Waits for nothing; size and depth are bounded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal

MAX_CHARS = 1_000
"""Longer texts are no answers."""
_MAX_SYMBOLS = 200
_MAX_DEPTH = 40
_MAX_DIGITS = 300
_GREEK = "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|nu|rho|sigma|tau|phi|omega"
_CALLS = frozenset(
    ["sqrt", "sin", "cos", "tan", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "exp", "ln", "log", "abs"]
)
_DROPPED = re.compile(
    r"\\(?:left|right|displaystyle|quad|qquad|,|;|!|:| )|\\(?:text|mathrm|mbox|textbf)\s*\{[^{}]*\}"
    r"|\^\s*\{?\\circ\}?|[$°]"
)
_SPELLED = (
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
    (re.compile(r"\\(?:cdot|times)|[\u00d7\u00b7]|\*\*"), lambda m: "^" if m[0] == "**" else "*"),
    (re.compile(r"\\div|\u00f7"), "/"),
    (re.compile(r"[\u2212\u2013]"), "-"),
    (re.compile(r"π"), r"\\pi "),
    (re.compile(r"√"), r"\\sqrt "),
    (re.compile(r"\\(?=[{}%])"), ""),
    (re.compile(r"\\operatorname\{(\w+)\}"), r"\\\1 "),
    (re.compile(r"(?<![\d.])(\d{1,3}(?:,\d{3})+)(?![\d,])"), lambda m: m[0].replace(",", "")),
)
_SYMBOL = re.compile(r"\s*(?:(\d+\.?\d*|\.\d+)|\\?([A-Za-z]+)|([-+*/^!%|=(){}\[\],_]))")


class NotMathsError(ValueError):
    """A text that is no mathematical answer, or a larger one than is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of an expression."""

    op: Literal["number", "decimal", "var", "constant", "call", "neg", "!", "+", "-", "*", "/", "^"]
    args: tuple[Node, ...] = ()
    name: str = ""
    number: Fraction = Fraction(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One or several expressions, and what holds them together."""

    kind: str
    """"value", "equation" (two parts), "set", or the brackets of a tuple or an interval, such as "(]"."""
    parts: tuple[Node, ...]


def variables(node: Node) -> frozenset[str]:
    """Names of the variables in an expression."""
    found, left = set(), [node]
    while left:
        this = left.pop()
        left.extend(this.args)
        if this.op == "var":
            found.add(this.name)
    return frozenset(found)


@lru_cache(maxsize=8192)
def parse_answer(text: str) -> Answer:
    """Reads an answer.

    Raises:
        NotMathsError: the text is no mathematics that is read here, or too large.
    """
    if len(text) > MAX_CHARS:
        raise NotMathsError(f"{len(text)} characters; at most {MAX_CHARS} are read")
    clean = _DROPPED.sub(" ", text)
    if not re.fullmatch(r"\s*[(\[{].*[)\]}]\s*", clean.replace("\\", ""), re.DOTALL):
        for pattern, spelling in _SPELLED:
            clean = pattern.sub(spelling, clean)
    else:  # within brackets a comma separates
        for pattern, spelling in _SPELLED[:-1]:
            clean = pattern.sub(spelling, clean)
    symbols = _symbols(clean.strip().removesuffix("."))
    return _answer(symbols)


def _symbols(text: str) -> list[str]:
    symbols: list[str] = []
    at = 0
    while at < len(text):
        found = _SYMBOL.match(text, at)
        if found is None:
            if text[at:].isspace():
                break
            raise NotMathsError(f"cannot read {text[at : at + 10]!r}")
        number, word, sign = found.groups()
        if number is not None and len(number) > _MAX_DIGITS:
            raise NotMathsError(f"a number of {len(number)} digits; at most {_MAX_DIGITS} are read")
        symbols.extend([number or sign] if word is None else _words(word))
        at = found.end()
        if len(symbols) > _MAX_SYMBOLS:
            raise NotMathsError(f"more than {_MAX_SYMBOLS} symbols")
    return symbols


def _words(word: str) -> list[str]:
    if word in _CALLS or word in {"pi", "frac"} or re.fullmatch(_GREEK, word):
        return [word]
    if len(word) > 2:
        raise NotMathsError(f"{word!r} is a word")  # else anagrams would be equal products
    return list(word)


def _answer(symbols: list[str]) -> Answer:
    if not symbols:
        raise NotMathsError("empty")
    first, last = symbols[0], symbols[-1]
    if first in "([{" and last in ")]}" and len(symbols) > 2:
        inner = _split(symbols[1:-1], ",")
        if inner is not None and (len(inner) > 1 or first == "{"):
            kind = "set" if first == "{" else first + last
            return Answer(kind=kind, parts=tuple(_expression(part) for part in inner))
    sides = _split(symbols, "=")
    if sides is not None and len(sides) == 2:
        return Answer(kind="equation", parts=(_expression(sides[0]), _expression(sides[1])))
    parts = _split(symbols, ",")
    if parts is not None and len(parts) > 1:  # "1, 2" lists what a set holds
        return Answer(kind="set", parts=tuple(_expression(part) for part in parts))
    return Answer(kind="value", parts=(_expression(symbols),))


def _split(symbols: list[str], separator: str) -> list[list[str]] | None:
    """Parts between separators outside of brackets; None where brackets do not close."""
    depth = 0
    parts: list[list[str]] = [[]]
    for symbol in symbols:
        depth += (symbol in "([{") - (symbol in ")]}")
        if depth < 0:
            return None
        if symbol == separator and depth == 0:
            parts.append([])
        else:
            parts[-1].append(symbol)
    return parts


def _expression(symbols: list[str]) -> Node:
    reader = _Reader(symbols)
    node = reader.sum()
    if reader.at != len(symbols):
        raise NotMathsError(f"cannot read {''.join(symbols[reader.at :])[:20]!r}")
    return node


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

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise NotMathsError(f"nested more than {_MAX_DEPTH} deep")
        node = self.product()
        while self.peek() in {"+", "-"}:
            op: Literal["+", "-"] = "+" if self.take() == "+" else "-"
            node = Node(op=op, args=(node, self.product()))
        self.depth -= 1
        return node

    def product(self) -> Node:
        node = self.signed()
        while (symbol := self.peek()) and symbol not in "+-)]},=|%!^_":
            op: Literal["*", "/"] = "/" if symbol == "/" else "*"
            if symbol in "*/":
                self.take()
                node = Node(op=op, args=(node, self.signed()))
            elif symbol[0].isdigit() or symbol[0] == ".":
                raise NotMathsError("a number after a factor; write * between them")
            else:
                node = Node(op="*", args=(node, self.power()))
        return node

    def signed(self) -> Node:
        sign = 1
        while self.peek() in {"+", "-"}:
            sign = -sign if self.take() == "-" else sign
        node = self.power()
        return node if sign > 0 else Node(op="neg", args=(node,))

    def power(self) -> Node:
        node = self.atom()
        while self.peek() in {"!", "%"}:
            hundredth = Node(op="number", number=Fraction(1, 100))
            node = Node(op="!", args=(node,)) if self.take() == "!" else Node(op="*", args=(node, hundredth))
        if self.peek() == "^":
            self.take()
            self.depth += 1
            if self.depth > _MAX_DEPTH:
                raise NotMathsError(f"nested more than {_MAX_DEPTH} deep")
            exponent = self.group("{", "}") if self.peek() == "{" else self.signed()
            self.depth -= 1
            node = Node(op="^", args=(node, exponent))
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
            return Node(op="decimal" if "." in symbol else "number", number=Fraction(symbol.removesuffix(".")))
        if symbol == "frac":
            return Node(op="/", args=(self.argument(), self.argument()))
        if symbol in _CALLS:
            return self.call(symbol)
        if symbol in {"pi", "e", "i"}:
            return Node(op="constant", name=symbol)
        if symbol.isalpha():
            return self.variable(symbol)
        raise NotMathsError(f"cannot read {symbol!r} here")

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
        if name == "sqrt" and self.peek() == "[":
            degree = self.group("[", "]")
            one = Node(op="number", number=Fraction(1))
            return Node(op="^", args=(self.argument(), Node(op="/", args=(one, degree))))
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise NotMathsError(f"nested more than {_MAX_DEPTH} deep")
        exponent = None
        if self.peek() == "^":  # sin^2 x
            self.take()
            exponent = self.group("{", "}") if self.peek() == "{" else self.atom()
        argument = self.argument() if name == "sqrt" or self.peek() in {"(", "{"} else self.power()
        self.depth -= 1
        node = Node(op="call", name=name, args=(argument,))
        return node if exponent is None else Node(op="^", args=(node, exponent))
